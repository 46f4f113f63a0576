"""Any command as a workload: what it is given, what it may print, how it ends, and what identifies it.

Every test runs real processes. Most scripts need nothing but Python, so that a run takes a tenth of a second.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest
from support.experiments import Children, ledger, sweep
from support.workloads import OWN_COMMAND

from ablate.errors import InputError
from ablate.execution.messages import Ended, TrialRequest
from ablate.execution.supervisor import Supervisor
from ablate.execution.tracking.mlflow_tracker import behind
from ablate.execution.trial_runner import OutOfMemory, run, within_memory
from ablate.execution.workers import Inline
from ablate.experiment.load import load
from ablate.experiment.trial_spec import TrialSpec
from ablate.recipes import PRESETS
from ablate.store.databases import url
from ablate.store.trial_store import Store
from ablate.training.checkpoints import Checkpoints
from ablate.training.loop import Telemetry
from ablate.training.metric_names import ARITHMETIC
from ablate.training.own_code.command_process import LONGEST_LINE, Line, earlier, held, started
from ablate.training.own_code.user_errors import CommandError
from ablate.training.trial_run import TrialRun
from ablate.training.workloads.command import Command
from ablate.verification.workload_checks import Runs, promises

OFTEN = Telemetry(log=1)
PLAIN = """
import json
for step in range(1, 4):
    print(json.dumps({"step": step, "val/loss": 1 / step}))
"""
"""A script without a single import of ours."""


def command(folder: Path, code: str, run: str = "python script.py", **fields) -> Command:
    (folder / "script.py").write_text(code)
    return Command(**({"run": run, "folder": str(folder), "steps": 10} | fields))


def records(workload: Command, recipe: str = "bf16", seed: int = 0, checkpoints=None) -> list:
    return list(workload.records(TrialRun(PRESETS[recipe](), seed, "emulated", "cpu", OFTEN, checkpoints)))


def values(found: list, metric: str = "val/loss") -> dict[int, float]:
    return {record.step: record.metrics[metric] for record in found if metric in record.metrics}


def spec(workload: Command, recipe: str = "bf16") -> TrialSpec:
    return TrialSpec(
        workload="command", config=workload, recipe=PRESETS[recipe](), seed=0, engine="emulated", device="cpu"
    )


def until(condition, seconds: float = 20.0):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# --- what it is given ---------------------------------------------------------------------------------

REPORT = """
import json, os, sys
given = {name: os.environ[name] for name in os.environ if name.startswith("ABLATE_")}
files = {name: json.load(open(given[name])) for name in ("ABLATE_RECIPE", "ABLATE_CONFIG")}
json.dump([sys.argv[1:], given, files, os.getcwd()], open(os.path.join(given["ABLATE_FOLDER"], "seen"), "w"))
print('{"step": 1, "val/loss": 1}')
"""


def test_it_gets_recipe_config_seed_and_folders_as_variables_and_arguments(tmp_path):
    run = "python script.py {seed} {steps} {device} --x={name} {lr} {on} {{}} {recipe} {config} {checkpoint} {folder}"
    config = {"name": "two words", "lr": 1e-3, "on": True}
    workload = command(tmp_path, REPORT, run, config=config)
    records(workload, seed=7, checkpoints=Checkpoints(tmp_path / "c.pt", "trial", 60))
    arguments, given, files, folder = json.loads((tmp_path / "artifacts" / "seen").read_text())
    assert arguments == [
        *("7", "10", "cpu", "--x=two words", "0.001", "true", "{}"),
        *(given[f"ABLATE_{name}"] for name in ("RECIPE", "CONFIG", "CHECKPOINT", "FOLDER")),
    ]
    assert (given["ABLATE_SEED"], given["ABLATE_STEPS"], given["ABLATE_DEVICE"]) == ("7", "10", "cpu")
    assert files["ABLATE_CONFIG"] == config
    assert files["ABLATE_RECIPE"] == PRESETS["bf16"]().model_dump(mode="json")
    assert Path(folder) == tmp_path


def test_it_records_the_kind_of_processor_on_which_it_ran(tmp_path, monkeypatch):
    workload, kinds = command(tmp_path, 'print(\'{"step": 1, "val/loss": 1}\')'), []
    for value in (None, None, "COMPATIBLE"):
        monkeypatch.delenv("MKL_CBWR", raising=False)
        if value:
            monkeypatch.setenv("MKL_CBWR", value)
        kinds.append(records(workload)[-1].metrics[ARITHMETIC])
    assert kinds[0] == kinds[1] != kinds[2]


def test_its_checkpoint_folder_survives_a_failed_attempt_and_goes_after_a_finished_one(tmp_path):
    code = """
import os
mark = os.path.join(os.environ["ABLATE_CHECKPOINT"], "mark")
if not os.path.exists(mark):
    open(mark, "w").close()
    raise SystemExit(3)
