"""The services of docker/compose.yaml as processes of this machine, by the file's own words, and a sweep over them that loses a node."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from urllib.error import HTTPError

import psutil
import pytest
import support.compose as compose
from chaos import audit
from support.clusters import FEW_VERBS
from support.commands import here
from support.experiments import SHAPE, environment, shards, statuses, sweep, until, values
from support.gates import Gate
from support.services import Server, free_port, postgres, postgres_programs, trials_in

from ablate.execution.workers.cluster import silence
from ablate.experiment.load import load

MISSING = [
    what
    for what, there in {
        "PostgreSQL's programs, and psycopg": postgres_programs(),
        "flask_wtf, of the extra `server`": find_spec("flask_wtf"),
        "createdb": shutil.which("createdb"),
    }.items()
    if not there
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.services,
    pytest.mark.skipif(bool(MISSING), reason=f"not here: {', '.join(MISSING)}"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
KNOBS = {"sr_bits": [8, 16]}
"""Two arms and their baseline, at two seeds each: 6 trials."""

UNCHECKED = ("--check-command", "true")
"""Words of a sweep without the check of the numerics, which takes seconds and has tests of its own."""
OF_A_START = re.compile(r"Starting: |\[\d{4}-\d\d-\d\d .*\] |\d{4}-\d\d-\d\d .*ray")
"""Lines of Ray's C++ log, which it writes wherever its driver's errors go."""


class Team:
    """All services, healthy by their own health checks, and two workers of one slot each."""

    def __init__(self, folder: Path) -> None:
        sys.path.insert(0, str(compose.ROOT / "docker"))
        from new_env import filled

        self.folder, self.servers = folder, []
        self.secrets = compose.environment_file(filled((compose.ROOT / "docker" / "env.example").read_text()))
        self.machine = compose.Machine(folder, self.secrets | {"WORKER_CPUS": "1"})
        self.addresses, self.state, self.gate = (
            self.machine.addresses,
            folder / "state",
            Gate(folder, FEW_VERBS),
        )
        shards(folder / "work")

    def start(self) -> None:
        self._database()
        *waiting, head = [
            self._keep(self.machine.start(name)) for name in ("mlflow", "dashboard", "ray-head")
        ]
        self._healthy(head, self.addresses["ray"])
        self.workers = []
        for number in (
            1,
            2,
        ):  # one after the other: on one machine they share a folder of Ray's, which containers do not
            port = free_port()
            server = self.machine.start(
                "ray-worker", f"ray-worker-{number}", self.gate.environment, node=port
            )
            self.workers.append(self._keep(server))
            self._healthy(self.workers[-1], f"127.0.0.1:{port}")
        mlflow, dashboard = waiting
        self._healthy(dashboard, self.addresses["reports"].removeprefix("http://"))
        self._healthy(mlflow, self.addresses["mlflow"].removeprefix("http://"))

    def _healthy(self, server: Server, address: str) -> None:
        """Wait for a server, and start it again if it ends, as the file says; if it is never healthy, show its log.

        Its health check is a process that takes a second: it is asked once something listens at the address."""
        assert all(
            self.machine.services[name]["restart"] == "unless-stopped"
            for name in ("mlflow", "dashboard", "ray-head", "ray-worker")
        )
        try:
            until(
                lambda: server.restart_if_due() or (silence(address) is None and server.ready()),
                120,
                every=0.1,
            )
        except AssertionError as error:
            pytest.fail(f"{error}: {server.process.args}\n{server.log.read_text()[-3000:]}")

    def _keep(self, server: Server) -> Server:
        self.servers.append(server)
        return server

    def _database(self) -> None:
        """Run the steps of the image's own entry point: a cluster whose user has the password, and the first database."""
        asked, log = self.machine.services["postgres"]["environment"], self.folder / "postgres.log"
        assert asked["POSTGRES_USER"] == "ablate"
        how = {
            "database": asked["POSTGRES_DB"],
            "password": asked["POSTGRES_PASSWORD"],
            "port": self.machine.port,
        }
        server, _ = postgres(
            postgres_programs(), self.folder / "postgres", log, **how, more=self.machine.words("postgres")[1:]
        )
        until(self._keep(server).ready)
        words = [
            "createdb",
            "-h",
            "127.0.0.1",
            "-p",
            str(self.machine.port),
            "-U",
            "ablate",
            asked["POSTGRES_DB"],
        ]
        subprocess.run(words, env=os.environ | {"PGPASSWORD": asked["POSTGRES_PASSWORD"]}, check=True)
        until(lambda: self.machine.healthy("postgres"))

    def environment(self, **extra: str) -> dict[str, str]:
        """Return the environment of the service `run`."""
        return environment(**self.machine.environment("run") | {"ABLATE_STATE": str(self.state)} | extra)

    def command(self, *words, **extra: str) -> subprocess.CompletedProcess:
        """`docker compose run --rm run ...`, to its end."""
        how = {"capture_output": True, "text": True, "timeout": 120, "check": False}
        return subprocess.run(self.machine.run(*words), env=self.environment(**extra), **how)

    def close(self) -> None:
        """End everything, nodes that sweeps brought along included: they all have the cluster's own folder among their words."""
        for server in reversed(self.servers):
            server.close()
        for process in psutil.process_iter(["cmdline"]):
            if str(self.folder) in " ".join(process.info["cmdline"] or ()) or self.addresses[
                "ray"
            ] in " ".join(process.info["cmdline"] or ()):
                process.kill()


