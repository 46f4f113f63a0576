"""Clusters: nodes without the state folder, of other versions, with tokens; gangs among small trials. Real heads and nodes throughout."""

import ast
import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from chaos import audit
from support.clusters import FEW_VERBS, OPEN, STARTS_RAY, Pair, blocker, can_hide, head, node, nodes
from support.experiments import (
    ablate,
    end,
    environment,
    ledger,
    shards,
    statuses,
    sweep,
    tiny,
    until,
    write,
)
from support.gates import customised
from support.services import free_port, trials_in

from ablate import numerics

pytestmark = STARTS_RAY
apart = pytest.mark.skipif(
    not can_hide(), reason="takes a mount namespace, to hide a folder from a node: run as root, with unshare"
)
NOT_FOR_WORKERS = (
    "mlflow",
    "optuna",
    "pandas",
    "seaborn",
    "matplotlib",
    "IPython",
    "plotly",
    "optuna_dashboard",
    "statsmodels",
)


SWEEP = """
import sys, time
from pathlib import Path
import ray
from ablate.execution.controller import Controller
from ablate.execution.progress import Outcome
from ablate.experiment.load import load
from ablate.execution.workers import ClusterError, Pool
address, most, nodes, sizes, *pairs = sys.argv[1:]
for ranks in map(int, sizes.split(",")):
    try:
        pool = Pool(address, int(most) or None, 0, ranks)
    except ClusterError as error:
        print(error, flush=True)
        continue
    while int(nodes) and sum(node["Alive"] and "CPU" in node["Resources"] for node in ray.nodes()) != int(nodes):
        time.sleep(0.05)
    print("ready", flush=True)
    sys.stdin.readline()
    close, pool.close = pool.close, lambda: None  # its workers stay for the next sweep
    failed = 0
    for path, state in zip(pairs[::2], pairs[1::2]):
        for step in Controller(load(Path(path)), Path(state), "cpu", lambda: pool, None).run():
            for line in () if isinstance(step, Outcome) else step.news:
                print(line, flush=True)
        failed += step.failed
    close()
    sys.exit(failed > 0)
"""


@contextlib.contextmanager
def sweeping(
    address: str, *sweeps: tuple[Path, Path], ranks: tuple[int, ...] = (1,), most: int = 0, nodes: int = 0
) -> Iterator[subprocess.Popen]:
    """Sweeps, one after the other, in a process of their own, without what the command does before and after.

    Trials take as many of these ranks as the cluster can hold, and begin once the process is told a line.

    Args:
        address: of the cluster.
        sweeps: (experiment file, state folder) of each.
        ranks: numbers of ranks of a trial, the first of which that the cluster can hold is taken.
        most: trials at once; 0 for all that there is room for.
        nodes: the process is ready once Ray lists so many as alive; 0 for at once.
    """
    sizes, pairs = ",".join(map(str, ranks)), [str(path) for pair in sweeps for path in pair]
    command = [sys.executable, "-c", SWEEP, address, str(most), str(nodes), sizes, *pairs]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(
        command, cwd=sweeps[0][0].parent, text=True, env=environment(**OPEN), start_new_session=True, **pipes
    )
    try:
        yield process
    finally:
        end(process)


def swept(address: str, *sweeps: tuple[Path, Path], ranks: tuple[int, ...] = (1,)) -> tuple[int, str]:
    """The sweeps, to their end: the status and what was said."""
    with sweeping(address, *sweeps, ranks=ranks) as process:
        said, _ = process.communicate("\n", timeout=600)
    return process.returncode, said


CLIENT_PORT = free_port()
"""Port of the head's server of Ray's client."""


@pytest.fixture(scope="module")
def hidden(tmp_path_factory) -> Path:
    """A folder that no part of the cluster sees, if one can be hidden here."""
    return tmp_path_factory.mktemp("hidden")


@pytest.fixture(scope="module")
def address(hidden) -> Iterator[str]:
    """A head for all tests of this file: what one does must not harm the next. It counts a node as lost after 5 s, not 15."""
    hiding = {"hide": hidden} if can_hide() else {}
    with head(
        f"--ray-client-server-port {CLIENT_PORT}", **hiding, **OPEN, RAY_health_check_period_ms="1000"
    ) as found:
        yield found


