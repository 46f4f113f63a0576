"""Functions of the user's in a quantiser: each kind computes what our word of the same meaning does, what breaks the contract is refused in one sentence, and the digest of the source identifies them."""

import os
import pickle
import shutil
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from support.cases import every

from ablate.errors import InputError
from ablate.numerics.formats import ELEMENTS, element_format
from ablate.numerics.kernels import forms, general
from ablate.numerics.own import KINDS, Own
from ablate.numerics.philox import Clock
from ablate.numerics.quantize import quantize
from ablate.numerics.rounding import nearest
from ablate.numerics.spec import BlockScale, Dge, Hadamard, Outer, Quant, Range, Select
from ablate.numerics.stored import refuse
from ablate.recipes import PRESETS, Recipe
from ablate.recipes.recipe import Fprop, Products
from ablate.recipes.scaled_mapping import verdict
from ablate.recipes.targets import TARGETS
from ablate.recipes.targets.model import Lost, Model
from ablate.recipes.te_mapping import refusals

SOURCES = Path(__file__).parents[1] / "support" / "own_numerics"
FILE = f"{SOURCES}/functions.py"


def word(name: str) -> str:
    return f"{FILE}:{name}"


def quant(field: str, name: str, **more) -> Quant:
    part, _, key = field.rpartition(".")
    return Quant.model_validate({part: {key: word(name)}} | more if part else {key: word(name)} | more)


def values(columns: int = 64) -> torch.Tensor:
    """A matrix with exact ties, values beyond the grid, zeros of both signs and a block of zeros."""
    x = torch.randn(48, columns, generator=torch.Generator().manual_seed(3)) * 2
    x[0, :16] = torch.arange(16) / 4
    x[1, :16] = 0
    x[2, 3] = -0.0
    return x


SAME = {
    "rounding": (quant("rounding", "away"), Quant(rounding="away")),
    "rounding that draws": (quant("rounding", "stochastic", bits=16), Quant(rounding="stochastic", bits=16)),
    "rounding of tiles": (quant("rounding", "away", block="16x16"), Quant(rounding="away", block="16x16")),
    "scale rule": (quant("scale.rounding", "ceil"), Quant(scale=BlockScale(rounding="ceil"))),
    "scale rule without zero": (
        Quant(scale={"format": "e8m0", "rounding": word("ceil")}, outer=None),
        Quant(scale=BlockScale(format="e8m0", rounding="ceil"), outer=None),
    ),
    "block statistic": (quant("range.statistic", "half_amax"), Quant(range=Range(map_to=12.0))),
    "outer statistic": (quant("outer.statistic", "fixed"), Quant(outer=Outer(statistic="static:2.5"))),
    "outer statistic of the tensor": (quant("outer.statistic", "largest"), Quant()),
    "element": (quant("element", "E2M1"), Quant()),
    "element, drawn": (quant("element", "E2M1", rounding="stochastic"), Quant(rounding="stochastic")),
    "element, away": (quant("element", "E2M1", rounding="away"), Quant(rounding="away")),
}


@every(case=SAME, dtype=(torch.float32, torch.bfloat16), rotation=(None, Hadamard()))
def test_a_function_that_does_what_a_word_does_gives_its_bits(case, dtype, rotation):
    own, ours = SAME[case]
    x = values().to(dtype)
    made, expected = (
        quantize(x, each, clock=Clock(5), where=7, rotation=rotation, keep=True) for each in (own, ours)
    )
    assert torch.equal(made.dequantize(), expected.dequantize())
    assert torch.equal(made.codes, expected.codes)
    assert own.draws == ours.draws
    assert own.four_bits


def test_a_whole_quantiser_makes_the_values():
    x = values(50)
    made = quantize(x, quant("own", "as_bf16"), keep=True)
    assert torch.equal(made.dequantize(), x.to(torch.bfloat16).float())
    own = quant("own", "as_bf16_drawn", bits=16)
    drawn = torch.stack([quantize(x, own, clock=Clock(0), where=site).dequantize() for site in range(1024)])
    again = quantize(x, own, clock=Clock(0), where=1023).dequantize()
    assert torch.equal(again, drawn[-1])
    spread = (drawn - x).abs().amax() / x.abs().amax()
    assert 0 < spread < 2**-7
    error = (drawn.double().mean(0) - x.double()).abs() / (x.abs().double() * 2**-8 + 1e-30)
    assert error.max() < 0.5 * 5 / 1024**0.5 * 2  # five standard errors of a draw between neighbours


