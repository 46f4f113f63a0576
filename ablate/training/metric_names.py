"""Names of metrics: their parts, and what trackers, counts, audits and figures derive from them.

A name is the text that records, ledgers and MLflow store. Its parts are separated by slashes:

    val/loss                                family, metric
    quant/fprop.x/sqnr_db                   family, operand slot, metric: the mean over layers
    quant/fprop.x/blocks.0.mlp.up/sqnr_db   family, operand slot, layer, metric
    gemm/wgrad/rel_mse                      family, product (in `slot`), metric
    gemm/wgrad/blocks.0.mlp.up/gain         family, product, layer, metric
    tokens                                  metric

Only this file splits and joins names and defines what families mean; all other files read the fields of
`parse(text)`. Workloads of other packages may record any metric whose name is `recordable`. Only the
families `quant`, `gemm` and `mean` have slots and layers; in any other name, everything after the first slash
is the metric. Therefore `str(parse(text)) == text`.
"""

import math
import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache

FIRST_NONFINITE = "nan/first_step"
"""Metric of the record that ends a run: the step whose loss or gradient was not finite."""
GUARD_STOPPED = "guard/stopped"
"""Metric of the record that ends a run: the step whose finite loss or gradient norm the guard rejected."""
ENDINGS = frozenset({FIRST_NONFINITE, GUARD_STOPPED})
"""Metrics that mark the last record of a run that diverged."""
DAMAGE = "damage"
"""Family of the metrics that compare a forked member with its baseline. They exist in MLflow alone, since the
ledger can compute them."""

PRODUCT_BITS = "throughput/product_bits"
"""Bits of the operands that a CPU multiplies for a bf16 product: 16 by its bf16 instructions, 32 as fp32."""
ARITHMETIC = "throughput/arithmetic"
"""Number that stands for the kind of processor that computed (`provenance.arithmetic`)."""
STEPS_TO = "steps_to"
"""Family of the metrics that no trial records: steps after which val/loss is down to a target,
`steps_to/2.5`."""
FORK = "fork"
"""Family of the readings of single windows: `fork/<position>/<window>/loss` and `.../loss_bf16`."""
EVALUATED = "evaluated"
"""Family of the readings of parts of the validation data, `evaluated/<part>/loss`: means over positions at
the longest window."""

QUANTITIES = ("loss", "kl", "extreme")
"""Readings of an evaluation by another recipe: the mean loss; the divergence KL(bf16 || reading) of its
distributions of the next token from those of bf16 on the same weights, nats a token; and the share of the
data's tokens whose probability differs from bf16's by more than a factor of 2."""

IMBALANCE = "train/imbalance"
"""Load-balancing loss of the last step, unweighted, as the mean over blocks: 1 if all experts have equal
loads."""

VARIANCE, SQUARED_BIAS = "grad/variance", "grad/squared_bias"
"""Variance and squared bias of the gradient under random rounding, over the squared norm of the gradient
without quantisation."""
PRODUCTS = "gemm"
"""Family of the errors of products."""

_CELL = re.compile(rf"{FORK}/([0-9]+)/(0*[1-9][0-9]*)/(.+)", re.DOTALL)
_PART = re.compile(rf"{EVALUATED}/([0-9]+)/(.+)", re.DOTALL)
"""Names with numbers as records have them: a user's own metric may be `evaluated/gsm8k/accuracy`."""
_OF_WINDOWS = frozenset({FORK, EVALUATED})
_WITH_SLOTS = frozenset({"quant", PRODUCTS, "mean"})
_OF_DATA = frozenset({"train", "val"})
_OF_MACHINE = frozenset({"throughput", "memory"})
_ADDED = frozenset(
    {"throughput", "memory", "quant", "weights", "grad", "nan", "flops", "evaluated", "routing", PRODUCTS}
)
_TRACKED_ERRORS = frozenset({"sqnr_db", "zero_frac"})
FLIPPED, TOKENS_FLIPPED = "routing/flipped", "routing/tokens_flipped"
"""Shares of pairs of a token and an expert, and of tokens, that quantisation changes."""
TOKENS_MEDIAN, TOKENS_MIN = "routing/tokens_median", "routing/tokens_min"
"""Tokens of an expert per micro-batch, over the experts of all layers."""
_UNTRACKED = frozenset({PRODUCT_BITS, ARITHMETIC, VARIANCE, SQUARED_BIAS, TOKENS_MEDIAN, TOKENS_MIN})
_EVENTS = frozenset({"first_step", "steps_skipped"})
_SO_FAR = frozenset({"nan/activation", "nan/steps_skipped"})
_MOST_CACHED = 1 << 17
_LONGEST = 250
_PLAIN = re.compile(r"[/\w.\- :]*")
NAMING = f"names have letters, digits, spaces and / _ - . : @, in at most {_LONGEST} characters"
"""Rule of `recordable`, in words."""