print('{"step": 1, "val/loss": 1}')
"""
    workload = command(tmp_path, code)
    with pytest.raises(RuntimeError, match="exit status 3"):
        records(workload, checkpoints=Checkpoints(tmp_path / "c.pt", "trial", 60))
    assert list((tmp_path / "command" / "checkpoint").iterdir())
    found = records(workload, checkpoints=Checkpoints(tmp_path / "c.pt", "trial", 60))
    assert values(found) == {1: 1.0}
    assert not (tmp_path / "command" / "checkpoint").exists()


@pytest.mark.parametrize("kept", ["step, value, speed", "step, value"])
def test_check_compares_a_command_that_continues_from_its_own_checkpoint(kept, tmp_path):
    code = """
import json, os, time
path = os.path.join(os.environ["ABLATE_CHECKPOINT"], "state.json")
step, value, speed = 0, float(os.environ["ABLATE_SEED"]), 1.0
if os.path.exists(path):
    KEPT = json.load(open(path))
while step < 10:
    step, value, speed = step + 1, value + speed, speed * 0.5 + 1
    print(json.dumps({"step": step, "val/loss": value}), flush=True)
    with open(path + ".new", "w") as file:
        json.dump([KEPT], file)
    os.replace(path + ".new", path)
    time.sleep(0.05)
""".replace("KEPT", kept)
    found = list(promises(Runs(command(tmp_path, code), recipe=PRESETS["bf16"]())))
    last = found[-1]
    assert last.name == "it resumes bit for bit"
    assert all(promise.kept for promise in found[:-1])
    assert last.kept is ("speed" in kept)
    assert ("continued: equal to the bit" in last.detail) is last.kept


# --- what it may print --------------------------------------------------------------------------------


def test_lines_with_a_step_are_metrics_and_all_others_go_to_the_log(tmp_path, capsys):
    code = r"""
print("hello")
print('{"broken": ')
print('[1, 2]')
print('{"val/loss": 5}')
print('{"step": 0, "val/loss": 5}')
print('{"step": "2", "val/loss": 5}')
print('{"step": 2, "val/loss": 3, "note": "text", "flag": true}')
print('{"step": 2, "train/loss": 4}')
print('{"step": 9, "val/loss": 2}', end="")
"""
    found = records(command(tmp_path, code))
    assert values(found) == {2: 3.0, 9: 2.0}
    assert values(found, "train/loss") == {2: 4.0}
    assert [record.metrics["tokens"] for record in found] == [2.0, 9.0]
    printed = capsys.readouterr().out.splitlines()
    assert {"hello", '{"broken": ', "[1, 2]", '{"val/loss": 5}', '{"step": 0, "val/loss": 5}'} <= set(printed)


def test_a_line_without_an_end_is_cut(tmp_path, capsys):
    code = f"print('x' * {32 * LONGEST_LINE})\n" + PLAIN
    assert len(records(command(tmp_path, code))) == 3
    assert len(capsys.readouterr().out) == LONGEST_LINE + 1


def test_a_bad_name_is_left_out_and_the_rest_is_kept_and_sent(tmp_path, capsys):
    code = r"""
import json
bad = ["\ud800", "a\nb", "\x1b[31m", "loss (%)", "../up", "x" * 300]
for step in (1, 2):
    print(json.dumps({"step": step, "val/loss": 1, "acc@5": 2, "large": 10**400} | dict.fromkeys(bad, 1)))
"""
    (tmp_path / "script.py").write_text(code)
    path = experiment(tmp_path, "{run: python script.py, config: {lr: 1, 'odd (%)': 1}, steps: 2}")
    state = tmp_path / "state"
    outcome, _ = sweep(load(path, device="cpu"), state, url(tmp_path / "mlflow.db"))
    assert outcome.status == "done"
    book = ledger(state, "own")
    assert set(book.last_values(1)) - {"tokens", "memory/rss", ARITHMETIC} == {"val/loss", "acc@5"}
    assert (behind(book), {member.closed for member in book.members()}) == (0, {True})
    printed = capsys.readouterr().out.splitlines()
    assert sum(" is left out: names have" in line for line in printed) == 6 * len(book.members())
    book.close()


def test_with_metrics_in_a_file_lines_of_standard_output_are_none(tmp_path):
    code = """
import os
print('{"step": 1, "val/loss": 9}')
with open(os.environ["ABLATE_METRICS"], "a") as file:
    file.write('{"step": 4, "val/loss": 1}\\n')
"""
    assert values(records(command(tmp_path, code, metrics="file"))) == {4: 1.0}
    both = records(command(tmp_path, code))
    assert values(both) == {1: 9.0, 4: 1.0}


def test_a_loss_that_is_not_finite_ends_the_command_as_diverged(tmp_path):
    code = """
import time
for step in range(1, 10):
    print('{"step": %d, "train/loss": %s}' % (step, "NaN" if step == 3 else "1"))
