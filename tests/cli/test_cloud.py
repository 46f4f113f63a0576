"""Rented machines: the refusals, the copies, the budget and the return of results, without an account and without a GPU.

What Modal does with a request is no matter of a test; its own client reads the file here if it is installed.
"""

import inspect
import io
import os
import re
import sqlite3
import subprocess
import sys
import tarfile
import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from support.cases import every
from support.commands import INLINE, here
from support.experiments import until, values, write
from support.rented import APP, CLOUD, ROOT, asked, calls, interpreter, modal_app, provider, rent

sys.path.insert(0, str(ROOT / "benchmarks"))
sys.path.insert(0, str(ROOT / "docker"))
import gpu_day
import pins

from ablate.cli.commands import whole_app
from ablate.engines.hardware import rented_machine

SHAPE = {"width": 64, "heads": 2, "context": 32}


def keep(state: Path, archive: Path) -> None:
    """Call `keep` with a volume that needs no commit."""
    modal_app.keep(state, archive, SimpleNamespace(commit=lambda: None))


def kept(archive: Path, name: str) -> dict[str, bytes]:
    """Return the files of an archive whose names end so; none if there is no archive yet."""
    try:
        with tarfile.open(archive) as tar:
            return {one.name: tar.extractfile(one).read() for one in tar if one.name.endswith(name)}
    except FileNotFoundError:
        return {}


def unpacked(archive: Path, folder: Path) -> Path:
    """Return the folder into which an archive was written."""
    modal_app.unpack(archive.read_bytes(), folder)
    return folder


# What is refused


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        ("B200", ()),
        ("B200", ("--doctor", "--fetch")),
        ("B200", ("--doctor", "--bench", "linear")),
        ("B200", ("--bench", "faults")),
        ("B200", ("--bench", "faults", "--doctor")),
        ("B200", ("--doctor", "--hours", "0")),
        ("B200", ("--doctor", "--hours", "-1")),
        ("B200", ("--doctor", "--hours", "24")),
        ("B200", ("--doctor", "--hours", "nan")),
        ("B300", ("--doctor",)),
        ("B200:9", ("--doctor",)),
        ("", ("--doctor",)),
        ("B200", ("--file", "missing.yaml")),
        ("B200", ("--file", str(ROOT / "README.md"))),
    ],
)
def test_a_wrong_command_is_refused_in_a_sentence_before_anything_starts(gpu, words, tmp_path):
    done = rent(provider(tmp_path / "stores", MODAL_GPU=gpu), tmp_path, *words)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert (calls(tmp_path / "stores"), (tmp_path / "reports").exists()) == ([], False)


@pytest.mark.slow
def test_an_experiment_that_the_rented_gpu_cannot_run_is_refused_with_the_words_of_its_plan(tmp_path):
    path = write(tmp_path, "x", shape=SHAPE, recipe="nvfp4", engine="transformer_engine", against="bf16")
    done = rent(provider(tmp_path / "stores", MODAL_GPU="h100"), tmp_path, "--file", path)
    assert (done.returncode, calls(tmp_path / "stores")) == (2, [])
    assert "9.0" in done.stderr


def test_a_second_run_on_a_volume_is_refused_until_the_first_has_ended(tmp_path):
    environ = provider(tmp_path / "stores")
    lock = tmp_path / "stores" / "volumes" / "ablate-b200" / modal_app.LOCK
    lock.parent.mkdir(parents=True)
    lock.write_text("0")
    done = rent(environ, tmp_path, "--bench", "kernels")
    assert (done.returncode, len(done.stderr.splitlines()), lock.exists()) == (2, 1, True)
    assert calls(tmp_path / "stores") == []
    assert rent(environ, tmp_path, "--fetch").returncode == 0


@every(name=modal_app.CAPABILITY)
def test_each_gpu_has_a_capability_that_a_plan_takes(name):
    capability = modal_app.CAPABILITY[name]
    assert rented_machine(capability).capability == tuple(map(int, capability.split(".")))


@pytest.mark.parametrize("wrong", ["10", "B200", "10.0a", "", "1.2.3"])
def test_a_capability_that_is_none_is_refused(wrong):
    with pytest.raises(ValueError, match="compute capability"):
        rented_machine(wrong)


# The commands, and the files that they name


