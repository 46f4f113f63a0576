"""Layouts of files in which a user's code imports a helper, for the promise that an edit of it is never missed.

Each attack is a folder with `exp/train.py` (or a quantiser's `exp/mine.py`), which gets VALUE from a helper that
is loaded in some form from some place.
"""

import importlib
import os
import site
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from zipfile import ZipFile

import torch

from ablate.errors import InputError
from ablate.experiment.trial_spec import TrialSpec
from ablate.numerics.quantize import quantize
from ablate.numerics.spec import Quant
from ablate.recipes import PRESETS
from ablate.training.loop import Telemetry
from ablate.training.trial_run import TrialRun
from ablate.training.workloads import WORKLOADS

CHANGED, AT_PLAN, AT_RUN, MISSED = "another id", "refused at planning", "refused at run time", "MISSED"
HELPER = "VALUE = 1.0\n"
TRAIN = """
def train(trial):
    LATE
    for step, _ in trial.steps([0]):
        with trial.step():
            pass
    trial.log({"val/loss": VALUE})
"""
MINE = """
def mine(y):
    LATE
    return y * 0 + VALUE
"""


@dataclass(frozen=True)
class Attack:
    """Import of a helper, in some form from some place."""

    top: str
    """Beginning of the user's file."""
    helper: str = "lib/helper.py"
    """File that is edited."""
    more: Mapping[str, str] = field(default_factory=dict)
    """Further files."""
    on_path: tuple[str, ...] = ()
    """Folders of PYTHONPATH; `exp` is what `python -m ablate` puts there if it is started in it."""
    cwd: str = "exp"
    late: str = "pass"
    """Statement of the function."""
    kind: str = "python"
    own_file: str = ""
    """The user's file, if it is another than `exp/train.py` or `exp/mine.py`."""
    function: str = ""
    """Name of the function as the experiment has it, if it is not by its file."""
    finder: str = ""
    """Folder whose modules an editable install's finder gives."""
    pth: str = ""
    """Folder that a file of `site-packages` adds to `sys.path`."""
    in_use: bool = False
    """True if the process has imported the helper for something else."""
    outcome: str = CHANGED

    @property
    def file(self) -> str:
        """The user's file."""
        return self.own_file or ("exp/mine.py" if self.kind == "own" else "exp/train.py")

    def write(self, folder: Path) -> Path:
        """Write the layout to a folder and return the folder."""
        body = {"python": TRAIN, "own": MINE, "command": "print(VALUE)\n"}[self.kind]
        for name, text in {
            "exp/empty.txt": "",
            self.helper: HELPER,
            self.file: f"{self.top}\n{body.replace('LATE', self.late)}",
            **self.more,
        }.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        if self.helper.endswith(".txt"):  # a module inside of an archive
            with ZipFile(folder / "lib.zip", "w") as archive:
                archive.writestr("helper.py", (folder / self.helper).read_text())
        return folder


class EditableFinder:
    """Finder of an editable install, as setuptools writes it: a name, and the place of its source."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of a package or module of the folder."""
        for file in (self._folder / name / "__init__.py", self._folder / f"{name}.py"):
            if file.is_file():
                inside = [str(file.parent)] if file.name == "__init__.py" else None
                return spec_from_file_location(name, file, submodule_search_locations=inside)
        return None


@contextmanager
def surroundings(attack: Attack, folder: Path) -> Iterator[None]:
    """Inside this context, the process is as one that was started for the attack."""
    path, finders, modules, cwd = [*sys.path], [*sys.meta_path], {*sys.modules}, os.getcwd()
    os.chdir(folder / attack.cwd)
    sys.path[:0] = [str(folder / name) for name in attack.on_path]
    if attack.finder:
        sys.meta_path.append(EditableFinder(folder / attack.finder))  # type: ignore[arg-type]
    if attack.pth:
        packages = folder / "site-packages"
        packages.mkdir(exist_ok=True)
        (packages / "mine.pth").write_text(f"{folder / attack.pth}\n")
        site.addsitedir(str(packages))
    if attack.in_use:
        importlib.import_module("helper")
    try:
        yield
    finally:
        os.chdir(cwd)
        sys.path[:], sys.meta_path[:] = path, finders
        for name in [name for name in sys.modules if name not in modules]:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
                del sys.modules[name]