time.sleep(600)
"""
    found = records(command(tmp_path, code))
    assert [record.step for record in found] == [1, 2, 3]
    assert found[-1].metrics["nan/first_step"] == 3


def test_a_loss_beyond_its_guard_ends_the_command_as_diverged(tmp_path):
    code = """
import time
for step in range(1, 60):
    print('{"step": %d, "train/loss": %s}' % (step, 3 if step == 40 else 1))
time.sleep(600)
"""
    guarded = command(tmp_path, code, steps=60, guard_loss=2.0)
    last = records(guarded)[-1]
    assert (last.step, last.metrics["guard/stopped"], last.verdict.cause.ratio) == (40, 40, 3)
    free = command(tmp_path, code, steps=60)
    assert (free.identity(), free.watch) == (guarded.model_copy(update={"guard_loss": None}).identity(), None)


@pytest.mark.parametrize(
    ("code", "error", "sentence"),
    [
        ("print('hello')", RuntimeError, "ended without metrics"),
        ("raise SystemExit(5)", RuntimeError, "exit status 5"),
        ("raise ValueError('my reason')", RuntimeError, "exit status 1: ValueError: my reason"),
        ("import os; os.kill(os.getpid(), 9)", RuntimeError, "killed by signal 9"),
        (PLAIN + "raise SystemExit(1)", RuntimeError, "exit status 1"),
        ("""print('{"step": 5}'); print('{"step": 4}')""", RuntimeError, "step 4, which comes after step 5"),
        ("""print('{"step": 11}')""", RuntimeError, "step 11, which is beyond step 10"),
    ],
)
def test_a_bad_end_is_named(code, error, sentence, tmp_path):
    with pytest.raises(error, match=sentence):
        records(command(tmp_path, code))


@pytest.mark.parametrize(
    "reason", ["MemoryError", "RuntimeError('CUDA out of memory. Tried to allocate 2 GiB')"]
)
def test_a_command_without_memory_is_no_failure_to_retry(reason, tmp_path):
    workload = command(tmp_path, f"{PLAIN}\nraise {reason}")
    with pytest.raises(OutOfMemory, match=r"out of memory after step 2|out of memory after step 3"):
        list(
            within_memory(
                (
                    {"step": record.step}
                    for record in workload.records(TrialRun(PRESETS["bf16"](), 0, "emulated", "cpu", OFTEN))
                ),
                "cpu",
            )
        )


# --- the recipe is confirmed --------------------------------------------------------------------------


def test_a_script_that_ignores_the_recipe_is_refused_and_told_how(tmp_path):
    workload = command(tmp_path, PLAIN)
    assert values(records(workload)) == {1: 1.0, 2: 0.5, 3: pytest.approx(1 / 3)}
    with pytest.raises(
        RuntimeError, match=r"without confirming the recipe; read the recipe from .*ABLATE_RECIPE"
    ):
        records(workload, "nvfp4")
    with pytest.raises(RuntimeError, match="ended without confirming"):
        records(command(tmp_path, "pass"), "nvfp4")


def test_any_code_can_confirm_by_the_hash_of_the_file(tmp_path):
    code = """
import hashlib, json, os
with open(os.environ["ABLATE_RECIPE"], "rb") as file:
    print(json.dumps({"ablate/recipe": hashlib.sha256(file.read()).hexdigest()[:16]}))
"""
    assert len(records(command(tmp_path, code + PLAIN), "nvfp4")) == 3
    wrong = code.replace("file.read()", "b''")
    with pytest.raises(RuntimeError, match=f"confirms recipe '{hashlib.sha256(b'').hexdigest()[:16]}'"):
        records(command(tmp_path, wrong + PLAIN), "nvfp4")


@pytest.mark.slow
def test_convert_confirms_the_recipe_that_it_was_given(tmp_path, capsys):
    shutil.copy(OWN_COMMAND / "train.py", tmp_path)
    run = "python train.py --lr {lr} --seed {seed} --steps {steps}"
    workload = Command(run=run, folder=str(tmp_path), steps=3, config={"lr": 0.01})
    assert sorted(values(records(workload, "nvfp4"), "train/loss")) == [1, 2, 3]
    script = tmp_path / "train.py"
    script.write_text(script.read_text().replace("ablate.recipe(),", '"mxfp4",'))
    with pytest.raises(RuntimeError, match="without confirming the recipe"):
        records(workload, "nvfp4")
    assert "ablate.convert got another recipe than that of ABLATE_RECIPE" in capsys.readouterr().err


def test_a_command_over_workload_fields_alone_imports_nothing_of_ours(tmp_path):
    code = "import sys\nassert not any(name.startswith('ablate') for name in sys.modules)\n" + PLAIN
    assert len(records(command(tmp_path, code, "python -I script.py"))) == 3


def test_outside_of_a_sweep_log_does_nothing_and_says_so_once():
    code = "import ablate\nfor step in (1, 2): ablate.log({'loss': 1.0}, step=step)\nassert 'torch' not in __import__('sys').modules"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ABLATE_")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ("ablate.log({'loss': 'low'}, step=1)", "loss is 'low', which is no number"),
        ("ablate.log({'loss': 10**400}, step=1)", "loss is 10+, which is no number"),
        ("ablate.log({'loss': 1.0}, step=0)", "step is 0"),
        ("ablate.log({'': 1.0}, step=1)", "is no name of a metric"),
        ("ablate.recipe()", "ABLATE_RECIPE is not set"),
    ],
)
def test_wrong_calls_are_refused(call, sentence, monkeypatch):
    import ablate

    monkeypatch.delenv("ABLATE_RECIPE", raising=False)
    with pytest.raises(ValueError, match=sentence):
        eval(call, {"ablate": ablate})


# --- it ends, with all of its children ----------------------------------------------------------------

FAMILY = """
import json, os, subprocess, sys, time
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
own_session = "import os, time; os.setsid(); time.sleep(600)"
children = [subprocess.Popen([sys.executable, "-c", code]).pid for code in (child, own_session)]
with open("pids.part", "w") as file:
    json.dump([os.getpid(), *children], file)
