"""Error rates of intervals, verdicts, headlines and promised seeds on simulated sweeps of known truth.

`python benchmarks/simulated_truth.py` prints the tables of docs/reference/statistics.md. Every scenario has a
seed of its own, computed from its name, so that it gives the same figures alone, in any order and on any
machine. Finished scenarios are kept in a JSON file (`--cache`) and are not run again; the file is valid for
one value of `--experiments`. Effects and deviations are in units of min_effect.
"""

import argparse
import hashlib
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import numpy as np
import optuna

from ablate.experiment.schema import Metric
from ablate.results.decomposition import correlation
from ablate.results.forked import Views, qualified
from ablate.results.intervals import ALPHA, Interval
from ablate.results.paired_stats import Difference, Verdict, judge, paired_difference, seeds_needed, wilcoxon
from ablate.results.search_effects import knob_effects
from ablate.results.summary import ArmSummary, summaries
from ablate.store.ledger import Ledger

EFFECTS, DEVIATIONS, STARTS = (0.0, 0.25, 0.5, 1.0, 2.0), (0.5, 1.0, 2.0, 4.0), (3, 5, 8)
INTERVALS = ("t", "split:4", "sequence")
LOOKS = (6, 12, 18, 24)
"""Seeds at the looks of a growing sweep whose differences are ranked."""
ARMS = 8
PRIORS = {
    "N(0, 1)": lambda random: random.normal(0, 1),
    "U(-2, 2)": lambda random: random.uniform(-2, 2),
    "half 0, half N(0, 2)": lambda random: random.normal(0, 2) * random.integers(2),
}
"""Distributions of the true effect; deviations are log-uniform from .5 to 4 then."""


class Seeded:
    """Base of a scenario, a frozen dataclass: its fields are its key in the cache and seed its draws."""

    @property
    def name(self) -> str:
        """Return the key in the cache."""
        return "/".join(map(str, astuple(self)))

    def random(self) -> np.random.Generator:
        """Return a generator that depends on nothing but the scenario."""
        return np.random.default_rng(int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:8]))


@dataclass(frozen=True)
class Scenario(Seeded):
    """One line of a table: the kind of simulation and its parameters."""

    kind: str
    interval: str = "t"
    pairs: int = 5
    deviation: float = 1.0
    effect: float = 0.0
    arms: int = 1
    shape: str = "normal"


def scenarios() -> Iterator[Scenario]:
    """Yield every line of every table."""
    for interval in INTERVALS:
        for pairs in STARTS:
            for deviation in DEVIATIONS:
                yield from (Scenario("promise", interval, pairs, deviation, effect) for effect in EFFECTS)
    yield from (
        Scenario("promise", interval, pairs, shape=shape)
        for interval in INTERVALS
        for pairs in STARTS
        for shape in PRIORS
    )
    for start in STARTS:  # four arms whose seeds are promised together
        yield from (Scenario("promise", "t", start, 2.0, effect, 4) for effect in EFFECTS)
    for interval in INTERVALS:
        yield from (
            Scenario("headline", interval, pairs, deviation, arms=ARMS)
            for pairs in STARTS
            for deviation in (0.5, 2.0)
        )
    yield from (Scenario("growth", interval, 3, 1.0, arms=ARMS) for interval in INTERVALS[1:])
    for shape in ("normal", "lognormal", "t3", "outlier"):
        yield from (Scenario("coverage", "t", pairs, 1.0, shape=shape) for pairs in STARTS)
    yield from (Scenario("counts", "t", pairs, rate) for pairs in (2, 3, 5, 8) for rate in (0.5, 2.0))
    for shape in ("normal", "t3", "outlier"):
        yield from (
            Scenario("correlation", "t", pairs, 1.0, rho, shape=shape)
            for rho in (0.0, 0.8)
            for pairs in (5, 8, 20)
        )
    yield from (Scenario("ranks", interval, LOOKS[0]) for interval in INTERVALS[1:])
    for sampler in ("random", "tpe"):
        yield from (
            Scenario("search", "t", 1, 0.3, size, count, sampler)
            for count in (20, 40, 100)
            for size in (0.0, 0.5, 1.0)
        )
    for count in (1, 2, 3, 5):
        yield from (
            Scenario("positions", "t", pairs, spread, effect, count)
            for effect in (0.0, 2.0)
            for spread in (0.5, 1.0, 2.0)
            for pairs in STARTS
        )
    yield from (
        Scenario("steps", "t", pairs, 15.0, 20.0, last) for last in (80, 100, 160) for pairs in (5, 8)
    )


