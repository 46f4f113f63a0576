"""Transfer benchmark: does the damage in forks of a tiny model order the final losses of published runs?

    python benchmarks/transfer.py run --workers 16 --minutes 6 --out DIR    # goes on where it was stopped
    python benchmarks/transfer.py table --published CSV ROWS [ROWS ...]     # CSV: the published losses

The question. Published runs of 100 M parameters (transfer_schemes.py) order 26 schemes of FP4 training. That
a quantised forward pass costs more than a backward one, anybody knows. Does a small experiment order the
schemes within groups (forward alone, backward alone, both) as the large runs do, and better than the best
simple rule of known facts? The rest of this text is the design. It was committed before a published loss was
joined with any result of it. Known by then: gaps are .048 to .071 nats with a quantised forward pass and .001
to .012 without; an earlier trial (another model, other seeds, 20 schemes) ordered 75 of 94 pairs within two
groups; the rule of four facts was written after seeing the table, so it is a bound of what a rule can do.

Experiment. The model is `MODEL`, 0.4 M parameters, all sizes multiples of 128. Its trunk is in bf16; each
of 24 seeds has three positions, drawn by the seed between step 120 and the start of the decay. A fork trains
w = 60 or 2w steps from there with one scheme, rate falling to zero. Errors are amplified: every quantised
operand is x + a (q(x) - x), a = 3 or 1. Damage (total) is the fork's loss in its own precision less that of
the bf16 fork; learnt damage reads both in bf16. Means over positions within a seed, then over seeds. A fork
that a guard stops makes its scheme the worst of its group.

Order and stopping. Rounds of `PLAN`, in each the bf16 forks first, then seed after seed, all schemes of a
seed together. Time alone stops the run, never an outcome. A seed counts in a round if all its forks are
there. The headline is a = 3 at w, with all complete seeds and positions. Forks of different machines are
never compared: each machine's rows have their own bf16 forks.

Readings without training, on the trunk at the first position of the first 8 seeds: product error (sum over
the three products of the relative squared error, mean over layers), operand error (the same over the six
operands), gradient error (1 - cosine with the gradient of bf16), and reading (loss in the scheme's precision
less loss in bf16 of the same weights, one step after the position).

Truth. Final loss at 100 M parameters and 97 tokens a parameter, less the baseline's. Beside it, all other
sizes and lengths that have all schemes of a pair.

Figures. Pairs within groups ordered right, ties counting half, and Kendall's tau of the same pairs;
permutation test within groups (10,000); intervals by bootstrap over seeds, and over seeds and factors: each
level of a scheme's two factors has an exponential weight, a pair the product of its schemes' weights.
Split-half reliability: correlation within groups of the damages of two halves of the seeds, mean over 200
halvings, stepped up by Spearman-Brown. Ceiling: pairs that the truth orders as itself plus normal noise of
the deviation of published repeats. Apart: the pairs whose gaps differ by more than twice their noise.

Rivals: forward bit; forward bit and number of backward products; linear rules of four facts (forward,
backward products, 16x16 weights, four over six) and of five (and MS-EDEN), for each pair least squares on the
published losses of all other schemes; the same rules with each fact left out in turn (fitted on the schemes
without it); tensor errors; gradient error; reading. The best rule is the rival
of published facts alone with most pairs right. The claim holds if the damage orders more pairs than the
best rule, with an interval (seeds and factors) of the difference above 0. Secondary: does the damage, as one
more column of that rule, add pairs? Goal of precision: half-width of the headline at most .1.

Changed after the losses were read: published repeats differ by .00001, so they are no other runs; the noise
of a published loss is estimated from how unevenly losses fall with length (`length_deviation`). Added after
the outcomes: operand error less the best rule, and less the headline.
"""

import argparse
import json
import math
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fork_pool import SILENT, fork, rows, run
from transfer_schemes import SCHEMES

import ablate
from ablate.provenance import environment
from ablate.recipes.cells import amplified
from ablate.recipes.recipe import DIRECTIONS, SLOTS
from ablate.training.loop import Telemetry
from ablate.training.workloads.gpt import Gpt

MODEL = Gpt(
    layers=2,
    width=128,
    hidden=384,
    heads=4,
    context=64,
    batch=4,
    steps=300,
    lr=1e-3,
    eval_tokens=16384,
    eval_batch=64,
    eval_every=300,
)
SEEDS = range(4000, 4024)
WINDOW = 60
POSITIONS = range(120, 241)
BF16 = "bf16"
PROBE = Telemetry(every=1, shadow=1, log=10**9)
"""Measures the only step of a fork of one step."""