time.sleep(0.5)
os.rename("pids.part", "pids")
print('{"step": 1, "val/loss": 1}')
print('{"step": 2, "val/loss": 1}')
"""


def pids(folder: Path) -> list[int]:
    until((folder / "pids").exists)
    return json.loads((folder / "pids").read_text())


def test_children_end_with_a_command_that_ends_by_itself(tmp_path):
    assert len(records(command(tmp_path, FAMILY))) == 2
    assert not any(map(alive, pids(tmp_path)))


def test_command_and_children_end_with_a_trial_that_is_closed(tmp_path):
    running = command(tmp_path, FAMILY + "time.sleep(600)").records(
        TrialRun(PRESETS["bf16"](), 0, "emulated", "cpu", OFTEN)
    )
    next(running)
    family = pids(tmp_path)
    assert all(map(alive, family))
    running.close()
    assert not any(map(alive, family))


def request(workload: Command, root: Path, patience: float) -> TrialRequest:
    one = spec(workload)
    return TrialRequest(one.id, one.wire, str(root), 0, {"log": 1}, patience=patience)


@pytest.mark.slow
def test_a_command_that_hangs_is_ended_with_its_children(tmp_path):
    supervisor = Supervisor()
    try:
        *_, last = supervisor.run(
            request(command(tmp_path, FAMILY + "time.sleep(600)"), tmp_path / "state", 2.0)
        )
        assert isinstance(last, Ended)
        assert (last.status, last.reason.partition(" for ")[0]) == ("failed", "no step")
        until(lambda: not any(map(alive, pids(tmp_path))))
    finally:
        supervisor.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_no_process_outlives_a_trial_and_the_next_attempt_waits_for_them(how, tmp_path):
    """`killed`: the supervisor's own process, and with it everything that could clean up."""
    code = FAMILY + "time.sleep(600)"
    wire = request(command(tmp_path, code), tmp_path / "state", 60.0)
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, threading\nfrom ablate.execution.supervisor import Supervisor\n"
            "from ablate.execution.messages import TrialRequest\n"
            "supervisor = Supervisor()\n"
            "threading.Thread(target=lambda: (sys.stdin.readline(), supervisor.stop()), daemon=True).start()\n"
            f"for message in supervisor.run(TrialRequest.parse({wire.line()!r})): pass\n"
            "supervisor.close()",
        ],
        stdin=subprocess.PIPE,
    )
    try:
        until((tmp_path / "pids").exists, 60)
        family = pids(tmp_path)
        assert all(map(alive, family))
        if how == "killed":
            holder.send_signal(signal.SIGKILL)
        else:
            holder.stdin.write(b"\n")
            holder.stdin.flush()
        holder.wait(30)
        (tmp_path / "script.py").write_text(code)
        check = (
            f"import os, json\nfamily = {family}\n"
            "state = [open(f'/proc/{pid}/stat').read().rsplit(') ')[1][0] for pid in family"
            " if os.path.exists(f'/proc/{pid}/stat')]\n"
            "print(json.dumps({'step': 1, 'alive': sum(s != 'Z' for s in state)}))\n"
        )
        (tmp_path / "check.py").write_text(check)
        (own,) = (tmp_path / "state").rglob("command")
        found = records(
            Command(run="python check.py", folder=str(tmp_path), steps=1),
            checkpoints=Checkpoints(own.parent / "checkpoint.pt", "trial", 60),
        )
        assert values(found, "alive") == {1: 0.0}
    finally:
        holder.kill()
        holder.wait()
        holder.stdin.close()


LINGERING = """
import json, os, signal, sys, time

def end(number, frame):
    time.sleep(0.5)  # saves its work
    with open(os.environ["ABLATE_METRICS"], "a") as file:
        print(json.dumps({"step": 9, "val/loss": 9.0}), file=file)
    sys.exit()

signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(600)
"""


