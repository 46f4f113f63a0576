"""Finished sweeps of every kind, and all that is said of them: `python tests/golden_answers.py [make|render] [NAME ...]`.

`make` runs the sweeps below and writes their state folders, without checkpoints and databases that are copies, as
tests/golden/sweeps/NAME.tar.xz. `render` writes what commands and reports say of them as tests/golden/sweeps/NAME.txt.
`house/test_golden_answers.py` renders again and compares: on any processor, since nothing is computed but statistics. A change
that means to leave answers alone leaves these texts; a change of words is read in their diff.
"""

import hashlib
import io
import json
import os
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import closing, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from support.commands import INLINE, here
from support.corpus import write_shards
from support.experiments import EXPERIMENTS

FOLDER = Path(__file__).parent / "golden" / "sweeps"
OWN_COMMAND = Path(__file__).parent / "support" / "own_command"
TEXT = {"train": "train.bin", "val": "val.bin", "vocab": 64}
GPT = {
    "layers": 1,
    "width": 32,
    "heads": 2,
    "context": 32,
    "batch": 4,
    "steps": 40,
    "lr": 1e-2,
    "eval_every": 20,
    "eval_tokens": 1024,
    "data": TEXT,
}
LOSS = {"name": "val/loss", "direction": "minimize", "min_effect": 0.01}
QWEN = {
    "model_type": "qwen3",
    "head_dim": 16,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
}
AMPLIFIED = {
    "from": "nvfp4",
    "layers": {
        "rules": [
            {
                "match": {"name": "blocks.1.mlp.down"},
                "use": {"fprop": {"x": {"error": {"times": 20}}, "w": {"error": {"times": 20}}}},
            }
        ]
    },
}
FORKS = {"trunk": "bf16", "positions": [0.6, 0.8], "window": 0.2, "horizons": [1], "bad": "mxfp4"}

