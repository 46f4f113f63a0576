"""Conformance kit on faults that happened: each is seen by the property that was written for it, with the first stage
that is wrong; right implementations raise no alarm."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from support.commands import here
from support.dumped import write
from support.published_faults import MUTANTS, PUBLISHED, e2m1, mxfp4, nvfp4

from ablate.engines.hardware import installed
from ablate.engines.products import backward, forward
from ablate.errors import InputError
from ablate.numerics.hadamard import rotate
from ablate.numerics.philox import Clock
from ablate.numerics.spec import Hadamard
from ablate.recipes.presets import PRESETS
from ablate.verification import peers
from ablate.verification.conformance import inputs
from ablate.verification.conformance.declared import RECIPE, NoComputationError
from ablate.verification.conformance.dumps import DumpedLayer
from ablate.verification.conformance.emulator import emulator
from ablate.verification.conformance.examination import Examination, NotApplicableError, reference
from ablate.verification.conformance.numbers import differences
from ablate.verification.conformance.reference_product import rounded_to_nearest
from ablate.verification.conformance.replay import RedrawnLayer
from ablate.verification.conformance.result import Outcome
from ablate.verification.conformance.run import conform
from ablate.verification.conformance.subject import Quantised, Subject

pytest_plugins = ["ablate.verification.conformance.pytest_plugin"]
MEASURED = {5, 6}
"""Published faults that bias draws as the recipe itself may: reported with an interval, never failed."""


@pytest.mark.parametrize("name", MUTANTS)
def test_a_published_fault_is_seen_by_its_property_with_its_stage(name):
    mutant = MUTANTS[name]
    torch.manual_seed(0)
    findings = conform(mutant.subject, mutant.recipe, only=[mutant.fails])
    assert [row.outcome for row in findings.rows if row.property == mutant.fails] == [Outcome.FAIL]
    stage = next(row.stage for row in findings.rows if row.property == mutant.fails)
    assert stage.startswith(mutant.stage)
    assert bool(stage) == bool(mutant.stage)
    assert all(row.block or row.detail for row in findings.rows if row.outcome == Outcome.FAIL)


@pytest.mark.parametrize("wrong", [0.0, float("inf")])
def test_what_is_no_number_in_a_zero_tensor_is_shown(wrong):
    """0/0 in the values, or an infinite outer factor."""

    def cast(x):
        if wrong:
            return Quantised(
                codes=torch.zeros(x.shape),
                scales=torch.zeros(len(x), x.shape[1] // 16),
                outer=torch.tensor(wrong),
            )
        return x.float() / x.float().abs().max()

    row = conform(cast, only=["zero_tensor"]).rows[0]
    assert (row.outcome, row.block.place) == (Outcome.FAIL, "row 0, column 0")
    assert "values are nan" in row.detail


def test_views_are_handed_in_as_views():
    strides = []
    findings = conform(lambda x: strides.append(x.stride()) or nvfp4(x), only=["strides"])
    assert findings.passed
    assert strides == [(1, 64), (256, 2), (256, 1), (0, 1)]


def test_a_factor_is_compared_beside_a_right_amax():
    """Numbers beyond 5 do not count for the factor: those of other properties are smaller."""

    def cast(x):
        made, amax = nvfp4(x), x.float().abs().max()
        return replace(made, outer=made.outer * (amax.clamp(max=5) / amax), amax=amax)

    row = conform(cast, only=["true_amax"]).rows[0]
    assert (row.outcome, row.differing) == (Outcome.FAIL, 20)
    assert "outer 0.00186012, not 0.00334821" in row.detail


def spoiled(x, w, dy):
    y, dx, dw = emulator(PRESETS["nvfp4"]()).product(x, w, dy)
    return y, dx * torch.nan, dw


def turned_to_nan(x):
    """Right for unit vectors alone."""
    return rotate(x, Hadamard()) * (1.0 if x.abs().max() == 1 else torch.nan)


@pytest.mark.parametrize(
    ("name", "subject"),
    [
        ("same_weight_codes", Subject("s", product=spoiled)),
        ("rotation_cancels", Subject("s", rotate=turned_to_nan)),
        ("rotation_values", Subject("s", rotate=turned_to_nan)),
        ("rotation_values", Subject("s", rotate=turned_to_nan, dtypes=("float32",))),
    ],
)
def test_a_nan_is_far_from_every_number(name, subject):
    row = conform(subject, only=[name]).rows[0]
    assert (row.outcome, row.differing) == (Outcome.FAIL, row.cases)
    assert "not rounded" not in row.detail


def test_every_published_fault_has_a_mutant_or_is_measured():
    assert {mutant.number for mutant in MUTANTS.values()} | MEASURED == {*PUBLISHED}


@pytest.mark.parametrize("recipe", PRESETS)
def test_the_steps_that_variants_replace_are_those_of_the_recipe(recipe):
    bench = Examination(Subject("none"), PRESETS[recipe]())
    for name in ("nearest", "square"):
        try:
            quant = getattr(bench, name)
            made = [RECIPE.run(x, quant) for x in tensors(quant)]
        except (NotApplicableError, NoComputationError):
            continue
        assert [
            differences(one, reference(x, quant), quant.tile[1]).count
            for one, x in zip(made, tensors(quant), strict=True)
        ] == [0, 0, 0]


def tensors(quant):
    yield inputs.normal(33, 256, 0)
    yield inputs.spread(32, 128, quant.tile[1], 0).bfloat16()
    yield 1e-30 * inputs.outliers(17, 128, 1)


def te(recipe, **options):
    divisor = 1536 if options else 2688

    def cast(tile):
        def call(x):
            made = peers.te_quantizer(tile, **options).quantize(x)
            return Quantised(codes=made.data, scales=made.scale, outer=made.global_amax_row / divisor)

        return call

    return Subject("te", cast=cast((1, 16)), cast_square=cast((16, 16)))


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("nvfp4", {}),
        ("four_over_six", {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256, "nvfp4_4over6_err_mode": "mse"}),
    ],
)
def test_transformer_engines_reference_holds_every_property(recipe, options):
    if installed("transformer_engine") is None:
        pytest.skip("needs transformer-engine")
    findings = conform(te(recipe, **options), recipe)
    assert findings.passed, findings.table
    assert sum(row.outcome == Outcome.PASS for row in findings.rows) > 20


def test_the_right_casts_that_mutants_are_made_from_fail_only_where_the_recipe_lets_them():
    failed = [
        row.property
        for name, function in (("nvfp4", nvfp4), ("mxfp4", mxfp4))
        for row in conform(Subject("plain", cast=function), name).rows
        if row.outcome == Outcome.FAIL
    ]
    assert failed == ["infinity_visible", "nan_visible"]


# --- variants, errors, forms ----------------------------------------------------------------------


def test_a_declared_variant_has_to_hold_in_its_declared_form():
    def two_roundings(x):
        return nvfp4(x, scale=lambda a, outer: a / 6 * outer)

    only = ["order_of_scale", "random_bf16"]
    undeclared = conform(Subject("s", cast=two_roundings), only=only)
    assert not undeclared.passed
    hint = 'Declare variants={"*": "scale (a/6) S"} if meant.'
    detail = [row.detail for row in undeclared.rows if row.outcome == Outcome.FAIL][-1]
    assert detail.startswith("promised: The block scale is e4m3(a (S (1/6)))")
    assert detail.endswith(hint)
    declared = Subject("s", cast=two_roundings, variants={"order_of_scale": "scale (a/6) S"})
    assert [row.outcome for row in conform(declared, only=only).rows if row.property == only[0]] == [
        Outcome.VARIANT
    ]
    wrong = Subject(
        "s",
        cast=lambda x: nvfp4(x, scale=lambda a, outer: a / 6 * outer, factor=lambda s, outer: outer / s),
        variants=declared.variants,
    )
    assert not conform(wrong, only=["order_of_factor"]).passed


def other_order(x):
    """Codes and scales of an order that differs at ties, with two other deviations."""
    by = {"scale": lambda a, outer: (a / 6 * outer).clamp(min=2.0**-9), "factor": lambda s, outer: outer / s}
    return replace(nvfp4(x, **by), values=None)


def test_what_a_row_advises_to_declare_is_what_makes_all_rows_hold():
    declared = ""
    only = [
        "random_bf16",
        "order_of_scale",
        "order_of_factor",
        "subnormal_scales",
        "zero_block",
        "round_trip",
    ]
    for _ in range(4):
        variants = {"*": declared} if declared else {}
        findings = conform(Subject("s", cast=other_order, variants=variants), only=only)
        hints = [re.search(r'variants={"\*": "(.+?)"}', row.detail) for row in findings.rows]
        if not any(hints):
            break
        declared = max((hint[1] for hint in hints if hint), key=len)
    assert {*declared.split(", ")} == {"scale (a/6) S", "elements S/s", "least scale 2^-9"}
    assert findings.passed, findings.table
    changed = sum(row.outcome == Outcome.VARIANT for row in findings.rows)
    assert changed >= len(only) - 1
    assert f"{len(only)} of {len(only)} properties hold, {changed} as declared" in findings.text
    assert all(row.detail.count(word) <= 1 for row in findings.rows for word in declared.split(", "))


def test_codes_of_a_declared_order_are_read_back_in_this_order():
    """Without values of the subject's own, code x scale x outer is compared with the declared values."""
    word = "elements x / (s amax/2688)"

    def cast(x):
        blocks, amax = x.float().view(len(x), -1, 16), x.float().abs().max()
        a, outer = blocks.abs().amax(2, keepdim=True), torch.tensor(2688.0) / amax
        s = (a * (outer * (1 / torch.tensor(6.0)))).to(torch.float8_e4m3fn)
        codes = e2m1(blocks / (amax / torch.tensor(2688.0) * s.float()))
        return Quantised(codes=codes.view(x.shape), scales=s.squeeze(2), outer=amax / 2688)

    for declared, outcome in (({}, Outcome.FAIL), ({"round_trip": word}, Outcome.VARIANT)):
        row = conform(Subject("s", cast=cast, variants=declared), only=["round_trip"], seed=2).rows[0]
        assert row.outcome == outcome, row
        assert (f'{{"*": "{word}"}}' in row.detail) == (not declared)


