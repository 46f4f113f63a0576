"""Write docs/reference/experiment.md from the schema of experiment files.

`python docs/generate_reference.py [--check]`. Keys, types, limits and defaults come from the JSON Schema;
explanations from the docstrings of the fields, read from their source, or from TEXTS. With `--check`
nothing is written: exit status 1 if the page differs from what would be written.
"""

import ast
import inspect
import json
import sys
import textwrap
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from ablate.experiment.schema import ExperimentFile, Growth, Metric, json_schema
from ablate.recipes import Recipe
from ablate.training.workloads import WORKLOADS
from ablate.training.workloads.knobs import WORKLOAD_KNOBS

PAGE = Path(__file__).parent / "reference" / "experiment.md"

PREFACE = """\
# Experiment reference

Every key of an experiment file, generated from the schema by `make pages`; a row has key, values and
(default). Begin with the [example](../../README.md#your-own-question). An editor checks and completes the
same keys with `# yaml-language-server: $schema=schema.json` in the first line of a file in `experiments/`.

The file is YAML 1.2: booleans are `true` and `false` (`on` and `yes` are strings), and a key that stands
twice is an error. An unknown key or an impossible value is refused before anything runs, with file, line,
column, reason and the nearest right word.

## Arms: `ablate` or `arms`

An arm is one setting of the knobs. `ablate` makes arms from values, `arms` lists them by name; a file has
one of the two.

| value of a knob under `ablate` | meaning |
|---|---|
| `[a, b]` | each value; several lists make a grid, every value with every other |
| `{choice: [a, b]}` | a search draws one of the values |
| `{uniform: [low, high]}`, with `log: true` | a real number is drawn; with `log` uniformly in its logarithm |
| `{int: [low, high]}` | a search draws an integer, both ends included |
| any of the three with `when: {knob: value}` | the knob exists only in arms with that value of the other |

With at least one range the file needs `search`. A knob is a short name from the tables below or a full
path: `recipe.` followed by a field of the [recipe](#recipe), or `workload.` followed by a field of the
workload. `recipe: [nvfp4, mine.yaml]` under `ablate` compares presets and recipe files. In `arms: {name:
{knob: value}}` every knob has one value, and `{}` is the recipe as it stands.

## The baseline: `against`

A preset (`bf16`) or knobs (`{rht: true}`) are applied at each arm's own workload values, so that an arm
with another learning rate has a baseline with that learning rate. The name of an arm, or exactly its knobs,
makes that arm the baseline of all others.

## Workloads

| workload | what it trains | main metric |
|---|---|---|
| `gpt` | a decoder from scratch: this package's, or a configuration of transformers | `val/loss` |
| `finetune` | a causal model of transformers: all weights, or LoRA adapters | `val/loss` |
| `tensors` | nothing: distributions or captured tensors go through quantisers | errors |
| `python` | your training function ([tutorial](../learn/tutorial.md), 11) | what it logs |
| `command` | any command: [a training process](../use/command_workload.md) | what it logs |
| `idle` | nothing, to try a cluster | `val/loss` |

Recipes apply to every `nn.Linear` and every matrix of packed experts in a model's numbered blocks;
[layer rules](layers.md) select among them. Attention's projections are layers, QK^T and PV are not.
"""