@pytest.fixture(scope="module")
def standing(address, hidden, tmp_path_factory) -> Iterator[Pair]:
    """Two nodes for all tests below the first that asks for them; those above have the cluster for nodes of their own."""
    found = Pair(address, tmp_path_factory.mktemp("pair"), hidden, NOT_FOR_WORKERS)
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def pair(standing) -> Iterator[Pair]:
    """Both of them, also after a test that has lost one, and the gate open."""
    standing.complete()
    yield standing
    standing.gate.open()


def sound(folder: Path, state: Path, **keys) -> None:
    """The state folder has, record by record and file by file, what a sweep of this process makes."""
    sweep(tiny(folder, **keys), folder / "undisturbed")
    mine, theirs = (root / "sweeps" / "tiny" for root in (state, folder / "undisturbed"))
    assert list(audit.sweep(state, mine, theirs)) == []


def files(state: Path) -> dict[str, set[str]]:
    """The names of what each trial's folder holds, whichever attempt it is of; a lock is left by who held it."""
    return {
        folder.name: {
            re.sub(r"-\d+\.", ".", str(path.relative_to(folder)))
            for path in folder.rglob("*")
            if path.is_file()
        }
        for folder in (state / "trials").iterdir()
    }


# Other versions, and tokens


def test_a_node_without_the_package_is_told_in_a_sentence(address, tmp_path):
    bare = blocker(tmp_path / "bare", "ablate")
    with node(address, **bare, **OPEN):
        words = ("--state", tmp_path / "state", "--mlflow", "none", "--address", address)
        done = ablate("sweep", write(tmp_path, seeds=1), *words, **OPEN)
    assert done.returncode == 2, done.stdout + done.stderr
    said = "has no package ablate, or another version of it: install the same version on every node (pip install ablate-fp4), or send it along"
    assert re.fullmatch(
        rf"node \S+ {re.escape(said)} with `ray job submit --working-dir \.`", done.stderr.splitlines()[-1]
    )


def sent(folder: Path) -> dict[str, str]:
    """An environment with a copy of the package as Ray sends it along with a job: without what git ignores."""
    package = Path(numerics.__file__).parents[1]
    shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("*.so"))
    return {"PYTHONPATH": str(folder)}


def test_a_node_of_another_version_runs_nothing_and_one_without_quantisers_slowly_and_both_are_told(
    address, tmp_path
):
    other = customised(tmp_path / "other", "import ablate.version\nablate.version.__version__ = '0.0.9'\n")
    path, state = write(tmp_path, seeds=1, ablate={"rht": [True]}), tmp_path / "state"
    said = r"node \S+ has ablate 0\.0\.9 \(here \S+\): install the same versions on every node, or run the sweep with the cluster's"
    with nodes(address, other | OPEN, sent(tmp_path / "sent") | OPEN):
        status, told = swept(address, (path, state))
    assert status == 0, told
    assert re.search(said + "; no trial runs there", told)
    assert re.search(
        r"workers on \S+ have no compiled quantisers, and emulate slowly on their CPUs: install the package there",
        told,
    ), told


TOKEN = "a" * 32
WITHOUT = {
    "neither mode nor token": (
        {},
        "the server there refused the connection; .*; here RAY_AUTH_MODE is not set",
    ),
    "no token": ({"RAY_AUTH_MODE": "token"}, "token authentication is on, and there is no token here: .*"),
    "another token": (
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "b" * 32},
        "the server there refused the connection; .*",
    ),
    "authentication turned off": (
        {"RAY_AUTH_MODE": "disabled"},
        "the server there refused the connection; .* RAY_AUTH_MODE is disabled",
    ),
}
CONNECT = """
import os, sys
from ablate.execution.workers import ClusterError
from ablate.execution.workers.cluster import connect
try:
    connect(sys.argv[1], None)
except ClusterError as error:
    print(error)
else:
    print("let in, with", os.environ.get("RAY_AUTH_MODE"))
"""