@pytest.fixture(scope="module")
def team():
    folder = Path(tempfile.mkdtemp(prefix="ac"))  # short, for the sake of Ray's socket paths
    folder.chmod(0o755)  # PostgreSQL runs as another user, in a folder of its own below
    found = Team(folder)
    try:
        found.start()
        yield found
    finally:
        found.close()
        shutil.rmtree(folder, ignore_errors=True)


def experiment(team: Team, name: str, steps: int, **keys) -> Path:
    """An experiment in the folder that every container sees as /work. Another number of steps makes other trials."""
    path = team.folder / "work" / f"{name}.yaml"
    gpt = SHAPE | {"data": shards(team.folder / "work"), "steps": steps, "eval_every": steps // 2}
    content = {
        "schema": 1,
        "question": "Does it matter?",
        "workload": {"gpt": gpt},
        "ablate": KNOBS,
        "seeds": 2,
    }
    path.write_text(json.dumps(content | {"telemetry": {"checkpoint": 0.5, "log": 5}} | keys))
    return path


def ask(address: str, authorization: str = "", **headers: str) -> dict:
    request = urllib.request.Request(
        address, headers=headers | ({"Authorization": authorization} if authorization else {})
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def basic(team: Team) -> str:
    word = f"{team.secrets['MLFLOW_TRACKING_USERNAME']}:{team.secrets['MLFLOW_TRACKING_PASSWORD']}"
    return f"Basic {base64.b64encode(word.encode()).decode()}"


class Opener(urllib.request.BaseHandler):
    """Logs in wherever the audit asks."""

    def __init__(self, authorization: str) -> None:
        self.authorization = authorization

    def http_request(self, request):
        request.add_unredirected_header("Authorization", self.authorization)
        return request


def done(team: Team, name: str) -> int:
    return sum(status == "done" for status in statuses(team.state, name).values())


def test_a_sweep_over_two_nodes_that_loses_one_has_the_results_of_an_undisturbed_one(team, monkeypatch):
    path = experiment(team, "shared", 12)
    log = team.folder / "shared.txt"
    team.gate.shut(2)
    with log.open("w") as output:
        driver = subprocess.Popen(
            team.machine.run("sweep", path, *UNCHECKED), env=team.environment(), stdout=output, stderr=output
        )
    try:
        until(lambda: list(team.state.glob("trials/*/events-1.jsonl")))  # the ledger is whole by then
        until(lambda: done(team, "shared") >= 2)
        board = ask(f"{team.addresses['optuna']}/api/studies")["study_summaries"]
        assert [study["study_name"] for study in board] == ["shared"]  # while it is written
        until(lambda: trials_in(psutil.Process(team.workers[1].process.pid)))
        team.workers[1].close()
        team.gate.open()
        assert driver.wait(120) == 0, log.read_text()
    finally:
        if driver.poll() is None:
            driver.kill()
            driver.wait()
    told = log.read_text()
    assert done(team, "shared") == 6
    assert "; retry 1/2" in told, told
    assert "records behind" not in told

    sweep(load(path), team.folder / "alone")
    mine, theirs = values(team.state, "shared"), values(team.folder / "alone", "shared")
    assert len(mine) == 6
    assert mine == theirs
    folders = (root / "sweeps" / "shared" for root in (team.state, team.folder / "alone"))
    assert list(audit.sweep(team.state, *folders)) == []
    assert list(audit.study(team.state / "sweeps" / "shared")) == []

    monkeypatch.setattr(urllib.request, "_opener", urllib.request.build_opener(Opener(basic(team))))
    assert list(audit.mlflow(audit.Tracker(team.addresses["mlflow"]), team.state / "sweeps" / "shared")) == []

    board = ask(f"{team.addresses['optuna']}/api/studies/0?after=0")
    assert [trial["state"] for trial in board["trials"]] == ["Complete"] * 2
    means = {arm: sum(value for (name, _), value in mine.items() if name == arm) / 2 for arm, _ in mine}
    assert sorted(trial["values"][0] for trial in board["trials"]) == pytest.approx(
        sorted(means[arm] for arm in means if arm != "bf16")
    )
    links = [
        attribute["value"]
        for trial in board["trials"]
        for attribute in trial["user_attrs"]
        if attribute["key"] == "mlflow"
    ]
    assert len(links) == 2
    assert all(
        "http://localhost:" in link for link in links
    )  # where browsers find it, not what containers call it


def test_nobody_comes_in_without_a_password(team):
    with pytest.raises(HTTPError) as refused:
        ask(f"{team.addresses['mlflow']}/api/2.0/mlflow/experiments/search?max_results=1")
    with refused.value as answer:
        assert answer.code == 401
    with pytest.raises(HTTPError) as refused:
        ask(
            f"{team.addresses['mlflow']}/api/2.0/mlflow/experiments/search?max_results=1",
            basic(team),
            Host="evil.example",
        )
    with refused.value as answer:
        assert answer.code == 403
    words = [
        "psql",
        "-h",
        "127.0.0.1",
        "-p",
        str(team.machine.port),
        "-U",
        "ablate",
        "-w",
        "mlflow",
        "-c",
        "SELECT 1",
    ]
    assert "no password supplied" in subprocess.run(words, capture_output=True, text=True, check=False).stderr


def test_mlflow_remembers_for_a_minute_who_was_let_in(team):
    """Hashing a password takes tens of milliseconds on purpose: a second call does not look at the hash."""
    api = f"{team.addresses['mlflow']}/api/2.0/mlflow"
    login = {"username": "probe", "password": "a-password-of-a-probe"}
    made = urllib.request.Request(
        f"{api}/users/create", json.dumps(login).encode(), {"Content-Type": "application/json"}
    )
    made.add_header("Authorization", basic(team))
    urllib.request.urlopen(made, timeout=300).close()
    word = base64.b64encode(":".join(login.values()).encode()).decode()
    ask(f"{api}/experiments/search?max_results=1", f"Basic {word}")
    words = ["psql", "-h", "127.0.0.1", "-p", str(team.machine.port), "-U", "ablate", "-w", "mlflow"]
    spoil = "UPDATE users SET password_hash = 'none' WHERE username = 'probe'"
    password = os.environ | {"PGPASSWORD": team.secrets["POSTGRES_PASSWORD"]}
    done = subprocess.run([*words, "-c", spoil], env=password, capture_output=True, text=True, check=True)
    assert done.stdout == "UPDATE 1\n"
    ask(f"{api}/experiments/search?max_results=1", f"Basic {word}")
    assert "auth_cache_ttl_seconds = 60" in (team.folder / "mlflow_auth.ini").read_text()


NO_RAY = {"ABLATE_RAY_ADDRESS": "127.0.0.1:9"}
"""MLflow is asked first: what it refuses needs no Ray, nor a node that joins it."""


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            NO_RAY | {"MLFLOW_TRACKING_PASSWORD": "wrong"},
            "401 Unauthorized: user 'ablate' or the password is wrong",
        ),
        (
            NO_RAY | {"MLFLOW_TRACKING_USERNAME": "", "MLFLOW_TRACKING_PASSWORD": ""},
            "401 Unauthorized: no credentials were sent",
        ),
    ],
)
def test_an_mlflow_that_refuses_is_told_in_a_sentence_and_nothing_runs(wrong, said, team):
    ended = here("sweep", experiment(team, "refused", 16, seeds=1), **team.environment(**wrong))
    refused(team, ended, said)