TEXTS = {
    "ExperimentFile.schema": "Version of the format.",
    "ExperimentFile.question": "The question, in words. It is the title of the table and of the report.",
    "ExperimentFile.workload": "One workload and its fields: `{gpt: {steps: 300}}`.",
    "ExperimentFile.recipe": "The preset that arms start from: [recipes](recipes.md).",
    "ExperimentFile.ablate": "Knobs and their values: a grid or a search space.",
    "ExperimentFile.arms": "Arms by name, each with its knobs.",
    "ExperimentFile.seeds": "A number n for seeds 0 to n - 1, a list of seeds, or [growth](#growth).",
    "ExperimentFile.search": "How a search proposes arms; needed if `ablate` has a range.",
    "ExperimentFile.published": "Figures from papers, shown beside the measured ones with a verdict.",
    "Metric.name": "Name of the metric; the value of the last record that has it counts.",
    "Metric.direction": "Direction of improvement.",
    "Published.metric": "Name of the metric.",
    "Published.source": "Where the figure was published.",
    "Constraint.metric": "Name of the metric.",
    "Constraint.at_most": "Upper limit; give one of the two.",
    "Constraint.at_least": "Lower limit; give one of the two.",
    "Search.seed": "Seed of the sampler.",
    "Budget.trials": "Trials to start.",
    "Budget.hours": "Worker-hours, one slot for an hour each.",
    "Tensors.tokens": "Rows of x and g.",
    "Tensors.inputs": "In-features: columns of x and w.",
    "Tensors.outputs": "Out-features: rows of w, columns of g.",
    "Tensors.w": "Weights; the same words as `x`.",
    "Idle.steps": "Records to yield.",
    "Base.data": "Text to pretrain on: a source as in `data`.",
    "Base.seed": "Seed of the weights and of the data order of the pretraining.",
    "Finetune.base": "Pretrain a configuration first; null: `model` has weights.",
    "Lora.rank": "Rank of the adapters.",
    "Folder.folder": "Path of the folder.",
    "PreparedText.prepared": "Path of the folder.",
    "Shards.train": "Training files.",
    "Shards.val": "Validation files.",
    "Shards.vocab": "Number of token ids.",
    "TextFiles.text": "Files to read.",
    "HubText.column": "Name of the column of documents.",
    "HubText.dataset": "A name on the hub, or a folder.",
    "BlockScale.format": "Number format of the scale.",
    "Select.criterion": "Error that is compared.",
    "Dge.k": "k of the paper's estimator.",
    "Dge.clip": "Largest slope.",
    "Transform.channels_in": "Format of the channels that are split off.",
    "Quant.element": "Number format of the elements.",
    "Layers.skip_last": "Transformer blocks at the output in high precision.",
    "Phase.start": "`step:n`, `tokens:n`, `fraction:f`, `decay`, or `noise_ratio:limit:every`.",
    "Phase.slots": "Products that change.",
    "QEma.decay": "Decay of the moving average.",
    "QRamping.window": "Steps over which the oscillation is measured.",
    "Recipe.dtype": "Type of activations and of unquantised operands.",
    "Wgrad.dw": "Type of the weight gradient that the product returns.",
    "Hadamard.size": "Points of the transform.",
    "beta1": "Decay of AdamW's first moment.",
    "beta2": "Decay of AdamW's second moment.",
    "eval_every": "Steps between two evaluations.",
    "eval_tokens": "Validation tokens of an evaluation.",
    "mlp": "Kind of the MLP: gated (`swiglu`), or with a squared ReLU.",
    "rope_theta": "Base of the rotary position embedding.",
    "config": "Configuration of the dataset, if it has several.",
    "split": "Split to train on.",
    "tokenizer": "Tokeniser: [data](../use/data.md#text).",
    "val_fraction": "Fraction that is held out if there is no validation text.",
    "gemm": "Rounding of the product's output: once to bf16, or none (fp32).",
    "hadamard": "Rotation of both operands along the contraction; null: none.",
    "x": "Activations; null: not quantised.",
    "w": "Weights; null: not quantised.",
    "g": "Gradient of the output; null: not quantised.",
}
"""Explanations of fields that have no docstring in the code, by `Class.field` or by the field alone."""


GROUPS = {
    "gpt and finetune": ("gpt", "finetune"),
    "python and command": ("python", "command"),
    "Texts": ("PreparedText", "Shards", "TextFiles", "HubText"),
    "Fprop, Dgrad and Wgrad": ("Fprop", "Dgrad", "Wgrad"),
}
"""Models with fields in common, which stand in one table, by its heading."""
SIGNS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
OWN_WORDS = {"ablate": "mapping", "workload": "mapping", "recipe": "text or mapping"}
"""Values of keys whose schema is too long for a cell."""