def test_a_cluster_of_another_version_of_ray_gets_a_hint(address):
    """As this process takes itself for one of another version, it is the cluster that has another."""
    other = "import ray; ray.__version__ = '2.40.0'"
    told = subprocess.run(
        [sys.executable, "-c", other + CONNECT, address],
        env=environment(**OPEN),
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    assert told.startswith(f"Ray cannot be reached at {address}: Version mismatch")
    assert "2.40.0" in told
    assert told.endswith("install the cluster's version of Ray and of Python here\n")


def test_without_the_clusters_token_a_sentence_names_the_variables_and_with_it_nothing_is_turned_off(
    tmp_path,
):
    """The token may stand in a file, too. The command ends with status 2."""
    file, path = tmp_path / "token", write(tmp_path)
    file.write_text(TOKEN)
    words = ("sweep", path, "--state", tmp_path / "state", "--mlflow", "none", "--address")

    def asked(address: str, **extra: str) -> str:
        kept = {
            key: value
            for key, value in environment(**extra, HOME=str(tmp_path)).items()
            if key in extra or "RAY_" not in key
        }
        return subprocess.run(
            [sys.executable, "-c", CONNECT, address], env=kept, capture_output=True, text=True, check=False
        ).stdout

    with (
        head(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN) as address,
        ThreadPoolExecutor() as threads,
    ):  # Ray asks for six seconds
        let_in = threads.submit(asked, address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(file))
        (wrong, said) = WITHOUT["another token"]
        swept = threads.submit(ablate, *words, address, HOME=str(tmp_path), **wrong)
        others = [case for name, case in WITHOUT.items() if name != "another token"]
        answers = list(threads.map(lambda case: asked(address, **case[0]), others))
        assert let_in.result() == "let in, with token\n"
        assert (swept.result().returncode, "Traceback" in swept.result().stderr) == (2, False)
        assert re.fullmatch(
            rf"Ray cannot be reached at {address}: {said}", swept.result().stderr.splitlines()[-1]
        )
        for (_, said), told in zip(others, answers, strict=True):
            assert re.fullmatch(rf"Ray cannot be reached at {address}: {said}\n", told), told
            assert all(
                name in told
                for name in (
                    "RAY_AUTH_MODE=token",
                    "RAY_AUTH_TOKEN",
                    "RAY_AUTH_TOKEN_PATH",
                    "~/.ray/auth_token",
                )
            )


# Gangs


def stream(folder: Path, trials: int) -> Path:
    """An experiment of trials that do nothing for half a second."""
    keys = {
        "workload": {"idle": {"steps": 5, "seconds": 0.1}},
        "ablate": {"workload.x": [0.1]},
        "against": {"workload.x": 0.1},
    }
    return write(folder, "stream", **keys | {"seeds": trials})


def test_a_gang_waits_for_a_stream_of_small_trials_and_both_end(pair, tmp_path):
    """The last of the small trials holds a CPU of the gang's until the gang says that it waits."""
    trials, one = 5, {"ablate": {"rht": [True]}, "against": {"rht": True}, "seeds": 1}
    state, other = tmp_path / "state", tmp_path / "other"
    pair.gate.shut(trials - 1)
    with (
        sweeping(pair.address, (write(tmp_path, **one), state), ranks=(2,)) as big,
        sweeping(pair.address, (stream(tmp_path, trials), other), most=1) as small,
    ):
        assert (big.stdout.readline(), small.stdout.readline()) == ("ready\n", "ready\n")
        print("", file=small.stdin, flush=True)
        until(lambda: list(other.glob("trials/*/result.json")))
        print("", file=big.stdin, flush=True)
        assert big.stdout.readline() == "waits for free nodes: others use them\n"
        pair.gate.open()
        said, _ = small.communicate(timeout=600)
        output, _ = big.communicate(timeout=600)
    assert (small.returncode, big.returncode) == (0, 0), said + output
    assert set(statuses(state).values()) == set(statuses(other, "stream").values()) == {"done"}


# Nodes that do not see the state folder


@apart
def test_without_a_shared_file_system_the_store_is_the_same_and_missing_data_are_named(pair, tmp_path):
    """Forks included: what the first trial leaves on its node, the others go on from. Workers need no tracker."""
    keys = {
        "shape": {"steps": 60, "eval_every": 20},
        "ablate": {"cooldown": [0, 0.25]},
        "seeds": 1,
        "telemetry": {"checkpoint": 0.2},
    }
    state, data = pair.hidden / "state", shards(pair.hidden / "data")
    away = {"shape": {"data": data}, "ablate": {"rht": [True]}, "against": {"rht": True}, "seeds": 1}
    refused = subprocess.run(
        [sys.executable, "-c", "import mlflow"],
        env=environment(**pair.environment),
        capture_output=True,
        check=False,
    )
    assert b"No module named 'mlflow'" in refused.stderr
    second = (write(tmp_path, "away", **away, retry=0), pair.hidden / "away")
    status, said = swept(pair.address, (write(tmp_path, **keys), state), second)
    until(lambda: not list(pair.scratch.glob("ablate-*")))
    (told,) = [line for line in said.splitlines() if "state" in line and "workers on" in line]
    assert f"do not see {state}: records are streamed, and checkpoints fetched through Ray" in told
    assert "goes on from step" in said  # a fork
    sound(tmp_path, state, **keys)
    assert files(state) == files(tmp_path / "undisturbed")
    assert not list(state.glob(".seen/*"))

    assert status == 1, said
    absent = (
        f"has no {data['train']}, which this machine has: data lie at the same absolute path on every node"
    )
    assert re.search(rf"failed: node \S+ {re.escape(absent)}", said), said


# Nodes that are lost


CHECKED = {"ablate": {"rht": [True]}, "against": {"rht": True}, "seeds": 1, "telemetry": {"checkpoint": 0}}


def test_a_gang_whose_node_dies_is_tried_again_as_a_whole_and_one_that_no_cluster_could_hold_is_refused(
    pair, tmp_path
):
    """Its nodes do not see the state folder, if one can be hidden here: the checkpoint that it goes on from was fetched."""
    state = pair.hidden / "gang" if can_hide() else tmp_path / "state"
    pair.gate.shut()
    with sweeping(pair.address, (write(tmp_path, **CHECKED), state), ranks=(9, 2)) as big:
        refused = big.stdout.readline()
        assert refused == "a trial needs 9 CPUs, and the Ray cluster has 2 on 2 nodes (1, 1)\n"
        print("", file=big.stdin, flush=True)
        until(lambda: list(state.glob("trials/*/checkpoint.pt")))
        pair.lose(pair.nodes[1])
        pair.gate.open()
        pair.complete()
        output, _ = big.communicate(timeout=200)
    assert big.returncode == 0, output
    assert ("do not see" in output) == can_hide()
    assert "its node is gone; retry 1/2" in output, output
    assert re.search(r"goes on from step \d+", output), output
    assert set(statuses(state).values()) == {"done"}
    left = {"spec.json", "result.json", "events.jsonl", "log.txt"}
    assert all(left <= found for found in files(state).values())


def test_a_trial_whose_node_is_lost_goes_on_elsewhere_from_its_last_checkpoint(pair, tmp_path):
    state = tmp_path / "state"
    pair.gate.shut()
    with sweeping(pair.address, (write(tmp_path, **CHECKED), state), nodes=2) as driver:
        assert driver.stdout.readline() == "ready\n"  # Ray lists a node that the test before has lost no more
        print("", file=driver.stdin, flush=True)
        until(lambda: list(state.glob("trials/*/checkpoint.pt")))
        (lost,) = (one for one in pair.nodes if trials_in(psutil.Process(one.pid)))
        pair.lose(lost)
        pair.gate.open()
        output, _ = driver.communicate(timeout=600)
    assert driver.returncode == 0, output
    assert "its node is gone; retry 1/2" in output
    assert re.search(r"goes on from step \d+", output)
    assert set(statuses(state).values()) == {"done"}
    book = ledger(state)
    (ended, last) = [row[0] for row in book.db.execute("SELECT outcome FROM attempts ORDER BY attempt")]
    book.close()
    assert (ended != "done", last) == (True, "done")
    sound(tmp_path, state, **CHECKED)


def test_a_ray_that_does_not_start_in_time_is_tried_twice_and_ends_in_a_sentence(tmp_path):
    """Ray's own setting gives its head no time to start."""
    started = {"RAY_gcs_server_port_wait_time_s": "0", "RAY_TMPDIR": str(tmp_path / "r")}
    done = ablate("sweep", write(tmp_path), "--state", tmp_path / "runs", **started)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stdout.count("attempt 2 of 2") == 1
    assert len(done.stderr.splitlines()) == 2  # what starts, and the error
    assert done.stderr.endswith("; `--executor inline` runs the trials without Ray\n")
    processes = psutil.process_iter(["cmdline"])
    assert not [
        each for each in processes if any(str(tmp_path) in word for word in each.info["cmdline"] or ())
    ]
    again = ablate("sweep", tmp_path / "tiny.yaml", "--state", tmp_path / "runs", "--executor", "inline")
    assert again.returncode == 0, again.stderr


# From outside the cluster


FLAKY = """
import os, subprocess, traceback
import psutil, ray
from ablate.execution.workers import ClusterError
from ablate.execution.workers.cluster import connect
def tried(failures, text):
    calls, said = [], []
    def init(**words):
        calls.append(words["address"])
        if len(calls) <= failures:
            raise ConnectionAbortedError(text)
    ray.init = init
    try:
        connect("ray://127.0.0.1:1", None, said.append, 0.001)
    except ClusterError as error:
        said.append(str(error))
    return len(calls), said
def of_a_dead_process(ask):
    try:
        ask()
    except psutil.Error:
        return traceback.format_exc()
dead = subprocess.Popen(["true"])
handle = psutil.Process(dead.pid)
os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
zombie = of_a_dead_process(handle.cmdline)
dead.wait()
DIED = ["RuntimeError: Starting Ray client server failed. See x.err.", "RuntimeError: Server startup failed.",
    "RuntimeError: Proxy failed to Connect to backend! Check x.err.", zombie,
    of_a_dead_process(handle.cmdline), of_a_dead_process(lambda: psutil.Process(dead.pid))]
DIED = ["Initialization failure from server:\\n" + text for text in DIED]
print([*(tried(n, DIED[0]) for n in (0, 2, 4, 9)), *(tried(9, text) for text in DIED[1:]), tried(1, "other")])
"""


def test_a_dead_server_of_rays_client_is_asked_for_again_within_a_limit():
    """With a line before each attempt, in each form in which Ray's proxy reports it. Another error is final at once."""
    command = [sys.executable, "-c", FLAKY]
    printed = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True).stdout
    calls, said = zip(*ast.literal_eval(printed), strict=True)
    assert calls == (1, 3, *[5] * 7, 1)
    waits = [f"attempt {number} of 5 in {0.001 * 2 ** (number - 2):g} s" for number in range(2, 6)]
    assert [[line.split(": ")[-1] for line in lines] for lines in said[:3]] == [[], waits[:2], waits]
    for lines in said[3:-1]:
        assert [line.split(": ")[-1] for line in lines[:-1]] == waits
        assert "5 times in a row" in lines[-1]
    assert said[-1] == ["Ray cannot be reached at ray://127.0.0.1:1: other"]


