"""Mistakes that a person would make, each with the test file that must see it. `make mutants-by-hand`.

A mistake is a text that stands exactly once in a function, and the text that takes its place. If you change such
a function, write the mistake anew in its new text; if the function goes, remove its mistakes, unless another
function keeps the promise now.
"""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mutants.changes import Source
from mutants.draw import PACKAGE

REMEDY = (
    "write the mistake anew in the text that keeps this promise now, or remove it from tests/mutants/by_hand.py if"
    " nothing promises this any more"
)


@dataclass(frozen=True)
class Mistake:
    """One mistake: `before` of `function` in `file`, a path in the package, becomes `after`."""

    file: str
    function: str
    before: str
    after: str
    test: str
    promise: str

    def _place(self, root: Path) -> tuple[str, int]:
        """Return the text of the file and the place of `before` in it; ValueError unless there is one."""
        source = _source(root / self.file)
        spans = [source.span(node) for name, node in source.functions() if name == self.function]
        bodies = [
            (source.content[:start].decode(), source.content[start:end].decode()) for start, end in spans
        ]
        places = [
            len(head) + body.index(self.before) for head, body in bodies if body.count(self.before) == 1
        ]
        if len(places) != 1:
            raise ValueError(
                f"{self.file}: {self.function} does not have {self.before!r} exactly once ({self.promise}):"
                f" {REMEDY}"
            )
        return source.text, places[0]

    def text(self, root: Path = PACKAGE) -> str:
        """Return the text of the file with the mistake; ValueError if it has no place there."""
        text, place = self._place(root)
        changed = text[:place] + self.after + text[place + len(self.before) :]
        ast.parse(changed)
        return changed

    def line(self, root: Path = PACKAGE) -> int:
        """Return the line of the mistake."""
        text, place = self._place(root)
        return text.count("\n", 0, place) + 1


@cache
def _source(path: Path) -> Source:
    return Source(path.read_text() if path.is_file() else "")


