"""Golden traces, five losses of a tiny gpt as hexadecimal floats, and golden ids.

`python tests/regenerate_golden.py` writes the traces and all ids anew: only together with a raised VERSION of the numerics or of the
workload, since a changed trace is a changed number in every trial. `python tests/regenerate_golden.py ids` adds ids of presets,
experiments and layer rules that have none yet. It never changes an id that is there, since finished trials are found by it.

tests/golden/ids.json has four tables:
    gpt: ids of one trial of a tiny gpt for each preset, by device class, and the name of its checkpoint after the last step.
    recipes: for each preset, the id of a trial without data and fields, and a hash of the recipe as canonical JSON.
    rules: the same for layer rules that name layers or classes of modules.
    experiments: the same for each arm of each shipped experiment, and a hash of its workload's fields.
"""

import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from support.corpus import write_shards

from ablate.experiment.arms import StartingPoint
from ablate.experiment.load import load
from ablate.experiment.trial_spec import TrialSpec
from ablate.recipes import PRESETS, Recipe
from ablate.training.data import Shards
from ablate.training.loop import Telemetry
from ablate.training.trial_run import TrialRun
from ablate.training.workloads.gpt import Gpt
from ablate.training.workloads.idle import Idle

FOLDER = Path(__file__).parent / "golden"
TRACED = ("bf16", "nvfp4")
STEPS = 5
FP8 = PRESETS["fp8_current"]().products.model_dump(mode="json")
RULES = {
    "a name": [{"match": "blocks.*.mlp.down"}],
    "any name": [{"match": "*"}],
    "blocks by name": [{"match": "blocks.[02].*", "use": FP8}],
    "a class": [{"match": "class:Attention"}],
    "classes": [{"match": "class:Att*", "use": FP8}, {"match": "class:SwiGLU", "use": None}],
    "a name that is a word": [{"match": "Attention"}],
    "no rule": [],
}
"""Layer rules that name layers or classes of modules."""


def tiny(shards: Shards) -> Gpt:
    """Return the workload that traces and ids are of."""
    return Gpt(
        data=shards,
        layers=2,
        width=64,
        heads=4,
        kv_heads=2,
        context=32,
        batch=4,
        steps=STEPS,
        lr=1e-2,
        warmup=0.0,
        eval_every=1000,
        eval_tokens=64,
    )


def losses(preset: str) -> list[float]:
    """The training losses of five steps on the synthetic corpus, one thread."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        workload = tiny(write_shards(Path(folder)))
        records = list(
            workload.records(
                TrialRun(PRESETS[preset](), 1234, "emulated", "cpu", Telemetry(every=1000, log=1))
            )
        )
    return [record.metrics["train/loss"] for record in records]


def comparable() -> bool:
    """Return True if this CPU adds as the one that wrote the traces: bf16 products in AVX-512, which AVX2 adds in another order."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "avx512_bf16" in cpuinfo.read_text()


def comparable_losses(preset: str) -> list[float]:
    """The losses with bf16 products in AVX-512 though the CPU may have AMX: in a process of its own, since oneDNN asks once."""
    code = f"import regenerate_golden as golden; print(*(loss.hex() for loss in golden.losses({preset!r})))"
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return [float.fromhex(word) for word in done.stdout.split()]


def ids(recipe: Recipe, shards: Shards) -> dict[str, str]:
    """Return the ids of one trial of a recipe, by device class, and the name of its checkpoint after the last step."""
    cpu, cuda = (
        TrialSpec(
            workload="gpt", config=tiny(shards), recipe=recipe, seed=1234, engine="emulated", device=device
        )
        for device in ("cpu", "cuda")
    )
    return {"cpu": cpu.id, "cuda": cuda.id, "checkpoint": cpu.history(STEPS)}


def gpt_ids() -> dict[str, dict[str, str]]:
    """Return the ids of one gpt trial for each preset."""
    with tempfile.TemporaryDirectory() as folder:
        shards = write_shards(Path(folder))
        return {name: ids(preset(), shards) for name, preset in PRESETS.items()}


def recipe_id(recipe: Recipe) -> str:
    """Return the id of a trial that has a recipe, but neither data nor fields, and a hash of the recipe as JSON."""
    spec = TrialSpec(workload="idle", config=Idle(), recipe=recipe, seed=0, engine="emulated", device="cpu")
    content = json.dumps(recipe.canonical(), separators=(",", ":"))
    return f"{spec.id} {short_hash(content)}"


def short_hash(text: str) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def rule_ids() -> dict[str, str]:
    """Return the id of nvfp4 with each of the layer rules."""
    base = StartingPoint("idle", {}, "nvfp4")
    return {name: recipe_id(base.recipe({"recipe.layers.rules": rules})) for name, rules in RULES.items()}


def experiment_ids() -> dict[str, str]:
    """Return the id of every arm's recipe of every shipped experiment, and a hash of its workload's fields."""
    every = {}
    for path in sorted((FOLDER.parents[1] / "experiments").rglob("*.yaml")):
        for arm in load(path).arms:
            fields = json.dumps(arm.config.identity(), sort_keys=True, separators=(",", ":"))
            every[f"{path.stem}: {arm.name}"] = f"{recipe_id(arm.recipe)} {short_hash(fields)}"
    return every


TABLES = {
    "gpt": gpt_ids,
    "recipes": lambda: {name: recipe_id(preset()) for name, preset in PRESETS.items()},
    "rules": rule_ids,
    "experiments": experiment_ids,
}
"""Functions that compute the tables of ids.json."""


def stored_ids() -> dict[str, dict]:
    """Return the tables of ids on disk."""
    return json.loads((FOLDER / "ids.json").read_text())


def write_ids(kept: dict[str, dict]) -> None:
    """Write every id, those in `kept` as they are."""
    every = {table: compute() | kept.get(table, {}) for table, compute in TABLES.items()}
    (FOLDER / "ids.json").write_text(json.dumps(every, indent=2) + "\n")


def stored(preset: str) -> list[float]:
    """The losses on disk."""
    return [float.fromhex(loss) for loss in json.loads((FOLDER / f"{preset}.json").read_text())["losses"]]


def main() -> None:
    """Write every trace; refuses a CPU whose numbers no other machine could compare with."""
    if not comparable():
        sys.exit("write traces on a CPU with avx512_bf16: only there are they compared exactly")
    FOLDER.mkdir(exist_ok=True)
    write_ids({})
    for preset in TRACED:
        trace = {
            "written_with": {"torch": torch.__version__, "machine": platform.machine()},
            "losses": [x.hex() for x in comparable_losses(preset)],
        }
        (FOLDER / f"{preset}.json").write_text(json.dumps(trace, indent=2) + "\n")
        print(preset, *trace["losses"])


if __name__ == "__main__":
    write_ids(stored_ids()) if sys.argv[1:] == ["ids"] else main()