def test_what_a_killed_attempts_command_logs_while_it_ends_is_read_by_the_next_attempt(tmp_path):
    (tmp_path / "lingering.py").write_text(LINGERING)
    places = [sys.executable, tmp_path / "lingering.py", tmp_path / "own"]
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from ablate.training.own_code.command_process import held, started\n"
        "python, script, own = sys.argv[1:]\n"
        "with held(Path(own)) as lock, started([python, script], Path(), {}, Path(own), lock) as process:\n"
        "    for batch in process.batches(): print(batch, flush=True) if batch else None\n"
    )
    (tmp_path / "own").mkdir()
    with subprocess.Popen([sys.executable, "-c", code, *places], stdout=subprocess.PIPE) as attempt:
        assert b"ready" in attempt.stdout.readline()
        attempt.kill()
    with held(tmp_path / "own") as lock:
        before = [[line for batch in batches for line in batch] for batches in earlier(tmp_path / "own")]
        assert before == [[Line('{"step": 9, "val/loss": 9.0}', True), Line("ready", False)]]
        with started([sys.executable, "-c", "print(1)"], tmp_path, {}, tmp_path / "own", lock) as process:
            assert [line for batch in process.batches() for line in batch] == [Line("1", False)]


CONTINUED = """
import json, os, time
path = os.path.join(os.environ["ABLATE_CHECKPOINT"], "step")
step = int(open(path).read()) if os.path.exists(path) else 0
if step == 40:
    open(os.path.join(os.environ["ABLATE_FOLDER"], "again"), "w").close()
while step < 40:
    step += 1
    print(json.dumps({"step": step, "train/loss": 1 / step}))
    if step % 10 == 0:
        print(json.dumps({"step": step, "val/loss": 2 / step}))
    if step % EVERY == 0:
        with open(path + ".new", "w") as file:
            file.write(str(step))
        os.replace(path + ".new", path)
    time.sleep(0.002)
open(os.path.join(os.environ["ABLATE_FOLDER"], "ended"), "w").close()
time.sleep(600 if not os.path.exists(os.path.join(os.environ["ABLATE_FOLDER"], "again")) else 0)
"""
"""A command that continues from its own checkpoint, and whose first run is killed after its last step."""


@pytest.mark.parametrize("every", [1, 7, 40, 99])
def test_no_line_is_lost_of_a_command_that_is_ahead_of_its_reader_when_it_is_killed(every, tmp_path):
    """It continues behind those lines, repeats some of them, has nothing left to do, or begins anew."""
    one = spec(command(tmp_path, CONTINUED.replace("EVERY", str(every)), steps=40))
    store, ended = Store(tmp_path / "state"), store_file(tmp_path, one.id, "ended")
    first = run(one, store, store.begin(one.id), {"log": 1})
    next(first)
    until(ended.exists)
    first.close()
    ended.with_name("again").touch()
    told = list(run(one, store, store.begin(one.id), {"log": 1}))
    for events in (told, store.proven(one.id, store.result(one.id))):
        found = {(event["step"], name): value for event in events for name, value in event["metrics"].items()}
        assert {key: found[key] for key in found if key[1] == "train/loss"} == {
            (step, "train/loss"): 1 / step for step in range(1, 41)
        }
        assert {key for key in found if key[1] == "val/loss"} == {
            (step, "val/loss") for step in (10, 20, 30, 40)
        }
    assert sorted(path.name for path in (store.folder(one.id) / "command").iterdir()) == [
        *("config.json", "lock", "recipe.json")
    ]


AHEAD = """
import json, os
folder, seed = os.environ["ABLATE_CHECKPOINT"], os.environ["ABLATE_SEED"]
path = os.path.join(folder, "step")
step = int(open(path).read()) if os.path.exists(path) else 0
while step < 9:
    step += 1
    with open(path, "w") as file:
        file.write(str(step))
    if (step, seed) == (6, BAD) and not os.path.exists("failed" + seed + LR):
        open("failed" + seed + LR, "w").close()
        raise SystemExit(3)
    print(json.dumps({"step": step, "val/loss": 1 / step}), flush=True)
"""
"""A command whose checkpoint is ahead of what it has printed, of which one seed fails between the two."""