def test_a_search_for_scales_gets_what_it_needs():
    """The better of two neighbours errs less than the nearest scale, by an error that the test computes itself."""
    x = values()

    def error(how: Quant) -> torch.Tensor:
        return (quantize(x, how).dequantize() - x).square().view(48, 4, 16).sum(2)

    own, ours = error(quant("scale.rounding", "best_of_two")), error(Quant())
    assert (own <= ours * 1.001).all()
    assert own.sum() < 0.99 * ours.sum()


KIND = {
    "rounding": quant("rounding", "stochastic"),
    "scale.rounding": quant("scale.rounding", "ceil"),
    "range.statistic": quant("range.statistic", "half_amax"),
    "outer.statistic": quant("outer.statistic", "fixed"),
    "element": quant("element", "E2M1"),
    "own": quant("own", "as_bf16"),
}
"""A quantiser with a function of each kind."""


def test_each_kind_is_here():
    assert KIND.keys() == KINDS.keys() | {"element"}


@every(field=KIND)
def test_kernels_engines_and_exports_refuse_a_function_by_its_field(field):
    own = KIND[field]
    name = own.owned[0][1].label
    assert own.owned == ((field, own.owned[0][1]),)
    assert not forms.on_gpu(own)
    assert not general.covers(own)
    recipe = Recipe(fprop=Fprop(x=own, w=Quant()))
    said = [*refusals(recipe.products)]
    said = [why for why in said if why.startswith("fprop.x")]
    assert said == [f"fprop.x.{field} {name}: Transformer Engine cannot call your function"]
    assert f".{field} {name}: a function of your own" in verdict(own, Quant(), False).why
    for target, export in TARGETS.items():
        with pytest.raises(Lost) as lost:
            export.write(recipe, Model(blocks=2))
        assert len(lost.value.reasons) == 1, target
        assert lost.value.reasons[0].startswith(f"fprop.x.{field} {name}: ")


def test_an_operand_that_a_function_makes_cannot_be_stored():
    with pytest.raises(ValueError, match="own"):
        refuse(KIND["own"])


@every(field=KIND)
def test_a_word_survives_json_copies_and_pickling_and_its_id_has_no_folder(field):
    own = KIND[field]
    assert Quant.model_validate_json(own.model_dump_json()) == own
    assert pickle.loads(pickle.dumps(own)) == deepcopy(own) == own
    text = str(own.canonical())
    assert str(SOURCES) not in text
    assert own.owned[0][1].identity in text


def refusal(field: str, value: str) -> str:
    with pytest.raises(ValidationError) as refused:
        quant(field, value) if ":" not in value else Quant.model_validate({field: value})
    (error,) = refused.value.errors()
    assert "\n" not in error["msg"]
    return error["msg"]


WORDS = {
    "a missing file": ("rounding", "/nowhere/mine.py:f", "/nowhere/mine.py: no such file"),
    "no such function": ("rounding", "awayy", "'away' is the nearest"),
    "a function of another kind": ("rounding", "half_amax", "it is a function for range.statistic"),
    "an unknown argument": ("rounding", "unknown_argument", "takes temperature"),
    "arguments of no field": (
        "rounding",
        "of_no_field",
        "takes x; a function for rounding takes y, grid, bits",
    ),
    "an assigned function": ("rounding", "ASSIGNED", "it is assigned there: write a def"),
    "hidden arguments": ("rounding", "hidden_arguments", "must take its arguments by name"),
    "no function": ("rounding", FILE.rpartition("/")[2] + ":", "'nearest'"),
    "no such module": ("rounding", "nope.mod:f", "there is no module nope.mod"),
    "a grid that does not rise": ("element", "NOT_RISING", "must rise from 0"),
    "a grid that is computed": ("element", "COMPUTED", "written out"),
    "a grid that grows": ("element", "GROWN", "functions.py:13: GROWN is bound or used again"),
    "a list that is changed": ("element", "APPENDED", "functions.py:15: APPENDED is bound or used again"),
    "a digest without values": ("element", "E2M1#0123456789abcdef", "leave out # and what follows"),
    "a word for a quantiser": ("own", "a:1", "names no function"),
}


@every(case=WORDS)
def test_a_wrong_word_is_refused_in_one_sentence(case):
    field, value, why = WORDS[case]
    assert why in refusal(field, value)