def draw(random: np.random.Generator, shape: str, size: tuple[int, ...]) -> np.ndarray:
    """Return differences of mean 0 and deviation 1."""
    if shape == "lognormal":
        return (random.lognormal(0, 1, size) - math.exp(0.5)) / math.sqrt((math.e - 1) * math.e)
    if shape == "t3":
        return random.standard_t(3, size) / math.sqrt(3)
    values = random.normal(0, 1, size)
    if shape == "outlier":  # one seed of ten falls into a phase transition five times as far away
        values = np.where(random.random(size) < 0.1, 5 * values, values) / math.sqrt(0.9 + 2.5)
    return values


def difference(values: np.ndarray, interval: Interval) -> Difference:
    """Return the paired difference with these values."""
    return paired_difference(
        dict(enumerate(values.tolist())), dict.fromkeys(range(len(values)), 0.0), interval
    )


def arms(random: np.random.Generator, scenario: Scenario, pairs: int) -> np.ndarray:
    """Return differences [arms, pairs] from one shared baseline.

    Those of several arms are correlated by .5 over seeds.
    """
    if scenario.arms == 1:
        return scenario.effect + scenario.deviation * random.normal(0, 1, (1, pairs))
    own, shared = random.normal(0, 1, (scenario.arms, pairs)), random.normal(0, 1, pairs)
    return scenario.effect + scenario.deviation * (own - shared) / math.sqrt(2)


def promise(scenario: Scenario, experiments: int) -> dict[str, int]:
    """Continue undecided sweeps to the number of seeds that they name, and count the promises that are kept.

    A growing sweep's `looks` are the declared ones at any number of seeds. Numbers above 200 are no promise.
    """
    random, interval, asked = scenario.random(), Interval.parse(scenario.interval), scenario
    made = kept = beyond = decided = seeds = 0
    for _ in range(experiments):
        if asked.shape in PRIORS:
            scenario = replace(
                asked,
                effect=PRIORS[asked.shape](random),
                deviation=math.exp(random.uniform(math.log(0.5), math.log(4))),
            )
        values = arms(random, scenario, scenario.pairs)
        judged = judge([(difference(line, interval), 1.0) for line in values], True)
        decided += sum(verdict.decided for verdict in judged)
        for arm, verdict in enumerate(judged):
            if verdict.kind != "undecided":
                continue
            needed = seeds_needed(*verdict.planned, ranged=False)
            if needed is None or needed.count is None:
                beyond += 1
                continue
            whole = np.concatenate([values, arms(random, scenario, needed.count - scenario.pairs)], axis=1)
            then = judge([(difference(line, interval), 1.0) for line in whole], True, plan=False)[arm]
            made, kept, seeds = made + 1, kept + then.decided, seeds + needed.count
    return {"made": made, "kept": kept, "beyond": beyond, "decided": decided, "seeds": seeds}


def headline(scenario: Scenario, experiments: int) -> dict[str, int]:
    """Count the sweeps without any effect in which an arm is called better or worse.

    Counted twice: with Holm's correction, and without.
    """
    random, interval = scenario.random(), Interval.parse(scenario.interval)
    false = uncorrected = 0
    for _ in range(experiments):
        differences = [difference(line, interval) for line in arms(random, scenario, scenario.pairs)]
        false += any(
            verdict.kind in ("better", "worse")
            for verdict in judge([(one, 1.0) for one in differences], True, plan=False)
        )
        uncorrected += any(one.low > 0 or one.high < 0 for one in differences)
    return {"sweeps": experiments, "false": false, "uncorrected": uncorrected}