@pytest.mark.parametrize("bad", ["0", "1"])
def test_a_curve_with_a_hole_beside_other_seeds_is_computed_again(bad, tmp_path, monkeypatch):
    """At once if another seed has ended; else by the next start, since the trial fails when another seed ends."""
    monkeypatch.chdir(tmp_path)
    code = AHEAD.replace("BAD", repr(bad)).replace("LR", "__import__('sys').argv[1]")
    (tmp_path / "script.py").write_text(code)
    path = experiment(tmp_path, "{run: 'python script.py {lr}', config: {lr: 1}, steps: 9}", seeds="2")
    state = tmp_path / "state"

    def to_its_end() -> tuple[str, list[str]]:
        while True:
            with suppress(CommandError):  # ends the whole sweep here, as a kill does
                outcome, news = sweep(load(path, device="cpu"), state)
                return outcome.status, news

    ends, news = to_its_end()
    if bad == "0":
        with closing(ledger(state, "own")) as book:
            news = [member.reason for member in book.members() if member.status == "failed"]
        assert (ends, to_its_end()[0]) == ("failed", "done")
    assert sum(
        "lacks 1 values of other seeds, the first val/loss at step 6" in line for line in news
    ) == 2 - int(bad)
    with closing(ledger(tmp_path / "state", "own")) as book:
        curves = [book.series(member.trial, "val/loss") for member in book.members()]
    assert curves == [{step: 1 / step for step in range(1, 10)}] * 4
    assert len([*(tmp_path / "state" / "retired").iterdir()]) == 2