@pytest.mark.parametrize(
    ("variants", "said"),
    [
        ({"zero_blok": "zero block 1"}, "zero_blok: no such property; 'zero_block' is the nearest"),
        ({"zero_block": "one"}, "'one' is no word; the words are 'scale (a/6) S', "),
        ({"*": "zero block 1, S/s"}, "'S/s' is no word"),
        ({"*": ""}, "'' is no word"),
        ({"nan_visible": "zeros"}, "it takes 'tensor', 'block', 'element', 'saturated', 'zero'"),
        ({"zero_block": 1}, "zero_block is a int"),
    ],
)
def test_what_is_declared_and_no_variant_is_refused(variants, said):
    with pytest.raises(InputError, match=re.escape(said)):
        conform(Subject("s", cast=nvfp4, variants=variants), only=["zero_block"])


def test_a_subject_that_raises_or_returns_something_else_has_a_row_that_says_so():
    def raises(x):
        raise RuntimeError("no kernel image\nis available")

    rows = conform(raises, only=["random_bf16"]).rows
    assert (rows[0].outcome, rows[0].detail) == (
        Outcome.FAIL,
        "cast raises for [64, 256] bfloat16: RuntimeError: no kernel image",
    )
    other = conform(lambda x: x[:, :8], only=["random_bf16"]).rows[0]
    assert other.detail == "cast returned values [64, 8] for x [64, 256]"
    nothing = conform(lambda x: "codes", only=["random_bf16"]).rows[0]
    assert nothing.detail.startswith("cast returned a str; a cast returns values")


