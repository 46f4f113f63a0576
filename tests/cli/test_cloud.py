"""Rented machines: the money, the commands, the copies and the return of results, without an account and without a GPU.

What a provider does with a request is no matter of a test; its own client library reads the files here if it is installed.
"""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from support.cases import every
from support.commands import INLINE, here
from support.experiments import environment, values, write
from support.rented import CLOUD, asked, calls, interpreter, provider, words_here

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[2] / "docker"))
import gpu_day
import pins
import rent
import session
from rent import GPUS, Refusal
from session import BUDGET, DONE, FAILED, REFUSED, TERMINATED, Mirror, Request, Session, Step

from ablate.cli.commands import whole_app
from ablate.engines.hardware import rented_machine

ROOT = Path(__file__).parents[2]
RENT = ("--on", "modal", "--gpu", "B200", "--price", "6", "--budget", "20")
NUMBER = r"\d+\.\d\d"


def python(code: str) -> tuple[str, ...]:
    """A command that runs a line of Python."""
    return (sys.executable, "-c", code)


def request(*steps: Step, run: str = "one", seconds: float = 3600.0) -> Request:
    """A request whose budget pays so many seconds, at a price of 7.20 an hour."""
    return Request(run, "B200", 1, 7.2, 7.2 * seconds / 3600, steps)


def quick(asked_for: Request, home: Path, kept: Path, **changes) -> Session:
    """A session that copies, ends and kills within seconds."""
    return Session(asked_for, home, kept, **({"every": 0.1, "reserve": 1.0, "grace": 5.0} | changes))