def growth(scenario: Scenario, experiments: int) -> dict[str, int]:
    """Count the same for growing seeds: from 3 to 12, three more per look, for each arm without a verdict."""
    random, interval = scenario.random(), Interval.parse(scenario.interval)
    false = 0
    for _ in range(experiments):
        values, have = arms(random, scenario, 12), [scenario.pairs] * scenario.arms
        while True:
            judged = judge(
                [(difference(values[arm, :n], interval), 1.0) for arm, n in enumerate(have)], True, plan=False
            )
            grown = [arm for arm, verdict in enumerate(judged) if not verdict.decided and have[arm] < 12]
            if not grown:
                break
            have = [n + 3 * (arm in grown) for arm, n in enumerate(have)]
        false += any(verdict.kind in ("better", "worse") for verdict in judged)
    return {"sweeps": experiments, "false": false}


def coverage(scenario: Scenario, experiments: int) -> dict[str, int]:
    """Count the experiments whose interval contains the true difference."""
    random, interval = scenario.random(), Interval.parse(scenario.interval)
    differences = [
        difference(line, interval) for line in draw(random, scenario.shape, (experiments, scenario.pairs))
    ]
    return {"experiments": experiments, "covered": sum(one.low <= 0 <= one.high for one in differences)}


def counts(scenario: Scenario, experiments: int) -> dict[str, int]:
    """Count the false verdicts of two arms whose metric is a small count (Poisson), without an effect.

    `zero_width` counts the claims that an interval of width 0 alone would have made.
    """
    random = scenario.random()
    false = zero_width = 0
    for _ in range(experiments):
        observed = difference(
            np.subtract(*random.poisson(scenario.deviation, (2, scenario.pairs)).astype(float)), Interval()
        )
        false += judge([(observed, None)], True, plan=False)[0].kind in ("better", "worse")
        zero_width += observed.deviation == 0 and observed.mean != 0
    return {"experiments": experiments, "false": false, "zero_width": zero_width}


def correlated(scenario: Scenario, experiments: int) -> dict[str, int]:
    """Count the experiments whose interval contains the true correlation, `effect`.

    One draw scales both values of a seed, as one run far away from the others moves an arm and its baseline.
    """
    random, covered = scenario.random(), 0
    for _ in range(experiments):
        own, shared = random.normal(0, 1, (2, scenario.pairs))
        scale = np.ones(scenario.pairs)
        if scenario.shape == "t3":
            scale = 1 / np.sqrt(random.chisquare(3, scenario.pairs))
        elif scenario.shape == "outlier":
            scale = np.where(random.random(scenario.pairs) < 0.1, 5.0, 1.0)
        values = scale * shared, scale * (scenario.effect * shared + math.sqrt(1 - scenario.effect**2) * own)
        found = correlation(*(dict(enumerate(side.tolist())) for side in values))
        covered += bool(found.low <= scenario.effect <= found.high)
    return {"experiments": experiments, "covered": covered}


def ranks(scenario: Scenario, experiments: int) -> dict[str, int]:
    """Count sweeps without an effect, with growing seeds, in which p of Wilcoxon's test is below 5 %.

    Counted at the look at which the sweep stops, and at any of the declared looks.
    """
    random, interval = scenario.random(), Interval.parse(scenario.interval)
    stopped = anywhere = 0
    for _ in range(experiments):
        values = random.normal(0, scenario.deviation, LOOKS[-1])
        sides = [(dict(enumerate(values[:n].tolist())), dict.fromkeys(range(n), 0.0)) for n in LOOKS]
        low = [wilcoxon(*side) < ALPHA for side in sides]
        judged = [judge([(paired_difference(*side, interval), 1.0)], True, plan=False)[0] for side in sides]
        stopped += next((p for p, one in zip(low, judged, strict=True) if one.decided), low[-1])
        anywhere += any(low)
    return {"sweeps": experiments, "stopped": stopped, "anywhere": anywhere}


