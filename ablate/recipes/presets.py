"""One recipe a paper. Facts from the papers, and from Transformer Engine 2.20.2."""

from ablate.numerics.spec import Hadamard, Quant
from ablate.recipes.recipe import Dgrad, Fprop, Layers, Recipe, Wgrad

ACTIVATION = Quant()
WEIGHT = Quant(block="16x16")
GRADIENT = Quant(rounding="stochastic")


def bf16() -> Recipe:
    """The baseline: every product in bf16 with fp32 accumulation."""
    return Recipe()


def fp32() -> Recipe:
    """Everything in fp32: what bf16 itself costs."""
    return Recipe(dtype="fp32", wgrad=Wgrad(dw="fp32"))


def nvfp4() -> Recipe:
    """NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), as in Transformer Engine, all blocks quantised.

    16x16 weight blocks, stochastic rounding of both copies of dy, a 16-point Hadamard rotation of wgrad with fixed signs.
    """
    return Recipe(
        fprop=Fprop(x=ACTIVATION, w=WEIGHT),
        dgrad=Dgrad(g=GRADIENT, w=WEIGHT),
        wgrad=Wgrad(g=GRADIENT, x=ACTIVATION, hadamard=Hadamard()),
    )


def nvfp4_paper() -> Recipe:
    """`nvfp4` with the last 15 % of the blocks in bf16, as the paper trains. Refuses to model its few other bf16 linears."""
    return nvfp4().model_copy(update={"layers": Layers(last_fraction=0.15)})


PRESETS = {preset.__name__: preset for preset in (bf16, fp32, nvfp4, nvfp4_paper)}
