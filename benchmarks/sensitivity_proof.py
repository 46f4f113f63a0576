"""May damage at amplified errors say which part of a model costs what? Exponents, additivity, ranks.

    python benchmarks/sensitivity_proof.py run --workers 16 --minutes 8 --out FOLDER    # resumable
    python benchmarks/sensitivity_proof.py analyse --rows FOLDER/rows.jsonl

The rows of the page on benchmarks are in benchmarks/sensitivity_proof_rows.jsonl.gz, and those of a second
run, on another text, in benchmarks/sensitivity_proof_second.jsonl.gz. Each has its own bf16 forks.

The damage of one cell of NVFP4 is far below what seeds differ by. With errors amplified by a = 4 it is seen,
and a map of cells is then an extrapolation. It is right only if damage at a = 4 orders cells as damage at
a = 1 does, if the damages of parts add up, and if the map shows more than the size of the errors.

The design, fixed before its first outcome. Annealed forks of bf16 trunks (position 200 of 300, 60 steps
unless a window says otherwise), NVFP4 in some cells, bf16 elsewhere; errors of the chosen operands times a:

    groups       all; each product; each block; attention, mlp: a = 2, 2.8, 4; six of them at a = 1
    cells        each of the 12 layers' forward products: a = 2, 2.8, 4
    halves       20 random halves of the 36 units (layer x product), and their complements: a = 4
    placebo      cells and products whose errors change places within their operand: a = 4
    no clipping  all and products, trunk and forks without clipping: a = 2, 4
    windows      120 and 240 steps: all, products, then blocks: a = 4
    other model  products at a = 1, 2, 4, on 8 seeds
    one step     cells at a = 1 after one step: their direct part
    backward     each block's dgrad and wgrad: a = 4

Seeds are the replicates: 16, other than those of earlier trials. A fork's *total* damage is the loss of its
weights in its own precision minus the loss of the bf16 fork of the same seed and window. Its *direct* part is
its own loss minus that of the same weights in bf16; the rest is *learnt*.

Jobs start stage by stage, all seeds of a stage before the next, so that a cut leaves whole stages.

Added after the outcomes were read: the table of `later_table`, and the map at a = 2 against itself.
"""

import argparse
import math
import os
import random
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from fork_pool import fork, rows, run
from scipy import stats

import ablate
from ablate.recipes.cells import Cell, grid, within
from ablate.recipes.recipe import Recipe
from ablate.training.workloads.gpt import Gpt

SEEDS = range(100, 116)
POSITION, WINDOW, HALVES = 200, 60, 20
_RUN = {"steps": 300, "lr": 1e-3, "context": 64, "batch": 4, "eval_tokens": 16384}
MODELS = {
    "gpt": Gpt(layers=3, width=96, heads=3, **_RUN),
    "free": Gpt(layers=3, width=96, heads=3, clip=None, **_RUN),
    "other": Gpt(layers=4, width=64, heads=2, mlp="relu2", **_RUN),
}
"""The model; the same without clipping; and a second one."""
PRODUCTS = ("fprop", "dgrad", "wgrad")
LARGE = ("all", *PRODUCTS, "attention", "mlp")
"""Groups that may be seen at a = 1."""
BLOCKS = ("block 0", "block 1", "block 2")
GROUPS = (*LARGE, *BLOCKS)
PARTITIONS = {"products": PRODUCTS, "blocks": BLOCKS, "kinds": ("attention", "mlp")}


class Job(NamedTuple):
    """One fork."""

    model: str
    seed: int
    group: str
    """Name of a group of units; `bf16`: none."""
    times: float
    permuted: bool
    window: int


@cache
def units(model: str) -> dict[str, Cell]:
    """Return the units of a model: each layer's three products, by names such as `blocks.0.mlp.up fprop`."""
    return grid(ablate.recipe("nvfp4"), MODELS[model].linear_layers, "layers", "products")


