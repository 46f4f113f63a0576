"""Published schemes of FP4 training as recipes of this package, for the transfer benchmark (transfer.py).

Truth: final losses of public pre-training runs on C4 (sequence 512, batch 512, one seed each) by scheme,
number of parameters and tokens, from github.com/IST-DASLab/Quartet-II, for_plots/runs.json (arXiv
2601.22813). A scheme is selected by the columns of that table; its recipe follows the training code of the
same repository (src/models/quantization). What that code does beyond the table's columns:

- A quantised forward pass alone multiplies the backward products in bf16 by the quantised copies.
- A quantised backward pass alone starts from x and w in bf16; its rotations draw new signs in each call.
- `fsquare` concerns weights; activations keep blocks of 1x16.
- `nvidia` rotates wgrad by 16, `tetrajetv2` both backward products by 32: defaults of the code, which the
  table's column (32 in every row) does not show. tetrajetv2 has no OutControl, no OsciReset, no scale of 128.
- `IsolatedEdenQuantizer` rotates E, quantises it, and rotates back before it multiplies by W in bf16.

Not modelled: signs that dgrad and wgrad share, ties away from zero, zero scales that become 1, the factor of
MS-EDEN in the tensor scale (here in block scales), rotation of IsolatedEden along rows (here along the
contraction), the tensor scale of `four_over_six` in nvidia's stochastic operands.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ablate.numerics.spec import Hadamard, Outer, Quant, Range, Select
from ablate.recipes.presets import EDEN, UNBIASED
from ablate.recipes.recipe import Dgrad, Fprop, Recipe, Wgrad

STRATA = ("forward", "backward", "full")
PLAIN = Quant()
SIX_OR_FOUR = Quant(select=Select(among="scales"), outer=Outer(bound=256.0))
EDEN_QUANT = Quant(rounding="ms_eden", range=Range(headroom=EDEN), outer=Outer(bound=256.0))
DRAWN = Quant(rounding="stochastic", range=Range(headroom=UNBIASED), bits=24)
BACKWARD = {"eden": EDEN_QUANT, "sr": DRAWN}
TABLE = {  # columns of the table that a scheme leaves unused
    "fsquare": "",
    "fhadamard_dim": "",
    "fscale_override": "1.0",
    "ffour_over_six": "False",
    "bunbiased": "",
    "bscale_dtype": "",
    "bhadamard_dim": "",
    "bbackward_scheme": "EW_EtX",
    "sscheme": "",
    "shadamard_dim": "32",
    "sdelayed_amax": "False",
    "sfour_over_six": "False",
}


@dataclass(frozen=True)
class Scheme:
    """One published scheme."""

    stratum: str
    """One of `STRATA`: the passes that it quantises."""
    factors: tuple[str, str]
    """Two crossed factors of its stratum's factorial, for the bootstrap: format or method, and variant."""
    published: Mapping[str, str]
    """Columns of the published table that select its runs."""
    recipe: Recipe

    @property
    def facts(self) -> dict[str, float]:
        """Facts that are known without a run: columns of the linear rules, the first four of the shorter."""
        operands = [quant for _, quant in self.recipe.products.quantised()]
        backward = [self.recipe.dgrad, self.recipe.wgrad]
        return {
            "forward": float(self.recipe.fprop.x is not None),
            "backward products": float(sum(product.g is not None for product in backward)),
            "square weights": float(any(quant.block == "16x16" for quant in operands)),
            "four over six": float(any(quant.select is not None for quant in operands)),
            "MS-EDEN": float(any(quant.rounding == "ms_eden" for quant in operands)),
        }


def _forward(w: Quant, x: Quant, rotated: bool = False) -> Recipe:
    rotation = Hadamard(size=16, signs="none") if rotated else None
    return Recipe(
        fprop=Fprop(x=x, w=w, hadamard=rotation),
        dgrad=Dgrad(dequantised=True),
        wgrad=Wgrad(dequantised=True),
    )


def _backward(quant: Quant, dgrad: str, wgrad: bool, size: int | None = 128) -> Recipe:
    rotation = Hadamard(size=size, signs="per_call") if size else None
    return Recipe(
        dgrad=Dgrad(g=quant, w=quant if dgrad == "gw" else None, hadamard=rotation) if dgrad else Dgrad(),
        wgrad=Wgrad(g=quant, x=quant, hadamard=rotation) if wgrad else Wgrad(),
    )


def _from_copies(forward: Quant, gradient: Quant, size: int) -> Recipe:
    """Backward operands requantised from the forward copies, both products rotated."""
    again, rotation = gradient.model_copy(update={"source": "forward"}), Hadamard(size=size, signs="per_call")
    return Recipe(
        fprop=Fprop(x=forward, w=forward),
        dgrad=Dgrad(g=gradient, w=again, hadamard=rotation),
        wgrad=Wgrad(g=gradient, x=again, hadamard=rotation),
    )