@dataclass(frozen=True, slots=True)
class Name:
    """Parts of a metric's name; `str` is the stored text. ValueError for parts whose text would parse to
    other parts."""

    family: str | None
    slot: str | None
    layer: str | None
    metric: str

    def __post_init__(self) -> None:
        slots = self.family in _WITH_SLOTS
        if self.layer is not None and self.slot is None:
            raise ValueError(f"layer {self.layer!r} without a slot: give slot, such as fprop.x")
        if self.slot is not None and not slots:
            raise ValueError(
                f"slot {self.slot!r} in family {self.family!r}: only {', '.join(sorted(_WITH_SLOTS))} have"
                " slots"
            )
        closed = [self.family, self.slot, *([self.metric] if slots or self.family is None else [])]
        if wrong := [part for part in closed if part is not None and "/" in part]:
            raise ValueError(f"{wrong[0]!r} contains a slash, which separates the parts of a name")

    def __str__(self) -> str:
        return "/".join(
            part for part in (self.family, self.slot, self.layer, self.metric) if part is not None
        )

    def like(self, patterns: Iterable[str]) -> bool:
        """Return True if the whole text matches one of these globs, in which `*` matches slashes too:
        `quant/*/sqnr_db`."""
        text = str(self)
        return any(fnmatchcase(text, pattern) for pattern in patterns)

    @property
    def for_tracker(self) -> bool:
        """True if TensorBoard gets this metric: all but per-layer series, most errors of slots, readings of
        parts of the data, the parts of the gradient's error, and how the processor computes. The ledger keeps
        the rest; MLflow gets fewer (`tracking.runs.key`)."""
        if self.family == "quant":
            return self.slot is not None and self.layer is None and self.metric in _TRACKED_ERRORS
        if self.family == PRODUCTS:
            return self.layer is None
        return self.family != EVALUATED and str(self) not in _UNTRACKED

    @property
    def of_window(self) -> bool:
        """True for a reading of one window or one part of the data, which forked trials alone have."""
        return self.family in _OF_WINDOWS

    @property
    def is_count(self) -> bool:
        """True for a number of values that were not finite."""
        return self.family == "nan" and self.metric not in _EVENTS

    @property
    def is_total(self) -> bool:
        """True for a total of the run so far, whose last record stands for the run; False for a number of one
        interval."""
        return str(self) in _SO_FAR

    @property
    def of_data(self) -> bool:
        """True for a model's score on data, which means nothing for a model that learned nothing."""
        return self.family in _OF_DATA

    @property
    def of_machine(self) -> bool:
        """True for speed and memory, which differ between two runs of one trial."""
        return self.family in _OF_MACHINE


@lru_cache(_MOST_CACHED)
def parse(text: str) -> Name:
    """Return the parts of a name, which any text has. Each distinct text is parsed once and then cached."""
    family, slash, rest = text.partition("/")
    if not slash:
        return Name(None, None, None, text)
    slot, slash, more = rest.partition("/")
    if not slash or family not in _WITH_SLOTS:
        return Name(family, None, None, rest)
    layer, slash, metric = more.rpartition("/")
    return Name(family, slot, layer if slash else None, metric)


def trackable(text: str) -> bool:
    """Return True for the name of a metric, param or tag that MLflow takes: its client's rules."""
    plain = posixpath.normpath(text)
    inside = plain == text and plain != "." and not plain.startswith(("..", "/"))
    return inside and len(text) <= _LONGEST and _PLAIN.fullmatch(text) is not None


@lru_cache(_MOST_CACHED)
def recordable(text: str) -> bool:
    """Return True for a name that a trial may record: text that MLflow takes, but for `@` and for layers,
    which it never gets.
    """
    return text.isprintable() and trackable(str(replace(parse(text), layer=None)).replace("@", "."))


def each_layer(metric: str, family: str = "quant") -> str:
    """Return the glob of a metric of single layers, for an alarm: `quant/*/*/<metric>`, or that of
    `PRODUCTS`."""
    return str(Name(family, "*", "*", metric))


def is_added(text: str) -> bool:
    """Return True for a metric that the platform adds to those that a user's own code logs."""
    return text == "tokens" or parse(text).family in _ADDED


def reading(metric: str) -> str:
    """Return the name of a metric among the readings of a window: `loss` for `val/loss`."""
    return metric.removeprefix("val/")


def by_recipe(quantity: str, recipe: str) -> str:
    """Return the name of a reading, one of `QUANTITIES`, of the weights by another recipe: `loss@nvfp4`."""
    return f"{quantity}@{recipe}"


def target_of(metric: str) -> float | None:
    """Return the val/loss of a metric `steps_to/<loss>`; None for any other metric, and for a target that is
    no positive number."""
    family, _, rest = metric.partition("/")
    try:
        target = float(rest) if family == STEPS_TO else math.nan
    except ValueError:
        return None
    return target if 0 < target < math.inf else None


def plain_metric(reading: str) -> str:
    """Return the name of a reading in a plain run: `val/loss` for `loss`."""
    return f"val/{reading}"


def window_metric(position: int, window: int, metric: str) -> str:
    """Return the name of a plain run's metric at the end of a window: `fork/120/45/loss` of `val/loss` for
    the window of 45 steps that begins after step 120 of the trunk."""
    return f"{FORK}/{position}/{window}/{reading(metric)}"


def cell_of(metric: str) -> tuple[int, int, str] | None:
    """Return position, window and reading of a window's metric; None for any other metric."""
    cell = _CELL.fullmatch(metric)
    return (int(cell[1]), int(cell[2]), cell[3]) if cell else None


def part_metric(number: int, metric: str) -> str:
    """Return the name of a metric of one part of the validation data."""
    return f"{EVALUATED}/{number}/{reading(metric)}"


def part_of(metric: str) -> tuple[int, str] | None:
    """Return number and reading of a metric of one part of the validation data; None for any other metric."""
    part = _PART.fullmatch(metric)
    return (int(part[1]), part[2]) if part else None