def identity(attack: Attack, folder: Path) -> tuple[str, Callable[[], float]]:
    """Return what identifies a trial, and its run, which returns the helper's value; ValueError if refused."""
    if attack.kind == "own":
        word = attack.function or f"{folder / attack.file}:mine"
        quant = Quant.model_validate({"rounding": word})
        x = torch.ones(16, 16) * 6
        return quant.model_dump_json().replace(str(folder), ""), lambda: float(
            quantize(x, quant).dequantize()[0, 0]
        )
    fields = {"file": str(folder / attack.file), "steps": 1}
    if attack.kind == "command":
        fields = {"run": "python train.py {seed}", "folder": str(folder / "exp"), "steps": 1}
    elif attack.function:
        fields |= {"file": str(folder / "exp"), "function": attack.function}
    config = WORKLOADS[attack.kind].model_validate(fields)
    if problems := list(config.problems()):
        raise ValueError(str(problems))
    recipe = PRESETS["bf16"]()
    spec = TrialSpec(
        workload=attack.kind, config=config, recipe=recipe, seed=0, engine="emulated", device="cpu"
    )

    def run() -> float:
        telemetry = Telemetry(every=10**6, shadow=10**6, log=1)
        records = [*config.records(TrialRun(recipe, 0, "emulated", "cpu", telemetry))]
        return records[-1].metrics["val/loss"]

    return spec.id, (
        lambda: float(Path(folder, attack.helper).read_text()[8:11])
    ) if attack.kind == "command" else run


def outcome(attack: Attack, folder: Path) -> str:
    """Return what an edit of the helper does: another id, a refusal, or nothing."""
    attack.write(folder)
    with surroundings(attack, folder):
        try:
            before, run = identity(attack, folder)
        except ValueError:
            return AT_PLAN
        try:
            first = run()
        except InputError as error:
            return AT_RUN if "no import statement names it" in str(error) else f"FAILED: {error}"
        (folder / attack.helper).write_text(HELPER.replace("1", "2"))
        try:
            after, run = identity(attack, folder)
            second = run()
        except (InputError, ValueError) as error:
            return f"FAILED: {error}"
        return CHANGED if before != after and (first, second) == (1.0, 2.0) else f"{MISSED} {first} {second}"


PLAIN, LITERAL = (
    "from helper import VALUE",
    "import importlib\nVALUE = importlib.import_module('helper').VALUE",
)
COMPUTED = "import importlib\nVALUE = importlib.import_module('help' + 'er'[:9]).VALUE"
LATE = "import importlib; VALUE = importlib.import_module('helper'[:9]).VALUE"
BESIDE, PACKAGE = "exp/helper.py", "lib/pkg/sub.py"
FOUND = f"\n{PLAIN}"
INIT = {"lib/pkg/__init__.py": ""}

