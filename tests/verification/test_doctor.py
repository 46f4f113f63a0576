"""The doctor: green here, red for numerics that were tampered with, and a sweep that then starts no trial."""

import json
import math
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from support.commands import here
from support.experiments import end, environment, gone, statuses, until, words_of, write
from support.machines import install

from ablate.numerics import hadamard, philox, product, quantize, rounding, scaling, stored
from ablate.numerics.kernels import builds
from ablate.recipes.recipe import Phase
from ablate.verification import checks, machine, peers
from ablate.verification.check_result import Row, below, near
from ablate.verification.checks import CHECKS
from ablate.verification.checkup import COMMAND, Checkup, Unfit

QUICK = [check for check in CHECKS if check.only != "full"]


def rows(name: str) -> list[Row]:
    """Return the rows that the check of this name yields, in its quick form if it has one."""
    check = next(check for check in QUICK if check.name == name)
    return list(check.rows())


# Green


@pytest.mark.slow
def test_the_fast_run_prints_a_table_and_a_verdict_and_ends_with_status_0():
    done = here("doctor", "--fast")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.startswith("Starting: ")
    assert done.stderr.count("\n") == 1
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    headings = [line for line in lines if line in {check.group for check in QUICK}]
    assert headings == list(dict.fromkeys(check.group for check in QUICK))
    assert next(line.split() for line in lines if "digits of pi" in line)[-1] == "ok"
    assert "H16[r, c] = (-1)^popcount(r & c)" in done.stdout  # rich would read [r, c] as markup
    assert lines[-1].startswith("All ")
    assert "checks agree: this machine follows numerics version" in lines[-1]


@pytest.mark.slow
def test_json_has_every_row_and_says_which_are_facts():
    done = here("doctor", "--fast", "--json")
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert found["ok"]
    assert found["fast"]
    assert {row["ok"] for row in found["rows"]} == {True, None}
    assert all(row["what"] and row["measured"] for row in found["rows"])
    assert {"group", "what", "measured", "expected", "ok"} == set(found["rows"][0])


@pytest.mark.slow
def test_the_full_run_is_green_here_as_a_module():
    command = [sys.executable, "-m", "ablate.doctor"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment(), check=False
    )
    assert done.returncode == 0, done.stdout
    assert "OFF" not in done.stdout
    assert "mean of 256 draws" in done.stdout
    assert all(peer in done.stdout for peer in peers.PEERS)


def test_a_value_is_near_within_its_tolerance_on_either_side():
    values = (0.98, 0.991, 1.0, 1.009, 1.02, math.nan)
    assert [near("x", 3 * value, 3.0, 0.01).ok for value in values] == [False, True, True, True, False, False]
    assert [below("x", value, 1.0, "").ok for value in values] == [True, True, True, False, False, False]


def test_the_doctor_takes_no_unknown_option():
    assert here("doctor", "--quick").returncode == 2


def test_importing_the_doctor_imports_no_torch():
    code = "import sys, ablate.cli.doctor; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True
    )
    assert done.stdout == "False\n"


def test_the_quick_run_leaves_out_only_what_takes_long_or_has_a_shorter_form():
    full = {check.name for check in CHECKS if check.only != "fast"}
    assert full - {check.name for check in QUICK} == {
        *("gpu bits", "biased", "against"),
        "resumed trial on cpu",
    }


# Red


def tamper(monkeypatch: pytest.MonkeyPatch, function: Callable, other: Callable) -> None:
    """Put `other` in the place of `function`, wherever a module of ablate, or a registry in one, holds it."""
    for name, module in list(sys.modules.items()):
        if name.startswith("ablate"):
            for key, value in list(vars(module).items()):
                if value is function:
                    monkeypatch.setattr(module, key, other)
                elif isinstance(value, dict) and not key.startswith("__"):
                    for entry in [entry for entry, held in value.items() if held is function]:
                        monkeypatch.setitem(value, entry, other)


def ties_away(y, grid, bits=None, width=0):
    y = y.clamp(-grid.max, grid.max)
    step = grid.step(y)
    return torch.sign(y) * torch.floor(y.abs() / step + 0.5) * step