def knob_list() -> str:
    """Return the short knobs of the workloads as Markdown."""
    return ", ".join(f"`{name}`" for name in WORKLOAD_KNOBS)


def docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstring below each field of a class, its bases included, each as one line."""
    texts: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if not (isinstance(base, type) and issubclass(base, BaseModel)) or base is BaseModel:
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
        for field, text in pairwise(body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                texts[field.target.id] = " ".join(str(text.value.value).split())
    return texts


def subclasses(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield all classes below a class."""
    for child in model.__subclasses__():
        yield child
        yield from subclasses(child)


def link(name: str) -> str:
    """Return a link to the section of a model; a workload's class has the section of the workload."""
    title = name.lower() if name.lower() in WORKLOADS else name
    heading = next((heading for heading, names in GROUPS.items() if title in names), title)
    return f"[{title}](#{heading.lower().replace(',', '').replace(' ', '-')})"


def values(schema: dict[str, Any]) -> str:
    """Return the values that a JSON Schema allows, as Markdown for a cell of a table."""
    if "$ref" in schema:
        return link(schema["$ref"].rpartition("/")[2])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value).strip(chr(34))}`" for value in schema["enum"])
    for several in ("anyOf", "oneOf"):
        if several in schema:
            named = [part for part in schema[several] if part != {"type": "null"} or not optional(schema)]
            return " or ".join(dict.fromkeys(values(part) for part in named))
    kind = schema.get("type", "any")
    if kind == "array":
        parts = schema.get("prefixItems")
        return f"list of {' and '.join(map(values, parts)) if parts else values(schema.get('items', {}))}"
    if kind == "object":
        return link(schema["title"]) if "properties" in schema and "title" in schema else "mapping"
    limits = [f"{sign} {number(schema[key])}" for key, sign in SIGNS.items() if key in schema]
    if {"minimum", "maximum"} <= schema.keys():
        limits = [f"{number(schema['minimum'])} to {number(schema['maximum'])}"]
    name = {"null": "`null`", "string": "text"}.get(kind, kind)
    return f"{name} {', '.join(limits)}".rstrip()


def optional(schema: dict[str, Any]) -> bool:
    """Return True if null is the default of a field, so that it need not stand among the values."""
    return "default" in schema and schema["default"] is None


def number(value: float) -> str:
    """Return a limit as it is read best: 2^n if it is one of the large powers of two."""
    whole = int(value)
    return f"2^{whole.bit_length() - 1}" if whole >= 1 << 16 and whole & (whole - 1) == 0 else f"{value:,}"


def default(name: str, schema: dict[str, Any], required: Iterable[str]) -> str:
    """Return the default of a field behind its values: in brackets, or `required`."""
    if name in required:
        return ", required"
    value = schema.get("default")
    if isinstance(value, dict) or "default" not in schema:
        return ""
    return f" (`{json.dumps(value).strip(chr(34))}`)"


def rows(schema: dict[str, Any], model: type[BaseModel] | None) -> Iterator[tuple[str, str]]:
    """Yield key, values and default of each field of a model, and its meaning."""
    texts = docstrings(model) if model else {}
    names = {field.alias or name: name for name, field in model.model_fields.items()} if model else {}
    for key, field in schema["properties"].items():
        text = texts.get(names.get(key, key)) or explanation(model, key)
        allowed = OWN_WORDS.get(key) or values(field)
        what = f"`{key}`: {allowed}{default(key, field, schema.get('required', ()))}"
        yield what.replace("|", r"\|"), text.replace("|", r"\|")


def table(lines: Iterable[tuple[str, str]]) -> str:
    """Return the table of a model's fields."""
    return "\n".join(["| key | meaning |", "|---|---|", *(f"| {a} | {b} |" for a, b in lines)])


def explanation(model: type[BaseModel] | None, key: str) -> str:
    """Return the text for a field without a docstring: from TEXTS, its short knob, or its class."""
    if model is None:
        return ""
    annotation = model.model_fields[key].annotation if key in model.model_fields else None
    parts = [annotation, *get_args(annotation)]
    classes = [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]
    texts = [TEXTS.get(f"{model.__name__}.{key}"), TEXTS.get(key), WORKLOAD_KNOBS.get(key)]
    texts += [(part.__doc__ or "").split("\n\n")[0] for part in classes]
    return " ".join(next((text for text in texts if text), "").split())


def model_of(name: str, schema: dict[str, Any]) -> type[BaseModel] | None:
    """Return the class that a schema is of."""
    fields = set(schema.get("properties", {}))
    return WORKLOADS.get(name) or next(
        (
            child
            for child in subclasses(BaseModel)
            if child.__module__.startswith("ablate.")
            and child.__name__ == schema.get("title", name)
            and {field.alias or key for key, field in child.model_fields.items()} == fields
        ),
        None,
    )


def section(name: str, parts: dict[str, dict[str, Any]], said: set[str]) -> str:
    """Return the section of a model, or of models in one table: its heading, what it is, its fields.

    A description that stands in a row above is not said again.
    """
    names = GROUPS.get(name, (name,))
    texts = []
    owners: dict[tuple[str, str], list[str]] = {}
    for each in names:
        text = " ".join(parts[each].get("description", "").split())
        if text not in said:
            texts.append(f"- `{each}`: {text}" if len(names) > 1 else text)
        if "enum" in parts[each]:
            texts.append(f"Values: {values(parts[each])}.")
        for row in rows(parts[each], model_of(each, parts[each])) if "properties" in parts[each] else ():
            owners.setdefault(row, []).append(each)
    said.update(meaning for _, meaning in owners)
    lines = [
        (what if len(of) == len(names) else what.replace(":", f" ({', '.join(of)}):", 1), meaning)
        for (what, meaning), of in owners.items()
    ]
    body = table(lines) if lines else ""
    return "\n\n".join(part for part in (f"### {name}", "\n".join(texts), body) if part)


def sections(names: Iterable[str], parts: dict[str, dict[str, Any]], said: set[str]) -> Iterator[str]:
    """Yield the sections of models; those of a group stand together, at the place of the first."""
    headings = {each: heading for heading, several in GROUPS.items() for each in several}
    for heading in dict.fromkeys(headings.get(name, name) for name in names):
        yield section(heading, parts, said)


def page() -> str:
    """Return the whole page."""
    schema, recipe = json_schema(), Recipe.model_json_schema()
    parts = schema["$defs"] | {model.__name__: model.model_json_schema() for model in (Metric, Growth)}
    first = ["Metric", "Growth", "Search", "Constraint", "Published", "Budget", "Resources", "Telemetry"]
    rest = [name for name in parts if name not in first and name.lower() not in WORKLOADS]
    of_file = list(rows(schema, ExperimentFile))
    said = {meaning for _, meaning in of_file}
    fields = recipe["$defs"] | {"Recipe": recipe}
    blocks = [
        PREFACE.rstrip(),
        "## Keys of the file",
        table(of_file),
        *sections(first, parts, said),
        "## Fields of the workloads",
        *sections(WORKLOADS, parts, said),
        "## Parts of the workloads",
        *sections(rest, parts, said),
        "## Knobs",
        "Short names for usual combinations of full paths: [of a recipe](recipes.md#short-knobs); of a\n"
        f"workload {knob_list()}. A field's short name and its full path are one knob.",
        "## Fields of a recipe",
        "Full paths begin with `recipe.`: `recipe.wgrad.hadamard.size`, `recipe.fprop.x.range.headroom`.\n"
        "What each part computes: [numerics](numerics.md); what the presets set: [recipes](recipes.md).",
        *sections(["Recipe", *recipe["$defs"]], fields, said),
    ]
    return "\n\n".join(blocks) + "\n"


def main(arguments: list[str]) -> int:
    """Write the page, or compare it; return the exit status."""
    text = page()
    if arguments == ["--check"]:
        return int(PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
