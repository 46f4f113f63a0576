"""Columns of a foreign source: which one is the arm, the seed, the step, and which are metrics.

A user names them, or they are guessed from names that people use. A guess is never silent: it is added to the
sentences that are printed. Two columns that fit equally are refused, as is a name that is nearly one of the
usual ones: `sede` is more likely a mistake than a table without seeds.
"""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from shlex import quote
from typing import Literal

from ablate.errors import InputError, brief, nearest
from ablate.training.log_readers.lines import METRICS, metric_name

USUAL: dict[str, tuple[str, ...]] = {
    "arm": ("arm", "recipe", "variant", "treatment", "condition", "method", "precision"),
    "seed": ("seed", "random_seed", "rng_seed"),
    "step": ("step", "global_step", "iteration", "iter", "train_step", "training_step", "steps"),
    "run": ("run", "run_name", "run_id", "run_uuid", "name", "id"),
}
"""Usual names of each role; the first is ours, and is taken even if others are there, too."""
_ABOVE = re.compile(
    r"((config|cfg|params?|hparams?|hyper_?parameters|(training_)?args|options|train_loop_config"
    r"|trainer|train|training|summary)\.)+(?=[^.]*$)"
)
"""Words before a dot or a slash that do not change what a column is: `config.trainer.seed`."""
_ALIKE = 0.74
_NOT_MEANT = ("speed", "stop")
"""Words that are alike and mean something else."""

_OF_METRIC = "loss acc accuracy ppl perplexity bleu rouge f1 auc score error bpb nll mse wer mmlu hellaswag"
"""Words in the name of a final value, as against a setting: a table of one row a run has both."""
_OF_SETTING = "weight coef scale scaling lambda alpha threshold smoothing fn type"
"""Last words of a setting whose name has one of a metric, too: `z_loss_weight`."""
_HIGHER = re.compile(
    r"(.* )?(acc\d*|accuracy|bleu|rouge ?(\d|l|lsum)?|meteor|chrf|f1|auc|auroc|roc auc|auprc|em|exact match"
    r"|score|rewards?|returns?|r2|r squared|explained( variance)?|sqnr|p?snr|ssim|mfu|hfu|tflops|throughput"
    r"|(tokens|samples|steps|it) (per )?(s|sec|second)|(win|success|hit) ?rate|pass|top ?\d+|recall|precision"
    r"|mcc|kappa|pearson|spearman|corr(elation)?|cos(ine)?( sim(ilarity)?)?|mrr|ndcg|m?ap|m?iou|dice|elo"
    r"|log ?(prob|likelihood)s?|elbo|mmlu|hellaswag|gsm8k|humaneval|piqa|winogrande|boolq|arc)"
    r"( (norm|none|mean|avg|average|macro|micro|weighted|top ?\d+|db|k|\d+|best|last|final|strict match))*"
)
"""Names of metrics of which more is better, in words: `val acc norm`."""
_LOWER = re.compile(r"\b(loss|err(or)?|ppl|perplexity|nll|neg(ative)?|bpb|brier|fid|[wc]er|r?mse|mae|kl)\b")
"""Words of metrics of which less is better, whatever their last word is: `brier_score`."""
_RATE = re.compile(r"(?!.*(loss|acc|=)).*(?<![a-z])(lr|learning[ _-]?rate)([^a-z].*)?")


@dataclass(frozen=True)
class Columns:
    """Names that a user gave for what a source calls otherwise; None: guess, and say so."""

    arm: str | None = None
    """Column, or field of a run's configuration, with the name of the arm."""
    seed: str | None = None
    """Column or field with the seed."""
    step: str | None = None
    """Column with the step."""
    metrics: Mapping[str, str] | None = None
    """Column of each metric, by the name that the metric gets: `{"val/loss": "eval_loss"}`."""
    run: str | None = None
    """Column with the name of the run."""
    name: str | None = None
    """Pattern of a run's name, such as `{arm}-s{seed}`, from which arm and seed are read."""
    asked: str | None = None
    """Column that is a metric whatever its name says, since the user compares it."""
    without: Collection[str] = ()
    """Names of runs to be left out, which need not be of the pattern."""
    of_path: Mapping[str, str] = field(default_factory=dict)
    """Arm, seed and settings in the path of the source that is read."""