def old_order(largest, scale, quant, bits=None, tiles=None):
    top = quant.range.map_to or 6.0
    return scaling.round_scale(
        (largest / top * scale * quant.range.headroom).clamp(max=scaling.FLT_MAX), quant.scale, bits
    )


def truncated(y, grid, bits, width):
    return rounding.floor(y, grid)


def forgotten(draw, clock, *where, **how):
    return draw(philox.Clock(clock.seed), *where, **how)


def blind(amax, tiles):
    return amax(tiles.nan_to_num(0.0, 1.0, -1.0))


def flushed(scale, to, round_scale, bits=None):
    rounded = round_scale(scale, to, bits)
    return torch.where(rounded < 2.0**-6, 0.0, rounded)


ALL = {
    "NVFP4 1x16, both copies",
    "NVFP4 16x16, both copies",
    "MXFP4 1x32, ceil",
}
TAMPERED = {
    "ties away from zero": (rounding.nearest, ties_away, "ties", {"ties .25 .75 1.25 1.75 2.5 3.5 5"}),
    "ties away, seen by a search": (
        rounding.nearest,
        ties_away,
        "grids",
        {"E2M1 to nearest, against a search"},
    ),
    "ties away, seen by Transformer Engine": (rounding.nearest, ties_away, "against oracle", ALL),
    "the old order": (scaling.block_scales, old_order, "scaling", {"block scales, in the right order"}),
    "the old order, seen by Transformer Engine": (
        scaling.block_scales,
        old_order,
        "against oracle",
        {"NVFP4 1x16, both copies"},
    ),
    "never up": (
        rounding.stochastic,
        truncated,
        "draws",
        {"share rounded from 2 to 3", "share rounded from -4 to -6"},
    ),
    "never up, seen by the mean": (
        rounding.stochastic,
        truncated,
        "unbiased",
        {"slope of log error over log N", "mean of 16 draws, 24 bits"},
    ),
    "alpha folded": (
        product.alpha,
        lambda a, b: a.amax * b.amax / 2688,
        "products",
        {"product in fp32, relative error"},
    ),
    "rounded before alpha": (
        product.product,
        lambda a, b, out: ((a.values @ b.values.t()) * product.alpha(a, b)).to(out),
        "products",
        {"product in fp32, relative error", "product in bf16, outputs an ulp off"},
    ),
    "a rotation that shrinks": (
        hadamard.butterflies,
        lambda *how, f=hadamard.butterflies: f(*how) * 0.9,
        "rotations",
        {"R Rᵀ - I for 4, 16, 64 points", "R Rᵀ - I for 8, 32, 128 points"},
    ),
    "a step forgotten": (
        philox.random_bits,
        partial(forgotten, philox.random_bits),
        "counters",
        {"bytes shared with another site or time"},
    ),
    "weaker random numbers": (
        philox.philox,
        lambda counter, key: counter,
        "known answers",
        {"Philox4x32-10, zeros"},
    ),
    "NaN unseen": (
        scaling.block_amax,
        partial(blind, scaling.block_amax),
        "nonfinite",
        {"NaN, Inf, -Inf under amax"},
    ),
    "subnormal scales flushed": (
        scaling.round_scale,
        lambda scale, to, bits=None, f=scaling.round_scale: flushed(scale, to, f, bits),
        "awkward",
        {"subnormal block scales, times 2^9"},
    ),
    "nibbles swapped": (
        stored.pack,
        lambda values, f=stored.pack: f(values) << 4 | f(values) >> 4,
        "stored",
        {"the 16 codes, packed", "unpacked again", "both copies, packed and unpacked"},
    ),
    "a tensor scale too large": (
        scaling.encode_scale,
        lambda amax, quant, f=scaling.encode_scale: f(amax, quant) * 1.25,
        "figures",
        {"NVFP4 1x16, to nearest", "NVFP4 16x16, to nearest"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TAMPERED)
def test_tampered_numerics_turn_the_right_rows_off(name, monkeypatch):
    function, other, check, expected = TAMPERED[name]
    tamper(monkeypatch, function, other)
    with builds.using(None):  # what is compiled would hide what is tampered with
        assert expected <= {row.what for row in rows(check) if row.ok is False}


@pytest.mark.skipif(builds.build() is None, reason="the package was installed without compiled quantisers")
@pytest.mark.parametrize(
    ("function", "other"),
    [(rounding.nearest, ties_away), (scaling.block_scales, old_order)],
    ids=["ties", "order"],
)
def test_compiled_quantisers_that_differ_from_the_reference_are_seen(function, other, monkeypatch):
    assert [row.ok for row in rows("kernels")] == [True]
    tamper(monkeypatch, function, other)
    assert [row.ok for row in rows("kernels")] == [False]


def test_a_phase_that_starts_a_step_late_is_seen(monkeypatch):
    active = Phase.active
    monkeypatch.setattr(
        Phase, "active", lambda self, step, run, tripped=(): active(self, step - 1, run, tripped)
    )
    assert all(row.ok is False for row in rows("schedules"))


def test_a_check_that_raises_is_off_and_the_others_go_on(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no such kernel")

    tamper(monkeypatch, quantize.quantize, broken)
    (row,) = rows("copies")
    assert (row.what, row.measured, row.ok) == ("copies", "RuntimeError: no such kernel", False)


def test_a_peer_that_is_not_installed_or_has_moved_is_said_and_not_failed(monkeypatch, tmp_path):
    with monkeypatch.context() as alone:
        install(alone, tmp_path, {}, alone=True)
        (row,) = checks.against("torchao")
    assert (row.measured, row.ok) == ("not installed", None)
    install(monkeypatch, tmp_path / "moved", dict.fromkeys(("torchao", *checks.ORACLE), "9.9"))
    monkeypatch.setitem(sys.modules, "torchao.prototype.mx_formats", None)
    (row,) = checks.against("torchao")
    assert (row.measured, row.ok) == ("nothing", None)
    assert "its interface has moved" in row.expected
    assert rows("against oracle") == []  # the numerics do not follow version 9.9


@pytest.mark.parametrize(
    ("capability", "said"),
    [
        ((10, 0), "trains"),
        ((10, 3), "trains"),
        ((12, 0), "trains where a comparison agrees"),
        ((12, 1), "inference only: no instruction cvt.e2m1x2"),
        ((9, 0), "no: FP8 at best"),
        ((8, 0), "no"),
    ],
)
def test_fp4_is_trained_without_a_comparison_on_two_capabilities_only(capability, said):
    assert machine.fp4(capability) == said


# As a sweep meets it

OPTIONS = ("--fast", "--json", "--lifeline")
SICK = """
import typer, ablate.numerics.hadamard as hadamard
butterflies = hadamard.butterflies
hadamard.butterflies = lambda z: butterflies(z) * 0.9
from ablate.cli.doctor import doctor
typer.run(doctor)
"""
HUNG = """
import threading, typer, ablate.verification.checks as checks
checks.CHECKS = (checks.Check("Hung", lambda: threading.Event().wait() or ()),)
from ablate.cli.doctor import doctor
typer.run(doctor)
"""


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code, *OPTIONS)


def start(command: tuple[str, ...], *words) -> subprocess.Popen:
    """`ablate ...` with another command in the place of the quick check."""
    verb, *others = map(str, words)
    whole = [sys.executable, "-m", "ablate", verb, "--check-command", shlex.join(command), *others]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(whole, text=True, env=environment(), start_new_session=True, **pipes)


def run(command: tuple[str, ...], *words) -> tuple[int, str, str]:
    """Return status, output and errors of `ablate ...` in this process, with another command in the place of the quick check."""
    verb, *others = words
    done = here(verb, "--check-command", shlex.join(command), *others, checked=True)
    return done.returncode, done.stdout, done.stderr


def test_off_rows_are_red_in_the_table_and_the_status_is_1(monkeypatch):
    tamper(monkeypatch, *TAMPERED["a rotation that shrinks"][:2])
    done = here("doctor", "--fast")
    assert done.returncode == 1
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("R Rᵀ - I")]
    assert [words[-1] for words in lines] == ["OFF", "OFF"]
    assert "checks are off:" in done.stdout.splitlines()[-1]


def to_its_end(command: tuple[str, ...], *words) -> tuple[int, str, str]:
    """Return the same of a process of its own."""
    process = start(command, *words)
    output, errors = process.communicate(timeout=600)
    return process.returncode, output, errors


def refused(run: Callable, executor: str, folder: Path) -> tuple[str | Path, ...]:
    """Check that a sweep whose check finds the numerics off starts no trial; return its words."""
    path = write(folder, ablate={"rht": [True]}, seeds=1)
    words = ("sweep", path, "--state", folder / "state", "--executor", executor, "--mlflow", "none")
    status, output, errors = run(python(SICK), *words)
    assert status == 1, output + errors
    lines = errors.splitlines()
    assert any(line.endswith("so no trial was started:") for line in lines)
    assert any(line.startswith("  R Rᵀ - I for 4, 16, 64 points: 0.19; expected 0") for line in lines)
    assert "`python -m ablate.doctor`" in lines[-1]
    assert "Traceback" not in output + errors
    assert set(statuses(folder / "state").values()) == {"pending"}
    assert not list((folder / "state").glob("trials/*/result.json"))
    return words


@pytest.mark.slow
def test_a_sweep_starts_no_trial_where_the_numerics_are_off_and_the_same_command_goes_on_once_they_agree(
    tmp_path,
):
    words = refused(run, "inline", tmp_path)
    status, output, errors = run(COMMAND, *words)
    assert status == 0, output + errors
    assert set(statuses(tmp_path / "state").values()) == {"done"}
    status, output, _ = run(("false",), *words)  # nothing is left to run, so nothing is checked
    assert (status, "0 trials run, 2 already done" in output) == (0, True)


@pytest.mark.slow
@pytest.mark.services
def test_ray_gets_no_trial_where_the_numerics_are_off(tmp_path):
    refused(to_its_end, "ray", tmp_path)


def test_a_dry_run_checks_nothing(tmp_path):
    assert run(("false",), "sweep", write(tmp_path), "--state", tmp_path / "state", "--dry-run")[0] == 0


def test_a_check_that_cannot_run_is_told_with_its_last_words(tmp_path):
    words = (
        "sweep",
        write(tmp_path),
        "--state",
        tmp_path / "state",
        "--executor",
        "inline",
        "--mlflow",
        "none",
    )
    status, _, errors = run((sys.executable, "-c", "import no_such_module"), *words)
    assert status == 1
    assert (
        "  the quick checks ended with status 1: ModuleNotFoundError: No module named 'no_such_module'"
        in errors.splitlines()
    )


def test_a_check_that_hangs_is_given_up():
    checkup = Checkup(python(HUNG), timeout=0.2)
    checkup.start()
    with pytest.raises(Unfit, match="did not end within 0 s"):
        checkup.passed()
    checkup.close()


def hanging(driver: subprocess.Popen) -> psutil.Process | None:
    """The check that the sweep started."""
    for child in psutil.Process(driver.pid).children():
        if "--lifeline" in words_of(child):
            return child
    return None


@pytest.mark.slow
@pytest.mark.parametrize(
    "signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda signum: signum.name
)
def test_no_check_outlives_its_sweep(signum, tmp_path):
    driver = start(
        python(HUNG),
        "sweep",
        write(tmp_path),
        "--state",
        tmp_path / "s",
        "--executor",
        "inline",
        "--mlflow",
        "none",
    )
    try:
        check = until(lambda: hanging(driver))
        time.sleep(1.5)  # it is past its imports, and hangs
        assert not gone([check])
        driver.send_signal(signum)
        said = driver.communicate(timeout=300)
        until(lambda: gone([check]))
    finally:
        end(driver)
    status = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 143, signal.SIGINT: 130}[signum]
    assert driver.returncode == status, said