def _nvidia(quant: Quant) -> Recipe:
    weight = quant.model_copy(update={"block": "16x16"})
    return Recipe(
        fprop=Fprop(x=quant, w=weight),
        dgrad=Dgrad(g=DRAWN, w=weight),
        wgrad=Wgrad(g=DRAWN, x=quant, hadamard=Hadamard(signs="per_call")),
    )


def _forwards() -> dict[str, Scheme]:
    clipped = PLAIN.model_copy(update={"range": Range(headroom=0.92)})
    rms = PLAIN.model_copy(update={"range": Range(statistic="rms:2.92247856")})
    variants = {"plain": PLAIN, "rotated": PLAIN, "4/6": SIX_OR_FOUR, "clipped": clipped}
    schemes = {}
    for square in (False, True):
        for variant, quant in variants.items():
            if square and variant == "clipped":
                continue  # not published
            weight = quant.model_copy(update={"block": "16x16"}) if square else quant
            name = f"forward {'16x16' if square else '1x16'} {variant}"
            columns = {
                "group": "forward_main",
                "fsquare": str(square),
                "fhadamard_dim": "16" if variant == "rotated" else "1",
                "fscale_override": "0.92" if variant == "clipped" else "1",
                "ffour_over_six": str(variant == "4/6"),
            }
            schemes[name] = Scheme(
                "forward", (name.split()[1], variant), columns, _forward(weight, quant, variant == "rotated")
            )
    for variant, rotated in (("plain", False), ("rotated", True)):
        columns = {
            "group": "forward_quartet",
            "fhadamard_dim": "16" if rotated else "1",
            "fscale_override": "1",
        }
        schemes[f"forward rms {variant}"] = Scheme(
            "forward", ("rms", variant), columns, _forward(rms, rms, rotated)
        )
    return schemes


def _backwards() -> dict[str, Scheme]:
    schemes = {}
    for method, quant in BACKWARD.items():
        for (dgrad, wgrad), code in {
            ("gw", False): "Q(E)Q(Wt)t_EtX",
            ("", True): "EW_Q(Et)Q(Xt)t",
            ("gw", True): "Q(E)Q(Wt)t_Q(Et)Q(Xt)t",
            ("g", True): "Q(E)W_Q(Et)Q(Xt)t",
            ("g", False): "Q(E)W_EtX",
        }.items():
            size = None if (method, dgrad, wgrad) == ("sr", "g", False) else 128
            columns = {
                "group": "bnrq" if dgrad == "g" else "backward_main",
                "bunbiased": method,
                "bscale_dtype": "e4m3",
                "bhadamard_dim": str(size or 1),
                "bbackward_scheme": code,
            }
            which = {"gw": "dgrad", "g": "dgrad.g", "": ""}[dgrad]
            products = "+".join(filter(None, [which, "wgrad" if wgrad else ""]))
            schemes[f"backward {method} {products}"] = Scheme(
                "backward", (method, products), columns, _backward(quant, dgrad, wgrad, size)
            )
    return schemes


def _fulls() -> dict[str, Scheme]:
    delayed = EDEN_QUANT.model_copy(update={"outer": Outer(bound=256.0, statistic="delayed:1")})
    quartet = {"group": "quartetv2", "sscheme": "quartet_v2", "shadamard_dim": "128"}
    nvidia = {"group": "nvidia", "sscheme": "nvidia"}
    tetrajet = {"group": "tetrajetv2", "sscheme": "tetrajetv2"}
    of_four_over_six = {"sfour_over_six": "True"}
    schemes = {
        ("quartet2", "4/6"): (quartet | of_four_over_six, _from_copies(SIX_OR_FOUR, EDEN_QUANT, 128)),
        ("quartet2", "plain"): (quartet, _from_copies(PLAIN, EDEN_QUANT, 128)),
        ("quartet2", "by 32"): (quartet | {"shadamard_dim": "32"}, _from_copies(PLAIN, EDEN_QUANT, 32)),
        ("quartet2", "delayed"): (quartet | {"sdelayed_amax": "True"}, _from_copies(PLAIN, delayed, 128)),
        ("nvidia", "plain"): (nvidia, _nvidia(PLAIN)),
        ("nvidia", "4/6"): (nvidia | of_four_over_six, _nvidia(SIX_OR_FOUR)),
        ("tetrajet2", "plain"): (tetrajet, _from_copies(PLAIN, DRAWN, 32)),
    }
    return {
        f"full {' '.join(factors)}": Scheme("full", factors, columns, recipe)
        for factors, (columns, recipe) in schemes.items()
    }


BASELINE: Mapping[str, str] = {"group": "baseline"}
LEFT_OUT = {
    "quartetv2, rotation by 32, delayed amax": "not published at 97 tokens a parameter of 100 M",
    "backward_quartet: MXFP4 backward, stochastic or to nearest": "not published at 100 M",
    "orig_albert_tseng, fixed_albert_tseng: MXFP4 backward": "not published at 100 M",
}
"""Published configurations without a place in this benchmark, with the reason."""
SCHEMES = {**_forwards(), **_backwards(), **_fulls()}