@apart
def test_a_sweep_from_outside_runs_by_one_rank_and_by_a_gang(pair, tmp_path):
    """By Ray's client, whose cluster sees nothing of this machine's folders. Not among what tests install: its server dies now and then."""
    pytest.importorskip("grpc", reason="ray:// takes Ray's client: pip install 'ray[client]'")
    path = write(tmp_path, seeds=1, ablate={"rht": [True]}, against={"rht": True})
    for ranks in (1,), (2,):
        state = pair.hidden / f"outside{ranks[0]}"
        status, said = swept(f"ray://127.0.0.1:{CLIENT_PORT}", (path, state), ranks=ranks)
        if "5 times in a row" in said:
            pytest.skip(said.splitlines()[-1])
        assert status == 0, said
        assert "do not see" in said
        assert set(statuses(state).values()) == {"done"}


# SLURM


SBATCH = Path(__file__).parents[2] / "docs" / "examples" / "ablate.sbatch"
SRUN = """#!/bin/bash
# What srun does on one machine: the first word that is no option begins the command, which is `ray start`.
while [[ $1 == --* ]]; do shift; done
exec "$@" --include-log-monitor false
"""


def test_the_batch_script_of_the_documentation_starts_ray_runs_the_sweep_and_leaves_nothing(tmp_path):
    script, programs = SBATCH, tmp_path / "bin"
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    programs.mkdir()
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/sh\necho localhost\necho other\n"}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_NODELIST": "two",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": str(free_port()),
        "SLURM_CPUS_PER_TASK": "1",
    }
    mine = {
        "ABLATE_VENV": sys.prefix,
        "ABLATE_STATE": str(tmp_path / "state"),
        "PATH": f"{programs}:{os.environ['PATH']}",
        "MARK": str(tmp_path),
        **customised(tmp_path / "few verbs", FEW_VERBS),
    }
    one = write(tmp_path, ablate={"rht": [True]}, against={"rht": True}, seeds=1)
    words = ["bash", script, one, "--mlflow", "none", "--check-command", "true"]
    done = subprocess.run(
        words, env=environment(**slurm, **mine), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(statuses(tmp_path / "state").values()) == {"done"}
    until(lambda: not marked(str(tmp_path)))


def marked(mark: str) -> list[str]:
    """Processes that live with this mark in their environment, without Ray's agents, which may take minutes to see that their node is gone.

    psutil reads no environment that begins with zeros, as that of all who write a title over it does.
    """
    found, sought = [], f"MARK={mark}".encode()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if (
                sought in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(" ".join(process.cmdline())[:100])
    return [words for words in found if not re.match(r"ray::\w+Agent", words)]
