"""Recipes of published comparisons as recipes of this package, for rank_evidence.py.

They were written from a table of facts without its outcomes.

Conventions. NVFP4 is E2M1 in blocks of 1x16 with E4M3 scales and a tensor scale, MXFP4 is E2M1 in 1x32 with
power-of-two scales by OCP's floor rule. What a row does not state is as in `nvfp4`: gradients stochastic,
weights 16x16, rotation of wgrad; of MXFP4: nearest, 1x32. A number of blocks kept in bf16 is the same
fraction of the 6 blocks here, rounded up; in `alto_debug`, of 6 blocks itself, it is the number. Stochastic
rounding of x or w is that of fprop and of the same tensor's backward operand. Local outer scales are those of
1x128 elements, of 16 rows for weights in tiles. A GEMM's own rounding, delayed refreshing of scales, and
schedules are no part of an operand's error.
"""

from transfer_schemes import SCHEMES

from ablate.numerics.spec import BlockScale, Hadamard, Outer, Quant, Range
from ablate.recipes import PRESETS
from ablate.recipes.layers import Match
from ablate.recipes.recipe import Dgrad, Fprop, Layers, Recipe, Rule, Wgrad

NEAREST, DRAWN = Quant(), Quant(rounding="stochastic")
TILED = Quant(block="16x16")
LOCAL = {"outer": Outer(granularity="block:128")}
UE5M3 = {"scale": BlockScale(format="ue5m3", zero="one")}


def _mx(rounding: str = "nearest", block: str = "1x32", scale: str = "floor", **more: object) -> Quant:
    mapped = {"range": Range(map_to=4.0)} if scale == "floor" else {}
    form = BlockScale(format="e8m0", rounding=scale)
    return Quant(block=block, scale=form, outer=None, rounding=rounding, **(mapped | more))


def _recipe(
    x: Quant, w: Quant, g: Quant, size: int = 0, signs: str = "fixed", gt: Quant | None = None, **kept: object
) -> Recipe:
    """Return a recipe with one quantiser for each tensor, and a rotation of wgrad.

    Args:
        x: quantiser of the activations.
        w: quantiser of the weights.
        g: quantiser of the gradients.
        size: size of the rotation; 0: none.
        signs: its signs.
        gt: quantiser of wgrad's copy of the gradient; None: as `g`.
        kept: fields of `Layers`.
    """
    turn = Hadamard(size=size, signs=signs) if size else None
    wgrad = Wgrad(g=gt or g, x=x, hadamard=turn)
    return Recipe(fprop=Fprop(x=x, w=w), dgrad=Dgrad(g=g, w=w), wgrad=wgrad, layers=Layers(**kept))


def _with(quant: Quant, **fields: object) -> Quant:
    return quant.model_copy(update=fields)


def _rotated(recipe: Recipe, product: str, size: int) -> Recipe:
    turned = getattr(recipe, product).model_copy(update={"hadamard": Hadamard(size=size)})
    return recipe.model_copy(update={product: turned})


def _backward(quant: Quant, size: int) -> Recipe:
    turn = Hadamard(size=size, signs="per_call") if size else None
    return Recipe(dgrad=Dgrad(g=quant, w=quant, hadamard=turn), wgrad=Wgrad(g=quant, x=quant, hadamard=turn))


def _forward(quant: Quant) -> Recipe:
    return Recipe(fprop=Fprop(x=quant, w=quant, hadamard=Hadamard(size=32, signs="none")))


def _tail(recipe: Recipe, count: int) -> Recipe:
    return recipe.model_copy(update={"layers": Layers(skip_last=count)})


def _deep(recipe: Recipe, last: Recipe) -> Recipe:
    """Return a recipe with another one's products in the last block."""
    rules = (Rule(match=Match(blocks="last:1"), use=last.products),)
    return recipe.model_copy(update={"layers": Layers(rules=rules)})


