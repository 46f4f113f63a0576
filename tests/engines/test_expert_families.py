"""Families of transformers with experts: converted small models have the bits of plain ones, and rows are current."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import ablate
from ablate.numerics.product import multiplies_bf16

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import expert_families
import experts_step
from expert_families import EQUAL, OUTSIDE

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS = expert_families.load()
MEASURED = {
    "mixtral": [],
    "qwen3_moe": [],
    "olmoe": [],
    "deepseek_v3": [],
    "qwen2_moe": [],  # its shared expert computes first, so the order of gradients shows
    "gpt_oss": ["transposed", "interleaved", "biased"],
    "aria": ["transposed"],
    "nemotron_h": ["without gate"],
    "muse_spark": ["post norm"],
    "jamba": [],  # its mixer multiplies by a weight itself
    "llama4": [],
}
"""Families measured again here, with what is special about their layout."""


@pytest.mark.skipif(not multiplies_bf16(), reason="rows have the bits of bf16 products")
@pytest.mark.parametrize("family", MEASURED)
def test_a_family_is_reached_as_its_row_says(family):
    row = expert_families.measured(family)
    assert json.loads(json.dumps(asdict(row))) == json.loads(json.dumps(asdict(ROWS[family])))
    assert [each for each in row.layout if each[0].islower()] == MEASURED[family]


def test_experts_that_receive_all_tokens_are_converted_and_restored_and_refuse_another_routing():
    model = expert_families.small("llama4")
    before = expert_families.step(model)
    names = {name for name, _ in model.named_modules()}
    for field in ({"padding": "routed:16"}, {"routing": "replay"}):
        with pytest.raises(ValueError, match=r"^model\.layers\.0\.feed_forward\.experts: |experts\.routing"):
            ablate.convert(model, {"from": "nvfp4", "experts": field})
    split = ablate.convert(model, {"from": "bf16", "experts": {"gate_up": "split"}})
    assert any(name.endswith("experts.3.gate") for name in split.engine.layers)
    model.zero_grad()
    assert torch.equal(expert_families.step(model, split)["the loss"], before["the loss"])
    split.restore()
    assert {name for name, _ in model.named_modules()} == names
    assert not hasattr(model.model.layers[0].feed_forward.experts, "has_gate")
    model.zero_grad()
    assert expert_families.difference(before, expert_families.step(model)) == EQUAL


def test_rows_are_of_all_families_and_without_a_fault():
    assert set(ROWS) == {*expert_families.decorated(), *OUTSIDE}
    assert len(ROWS) - len(OUTSIDE) == 67
    inside = [row for row in ROWS.values() if row.family not in OUTSIDE]
    assert {(r.family, name) for r in inside for name, text in r.bits.items() if text != EQUAL} == {
        (family, "eager") for family in expert_families.FP32
    }
    assert [row.family for row in ROWS.values() if row.nvfp4 != "finite"] == []
    assert [row.family for row in inside if row.experts < 0.5 or row.linears + row.experts < 0.95] == []


def test_what_is_left_has_a_reason():
    assert all(reason for row in ROWS.values() for _, reason in row.left.values())
    for row in ROWS.values():
        total = row.linears + row.experts + sum(share for share, _ in row.left.values())
        assert total == pytest.approx(1, abs=3e-4)


def test_other_bits_are_a_difference():
    plain = {"the loss": torch.tensor(1.0), "w": torch.ones(2, 2), "unused": None}
    other = plain | {"w": torch.tensor([[1.0, 1.0], [1.0, 1.0 + 2**-23]])}
    assert expert_families.difference(plain, dict(plain)) == EQUAL
    assert expert_families.difference(plain, other) == "1 of 3 differ: w by 6e-08"
    assert expert_families.difference(plain, plain | {"unused": torch.zeros(1)}) == "1 of 3 differ: unused"
    assert expert_families.difference(plain, {"w": plain["w"]}) != EQUAL


def test_the_page_is_current():
    assert expert_families.PAGE.read_text() == expert_families.page(ROWS)


@pytest.mark.parametrize("watched", [False, True], ids=["grouped", "loop"])
def test_the_benchmark_of_a_step_of_experts_runs(watched):
    assert experts_step.step("nvfp4", (2, 16, 16, 8), watched)() > 0
