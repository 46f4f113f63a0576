"""Readers of the logs of training stacks: lines as each stack's own code formats them, and what is refused.

Lines of torchtitan 0.3 and of Megatron-LM were printed by their formatting code. Transformers and Lightning
print in tests/experiment/integrations/test_stack_logs.py.
"""

import math
import re
from contextlib import suppress
from pathlib import Path

import pytest

from ablate.training.log_readers import OPTIONS, READERS, Unreadable, open_reader
from ablate.training.log_readers.hf import state_records
from ablate.training.workloads.command import Command

DOCS = Path(__file__).parents[2] / "docs"

TITAN = "[titan] 2026-11-27 19:01:05,729 - root - INFO - "
TORCHTITAN = {
    "step:  1  loss: 11.93051  grad_norm:  3.2100  memory:  2.11GiB(2.67%)  tps: 9,871  tflops: 1,204.01  mfu: 0.52%": (
        1,
        {
            "train/loss": 11.93051,
            "grad/norm": 3.21,
            "throughput/tokens_per_s_per_device": 9871.0,
            "throughput/tflops_per_device": 1204.01,
            "throughput/mfu_percent": 0.52,
        },
    ),
    "step: 10  loss:      nan  grad_norm:     inf  memory:  2.11GiB(2.67%)  tps: 9,871  tflops: 0.01  mfu: N/A": (
        10,
        {
            "train/loss": math.nan,
            "grad/norm": math.inf,
            "throughput/tokens_per_s_per_device": 9871.0,
            "throughput/tflops_per_device": 0.01,
        },
    ),
    "validate step: 380  loss:  4.7123  memory:  2.11GiB(2.67%)  tps: 9,871": (
        380,
        {"val/loss": 4.7123, "val/throughput/tokens_per_s_per_device": 9871.0},
    ),
}
COLOURS = {"step": 31, "validate step": 33, "loss": 32, "grad_norm": "38;2;180;60;0", "tps": 34, "mfu": 35}

MEGATRON_TRAIN = (
    " [2026-11-27 19:01:39.743929] iteration       30/     500 | consumed samples:          240 |"
    " elapsed time per iteration (ms): 123.4 | throughput per GPU (TFLOP/s/GPU): 345.7 |"
    " learning rate: 1.000000E-04 | global batch size:     8 | lm loss: 8.500000E+00 | mtp_1 loss: 3.300000E+00 |"
    " loss scale: 1.0 | grad norm: 2.431 | num zeros: 12 | params norm: 345.678 |"
    " number of skipped iterations:   0 | number of nan iterations:   0 |"
)
MEGATRON_FIELDS = {
    "train/samples": 240.0,
    "throughput/step_ms": 123.4,
    "throughput/tflops_per_device": 345.7,
    "train/lr": 1e-4,
    "train/loss": 8.5,
    "train/mtp_1_loss": 3.3,
    "train/loss_scale": 1.0,
    "grad/norm": 2.431,
    "weights/norm": 345.678,
    "train/skipped_iterations": 0.0,
    "train/nan_iterations": 0.0,
}
MEGATRON_EVALUATION = (
    " validation loss at iteration 20 | lm loss value: 9.700000E+00 | lm loss PPL: 1.631761E+04 | "
)


def same(found, expected):
    """Return True if two mappings of names to numbers are equal, NaN equal to NaN."""
    return found.keys() == expected.keys() and all(
        found[name] == value or (math.isnan(found[name]) and math.isnan(value))
        for name, value in expected.items()
    )


def coloured(line):
    """Return a line with an escape before each word that torchtitan colours."""
    words = "|".join(sorted(COLOURS, key=len, reverse=True))
    return re.sub(f"({words}):", lambda word: f"\x1b[{COLOURS[word[1]]}m{word[0]}", line) + "\x1b[39m"


@pytest.mark.parametrize("line", TORCHTITAN)
@pytest.mark.parametrize("change", [str, coloured, lambda line: f"[rank3]:{TITAN}{line}\n"])
def test_torchtitans_lines_are_read_with_colours_and_ranks(line, change):
    record = open_reader("torchtitan")(change(line))
    step, metrics = TORCHTITAN[line]
    assert record.step == step
    assert same(record.metrics, metrics)


def test_torchtitans_stages_without_a_loss_say_nothing():
    reader = open_reader("torchtitan")
    line = next(iter(TORCHTITAN))
    assert reader("[rank0]:" + line.replace("11.93051", "-1.00000")) is None
    assert reader("[rank7]:" + line).metrics["train/loss"] == 11.93051


def test_megatrons_line_of_training_is_read():
    record = open_reader("megatron")(MEGATRON_TRAIN)
    assert record.step == 30
    assert record.metrics == MEGATRON_FIELDS


