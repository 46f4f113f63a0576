"""Fields of configurations that say which run it is, and nothing of how it was trained: ids, places, times.

Eight runs with eight learning rates are no eight seeds of one configuration. So a field that differs between
runs is a setting unless its name is known (`_NAMES`, `_RECORDS`), or it is a text without a digit and without
a word for a hyperparameter. A whole number is an id under a known name alone, and a fraction never; times and
speeds (`_MEASURED`) are what a run gave, so they may be any number.
"""

import re
from collections.abc import Sequence

from ablate.execution.foreign.run import ForeignRun
from ablate.execution.foreign.statuses import known
from ablate.files import Json

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
    r"|machine(name)?|worker|ip(address)?|(master)?port|masteraddr"
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
_ABOVE = re.compile(r"\b((tags|mlflow|_?wandb|slurm|run|job|info|system|meta|metadata|env)[./])+")
_HYPERPARAMETERS = re.compile(
    r"\b(lr|learning|rate|batch|bs|mbs|size|width|hidden|depth|layers?|heads?|dims?|ffn|warmup|decay|beta|eps"
    r"|momentum|weight|wd|dropout|optim|optimi[sz]er|adamw?|sgd|lion|muon|scheduler?|cosine|linear|wsd"
    r"|clip|clipping|grad|accum|accumulation|steps?|epochs?|iters?|tokens|context|seq|seqlen|length"
    r"|temperature|alpha|gamma|lambda|init|scale|scaling|precision|dtype|dataset|data|model|arch|tokenizer"
    r"|vocab|loss|ema|constant|betas|rank|lora|norm|rope|quant|rounding|recipe|checkpoint|ckpt|pretrained)\b"
)
"""Words in the name or the text of a field that is a hyperparameter, or holds some."""


def own_fields(runs: Sequence[ForeignRun]) -> set[str]:
    """Return the fields that are ids, places and times of the runs, and differ between them.

    A source with one run an arm has none: each of its fields has as many values as there are arms.
    """
    arms = [[run for run in runs if run.arm == arm] for arm in dict.fromkeys(run.arm for run in runs)]
    if len(arms) == len(runs):
        return set()
    within = {name for arm in arms for name, found in values_by_field(arm).items() if len(found) > 1}
    alone = {name for name, found in values_by_field(runs).items() if len(found) == len(runs)}
    values = {name: [run.config[name] for run in runs if name in run.config] for name in within}
    return {name for name in within if _is_own(name, values[name], name in alone)}


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
