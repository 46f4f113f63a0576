"""Fields of configurations that say which run it is, and nothing of how it was trained: ids, places, times.

A further seed (`data_seed`) is one if runs have a seed, and pairs that differ in it are named. A learning
rate that changes over steps is a setting by its largest value.

Eight runs with eight learning rates are no eight seeds of one configuration. So a field that differs between
runs is a setting unless its name is known (`_NAMES`, `_RECORDS`), or it is a text without a digit and without
a word for a hyperparameter. A whole number is an id under a known name alone, and a fraction never; times and
speeds (`_MEASURED`) are what a run gave, so they may be any number.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from ablate.errors import brief
from ablate.files import Json
from ablate.judging.cells import shown
from ablate.judging.columns import is_rate, plain
from ablate.judging.run import ForeignRun, by_arm
from ablate.judging.statuses import known
from ablate.results.number_text import counted
from ablate.training.log_readers.lines import metric_name

_NAMES = re.compile(
    r"id|name|tags?|number|notes?|comments?|description|user|owner|index|row|run|trial|job|sweep|output"
    r"|(run|trial|exp|experiment|(slurm)?job|sweep|display|user)(name|number|index)|directory|out|logs?|cwd"
    r"|(run|output|out|save|log|logging|checkpoint|ckpt|work|working|defaultroot)?(dir|path|file|folder)"
    r"|filename|(gpu|device)(id)?|cudavisibledevices|.*seed|.*randomstate"
)
"""Names under which each run of a source may have a value of its own: texts and whole numbers."""
_RECORDS = re.compile(
    r"(run|trial|exp|experiment|sweep|wandb|wandbrun|process|worker|node|(slurm)?(array)?(job|task))(id|uuid)"
    r"|uuid|(run|wandb)?url|link|artifact(uri|location)|p?pid|hosts?|hostnames?|(slurm)?node(name|list)?"
    r"|machine(name)?|worker|ip(address)?|(master)?port|masteraddr|agent|entity|os|python(version)?|disk"
    r"|cpucount"
)
"""Names of records that may differ between some runs only: two runs of an arm on one node, one on another."""
_MEASURED = re.compile(
    r"(created|started|finished|ended|completed|(last)?updated|queued|submitted|heartbeat)(at|time|date)?"
    r"|(creation|create|start|end|submit|queue|date|wall|elapsed|total|train|training|step)?time(stamp)?"
    r"|datetime(start|complete)|wallclock|elapsed|duration|(train|eval)?runtime|seconds|minutes|(gpu)?hours"
    r"|(train|eval)?(tokens|toks|samples|steps|iterations|it)(persecond|persec|pers)|(tokens|samples|tok)s"
    r"|tps|date|time(totals|thisiters)|throughput|[mh]fu|tflops|(peak|max)?(gpu)?mem(ory)?(gb|gib|mb|mib)?"
)
"""Names of what a run gave: any value, in some runs or in all."""
_SEEDS = re.compile(r".*(seed|randomstate)")
"""Names of further seeds, such as that of the data: not settings if runs have a seed. Pairs share them."""
_OWN_OPTIONS = re.compile(r"--?[\w.-]*(seed|name|dir|path|output|out|id|port|host)[\w.-]*[ =]\S+")
"""Options of a command line that say which run it is. A command that differs in others holds settings."""
_ABOVE = re.compile(r"\b((tags|mlflow|_?wandb|slurm|run|job|info|system|meta|metadata|env)[./])+")
_HYPERPARAMETERS = re.compile(
    r"\b(lr|learning|rate|batch|bs|mbs|size|width|hidden|depth|layers?|heads?|dims?|ffn|warmup|decay|beta|eps"
    r"|momentum|weight|wd|dropout|optim|optimi[sz]er|adamw?|sgd|lion|muon|scheduler?|cosine|linear|wsd"
    r"|clip|clipping|grad|accum|accumulation|steps?|epochs?|iters?|tokens|context|seq|seqlen|length"
    r"|temperature|alpha|gamma|lambda|init|scale|scaling|precision|dtype|dataset|data|model|arch|tokenizer"
    r"|vocab|loss|ema|constant|betas|rank|lora|norm|rope|quant|rounding|recipe|checkpoint|ckpt|pretrained)\b"
)
"""Words in the name or the text of a field that is a hyperparameter, or holds some."""


def with_rates(run: ForeignRun, metric: str, steps: int) -> ForeignRun:
    """Return a run with the largest value of each learning rate that it records as a setting, too.

    A rate that decays is a series like a metric, but differences in it count like those in a constant one.
    The metric that is compared is not a setting, and values after the step that is compared do not count.
    """
    rates: dict[str, Json] = {}
    given = any(metric_name(plain(name).rpartition(".")[2]) == "train/lr" for name in run.config)
    for name, series in {} if given else run.records.items():
        values = [value for step, value in series.items() if step <= steps and math.isfinite(value)]
        if is_rate(name) and name != metric and values:
            rates["lr" if name == "train/lr" else name] = float(f"{max(values):.6g}")
    return replace(run, config={**run.config, **rates})


def own_fields(runs: Sequence[ForeignRun]) -> set[str]:
    """Return the fields that are ids, places and times of the runs, and differ between them.

    A source with one run an arm has none: each of its fields has as many values as there are arms.
    """
    arms = by_arm(runs).values()
    if len(arms) == len(runs):
        return set()
    within = {name for arm in arms for name, found in values_by_field(arm).items() if len(found) > 1}
    alone = {name for name, found in values_by_field(runs).items() if len(found) == len(runs)}
    values = {name: [run.config[name] for run in runs if name in run.config] for name in within}
    alone |= {name for name in within if _is_seed(name) and all(run.seed is not None for run in runs)}
    commands = {
        name
        for name in within
        if known(name) == "command"
        and all(len({_OWN_OPTIONS.sub("", str(run.config.get(name))) for run in arm}) == 1 for arm in arms)
    }
    return commands | {name for name in within if _is_own(name, values[name], name in alone)}


def unlike_seeds(runs: Sequence[ForeignRun], against: str) -> dict[str, str]:
    """Return, by further seed such as `data_seed`, a sentence on pairs of runs that differ in it."""
    base = {run.seed: run for run in runs if run.arm == against and run.seed is not None}
    pairs = [(base[run.seed], run) for run in runs if run.seed in base and run.arm != against]
    found = {}
    for name in sorted({name for pair in pairs for run in pair for name in run.config if _is_seed(name)}):
        differ = [pair for pair in pairs if pair[0].config.get(name) != pair[1].config.get(name)]
        for first in differ[:1]:
            values = " and ".join(f"{shown(run.config.get(name))} in {run.arm}" for run in first)
            share = f"{len(differ)} of {counted(len(pairs), 'pair')}, so more than the arm changed"
            found[name] = f"{brief(name)} differs in {share}; at seed {first[0].seed} it is {values}"
    return found


def _is_seed(name: str) -> bool:
    return _SEEDS.fullmatch(known(_ABOVE.sub("", name.strip().lower(), 1))) is not None


def values_by_field(runs: Sequence[ForeignRun]) -> dict[str, set[str]]:
    """Return the values of every field as text; `not set` for a run without it."""
    names = dict.fromkeys(name for run in runs for name in run.config)
    return {
        name: {str(run.config[name]) if name in run.config else "not set" for run in runs} for name in names
    }


def _is_own(name: str, values: Sequence[Json], alone: bool) -> bool:
    """Return True for a field that is no setting; `alone` if each run has its own value."""
    key = known(_ABOVE.sub("", name.strip().lower(), 1))
    numbers = [value for value in values if isinstance(value, int | float)]
    if _MEASURED.fullmatch(key) or not all(map(_whole, numbers)):
        return _MEASURED.fullmatch(key) is not None
    if _RECORDS.fullmatch(key) or not alone:
        return _RECORDS.fullmatch(key) is not None
    if _NAMES.fullmatch(key):
        return True
    return not numbers and not any(map(_says_a_setting, [name, *map(str, values)]))


def _whole(value: Json) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and value == value // 1


def _says_a_setting(text: str) -> bool:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|[^A-Za-z]+", " ", text).lower()
    return any(character.isdigit() for character in text) or bool(_HYPERPARAMETERS.search(words))