EVERY = {"schema": 1, "telemetry": {"every": 1000}}
"""Keys of all files: telemetry beyond the first step is megabytes."""
SWEEPS: dict[str, dict[str, Any]] = {
    "grid": {
        "question": "Does stochastic rounding still pay once wgrad is rotated?",
        "workload": {"gpt": GPT},
        "recipe": "nvfp4",
        "ablate": {"rht": [True, False], "sr": [True, False]},
        "against": "bf16",
        "seeds": 3,
        "metric": LOSS,
    },
    "forks": {
        "question": "Given a past in bf16, does the rotation pay?",
        "workload": {"gpt": GPT},
        "recipe": "nvfp4",
        "ablate": {"rht": [True, False]},
        "against": "bf16",
        "design": FORKS,
        "seeds": 4,
        "metric": {"name": "val/loss", "direction": "minimize"},
    },
    "search": {
        "question": "Which combination of the recipe's parts trains best?",
        "workload": {"gpt": GPT},
        "recipe": "nvfp4",
        "ablate": {"sr": [True, False], "workload.lr": {"uniform": [1e-3, 3e-2], "log": True}},
        "search": {"sampler": "tpe", "trials": 6, "confirm": 2},
        "against": "bf16",
        "answer": {"family": "winner"},
        "seeds": 2,
        "metric": LOSS,
    },
    "map": {
        "question": "Which product of which block does the damage come from?",
        "workload": {"gpt": GPT | {"layers": 2}},
        "recipe": "nvfp4",
        "map": {"layers": "blocks", "operands": "products", "times": 4},
        "seeds": 4,
        "metric": {"name": "val/loss", "direction": "minimize"},
    },
    "blame": {
        "question": "Which layer carries the damage of this recipe?",
        "workload": {"gpt": GPT | {"layers": 2}},
        "recipe": AMPLIFIED,
        "design": {"positions": [0.6], "window": 0.2, "horizons": [1]},
        "seeds": 4,
        "blame": {"where": "layers", "budget": 40},
    },
    "command": {
        "question": "Does the learning rate of this program matter?",
        "workload": {
            "command": {
                "run": "python light.py {lr} {seed}",
                "steps": 5,
                "folder": "own",
                "config": {"lr": 1e-2},
            }
        },
        "ablate": {"workload.config.lr": [1e-2, 2e-2]},
        "seeds": 3,
        "metric": {"name": "val/loss", "direction": "minimize", "min_effect": 0.01},
    },
    "experts": {
        "question": "Is the damage in the experts or in attention?",
        "workload": {"gpt": GPT | {"experts": {"count": 4, "top_k": 2}}},
        "recipe": "nvfp4",
        "arms": {
            "attention": {"recipe.layers.rules": [{"match": "class:Experts"}]},
            "experts": {"recipe.layers.rules": [{"match": "class:Attention"}]},
        },
        "answer": {"arm": "experts", "against": "attention"},
        "against": "bf16",
        "seeds": 3,
        "metric": LOSS,
    },
    "tensors": {
        "question": "Is stochastic rounding of the gradient unbiased?",
        "workload": {"tensors": {"tokens": 128, "outputs": 128, "inputs": 16, "draws": 16}},
        "recipe": "nvfp4",
        "arms": {"no headroom": {"sr_bits": 24}, "headroom": {"sr_bits": 24, "sr_headroom": 1.0625}},
        "against": "no headroom",
        "answer": {"arm": "headroom", "against": "no headroom"},
        "seeds": 3,
        "metric": {"name": "mean/dgrad.g/rel_mse", "direction": "minimize"},
    },
    "images": {
        "question": "What does NVFP4 cost a masked autoencoder?",
        "workload": {
            "python": {
                "file": "mae.py",
                "steps": 60,
                "tokens_per_step": 128,
                "config": {
                    "images": "digits",
                    "patch": 2,
                    "mask_ratio": 0.75,
                    "encoder": {"layers": 1, "width": 32, "heads": 2},
                    "decoder": {"layers": 1, "width": 16, "heads": 2},
                    "batch": 8,
                    "lr": 3e-3,
                    "eval_every": 30,
                    "eval_images": 32,
                },
            }
        },
        "recipe": "nvfp4",
        "ablate": {"workload.config.mask_ratio": [0.5, 0.75]},
        "against": "bf16",
        "answer": {"family": "arms"},
        "seeds": 3,
        "metric": [
            {"name": "val/loss", "direction": "minimize", "min_effect": "2%"},
            {"name": "val/explained", "direction": "maximize"},
        ],
    },
    "finetuning": {
        "question": "What does NVFP4 cost fine-tuning, and adapters?",
        "workload": {
            "finetune": {
                "model": QWEN,
                "base": {"steps": 60, "data": TEXT},
                "data": TEXT,
                "context": 32,
                "batch": 4,
                "steps": 40,
                "eval_every": 20,
                "eval_tokens": 2048,
            }
        },
        "recipe": "nvfp4",
        "arms": {
            "full": {"workload.lr": 3e-3},
            "rank 4": {"workload.lora": {"rank": 4}, "workload.lr": 1e-2},
        },
        "against": "bf16",
        "answer": {"family": "arms"},
        "seeds": 3,
        "metric": LOSS,
    },
    "failures": {
        "question": "What is said of arms that diverge and trials that fail?",
        "workload": {"gpt": GPT},
        "recipe": "nvfp4",
        "arms": {
            "good": {"rht": True},
            "wild": {"workload.lr": 1e30, "workload.clip": None, "workload.warmup": 0.0},
            "too large": {"workload.hidden": 1 << 44},
        },
        "against": "bf16",
        "seeds": 2,
        "metric": LOSS,
    },
}
"""Keys of an experiment file by name of the sweep."""
JUDGED = "judged"
RUNS = "recipe,seed,step,val_loss,state\n" + "".join(
    f"{arm},{seed},{step},{3.9 - step / 250 + gap + (37 * seed * seed + step + int(1e4 * gap) * seed) % 11 / 900:.6f},finished\n"
    for arm, gap in (("bf16", 0), ("nvfp4", 0.004), ("mxfp4", 0.05))
    for seed in range(4)
    for step in (100, 200, 300)
)
"""Runs from elsewhere, as a table."""
NAMES = (*SWEEPS, JUDGED)
COPIES = ("optuna.log", "mlflow.db", "reports", "ledger.db-shm", "ledger.db-wal")
"""Names of files that are made again from the rest."""
TIMES = re.compile(r"Report of \d{4}-\d\d-\d\d \d\d:\d\d|on \d{4}-\d\d-\d\d")
DIGITS = re.compile(r"-?\d+\.\d{10,}(e[+-]?\d+)?|-?\d+(\.\d+)?e[+-]?\d+")
"""Numbers in full: another release of scipy may differ in the last digits."""
ESTIMATE = re.compile(r" (Roughly|About|Less than) .*|(\d trials at once)")
IDS = re.compile(r"( +[0-9a-f]{8})+( \.\.\.)?$", re.MULTILINE)