GUESS = Columns()
"""Nothing is named."""


def pick(role: str, given: str | None, names: Sequence[str], where: str, said: list[str]) -> str | None:
    """Return the column of a role; None if no name is like one. A guess is added to `said`.

    InputError if the column `given` by the user is not there, several fit, or one is nearly a usual name.
    """
    if given is not None:
        if given in names:
            return given
        raise InputError(f"{where}: no column {brief(given)!r} for the {role}; {nearest(given, names)}")
    fitting = [name for name in names if plain(name) in USUAL[role]]
    best = [name for name in fitting if plain(name) == role] or fitting
    if role == "run":  # any of them tells runs apart
        best = sorted(best, key=lambda name: USUAL["run"].index(plain(name)))[:1]
    if len(best) > 1:
        several = f"several columns may be the {role}: {_listed(best)}"
        raise InputError(f"{where}: {several}; name one, --column {role}=COLUMN")
    if best:
        said.append(f"{where}: {role}: column {brief(best[0])!r}")
        return best[0]
    ratios = {name: difflib.SequenceMatcher(None, plain(name), role).ratio() for name in names}
    near = [name for name in names if plain(name) not in _NOT_MEANT and ratios[name] >= _ALIKE]
    if near and role != "run":
        named = f"--column {quote(f'{role}={brief(near[0])}')}"
        raise InputError(f"{where}: no column {role!r}; if {_listed(near)} is meant, name it, {named}")
    return None


def metric_columns(columns: Columns, names: Sequence[str], where: str, said: list[str]) -> dict[str, str]:
    """Return the column of each metric, by the metric's name here, of columns that may be metrics.

    A new name is added to `said`. InputError if a column is not there, or two are the same metric.
    """
    if columns.metrics is not None:
        for column in columns.metrics.values():
            if column not in names:
                hint = nearest(column, names)
                raise InputError(f"{where}: no column {brief(column)!r} of a metric; {hint}")
        return dict(columns.metrics)
    found: dict[str, str] = {}
    for name in names:
        ours = metric_name(name)
        if columns.asked is None or columns.asked not in names or ours != metric_name(columns.asked):
            if ours in found:
                both = f"columns {_listed([found[ours], name])} may both be {ours}"
                raise InputError(f"{where}: {both}; name one, --metric {ours}=COLUMN")
        elif name != columns.asked:
            continue
        found[ours] = name
        if ours != name:
            said.append(f"{where}: metric {ours}: column {brief(name)!r}")
    return found


def like_metric(text: str) -> bool:
    """Return True for a name such as `val_acc`, which is a result and not a setting."""
    words = text.lower().translate(str.maketrans("/-. ", "____")).split("_")
    return (metric_name(text) in METRICS and metric_name(text) != "train/lr") or (
        not {*words}.isdisjoint(_OF_METRIC.split()) and words[-1] not in _OF_SETTING.split()
    )


def direction_of(metric: str) -> Literal["minimize", "maximize"]:
    """Return the direction of improvement that the last words of a name say: `maximize` for `val_acc`."""
    parted = re.sub(r"(?<=[a-z])(?=[A-Z][a-z])|[^A-Za-z0-9]+", " ", metric).strip().lower()
    return "maximize" if _HIGHER.fullmatch(parted) and not _LOWER.search(parted) else "minimize"


def is_rate(name: str) -> bool:
    """Return True for the name of a learning rate's series: `lr`, `optim/learning_rate`, `lr-AdamW/pg1`."""
    return bool(_RATE.fullmatch(name.strip().lower()))


def plain(name: str) -> str:
    """Return the name of a column in small letters, without words above it: `seed` for `config/Seed`."""
    text = name.strip().lower().replace("/", ".")
    found = _ABOVE.match(text)
    return text[found.end() if found else 0 :].replace("-", "_").replace(" ", "_").strip("_")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(brief(name)) for name in names)
