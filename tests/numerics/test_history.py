"""Tests of the memory of a delayed or held tensor scale: amaxes by step, the same when a call repeats, nothing from evaluation."""

import math
from dataclasses import replace

import pytest
import torch

from ablate.numerics.history import History
from ablate.numerics.philox import Clock
from ablate.numerics.quantize import quantize
from ablate.numerics.spec import Outer, Quant

AMAXES = (3.0, 1.0, 4.0, 1.5, 9.0, 2.0, 6.0, 5.0, 3.5, 8.0)
WORDS = {"delayed": "delayed:3", "hold": "hold:4"}


def tensor(largest: float) -> torch.Tensor:
    x = torch.linspace(-1, 1, 32).view(1, 32) / 2
    x[0, 5] = -1
    return x * largest


def look(
    history: History, word: str, largest: float, step: int, stream: str = "training", micro_batch: int = 0
) -> float:
    clock = Clock(0, stream, step, micro_batch)
    return quantize(
        tensor(largest), Quant(outer=Outer(statistic=word)), clock=clock, history=history
    ).amax.item()


def test_a_delayed_amax_is_the_largest_of_the_n_steps_before():
    history = History()
    seen = [look(history, "delayed:3", largest, step) for step, largest in enumerate(AMAXES)]
    assert seen[0] == AMAXES[0]  # nothing before: its own
    assert seen[1:] == [max(AMAXES[max(0, step - 3) : step]) for step in range(1, len(AMAXES))]


def test_amaxes_older_than_the_window_are_dropped_after_steps_without_a_call():
    history, called = History(), [0, 1, 2, 3, 4, 9, 10, 13, 14, 30, 31]  # those of an expert
    for number, step in enumerate(called):
        kept = [earlier for earlier in called[:number] if step - 3 <= earlier]
        assert look(history, "delayed:3", 1.0 + step, step) == 1 + max(kept, default=step)
        assert list(history.amax) == [*kept, step]


def test_a_held_amax_is_the_first_of_every_n_steps():
    history = History()
    assert [look(history, "hold:4", largest, step) for step, largest in enumerate(AMAXES)] == [
        AMAXES[step - step % 4] for step in range(10)
    ]


def test_a_hold_refreshes_at_steps_0_50_and_100_counted_from_zero():
    # arXiv 2609.02846: refreshed at one-based steps 1, 51, 101, and not the largest of the window.
    history = History()
    seen = [look(history, "hold:50", float(step + 1), step) for step in range(120)]
    assert [step for step in range(1, 120) if seen[step] != seen[step - 1]] == [50, 100]
    assert seen[49] == 1


def test_the_micro_batches_of_a_step_count_together_and_share_its_scale():
    history = History()
    first = [
        look(history, "delayed:2", largest, 0, micro_batch=i) for i, largest in enumerate((2.0, 7.0, 3.0))
    ]
    assert first == [2, 7, 3]
    assert [look(history, "delayed:2", 1.0, 1, micro_batch=i) for i in range(2)] == [7, 7]
    held = History()
    assert [look(held, "hold:2", largest, 0, micro_batch=i) for i, largest in enumerate((2.0, 7.0, 3.0))] == [
        2,
        2,
        2,
    ]


def test_a_recipe_may_go_on_from_a_delayed_amax_to_a_held_one():
    """In the middle of a period, and in evaluation."""
    history = History()
    for step, largest in enumerate(AMAXES[:6]):
        look(history, "delayed:3", largest, step)
    assert look(history, "hold:2", 1.0, 6, "evaluation") == AMAXES[2]
    assert look(history, "hold:4", 1.0, 6) == AMAXES[4]


def test_values_above_an_old_amax_saturate_and_below_it_use_less_of_the_range():
    history = History()
    quant = Quant(outer=Outer(statistic="delayed:1"))
    results = [
        quantize(tensor(largest), quant, clock=Clock(0, step=step), history=history)
        for step, largest in enumerate((1.0, 4.0, 1.0))
    ]
    largest = [result.dequantize().abs().max().item() for result in results]
    assert largest == pytest.approx([1, 1, 1], rel=1e-6)
    assert [result.amax.item() for result in results] == [1, 1, 4]
    assert [result.largest.item() for result in results] == [1, 4, 1]