@pytest.mark.parametrize(
    ("loss", "skipped", "nan", "expected"),
    [
        ("", 0, 0, math.nan),  # Megatron prints no loss that is NaN
        (" lm loss: 0.000000E+00 |", 10, 0, None),
        (" lm loss: 0.000000E+00 |", 10, 10, math.nan),
        (" lm loss: 0.000000E+00 |", 0, 0, 0.0),
        (" lm loss: 7.250000E+00 |", 2, 0, 7.25),
        (" lm loss: INF |", 0, 0, math.inf),
        ("", 10, 0, None),
    ],
)
def test_a_loss_that_megatron_cannot_print_is_nan_or_none(loss, skipped, nan, expected):
    line = MEGATRON_TRAIN.replace(" lm loss: 8.500000E+00 |", loss)
    line = line.replace("skipped iterations:   0", f"skipped iterations: {skipped:3d}")
    line = line.replace("nan iterations:   0", f"nan iterations: {nan:3d}")
    found = open_reader("megatron")(line).metrics.get("train/loss")
    assert found == expected or (math.isnan(found) and math.isnan(expected))


@pytest.mark.parametrize(
    ("begin", "family"),
    [
        ("validation loss at iteration 20", "val"),
        ("validation-web loss at iteration 20", "val/web"),
        ("validation loss at iteration 20 on validation set", "final_val"),
        ("validation loss at iteration 20 on test set", "test"),
    ],
)
def test_megatrons_evaluations_are_told_apart(begin, family):
    record = open_reader("megatron")(MEGATRON_EVALUATION.replace("validation loss at iteration 20", begin))
    assert record.step == 20
    assert record.metrics == {f"{family}/loss": 9.7, f"{family}/perplexity": 16317.61}


SPEEDRUN = {
    "step:0/1750 val_loss:10.8258 train_time:0ms step_avg:nanms": (0, {"val/loss": 10.8258}),
    "step:250/1750 val_loss:nan train_time:17.325s step_avg:141.98ms": (250, {"val/loss": math.nan}),
    "step:9/1750 train_loss:7.5000 train_time:1200ms step_avg:133.33ms": (9, {"train/loss": 7.5}),
    "step:10/20000 val_loss:2.5000 val_bpb:1.2500 train_time:600ms step_avg:60.00ms": (
        10,
        {"val/loss": 2.5, "val_bpb": 1.25},
    ),
}


@pytest.mark.parametrize("line", SPEEDRUN)
def test_modded_nanogpts_losses_are_read(line):
    record = open_reader("modded-nanogpt")(f"[rank0]: {line}\n")
    step, metrics = SPEEDRUN[line]
    assert record.step == step
    assert same(record.metrics, metrics)


def test_lines_of_modded_nanogpt_without_a_loss_and_its_own_code_say_nothing():
    reader = open_reader("modded-nanogpt")
    for line in (
        "step:1/1750 train_time:114ms step_avg:nanms",
        'print0(f"step:{step}/{train_steps} val_loss:{val_loss:.4f} train_time:{training_time_ms:.0f}ms")',
        "peak memory allocated: 30820 MiB reserved: 37296 MiB",
    ):
        assert reader(line) is None


