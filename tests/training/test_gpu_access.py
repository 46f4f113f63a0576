"""GPUs are hidden from CPU trials and given back to commands, and one that cannot be used is never silently a CPU."""

import itertools
import os
import subprocess
import sys

import pytest

from ablate.engines import gpu_access
from ablate.engines.gpu_access import ORIGINAL, VISIBLE
from ablate.training.own_code.command_process import held, started

SETTINGS = [None, "", "-1", "0", "3,1", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "MIG-c7384736", 'a"b']


@pytest.mark.parametrize("value", SETTINGS)
def test_a_hidden_gpu_comes_back_as_it_was(value):
    before = {"PATH": "/bin"} | ({} if value is None else {VISIBLE: value})
    hidden = gpu_access.hidden(before)
    assert (hidden[VISIBLE], hidden["PATH"]) == ("", "/bin")
    assert gpu_access.hidden(hidden) == hidden  # a process that was started by one from which it is hidden
    assert gpu_access.restored(hidden) == before == gpu_access.restored(before)


@pytest.mark.parametrize("value", [None, "3,1"])
def test_a_command_gets_the_original_setting(value, tmp_path, monkeypatch):
    outer = {key: os.environ[key] for key in os.environ if key not in (VISIBLE, ORIGINAL)}
    outer |= {} if value is None else {VISIBLE: value}
    for name in (VISIBLE, ORIGINAL):
        monkeypatch.delenv(name, raising=False)
    for name, text in gpu_access.hidden(outer).items():
        monkeypatch.setenv(name, text)
    code = f"import os; print(os.environ.get({VISIBLE!r}), {ORIGINAL!r} in os.environ)"
    words = [sys.executable, "-c", code]
    with held(tmp_path) as lock, started(words, tmp_path, {}, tmp_path, lock) as command:
        (line,) = [line.text for batch in command.batches() for line in batch]
    assert line == f"{value} False"


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 3), ("0,2", 2), ("", 0), ("-1", 0), ("NoDevFiles", 0), ("0,1,2,3", 3)]
)
def test_gpus_are_counted_as_ray_counts_them(visible, count, tmp_path):
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl"):
        (tmp_path / "dev" / name).touch()
    assert gpu_access.visible_gpus({} if visible is None else {VISIBLE: visible}, tmp_path) == count


@pytest.mark.parametrize("name", ["nvidia0", "nvidia3", "dxg"])
def test_a_gpu_that_torch_cannot_use_is_named(name, tmp_path):
    (tmp_path / "dev").mkdir()
    nothing = gpu_access.device_class({}, tmp_path)
    assert (nothing.device, nothing.note(), nothing.note("cpu")) == ("cpu", "", "")
    assert "docker run --gpus all" in nothing.note("cuda")
    for other in ("nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / other).touch()
    assert gpu_access.device_class({}, tmp_path) == nothing
    (tmp_path / "dev" / name).touch()
    place = gpu_access.device_class({}, tmp_path)
    why = gpu_access.torch_problem(gpu_access.torch_cuda(), gpu_access.driver_cuda())
    assert place.device == ("cpu" if why else "cuda")
    assert (why or "") in place.note()
    assert (why or "") in place.note("cuda")
    assert place.note("cpu") == ""
    for value in ("", "-1"):
        hidden = gpu_access.device_class({VISIBLE: value}, tmp_path)
        assert hidden.device == "cpu"
        assert VISIBLE in hidden.note()


def test_the_installed_torchs_cuda_version_is_read_without_importing_it():
    import torch

    assert gpu_access.torch_cuda() == torch.version.cuda


TORCH, DRIVER = (None, "12.6", "13.0"), (None, (12, 4), (12, 8), (13, 0), (13, 1))
USABLE = {("12.6", (12, 4)), ("12.6", (12, 8)), ("12.6", (13, 0)), ("12.6", (13, 1))} | {
    ("13.0", (13, 0)),
    ("13.0", (13, 1)),
}
"""CUDA's compatibility: a driver runs every minor version of its own major version, and all older ones."""


@pytest.mark.parametrize(("cuda", "supported"), list(itertools.product(TORCH, DRIVER)))
def test_a_torch_runs_on_drivers_of_its_cuda_and_later(cuda, supported):
    why = gpu_access.torch_problem(cuda, supported)
    assert (why is None) == ((cuda, supported) in USABLE)
    if why and cuda and supported:
        assert cuda in why
        assert f"{supported[0]}.{supported[1]}" in why


def test_errors_of_cudas_start_are_explained():
    told = {
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCompile with ...": ("exclusive", {}),
        "CUDA error: out of memory": ("nvidia-smi", {}),
        "No CUDA GPUs are available": ("MIG-1 names no GPU", {VISIBLE: "MIG-1"}),
        "CUDA error: invalid device ordinal": ("fewer ranks", {VISIBLE: "0"}),
        "something else": ("something else", {}),
    }
    for message, (part, environment) in told.items():
        assert part in gpu_access.explained(message, environment)


def test_start_says_why_there_is_no_cuda_here():
    """In a process of its own, with a torch that has no CUDA or no GPU."""
    code = "from ablate.engines import gpu_access; gpu_access.start()"
    environment = os.environ | {VISIBLE: ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert "InputError: CUDA does not start here: " in done.stderr.splitlines()[-1]
    assert ";" in done.stderr.splitlines()[-1]  # with a remedy