def test_a_ray_that_refuses_is_told_in_a_sentence_and_nothing_runs(team):
    words = ("sweep", experiment(team, "refused", 16, seeds=1), *UNCHECKED)
    ended = team.command(*words, RAY_AUTH_TOKEN="b" * 48)
    refused(team, ended, "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN here as there")


def refused(team: Team, ended: subprocess.CompletedProcess, said: str) -> None:
    """The command ended with status 2 and one sentence, and nothing has run."""
    assert ended.returncode == 2, ended.stdout + ended.stderr
    told = [line for line in ended.stderr.strip().splitlines() if not OF_A_START.match(line)]
    assert len(told) == 1, ended.stderr
    assert said in told[0]
    assert "Traceback" not in ended.stdout
    book = team.state / "sweeps" / "refused" / "ledger.db"
    assert not book.exists() or set(statuses(team.state, "refused").values()) == {"pending"}


def test_a_name_that_mlflow_does_not_answer_to_is_told_with_what_would_make_it(team):
    address = team.addresses["mlflow"].replace("127.0.0.1", "0.0.0.0")  # the same server, by another name
    words = ("sweep", experiment(team, "refused", 16, seeds=1), "--mlflow", address)
    ended = here(*words, **team.environment(**NO_RAY))
    assert ended.returncode == 2
    assert "MLflow returned 403 Forbidden: Invalid Host header" in ended.stderr
    assert "`mlflow server --allowed-hosts` names the hosts that it answers to" in ended.stderr


def test_an_mlflow_that_does_not_answer_is_said_and_loses_nothing(team):
    import_module("mlflow")  # takes seconds, which do not count then
    path = experiment(team, "silent", 8, seeds=1, ablate={"rht": [True]}, workload={"idle": {"steps": 8}})
    outcome, news = sweep(load(path), team.state, "http://127.0.0.1:9", grace=3.0)
    assert outcome.status == "done"
    assert (
        "records behind (MLflow's server does not answer: Connection refused; http://127.0.0.1:9): `ablate rebuild --sync --state "
        in news[-1]
    )
    assert set(statuses(team.state, "silent").values()) == {"done"}
    ended = here("rebuild", "silent", "--sync", **team.environment())
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "none is missing" in ended.stdout