def test_a_finished_curve_with_a_hole_is_computed_again_only_if_its_run_was_interrupted(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(PLAIN.replace("4", "10"))
    path = experiment(tmp_path, "{run: 'python script.py {lr}', config: {lr: 1}, steps: 9}", seeds="2")
    state = tmp_path / "state"
    sweep(load(path, device="cpu"), state)
    with closing(ledger(state, "own")) as book:
        first, second = (member.id for member in book.members()[::2])
    for trial, attempts in ((first, 1), (second, 2)):
        store, result = Store(state), Store(state).result(trial)
        events = [event for event in store.proven(trial, result) if event["step"] not in (4, 5)]
        spec = json.loads((store.folder(trial) / "spec.json").read_bytes())
        store.retire(trial)
        for _ in range(attempts - 1):
            store.begin(trial)
        store.add(trial, spec, events, result)
    (state / "sweeps" / "own" / "ledger.db").unlink()
    outcome, news = sweep(load(path, device="cpu"), state)
    assert (outcome.ran, outcome.reused) == (1, 3)
    assert [line.partition(": ")[0] for line in news if "lacks 2 values" in line] == [
        str(store.folder(second))
    ]


def store_file(folder: Path, trial: str, name: str) -> Path:
    """A file in a trial's folder of artifacts."""
    return folder / "state" / "trials" / trial / "artifacts" / name


def test_a_line_that_a_kill_cut_is_no_metric_of_the_next_attempt(tmp_path):
    runs = tmp_path / "runs"
    for number, text in enumerate(
        ('{"step": 1}\n{"step": 2}', "loss: 1.25\nloss: 1.2", '{"step": 3, "x": 1'), 1
    ):
        (runs / str(number)).mkdir(parents=True)
        (runs / str(number) / "output").write_text(text)
    (runs / "10").mkdir()
    (runs / "stray").mkdir()
    found = [[line.text for batch in batches for line in batch] for batches in earlier(tmp_path)]
    assert found == [['{"step": 1}', '{"step": 2}'], ["loss: 1.25"], [], []]


# --- what identifies it -------------------------------------------------------------------------------


def test_a_commands_bytecode_from_before_an_edit_is_not_run(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    program = "import json\nfrom helper import VALUE\nprint(json.dumps({'step': 1, 'val/loss': VALUE}))\n"
    helper, losses = tmp_path / "helper.py", []
    for value in ("1.0", "2.0"):
        helper.write_text(f"VALUE = {value}\n")
        os.utime(helper, (10**9, 10**9))
        losses += values(records(command(tmp_path, program))).values()
        assert [*(tmp_path / "__pycache__").glob("helper.*.pyc")]
    assert losses == [1.0, 2.0]


def test_a_null_byte_in_a_source_is_refused_at_its_line(tmp_path):
    script = tmp_path / "train.py"
    script.write_bytes(b"x = 1\ny = 2\0\n")
    command = Command(run=f"python {script}", steps=3, folder=str(tmp_path))
    ((key, why),) = command.problems()
    assert key == "sources"
    assert why.startswith(f"{script}:2: ")


def test_content_of_sources_data_and_config_identify_it_and_their_places_do_not(tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    (here / "helper.py").write_text("VALUE = 1\n")
    (here / "data.bin").write_bytes(b"1")
    (here / "notes.txt").write_text("unrelated")

    def named(folder: Path = here, run: str = "python script.py --lr {lr}", **fields) -> str:
        return spec(Command(**{"run": run, "folder": str(folder), "config": {"lr": 1.0}} | fields)).id

    (here / "script.py").write_text("import helper\n")
    before = named()
    (here / "notes.txt").write_text("changed")
    assert named() == before
    assert named(Path(shutil.copytree(here, tmp_path / "there"))) == before
    absolute = [
        named(folder, f"python {folder}/script.py --lr {{lr}}") for folder in (here, tmp_path / "there")
    ]
    assert absolute == [before, before]
    ids = {before, named(config={"lr": 2.0}), named(run="python script.py --rate {lr}")}
    ids |= {named(sources=(str(here / "*.py"), str(here / "notes.txt")))}
    ids |= {named(data=(str(here / "data.bin"),))}
    (here / "data.bin").write_bytes(b"2")
    ids |= {named(data=(str(here / "data.bin"),))}
    (here / "helper.py").write_text("VALUE = 2\n")
    ids |= {named()}
    (here / "script.py").write_text("import helper  # edited\n")
    ids |= {named()}
    assert len(ids) == 8


def experiment(folder: Path, workload: str, **lines: str) -> Path:
    parts = {
        "ablate": "{workload.config.lr: [0.1, 0.2]}",
        "recipe": "bf16",
        "against": "{workload.config.lr: 0.1}",
    }
    path = folder / "own.yaml"
    path.write_text(
        f"schema: 1\nquestion: Does it?\nworkload: {{command: {workload}}}\n"
        + "".join(f"{key}: {value}\n" for key, value in (parts | lines).items())
    )
    return path


@pytest.mark.parametrize(
    ("workload", "sentence"),
    [
        (
            "{run: 'python script.py {sed}', config: {lr: 1}}",
            r"3:22: workload\.command\.run: .*no such placeholder: \{sed\}; 'seed' is the nearest",
        ),
        (
            "{run: 'python script.py {lrr}', config: {lr: 1}}",
            r"no such placeholder: \{lrr\}; 'lr' is the nearest",
        ),
        (
            "{run: 'python script.py {lr', config: {lr: 1}}",
            r"3:22: workload\.command\.run: .*cannot be split",
        ),
        ('{run: "python \'script.py", config: {lr: 1}}', r"3:22: workload\.command\.run: .*cannot be split"),
        ("{run: 'python script.py {lr:.3f}', config: {lr: 1}}", r"\{lr\} takes no format"),
        ("{run: 'no-such-program script.py', config: {lr: 1}}", "no such program: no-such-program"),
        ("{run: 'python -m package', config: {lr: 1}}", r"workload\.command\.sources: .*run names no file"),
        ("{run: python script.py, sources: [nothing.py], config: {lr: 1}}", "nothing.py: no such file"),
        ("{run: python script.py, config: {lr: 1, seed: 2}}", r"config\.seed: .*is a placeholder of every"),
        ("{sources: [script.py]}", "run: is missing"),
    ],
)
def test_mistakes_are_named_at_their_place(workload, sentence, tmp_path):
    (tmp_path / "script.py").write_text(PLAIN)
    with pytest.raises(InputError, match=sentence):
        load(experiment(tmp_path, workload), device="cpu")


# --- a whole sweep ------------------------------------------------------------------------------------


def test_an_experiment_names_files_beside_it(tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    (tmp_path / "script.py").write_text(PLAIN)
    found = load(experiment(tmp_path, "{run: 'python script.py {lr}', config: {lr: 1}}"), device="cpu")
    assert {arm.config.config["lr"] for arm in found.arms} == {0.1, 0.2}
    assert all(Path(arm.config.folder) == tmp_path for arm in found.arms)


@pytest.mark.slow
@pytest.mark.parametrize("connect", [Inline, Children], ids=["in this process", "supervised"])
def test_a_sweep_of_two_knobs_and_two_seeds_runs_all_trials_and_reuses_them(connect, tmp_path):
    """`supervised`: in a process of its own under a supervisor, as a Ray worker runs a trial."""
    shutil.copy(OWN_COMMAND / "light.py", tmp_path)
    path = experiment(
        tmp_path,
        "{run: 'python light.py {lr} {seed}', config: {lr: 0.1}, steps: 5}",
        ablate="{sr: [true, false], workload.config.lr: [0.1, 0.2]}",
        recipe="nvfp4",
        against="bf16",
        seeds="2",
    )
    ends = [sweep(load(path, device="cpu"), tmp_path / "state", connect=connect)[0] for _ in range(2)]
    # Four arms, and two baselines: one for each learning rate.
    assert [(end.ran, end.reused, end.failed) for end in ends] == [(12, 0, 0), (0, 12, 0)]
    results = [json.loads(file.read_text()) for file in (tmp_path / "state").glob("trials/*/result.json")]
    assert len(results) == 12
    assert {result["status"] for result in results} == {"done"}
    assert {result["steps"] for result in results} == {5}
    assert {result["attempt"] for result in results} == {1}


# --- logs of training stacks ----------------------------------------------------------------------

TITAN = "step: {:2}  loss: {:8.5f}  grad_norm:  1.0000  memory:  2.11GiB(2.67%)  tps: 9,871  tflops: 0.01  mfu: N/A"
STACKS = {
    "torchtitan": ("torchtitan", TITAN),
    "megatron": (
        "megatron",
        " iteration {:8d}/     10 | lm loss: {:.6E} | number of skipped iterations:   0 | number of nan iterations:"
        "   0 |",
    ),
    "modded-nanogpt": ("modded-nanogpt", "step:{}/10 train_loss:{:.4f} train_time:630ms step_avg:63.00ms"),
    "regex": ({"regex": r"iter (?P<step>\d+): (?P<loss>\S+)"}, "iter {}: {}"),
}


def printing(form: str, values: list[tuple[int, float]]) -> str:
    """Return a script that prints each step and loss in a form."""
    return f"nan = float('nan')\nfor pair in {values!r}:\n    print({form!r}.format(*pair))\n"


@pytest.mark.parametrize("stack", STACKS)
def test_a_stacks_own_lines_are_metrics_and_stay_in_the_log(stack, tmp_path, capsys):
    metrics, form = STACKS[stack]
    code = printing(form, [(5, 2.5), (10, 2.25)]) + 'print(\'{"step": 7, "loss": 1}\')'
    found = records(command(tmp_path, code, metrics=metrics))
    assert values(found, "train/loss") == {5: 2.5, 10: 2.25}
    assert [record.step for record in found] == [5, 10]
    printed = capsys.readouterr().out.splitlines()
    assert form.format(5, 2.5) in printed
    assert '{"step": 7, "loss": 1}' in printed


def test_steps_that_a_restarted_stack_repeats_keep_their_first_version(tmp_path, capsys):
    code = printing(TITAN, [(2, 2.5), (4, 2.25), (2, 2.0), (4, 2.25), (6, 2.125)])
    found = records(command(tmp_path, code, metrics="torchtitan"))
    assert values(found, "train/loss") == {2: 2.5, 4: 2.25, 6: 2.125}
    assert "its first version counts" in capsys.readouterr().out


def test_ranks_that_print_different_losses_of_a_step_are_refused(tmp_path):
    code = printing(TITAN, [(2, 2.5), (2, 2.25)])
    with pytest.raises(RuntimeError, match=r"train/loss twice at step 2, 2\.5 and 2\.25"):
        records(command(tmp_path, code, metrics="torchtitan"))


def test_a_line_that_is_cut_is_left_out_and_said(tmp_path, capsys):
    code = printing(TITAN, [(2, 2.5)]) + printing(TITAN[:30], [(4, 2.25)])
    assert values(records(command(tmp_path, code, metrics="torchtitan")), "train/loss") == {2: 2.5}
    assert "left out: torchtitan's line of step 4 is cut" in capsys.readouterr().out


def test_a_stacks_loss_that_is_not_finite_ends_the_command_as_diverged(tmp_path):
    code = printing(TITAN, [(2, 2.5), (4, float("nan")), (6, 2.0)])
    found = records(command(tmp_path, code, metrics="torchtitan"))
    assert [record.step for record in found] == [2, 4]
    assert found[-1].metrics["nan/first_step"] == 4


@pytest.mark.parametrize(
    ("metrics", "sentence"),
    [
        ("hf", "logging_steps"),
        ("lightning", "CSVLogger"),
        ({"regex": "("}, "unterminated"),
        ({"regex": "x"}, "step"),
    ],
)
def test_a_log_that_cannot_be_read_is_refused_before_it_runs(metrics, sentence, tmp_path):
    assert [(field, sentence in why) for field, why in command(tmp_path, "", metrics=metrics).problems()] == [
        ("metrics", True)
    ]


def test_the_format_of_a_log_is_part_of_the_identity_and_that_of_json_is_not(tmp_path):
    forms = [
        "stdout",
        "file",
        "torchtitan",
        {"hf": 10},
        {"hf": 20},
        {"regex": r"(?P<step>\d+) (?P<loss>\S+)"},
    ]
    ids = [spec(command(tmp_path, "", metrics=form)).id for form in forms]
    assert ids[0] == ids[1]
    assert len({*ids}) == 5


def test_a_script_that_is_not_there_is_named_before_anything_runs(tmp_path):
    (tmp_path / "data.json").write_text("{}")
    for words in ("python nope.py {seed}", "python -u nope.py data.json", "torchrun --nproc 2 nope.py"):
        missing = Command(run=words.replace("torchrun", "python"), folder=str(tmp_path))
        ((field, why),) = missing.problems()
        assert (field, why.partition(":")[0]) == ("run", "nope.py")
    (tmp_path / "nope.py").write_text("")
    assert not list(Command(run="python nope.py {seed}", folder=str(tmp_path)).problems())


def test_folders_of_unknown_users_are_named_at_their_places(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text(
        "schema: 1\nquestion: q\nrecipe: nvfp4\nablate: {rht: [true, false]}\nagainst: bf16\n"
        "metric: {name: val/loss, direction: minimize}\n"
        "workload: {command: {run: 'true', folder: ~nobody-here/x, data: [~nobody-here/y]}}\n"
    )
    with pytest.raises(InputError) as raised:
        load(file)
    places = [line.partition("x.yaml:")[2].split(": ")[:2] for line in str(raised.value).splitlines()]
    assert ["7:35", "workload.command.folder"] in places
    assert ["7:59", "workload.command.data"] in places
