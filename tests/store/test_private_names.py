"""Private names of Optuna, Ray and MLflow: each use stands in an adapter file and works with the installed version."""

import ast
import inspect
import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

import ablate.execution
from ablate.execution.search import optuna_private
from ablate.execution.tracking import access, database, mlflow_private
from ablate.execution.workers import ray_private
from ablate.store.databases import url

# Importing MLflow warns; as an error that would leave SQLAlchemy's mappers half made for all later tests.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
ROOT = Path(ablate.execution.__file__).parent
ADAPTERS = {"search/optuna_private.py", "workers/ray_private.py", "tracking/mlflow_private.py"}
PUBLIC = {"_exit", "_replace"}
"""Names that are public in spite of their underscore: of `os` and of named tuples."""
RAY_ARGUMENTS = {"_node_ip_address", "_temp_dir"}


def private_names(source: str) -> list[str]:
    """Return the private names of other modules and objects that a source uses."""
    names = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(attr=name) if private(name) and name not in PUBLIC:
                names.append(name)
            case ast.Import(names=modules):
                names += [module.name for module in modules if any(map(private, module.name.split(".")))]
            case ast.ImportFrom(module=str(module), names=members):
                path = [*module.split("."), *(member.name for member in members)]
                names += [module] if any(map(private, path)) else []
            case ast.Constant(value=str(text)) if text in RAY_ARGUMENTS:
                names.append(text)
    return names


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_private_names_are_used_in_the_adapters_alone():
    files = {str(path.relative_to(ROOT)): path.read_text() for path in ROOT.rglob("*.py")}
    assert {file for file, source in files.items() if private_names(source)} == ADAPTERS


@pytest.mark.parametrize(
    "source",
    [
        "study._storage",
        "import ray._private",
        "from optuna._imports import x",
        "from optuna import _imports",
        "ray.init(**{'_temp_dir': 1})",
    ],
)
def test_a_private_name_would_be_seen(source):
    assert private_names(source)


# Optuna


@pytest.fixture
def storage(tmp_path):
    return JournalStorage(JournalFileBackend(str(tmp_path / "journal.log")))


def test_the_operations_of_a_journal_have_the_numbers_that_optuna_writes(storage, tmp_path):
    study = optuna.create_study(storage=storage, study_name="one")
    study.ask()
    storage.set_study_system_attr(0, "key", 1)
    optuna.delete_study(study_name="one", storage=storage)
    lines = (tmp_path / "journal.log").read_text().splitlines()
    operation = optuna_private.JournalOperation
    assert [json.loads(line)["op_code"] for line in lines] == [
        operation.CREATE_STUDY,
        operation.CREATE_TRIAL,
        operation.SET_STUDY_SYSTEM_ATTR,
        operation.DELETE_STUDY,
    ]


def test_the_id_of_a_trial_is_the_storages(storage):
    optuna.create_study(storage=storage, study_name="first").ask()
    study = optuna.create_study(storage=storage, study_name="second")
    study.ask()
    (trial,) = study.get_trials(deepcopy=False)
    number = storage.get_study_id_from_name("second")
    assert optuna_private.trial_id(trial) == storage.get_trial_id_from_study_id_trial_number(number, 0) == 1


TEXTS = ("a note", "", "long " * 2000, "short again", "ünïcode " * 600)


def test_notes_and_figures_are_those_that_the_dashboard_writes_and_reads(storage):
    from optuna_dashboard import get_note, save_note, save_plotly_graph_object
    from plotly.graph_objects import Figure, Scatter

    mine, theirs = (optuna.create_study(storage=storage, study_name=name) for name in ("mine", "theirs"))
    number = storage.get_study_id_from_name("mine")
    trials = {study: study.ask() for study in (mine, theirs)}

    def attributes(study: optuna.Study) -> dict[str, object]:
        """The attributes of a study, its trial's id left out of their names."""
        own = storage.get_study_system_attrs(study._study_id)
        return {key.replace(f":{trials[study]._trial_id}:", ":trial:"): value for key, value in own.items()}

    for text in TEXTS:
        optuna_private.save_note(storage, number, None, text)
        save_note(theirs, text)
        optuna_private.save_note(storage, number, trials[mine]._trial_id, text)
        save_note(trials[theirs], text)
        assert get_note(mine) == get_note(trials[mine]) == text
        assert optuna_private.note_of(storage, theirs._study_id, None) == text
        assert optuna_private.note_of(storage, number, trials[mine]._trial_id) == text
        assert attributes(mine) == attributes(theirs)
    for points in (2000, 3):
        figure = Figure(Scatter(x=[*range(points)]))
        optuna_private.save_figure(storage, number, "one", figure.to_json())
        save_plotly_graph_object(theirs, figure, graph_object_id="one")
        assert attributes(mine) == attributes(theirs)