ATTACKS = {
    # beside the file, which is on sys.path already
    "import_module of a literal": Attack(LITERAL, BESIDE, on_path=("exp",)),
    "__import__ of a literal": Attack("VALUE = __import__('helper').VALUE", BESIDE, on_path=("exp",)),
    "import_module of a constant": Attack(
        "from importlib import import_module\nNAME = 'helper'\nVALUE = import_module(NAME).VALUE",
        BESIDE,
        on_path=("exp",),
    ),
    "import_module of an f-string": Attack(
        "import importlib\nWORD = 'per'\nVALUE = importlib.import_module(f'hel{WORD}').VALUE",
        BESIDE,
        on_path=("exp",),
    ),
    "import_module of a relative name": Attack(
        "import importlib, pkg\nVALUE = importlib.import_module('.sub', 'pkg').VALUE",
        "exp/pkg/sub.py",
        {"exp/pkg/__init__.py": ""},
        ("exp",),
        outcome=AT_RUN,
    ),
    "import_module of a submodule": Attack(
        "import importlib\nVALUE = importlib.import_module('pkg.sub').VALUE",
        "exp/pkg/sub.py",
        {"exp/pkg/__init__.py": ""},
        ("exp",),
    ),
    "import_module of a computed name": Attack(COMPUTED, BESIDE, on_path=("exp",), outcome=AT_RUN),
    "import_module of a computed name, in the function": Attack(
        "", BESIDE, on_path=("exp",), late=LATE, outcome=AT_RUN
    ),
    "import_module of a literal, in the function": Attack(
        "", BESIDE, on_path=("exp",), late="import importlib; VALUE = importlib.import_module('helper').VALUE"
    ),
    # on PYTHONPATH
    "a module": Attack(PLAIN, on_path=("lib",)),
    "a submodule of a package": Attack("from pkg import sub\nVALUE = sub.VALUE", PACKAGE, INIT, ("lib",)),
    "a submodule by its dotted name": Attack("import pkg.sub as s\nVALUE = s.VALUE", PACKAGE, INIT, ("lib",)),
    "the __init__ of a package": Attack("from pkg import VALUE", "lib/pkg/__init__.py", {}, ("lib",)),
    "a file of a package that its __init__ imports": Attack(
        "from pkg import VALUE", PACKAGE, {"lib/pkg/__init__.py": "from .sub import VALUE\n"}, ("lib",)
    ),
    "a module that imports its parent's sibling": Attack(
        "from pkg.deep.one import VALUE",
        PACKAGE,
        {**INIT, "lib/pkg/deep/__init__.py": "", "lib/pkg/deep/one.py": "from ..sub import VALUE\n"},
        ("lib",),
    ),
    "a namespace package": Attack("import ns.sub\nVALUE = ns.sub.VALUE", "lib/ns/sub.py", {}, ("lib",)),
    "the second portion of a namespace package": Attack(
        "import ns.other, ns.sub\nVALUE = ns.sub.VALUE",
        "lib/ns/sub.py",
        {"more/ns/other.py": ""},
        ("more", "lib"),
    ),
    "a regular package behind a folder of its name": Attack(
        "from pkg.sub import VALUE", PACKAGE, {**INIT, "exp/pkg/sub.py": "VALUE = 9.0\n"}, ("lib",)
    ),
    "a module with the name of one of the interpreter's": Attack(
        "from chunk import VALUE", "lib/chunk.py", {}, ("lib",)
    ),
    "an import in the function": Attack("", on_path=("lib",), late="from helper import VALUE"),
    "an import that may fail": Attack(
        f"try:\n    {PLAIN}\nexcept ImportError:\n    VALUE = 0.0", on_path=("lib",)
    ),
    "an import under a condition": Attack(
        f"import typing\nif not typing.TYPE_CHECKING:\n    {PLAIN}", on_path=("lib",)
    ),
    "what a file beside imports": Attack(
        "from near import VALUE", more={"exp/near.py": "from helper import VALUE\n"}, on_path=("lib",)
    ),
    "what a module on PYTHONPATH imports": Attack(
        "from far import VALUE", more={"more/far.py": "from helper import VALUE\n"}, on_path=("more", "lib")
    ),
    "a computed name on PYTHONPATH": Attack(COMPUTED, on_path=("lib",), outcome=AT_RUN),
    "a computed name of a module in use": Attack(COMPUTED, on_path=("lib",), in_use=True, outcome=AT_RUN),
    "a module in an archive": Attack(PLAIN, "lib/helper.txt", on_path=("lib.zip",), outcome=AT_RUN),
    "the working folder": Attack(PLAIN, on_path=("lib",), cwd="lib"),
    "the function's own folder": Attack(
        PLAIN, on_path=("lib",), own_file="lib/loops.py", function="loops:train"
    ),
    # installed in editable form
    "a folder of a .pth file": Attack(PLAIN, pth="lib"),
    "a package of an editable install": Attack("from pkg.sub import VALUE", PACKAGE, INIT, finder="lib"),
    "a module of an editable install": Attack(PLAIN, finder="lib"),
    # behind a change of sys.path
    "the folder above": Attack("import sys\nsys.path.insert(0, '..')" + FOUND, "helper.py"),
    "a folder of the working folder": Attack("import sys\nsys.path.append('lib')" + FOUND, cwd="."),
    "a folder by Path": Attack(
        "import sys\nfrom pathlib import Path\nsys.path.append(str(Path(__file__).parent / 'lib'))" + FOUND,
        "exp/lib/helper.py",
    ),
    "a folder by os.path.join": Attack(
        "import os, sys\nsys.path.insert(0, os.path.join(os.path.dirname(__file__), '..'))" + FOUND,
        "helper.py",
    ),
    "a folder by dirname of dirname": Attack(
        "import sys\nfrom os.path import abspath, dirname\nsys.path.insert(0, dirname(dirname(abspath(__file__))))"
        + FOUND,
        "helper.py",
    ),
    "a folder by parents of a name": Attack(
        "import sys, pathlib\nROOT = pathlib.Path(__file__).resolve().parents[1]\nLIB = ROOT / 'lib'\n"
        "sys.path.insert(1, f'{LIB}')" + FOUND
    ),
    "sys.path += ": Attack("import os, sys\nsys.path += [os.path.dirname(__file__) + '/../lib']" + FOUND),
    "sys.path = ": Attack(
        "import os, sys\nsys.path = [os.path.dirname(__file__) + '/../lib', *sys.path]" + FOUND
    ),
    "sys.path[:0] = ": Attack(
        "import os, sys\nsys.path[:0] = (os.path.dirname(__file__) + '/../lib',)" + FOUND
    ),
    "site.addsitedir": Attack(
        "import os, site\nsite.addsitedir(os.path.dirname(__file__) + '/../lib')" + FOUND
    ),
    "path of sys": Attack("from sys import path\npath.append('../lib')" + FOUND),
    "a change in the function": Attack(
        "", late="import sys; sys.path.insert(0, '../lib'); from helper import VALUE"
    ),
    "a change by a file beside": Attack(
        "import setup_path" + FOUND, more={"exp/setup_path.py": "import sys\nsys.path.append('../lib')\n"}
    ),
    "a change in a loop": Attack(
        "import os, sys\nfor name in ('lib', 'more'):\n    sys.path.append(os.path.join('..', name))" + FOUND,
        outcome=AT_RUN,
    ),
    # by the path of the file
    "spec_from_file_location": Attack(
        "import importlib.util as u, os\ns = u.spec_from_file_location('h', os.path.dirname(__file__) + '/../lib/helper.py')\n"
        "m = u.module_from_spec(s)\ns.loader.exec_module(m)\nVALUE = m.VALUE",
        outcome=AT_PLAN,
    ),
    "spec_from_file_location of a computed path": Attack(
        "import importlib.util as u, glob\ns = u.spec_from_file_location('h', glob.glob('../lib/*.py')[0])\n"
        "m = u.module_from_spec(s)\ns.loader.exec_module(m)\nVALUE = m.VALUE",
        outcome=AT_PLAN,
    ),
    "run_path": Attack("import runpy\nVALUE = runpy.run_path('../lib/helper.py')['VALUE']", outcome=AT_PLAN),
    # functions of quantisers and commands
    "a quantiser, on PYTHONPATH": Attack(PLAIN, kind="own", on_path=("lib",)),
    "a quantiser, in the folder above": Attack(
        "import sys\nsys.path.insert(0, '..')" + FOUND, "helper.py", kind="own"
    ),
    "a quantiser, import_module of a literal": Attack(LITERAL, BESIDE, kind="own", on_path=("exp",)),
    "a quantiser, a computed name": Attack(COMPUTED, BESIDE, kind="own", on_path=("exp",), outcome=AT_RUN),
    "a quantiser, a computed name in the function": Attack(
        "", BESIDE, kind="own", on_path=("exp",), late=LATE, outcome=AT_RUN
    ),
    "a quantiser, a computed name of a module in use": Attack(
        COMPUTED, kind="own", on_path=("lib",), in_use=True, outcome=AT_RUN
    ),
    "a quantiser, a regular package behind a folder of its name": Attack(
        "from pkg.sub import VALUE",
        PACKAGE,
        {**INIT, "exp/pkg/sub.py": "VALUE = 9.0\n"},
        ("lib",),
        kind="own",
    ),
    "a quantiser, a computed path": Attack(
        "import runpy, glob\nVALUE = runpy.run_path(glob.glob('../lib/*.py')[0])['VALUE']",
        kind="own",
        outcome=AT_PLAN,
    ),
    "a quantiser of an editable install": Attack(
        "from pkg.sub import VALUE",
        PACKAGE,
        INIT,
        kind="own",
        finder="lib",
        own_file="lib/pkg/round.py",
        function="pkg.round:mine",
    ),
    "a command, in the folder above": Attack(
        "import sys\nsys.path.insert(0, '..')" + FOUND, "helper.py", kind="command"
    ),
    "a command, import_module of a literal": Attack(LITERAL, BESIDE, kind="command"),
}
"""Attacks by name, with what becomes of each."""
