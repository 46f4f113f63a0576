"""The check that a resumed trial has the bits of one that ran through."""

import pytest
import torch

from ablate.training.loop import Loop
from ablate.verification import passed_checks
from ablate.verification.checks import difference_when_resumed as difference
from ablate.verification.checks import resumed


def test_a_resumed_trial_has_the_bits_of_one_that_ran_through(tmp_path):
    assert difference("cpu", tmp_path) == ""


def test_a_state_that_is_not_restored_is_seen(tmp_path, monkeypatch):
    restored = Loop.restore

    def half(self: Loop, state) -> int:
        for moments in state["optimizer"]["state"].values() if state else ():
            moments["exp_avg"] *= 1 + 2**-20
        return restored(self, state)

    monkeypatch.setattr(Loop, "restore", half)
    assert "stopped after step 2" in difference("cpu", tmp_path)


def test_a_device_that_is_not_there_is_not_checked(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert not list(resumed("cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_resumed_trial_has_the_same_bits_on_a_gpu(tmp_path):
    assert difference("cuda", tmp_path) == ""


def test_another_driver_or_gpu_is_checked_again(tmp_path):
    assert passed_checks.gpus(tmp_path) == []
    (tmp_path / "gpus" / "0").mkdir(parents=True)
    (tmp_path / "version").write_text("NVRM version: 580.65\nGCC version: 12\n")
    (tmp_path / "gpus" / "0" / "information").write_text("Model: NVIDIA H100\nIRQ: 7\n")
    assert passed_checks.gpus(tmp_path) == ["NVRM version: 580.65", "Model: NVIDIA H100"]