MUTANTS = (
    # Numbers on a grid
    Mistake(
        "numerics/rounding.py",
        "nearest",
        "(f == 0.5) & ~grid.even(lower)",
        "(f == 0.5) & grid.even(lower)",
        "test_own.py",
        "ties on a user's grid go to the even code",
    ),
    Mistake(
        "numerics/rounding.py",
        "away",
        ">= 0.5).mul_(step)",
        "> 0.5).mul_(step)",
        "test_rounding.py",
        "ties of `away` go away from zero",
    ),
    Mistake(
        "numerics/rounding.py",
        "stochastic",
        ".sub_(bits).floor_()",
        ".sub_(bits).round_()",
        "test_rounding.py",
        "the probability of rounding up is floor(2^width f) / 2^width",
    ),
    Mistake(
        "numerics/formats.py",
        "Format.step",
        "(self.emin + 127) << 23",
        "(self.emin + 126) << 23",
        "test_formats.py",
        "subnormals are as far apart as the smallest normals",
    ),
    Mistake(
        "numerics/scaling.py",
        "percentile",
        "math.ceil(p * x.numel())",
        "math.floor(p * x.numel())",
        "test_scaling.py",
        "a percentile is the order statistic ceil(p n)",
    ),
    Mistake(
        "numerics/scaling.py",
        "encode_scale",
        "element_format(quant.element).max * quant.outer.bound",
        "element_format(quant.element).max",
        "test_scaling.py",
        "the outer scale maps amax to element maximum times scale bound",
    ),
    Mistake(
        "numerics/scaling.py",
        "block_scales",
        "below = exact / rounded <",
        "below = exact / rounded <=",
        "test_pairs_and_powers.py",
        "a scale is halved below the limit, and not at it",
    ),
    Mistake(
        "numerics/scaling.py",
        "outer_statistic",
        "grouped = amaxes.amax(dim=2, keepdim=True)",
        "grouped = amaxes.amax(dim=0, keepdim=True)",
        "test_scaling.py",
        "an outer scale per row is of its own row",
    ),
    Mistake(
        "numerics/scaling.py",
        "micro_scales",
        "(sub_blocks >= limit)",
        "(sub_blocks > limit)",
        "test_micro_exponents.py",
        "a sub-block that reaches the limit has a micro-exponent",
    ),
    Mistake(
        "numerics/select.py",
        "select",
        "better = other_error < error",
        "better = other_error > error",
        "test_select.py",
        "the candidate with the smallest error is chosen",
    ),
    Mistake(
        "numerics/select.py",
        "select",
        "error = torch.where(better, other_error, error)",
        "pass",
        "test_select.py",
        "a third candidate is compared with the best of two",
    ),
    Mistake(
        "numerics/hadamard.py",
        "rotate",
        "rotated * flips if back else rotated",
        "rotated",
        "test_hadamard.py",
        "rotating back undoes the signs",
    ),
    Mistake(
        "numerics/hadamard.py",
        "per_step",
        "replace(clock, micro_batch=0)",
        "clock",
        "test_hadamard.py",
        "all micro-batches of a step rotate by the same signs",
    ),
    Mistake(
        "numerics/philox.py",
        "philox_key",
        "return clock.seed & _MASK,",
        "return 0,",
        "test_philox.py",
        "two seeds draw different bits",
    ),
    Mistake(
        "numerics/philox.py",
        "philox_key",
        "purpose << 4 | call",
        "call",
        "test_philox.py",
        "elements and block scales never draw the same bits",
    ),
    Mistake(
        "numerics/philox.py",
        "site",
        'f"{layer}/{slot}"',
        'f"{layer}"',
        "test_philox.py",
        "two operands of a layer draw different bits",
    ),
    Mistake(
        "numerics/history.py",
        "History.before",
        "clock.step - steps <= step",
        "clock.step - steps < step",
        "test_history.py",
        "`delayed:n` looks back n steps",
    ),
    Mistake(
        "numerics/history.py",
        "History.note",
        "if clock.trains:",
        "if True:",
        "test_history.py",
        "an evaluation adds nothing to the history",
    ),
    Mistake(
        "numerics/partition.py",
        "Partition.misfit",
        "(rows, columns)[self.axis]",
        "(columns, rows)[self.axis]",
        "test_partition.py",
        "a part that cuts a block is refused, along the axis that is divided",
    ),
    Mistake(
        "numerics/quantize.py",
        "ms_eden",
        "power / inner)",
        "inner / power)",
        "test_quantize.py",
        "MS-EDEN multiplies scales by <y, y> / <y, q>",
    ),
    Mistake(
        "numerics/quantize.py",
        "_with_error",
        "difference.mul_(error.times).add_(source)",
        "difference.add_(source).mul_(error.times)",
        "test_error.py",
        "an error is amplified, the source is not",
    ),
    # Recipes and engines
    Mistake(
        "recipes/recipe.py",
        "Layers.quantises",
        "self.skip_first <= block < blocks - last",
        "self.skip_first <= block <= blocks - last",
        "test_recipe.py",
        "the last blocks stay in high precision",
    ),
    Mistake(
        "recipes/recipe.py",
        "Layers.deciders",
        "reversed(range(len(self.rules)))",
        "range(len(self.rules))",
        "test_recipe.py",
        "the first rule that matches a layer decides",
    ),
    Mistake(
        "recipes/recipe.py",
        "Phase.active",
        "step * run.tokens_per_step >= number",
        "step >= number",
        "test_recipe.py",
        "a phase that begins at a number of tokens counts tokens",
    ),
    Mistake(
        "recipes/layers.py",
        "Match.span",
        "range(max(0, blocks - count), blocks)",
        "range(max(0, blocks - count), blocks - 1)",
        "test_layers.py",
        "`last:n` has the last block in it",
    ),
    Mistake(
        "recipes/weight_noise.py",
        "Noise.sigma",
        "((stage - 1) / (self.stages - 1))",
        "(stage / self.stages)",
        "test_weight_noise.py",
        "noise begins at `start`",
    ),
    Mistake(
        "engines/weight_noise.py",
        "gaussian",
        "(-2 * ((",
        "(-1 * ((",
        "test_weight_noise.py",
        "noise on norms has the standard deviation of the recipe",
    ),
    Mistake(
        "engines/weight_noise.py",
        "NormNoise.added",
        "weight.copy_(kept[name])",
        "pass",
        "test_weight_noise.py",
        "norms have their bits back after a step",
    ),
    Mistake(
        "engines/weights.py",
        "Travel.ratio",
        "self.q_way / self.w_way",
        "self.w_way / self.q_way",
        "test_weights.py",
        "the oscillation ratio is |dQ(w)| / |dw|",
    ),
    Mistake(
        "engines/weights.py",
        "Averaging.after",
        "1 - self.spec.decay",
        "self.spec.decay",
        "test_weights.py",
        "Q-EMA's average keeps the share `decay`",
    ),
    Mistake(
        "engines/weights.py",
        "Measuring.ended",
        "== self.spec.window - 1",
        "== self.spec.window",
        "test_weights.py",
        "OsciReset and Q-Ramping measure a window of `window` steps",
    ),
    Mistake(
        "engines/weights.py",
        "Ramping.after",
        "for collected in (self.sums[name], count):",
        "for collected in (self.sums[name],):",
        "test_weights.py",
        "after an update the count of waiting gradients begins anew",
    ),
    Mistake(
        "engines/following.py",
        "Replacement.follow",
        'self.clock.stream == "evaluation"',
        'self.clock.stream != "evaluation"',
        "test_emulated.py",
        "a copy of a layer adds nothing to the training's history",
    ),
    Mistake(
        "engines/emulated_layer.py",
        "EmulatedLinear.weight_operand",
        "and lasts(quant, rotation)",
        "and True",
        "test_emulated.py",
        "a weight that is rounded by random bits is cast anew at each call",
    ),
    Mistake(
        "engines/emulated_layer.py",
        "EmulatedLinear.redrawn",
        'site(f"{self.name}/redrawn", slot)',
        "site(self.name, slot)",
        "test_product_errors.py",
        "a second draw of a gradient has other random bits",
    ),
    # Training
    Mistake(
        "training/guard.py",
        "Watch._cause",
        "(middle := median(past))",
        "(middle := max(past))",
        "test_stability.py",
        "a guard compares with the median of the window",
    ),
    Mistake(
        "training/guard.py",
        "Watch.judge",
        "self.skipped == self._guard.limit",
        "self.skipped > self._guard.limit",
        "test_stability.py",
        "a guard stops the run at the step after `limit` skipped ones",
    ),
    Mistake(
        "training/evaluation.py",
        "_against",
        "chosen.abs() > _EXTREME",
        "chosen > _EXTREME",
        "test_evaluation.py",
        "a token whose probability falls by a factor of 2 is extreme, too",
    ),
    Mistake(
        "training/evaluation.py",
        "evaluate",
        'run.engine.clock.stream = "evaluation"',
        "pass",
        "test_evaluation.py",
        "an evaluation draws from its own stream",
    ),
    Mistake(
        "training/hyperparameters.py",
        "Training.lr_at",
        "(step + 1) / (warm + 1)",
        "step / (warm + 1)",
        "test_train.py",
        "the first step of a warm-up has a rate above zero",
    ),
    Mistake(
        "training/loop.py",
        "Loop._losses",
        "self.loss(*self.part.of(self.run.batch(step, micro_batch))) / self.parts",
        "self.loss(*self.part.of(self.run.batch(step, micro_batch)))",
        "test_train.py",
        "a gradient is the mean over micro-batches",
    ),
    Mistake(
        "training/metrics.py",
        "gradient_split",
        "(sums - total / k) / (k - 1)",
        "(sums - total / k) / k",
        "test_metrics.py",
        "the variance of a gradient is estimated without bias",
    ),
    # What is stored
    Mistake(
        "files.py",
        "write_text",
        "os.fsync(file.fileno())",
        "pass",
        "test_store.py",
        "a file is on the disk before it takes the place of the old one",
    ),
    Mistake(
        "files.py",
        "lock",
        "path.exists() and path.read_bytes() == holder.encode()",
        "path.exists()",
        "test_damaged_state.py",
        "an attempt whose lock another one took does not hold it any more",
    ),
    Mistake(
        "store/trial_store.py",
        "_checksum",
        "zlib.crc32(text, zlib.crc32(trial.encode()))",
        "zlib.crc32(text)",
        "test_store.py",
        "a line of another trial is damage",
    ),
    Mistake(
        "store/trial_store.py",
        "Store.result",
        'if result.get("id", trial) != trial:',
        "if False:",
        "test_store.py",
        "the result of another trial is damage",
    ),
    Mistake(
        "store/trial_store.py",
        "Store.commit",
        "(*self._events_files(trial), self.folder(trial))",
        "(self.folder(trial),)",
        "test_store.py",
        "events are on the disk before the result that vouches for them",
    ),
    Mistake(
        "store/trial_store.py",
        "_sizes",
        "sorted(found)",
        "sorted(found, reverse=True)",
        "test_scheduler.py",
        "the least recently used checkpoint is deleted first",
    ),
    Mistake(
        "store/trial_store.py",
        "Store._lay",
        'if event["step"] <= until:',
        'if event["step"] < until:',
        "test_store.py",
        "a trunk's records end with its last step, which is included",
    ),
    Mistake(
        "store/ledger_records.py",
        "RecordQueries.rates",
        "sum(steps) / sum(steps / value)",
        "sum(steps * value) / sum(steps)",
        "test_ledger.py",
        "a mean rate is steps over time, not the mean of rates",
    ),
    Mistake(
        "store/ledger_records.py",
        "RecordQueries.beyond",
        '("max", ">") if above else ("min", "<")',
        '("min", ">") if above else ("max", "<")',
        "test_ledger.py",
        "the worst value beyond a limit is the farthest one",
    ),
    Mistake(
        "store/registration.py",
        "late_changes",
        "late = entry",
        "late = late or entry",
        "test_headline.py",
        "the last late change is the one that a report names",
    ),
    # Statistics
    Mistake(
        "results/paired_stats.py",
        "paired_difference",
        "values[:, 0] - values[:, 1]",
        "values[:, 1] - values[:, 0]",
        "test_stats.py",
        "a difference is arm minus baseline",
    ),
    Mistake(
        "results/paired_stats.py",
        "holm",
        "(len(finite) - rank) * p",
        "(rank + 1) * p",
        "test_stats.py",
        "Holm multiplies the smallest p-value by the number of comparisons",
    ),
    Mistake(
        "results/paired_stats.py",
        "holm",
        "largest = max(largest, min(",
        "largest = max(0.0, min(",
        "test_inference.py",
        "corrected p-values rise with the uncorrected ones",
    ),
    Mistake(
        "results/paired_stats.py",
        "p_value",
        "difference.interval.looks * 2 *",
        "2 *",
        "test_stats.py",
        "looks at the results share the 5 %",
    ),
    Mistake(
        "results/paired_stats.py",
        "equivalence",
        "math.copysign(margin, difference.mean)",
        "math.copysign(margin, -difference.mean)",
        "test_stats.py",
        "equivalence is tested at the nearer margin",
    ),
    Mistake(
        "results/paired_stats.py",
        "_verdict",
        "(difference.mean < 0) == minimize",
        "difference.mean < 0",
        "test_results.py",
        "more is better of a metric that is maximised",
    ),
    Mistake(
        "results/paired_stats.py",
        "Difference.error",
        "math.hypot(self.deviation / math.sqrt(self.pairs), self.shared_error)",
        "self.deviation / math.sqrt(self.pairs)",
        "test_forked_statistics.py",
        "an error that all pairs share is in the p-value",
    ),
    Mistake(
        "results/intervals.py",
        "_t",
        "1 - alpha / looks / 2",
        "1 - alpha / 2",
        "test_stats.py",
        "an interval for several looks is wider",
    ),
    Mistake(
        "results/unpaired.py",
        "unpaired_difference",
        "1 - ALPHA / 2",
        "1 - ALPHA",
        "test_judge.py",
        "an unpaired interval has 2.5 % on either side",
    ),
    Mistake(
        "results/number_text.py",
        "percent_texts",
        '{100 * value:+z.{places}f}", f"',
        '{value:+z.{places}f}", f"',
        "test_results.py",
        "a percentage is a hundred times the fraction",
    ),
    Mistake(
        "results/log_ratios.py",
        "_margin",
        "math.log1p(arm.margin / level)",
        "math.log1p(arm.margin)",
        "test_changes.py",
        "`min_effect` is a share of the baseline's mean",
    ),
    Mistake(
        "results/doses.py",
        "share_closed",
        "float(1 - b.mean() / a.mean())",
        "float(b.mean() / a.mean())",
        "test_attribution.py",
        "a dose that leaves nothing of a gap closes all of it",
    ),
    Mistake(
        "results/attribution.py",
        "interactions",
        "((both, neither), (alone, rest))",
        "((both, rest), (alone, neither))",
        "test_attribution.py",
        "an interaction is the difference of two effects",
    ),
    Mistake(
        "results/attribution.py",
        "shares",
        "math.factorial(len(cell) - sum(cell) - 1)",
        "math.factorial(len(cell) - sum(cell))",
        "test_attribution.py",
        "Shapley shares add up to the effect of the whole recipe",
    ),
    Mistake(
        "results/forked.py",
        "shared_error",
        "variance - residual / seeds",
        "variance",
        "test_forked_statistics.py",
        "noise of single seeds is not counted twice",
    ),
    Mistake(
        "results/forked.py",
        "shared_error",
        "((len(parts) - 1) * (seeds - 1))",
        "(len(parts) * (seeds - 1))",
        "test_forked_statistics.py",
        "a residual mean square is divided by its degrees of freedom",
    ),
    Mistake(
        "results/forked.py",
        "Readings.growth",
        "early[seed] / window",
        "early[seed] / longest",
        "test_forked_statistics.py",
        "growth compares damage per step",
    ),
    Mistake(
        "results/calibration.py",
        "Candidate.goal",
        "FIFTH * abs(self.effect)",
        "abs(self.effect)",
        "test_forked_statistics.py",
        "the smallest effect that matters is a fifth of the known-bad arm's",
    ),
    Mistake(
        "results/contrasts.py",
        "_contrast",
        "(first, second) if switch and not second.knobs[knob] else (second, first)",
        "(second, first)",
        "test_results.py",
        "false is the reference of a switch, in whatever order",
    ),
    # From a file to trials
    Mistake(
        "experiment/trial_spec.py",
        "TrialSpec.history",
        "if point[0] < step]",
        "if point[0] <= step]",
        "test_checkpoints.py",
        "what begins at a step did not determine the state before it",
    ),
    Mistake(
        "experiment/trial_spec.py",
        "TrialSpec.id",
        '"twin": self.twin}',
        '"twin": False}',
        "test_forks.py",
        "a twin is another trial",
    ),
    Mistake(
        "experiment/trial_spec.py",
        "TrialSpec.parse",
        'if spec.id != (id or content["id"]):',
        "if False:",
        "test_trial.py",
        "a trial that resolves differently here is refused",
    ),
    Mistake(
        "experiment/search_space.py",
        "alike",
        "type(a) is type(b) and a == b",
        "a == b",
        "test_experiment.py",
        "true is not 1",
    ),
    Mistake(
        "experiment/search_space.py",
        "Dimension.holds",
        "self.low <= value <= self.high",
        "self.low <= value < self.high",
        "test_experiment.py",
        "both ends of a range belong to it",
    ),
    Mistake(
        "experiment/forked_design.py",
        "_positions",
        "(design.positions - 1)",
        "design.positions",
        "test_forks.py",
        "the last of several positions is at the end of their range",
    ),
    Mistake(
        "experiment/phases.py",
        "never_begins",
        "if every <= last:",
        "if every < last:",
        "test_phases.py",
        "a phase that is measured at the last step can begin",
    ),
    # Running
    Mistake(
        "execution/failures.py",
        "Failures.repeats",
        "self._attempts[error.identity] > 1",
        "self._attempts[error.identity] > 2",
        "test_user_errors.py",
        "an exception that repeats is not tried a third time",
    ),
    Mistake(
        "execution/job_array.py",
        "Task._may_end",
        "written > told",
        "written > 0",
        "test_job_array.py",
        "a task that is told to end waits for its next checkpoint",
    ),
    Mistake(
        "execution/scheduler.py",
        "Scheduler.adopt",
        'result["started"] < self._fresh',
        'result["started"] > self._fresh',
        "test_scheduler.py",
        "`--fresh` puts old results aside, and no new ones",
    ),
    Mistake(
        "execution/scheduler.py",
        "Scheduler._agrees",
        'if records is None or records != result["records"]["sha256"]:',
        "if records is None:",
        "test_scheduler.py",
        "records that differ from the result's digest are read again",
    ),
    Mistake(
        "execution/search/study.py",
        "Study._equip",
        "(search.seed * 1_000_003 + points)",
        "(search.seed * 1_000_003)",
        "test_search.py",
        "a study that is opened again does not propose its first points again",
    ),
    Mistake(
        "execution/messages.py",
        "send",
        'b"\\n" + json',
        "json",
        "test_messages.py",
        "a message after a torn line begins a line of its own",
    ),
    Mistake(
        "execution/same_code.py",
        "_without_code",
        '"data": "", "id": ""}',
        '"data": "", "id": "", "workload": ""}',
        "test_same_code.py",
        "only a trial whose code alone was edited is taken over",
    ),
    Mistake(
        "execution/workers/placement.py",
        "placements",
        "min(units, unused.get(node, 0.0))",
        "units",
        "test_placement.py",
        "units that other programs use are not taken",
    ),
    Mistake(
        "execution/time_model.py",
        "MachinePaces.keep",
        "[-_MOST_PACES:]",
        "[:_MOST_PACES]",
        "test_time_model.py",
        "the newest paces of a machine are remembered",
    ),
    # What people read
    Mistake(
        "reports/leaderboard.py",
        "Entry.sort_key",
        "(1 if self.minimize else -1)",
        "1",
        "test_leaderboard.py",
        "the best arm comes first, of a metric that is maximised as well",
    ),
    Mistake(
        "reports/plain_text.py",
        "csv_cell",
        '("\'" if _FORMULA.match(value) else "")',
        '""',
        "test_plain_text.py",
        "no spreadsheet reads a text as a formula",
    ),
    Mistake(
        "verification/check_result.py",
        "near",
        "abs(measured / expected - 1) <= tolerance",
        "measured / expected - 1 <= tolerance",
        "test_doctor.py",
        "a value that is too small is not near",
    ),
    Mistake(
        "cli/common.py",
        "interruption",
        "isinstance(error, Terminated) or Terminated.received",
        "isinstance(error, Terminated)",
        "test_endings.py",
        "a SIGTERM that arrives in Ray's code is no Ctrl-C",
    ),
)
"""Mistakes, by what they would spoil."""