def test_a_line_of_any_length_is_matched_in_linear_time():
    reader = open_reader("modded-nanogpt")
    for part in ("9", "step:1/2", " val_loss:1", " val_loss:1 val_bpb:1", "val_loss:", ":"):
        with suppress(Unreadable):
            assert reader("step:1/2 val_loss:1" + part * ((1 << 20) // len(part))) is None


WHOLE = {
    "torchtitan": next(iter(TORCHTITAN)),
    "megatron": MEGATRON_TRAIN,
    "modded-nanogpt": "step:125/1750 val_loss:4.4012 train_time:17321ms",
    "hf": "{'loss': '2.5', 'grad_norm': '1.5', 'learning_rate': '4.5e-05', 'epoch': '0.5'}",
}
"""A line of each stack that prints a line a step."""
FORMS = {name: {"hf": 10} if name == "hf" else name for name in WHOLE}


@pytest.mark.parametrize("stack", WHOLE)
def test_a_line_that_is_cut_anywhere_gives_no_number(stack):
    whole = WHOLE[stack]
    assert open_reader(FORMS[stack])(whole) is not None
    for end in range(len(whole.rstrip())):
        try:
            assert open_reader(FORMS[stack])(whole[:end]) is None
        except Unreadable:
            continue


@pytest.mark.parametrize("stack", WHOLE)
def test_other_lines_have_no_metrics(stack):
    reader = open_reader(FORMS[stack])
    for line in ("", "hello", "{}", "step 3 is next", "saved iteration 20", "{'a': 1}", "epoch 3, loss 2.5"):
        assert reader(line) is None


def test_the_first_rank_with_metrics_is_read_alone():
    reader = open_reader("torchtitan")
    line = next(iter(TORCHTITAN))
    assert reader(f"[rank1]:{line}") is not None
    assert reader(f"[rank0]:{line}") is None
    assert reader(line) is None


def test_metrics_of_a_rank_after_some_of_none_are_not_dropped_without_a_word():
    reader = open_reader("torchtitan")
    line = next(iter(TORCHTITAN))
    assert reader(line) is not None
    assert reader("[rank0]:saved a checkpoint") is None
    with pytest.raises(Unreadable, match="a rank stands before its metrics"):
        reader(f"[rank0]:{line}")


# --- steps that are not printed --------------------------------------------------------------------


def test_the_first_dict_at_another_step_than_the_user_says_is_found_by_the_second():
    reader = open_reader({"hf": 10})  # with logging_first_step
    assert reader("{'loss': '2.5', 'epoch': '0.01'}").step == 10
    with pytest.raises(Unreadable, match="about step 100"):
        reader("{'loss': '2.25', 'epoch': '0.1'}")


def test_an_evaluation_between_steps_that_its_epoch_cannot_tell_apart_is_refused():
    for epoch in ("0.7501", "1e308"):
        reader = open_reader({"hf": 10000})
        assert reader("{'loss': '2.5', 'epoch': '0.5'}").step == 10000
        with pytest.raises(Unreadable, match="several steps"):
            reader(f"{{'eval_loss': '2.25', 'epoch': '{epoch}'}}")


def test_lightnings_progress_bar_is_refused_with_the_remedy():
    with pytest.raises(Unreadable, match="CSVLogger"):
        open_reader("lightning")("Epoch 0:  50%|#####     | 3/6 [00:00<00:00, 9.9it/s, v_num=0, loss=2.31]")


# --- expressions ----------------------------------------------------------------------------------


def test_an_expression_names_step_and_metrics():
    reader = open_reader({"regex": r"iter (?P<step>\d+): loss (?P<loss>\S+?), val (?P<val__kl>\S+)?"})
    record = reader("iter 30: loss 2.5, val ")
    assert (record.step, record.metrics) == (30, {"train/loss": 2.5})
    assert reader("iter 40: loss nan, val -1e-3").metrics["val/kl"] == -1e-3
    assert reader("nothing") is None
    with pytest.raises(Unreadable, match="'oops'"):
        reader("iter 30: loss oops, val ")


@pytest.mark.parametrize(
    ("form", "sentence"),
    [
        ("nanogpt", "torchtitan, megatron, lightning, modded-nanogpt, hf, regex"),
        ("hf", "logging_steps"),
        ({"hf": 0}, "from 1"),
        ({"regex": "("}, "unterminated"),
        ({"regex": r"(?P<step>\d+)"}, "a metric"),
        ({"regex": r"(?P<loss>\d+)"}, "the step"),
        ({"wandb": "x"}, "no format"),
    ],
)
def test_a_format_that_cannot_be_read_is_refused(form, sentence):
    with pytest.raises(ValueError, match=sentence):
        open_reader(form)


def test_every_reader_is_among_these_tests():
    assert {*READERS, *OPTIONS} == {*WHOLE, "lightning", "regex"}


@pytest.mark.parametrize("name", [*READERS, "hf"])
def test_every_reader_is_a_word_of_commands_and_on_the_pages_that_list_them(name):
    Command(run="true", metrics=name)
    for page in ("use/judge.md", "use/command_workload.md"):
        assert name in (DOCS / page).read_text().lower()


# --- damage that mutants found --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stack", "old", "new"),
    [
        ("torchtitan", "11.93051", "3,5"),
        ("torchtitan", "11.93051", "11.9"),
        ("megatron", "lm loss: 8.500000E+00", "lm loss: :.500000E+00"),
        ("megatron", "lm loss:", "lm lgss:"),
        ("modded-nanogpt", "4.4012", "4 4012"),
        ("modded-nanogpt", "4.4012", ".5"),
        ("modded-nanogpt", "4.4012", "4.4O12"),
        ("modded-nanogpt", "val_loss:", "vbl_loss:"),
        ("modded-nanogpt", "step:125/", "step:12\u00b2/"),
        ("hf", "'2.5'", "'2,5'"),
        ("hf", "'2.5'", "'.5'"),
    ],
)
def test_a_damaged_loss_is_not_read_as_another_number(stack, old, new):
    line = WHOLE[stack].replace(old, new)
    assert line != WHOLE[stack]
    with pytest.raises(Unreadable):
        open_reader(FORMS[stack])(line)


def test_rows_before_the_header_of_lightning_end_the_reading():
    reader = open_reader("lightning")
    for line in ("0,9,2.5,", "epoch,step,train_loss,val_loss", "0,19,2.25,"):
        with pytest.raises(Unreadable):
            reader(line)


@pytest.mark.parametrize("step", ["1e999", "10.5", "-10", "null", '"10"'])
def test_a_state_whose_step_is_not_a_whole_number_is_refused(step):
    with pytest.raises(Unreadable, match="trainer_state"):
        [*state_records(f'{{"log_history": [{{"loss": 2.5, "step": {step}}}]}}')]