def test_the_commands_of_the_tasks_exist():
    lines = [*modal_app.BENCHES.values(), *re.findall(r"ablate doctor[^|&]*", modal_app.DOCTOR)]
    for line in lines:
        name, *words = line.split()
        if name == "ablate":
            node = typer.main.get_command(whole_app()).commands[words.pop(0)]
            if hasattr(node, "commands"):
                node = node.commands[words.pop(0)]
            node.make_context(name, words)
        else:
            assert os.access(ROOT / Path(name).relative_to("/opt/ablate"), os.X_OK)
            assert gpu_day.main([*words, "--dry-run"], lambda out: [], gpu_day.Machine) == 0
    assert subprocess.run(["bash", "-n"], input=modal_app.DOCTOR, text=True, check=False).returncode == 0


def test_one_image_with_the_projects_pins_serves_rented_machines():
    """No file of docker/cloud installs or names an image of its own: the Dockerfile and pins.py are the one source."""
    assert [path.name for path in CLOUD.iterdir() if path.is_file()] == [APP.name]
    assert not re.search(r"nvcr\.io|@sha256|pip install|==\d", APP.read_text())
    assert modal_app.DOCKERFILE.is_file()
    dockerfile = modal_app.DOCKERFILE.read_text()
    assert re.search(r'^ARG TESTS=""$', dockerfile, re.MULTILINE)
    assert "pins.py tests" in dockerfile
    assert '"TESTS": "yes"' in APP.read_text()


def test_what_the_tests_need_is_pinned_and_leaves_the_images_torch_alone():
    names = {pins.name_of(one) for one in pins.tests()}
    assert {"pytest", "hypothesis"} <= names
    assert not [name for name in names if pins.BUILT_TOGETHER.fullmatch(name)]
    assert names <= pins.constraints().keys()


def test_no_file_holds_a_credential_and_none_is_sent(tmp_path):
    assert not re.search(r"(?i)(token|secret|password|api_key)\w*\s*[=:]\s*['\"]\w", APP.read_text())
    for name in (
        "mine.yaml", "data/books.txt", ".env", "a/.env.local", ".git/config", ".netrc", "id_rsa", "x.pem",
        ".modal.toml", ".ssh/github", ".config/gh/hosts.yml", ".cache/huggingface/token", "server.key",
        "aws_credentials.json", "ablate.toml", "runs/ledger.db", "runs-b200/ledger.db", "reports/b200/ledger.db",
        ".venv/bin/python",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    with tarfile.open(fileobj=io.BytesIO(modal_app.packed(tmp_path))) as tar:
        sent = {str(Path(one.name)) for one in tar if one.isfile()}
    assert sent == {"mine.yaml", "data/books.txt"}


def test_an_experiment_that_is_named_by_a_link_is_there_under_the_links_name(tmp_path):
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "mine.yaml").write_text("x")
    (tmp_path / "now.yaml").symlink_to("all/mine.yaml")
    environ = provider(tmp_path / "stores", '#!/bin/sh\n[ "$1" = plan ] || cat "$2"\n')
    done = rent(environ, tmp_path, "--file", "now.yaml")
    assert (done.returncode, done.stdout[:1]) == (0, "x"), done.stdout + done.stderr


def test_a_folder_that_is_too_large_is_refused(tmp_path, capsys):
    (tmp_path / "large.bin").write_bytes(bytes(30_000))
    assert len(modal_app.packed(tmp_path, 1_000_000)) > 30_000
    with pytest.raises(SystemExit) as refused:
        modal_app.packed(tmp_path, 30_000)
    assert refused.value.code == modal_app.REFUSED
    assert str(tmp_path) in capsys.readouterr().err


# The copies


def test_a_copy_has_what_is_there_now_and_leaves_what_is_here_alone(tmp_path):
    state, archive = tmp_path / "runs", tmp_path / "state.tar"
    (state / "trials").mkdir(parents=True)
    (state / "trials" / "a.pt").write_bytes(b"1")
    (state / "trials" / "b.pt").write_bytes(b"2")
    keep(state, archive)
    (state / "trials" / "a.pt").write_bytes(b"12")
    (state / "trials" / "b.pt").unlink()
    keep(state, archive)
    (tmp_path / "here").mkdir()
    for name in ("mine.txt", "mlflow.db"):
        (tmp_path / "here" / name).write_text("mine")
    found = unpacked(archive, tmp_path / "here")
    files = {str(path.relative_to(found)): path.read_text() for path in found.rglob("*") if path.is_file()}
    assert files == {"trials/a.pt": "12", "mine.txt": "mine", "mlflow.db": "mine"}


