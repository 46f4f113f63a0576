"""Change one thing between two runs of the same sweep, forty times, and print what the second run made of it.

    python benchmarks/identity_table.py --jobs 2

Each case is a small real sweep in a folder of its own, a change, the same command again, and as an oracle
the same command in an empty state folder with an empty cache. `id changed`: the trial ran anew and its
numbers are the oracle's. `warned`: a sentence names the change. `documented`: the old result was reused, and
a page says so. `id stayed`: nothing that matters changed. Anything else is SILENT, and the exit status is 1.
A case's seam, in brackets, is how another machine or version is simulated.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from ablate.store.ledger import Ledger
from ablate.training.data import jobs, prepared

ROOT = Path(__file__).parents[1]
TRAIN = """
import hashlib, importlib, json, os, pathlib, time
import torch
import near, package
here = pathlib.Path(__file__).parent
SEEN = 1.0
def train(trial):
    if (here / "edit_while_running").exists():
        path = here / (here / "edit_while_running").read_text()
        (here / "edit_while_running").unlink()
        path.write_text(path.read_text() + "# 1")
    files = [pathlib.Path(base, name) for base, _, names in os.walk(here / "data", followlinks=True)
             for name in names]
    parts = [(str(file.relative_to(here)), file.read_bytes()) for file in sorted(files) if file.exists()]
    parts += [SEEN, near.VALUE, package.VALUE, importlib.import_module("com" + "puted").VALUE]
    parts += [(here / "settings.json").read_text(), (here / "template.txt").read_text()]
    parts += [open(here / "words.txt", errors="replace").read(), os.environ.get("GAIN", "1")]
    parts += [torch.linspace(0, 3, 4097).exp().sum().item(), torch.linspace(0, 1, 90000).reshape(300, 300)
              .matmul(torch.linspace(1, 3, 90000).reshape(300, 300)).sum().item()]
    parts += [hash("word")] if (here / "hashed").exists() else []
    digest = hashlib.sha256(repr(parts).encode()).digest()
    with trial.step():
        trial.log({"val/loss": trial.config.width + int.from_bytes(digest[:4], "big") / 2**32})