NVFP4, MXFP8, FP8 = (PRESETS[name]() for name in ("nvfp4", "mxfp8", "fp8_current"))
PLAIN = _recipe(NEAREST, NEAREST, NEAREST)
TWO_D = _recipe(NEAREST, TILED, NEAREST)
X_DRAWN = _recipe(DRAWN, NEAREST, NEAREST)
UNTURNED = _recipe(NEAREST, TILED, DRAWN)
TRUNCATED, CEILED = _mx(), _mx(scale="ceil")
QUEST = _mx(range=Range(statistic="std:2.92247856"))
SHRUNK = _mx("stochastic", range=Range(map_to=4.0, prescale=0.75), bits=24)
ROW = (_mx(), _mx(block="32x32"), _mx("stochastic"))
LOCALS = (
    _with(NEAREST, **LOCAL),
    _with(TILED, outer=Outer(granularity="rows:16")),
    _with(DRAWN, **LOCAL),
)
FINE = (_with(NEAREST, **UE5M3), _with(TILED, **UE5M3), _with(DRAWN, **UE5M3))
COARSE = tuple(
    _with(quant, block=block) for quant, block in zip(FINE, ("1x32", "32x32", "1x32"), strict=True)
)
_UNSPLIT = {
    name: getattr(PRESETS["tetrajet2"](), name).model_copy(
        update={"x": _with(getattr(PRESETS["tetrajet2"](), name).x, transform=None)}
    )
    for name in ("fprop", "wgrad")
}
TETRAJET = PRESETS["tetrajet2"]().model_copy(update=_UNSPLIT)
_MFU = _recipe(*ROW, gt=TRUNCATED)
_HYBRID = Recipe(
    fprop=Fprop(x=ROW[0], w=ROW[1]), dgrad=Dgrad(g=LOCALS[2], w=LOCALS[1]), wgrad=Wgrad(g=ROW[2], x=ROW[0])
)
_QUARTET2 = {
    "NVIDIA": SCHEMES["full nvidia plain"].recipe,
    "NVIDIA 4/6": SCHEMES["full nvidia 4/6"].recipe,
    "TetraJet": SCHEMES["full tetrajet2 plain"].recipe,
    "Quartet II": SCHEMES["full quartet2 4/6"].recipe,
}
_ATTENTION = Match(name="*.attention.*")

