"""Golden traces: a change that claims not to alter numerics leaves them bit-identical. See regenerate_golden.py."""

import pytest
from regenerate_golden import TRACED, comparable, comparable_losses, losses, stored

ELSEWHERE = "this CPU lacks avx512_bf16 and adds in another order: compared within 2e-2 only"


@pytest.mark.skipif(not comparable(), reason=ELSEWHERE)
@pytest.mark.parametrize("preset", TRACED)
def test_a_trace_equals_the_golden_one_bit_for_bit(preset):
    assert [loss.hex() for loss in comparable_losses(preset)] == [loss.hex() for loss in stored(preset)]


@pytest.mark.parametrize("preset", TRACED)
def test_a_trace_is_the_golden_one_on_any_cpu(preset):
    # 2e-2: another order of additions, after five steps at a high learning rate.
    assert losses(preset) == pytest.approx(stored(preset), abs=2e-2)


def test_the_traces_tell_recipes_apart():
    assert stored("bf16") != stored("nvfp4")
    assert all(len(stored(preset)) == 5 for preset in TRACED)