def test_a_database_is_copied_whole_while_it_is_written(tmp_path):
    """In WAL mode, what is committed is in the log: a copy of the file alone would lack it, or be torn."""
    state, archive = tmp_path / "runs", tmp_path / "state.tar"
    state.mkdir()
    path, stop = state / "ledger.db", threading.Event()
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE pairs (a, b)")

    def write_on():
        with closing(sqlite3.connect(path, timeout=30)) as db:
            number = 0
            while not stop.is_set():
                number += 1
                with db:
                    db.execute("INSERT INTO pairs VALUES (?, ?)", (number, "x" * 2000))
                    db.execute("INSERT INTO pairs VALUES (?, ?)", (-number, "y" * 2000))

    writer = threading.Thread(target=write_on)
    writer.start()
    counts = []
    try:
        while len(counts) < 10:
            time.sleep(0.02)
            keep(state, archive)
            copy = unpacked(archive, tmp_path / "copy") / "ledger.db"
            with closing(sqlite3.connect(f"file:{copy}?mode=ro&immutable=1", uri=True)) as db:
                assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
                count, total = db.execute("SELECT count(*), coalesce(sum(a), 0) FROM pairs").fetchone()
                assert (count % 2, total) == (0, 0)  # whole transactions
                counts.append(count)
    finally:
        stop.set()
        writer.join()
    assert counts == sorted(counts)
    assert counts[-1] > counts[0]
    assert [name.name for name in (tmp_path / "copy").iterdir()] == ["ledger.db"]


def test_what_appears_during_a_copy_waits_for_the_next(tmp_path):
    """A kept result whose records are older would be found damaged, and its trial would run again; a kept ledger that says more
    than the trial store would not run it at all."""

    class Ending(type(Path())):
        """A state folder in which a trial ends once its files have been listed."""

        def rglob(self, pattern):
            yield from list(super().rglob(pattern))
            if pattern == "*":
                (state / "result.json").write_text("{}")
                with closing(sqlite3.connect(state / "ledger.db")) as db, db:
                    db.execute("INSERT INTO ended VALUES (1)")

    state, archive = tmp_path / "runs", tmp_path / "state.tar"
    state.mkdir()
    with closing(sqlite3.connect(state / "ledger.db")) as db, db:
        db.execute("CREATE TABLE ended (trial)")
    found = []
    for folder in (Ending(state), state):
        keep(folder, archive)
        copy = unpacked(archive, tmp_path / f"copy-{len(found)}")
        with closing(sqlite3.connect(copy / "ledger.db")) as db:
            (ended,) = db.execute("SELECT count(*) FROM ended").fetchone()
        found.append(((copy / "result.json").exists(), ended))
    assert found == [(False, 0), (True, 1)]


def test_a_database_that_is_brought_back_replaces_the_old_one_with_its_log(tmp_path):
    state, archive, old = tmp_path / "runs", tmp_path / "state.tar", tmp_path / "old"
    for folder, text in ((state, "new"), (old, "old")):
        folder.mkdir()
        with closing(sqlite3.connect(folder / "ledger.db")) as db, db:
            db.execute("CREATE TABLE texts (text)")
            db.execute("INSERT INTO texts VALUES (?)", (text,))
    for ending in ("-wal", "-shm"):
        (old / f"ledger.db{ending}").write_text("old")
    keep(state, archive)
    with (old / "ledger.db").open("rb") as reader:  # who reads the old one keeps it whole
        before = reader.read()
        unpacked(archive, old)
        reader.seek(0)
        assert reader.read() == before
    assert [path.name for path in old.iterdir()] == ["ledger.db"]
    with closing(sqlite3.connect(old / "ledger.db")) as db:
        assert db.execute("SELECT text FROM texts").fetchall() == [("new",)]


# The whole way there and back