def test_a_trial_that_nsga2_proposed_has_its_generation_in_that_attribute():
    sampler = optuna.samplers.NSGAIISampler(seed=0, population_size=2)
    study = optuna.create_study(sampler=sampler)
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=5)
    attribute = optuna_private.generation_attribute(sampler)
    assert [trial.system_attrs[attribute] for trial in study.trials] == [0, 0, 1, 1, 2]


# MLflow


@pytest.mark.slow
def test_a_database_that_was_made_and_one_that_was_closed_have_no_connection(tmp_path):
    path = tmp_path / "mlflow.db"
    database.prepare(url(path), tmp_path)
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    assert not [address for address in open_connections() if str(tmp_path) in address]
    SqlAlchemyStore(url(path), tmp_path.as_uri())
    assert url(path) in open_connections()
    mlflow_private.close_database(url(path))
    assert url(path) not in open_connections()
    mlflow_private.close_database(url(path))  # nothing left to close


def open_connections() -> set[str]:
    """Return the addresses of databases to which MLflow keeps a connection in this process."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    return {address for address, engine in SqlAlchemyStore._engine_map.items() if engine.pool.checkedin()}


@pytest.mark.slow
def test_a_database_that_is_replaced_again_and_again_is_opened_anew_each_time(tmp_path):
    """MLflow's clients share one store per address, for the life of the process."""
    path = tmp_path / "mlflow.db"
    for name in ("first", "second", "third"):
        for part in tmp_path.glob("mlflow.db*"):
            part.unlink()
        database.prepare(url(path), tmp_path)
        access.open_client(url(path)).create_experiment(name)
        mlflow_private.close_database(url(path))
        with closing(sqlite3.connect(path)) as db:
            names = {name for (name,) in db.execute("SELECT name FROM experiments")}
        assert names == {"Default", name}


def test_mlflow_is_not_imported_to_close_a_database():
    """Before `import_client` it would be imported without its settings, such as that against telemetry."""
    code = (
        "import sys; from ablate.execution.tracking.mlflow_private import close_database;"
        "close_database('sqlite:///none.db'); print('mlflow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# Ray


def test_ray_has_the_setting_that_keeps_the_loopback_address():
    import ray

    constants = ray._private.ray_constants
    before = constants.ENABLE_RAY_CLUSTER
    assert isinstance(before, bool)
    with ray_private.as_one_machine(ray):
        assert constants.ENABLE_RAY_CLUSTER is False
    assert constants.ENABLE_RAY_CLUSTER is before


def test_ray_starts_the_services_of_clusters_by_methods_of_its_node_and_leaves_out_what_the_adapter_overrides():
    import ray

    before = ray._private.node.Node
    with ray_private.as_one_machine(ray):
        reduced = ray._private.node.Node
    assert ray._private.node.Node is before
    assert reduced.__mro__[1] is before
    overridden = [name for name in vars(reduced) if not name.startswith("__")]
    services = ["start_api_server", "start_log_monitor", "start_monitor"]
    assert sorted(overridden) == [*services, "start_ray_processes"]
    for name in overridden:
        assert inspect.signature(getattr(reduced, name)).parameters.keys() == (
            inspect.signature(getattr(before, name)).parameters.keys()
        )
    source = inspect.getsource(before)
    assert all(source.count(f"self.{name}(") == 1 for name in overridden)
    assert "self._webui_url" in inspect.getsource(before.webui_url.fget)


def test_ray_has_what_the_adapter_waits_and_ends_processes_by():
    import ray

    node = ray._private.node.Node
    assert {"check_alive", "wait"} <= inspect.signature(node.kill_all_processes).parameters.keys()
    assert isinstance(node.gcs_address, property)
    assert "self._node_id" in inspect.getsource(node.__init__)
    names = list(inspect.signature(ray._private.services.get_node_with_retry).parameters)
    assert names == ["gcs_address", "node_id", "timeout_s", "retry_interval_s"]


def test_ray_reports_what_is_unused_on_each_node(monkeypatch):
    from ray._private import state

    assert not inspect.signature(state.available_resources_per_node).parameters
    nodes = {"a": {"CPU": 2.0, "node:127.0.0.1": 1.0}, "b": {"GPU": 0.5}}
    monkeypatch.setattr(state.state, "available_resources_per_node", lambda: nodes)
    assert ray_private.unused_units("CPU") == {"a": 2.0, "b": 0.0}


def test_ray_describes_the_arguments_that_are_passed(monkeypatch):
    import ray

    monkeypatch.setenv("RAY_TMPDIR", "/" + "long" * 20)
    arguments = ray_private.LOOPBACK_ARGUMENT | ray_private.temporary_folder_argument()
    assert arguments.keys() == RAY_ARGUMENTS
    assert all(
        argument in ray.init.__doc__ for argument in arguments
    )  # an unknown one is refused by `ray.init`


def test_a_short_temporary_folder_is_rays_default(monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    assert ray_private.temporary_folder_argument() == {}