CELLS = tuple(name for name in units("gpt") if name.endswith("fprop"))


@cache
def members(model: str, group: str) -> tuple[str, ...]:
    """Return the names of a group's units."""
    names = [*units(model)]
    word, _, rest = group.partition(" ")
    if word == "half":
        number, _, side = rest.partition(" ")
        half = random.Random(f"half {number}").sample(names, len(names) // 2)
        return tuple(name for name in names if (name in half) == (side == ""))
    if group in names:
        return (group,)
    if word == "block":
        block, _, product = rest.partition(" ")
        return tuple(name for name in names if name.startswith(f"blocks.{block}.") and product in name)
    return tuple(name for name in names if group == "all" or group in name)


@cache
def recipe_of(job: Job) -> Recipe:
    """Return NVFP4 in a group's units with their errors altered, and bf16 elsewhere."""
    if job.group == "bf16":
        return ablate.recipe("bf16")
    content = ablate.recipe("nvfp4").model_dump()
    for name in PRODUCTS:
        for operand in (
            part for part in content[name].values() if isinstance(part, dict) and "error" in part
        ):
            operand["error"] = {"times": job.times, "permuted": job.permuted}
    chosen = [units(job.model)[name] for name in members(job.model, job.group)]
    return within(Recipe.model_validate(content), MODELS[job.model].linear_layers, chosen)


def stages() -> dict[str, list[Job]]:
    """Return the jobs of one seed by stage, the most important first, with seed 0 in the seed's place."""

    def forks(
        groups: Sequence[str],
        times: Sequence[float],
        model: str = "gpt",
        permuted: bool = False,
        window: int = WINDOW,
    ) -> list[Job]:
        return [Job(model, 0, group, a, permuted, window) for a in times for group in groups]

    halves = [f"half {number}{side}" for number in range(HALVES) for side in ("", " rest")]
    return {
        "bf16": [job for model in MODELS for job in forks(("bf16",), (1.0,), model)],
        "a = 4": forks((*GROUPS, *CELLS), (4.0,)),
        "groups": forks(GROUPS, (2.0, 2.8)) + forks(LARGE, (1.0,)),
        "a = 2": forks(CELLS, (2.0,)),
        "halves": forks(halves[: len(halves) // 2], (4.0,)),
        "placebo": forks((*CELLS, "all", *PRODUCTS), (4.0,), permuted=True),
        "other halves": forks(halves[len(halves) // 2 :], (4.0,)),
        "no clipping": forks(("all", *PRODUCTS), (2.0, 4.0), "free"),
        "other model": forks(PRODUCTS, (4.0, 2.0, 1.0), "other"),
        "120 steps": forks(("bf16", "all", *PRODUCTS), (4.0,), window=2 * WINDOW),
        "a = 2.8": forks(CELLS, (2.8,)),
        "240 steps": forks(("bf16", "all", *PRODUCTS), (4.0,), window=4 * WINDOW),
        "one step": forks(("bf16", *CELLS), (1.0,), window=1),
        "backward": forks([f"{block} {product}" for block in BLOCKS for product in PRODUCTS[1:]], (4.0,)),
        "blocks": forks(BLOCKS, (4.0,), window=2 * WINDOW) + forks(BLOCKS, (4.0,), window=4 * WINDOW),
    }


def design(seeds: Sequence[int] = SEEDS, first: Sequence[str] = ()) -> list[Job]:
    """Return all jobs in the order in which they start; the second model has every other seed.

    Args:
        seeds: seeds of the trunks.
        first: stages that start before all others; the jobs are the same.
    """
    ordered = stages()
    ordered = {name: ordered[name] for name in first} | ordered
    return [
        job._replace(seed=seed)
        for stage in ordered.values()
        for seed in seeds
        for job in stage
        if job.model != "other" or seed % 2 == 0
    ]


def work(trunks: Path, job: Job) -> dict[str, float | None]:
    """Return the text's digest and the losses of one fork's weights, in its own precision and in bf16.

    A loss is None if a guard stopped the fork.
    """
    text = MODELS[job.model].corpus.fingerprint
    try:
        ended = fork(
            MODELS[job.model], recipe_of(job._replace(seed=0)), job.seed, POSITION, job.window, trunks
        )
    except ArithmeticError:
        return {"loss": None, "loss_bf16": None, "text": text}
    return {name: round(ended[name], 8) for name in ("loss", "loss_bf16")} | {"text": text}


# --- analysis -------------------------------------------------------------------------------------

PARTS = ("total", "direct", "learnt")
RESAMPLES = 4000
Sampled = Callable[[np.ndarray], float]


class Damages:
    """Damages of all forks, by condition: arrays over the seeds that have it and its bf16 fork."""

    def __init__(self, lines: Sequence[dict]) -> None:
        losses = {
            Job(**{name: line[name] for name in Job._fields}): (line["loss"], line["loss_bf16"])
            for line in lines
            if line["loss"] is not None
        }
        base = {
            (job.model, job.window, job.seed): own for job, (own, _) in losses.items() if job.group == "bf16"
        }
        self._values: dict[Job, dict[int, tuple[float, float, float]]] = {}
        for job, (own, high) in losses.items():
            reference = base.get((job.model, job.window, job.seed))
            if job.group != "bf16" and reference is not None:
                parts = (own - reference, own - high, high - reference)
                self._values.setdefault(job._replace(seed=0), {})[job.seed] = parts

    def seeds(self, *conditions: Job) -> list[int]:
        """Return the seeds that have all conditions."""
        return sorted(set.intersection(*(set(self._values.get(one, {})) for one in conditions)))

    def of(self, part: str, *conditions: Job) -> np.ndarray:
        """Return damages [seeds, conditions] on the seeds that have all of them."""
        which = PARTS.index(part)
        seeds = self.seeds(*conditions)
        table = [[self._values[one][seed][which] for one in conditions] for seed in seeds]
        return np.array(table, dtype=float).reshape(len(seeds), len(conditions))


def condition(
    group: str, times: float = 4.0, model: str = "gpt", permuted: bool = False, window: int = WINDOW
) -> Job:
    """Return a condition: a job of no seed."""
    return Job(model, 0, group, times, permuted, window)


def p_value(values: np.ndarray) -> float:
    """Return the p of a two-sided t-test against 0."""
    error = values.std(ddof=1) / math.sqrt(len(values))
    return float(2 * stats.t.sf(abs(values.mean()) / error, len(values) - 1)) if error else 1.0


def paired(values: np.ndarray) -> str:
    """Return mean, half-width of the 95 % interval and Student's t of values by seed."""
    if len(values) < 3:
        return "-"
    error = values.std(ddof=1) / math.sqrt(len(values))
    half = stats.t.ppf(0.975, len(values) - 1) * error
    return f"{values.mean():+.5f} ±{half:.5f} (t {values.mean() / error if error else math.nan:.1f})"


def bootstrapped(values: np.ndarray, statistic: Sampled, digits: int = 2) -> str:
    """Return a statistic of [seeds, ...] with its 95 % interval by bootstrap over seeds; "-" if few."""
    if len(values) < 4:
        return "-"
    draws = np.random.default_rng(0).integers(len(values), size=(RESAMPLES, len(values)))
    with np.errstate(invalid="ignore", divide="ignore"):
        made = np.array([statistic(values[draw]) for draw in draws])
        own = statistic(values)
    if not math.isfinite(own) or np.isnan(made).mean() > 0.05:
        return "not resolved"
    low, high = np.nanpercentile(made, [2.5, 97.5])
    return f"{own:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def exponent(times: Sequence[float]) -> Sampled:
    """Return the slope of log mean damage on log a; NaN if a mean is not positive."""

    def slope(values: np.ndarray) -> float:
        means = values.mean(0)
        return float(np.polyfit(np.log(times), np.log(means), 1)[0]) if (means > 0).all() else math.nan

    return slope


def linear_share(times: Sequence[float]) -> Sampled:
    """Return the share of b in b + c, the damage at a = 1, of mean damage = b a + c a^2.

    Least squares with weights 1 / a^2, since the damage's spread grows about as a does.
    """
    a = np.asarray(times)
    inverse = np.linalg.pinv(np.stack([np.ones_like(a), a], axis=1))

    def share(values: np.ndarray) -> float:
        b, c = inverse @ (values.mean(0) / a)
        return float(b / (b + c))

    return share


def split_correlation(one: np.ndarray, other: np.ndarray) -> str:
    """Return the mean rank correlation of two maps over disjoint halves of seeds, and 95 % of the splits."""
    count = min(len(one), len(other))
    if count < 4:
        return "-"
    draw, made = np.random.default_rng(0), []
    for _ in range(1000):
        order = draw.permutation(count)
        first, second = order[: count // 2], order[count // 2 :]
        made.append(stats.spearmanr(one[first].mean(0), other[second].mean(0)).statistic)
    low, high = np.percentile(made, [2.5, 97.5])
    return f"{np.mean(made):.2f} ({low:.2f} to {high:.2f})"


def correlation(values: np.ndarray) -> float:
    """Return Spearman's correlation of two maps [seeds, 2, cells], each the mean over seeds."""
    one, other = values.mean(0)
    return float(stats.spearmanr(one, other).statistic)


def table(title: str, head: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print one table."""
    print(f"\n## {title}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for line in lines:
        print(f"| {' | '.join(line)} |")


def size_tables(damages: Damages, model: str = "gpt") -> None:
    """Print damage by group and factor, exponents and the share that is linear in a."""
    groups = GROUPS if model == "gpt" else ("all", *PRODUCTS) if model == "free" else PRODUCTS
    for part in PARTS:
        lines = []
        for group in groups:
            every = {a: condition(group, a, model) for a in (1.0, 2.0, 2.8, 4.0)}
            shown = [
                paired(damages.of(part, one)[:, 0]) if damages.seeds(one) else "-" for one in every.values()
            ]
            amplified = [a for a, one in every.items() if a > 1 and damages.seeds(one)]
            whole = [a for a, one in every.items() if damages.seeds(one)]
            slope = share = "-"
            if len(amplified) > 1:
                slope = bootstrapped(damages.of(part, *(every[a] for a in amplified)), exponent(amplified))
            if len(whole) > 2:
                share = bootstrapped(damages.of(part, *(every[a] for a in whole)), linear_share(whole))
            lines.append([group, *shown, slope, share])
        head = ("group", "a = 1", "a = 2", "a = 2.8", "a = 4", "exponent, a > 1", "linear share at a = 1")
        table(f"{part} damage, {model}", head, lines)


def additivity_tables(damages: Damages) -> None:
    """Print the damage of halves and their complements together minus that of all, and that of partitions."""
    pairs = [(f"half {number}", f"half {number} rest") for number in range(HALVES)]
    lines = []
    for part in PARTS:
        for name, group in (PARTITIONS | {"halves": ()}).items():
            sets = [group] if group else pairs
            gaps = []
            for parts in sets:
                values = damages.of(part, *map(condition, parts), condition("all"))
                gaps.append(values[:, :-1].sum(1) - values[:, -1])
            gaps = [gap for gap in gaps if len(gap) > 2]
            if not gaps:
                continue
            count = min(map(len, gaps))
            mean = np.mean([gap[:count] for gap in gaps], axis=0)
            whole = damages.of(part, condition("all")).mean()
            p = sorted(p_value(gap) for gap in gaps)
            held = next((k for k, value in enumerate(p) if value * (len(p) - k) > 0.05), len(p))
            means = [float(gap.mean()) for gap in gaps]
            relative = f"{mean.mean() / whole:+.0%}"
            spread = f"{min(means):+.5f} to {max(means):+.5f}"
            lines.append([part, name, paired(mean), relative, spread, f"{held} of {len(gaps)}"])
    head = (
        "part",
        "sets",
        "sum - all, mean over sets",
        "of all",
        "range of the sets",
        "differ from 0 (Holm)",
    )
    table("additivity at a = 4", head, lines)


def cell_tables(damages: Damages) -> None:
    """Print the map of forward cells, the agreement of maps, and the smallest cell that can be seen."""
    amplified = {a: [condition(cell, a) for cell in CELLS] for a in (2.0, 2.8, 4.0)}
    placebo = [condition(cell, permuted=True) for cell in CELLS]
    read = [condition(cell, 1.0, window=1) for cell in CELLS]
    lines = []
    for cell, one, moved in zip(CELLS, amplified[4.0], placebo, strict=True):
        ratio = bootstrapped(
            damages.of("total", moved, one), lambda v: float(v[:, 0].mean() / v[:, 1].mean())
        )
        shown = [paired(damages.of(part, one)[:, 0]) for part in PARTS]
        lines.append([cell.removesuffix(" fprop"), *shown, paired(damages.of("total", moved)[:, 0]), ratio])
    table("forward cells at a = 4", ("cell", *PARTS, "placebo, total", "placebo / cell"), lines)
    lines = []
    for part in PARTS:
        own = damages.of(part, *amplified[4.0])
        for name, other in (
            ("itself", amplified[4.0]),
            ("a = 2", amplified[2.0]),
            ("a = 2.8", amplified[2.8]),
            ("placebo", placebo),
            ("direct, one step, a = 1", read),
        ):
            values = damages.of("direct" if other is read else part, *other)
            count = min(len(own), len(values))
            both = np.stack([own[:count], values[:count]], axis=1) if count else np.empty((0, 2, 1))
            whole = "-" if name == "itself" else bootstrapped(both, correlation)
            lines.append([part, name, f"{count}", split_correlation(own, values), whole])
        low = damages.of(part, *amplified[2.0])
        lines.append([part, "a = 2 against itself", f"{len(low)}", split_correlation(low, low), "-"])
    head = ("part", "a = 4 against", "seeds", "rank correlation, disjoint halves of seeds", "of all seeds")
    table("do maps agree?", head, lines)
    values = damages.of("total", *amplified[4.0])
    if len(values) > 2:
        half = stats.t.ppf(0.975, len(values) - 1) * values.std(0, ddof=1) / math.sqrt(len(values))
        print(
            f"\nHalf-width of a forward cell's total damage at a = 4, {len(values)} seeds: median"
            f" {np.median(half):.5f}, largest {half.max():.5f}."
        )
    for product in PRODUCTS[1:]:
        cells = [condition(f"{block} {product}") for block in BLOCKS]
        shown = ", ".join(paired(damages.of("total", one)[:, 0]) for one in cells)
        print(f"{product} by block at a = 4: {shown}.")


def control_tables(damages: Damages) -> None:
    """Print the damage by window, without clipping, and of placebos."""
    lines = []
    for group in ("all", *PRODUCTS, *BLOCKS):
        for part in PARTS if group in ("all", "fprop") else ("total",):
            each = [condition(group, window=window) for window in (WINDOW, 2 * WINDOW, 4 * WINDOW)]
            shown = [paired(damages.of(part, one)[:, 0]) for one in each]
            both = damages.of(part, each[0], each[2])
            growth = bootstrapped(both, lambda v: float(v[:, 1].mean() / v[:, 0].mean()))
            lines.append([group, part, *shown, growth])
    head = ("group", "part", *(f"{n * WINDOW} steps" for n in (1, 2, 4)), "240 steps / 60")
    table("windows, a = 4", head, lines)
    lines = []
    for group in ("all", *PRODUCTS):
        for a in (2.0, 4.0):
            pair = damages.of("total", condition(group, a, "free"), condition(group, a))
            ratio = bootstrapped(pair, lambda v: float(v[:, 0].mean() / v[:, 1].mean()))
            lines.append([group, f"{a:g}", *(paired(column) for column in pair.T), ratio])
    table("without clipping", ("group", "a", "without", "with", "without / with"), lines)
    lines = []
    for group in ("all", *PRODUCTS):
        for part in PARTS:
            pair = damages.of(part, condition(group, permuted=True), condition(group))
            ratio = bootstrapped(pair, lambda v: float(v[:, 0].mean() / v[:, 1].mean()))
            lines.append([group, part, *(paired(column) for column in pair.T), ratio])
    table("placebo, a = 4", ("group", "part", "permuted errors", "errors", "permuted / own"), lines)


def later_table(damages: Damages) -> None:
    """Print damage at a = 4 over 16 against that at a = 1, and all forward cells against the product."""
    lines = []
    for group in LARGE:
        pair = damages.of("total", condition(group), condition(group, 1.0)) / (16, 1)
        ratio = bootstrapped(pair, lambda v: float(v[:, 0].mean() / v[:, 1].mean()))
        lines.append([f"{group}: a = 4 over 16, a = 1", *(paired(column) for column in pair.T), ratio])
    for a in (2.0, 4.0):
        cells = damages.of("total", *(condition(name, a) for name in (*CELLS, "fprop")))
        pair = np.stack([cells[:, :-1].sum(1), cells[:, -1]], axis=1)
        ratio = bootstrapped(pair, lambda v: float(v[:, 0].mean() / v[:, 1].mean()))
        lines.append([f"sum of cells, fprop: a = {a:g}", *(paired(column) for column in pair.T), ratio])
    table("added after the outcomes", ("total damage", "first", "second", "first / second"), lines)


def analyse(path: Path) -> None:
    """Print all tables from a pool's lines."""
    lines = rows(path)
    damages = Damages(lines)
    hours = sum(line["seconds"] for line in lines) / 3600
    stopped = sum(line["loss"] is None for line in lines)
    print(f"{len(lines)} of {len(design())} forks, {hours:.2f} core-hours, {stopped} stopped by a guard")
    for model in MODELS:
        size_tables(damages, model)
    additivity_tables(damages)
    cell_tables(damages)
    control_tables(damages)
    later_table(damages)


def main() -> int:
    """Run or analyse the design."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="train the forks that the folder lacks")
    running.add_argument("--out", type=Path, required=True, help="folder of rows.jsonl and of the trunks")
    running.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    running.add_argument("--minutes", type=float, default=math.inf, help="no fork starts later than that")
    running.add_argument("--seeds", type=int, default=len(SEEDS), help="number of seeds")
    running.add_argument("--first", nargs="*", default=[], choices=[*stages()], help="stages to start with")
    reading = commands.add_parser("analyse", help="print the tables")
    reading.add_argument("--rows", type=Path, required=True)
    given = parser.parse_args()
    if given.command == "analyse":
        analyse(given.rows)
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    texts = {line.get("text") for line in rows(given.out / "rows.jsonl")}
    if texts - {model.corpus.fingerprint for model in MODELS.values()}:
        parser.error(
            f"{given.out / 'rows.jsonl'} has forks of another text than this Python's standard library;"
            " damage subtracts the bf16 fork of the same text, so take a new folder"
        )
    jobs = design(SEEDS[: given.seeds], given.first)
    for job in jobs:
        recipe_of(job._replace(seed=0))
    left = run(
        given.out / "rows.jsonl", jobs, partial(work, given.out / "trunks"), given.workers, given.minutes
    )
    print(f"{len(jobs) - left} of {len(jobs)} forks are in {given.out / 'rows.jsonl'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