def test_a_function_that_never_returns_a_result_is_not_called_in_every_property():
    calls = []

    def raises(x):
        calls.append(x)
        raise RuntimeError("x must be a multiple of 128")

    rows = conform(raises).rows
    assert len(calls) == sum(row.outcome == Outcome.FAIL for row in rows) == 2
    assert rows[0].detail.endswith("Subject(..., rows=128, columns=128)")


def test_a_factor_may_be_a_number_and_arrays_are_refused_in_a_sentence():
    def with_number(x):
        made = nvfp4(x)
        return made.codes, made.scales, float(made.outer)

    row = conform(with_number, only="random_bf16").rows
    assert [one.outcome for one in row] == [Outcome.PASS]
    row = conform(lambda x: x.float().numpy(), only="random_bf16").rows[0]
    assert "torch.from_numpy" in row.detail
    row = conform(lambda x: nvfp4(x), "mxfp4", only="random_bf16").rows[0]
    assert "scales of blocks of 16" in row.detail


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"values": 1}, "returned values [] for x [64, 256]"),
        ({"scales": numpy.ones(4)}, "returned scales as a ndarray; it is a tensor"),
        ({"amax": torch.ones(3)}, "returned amax [3]; it is a scalar"),
        ({"values": torch.ones(64, 256).to_sparse()}, "returned values of sparse_coo and float32 on cpu"),
        ({"codes": torch.ones(64, 256, device="meta")}, "returned codes of strided and float32 on meta"),
    ],
)
def test_a_part_of_a_result_that_is_no_dense_tensor_is_refused_in_a_sentence(parts, said):
    row = conform(lambda x: replace(nvfp4(x), **parts), only="random_bf16").rows[0]
    assert (row.outcome, said in row.detail) == (Outcome.FAIL, True)
    assert conform(lambda x: replace(nvfp4(x), outer=1.0), only="random_bf16").passed