def test_a_grid_may_begin_at_minus_zero(tmp_path):
    (tmp_path / "grids.py").write_text("FROM_MINUS_ZERO = (-0.0, 0.5, 1, 1.5, 2, 3, 4, 6)\n")
    own = Quant(element=f"{tmp_path}/grids.py:FROM_MINUS_ZERO")
    assert torch.equal(quantize(values(), own).dequantize(), quantize(values(), Quant()).dequantize())


CONTRADICTIONS = {
    "a quantiser with our scales": lambda: quant("own", "as_bf16", block="1x16", scale=BlockScale()),
    "a quantiser with a rounding": lambda: quant("own", "as_bf16", rounding="stochastic"),
    "bits that nobody draws": lambda: quant("rounding", "away", bits=24),
    "a selection": lambda: quant("rounding", "away", select=Select(among="scales"), outer=Outer(bound=256.0)),
    "an estimator": lambda: quant("element", "E2M1", estimator=Dge()),
    "a statistic for rows": lambda: Quant(outer={"granularity": "row", "statistic": word("fixed")}),
}


@every(case=CONTRADICTIONS)
def test_a_contradiction_is_refused(case):
    with pytest.raises(ValidationError) as refused:
        CONTRADICTIONS[case]()
    assert str(SOURCES) not in refused.value.errors()[0]["msg"]


BROKEN = {
    "raises": ("rounding", "raised KeyError: 'nothing here' ("),
    "too_short": ("rounding", "returned shape [48, 1, 4, 15]; it must return [48, 1, 4, 16]"),
    "doubles": ("rounding", "returned dtype torch.float64"),
    "none": ("rounding", "returned NoneType"),
    "not_a_number": ("rounding", "returned nan for"),
    "off_grid": ("rounding", "returned 0.300000012 for"),
    "in_place": ("rounding", "changes its argument y in place"),
    "in_place_by_numpy": ("rounding", "changes its argument y in place"),
    "transposes_in_place": ("rounding", "changes its argument y in place"),
    "reorders_by_numpy": ("outer.statistic", "changes its argument tensor in place"),
    "global_draws": ("rounding", "draws from torch's global generator"),
    "draws_by_numpy": ("rounding", "draws from NumPy's global generator"),
    "draws_by_python": ("rounding", "draws from Python's global generator"),
    "negative": ("range.statistic", "returned -"),
}


@every(name=BROKEN)
def test_a_function_that_breaks_the_contract_is_refused_in_one_sentence(name):
    field, why = BROKEN[name]
    with pytest.raises(InputError) as refused:
        quantize(values(), quant(field, name))
    (problem,) = refused.value.problems
    assert str(problem).startswith(f"{field} functions.py:{name} {why}")
    assert "\n" not in str(problem)


def test_a_state_that_shows_after_some_calls_is_refused():
    """Until then the function and a copy that is imported anew, as in a continued run, agree."""
    own, x = quant("rounding", "later"), values()
    for _ in range(12):
        quantize(x, own)
    with pytest.raises(InputError, match="returned other numbers"):
        [quantize(x, own) for _ in range(4)]


def test_what_is_not_finite_or_empty_passes():
    x = values()
    x[5, 5], x[6, 6] = torch.inf, torch.nan
    for own in KIND.values():
        quantize(x, own, clock=Clock(0))
        assert quantize(x[:0], own, clock=Clock(0)).values.shape[0] == 0


