"""Clusters: nodes without the state folder, of other versions, with tokens; gangs among small trials. Real heads and nodes throughout."""

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
from support.clusters import OPEN, STARTS_RAY, blocker, can_hide, end_family, head, node, nodes, port
from support.experiments import (
    ablate,
    end,
    environment,
    shards,
    statuses,
    sweep,
    tiny,
    until,
    words_of,
    write,
)
from support.gates import Gate, customised

from ablate import numerics
from ablate.verification import audit

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
import sys
from pathlib import Path
from ablate.execution.controller import Controller
from ablate.execution.progress import Outcome
from ablate.experiment.load import load
from ablate.execution.workers import ClusterError, Pool
address, path, state, most, *sizes = sys.argv[1:]
for ranks in map(int, sizes):
    try:
        pool = Pool(address, int(most) or None, 0, 0, ranks)
    except ClusterError as error:
        print(error, flush=True)
        continue
    print("ready", flush=True)
    sys.stdin.readline()
    for step in Controller(load(Path(path)), Path(state), "cpu", lambda: pool, None).run():
        for line in () if isinstance(step, Outcome) else step.news:
            print(line, flush=True)
    sys.exit(step.failed > 0)
"""


@contextlib.contextmanager
def sweeping(address: str, path: Path, state: Path, *ranks: int, most: int = 0) -> Iterator[subprocess.Popen]:
    """A sweep in a process of its own, without what the command does before and after: its trials take as many of these ranks as the
    cluster can hold, and begin once it is told a line. `most`: at once."""
    command = [
        sys.executable,
        "-c",
        SWEEP,
        address,
        str(path),
        str(state),
        str(most),
        *map(str, ranks or (1,)),
    ]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(
        command, cwd=path.parent, text=True, env=environment(**OPEN), start_new_session=True, **pipes
    )
    try:
        yield process
    finally:
        end(process)


def swept(address: str, path: Path, state: Path, *ranks: int) -> tuple[int, str]:
    """The sweep, to its end: its status and what it said."""
    with sweeping(address, path, state, *ranks) as process:
        said, _ = process.communicate("\n", timeout=600)
    return process.returncode, said


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A head for all tests whose nodes leave it as nodes should: what one does must not harm the next."""
    with head(**OPEN) as found:
        yield found


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


def computes(node: subprocess.Popen) -> bool:
    """Return True if a trial runs on the node: its warm process has a child."""
    family = psutil.Process(node.pid).children(recursive=True)
    return sum("ablate.execution.trial_process" in words_of(process) for process in family) > 1


# Nodes that do not see the state folder


@apart
def test_without_a_shared_file_system_the_store_is_the_same_and_workers_need_no_tracker(address, tmp_path):
    """Forks included: what the first trial leaves on its node, the others go on from."""
    hidden, scratch = tmp_path / "hidden", tmp_path / "scratch"
    hidden.mkdir()
    scratch.mkdir()
    keys = {
        "shape": {"steps": 60, "eval_every": 20},
        "ablate": {"cooldown": [0, 0.25]},
        "seeds": 1,
        "telemetry": {"checkpoint": 0.2},
    }
    bare = blocker(tmp_path / "blocker", *NOT_FOR_WORKERS) | {"TMPDIR": str(scratch)}
    refused = subprocess.run(
        [sys.executable, "-c", "import mlflow"], env=environment(**bare), capture_output=True, check=False
    )
    assert b"No module named 'mlflow'" in refused.stderr
    with node(address, 2, hide=hidden, **bare, **OPEN):
        status, said = swept(address, write(tmp_path, **keys), hidden / "state")
        until(lambda: not list(scratch.glob("ablate-*")))
    assert status == 0, said
    (told,) = [line for line in said.splitlines() if "state" in line and "workers on" in line]
    assert f"do not see {hidden / 'state'}: records are streamed, and checkpoints fetched through Ray" in told
    assert "goes on from step" in said  # a fork
    sound(tmp_path, hidden / "state", **keys)
    assert files(hidden / "state") == files(tmp_path / "undisturbed")
    assert not list(hidden.glob("state/.seen/*"))