def search(scenario: Scenario, experiments: int) -> dict[str, int]:
    """Count effects of a search's knobs whose interval contains the mean effect over all settings.

    Two of the four switches do nothing on average. Each two interact, by N(0, `effect`^2). `shape` is the
    sampler.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    random, main = scenario.random(), np.array([1.0, 0.0, 0.5, 0.0])
    samplers = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
    covered = effects = false = idle = 0
    for _ in range(experiments):
        both = np.triu(scenario.effect * random.normal(0, 1, (len(main), len(main))), 1)
        study = optuna.create_study(sampler=samplers[scenario.shape](seed=int(random.integers(2**31))))
        arms = []
        for number in range(scenario.arms):
            trial = study.ask()
            knobs = {f"knob {at}": trial.suggest_categorical(f"knob {at}", [False, True]) for at in range(4)}
            signs = np.where(list(knobs.values()), 1, -1)
            value = float((main @ signs + signs @ both @ signs) / 2 + scenario.deviation * random.normal())
            study.tell(trial, value)
            arms.append(searched(str(number), knobs, value))
        for effect in knob_effects(arms):
            true = float(main[int(effect.knob.split()[1])])
            covered, effects = covered + (abs(effect.mean - true) <= effect.half), effects + 1
            false, idle = false + (true == 0 and effect.p < ALPHA), idle + (true == 0)
    return {"experiments": effects, "covered": covered, "idle": idle, "false": false}


def searched(name: str, knobs: dict, value: float) -> ArmSummary:
    """Return an arm that a search has finished."""
    rest = {"gap": None, "margin": None, "interval": Interval(), "verdict": Verdict("undecided")}
    blank = {"sqnr_db": math.nan, "tokens_per_s": math.nan, "memory": math.nan, "nans": 0}
    seeds = {"given": (0,), "diverged": (), "missing": ()}
    return ArmSummary(
        name=name, baseline=None, knobs=knobs, values={0: value}, role="searched", **rest, **blank, **seeds
    )


def positions(scenario: Scenario, experiments: int) -> dict[str, int]:
    """Count the winners of a forked design with the guard for positions, and without it.

    `arms` positions are drawn; the effect varies over them by `deviation`, and at each by 1 over seeds.
    """
    random = scenario.random()
    winners = unguarded = 0
    for _ in range(experiments):
        means = scenario.effect + scenario.deviation * random.normal(0, 1, (scenario.arms, 1))
        table = means + random.normal(0, 1, (scenario.arms, scenario.pairs))
        whole = difference(table.mean(axis=0), Interval())
        each = {at: difference(row, Interval()) for at, row in enumerate(table)}
        (plain,) = judge([(whole, None)], True, plan=False)
        unguarded += plain.decided
        winners += qualified(plain, Views({1: whole}, each, {}, math.nan), True).decided
    return {"experiments": experiments, "winners": winners, "unguarded": unguarded}


def steps(scenario: Scenario, experiments: int) -> dict[str, int]:
    """Count sweeps with a gap by `steps_to`, those with a wrong interval, and the same of the fastest seeds.

    An arm takes `effect` steps more than its baseline. Both spread over seeds by `deviation`, with a
    correlation of .5; runs end at step `arms`. The fastest seeds are those that get there with both arms.
    """
    random = scenario.random()
    given = wrong = fastest = 0
    for _ in range(experiments):
        shared, *own = random.normal(0, scenario.deviation / math.sqrt(2), (3, scenario.pairs))
        needed = {"bf16": 70 + shared + own[0], "arm": 70 + scenario.effect + shared + own[1]}
        with tempfile.TemporaryDirectory() as folder:
            book, baseline = Ledger(Path(folder) / "ledger.db"), None
            for name, steps_needed in needed.items():
                baseline = baseline or book.add_arm(name, {}, None, None)
                arm = baseline if name == "bf16" else book.add_arm(name, {}, baseline, None)
                for seed, step in enumerate(steps_needed):
                    trial = book.add_member(arm, seed, f"{name}{seed}", "{}")
                    curve = {at: 2 + math.log(step / at) for at in range(10, scenario.arms + 1, 10)}
                    losses = [
                        {"step": at, "time": 0.0, "metrics": {"val/loss": loss}} for at, loss in curve.items()
                    ]
                    book.record(trial, losses)
                    book.settle(trial, "done")
            gap = summaries(book, Metric(name="steps_to/2.0"))[1].gap
            book.close()
        if gap is not None and gap.pairs:
            given, wrong = given + 1, wrong + (not gap.low <= scenario.effect <= gap.high)
        there = np.maximum(*needed.values()) <= scenario.arms
        if there.sum() > 1:
            pairs = (needed["arm"] - needed["bf16"])[there]
            found = difference(pairs, Interval())
            fastest += not found.low <= scenario.effect <= found.high
    return {"experiments": experiments, "given": given, "wrong": wrong, "fastest": fastest}


KINDS = {"promise": promise, "headline": headline, "growth": growth, "coverage": coverage, "counts": counts}
KINDS |= {"correlation": correlated, "ranks": ranks, "search": search, "positions": positions, "steps": steps}
SHARES = {"promise": 0.03, "growth": 0.2, "search": 0.05, "steps": 0.1}
"""Experiments of a scenario of each costly kind, as a share of those asked for."""


def run(cache: Path, experiments: int, kinds: set[str]) -> dict[str, dict[str, int]]:
    """Return the results of every scenario of some kinds."""

    def measured(scenario: Scenario) -> dict[str, int]:
        share_of = SHARES.get(scenario.kind, 1.0)
        return KINDS[scenario.kind](scenario, max(1, round(experiments * share_of)))

    wanted = [scenario for scenario in scenarios() if scenario.kind in kinds]
    return cached(cache, "experiments", experiments, wanted, measured)


def cached(cache: Path, option: str, count: int, wanted: Sequence[Seeded], measure: Callable) -> dict:
    """Return the results of scenarios, from the cache if they are there; print progress on stderr.

    Args:
        cache: file of the results so far.
        option: option of the command whose value all results of a cache share.
        count: its value.
        wanted: the scenarios.
        measure: function from a scenario to its result.
    """
    results = json.loads(cache.read_text()) if cache.exists() else {}
    if results.setdefault(option, count) != count:
        raise SystemExit(
            f"{cache}: made with --{option} {results[option]}, not {count}; name another --cache"
        )
    for number, scenario in enumerate(wanted, 1):
        if scenario.name not in results:
            results[scenario.name] = measure(scenario)
            written = cache.with_suffix(".part")
            written.write_text(json.dumps(results, indent=0))
            written.replace(cache)
        end = "" if sys.stderr.isatty() and number < len(wanted) else "\n"
        print(f"\r{number} of {len(wanted)}: {scenario.name:50}", end=end, file=sys.stderr, flush=True)
    return {scenario.name: results[scenario.name] for scenario in wanted}


# Tables


def share(part: float, whole: float, independent: float | None = None) -> str:
    """Return a percentage with its standard error by the number of independent experiments."""
    if not whole:
        return "-"
    p, count = part / whole, independent or whole
    return f"{100 * p:.1f} ±{100 * math.sqrt(p * (1 - p) / count):.1f} %"


def kept(results: Mapping[str, Mapping[str, int]], **fixed: float | str) -> str:
    """Return the share of promises kept over all scenarios with these parameters."""
    lines = [
        results[scenario.name]
        for scenario in scenarios()
        if scenario.kind == "promise"
        and scenario.name in results
        and all(getattr(scenario, key) == value for key, value in fixed.items())
    ]
    return share(sum(line["kept"] for line in lines), sum(line["made"] for line in lines))


def tables(results: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """Yield the lines of all tables."""
    if any(name.startswith("promise") for name in results):
        yield from ("| promises kept | t | split:4 | sequence |", "|---|---|---|---|")
        rows = [(f"effects {shape}", {"shape": shape}) for shape in PRIORS]
        rows += [("fixed effects, all", {})]
        rows += [(f"effect {effect:g}", {"effect": effect}) for effect in EFFECTS]
        rows += [(f"deviation {deviation:g}", {"deviation": deviation}) for deviation in DEVIATIONS]
        rows += [(f"after {pairs} seeds", {"pairs": pairs}) for pairs in STARTS]
        rows += [(f"after {pairs} seeds, deviation 4", {"pairs": pairs, "deviation": 4}) for pairs in STARTS]
        for title, fixed in rows:
            cells = (
                kept(results, **{"interval": interval, "arms": 1, "shape": "normal"} | fixed)
                for interval in INTERVALS
            )
            yield f"| {title} | {' | '.join(cells)} |"
        yield from (
            "",
            "| four arms, t, deviation 2 | promises kept |",
            "|---|---|",
            f"| all | {kept(results, arms=4)} |",
        )
        yield from (f"| effect {effect:g} | {kept(results, arms=4, effect=effect)} |" for effect in EFFECTS)
        yield ""
    by_kind = {
        "headline": "| 8 arms, no effect | seeds | deviation | false headline | uncorrected |",
        "growth": "| 8 arms, no effect, seeds grow | from | deviation | false headline |",
        "coverage": "| differences | seeds | 95 % interval covers |",
        "counts": "| counts, no effect | seeds | rate | false verdict | zero width, non-zero mean |",
        "correlation": "| values | true correlation | seeds | Fisher's interval covers |",
        "ranks": "| no effect, seeds grow from 6 to 24 | Wilcoxon's p < 5 % at the end | at any look |",
        "search": "| sampler | arms | interactions | covers the mean effect | false calls |",
        "positions": "| positions | spread over them | effect | seeds | winners | without the guard |",
        "steps": "| runs end at | seeds | gap given | wrong interval | wrong interval of the fastest |",
    }
    for kind, head in by_kind.items():
        lines = [scenario for scenario in scenarios() if scenario.kind == kind and scenario.name in results]
        if lines:
            yield from (head, f"|{'---|' * (head.count('|') - 1)}")
            yield from (_row(scenario, results[scenario.name]) for scenario in lines)
            yield ""


def _row(scenario: Scenario, got: Mapping[str, int]) -> str:
    one, whole = scenario, got.get("experiments", got.get("sweeps", 0))
    cells = {
        "coverage": (one.shape, one.pairs),
        "counts": ("Poisson", one.pairs, f"{one.deviation:g}"),
        "correlation": (one.shape, f"{one.effect:g}", one.pairs),
        "ranks": (one.interval,),
        "search": (one.shape, one.arms, f"{one.effect:g}"),
        "positions": (one.arms, f"{one.deviation:g}", f"{one.effect:g}", one.pairs),
        "steps": (one.arms, one.pairs),
    }.get(one.kind, (one.interval, one.pairs, f"{one.deviation:g}"))
    counted = [
        share(count, got.get("idle", whole) if key == "false" else whole)
        for key, count in got.items()
        if key not in ("experiments", "sweeps", "idle")
    ]
    return f"| {' | '.join(map(str, (*cells, *counted)))} |"


def main() -> None:
    """Run what the cache lacks, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path("simulated_truth.json"),
        help="Results so far. Default: %(default)s.",
    )
    parser.add_argument(
        "--experiments", type=int, default=10_000, help="Experiments of a scenario of the cheapest kind."
    )
    parser.add_argument("--kind", choices=KINDS, action="append", help="Only these tables; may be repeated.")
    given = parser.parse_args()
    print(
        f"Simulated truth, alpha {ALPHA}; effects and deviations in units of min_effect; "
        "± is a standard error.\n"
    )
    print("\n".join(tables(run(given.cache, given.experiments, set(given.kind or KINDS)))))


if __name__ == "__main__":
    main()