@pytest.mark.slow
def test_one_command_rents_runs_and_brings_back_results_and_report(tmp_path):
    (tmp_path / "mine").mkdir()
    path = write(tmp_path / "mine", "there", ablate={"rht": [True]})
    environ, state = provider(tmp_path / "stores", ABLATE_REPORT="true"), tmp_path / "reports" / "b200"
    first = rent(environ, tmp_path, "--file", path, "--hours", "2")
    assert first.returncode == 0, first.stdout + first.stderr
    assert len(values(state, "there")) == 4
    assert (state / "reports" / "there" / "index.html").is_file()
    assert "4 trials run" in (state / "rented" / "output.txt").read_text()
    status = here("status", "there", "--state", state)
    assert (status.returncode, "there" in status.stdout) == (0, True)
    line = "ablate sweep there.yaml --device cuda --mlflow none"
    assert calls(tmp_path / "stores") == [
        {"gpu": "B200", "timeout": 7200 + modal_app.MARGIN, "volume": "ablate-b200", "line": line}
    ]
    again = rent(environ | {"ABLATE_REPORT": "false"}, tmp_path, "--file", path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "0 trials run, 4 already done" in again.stdout
    assert not list((tmp_path / "stores").glob(f"volumes/*/{modal_app.LOCK}"))


@pytest.mark.slow
def test_a_sweep_whose_machine_is_lost_continues_on_another_with_nothing_lost_or_twice(tmp_path):
    shape = {"steps": 24, "eval_every": 8}
    path = write(tmp_path, "moved", shape=shape, ablate={"rht": [True]}, telemetry={"checkpoint": 0})
    stores, state = tmp_path / "stores", tmp_path / "reports" / "h100"
    environ, archive = provider(stores, MODAL_GPU="H100:2"), stores / "volumes/ablate-h100/state.tar"
    command = ["modal", "run", str(APP), "--file", str(path)]
    with subprocess.Popen(command, env=environ, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as client:
        first = until(lambda: kept(archive, "result.json"))
        (stores / "lose").touch()
        output = client.communicate(timeout=600)[0]
    assert client.returncode == 0, output
    assert len(list(stores.glob("machine-*"))) == 2
    assert 0 < len(first) < 4
    assert {name: (state / name).read_bytes() for name in first} == first
    done = here("sweep", path, "--state", tmp_path / "undisturbed", *INLINE, "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert values(state, "moved") == values(tmp_path / "undisturbed", "moved")
    assert len(values(state, "moved")) == 4
    verified = here("status", "--verify", "--state", state)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert calls(stores)[0]["gpu"] == "H100!:2"


SLOW = """\
#!/bin/sh
# In place of `ablate`: a trial ends at each start, and the command by itself at the third.
echo start >> "$ABLATE_STATE/starts"
mkdir -p "$ABLATE_STATE/trials/$$" && touch "$ABLATE_STATE/trials/$$/result.json"
[ "$(wc -l < "$ABLATE_STATE/starts")" -gt 2 ] || exec sleep 600
"""


def starts(state: Path) -> int:
    """Return how often the command was started."""
    return len((state / "starts").read_text().splitlines())


def test_the_budget_ends_a_command_and_the_same_one_continues(tmp_path):
    environ, state = provider(tmp_path / "stores", SLOW), tmp_path / "reports" / "b200"
    command = ("--bench", "linear", "--hours", 6 / 3600)
    begun = time.monotonic()
    for count in (1, 2):
        done = rent(environ, tmp_path, *command)
        assert (done.returncode, starts(state)) == (modal_app.BUDGET, count), done.stdout + done.stderr
    assert time.monotonic() - begun > 12
    assert calls(tmp_path / "stores")[0]["timeout"] == 6 + modal_app.MARGIN
    assert (rent(environ, tmp_path, *command).returncode, starts(state)) == (0, 3)


@pytest.mark.parametrize(("how", "status"), [("lose", 0), ("interrupt", 0), ("time-out", 1)])
def test_a_machine_that_ends_leaves_what_was_kept(how, status, tmp_path):
    """Lost ones, of which one has time for a last copy, are replaced, within one budget; Modal's time-out is for those that hang."""
    stores, state = tmp_path / "stores", tmp_path / "reports" / "b200"
    command, volume = ["modal", "run", str(APP), "--bench", "linear"], stores / "volumes" / "ablate-b200"
    with subprocess.Popen(
        command, env=provider(stores, SLOW), cwd=tmp_path, stderr=subprocess.DEVNULL
    ) as client:
        for count in range(1, 3 if status == 0 else 2):
            until(lambda count=count: kept(volume / "state.tar", "starts") == {"starts": b"start\n" * count})
            (stores / how).touch()
        assert client.wait() == status
    assert starts(state) == (1 if status else 3)
    locks = {(one / "kept" / modal_app.LOCK).read_text() for one in stores.glob("machine-[12]")}
    assert len(locks) == (0 if status else 1)
    assert not (volume / modal_app.LOCK).exists()


def machine(folder: Path, line: str, seconds: float, monkeypatch) -> int:
    """Return the status of a command on a machine of this process, with the volume in `folder`."""
    for name, path in (("STAND_IN", "."), ("ABLATE_STATE", "session/runs"), ("KEPT", "kept")):
        monkeypatch.setenv(name, str(folder / path))
    (folder / "kept").mkdir(parents=True)
    (folder / "kept" / modal_app.LOCK).write_text("0")
    modal_app.modal.Volume.from_name("v", create_if_missing=True)
    return modal_app.rented.raw("v", modal_app.packed(CLOUD), line, seconds)


@pytest.mark.parametrize(
    ("line", "status"), [("true", 0), ("exit 5", 5), ("false; true", 0), ("kill -9 $BASHPID", 137)]
)
def test_the_status_of_a_command_is_that_of_the_run(line, status, tmp_path, monkeypatch):
    assert machine(tmp_path, line, 60, monkeypatch) == status


@pytest.mark.slow
def test_a_command_that_ignores_the_end_of_its_time_is_killed_with_what_it_started(tmp_path, monkeypatch):
    late = tmp_path / "late"
    line = f"trap '' INT; echo begun; (sleep {modal_app.GRACE + 5}; touch {late}) & sleep 600"
    begun = time.monotonic()
    assert machine(tmp_path, line, 1.0, monkeypatch) == modal_app.BUDGET
    time.sleep(max(0.0, modal_app.GRACE + 7 - (time.monotonic() - begun)))
    assert not late.exists()
    assert kept(tmp_path / "volumes/v/state.tar", "output.txt") == {"rented/output.txt": b"begun\n"}


# Modal's client, where it is installed

CLIENT = """
import inspect, json, sys
sys.path[:0] = ["docker/cloud", "tests/support"]
import modal, modal_app, stand_in_modal
from pathlib import Path
volume = modal.Volume.from_name("other", create_if_missing=True)
def facts(function):
    info = function.info()
    volumes = {path: one.name for path, one in info.volumes.items()}
    return {"gpus": info.gpus, "timeout": info.timeout, "volumes": volumes, "single": info.single_use_containers}
gpus = [f"{model}{mark}:{n}" for model in modal_app.CAPABILITY for mark in ("", "!") for n in (1, 2)]
variants = {gpu: facts(modal_app.rented.with_options(gpu=gpu, timeout=9600, volumes={"/kept": volume})) for gpu in gpus}
ignored = modal.FilePatternMatcher.from_file(".dockerignore")
unlike = []
for name in ("Volume", "Image", "Function", "App"):
    ours, theirs = getattr(stand_in_modal, name), getattr(modal, name)
    for method, function in vars(ours).items():
        if method.startswith("_"):
            continue
        wanted = inspect.signature(getattr(ours, method)).parameters
        offered = inspect.signature(getattr(theirs, method)).parameters
        variadic = any(one.kind is one.VAR_KEYWORD for one in offered.values())
        unlike += [f"{name}.{method}({one})" for one in wanted if one not in offered and one not in ("self", "options", "args") and not variadic]
print(json.dumps({"app": modal_app.app.name, "variants": variants, "unlike": unlike,
                  "entry": sorted(inspect.signature(modal_app.main.info.raw_f).parameters),
                  "ignored": [path for path in sys.argv[1:] if ignored(Path(path))]}))
"""


def test_modals_client_reads_the_app(tmp_path):
    """And what the stand-in for it takes, the client takes, too."""
    mine = [
        "runs/x", "reports/b200/sweeps/x/ledger.db", ".git/config", "docker/.env", "ablate/numerics/kernels/x.so",
        "tests/cli/test_cloud.py",
    ]  # fmt: skip
    sent = ["ablate/reports/report.py", "docker/pins.py", "constraints.txt", "experiments/rht_sr.yaml"]
    found = asked(interpreter("modal", "modal"), CLIENT, tmp_path, *mine, *sent)
    assert (found["app"], found["ignored"], found["unlike"]) == ("ablate-rented", mine, [])
    for gpu, facts in found["variants"].items():
        name, _, count = gpu.partition(":")
        volumes = {"/kept": "other"}
        assert facts == {"gpus": [[name, int(count)]], "timeout": 9600, "volumes": volumes, "single": True}
    assert found["entry"] == sorted(inspect.signature(modal_app.main).parameters)