# The money


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("no price", ["doctor", "--on", "modal", "--gpu", "B200", "--budget", "20"]),
        ("no budget", ["doctor", "--on", "modal", "--gpu", "B200", "--price", "6"]),
        ("a price of nothing", ["doctor", *RENT, "--price", "0"]),
        ("a price that is no number", ["doctor", *RENT, "--price", "nan"]),
        ("an endless budget", ["doctor", *RENT, "--budget", "inf"]),
        ("a budget that is a word", ["doctor", *RENT, "--budget", "20USD"]),
        ("a budget of minutes", ["doctor", *RENT, "--budget", "1.9"]),
        ("no GPU", ["doctor", "--on", "modal", "--price", "6", "--budget", "20"]),
        ("an unknown GPU", ["doctor", *RENT, "--gpu", "B100"]),
        ("an engine without its task", [str(ROOT / "experiments" / "rht_sr.yaml"), *RENT, "--engine", "scaled_mm"]),
        ("a GPU that Modal does not have", ["doctor", *RENT, "--gpu", "B300"]),
        ("no task", [*RENT]),
        ("a task that is no file", ["missing.yaml", *RENT]),
        ("a task that is no experiment", [str(ROOT / "README.md"), *RENT]),
        ("a task twice", ["doctor", "doctor", *RENT]),
        ("files in two folders", [str(ROOT / "experiments" / "rht_sr.yaml"), str(CLOUD / "sky.yaml"), *RENT]),
        ("no GPUs", ["doctor", *RENT, "--count", "0"]),
        ("spot machines of Modal", ["doctor", *RENT, "--spot"]),
        ("a volume that is a path", ["doctor", *RENT, "--store", "../x"]),
        ("SkyPilot without a bucket", ["doctor", *RENT, "--on", "sky"]),
        ("a bucket of an unknown kind", ["doctor", *RENT, "--on", "sky", "--store", "/tmp/bucket"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_wrong_command_is_refused_before_anything_starts(wrong, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", provider(tmp_path)["PATH"])
    monkeypatch.chdir(tmp_path)
    assert rent.main([*words, "--yes"]) == REFUSED
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert calls(tmp_path) == []


def test_the_budget_over_the_price_is_the_time():
    assert rent.limit_seconds(6.0, 20.0, "modal") == 12000.0
    assert rent.limit_seconds(6.0, 600.0, "modal") == 86400.0  # Modal's longest
    assert rent.limit_seconds(6.0, 600.0, "sky") == 360000.0
    assert request(seconds=1234.5).seconds == pytest.approx(1234.5, abs=1e-9)


@pytest.mark.parametrize(
    ("seconds", "partial"),
    [(None, False), (3600.0, False), (11000.0, False), (11900.0, True), (40000.0, True)],
)
def test_the_lines_about_the_cost_have_its_numbers(seconds, partial):
    lines = list(
        rent.cost_lines(
            Request("x", "H100", 2, 6.0, 20.0, ()),
            "sky",
            12000.0,
            [rent.Estimate("x.yaml", seconds, "text")],
            "2026-01-31",
        )
    )
    text = dict(line.split(maxsplit=1) for line in lines)
    assert "2 x H100" in text["Machine"]
    assert "2026-01-31" in text["Price"]
    assert re.findall(NUMBER, text["Price"]) == ["6.00"]
    expected = [] if seconds is None else [f"{seconds / 3600:.2f}", f"{seconds / 600:.2f}"]
    assert re.findall(NUMBER, text["Task"]) == expected
    assert re.findall(NUMBER, text["At"]) == ["3.33", "20.00", "20.00"]
    assert ("Partial" in text) == partial


def test_a_request_crosses_the_wire_and_one_without_money_does_not():
    one = request(Step("a", ("ablate", "version")))
    assert Request.parse(one.wire()) == one
    for change in ({"price": 0}, {"budget": -1}, {"price": "6"}, {"budget": None}, {"budget": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(change))):
            Request.parse(json.dumps(json.loads(one.wire()) | change))
    with pytest.raises(ValueError, match="request"):
        Request.parse("{}")


@pytest.mark.slow
def test_the_estimate_is_that_of_the_plan_for_the_rented_gpu(tmp_path, monkeypatch):
    """An engine that this machine lacks is planned for the machine that has it, and refused for one that lacks it, too."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    shape = {"width": 64, "heads": 2, "context": 32}
    path = write(tmp_path, "x", shape=shape, recipe="nvfp4", engine="transformer_engine", against="bf16")
    found = rent.estimate(str(path), GPUS["B200"], tmp_path / "runs")
    assert (found.seconds, "6 trials" in found.text, "transformer_engine" in found.text) == (None, True, True)
    with pytest.raises(Refusal, match=r"9\.0"):
        rent.estimate(str(path), GPUS["H100"], tmp_path / "runs")


def test_a_measured_plan_gives_hours():
    plan = {
        "to_run": 3,
        "to_run_later_at_most": 2,
        "done": 1,
        "engine": "emulated",
        "engine_why": "",
        "products": [],
        "seconds": 720.0,
        "measured_trials": 1,
    }
    assert rent.from_plan("x", plan).seconds == 720.0
    assert rent.from_plan("x", plan | {"measured_trials": 0}).seconds is None
    for engine in ("scaled_mm:cudnn", "scaled_mm:cutlass"):
        with pytest.raises(rent.Refusal, match="no FlashInfer"):
            rent.from_plan("x", plan | {"engine": engine})
    done = plan | {"to_run": 0, "to_run_later_at_most": 0, "seconds": 0.0, "measured_trials": 0}
    assert rent.from_plan("x", done).seconds == 0.0


def test_an_emulated_engine_is_named_with_the_reason(tmp_path, monkeypatch):
    """For an H100, whose tensor cores train no NVFP4."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    shape = {"width": 64, "heads": 2, "context": 32}
    path = write(tmp_path, "x", shape=shape, recipe="nvfp4", engine="auto", against="bf16")
    text = rent.estimate(str(path), GPUS["H100"], tmp_path / "runs").text
    assert "engine emulated (auto), since this GPU, SM 9.0, does not train NVFP4" in text


def test_arms_with_products_that_are_emulated_are_counted(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    ablate = {"recipe": ["fp8_current", "ue5m3"]}
    path = write(tmp_path, "x", recipe="fp8_current", engine="scaled_mm", against="bf16", ablate=ablate)
    text = rent.estimate(str(path), GPUS["H100"], tmp_path / "runs").text
    assert "engine scaled_mm, which emulates products of 1 of 3 arms" in text


def test_a_model_of_gpu_is_found_in_any_case():
    assert rent.parser().parse_args(["doctor", *RENT, "--gpu", "rtx-pro-6000"]).gpu == "RTX-PRO-6000"


@every(engine=rent.ENGINES)
def test_doctor_compares_the_engine_that_is_asked_for_into_a_record_of_its_own(engine):
    first, second = rent.steps_of("doctor", engine)
    assert first.command == ("ablate", "doctor")
    assert second.command[second.command.index("--engine") + 1] == engine
    assert len({rent.steps_of("doctor", one)[1].command[-1] for one in rent.ENGINES}) == len(rent.ENGINES)


@every(name=GPUS)
def test_each_gpu_has_a_capability_that_a_plan_takes_and_a_provider(name):
    gpu = GPUS[name]
    assert rented_machine(gpu.capability).capability == tuple(map(int, gpu.capability.split(".")))
    assert gpu.modal or gpu.sky


@pytest.mark.parametrize("wrong", ["10", "B200", "10.0a", "", "1.2.3"])
def test_a_capability_that_is_none_is_refused(wrong):
    with pytest.raises(ValueError, match="compute capability"):
        rented_machine(wrong)


# The commands, and the files that they name


@every(task=["doctor", "gpu-day", "some/folder/mine.yaml"])
def test_the_commands_of_a_task_exist(task):
    for step in rent.steps_of(task):
        name, *words = step.command
        if name == "ablate":
            node = typer.main.get_command(whole_app()).commands[words[0]]
            parsed = node.make_context(name, words[1:]).params
            assert str(parsed.get("file", f"{session.WORK}/mine.yaml")) == f"{session.WORK}/mine.yaml"
            assert str(parsed.get("state") or "/session/runs") == "/session/runs"
        else:
            assert os.access(ROOT / Path(name).relative_to("/opt/ablate"), os.X_OK)
            assert gpu_day.main([*words, "--dry-run"], lambda out: [], gpu_day.Machine) == 0


def test_one_image_with_the_projects_pins_serves_every_provider():
    """No file of docker/cloud installs or names an image of its own: the Dockerfile and pins.py are the one source."""
    for path in CLOUD.iterdir():
        if path.is_file():
            text = path.read_text()
            assert not re.search(r"nvcr\.io|@sha256|pip install (?!'\{package\})|==\d", text), path
    for name in ("modal_app.py", "sky.yaml"):
        assert "blackwell.Dockerfile" in (CLOUD / name).read_text()
    dockerfile = (ROOT / "docker" / "blackwell.Dockerfile").read_text()
    assert f"WORKDIR {session.WORK}\n" in dockerfile
    assert re.search(r'^ARG TESTS=""$', dockerfile, re.MULTILINE)
    assert "pins.py tests" in dockerfile
    for name in ("TESTS=yes", '"TESTS": "yes"'):
        assert any(name in (CLOUD / file).read_text() for file in ("sky.yaml", "modal_app.py"))


def test_what_the_tests_need_is_pinned_and_leaves_the_images_torch_alone():
    names = {pins.name_of(one) for one in pins.tests()}
    assert {"pytest", "hypothesis"} <= names
    assert not [name for name in names if pins.BUILT_TOGETHER.fullmatch(name)]
    assert names <= pins.constraints().keys()


def test_the_container_of_a_plain_machine_has_the_folders_and_publishes_nothing(tmp_path):
    words = session.in_docker(
        ("ablate", "sweep", f"{session.WORK}/x.yaml"), "image:1", tmp_path / "home", tmp_path / "work", ROOT
    )
    at = words.index("image:1")
    assert words[at - 2 : at] == ["--entrypoint", "ablate"]
    assert words[at + 1 :] == ["sweep", f"{session.WORK}/x.yaml"]
    volumes = [words[n + 1] for n, word in enumerate(words) if word == "--volume"]
    assert f"{tmp_path / 'home'}:/session" in volumes
    assert f"{tmp_path / 'work'}:{session.WORK}:ro" in volumes
    for volume in volumes:
        assert volume.startswith(str(tmp_path)) or Path(volume.split(":")[0]).is_dir()
    assert not {"--publish", "-p", "--privileged", "--network"} & {*words}
    assert f"ABLATE_STATE={session.HOME}/runs" in words


def test_no_file_holds_a_credential_and_none_is_uploaded(tmp_path):
    for path in CLOUD.glob("*.*"):
        assert not re.search(r"(?i)(token|secret|password|api_key)\w*\s*[=:]\s*['\"]\w", path.read_text()), (
            path
        )
    for name in (
        "mine.yaml", "data/books.txt", ".env", "a/.env.local", ".git/config", ".netrc", "id_rsa", "x.pem",
        "aws_credentials.json", "ablate.toml", "runs/ledger.db", "runs-b200/ledger.db", ".venv/bin/python",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert rent.uploads(tmp_path) == [Path("mine.yaml"), Path("data/books.txt")]
    given = tmp_path / "given"
    assert rent.staged(given, request(), tmp_path / "data") == [Path("books.txt")]
    assert sorted(str(path.relative_to(given)) for path in given.rglob("*") if path.is_file()) == [
        "request.json",
        "work/books.txt",
    ]


def test_a_folder_that_is_too_large_is_refused(tmp_path, monkeypatch):
    with (tmp_path / "large.bin").open("wb") as file:
        file.truncate(rent.MOST_BYTES + 1)  # a hole
    with pytest.raises(Refusal, match=re.escape(str(tmp_path))):
        rent.uploads(tmp_path)


def test_skypilot_is_given_the_price_as_its_own_limit():
    lines = rent.sky_task(7.25).splitlines()
    assert lines[lines.index("resources:") + 1] == "  max_hourly_cost: 7.25"
    assert [line for line in lines if "max_hourly_cost: 7.25" not in line] == (
        CLOUD / "sky.yaml"
    ).read_text().splitlines()


@pytest.mark.parametrize("spot", [False, True])
def test_a_dry_run_prints_the_command_and_starts_nothing(spot, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [
        "doctor",
        *RENT,
        "--on",
        "sky",
        "--store",
        "s3://bucket",
        *(["--spot"] if spot else []),
        "--dry-run",
    ]
    assert rent.main(words) == 0
    (command,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("Command"))
    assert ("sky jobs launch" in command, "--use-spot" in command) == (spot, spot)
    for part in ("--gpus B200", "LIMIT=12000", "STORE=s3://bucket"):
        assert part in command
    assert list(tmp_path.iterdir()) == []


def test_without_a_terminal_and_without_yes_nothing_starts(tmp_path):
    environ = provider(tmp_path)
    done = subprocess.run(
        [sys.executable, CLOUD / "rent.py", "doctor", *RENT],
        capture_output=True, text=True, env=environ, cwd=tmp_path, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert (done.returncode, calls(tmp_path)) == (REFUSED, [])
    assert "At most" in done.stdout


# A session


def test_steps_run_once_are_accounted_and_a_failure_stops_no_other(tmp_path):
    steps = (
        Step("good", python("open('{}', 'a').write('g')".format(tmp_path / "good"))),
        Step("bad", python("print('why'); raise SystemExit(5)")),
        Step("last", python("open('{}', 'a').write('l')".format(tmp_path / "last"))),
    )
    kept = tmp_path / "kept"
    assert quick(request(*steps), tmp_path / "a", kept).run() == FAILED
    assert (kept / "runs" / "rented" / "one" / "bad.txt").read_text() == "why\n"
    first = session.read_spent(kept / "runs")["one"]
    assert first.done == ["good", "last"]
    assert quick(request(*steps), tmp_path / "b", kept).run() == FAILED  # another machine of the same run
    assert (tmp_path / "good").read_text() + (tmp_path / "last").read_text() == "gl"
    second = session.read_spent(kept / "runs")["one"]
    assert second.seconds > first.seconds > 0
    assert second.cost == pytest.approx(second.seconds * 7.2 / 3600)
    assert quick(request(steps[0], run="two"), tmp_path / "c", kept).run() == DONE
    assert session.read_spent(kept / "runs").keys() == {"one", "two"}
    assert not (kept / "holder.json").exists()


def test_the_budget_ends_a_command_by_sigterm_keeps_its_files_and_counts_all_machines(tmp_path):
    code = (
        "import signal, sys, time\n"
        "def end(*_): open(sys.argv[1] + '/runs/said', 'w').write('bye'); sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, end); open(sys.argv[1] + '/runs/begun', 'w').close(); time.sleep(60)"
    )
    kept = tmp_path / "kept"

    def one(home):
        steps = (
            Step("long", (*python(code), str(home))),
            Step("never", python(f"open({str(tmp_path / 'never')!r}, 'w')")),
        )
        return quick(request(*steps, seconds=3.0), home, kept)

    begun = time.monotonic()
    assert one(tmp_path / "a").run() == BUDGET
    assert 1.0 < time.monotonic() - begun < 20
    assert (kept / "runs" / "said").read_text() == "bye"
    assert not (tmp_path / "never").exists()
    (kept / "runs" / "said").unlink()
    assert one(tmp_path / "b").run() == BUDGET  # nothing is left for a second machine of the same run
    assert not (tmp_path / "b" / "runs" / "said").exists()


def test_time_before_the_session_is_paid_too(tmp_path):
    started = time.time() - 500
    assert (
        quick(
            request(Step("a", python("pass")), seconds=400),
            tmp_path / "a",
            tmp_path / "kept",
            started=started,
        ).run()
        == BUDGET
    )
    assert session.read_spent(tmp_path / "kept" / "runs")["one"].seconds >= 500


def test_a_command_that_ignores_sigterm_is_killed_with_what_it_started(tmp_path):
    child = "import time, pathlib; time.sleep(3); pathlib.Path('{}').touch()".format(tmp_path / "late")
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    )
    cleaned = []
    found = quick(
        request(Step("deaf", python(code)), seconds=2.0), tmp_path / "a", tmp_path / "kept",
        grace=0.3, clean_up=lambda: cleaned.append(True),
    )  # fmt: skip
    begun = time.monotonic()
    assert found.run() == BUDGET
    assert cleaned == [True]
    time.sleep(max(0.0, 4.0 - (time.monotonic() - begun)))
    assert not (tmp_path / "late").exists()


def test_another_run_that_writes_now_is_refused_and_one_that_died_is_not(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    one = request(Step("a", python("pass")), run="mine")
    (kept / "holder.json").write_text(json.dumps({"run": "other", "at": time.time()}))
    assert quick(one, tmp_path / "a", kept, every=30.0).run() == REFUSED
    (kept / "holder.json").write_text(json.dumps({"run": "other", "at": time.time() - 1000}))
    assert quick(one, tmp_path / "b", kept, every=30.0).run() == DONE
    (kept / "holder.json").write_text(json.dumps({"run": "mine", "at": time.time()}))
    assert quick(one, tmp_path / "c", kept, every=30.0).run() == DONE


def test_results_of_two_models_of_gpus_are_not_mixed(tmp_path, monkeypatch, capsys):
    """A trial's id has its class of device alone: a sweep over two models would compare arms across them."""
    kept, one = tmp_path / "kept", request(Step("a", python("pass")))
    assert quick(one, tmp_path / "a", kept).run() == DONE
    other = replace(one, run="two", gpu="H100")
    assert quick(other, tmp_path / "b", kept).run() == REFUSED
    assert session.read_spent(kept / "runs").keys() == {"one"}
    monkeypatch.chdir(tmp_path)
    words = ["doctor", *RENT, "--gpu", "H100", "--dry-run"]
    assert rent.main([*words, "--state", str(kept / "runs")]) == REFUSED
    assert rent.main(words) == 0
    with pytest.raises(Refusal, match="B200"):
        rent.refuse_mixture(kept / "runs", "H100", "--store x")


def test_a_last_copy_that_fails_is_a_failure(tmp_path, capsys):
    kept = tmp_path / "kept"
    step = Step("a", python(f"import shutil; shutil.rmtree({str(kept)!r}); open({str(kept)!r}, 'w').close()"))
    assert quick(request(step), tmp_path / "a", kept).run() == FAILED
    assert str(tmp_path / "a") in capsys.readouterr().out


# The copies


def test_a_copy_follows_what_changes_and_what_is_removed(tmp_path):
    home, kept = tmp_path / "home", tmp_path / "kept"
    mirror = Mirror(home, kept)
    assert mirror.restore() == 0
    (home / "runs" / "trials").mkdir()
    (home / "runs" / "trials" / "a.pt").write_bytes(b"1")
    (home / "cache" / "b").write_bytes(b"2")
    (home / "elsewhere").write_bytes(b"3")
    assert (mirror.copy(), mirror.copy()) == (2, 0)
    (home / "runs" / "trials" / "a.pt").write_bytes(b"12")
    (home / "cache" / "b").unlink()
    assert mirror.copy() == 1
    assert [str(path.relative_to(kept)) for path in kept.rglob("*") if path.is_file()] == ["runs/trials/a.pt"]
    assert (kept / "runs" / "trials" / "a.pt").read_bytes() == b"12"
    other = Mirror(tmp_path / "other", kept)
    assert (other.restore(), other.copy()) == (1, 0)
    with pytest.raises(FileExistsError):
        Mirror(home, kept).restore()


def test_a_database_is_copied_whole_while_it_is_written(tmp_path):
    """In WAL mode, what is committed is in the log: a copy of the file alone would lack it, or be torn."""
    home, kept = tmp_path / "home", tmp_path / "kept"
    mirror = Mirror(home, kept)
    mirror.restore()
    path, stop = home / "runs" / "ledger.db", threading.Event()
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
            mirror.copy()
            with closing(
                sqlite3.connect(f"file:{kept / 'runs' / 'ledger.db'}?mode=ro&immutable=1", uri=True)
            ) as db:
                assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
                count, total = db.execute("SELECT count(*), coalesce(sum(a), 0) FROM pairs").fetchone()
                assert (count % 2, total) == (0, 0)  # whole transactions
                counts.append(count)
    finally:
        stop.set()
        writer.join()
    assert counts == sorted(counts)
    assert counts[-1] > counts[0]
    assert [name.name for name in (kept / "runs").iterdir()] == ["ledger.db"]


def test_a_result_that_appears_during_a_copy_waits_for_its_records(tmp_path):
    """A kept result whose records are older would be found damaged, and its trial would run again."""
    home, kept = tmp_path / "home", tmp_path / "kept"

    class Slow(Mirror):
        def copy_one(self, path):
            super().copy_one(path)
            if path.name == "events.jsonl":  # the trial ends behind the copy's back
                with (home / path).open("a") as file:
                    file.write("last\n")
                (home / path).with_name("result.json").write_text("{}")

    mirror = Slow(home, kept)
    mirror.restore()
    (home / "runs" / "events.jsonl").write_text("first\n")
    mirror.copy()
    assert not (kept / "runs" / "result.json").exists()
    assert (kept / "runs" / "events.jsonl").read_text() == "first\n"
    Mirror.copy(mirror)
    assert (kept / "runs" / "result.json").exists()
    assert (kept / "runs" / "events.jsonl").read_text() == "first\nlast\n"


def test_results_that_are_brought_back_replace_databases_with_their_logs_and_leave_the_rest(tmp_path):
    source, state = tmp_path / "source", tmp_path / "state"
    (source / "sweeps").mkdir(parents=True)
    (state / "sweeps").mkdir(parents=True)
    (source / "sweeps" / "ledger.db").write_text("new")
    for name in ("ledger.db", "ledger.db-wal", "ledger.db-shm", "mine.txt"):
        (state / "sweeps" / name).write_text("old")
    assert rent.bring_back(source, state) == 1
    assert {path.name: path.read_text() for path in (state / "sweeps").iterdir()} == {
        "ledger.db": "new",
        "mine.txt": "old",
    }


def test_only_the_uploads_of_this_run_stay(tmp_path):
    for run in ("old", "new"):
        (tmp_path / "up" / run).mkdir(parents=True)
        (tmp_path / "up" / run / "x.yaml").write_text(run)
    session.take_work(tmp_path / "up", "new", tmp_path / "work")
    assert (tmp_path / "work" / "x.yaml").read_text() == "new"
    assert [path.name for path in (tmp_path / "up").iterdir()] == ["new"]


# A sweep on a machine that is taken away, and the whole way there and back

KILLED = """\
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
import session
from support.rented import words_here
home, kept, work = map(Path, sys.argv[1:4])
request = session.Request.parse(sys.argv[4])
words = lambda command: words_here(command, home, work)
sys.exit(session.Session(request, home, kept, words=words, every=0.2).run())
"""


@pytest.mark.slow
def test_a_sweep_whose_machine_is_killed_goes_on_elsewhere_with_the_same_values(tmp_path):
    shape = {"steps": 24, "eval_every": 8}
    path = write(tmp_path, "moved", shape=shape, ablate={"rht": [True]}, telemetry={"checkpoint": 0})
    kept, program = tmp_path / "kept", KILLED.format(paths=[str(CLOUD), str(ROOT / "tests"), str(ROOT)])
    (step,) = rent.steps_of(str(path))
    words = [
        sys.executable,
        "-c",
        program,
        str(tmp_path / "a"),
        str(kept),
        str(tmp_path),
        request(step).wire(),
    ]
    with subprocess.Popen(
        words, env=environment() | {"PYTHONPATH": str(ROOT)}, start_new_session=True
    ) as machine:
        until = time.monotonic() + 120
        while not list(kept.glob("runs/trials/*/result.json")):
            assert machine.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        children = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(machine.pid)], capture_output=True, text=True, check=True
        )
        machine.kill()  # without a word, as a lost machine
        for child in map(int, children.stdout.split()):
            os.killpg(child, signal.SIGKILL)
    there = len(list(kept.glob("runs/trials/*/result.json")))
    assert 0 < there < 4
    assert (kept / "holder.json").exists()
    home = tmp_path / "b"
    second = quick(
        request(step), home, kept, words=lambda command: words_here(command, home, tmp_path), grace=60.0
    )
    assert second.run() == DONE
    done = here("sweep", path, "--state", tmp_path / "undisturbed", *INLINE, "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert values(kept / "runs", "moved") == values(tmp_path / "undisturbed", "moved")
    assert len(values(kept / "runs", "moved")) == 4
    verified = here("status", "--verify", "--state", kept / "runs")
    assert verified.returncode == 0, verified.stdout + verified.stderr


@pytest.mark.slow
def test_one_command_rents_runs_and_brings_back_what_status_reads(tmp_path):
    """The provider is a stand-in; request, session, copies and the return are the real ones."""
    (tmp_path / "mine").mkdir()
    path, environ = write(tmp_path / "mine", "there", ablate={"rht": [True]}), provider(tmp_path / "stores")
    command = [sys.executable, str(CLOUD / "rent.py"), str(path), *RENT, "--yes"]
    first = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=tmp_path, check=False)
    assert first.returncode == 0, first.stdout + first.stderr
    state = tmp_path / "runs-b200"
    assert len(values(state, "there")) == 4
    status = here("status", "there", "--state", state)
    assert (status.returncode, "there" in status.stdout) == (0, True)
    assert [call.split()[0] for call in calls(tmp_path / "stores")] == ["run", "volume"]
    again = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=tmp_path, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "0 trials run, 4 already done" in again.stdout
    assert len(session.read_spent(state)) == 2


def test_a_signal_to_the_session_keeps_everything(tmp_path):
    home, kept = tmp_path / "a", tmp_path / "kept"
    code = f"import time; open({str(home / 'runs' / 'x')!r}, 'w').write('1'); time.sleep(60)"
    timer = threading.Timer(1.5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    timer.start()
    before = signal.getsignal(signal.SIGTERM)
    assert quick(request(Step("a", python(code))), home, kept, every=30.0).run() == TERMINATED
    assert (kept / "runs" / "x").read_text() == "1"
    assert signal.getsignal(signal.SIGTERM) == before


# The clients of the providers, where they are installed

MODAL = """
import contextlib, io, json, sys
sys.path.insert(0, "docker/cloud")
import modal, modal_app, rent
from pathlib import Path
volume = modal.Volume.from_name("other", create_if_missing=True)
def facts(function):
    info = function.info()
    volumes = {path: one.name for path, one in info.volumes.items()}
    return {"gpus": info.gpus, "timeout": info.timeout, "volumes": volumes, "single": info.single_use_containers}
gpus = [f"{one.modal}:{n}" for one in rent.GPUS.values() if one.modal for n in (1, 2)]
variants = {gpu: facts(modal_app.rented.with_options(gpu=gpu, timeout=9600, volumes={"/mirror": volume})) for gpu in gpus}
ignored = modal.FilePatternMatcher.from_file(".dockerignore")
paths = sys.argv[1:]
print(json.dumps({"app": modal_app.app.name, "plain": facts(modal_app.rented), "variants": variants,
                  "entry": sorted(__import__("inspect").signature(modal_app.main.info.raw_f).parameters),
                  "ignored": [path for path in paths if ignored(Path(path))]}))
"""


def test_modals_client_reads_the_app(tmp_path):
    python_there = interpreter("modal", "modal")
    mine = [
        "runs-b200/ledger.db",
        "runs/x",
        ".git/config",
        "docker/.env",
        "ablate/numerics/kernels/x.so",
        "tests/cli/test_cloud.py",
    ]
    sent = [
        "ablate/cli/commands.py",
        "docker/pins.py",
        "docker/cloud/session.py",
        "constraints.txt",
        "experiments/rht_sr.yaml",
    ]
    found = asked(python_there, MODAL, tmp_path, *mine, *sent)
    assert found["app"] == "ablate-rented"
    assert found["plain"] == {
        "gpus": [["B200", 1]],
        "timeout": 3600,
        "volumes": {"/mirror": "ablate-b200"},
        "single": True,
    }
    for gpu, facts in found["variants"].items():
        name, _, count = gpu.partition(":")
        assert facts == {
            "gpus": [[name, int(count)]],
            "timeout": 9600,
            "volumes": {"/mirror": "other"},
            "single": True,
        }
    assert len(found["variants"]) == 2 * sum(gpu.modal is not None for gpu in GPUS.values())
    assert found["ignored"] == mine
    options = [
        word.removeprefix("--") for word in rent.modal_command("s", tmp_path, 1.0) if word.startswith("--")
    ]
    assert found["entry"] == sorted([*options, "gpu"])


SKY = """
import json, sys
sys.path.insert(0, "docker/cloud")
import rent, sky, yaml
from pathlib import Path
from sky.client.cli import command
given, text = Path(sys.argv[1]), rent.sky_task(7.5)
(given / "work").mkdir(parents=True)
path = given / "task.yaml"
path.write_text(text)
values = [("STORE", "s3://bucket/part"), ("GIVEN", str(given)), ("LIMIT", "9600")]
task = sky.Task.from_yaml_config(yaml.safe_load(text), env_overrides=values)
(resources,) = task.resources
refused = {}
for name, change in {"no bucket": (text, values[1:]), "a key": (text.replace("use_spot", "use_spots"), values),
                     "a mode": (text.replace("MOUNT_CACHED", "MOUNT_CASHED"), values)}.items():
    try:
        sky.Task.from_yaml_config(yaml.safe_load(change[0]), env_overrides=change[1])
    except Exception as error:
        refused[name] = type(error).__name__
parsed = {}
for spot in (False, True):
    words = rent.sky_command(path, "s3://bucket", given, 9600, "H100:2", "aws/us-east-1", spot)
    node = command.cli
    while hasattr(node, "commands") and words[0] in node.commands:
        node, words = node.commands[words[0]], words[1:]
    params = node.make_context("sky", words).params
    parsed[str(spot)] = [params["gpus"], params["use_spot"], params["infra"], sorted(map(list, params["env"]))]
names = {}
for name, gpu in rent.GPUS.items():
    one = sky.Resources(accelerators=f"{gpu.sky}:1")
    names[name] = dict(one.accelerators)
autostop = resources.autostop_config
print()
print(json.dumps({"accelerators": resources.accelerators, "cost": resources.max_hourly_cost, "spot": resources.use_spot,
                  "autostop": [autostop.enabled, autostop.idle_minutes, autostop.down],
                  "recovery": resources.job_recovery, "mounts": task.file_mounts,
                  "stores": {path: [one.source, one.mode.value] for path, one in task.storage_mounts.items()},
                  "workdir": task.workdir, "envs": dict(task.envs), "refused": refused, "parsed": parsed, "names": names}))
"""


@pytest.mark.slow
def test_skypilots_schema_and_commands_take_what_is_passed(tmp_path):
    given = tmp_path / "given"
    found = asked(interpreter("sky", "sky"), SKY, tmp_path, given)
    assert found["accelerators"] == {"B200": 1}
    assert (found["cost"], found["spot"]) == (7.5, False)
    assert found["autostop"] == [True, 10, True]
    assert found["recovery"]["strategy"] == "EAGER_NEXT_REGION"
    assert found["mounts"] == {"~/ablate-given": str(given)}
    assert found["stores"] == {"~/ablate-kept": ["s3://bucket/part", "MOUNT_CACHED"]}
    assert found["envs"] | {"LIMIT": "9600"} == found["envs"]
    assert found["refused"].keys() == {"no bucket", "a key", "a mode"}
    for spot in (False, True):
        gpus, use_spot, infra, envs = found["parsed"][str(spot)]
        assert (gpus, bool(use_spot), infra) == ("H100:2", spot, "aws/us-east-1")
        assert [name for name, _ in envs] == ["GIVEN", "LIMIT", "STORE"]
    assert found["names"] == {name: {gpu.sky: 1} for name, gpu in GPUS.items()}


def test_the_shell_of_skypilots_task_is_sound(tmp_path):
    """Its setup and run parse, name files that exist, and refuse to run without what rent.py passes."""
    text = (CLOUD / "sky.yaml").read_text()
    for name in ("setup", "run"):
        script = re.search(rf"^{name}: \|\n((?:  .*\n?)+)", text, re.MULTILINE)[1]
        assert subprocess.run(["sh", "-n"], input=script, text=True, check=False).returncode == 0
        for path in re.findall(r"docker/[\w./]+", script):
            assert (ROOT / path).is_file()
    words = re.search(r"session\.py (.*?)\n(?:\S|\Z)", text + "\n", re.DOTALL)[1].replace("\\\n", " ").split()
    assert {word for word in words if word.startswith("--")} == {
        "--request",
        "--work",
        "--kept",
        "--image",
        "--started",
    }
    done = subprocess.run(
        ["sh", "-c", script], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "LIMIT" in done.stderr


def test_the_stand_in_of_a_request_is_the_request():
    """A field that is added to Request reaches the machine, or this fails."""
    one = request(Step("a", ("b",)))
    assert replace(Request.parse(one.wire()), run="x") == replace(one, run="x")