"""
COMMAND = """
import json, os, torch
x = torch.linspace(0, 1, 1 << 20)
print(json.dumps({"step": 1, "val/loss": x.sin().sum().item() % 7}))
"""
FILES = {
    "train.py": TRAIN, "command.py": COMMAND, "near.py": "from far import VALUE\n", "far.py": "VALUE = 1.0\n",
    "package/__init__.py": "VALUE = 1.0\n", "computed.py": "VALUE = 1.0\n", "settings.json": '{"a": 1}',
    "template.txt": "a {b}", "words.txt": "Gr\u00f6\u00dfe", "data/one.txt": "11111", "data/two.txt": "22222",
    "data/bin/three.txt": "33333", "outside/four.txt": "44444", "recipe.yaml": "from: nvfp4\n",
}  # fmt: skip
GPT = (
    "{gpt: {layers: 1, width: 32, heads: 1, context: 128, batch: 8, accumulate: 2, steps: 4,"
    " eval_tokens: 1024, eval_batch: 8, eval_every: 4, lr: 1.0e-3, data: %s}}"
)
WORKLOADS = {
    "python": ("{python: {file: train.py, steps: 1, data: [data], config: {width: 1}}}", "config.width"),
    "command": ("{command: {run: python command.py, steps: 1, config: {width: 1}}}", "config.width"),
    "prepared": (GPT % "{prepared: books}", "batch"),
    "train": (GPT % "{train: 'books/train_*.bin', val: 'books/val_*.bin', vocab: 256}", "batch"),
}
"""Workload, and a knob whose value 1 and 2 are the arms."""


class Place:
    """Folder of one case: code, data, experiment and state."""

    def __init__(self, folder: Path, workload: str) -> None:
        self.folder, self.workload, self.env, self.state = folder, workload, {}, "state"
        self.arms, self.recipe, self.extra, self.file = [1, 2], "bf16", "", "X.yaml"
        for name, text in FILES.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        (folder / "data" / "linked").symlink_to(folder / "outside")
        (folder / "data" / "link.txt").symlink_to(folder / "outside" / "four.txt")
        if workload in ("prepared", "train"):
            (folder / "books").mkdir()
            text = "".join(f"{i * i} is the square of {i}\n" for i in range(180_000))
            (folder / "text.txt").write_text(text)
            job = jobs.of_files([str(folder / "text.txt")], None, "text", 0.01)
            prepared.prepare(folder / "books", replace(job, shard_tokens=2_400_000))

    def run(
        self, state: str, cache: str = "cache", fresh: bool = False, checked: bool = False
    ) -> tuple[str, dict, list[str]]:
        """Return what a sweep prints, (id, loss) by arm, and the checks above its answer."""
        workload, knob = WORKLOADS[self.workload]
        (self.folder / self.file).write_text(
            f"schema: 1\nquestion: Does it matter?\nworkload: {workload}\nrecipe: {self.recipe}\n{self.extra}"
            f"ablate: {{workload.{knob}: {self.arms}}}\nagainst: {{workload.{knob}: 1}}\nseeds: 1\n"
            "metric: {name: val/loss, direction: minimize, min_effect: 0.01}\n"
        )
        env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {
            "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0", "ABLATE_CACHE": str(self.folder / cache),
        }  # fmt: skip
        env |= self.env | ({"PYTHONPYCACHEPREFIX": str(self.folder / "fresh")} if fresh else {})
        options = ["--state", state, "--executor", "inline", "--mlflow", "none", "--no-report"]
        call = [sys.executable, "-m", "ablate", "sweep", self.file, *options, "--check-command", "true"]
        done = subprocess.run(call, cwd=self.folder, env=env, capture_output=True, text=True, check=False)
        name, output = Path(self.file).stem, done.stdout + done.stderr
        rows: dict[int, tuple[str, object]] = {}
        checks: list[str] = []
        path = self.folder / state / "sweeps" / name / "ledger.db"
        if path.exists():
            with closing(Ledger(path, readonly=True)) as ledger:
                for row in ledger.members():
                    rows[row.name] = row.id, ledger.last_value(row.trial, "val/loss")
        if rows and checked:
            call = [sys.executable, "-m", "ablate", "evidence", name, "--state", state]
            told = subprocess.run(call, cwd=self.folder, env=env, capture_output=True, text=True, check=False)
            checks = re.findall(r"^- Checks: (.*)$", told.stdout, re.MULTILINE)
        return output, rows, checks

    def edit(self, name: str, old: str, new: str, keep_time: bool = False) -> None:
        """Replace text in a file, in place."""
        path = self.folder / name
        facts, text = path.stat(), path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
        if keep_time:
            os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))

    def seam(self, **files: str) -> None:
        """Put files on the path of Python before all others."""
        for name, text in files.items():
            path = self.folder / "seam" / name.replace("__", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.env["PYTHONPATH"] = f"{self.folder / 'seam'}:{ROOT}"


@dataclass(frozen=True)
class Case:
    """A class of changes, a change, and what may be said of it."""

    group: str
    name: str
    change: Callable[[Place], object]
    workload: str = "python"
    before: Callable[[Place], object] = lambda place: None
    sentence: str = "are not those that data.json describes|is missing, which|were edited while it ran"
    """Pattern of a warning that names the change."""
    page: str = ""
    """Page and, after a colon, a sentence that says that this change is not seen."""


def notes(place: Place) -> list[Path]:
    return sorted((place.folder / "cache" / "notes").glob("*.json"))


def exchanged(first: Path, second: Path) -> None:
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)


def replaced(place: Place) -> None:
    (place.folder / "new").write_text("91111")
    os.replace(place.folder / "new", place.folder / "data" / "one.txt")


def between_windows(place: Place) -> None:
    path = place.folder / "books" / "train_000000.bin"
    ids = bytearray(path.read_bytes())
    tokens, window, count = 2_400_000, 32_768, 64
    step = (tokens - window) / (count - 1)
    for number in range(count - 1):
        first, last = int(number * step) + window + 2, int((number + 1) * step) - 2
        ids[1024 + 2 * first : 1024 + 2 * last] = b"a\0" * (last - first)
    path.write_bytes(ids)


def other_cache(place: Place) -> None:
    shutil.copytree(place.folder / "cache", place.folder / "copied")
    place.edit("data/one.txt", "11111", "91111", keep_time=True)
    shutil.rmtree(place.folder / "cache")
    shutil.copytree(place.folder / "copied", place.folder / "cache")


def edit_later(name: str) -> Callable[[Place], object]:
    return lambda place: (place.folder / "edit_while_running").write_text(name)


def with_arm(change: Callable[[Place], object]) -> Callable[[Place], object]:
    def both(place: Place) -> None:
        place.arms = [*place.arms, 3]
        change(place)

    return both


def other_numerics(place: Place) -> None:
    shutil.copytree(ROOT / "ablate", place.folder / "seam" / "ablate")
    place.edit("seam/ablate/numerics/spec.py", "\nVERSION = 1\n", "\nVERSION = 2\n")
    place.env["PYTHONPATH"] = str(place.folder / "seam")


def moved_recipe(place: Place) -> None:
    (place.folder / "elsewhere").mkdir()
    shutil.move(place.folder / "recipe.yaml", place.folder / "elsewhere" / "recipe.yaml")
    place.recipe = "elsewhere/recipe.yaml"


def mixed(place: Place) -> None:
    place.run("other")
    shutil.rmtree(place.folder / "state" / "trials")
    shutil.copytree(place.folder / "other" / "trials", place.folder / "state" / "trials")


def gpu(name: str) -> str:
    return (
        f"import ablate.provenance as p\np._gpu = lambda: {{'gpu': {name!r}}}\nf = p.arithmetic\n"
        "p.arithmetic = lambda device: f('cuda')\n"
    )


def own_recipe(place: Place) -> None:
    place.recipe = "recipe.yaml"


def env(**variables: str) -> Callable[[Place], object]:
    return lambda place: place.env.update(variables)


LATE, CODE = "sitecustomize__py", "docs/run/operations.md:"
UNSEEN, MACHINE = CODE + "a file that code opens by itself", CODE + "its result is reused on any machine"
PROCESSORS = "kinds of processors or versions of torch"
CLOCK = "import time\nreal = time.time\ntime.time = lambda: real() - 86400\n"
FUTURE = 4e9
CASES = [
    Case("data files", "content edited", lambda p: p.edit("data/one.txt", "11111", "9")),
    Case("data files", "edited, mtime restored", lambda p: p.edit("data/one.txt", "11111", "91111", True)),
    Case("data files", "replaced by os.replace", replaced),
    Case("data files", "appended", lambda p: p.edit("data/one.txt", "11111", "11111+")),
    Case("folders, links", "file in a linked folder edited", lambda p: p.edit("outside/four.txt", "4", "5")),
    Case("folders, links", "linked file exchanged", lambda p: ((p.folder / "data/link.txt").unlink(),
         (p.folder / "data/link.txt").symlink_to(p.folder / "template.txt"))),
    Case("folders, links", "link left dangling", lambda p: (p.folder / "outside/four.txt").unlink()),
    Case("folders, links", "file renamed", lambda p: (p.folder / "data/one.txt").rename(p.folder / "data/0")),
    Case("prepared shards", "edited between samples", between_windows, "prepared"),
    Case("prepared shards", "data.json's vocab edited",
         lambda p: p.edit("books/data.json", '"vocab": 256', '"vocab": 300'), "prepared"),
    Case("prepared shards", "two shards swapped", lambda p: exchanged(
         p.folder / "books/train_000000.bin", p.folder / "books/train_000001.bin"), "train"),
    Case("prepared shards", "removed", lambda p: (p.folder / "books/train_000001.bin").unlink(), "prepared"),
    Case("caches", "digest notes exchanged", lambda p: exchanged(*notes(p)[:2])),
    Case("caches", "notes edited",
         lambda p: [note.write_text(note.read_text().replace("0", "1")) for note in notes(p)]),
    Case("caches", "data differ, cache of before copied", other_cache),
    Case("caches", "deleted", lambda p: shutil.rmtree(p.folder / "cache")),
    Case("code", "function edited", lambda p: p.edit("train.py", "SEEN = 1.0", "SEEN = 2.0")),
    Case("code", "indirect import edited, mtime kept", lambda p: p.edit("far.py", "1", "2", True)),
    Case("code", "package's __init__ edited", lambda p: p.edit("package/__init__.py", "1.0", "2.0")),
    Case("code", "module by a computed name", lambda p: p.edit("computed.py", "1.0", "2.0"), page=UNSEEN),
    Case("run time", "JSON that code reads", lambda p: p.edit("settings.json", "1", "2"), page=UNSEEN),
    Case("run time", "template beside the code", lambda p: p.edit("template.txt", "a", "b"), page=UNSEEN),
    Case("run time", "code edited during the run", lambda p: None, before=edit_later("far.py")),
    Case("run time", "data edited during the run", lambda p: None, before=edit_later("data/one.txt")),
    Case("environment", "variable that code reads", env(GAIN="2"), page=MACHINE),
    Case("environment", "ATEN_CPU_CAPABILITY, one more arm", with_arm(env(ATEN_CPU_CAPABILITY="default")),
         sentence=PROCESSORS),
    Case("environment", "PYTHONHASHSEED", env(PYTHONHASHSEED="7"), page=MACHINE,
         before=lambda p: (p.folder / "hashed").touch()),
    Case("environment", "locale (encoding of text)", env(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"),
         page=MACHINE),
    Case("machine", "CPU capability, same arms [ATEN_CPU_CAPABILITY]", env(ATEN_CPU_CAPABILITY="default"),
         page=MACHINE),
    Case("machine", "GPU model, one more arm [provenance._gpu]",
         with_arm(lambda p: p.seam(**{LATE: gpu("B")})),
         before=lambda p: p.seam(**{LATE: gpu("A")}), sentence=PROCESSORS),
    Case("machine", "threads of a command [OMP_NUM_THREADS]", env(OMP_NUM_THREADS="2"), "command",
         before=env(OMP_NUM_THREADS="1"), page=MACHINE),
    Case("machine", "ranks of a CPU trial", lambda p: setattr(p, "extra", "resources: {ranks: 2}\n"), "train",
         page="docs/run/parallel.md:part of a trial's identity"),
    Case("versions", "torch, one more arm [torch-*.dist-info]", with_arm(lambda p: p.seam(
         **{"torch-9.9__dist-info/METADATA": "Name: torch\nVersion: 9.9\n"})), sentence=PROCESSORS),
    Case("versions", "numerics [VERSION in a copy]", other_numerics, "train", own_recipe,
         "accept-version"),
    Case("versions", "recipe file edited", lambda p: p.edit("recipe.yaml", "nvfp4", "mxfp4"),
         "train", before=own_recipe),
    Case("versions", "recipe file moved", moved_recipe, "train", before=own_recipe),
    Case("state, clock", "state folder copied", lambda p: (
         shutil.copytree(p.folder / "state", p.folder / "to"),
         setattr(p, "state", "to"))),
    Case("state, clock", "state folder moved", lambda p: (shutil.move(p.folder / "state", p.folder / "to"),
         setattr(p, "state", "to"))),
    Case("state, clock", "trials of another state copied in", mixed),
    Case("state, clock", "mtime in 2096, data edited, clock set back [time.time]", lambda p: (
         p.seam(**{LATE: CLOCK}), p.edit("data/one.txt", "1", "2"),
         os.utime(p.folder / "data/one.txt", (FUTURE, FUTURE))),
         before=lambda p: os.utime(p.folder / "data/one.txt", (FUTURE, FUTURE))),
]  # fmt: skip


def outcome(case: Case) -> str:
    """Run a case and return what happened."""
    with tempfile.TemporaryDirectory() as name:
        place = Place(Path(name), case.workload)
        case.before(place)
        said, first, _ = place.run(place.state)
        case.change(place)
        again, second, checks = place.run(place.state, checked=case.sentence == PROCESSORS)
        _, oracle, _ = place.run("oracle", "oracle-cache", fresh=True)
    text = " ".join([said, again, *checks])
    if warning := re.search(rf"[^.;\n]*(?:{case.sentence})[^.;\n]*", text):
        return f"warned: {' '.join(warning[0].split())[-110:]}"
    same = [arm for arm in first if arm in oracle]
    if not same or any(first[arm][1] is None for arm in same):
        return f"SILENT: the case did not run: {(said or again)[-200:]!r}"
    anew = [arm for arm in same if second[arm][0] != first[arm][0]]
    right = all(second[arm][1] == oracle[arm][1] for arm in same)
    moved = any(first[arm][1] != oracle[arm][1] for arm in same)
    if right and anew:
        return "id changed" if moved else "id changed, and the numbers are those of before"
    if right:
        return "id stayed, and the numbers are the oracle's"
    if anew:
        return "SILENT: another id with numbers that are not the oracle's"
    page, _, sentence = case.page.partition(":")
    if page and sentence in " ".join((ROOT / page).read_text().split()):
        return f"documented: {page}, \u201c{sentence}\u201d"
    return "SILENT"


def main() -> None:
    """Run all cases, or those whose name has a word, print the table; exit status 1 if one is silent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="cases at the same time")
    parser.add_argument("--only", default="", help="run the cases whose class or name contains this")
    parser.add_argument("--kept", type=Path, help="file of outcomes; cases in it are not run again")
    asked = parser.parse_args()
    kept = json.loads(asked.kept.read_text()) if asked.kept and asked.kept.exists() else {}
    cases = [case for case in CASES if asked.only in f"{case.group} {case.name}"]

    def found(case: Case) -> str:
        if case.name not in kept:
            kept[case.name] = outcome(case)
            if asked.kept:
                asked.kept.write_text(json.dumps(dict(kept), indent=1))
        return kept[case.name]

    print("| class | change | outcome |\n|---|---|---|")
    silent = 0
    with ThreadPoolExecutor(asked.jobs) as pool:
        for case, text in zip(cases, pool.map(found, cases), strict=True):
            silent += text.startswith("SILENT")
            print(f"| {case.group} | {case.name} | {text.replace('|', '/')} |", flush=True)
    print(f"\n{len(cases)} cases, {silent} silent")
    sys.exit(silent > 0)


if __name__ == "__main__":
    main()