@pytest.mark.parametrize("recipe", ["fp8_current", "nvfp4"])
def test_a_result_without_numbers_is_refused(recipe):
    row = conform(lambda x: Quantised(outer=torch.ones(())), recipe, only="random_bf16").rows[0]
    assert (row.outcome, "neither values nor" in row.detail) == (Outcome.FAIL, True)


def fp8(x, factor=1.0):
    """Codes and factor of current scaling in E4M3: no block scales."""
    outer = x.abs().amax().float() / 448
    return Quantised(codes=(x.float() / outer * factor).to(torch.float8_e4m3fn), outer=outer)


def test_a_cast_without_block_scales_returns_codes_and_a_factor():
    only = ["random_bf16", "nan_visible"]
    assert conform(lambda x: fp8(x, 0.75), "fp8_current", only=only[:1]).rows[0].block.place == (
        "normal: row 0, column 0"
    )
    wrong = conform(lambda x: fp8(x, 0.75), "fp8_current", only=only[:1]).rows[0]
    assert wrong.block.computed.startswith("tensor amax ")
    right = conform(fp8, "fp8_current", only=only).rows
    assert [row.outcome for row in right if row.property in only] == [Outcome.PASS] * 2


@pytest.mark.parametrize("shape", [(), (1,), (64, 1), (64, 16), (64, 8), (64, 256)])
def test_scales_of_a_recipe_without_block_scales_are_refused_as_such(shape):
    row = conform(lambda x: (fp8(x).codes, torch.ones(shape)), "fp8_current", only="random_bf16").rows[0]
    assert row.outcome == Outcome.FAIL
    assert f"returned scales {list(shape)}" in row.detail
    assert "the recipe has no block scales" in row.detail
    assert "blocks of" not in row.detail


@pytest.mark.parametrize(
    ("declared", "outcome"), [({}, Outcome.FAIL), ({"random_gradients": "nearest"}, Outcome.VARIANT)]
)
def test_a_product_that_rounds_its_gradient_to_nearest_may_declare_it(declared, outcome):
    recipe = PRESETS["nvfp4"]()
    nearest = emulator(recipe.model_copy(update=dict(rounded_to_nearest(recipe.products)))).product
    row = conform(Subject("s", product=nearest, variants=declared), only="random_gradients").rows[0]
    assert row.outcome == outcome
    wrong = Subject("s", product=lambda x, w, dy: nearest(x, w, 2 * dy), variants=declared)
    assert conform(wrong, only="random_gradients").rows[0].outcome == Outcome.FAIL


def test_a_product_of_a_seed_is_handed_one():
    product = emulator(PRESETS["nvfp4"]()).product

    def seeded(x, w, dy, seed):
        assert isinstance(seed, int)
        return product(x, w, dy)

    assert conform(seeded, only=["forward_product"]).passed


@pytest.mark.parametrize(("name", "ties"), [("element_ties", True), ("random_bf16", False)])
def test_differences_that_are_all_ties_are_said_to_be(name, ties):
    """Ties toward zero; and elements cut off, of which few are ties."""
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])

    def lower(y):
        index = torch.bucketize(y.abs(), (grid[1:] + grid[:-1]) / 2 if ties else grid[1:], right=not ties)
        return grid[index.clamp(max=7)].copysign(y)

    row = conform(Subject("s", cast=lambda x: nvfp4(x, e2m1=lower)), only=name).rows[0]
    assert row.outcome == Outcome.FAIL
    assert ("all that differ are ties, one step apart" in row.detail) == ties