@pytest.mark.parametrize("word", WORDS.values())
class TestHistory:
    """Promises of every statistic that remembers."""

    def test_repeating_a_call_changes_neither_its_answer_nor_later_ones(self, word):
        once, twice = History(), History()
        for step, largest in enumerate(AMAXES):
            answer = look(once, word, largest, step)
            assert look(twice, word, largest, step) == answer
            if step:  # a first call has nothing before it, in either
                assert look(twice, word, largest, step) == answer
        assert once.amax == twice.amax

    def test_evaluation_reads_it_and_adds_nothing(self, word):
        plain, watched = History(), History()
        for step, largest in enumerate(AMAXES):
            answer = look(plain, word, largest, step)
            before = dict(watched.amax)
            look(watched, word, 1000.0, step, stream="evaluation")
            assert watched.amax == before
            assert look(watched, word, largest, step) == answer

    def test_a_twin_records_what_its_run_does(self, word):
        run, twin = History(), History()
        for step, largest in enumerate(AMAXES):
            assert look(run, word, largest, step) == look(twin, word, largest, step, stream="twin")
        assert run.amax == twin.amax

    def test_evaluation_sees_what_training_would(self, word):
        history = History()
        for step, largest in enumerate(AMAXES[:6]):
            look(history, word, largest, step)
        assert look(history, word, 1000.0, 5, stream="evaluation") == look(history, word, 0.5, 5)

    def test_evaluation_before_any_training_uses_its_own_amax(self, word):
        assert look(History(), word, 12.0, 0, stream="evaluation") == 12.0

    def test_a_run_resumed_with_the_saved_amaxes_goes_on_bit_for_bit(self, word):
        whole = History()
        answers = [look(whole, word, largest, step) for step, largest in enumerate(AMAXES)]
        for cut in range(len(AMAXES)):
            first, second = History(), History()
            for step in range(cut):
                look(first, word, AMAXES[step], step)
            second.amax = dict(first.amax)
            assert [look(second, word, AMAXES[step], step) for step in range(cut, len(AMAXES))] == answers[
                cut:
            ]

    def test_it_keeps_no_more_than_its_window(self, word):
        history = History()
        for step in range(100):
            look(history, word, 1.0, step)
        assert len(history.amax) <= 4
        assert all(torch.as_tensor(amax).ndim == 0 for amax in history.amax.values())
        assert word != "delayed:3" or all(
            isinstance(amax, float) for amax in history.amax.values()
        )  # no small tensors that stay

    def test_what_it_keeps_does_not_change_with_the_tensor(self, word):
        history, x = History(), tensor(2.0)
        quantize(x, Quant(outer=Outer(statistic=word)), clock=Clock(0), history=history)
        x.mul_(100)
        assert [float(amax) for amax in history.amax.values()] == [2.0]

    @pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
    def test_an_amax_that_no_scale_comes_from_is_not_remembered(self, word, bad):
        # A gradient behind a layer that starts at zero is zero in the first step; an overflow passes. Neither may reach later steps.
        first, later = History(), History()
        look(first, word, bad, 0)
        assert look(first, word, 2.0, 1) == 2
        for step, largest in enumerate((3.0, 2.0, bad)):
            look(later, word, largest, step)
        assert look(later, word, 1.0, 3) == 3
        look(later, word, bad, 4)
        assert look(later, word, 1.0, 5) == 1
        assert all(math.isfinite(amax) for amax in later.amax.values())

    def test_a_zero_amax_before_does_not_lose_a_tensor(self, word):
        history, quant = History(), Quant(outer=Outer(statistic=word))
        quantize(torch.zeros(1, 32), quant, clock=Clock(0), history=history)
        result = quantize(tensor(1.0), quant, clock=Clock(0, step=1), history=history)
        assert result.dequantize().abs().max() == pytest.approx(1, rel=1e-6)

    def test_without_a_history_it_is_the_calls_own_amax(self, word):
        for clock in (None, Clock(0, step=7)):
            assert quantize(tensor(6.0), Quant(outer=Outer(statistic=word)), clock=clock).amax == 6

    def test_a_history_without_a_clock_is_refused(self, word):
        with pytest.raises(ValueError, match="clock"):
            quantize(tensor(6.0), Quant(outer=Outer(statistic=word)), history=History())

    def test_a_skipped_step_only_leaves_its_amax_out(self, word):
        history = History()
        for step in (0, 1, 9, 10):
            look(history, word, AMAXES[step % 10], step)
        clock = replace(Clock(0), step=10)
        assert look(history, word, 1.0, clock.step) == {"delayed:3": AMAXES[9], "hold:4": AMAXES[9]}[word]