@apart
def test_a_trial_whose_node_is_lost_goes_on_elsewhere_from_its_last_fetched_checkpoint(tmp_path):
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    keys = {"ablate": {"rht": [True]}, "against": {"rht": True}, "telemetry": {"checkpoint": 0}, "seeds": 1}
    gate = Gate(tmp_path)
    state, each = hidden / "state", {"hide": hidden, **OPEN, **gate.environment}
    gate.shut()
    with (
        head(**OPEN) as address,
        nodes(address, each, each) as both,
        sweeping(address, write(tmp_path, **keys), state) as driver,
    ):
        print("", file=driver.stdin, flush=True)
        until(lambda: list(state.glob("trials/*/checkpoint.pt")))
        (lost,) = (one for one in both if computes(one))
        end_family(lost)
        gate.open()
        output, _ = driver.communicate(timeout=600)
    assert driver.returncode == 0, output
    assert "its node is gone; retry 1/2" in output
    assert re.search(r"goes on from step \d+", output)
    assert set(statuses(state).values()) == {"done"}
    sound(tmp_path, state, **keys)


@apart
def test_data_that_a_node_has_not_are_named_in_a_sentence(address, tmp_path):
    hidden = tmp_path / "hidden"
    data = shards(hidden / "data")
    path = write(tmp_path, shape={"data": data}, ablate={"rht": [True]}, seeds=1, retry=0)
    with node(address, hide=hidden, **OPEN):
        status, told = swept(address, path, tmp_path / "state")
    assert status == 1, told
    said = f"has no {data['train']}, which this machine has: data lie at the same absolute path on every node"
    assert re.search(rf"failed: node \S+ {re.escape(said)}", told), told


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
    shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return {"PYTHONPATH": str(folder)}