def test_of_values_alone_the_one_stage_is_measured():
    def first_attempt(x):
        blocks = x.float().reshape(len(x), -1, 16)
        outer = 2688 / x.float().abs().max()  # torch multiplies by the reciprocal
        s = (blocks.abs().amax(2, keepdim=True) / 6 * outer).to(torch.float8_e4m3fn).float()
        y, grid = blocks * (outer / s), torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6.0])
        nearest = (y.abs().clamp(max=6)[..., None] - grid).abs().argmin(-1)  # ties toward zero
        return (grid[nearest].copysign(y) * s / outer).reshape(x.shape)

    findings = conform(
        first_attempt, only=["element_ties", "order_of_scale", "order_of_factor", "amax_ladder"]
    )
    assert "0 of 4 properties hold; the first of the others is element_ties." in findings.text
    assert {row.stage.partition(":")[0] for row in findings.rows} == {"value"}


def test_the_fixture_fails_a_test_with_the_wrong_stage(conform):
    right = Subject("right", cast=nvfp4, variants={"infinity_visible": "saturated"})
    assert conform(right, only=["round_trip", "infinity_visible"]).passed
    with pytest.raises(pytest.fail.Exception, match="no such property"):
        conform(right, only="zero")
    with pytest.raises(pytest.fail.Exception, match=r"code: 93\.8 %"):
        conform(MUTANTS["nibbles"].subject, only=["code_bytes"])


# --- the command ----------------------------------------------------------------------------------

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "nvfp4_cast.py"
OWN = """
import torch
from support.published_faults import nvfp4, recipe_scale
from ablate.verification.conformance.subject import Subject

def quantise(x):
    print("casting")
    return nvfp4(x)

def without_clamp(x, other):
    return x

def made():
    return Subject("made", cast=lambda x: nvfp4(x, amax=lambda x: x.abs().amax().clamp(min=1e-4)))

def two_faults(x):
    return nvfp4(x, scale=lambda a, outer: recipe_scale(a, outer) * (1.2 if a.all() else 1) + (a == 0))

def nothing_finite(x):
    values = torch.ones(x.shape)
    values[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    return values
"""


@pytest.fixture
def own(tmp_path):
    file = tmp_path / "own_kernels.py"
    file.write_text(OWN)
    return file


def test_the_demonstration_shows_its_fault():
    done = here("conform", "--demo")
    assert done.returncode == 0
    said = " ".join(done.stdout.split())
    assert "2 of 3 properties hold; the first of the others is grouped_weight_gradient. First" in said
    assert "first wrong stage: product: dw, " in said
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_the_example_of_the_page_computes_nvfp4():
    done = here("conform", f"{EXAMPLE}:quantise", "--as", "nvfp4")
    assert (done.returncode, done.stdout.count("FAIL")) == (0, 0)
    assert "25 of 25 properties hold: what was examined of quantise computes nvfp4." in done.stdout


def test_a_folder_of_dumps_has_a_row_for_each_product(tmp_path):
    recipe = PRESETS["mxfp4"]()
    x, w, dy = (inputs.normal(64, 64, seed).bfloat16() for seed in range(3))
    y, dx, dw = emulator(recipe).product(x, w, dy)
    tensors = {"x": x, "w": w, "dy": dy, "y": y, "dx": dx, "dw": dw}
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    write(right, [DumpedLayer("up", tensors, 0, 0)])
    write(wrong, [DumpedLayer("up", tensors | {"dw": 2 * dw}, 0, 0)])
    done = here("conform", right, "--as", "mxfp4")
    assert (done.returncode, "3 of 3 dumped products are the recipe's" in done.stdout) == (0, True)
    done = here("conform", wrong, "--as", "mxfp4")
    said = " ".join(done.stdout.split())
    assert done.returncode == 1
    assert (
        "2 of 3 dumped products are the recipe's; the first of the others is up wgrad, step 0, rank 0."
        in said
    )


def test_a_dump_whose_rotations_are_drawn_is_judged_by_the_seed_that_is_given(tmp_path):
    products = PRESETS["quartet2"]().products
    x, w, dy = (inputs.normal(128, 128, seed).bfloat16() for seed in range(3))
    layer = RedrawnLayer((128, 128), "up", products, Clock(5), 0)
    with torch.no_grad():
        y, kept = forward(layer, products, x, w)
        dx, dw = backward(layer, products, kept, dy, (True, True))
    write(tmp_path, [DumpedLayer("up", {"x": x, "w": w, "dy": dy, "y": y, "dx": dx, "dw": dw}, 0, 0)])
    for words, status in ((("--seed", "5"), 0), ((), 0), (("--seed", "0"), 1)):
        done = here("conform", tmp_path, "--as", "quartet2", *words)
        assert done.returncode == status, words
        assert ("their seed is not known" in " ".join(done.stdout.split())) == (not words)