SETTINGS: dict[str, dict[str, Recipe]] = {
    "nv_8b": {"p002": NVFP4, "p003": _recipe(TRUNCATED, TRUNCATED, _mx("stochastic"), 32)},
    "nv_1p2b": {"p004": PLAIN, "p005": _recipe(NEAREST, NEAREST, DRAWN)},
    "nv_1p2b last 4 blocks in bf16": {
        "p006": PLAIN,
        "p009": _recipe(NEAREST, NEAREST, DRAWN),
        "p010": X_DRAWN,
        "p011": _recipe(NEAREST, DRAWN, NEAREST),
    },
    "nv_1p2b_rht": {
        "p012": UNTURNED,
        "p013": NVFP4,
        "p014": _rotated(UNTURNED, "fprop", 16),
        "p015": _rotated(UNTURNED, "dgrad", 16),
    },
    "nv_1p2b_hsize": {
        f"p{17 + number:03}": _recipe(NEAREST, TILED, DRAWN, size) for number, size in enumerate((4, 16, 128))
    },
    "nv_12b_hsize": {
        f"p{20 + number:03}": _recipe(NEAREST, TILED, DRAWN, size) for number, size in enumerate((4, 16, 128))
    },
    "nv_12b_signs": {
        f"p{23 + number:03}": _recipe(NEAREST, TILED, DRAWN, 16, signs)
        for number, signs in enumerate(("fixed", "per_call", "none"))
    },
    "quartet_fwd": {
        "p026": _forward(_mx("stochastic")),
        "p027": _forward(TRUNCATED),
        "p028": _forward(QUEST),
    },
    "quartet_bwd": {
        "p029": _backward(SHRUNK, 32),
        "p030": _backward(TRUNCATED, 32),
        "p031": _backward(QUEST, 32),
    },
    "q2_nanochat_560M": dict(zip(("p033", "p034", "p035", "p036"), _QUARTET2.values(), strict=True)),
    "q2_nanochat_1p9B": dict(zip(("p038", "p039", "p040", "p041"), _QUARTET2.values(), strict=True)),
    "tseng_345M": {
        "p043": _backward(TRUNCATED, 0),
        "p044": _backward(TRUNCATED, 64),
        "p045": _backward(SHRUNK, 64),
    },
    "tseng_345M_g": {
        f"p{51 + number:03}": _backward(SHRUNK, size) for number, size in enumerate((32, 64, 128))
    },
    "averis_0p6B": {"p056": NVFP4, "p057": PRESETS["averis"]()},
    **{
        setting: {
            first: _rotated(PRESETS["hif4"](), "wgrad", 64),
            second: _recipe(CEILED, CEILED, _mx("stochastic", scale="ceil"), 32),
        }
        for setting, first, second in (
            ("hif4_1B", "p062", "p063"),
            ("hif4_llama8B", "p065", "p066"),
            ("hif4_moe30B", "p068", "p069"),
        )
    },
    "mfu_8b": {
        "p077": NVFP4.model_copy(update={"layers": Layers(last_fraction=0.125)}),
        "p078": NVFP4,
        "p079": _rotated(_MFU, "wgrad", 32),
        "p080": _recipe(*LOCALS),
        "p081": UNTURNED,
        "p082": _recipe(*LOCALS, 16),
        "p083": _rotated(_HYBRID, "wgrad", 32),
        "p084": _rotated(_HYBRID, "wgrad", 16),
        "p085": _deep(_recipe(*LOCALS), _MFU),
        "p086": _MFU,
        "p087": _deep(UNTURNED, _MFU),
    },
    "ue5m3_8b": {
        "p089": _recipe(*FINE, 16, last_fraction=0.15),
        "p090": _recipe(*FINE),
        "p091": _recipe(*FINE),
        "p092": _recipe(*COARSE),
        "p093": _recipe(NEAREST, TILED, DRAWN, 16, last_fraction=0.15),
        "p094": UNTURNED,
    },
    "rds_llama3_eager": {
        "p096": MXFP8,
        "p097": NVFP4,
        "p098": NVFP4,
        "p099": NVFP4.model_copy(update={"layers": Layers(last_fraction=0.15)}),
        "p100": NVFP4.model_copy(update={"layers": Layers(last_fraction=0.15)}),
    },
    "rds_llama3_graph": {"p102": NVFP4, "p103": MXFP8},
    "rds_qwen3_sft": {
        "p105": MXFP8,
        "p106": NVFP4.model_copy(update={"layers": Layers(last_fraction=0.3)}),
        "p107": NVFP4.model_copy(update={"layers": Layers(last_fraction=0.15)}),
    },
    "titan4821": {
        "p114": MXFP8.model_copy(update={"layers": Layers(rules=(Rule(match=Match(name="*.mlp.*")),))}),
        "p115": NVFP4.model_copy(
            update={"layers": Layers(rules=(Rule(match=_ATTENTION, use=MXFP8.products),))}
        ),
    },
    "fp4route_s42": {"p121": NVFP4, "p122": MXFP8},
    "fp4route_s43": {"p124": NVFP4, "p125": MXFP8},
    "inf_slack1": {"p127": FP8, "p128": NVFP4},
    "inf_report": {
        "p146": FP8,
        "p147": Recipe(
            **{
                product: getattr(FP8, product).model_copy(
                    update={
                        name: _with(
                            getattr(getattr(FP8, product), name), outer=Outer(granularity="row", bound=1.0)
                        )
                        for name in getattr(FP8, product).operands
                    }
                )
                for product in ("fprop", "dgrad", "wgrad")
            }
        ),
    },
    "n4r_1M": {"p149": NVFP4, "p150": NVFP4},
    "alto_gptoss_seeds": {
        "p154": _recipe(NEAREST, TILED, DRAWN, 32, "per_call"),
        "p155": _recipe(*ROW, 32, "per_call"),
        "p156": _recipe(*FINE, 32, "per_call"),
    },
    "alto_debug_5k": {
        "p158": _recipe(TRUNCATED, TRUNCATED, TRUNCATED),
        **{f"p{159 + number}": _tail(PLAIN, 2 + number) for number in range(3)},
        **{f"p{162 + number}": _tail(X_DRAWN, 4 - number) for number in range(3)},
        "p165": _tail(TWO_D, 2),
        "p166": _tail(_recipe(DRAWN, TILED, NEAREST), 4),
        "p167": _tail(_rotated(X_DRAWN, "wgrad", 16), 4),
        "p168": _tail(_rotated(PLAIN, "wgrad", 16), 2),
        "p169": _tail(PLAIN, 1),
        "p170": PLAIN,
        "p171": _tail(_rotated(PLAIN, "wgrad", 16), 1),
    },
    "alto_debug_20k": {
        "p173": _recipe(TRUNCATED, TRUNCATED, TRUNCATED),
        "p174": _recipe(TRUNCATED, TRUNCATED, TRUNCATED),
        **{f"p{175 + number}": _tail(PLAIN, 2 + number) for number in range(3)},
        "p178": _tail(X_DRAWN, 3),
        "p179": _tail(X_DRAWN, 4),
        "p180": _tail(TWO_D, 2),
        "p181": _tail(TWO_D, 3),
        "p182": PLAIN,
    },
    "tetrajet2_150M": {"p206": NVFP4, "p207": TETRAJET},
    "amd_8B": {
        "p208": FP8,
        "p209": _rotated(_recipe(TRUNCATED, TRUNCATED, TRUNCATED), "wgrad", 32),
        "p210": _recipe(TRUNCATED, TRUNCATED, TRUNCATED, gt=_mx("stochastic")),
        "p211": _recipe(TRUNCATED, TRUNCATED, TRUNCATED, 32, "per_call"),
    },
}
"""Recipes by setting and number of the row."""
LEFT_OUT = {
    "nv_1p2b, p007 and p008": "blocks kept of a depth that is not stated",
    "nv_1p2b_hsize, p016; tseng_345M_g, p054": "no rotations by 2 or 256 here",
    "chon_gla": "which operators CHON keeps in higher precision is not stated",
    "intfp_1B, intfp_3B": "no INT8 elements here",
    "rds_dsv3_16b, alto_ossdebug_2k, 3k, 10k": "experts, or blocks kept of a depth that is not stated",
    "alto_attn": "attention's own products",
    "tseng_1p3B_42B, tseng_6p7B, titan4203, ling6, inf_slack4_*, inf_scal_*": "one quantised recipe",
    "mod_down, lumen_06B, vuk_29M": "one quantised recipe",
}
"""Settings without a place, with the reason."""