def test_a_grid_rounds_a_transposed_matrix_without_a_warning():
    grid = element_format(quant("element", "E2M1").element)
    assert torch.equal(nearest(values().t(), grid).t(), nearest(values(), ELEMENTS["e2m1"]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(SOURCES, tmp_path / "mine", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "mine"


def identity(folder: Path) -> str:
    own = Quant(rounding=f"{folder}/functions.py:away")
    return str(own.canonical()["rounding"])


def test_an_edit_of_the_source_or_what_it_imports_changes_the_identity_and_nothing_else_does(
    folder, tmp_path
):
    first = identity(folder)
    assert first.startswith("functions.py:away#")
    (folder / "unrelated.py").write_text("A = 1\n")
    assert identity(folder) == first
    shutil.copytree(folder, tmp_path / "elsewhere")
    assert identity(tmp_path / "elsewhere") == first
    (folder / "halves.py").write_text("HALF = 0.25\n")
    assert identity(folder) != first


def test_an_edited_function_runs_anew_and_is_refused_under_the_old_digest(folder):
    before = Quant(rounding=f"{folder}/functions.py:away")
    x = values()
    old = quantize(x, before).dequantize()
    (folder / "halves.py").write_text("HALF = 0.0\n")
    after = quantize(x, Quant(rounding=f"{folder}/functions.py:away")).dequantize()
    assert not torch.equal(after, old)
    stale = Quant(rounding=f"{before.rounding.partition('#')[0]}#0123456789abcdef")
    with pytest.raises(InputError, match=r"functions.py:away was edited"):
        quantize(x, stale)


def test_modules_of_the_same_name_stay_apart(folder, monkeypatch):
    theirs = sys.modules["halves"] = type(sys)("halves")
    monkeypatch.setitem(sys.modules, "halves", theirs)
    before = [*sys.path]
    (folder / "halves.py").write_text("HALF = 0.0  # of this folder\n")
    quantize(values(), Quant(rounding=f"{folder}/functions.py:away"))
    assert sys.modules["halves"] is theirs
    assert sys.path == before
    assert "functions" not in sys.modules


OTHER_FILES = {
    "an import by a computed name": (
        "import importlib\nHALF = importlib.import_module('part'[:4]).HALF",
        {"part.py": "HALF = 0.5\n"},
        {},
        "part.py is imported, and no import statement",
    ),
    "an entry of sys.path that the file adds": (
        "import sys\nfor name in [{elsewhere!r}]:\n    sys.path.insert(0, name)\nfrom part import HALF",
        {},
        {"part.py": "HALF = 0.5\n"},
        "part.py is imported, and no import statement",
    ),
}


@every(case=OTHER_FILES)
def test_a_file_that_is_not_in_the_digest_cannot_be_executed_under_it(case, tmp_path):
    """Twice in one process: what the first attempt imported does not serve the second."""
    top, beside, elsewhere, why = OTHER_FILES[case]
    for name, text in [(f"mine/{name}", text) for name, text in beside.items()] + [*elsewhere.items()]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    top = top.replace("{elsewhere!r}", repr(str(tmp_path)))
    (tmp_path / "mine" / "functions.py").parent.mkdir(exist_ok=True)
    (tmp_path / "mine" / "functions.py").write_text(f"{top}\ndef mine(y):\n    return y * 0 + HALF\n")
    own = Quant(rounding=f"{tmp_path}/mine/functions.py:mine")
    modules = dict(sys.modules)
    for _ in range(2):
        with pytest.raises(InputError) as refused:
            quantize(values(), own)
        assert why in str(refused.value)
    assert modules.items() <= sys.modules.items()


def test_an_import_inside_a_function_is_refused(tmp_path):
    """Planning has the file beside in the digest; the trial would execute whatever has its name then."""
    (tmp_path / "part.py").write_text("HALF = 0.5\n")
    mine = tmp_path / "mine.py"
    mine.write_text("def mine(y):\n    import part\n    return y * 0 + part.HALF\n")
    assert f"{mine}:2 imports inside a function a file beside it" in refusal("rounding", f"{mine}:mine")
    mine.write_text("import part\ndef mine(y):\n    import math\n    return y * 0 + part.HALF\n")
    assert Quant(rounding=f"{mine}:mine").owned


def test_modules_and_entry_points_name_functions_too(folder, monkeypatch):
    package = folder.parent / "mypkg"
    shutil.copytree(folder, package)
    (package / "functions.py").write_text(
        (package / "functions.py").read_text().replace("from halves", "from .halves")
    )
    (package / "__init__.py").write_text("")
    monkeypatch.chdir(folder.parent)
    beside = Quant(rounding="mypkg.functions:away").rounding
    assert isinstance(beside, Own)
    assert beside.startswith(f"{folder.parent}/mypkg.functions:away#")
    monkeypatch.chdir(folder)
    info = folder.parent / "mine-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[ablate.numerics]\nmy_away = mypkg.functions:away\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    named = Quant(rounding="my_away")
    assert named.rounding == f"mypkg.functions:away#{beside.digest}"
    assert torch.equal(quantize(values(), named).values, quantize(values(), Quant(rounding="away")).values)


def test_planning_imports_neither_torch_nor_the_function(folder):
    (folder / "functions.py").write_text("raise SystemExit('imported')\ndef mine(y): ...\n")
    code = (
        "import sys; from ablate.numerics.spec import Quant;"
        "Quant(rounding='functions.py:mine'); assert 'torch' not in sys.modules"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, check=True)


def test_presets_have_no_functions():
    assert not any(quant.owned for make in PRESETS.values() for _, quant in Products.quantised(make()))