def test_every_number_of_a_wrong_stage_is_saved(own, tmp_path):
    """The amax of `made` is at least 1e-4; its place in a tensor is that of the largest magnitude."""
    file = tmp_path / "wrong.csv"
    done = here("conform", f"{own}:made", "--only", "small_tensor", "--only", "amax_ladder", "--save", file)
    with file.open() as lines:
        rows = [*csv.DictReader(lines)]
    assert done.returncode == 1
    assert f"{len(rows)} wrong numbers are in" in " ".join(done.stdout.split())
    assert {row["stage"] for row in rows} == {"amax"}
    assert [float(row["subject"]) for row in rows] == pytest.approx([1e-4] * len(rows))
    assert all(float(row["recipe"]) < 1e-4 for row in rows)
    ladder = {row["tensor"] for row in rows if row["property"] == "amax_ladder"}
    assert ladder >= {f"amax 1e{exponent}" for exponent in range(-30, -4)}
    missing = here(
        "conform", f"{own}:made", "--only", "small_tensor", "--save", tmp_path / "no" / "wrong.csv"
    )
    assert (missing.returncode, "Traceback" in missing.stderr) == (2, False)


def test_the_command_prints_rows_or_json_and_its_status_says_what_was_found(own):
    right = here("conform", f"{own}:quantise", "--only", "random_bf16")
    assert (right.returncode, right.stdout.split("casting\n")[-1].split()[:2]) == (0, ["pass", "random_bf16"])
    printed = here("conform", f"{own}:quantise", "--only", "random_bf16", "--json")
    assert json.loads(printed.stdout)["passed"]
    wrong = here("conform", f"{own}:made", "--only", "small_tensor", "--json")
    found = json.loads(wrong.stdout)
    assert (wrong.returncode, found["passed"]) == (1, False)
    assert found["rows"][0]["stage"].startswith("amax: 1 of 1 wrong, such as 0.0001, not ")
    assert found["rows"][0]["block"]["place"] == "row 0, columns 0 to 15"


def test_a_document_has_null_for_numbers_that_are_not_finite(own):
    """The reader refuses NaN, Infinity and -Infinity, which JSON does not have."""
    done = here("conform", f"{own}:nothing_finite", "--only", "random_bf16", "--json")
    (row, *_) = json.loads(done.stdout, parse_constant=pytest.fail)["rows"]
    assert done.returncode == 1
    assert row["block"]["got"][:4] == [None, None, None, 1.0]


def test_a_row_of_a_known_stage_says_what_to_declare_if_it_is_something_else(own):
    done = here("conform", f"{own}:two_faults", "--only", "scale_midpoints", "--only", "zero_block")
    said = " ".join(done.stdout.split())
    assert said.count("first wrong stage: block scale: ") == 2
    assert 'Declare variants={"*": "zero block 1"} if meant.' in said
    assert said.count("first at ") == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("{own}",), "it has quantise, without_clamp, made, two_faults"),
        (("--demo", "--as", "mxfp4"), "or --demo alone"),
        (("{folder}", "--only", "zero_block"), "of a folder of dumps, leave it out"),
        (("{folder}/up.safetensors",), "give the folder of the dumps"),
        ((), "give a subject, such as my_kernels.py:quantise, or --demo alone"),
        (("{own}:quantize",), "has no quantize; 'quantise' is the nearest"),
        (("{own}:without_clamp",), "the parameters of a subject are (x), (w)"),
        (("nowhere.py:f",), "nowhere.py: no such file"),
        (("no_such_module:f",), "importing no_such_module raises ModuleNotFoundError"),
        (("tochao",), "tochao: give module:function"),
        (("ablate", "--as", "nvfp5"), "--as nvfp5: no such preset; 'nvfp4' is the nearest"),
        (("ablate", "--only", "ties"), "ties: no such property; "),
        (("ablate", "--device", "cuda:77"), "--device cuda:77: torch cannot use it"),
        (("ablate", "--seed", "99999999999999999999"), "Invalid value for '--seed'"),
        (("ablate", "--save", "/nowhere/wrong.csv"), "--save /nowhere/wrong.csv: name a file in a folder"),
    ],
)
def test_a_wrong_name_is_one_sentence_with_status_2(own, words, said):
    (own.parent / "up.safetensors").touch()
    done = here("conform", *(word.format(own=own, folder=own.parent) for word in words))
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