def make(name: str) -> None:
    """Run a sweep and write its state folder as an archive."""
    with tempfile.TemporaryDirectory() as made:
        folder, home = Path(made), Path.cwd()
        os.chdir(folder)  # so that the ledger has no path of this machine
        try:
            if name == JUDGED:
                Path("runs.csv").write_text(RUNS)
                done = here("judge", "runs.csv", "--against", "bf16", "--as", JUDGED, "--state", "state")
            else:
                write_shards(folder)
                shutil.copytree(OWN_COMMAND, folder / "own", ignore=shutil.ignore_patterns("__pycache__"))
                shutil.copy(EXPERIMENTS[0].with_name("mae.py"), folder)
                Path(f"{name}.yaml").write_text(json.dumps(EVERY | SWEEPS[name]))
                done = here("sweep", f"{name}.yaml", "--state", "state", *INLINE)
        finally:
            os.chdir(home)
        print(done.stdout, done.stderr, sep="\n")
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tarfile.open(FOLDER / f"{name}.tar.xz", "w:xz", preset=9) as archive:
            for path in sorted((folder / "state").rglob("*")):
                parts = path.relative_to(folder).parts
                if path.is_file() and ".pt" not in path.suffix and not any(part in COPIES for part in parts):
                    archive.add(path, "/".join(parts))


def unpacked(name: str, folder: Path) -> Path:
    """Return the state folder of a finished sweep, unpacked."""
    with tarfile.open(FOLDER / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "state"


def parts(name: str, state: Path) -> Iterator[tuple[str, str]]:
    """Yield (title, text) of all that commands, notes and reports say of a finished sweep."""
    from ablate.cli.answer_view import MOST_LINES, print_lines
    from ablate.cli.common import Screen
    from ablate.reports.evidence import summary_markdown
    from ablate.results.comparisons import Comparisons
    from ablate.store.checked_ledger import open_ledger

    with closing(open_ledger(state, name)) as ledger:
        written = io.StringIO()
        print_lines(Comparisons(ledger), Screen(written, width=100), MOST_LINES, True)
        yield "terminal", written.getvalue()
        yield "note in MLflow and Optuna", summary_markdown(ledger)
    for words in (("show", name), ("show", "--json")):
        done = here(*words, "--state", state)
        yield f"ablate {' '.join(words)}", done.stdout + done.stderr
    done = here("report", name, "--state", state, "--no-pdf")
    yield "ablate report", done.stderr
    for page in sorted((state / "reports" / name).glob("*.md")):
        yield page.name, page.read_text()
    for table in sorted((state / "reports" / name / "figures").glob("*.csv")):
        yield table.name, table.read_text()


def rendered(name: str, state: Path) -> str:
    """Return all that is said of a finished sweep as one text, without paths and dates."""
    texts = (f"===== {title}\n{text.rstrip()}\n" for title, text in parts(name, state))
    text = "\n".join(texts).replace(str(state), "STATE").replace(state.as_posix(), "STATE")
    return DIGITS.sub(lambda found: f"{float(found[0]):.9g}", TIMES.sub("DATE", text))


def plans() -> str:
    """Return the plans of all shipped experiments, without ids, which golden/ids.json has, and times of this machine."""
    texts = []
    with tempfile.TemporaryDirectory() as state:
        for path in EXPERIMENTS:
            done = here("plan", path, "--state", state, COLUMNS="110")
            texts.append(f"===== {path.relative_to(EXPERIMENTS[0].parent)}\n{done.stdout}{done.stderr}")
    text = "\n".join(texts).replace(str(EXPERIMENTS[0].parents[1]), "REPOSITORY")
    return ESTIMATE.sub("", IDS.sub("", text))


def exports() -> str:
    """Return a digest of what each training stack gets for each preset, or why it gets nothing."""
    from ablate.cli.common import run
    from ablate.cli.options import Flags
    from ablate.cli.recipe import export
    from ablate.recipes.presets import PRESETS
    from ablate.recipes.targets import TARGETS

    lines = []
    for preset in PRESETS:
        for target in (*TARGETS, "json", "yaml"):
            out, err, status = io.StringIO(), io.StringIO(), 0
            with redirect_stdout(out), redirect_stderr(err):
                try:
                    run(partial(export, preset, Flags(), target, blocks=32))
                except SystemExit as end:
                    status = end.code
            text = (out if status == 0 else err).getvalue()
            digest = hashlib.sha256(text.encode()).hexdigest()[:12]
            lines.append(f"{preset:24} {target:12} {status} {digest} {len(text.splitlines())} lines")
    return "\n".join(lines) + "\n"


OTHERS = {"plans": plans, "exports": exports}
"""Texts that need no sweep."""


def main() -> None:
    """Make or render the sweeps that are named, or all."""
    word, *names = sys.argv[1:] or ["render"]
    for name in names or (*NAMES, *OTHERS):
        if name in OTHERS:
            (FOLDER / f"{name}.txt").write_text(OTHERS[name]())
            continue
        if word == "make":
            make(name)
        with tempfile.TemporaryDirectory() as folder:
            (FOLDER / f"{name}.txt").write_text(rendered(name, unpacked(name, Path(folder))))


if __name__ == "__main__":
    main()