class Round(NamedTuple):
    """Forks of all schemes at one position of some seeds."""

    times: int
    """Amplification a."""
    window: int
    """Steps; 1: readings without training."""
    position: int
    """0, 1 or 2: of the positions as they were drawn."""
    seeds: int = len(SEEDS)


PLAN = (
    Round(3, WINDOW, 0),
    Round(1, 1, 0, 8),
    Round(1, WINDOW, 0),
    Round(3, WINDOW, 1),
    Round(3, 2 * WINDOW, 0, 12),
    Round(3, WINDOW, 2),
    Round(3, 2 * WINDOW, 0),
    Round(1, WINDOW, 1),
    Round(1, WINDOW, 2),
    Round(3, 2 * WINDOW, 1),
    Round(3, 2 * WINDOW, 2),
)


class Fork(NamedTuple):
    """Key of a row."""

    arm: str
    times: int
    window: int
    seed: int
    position: int


def positions(seed: int) -> list[int]:
    """Return the three steps after which a seed's forks begin, in the order in which they were drawn."""
    return random.Random(f"positions of {seed}").sample(POSITIONS, 3)


def jobs(plan: Sequence[Round] = PLAN) -> Iterator[Fork]:
    """Yield all forks in the order in which they start; a fork that two rounds need comes once."""
    forks: dict[Fork, None] = {}
    for times, window, number, seeds in plan:
        for arms in [[*SCHEMES]] if window == 1 else [[BF16], [*SCHEMES]]:
            forks |= dict.fromkeys(
                Fork(arm, 1 if arm == BF16 else times, window, seed, positions(seed)[number])
                for seed in SEEDS[:seeds]
                for arm in arms
            )
    yield from forks


def work(trunks: Path, job: Fork) -> dict[str, object]:
    """Train one fork and return its losses; of a fork of one step, what was measured in it, too."""
    recipe = ablate.recipe(BF16) if job.arm == BF16 else amplified(SCHEMES[job.arm].recipe, job.times)
    telemetry = PROBE if job.window == 1 else SILENT
    try:
        metrics = fork(MODEL, recipe, job.seed, job.position, job.window, trunks, telemetry)
    except ArithmeticError:
        return {"loss": None, "loss_bf16": None}
    values = {name: round(metrics[name], 7) for name in ("loss", "loss_bf16")}
    if job.window == 1:
        values["products"] = sum(metrics.get(f"gemm/{name}/rel_l2", 0) ** 2 for name in DIRECTIONS["all"])
        values["operands"] = sum(metrics.get(f"quant/{slot}/rel_mse", 0) for slot in SLOTS)
        values["gradient"] = 1 - metrics.get("grad/cosine_to_bf16", 1)
    return values


def main() -> int:
    """Run the forks or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="what", required=True)
    runs = commands.add_parser("run", help="Run the forks that are not there yet.")
    runs.add_argument("--out", type=Path, required=True, help="Folder of rows.jsonl and machine.json.")
    runs.add_argument("--workers", type=int, default=2, help="Processes. Default: %(default)s.")
    runs.add_argument("--minutes", type=float, default=math.inf, help="No fork starts later. Default: all.")
    shown = commands.add_parser("table", help="Print the tables.")
    shown.add_argument("rows", type=Path, nargs="+", help="Files of rows, one a machine.")
    shown.add_argument("--published", type=Path, required=True, help="File that `published` printed.")
    source = commands.add_parser("published", help="Print the published losses of the schemes as CSV.")
    source.add_argument("source", type=Path, help="Table of all published runs.")
    given = parser.parse_args()
    if given.what != "run":
        from transfer_table import extract, tables  # with libraries that a run does without

        lines = (
            extract(given.source)
            if given.what == "published"
            else (tables([rows(path) for path in given.rows], given.published, WINDOW))
        )
        print("\n".join(lines))
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    MODEL.corpus.unigram_entropy()  # the text is read before the processes fork
    (given.out / "machine.json").write_text(json.dumps(environment(), indent=1))
    # Not under `out`: states are large, and only this machine's forks may begin from them.
    trunks = Path(tempfile.gettempdir()) / "transfer-trunks"
    left = run(given.out / "rows.jsonl", jobs(), partial(work, trunks), given.workers, given.minutes)
    print(f"{left} forks left", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