def test_a_node_of_another_version_runs_nothing_and_one_without_quantisers_slowly_and_both_are_told(
    address, tmp_path
):
    other = customised(tmp_path / "other", "import ablate\nablate.__version__ = '0.0.9'\n")
    path, state = write(tmp_path, seeds=1, ablate={"rht": [True]}), tmp_path / "state"
    said = r"node \S+ has ablate 0\.0\.9 \(here \S+\): install the same versions on every node, or run the sweep with the cluster's"
    with nodes(address, other | OPEN, sent(tmp_path / "sent") | OPEN):
        status, told = swept(address, path, state)
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
    "a token, but no mode": (
        {"RAY_AUTH_TOKEN": TOKEN},
        "the server there refused the connection; .*; here RAY_AUTH_MODE is not set",
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


def test_without_the_clusters_token_a_sentence_names_the_variables_and_with_it_nothing_is_turned_off(
    tmp_path,
):
    """The token may stand in a file, too."""
    file = tmp_path / "token"
    file.write_text(TOKEN)

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
        answers = list(
            threads.map(lambda extra: asked(address, **extra), (extra for extra, _ in WITHOUT.values()))
        )
        assert let_in.result() == "let in, with token\n"
        for (_, said), told in zip(WITHOUT.values(), answers, strict=True):
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


# From outside the cluster


@apart
def test_a_sweep_from_outside_runs_by_one_rank_and_by_a_gang(tmp_path):
    """By Ray's client, whose cluster sees nothing of this machine's folders. Not among what tests install: its server dies now and then."""
    pytest.importorskip("grpc", reason="ray:// takes Ray's client: pip install 'ray[client]'")
    number, hidden = port(), tmp_path / "hidden"
    hidden.mkdir()
    path, hiding = (
        write(tmp_path, seeds=1, ablate={"rht": [True]}, against={"rht": True}),
        {"hide": hidden, **OPEN},
    )
    with (
        head(0, f"--include-dashboard false --ray-client-server-port {number}", **hiding) as address,
        nodes(address, hiding, hiding),
    ):
        for ranks in (), (2,):
            state = hidden / f"state{len(ranks)}"
            status, said = swept(f"ray://127.0.0.1:{number}", path, state, *ranks)
            assert status == 0, said
            assert "do not see" in said
            assert set(statuses(state).values()) == {"done"}


# Gangs


def stream(folder: Path, trials: int) -> Path:
    """An experiment of trials that do nothing for a second."""
    keys = {
        "workload": {"idle": {"steps": 5, "seconds": 0.2}},
        "ablate": {"workload.x": [0.1]},
        "against": {"workload.x": 0.1},
    }
    return write(folder, "stream", **keys | {"seeds": trials})


@pytest.mark.parametrize("cpus", [(1, 1), (2,)], ids=["on two nodes", "on one"])
def test_a_gang_starts_in_a_stream_of_small_trials_and_both_end(cpus, address, tmp_path):
    """The gang's process is there before the stream begins: it asks for its places while many small trials wait, however slow its start.
    The last of these waits for the gang's end, and holds a place that the gang would need if it began only then."""
    trials, gate, one = (
        5 * len(cpus),
        Gate(tmp_path),
        {"ablate": {"rht": [True]}, "against": {"rht": True}, "seeds": 1},
    )
    state, other = tmp_path / "state", tmp_path / "other"
    gate.shut(trials - 1)
    with nodes(address, *({"cpus": count} | OPEN | gate.environment for count in cpus)):
        small, big = stream(tmp_path, trials), write(tmp_path, **one)
        with (
            sweeping(address, big, state, 2) as big,
            sweeping(address, small, other, most=len(cpus)) as small,
        ):
            assert (big.stdout.readline(), small.stdout.readline()) == ("ready\n", "ready\n")
            print("", file=small.stdin, flush=True)
            until(lambda: list(other.glob("trials/*/result.json")))
            output, _ = big.communicate("\n", timeout=600)
            assert big.returncode == 0, output
            assert small.poll() is None, small.communicate()
            gate.open()
            said, _ = small.communicate(timeout=600)
    assert small.returncode == 0, said
    assert set(statuses(state).values()) == set(statuses(other, "stream").values()) == {"done"}


@apart
def test_a_gang_on_nodes_that_do_not_see_the_state_folder_leaves_the_same_store(address, tmp_path):
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    keys = {"ablate": {"rht": [True]}, "seeds": 1}
    path, hiding = write(tmp_path, **keys), {"hide": hidden, **OPEN}
    with nodes(address, hiding, hiding):
        status, output = swept(address, path, hidden / "state", 2)
    assert status == 0, output
    assert "do not see" in output
    assert set(statuses(hidden / "state").values()) == {"done"}
    assert all(
        {"spec.json", "result.json", "events.jsonl", "log.txt"} <= found
        for found in files(hidden / "state").values()
    )


def test_a_gang_whose_node_dies_is_tried_again_as_a_whole_and_one_that_no_cluster_could_hold_is_refused(
    tmp_path,
):
    state, gate = tmp_path / "state", Gate(tmp_path)
    keys = {"ablate": {"rht": [True]}, "against": {"rht": True}, "seeds": 1, "telemetry": {"checkpoint": 0}}
    path, each = write(tmp_path, **keys), OPEN | gate.environment
    gate.shut()
    with (
        head(**OPEN) as address,
        nodes(address, each, each) as (_, second),
        sweeping(address, path, state, 9, 2) as big,
    ):
        refused = big.stdout.readline()
        assert refused == "a trial needs 9 CPUs, and the Ray cluster has 2 on 2 nodes (1, 1)\n"
        print("", file=big.stdin, flush=True)
        until(lambda: list(state.glob("trials/*/checkpoint.pt")))
        end_family(second)
        gate.open()
        with node(address, **OPEN):
            output, _ = big.communicate(timeout=200)
    assert big.returncode == 0, output
    assert "its node is gone; retry 1/2" in output, output
    assert set(statuses(state).values()) == {"done"}


# SLURM


SRUN = """#!/bin/bash
# What srun does on one machine: the first word that is no option begins the command.
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""


def batch(folder: Path) -> Path:
    """The script that docs/cluster.md prints."""
    text = (Path(__file__).parents[1] / "docs" / "cluster.md").read_text()
    (script,) = re.findall(r"```bash\n(#!.*?)```", text, re.DOTALL)
    path = folder / "ablate.sbatch"
    path.write_text(script)
    return path


def test_the_batch_script_of_the_documentation_starts_ray_runs_the_sweep_and_leaves_nothing(tmp_path):
    script, programs = batch(tmp_path), tmp_path / "bin"
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    programs.mkdir()
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/sh\necho localhost\necho other\n"}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_NODELIST": "two",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": str(port()),
        "SLURM_CPUS_PER_TASK": "1",
    }
    mine = {
        "ABLATE_VENV": sys.prefix,
        "ABLATE_STATE": str(tmp_path / "state"),
        "PATH": f"{programs}:{os.environ['PATH']}",
        "MARK": str(tmp_path),
    }
    one = write(tmp_path, ablate={"rht": [True]}, against={"rht": True}, seeds=1)
    words = ["bash", script, one, "--mlflow", "none"]
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
