"""Tests of settings: the order in which they override each other, the contents of a profile, and that no password is ever shown."""

import json
from inspect import signature

import pytest
from support.experiments import ablate

from ablate.cli.option_groups import with_fields
from ablate.cli.options import SweepFlags
from ablate.cli.settings import ENVIRONMENT, KEYS, PROFILE, destination, find_settings
from ablate.errors import InputError, passwords, redact

LAB = """
[profile.lab]
state = "lab-runs"
ray = "ray://head:10001"
mlflow = "http://tracker:5000"
tracker = "tensorboard"
workers = 3
executor = "inline"
device = "cpu"
notify = "https://hooks.example/T1/secret-path"
price = 2.5
shared_state = true
[profile.default]
state = "default-runs"
"""


@pytest.fixture(autouse=True)
def bare(tmp_path, monkeypatch):
    """An empty current folder and home, and an environment that says nothing of place."""
    for name in (*ENVIRONMENT.values(), "ABLATE_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home" / ".config").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def refused(*words, **flags) -> list[str]:
    with pytest.raises(InputError) as error:
        find_settings(*words, **flags)
    return [str(problem) for problem in error.value.problems]


def test_without_anything_things_are_in_runs_and_ray_is_started_here(bare):
    place = find_settings(device="cpu")
    assert (str(place.state), place.ray, place.executor, place.workers, place.notify, place.price) == (
        "runs",
        None,
        "ray",
        None,
        None,
        None,
    )
    assert place.mlflow == f"sqlite:///{bare}/here/runs/mlflow.db"
    assert set(place.origins.values()) == {"default", "--device"}


def test_a_profile_says_all_of_it(bare):
    (bare / "here" / "ablate.toml").write_text(LAB)
    place = find_settings("lab")
    assert (str(place.state), place.ray, place.mlflow) == (
        "lab-runs",
        "ray://head:10001",
        "http://tracker:5000",
    )
    assert (place.workers, place.executor, place.device, place.price) == (3, "inline", "cpu", 2.5)
    assert set(place.origins.values()) == {"profile lab of ablate.toml"}


def test_each_flag_is_a_setting_and_its_help_names_its_variable():
    def command(flags: SweepFlags) -> None:
        """Take all settings."""

    shown = signature(with_fields(command)).parameters.values()
    helps = {one.name: one.annotation.__metadata__[0].help for one in shown}
    assert {*helps} == {*KEYS, "profile"} - {"notify"}  # which stands in another panel
    variables = {name: ENVIRONMENT.get(name) for name in helps} | {"profile": PROFILE}
    assert [
        name for name, variable in variables.items() if variable and f"({variable})" not in helps[name]
    ] == []


def test_a_flag_goes_before_the_environment_before_a_profile_before_a_default(bare, monkeypatch):
    (bare / "here" / "ablate.toml").write_text(LAB)
    seen = [str(find_settings().state)]
    monkeypatch.setenv("ABLATE_PROFILE", "lab")
    seen.append(str(find_settings().state))
    monkeypatch.setenv("ABLATE_STATE", "from-environment")
    seen.append(str(find_settings().state))
    seen.append(str(find_settings(state="flagged").state))
    assert seen == ["default-runs", "lab-runs", "from-environment", "flagged"]
    assert find_settings(state="flagged").origins["state"] == "--state"
    assert find_settings().origins["state"] == "ABLATE_STATE"
    assert find_settings("default").origins["ray"] == "default"


def test_the_file_here_goes_before_the_one_in_the_home_folder(bare):
    (bare / "home" / ".config" / "ablate.toml").write_text('[profile.lab]\nstate = "~/runs"')
    assert find_settings("lab").state == bare / "home" / "runs"
    (bare / "here" / "ablate.toml").write_text(LAB)
    assert str(find_settings("lab").state) == "lab-runs"


def test_an_empty_variable_says_nothing(monkeypatch):
    monkeypatch.setenv("ABLATE_STATE", "")
    assert str(find_settings().state) == "runs"


def test_ray_is_started_here_although_a_profile_names_a_cluster(bare):
    (bare / "here" / "ablate.toml").write_text(LAB)
    assert find_settings("lab", ray="local").ray is None


def test_no_mlflow_is_a_choice_too(bare):
    (bare / "here" / "ablate.toml").write_text('[profile.default]\nmlflow = "none"')
    assert find_settings().mlflow is None


def test_an_environment_for_another_process_leads_it_to_the_same_place(bare, monkeypatch):
    (bare / "here" / "ablate.toml").write_text(LAB)
    for place in (find_settings("lab"), find_settings("lab", ray="local", mlflow="none")):
        for name, value in place.environment().items():
            monkeypatch.setenv(name, value)
        again = find_settings()
        assert (again.ray, again.mlflow, again.notify, again.price) == (
            place.ray,
            place.mlflow,
            place.notify,
            place.price,
        )
        assert again.state == place.state.resolve()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            "[profile.lab]\nmlfow = 'x'",
            "ablate.toml: profile.lab.mlfow: no such key; 'mlflow' is the nearest of",
        ),
        (
            "mlflow = 'x'",
            "ablate.toml: mlflow: no such key at the top level; put settings below [profile.NAME]",
        ),
        ("profile = 'lab'", "ablate.toml: profile: must hold tables, [profile.NAME]"),
        ("[profile.other]", "ablate.toml: no profile 'lab'; 'other' is the nearest of other"),
        ("[profile.lab]\nworkers = 0", "ablate.toml: profile.lab.workers: 0: must be a whole number from 1"),
        (
            "[profile.lab]\nworkers = true",
            "ablate.toml: profile.lab.workers: True: must be a whole number from 1",
        ),
        (
            "[profile.lab]\npriority = 1",
            "ablate.toml: profile.lab.priority: no such key; 'price' is the nearest of",
        ),
        ("[profile.lab]\nprice = -1", "ablate.toml: profile.lab.price: -1: must be a number above 0"),
        (
            "[profile.lab]\ndevice = 'tpu'",
            "ablate.toml: profile.lab.device: 'tpu': must be one of auto, cpu, cuda",
        ),
        ("[profile.lab]\nstate = 3", "ablate.toml: profile.lab.state: must be text"),
        ("[profile.lab\n", "ablate.toml: cannot be read: "),
        (
            "[profile.other]\nmlflow = 'postgresql://ablate:s3cret@db/x'",
            "ablate.toml: profile.other.mlflow: must not contain a password",
        ),
        (
            "[profile.lab]\nmlflow = '$NOWHERE'",
            "mlflow in profile lab of ablate.toml: $NOWHERE is not set in the environment",
        ),
    ],
)
def test_what_is_wrong_with_a_profile_is_told_in_a_sentence(bare, content, said):
    (bare / "here" / "ablate.toml").write_text(content)
    (line,) = refused("lab")
    assert line.startswith(said)
    assert "s3cret" not in line


def test_a_profile_without_a_file_is_told(bare):
    (line,) = refused("lab")
    assert line.startswith("profile lab: there is no ablate.toml")


def test_everything_that_is_wrong_is_told_at_once(bare):
    (bare / "here" / "ablate.toml").write_text(
        "[profile.lab]\nworkers = 0\nfoo = 1\n[profile.b]\nprice = 'x'"
    )
    assert len(refused()) == 3


@pytest.mark.parametrize("written", ["$PGPASSWORD", "${PGPASSWORD}"])
def test_a_password_comes_from_the_environment(bare, monkeypatch, written):
    (bare / "here" / "ablate.toml").write_text(
        f'[profile.lab]\nmlflow = "postgresql://ablate:{written}@db/mlflow"'
    )
    monkeypatch.setenv("PGPASSWORD", "s3cret")
    place = find_settings("lab")
    assert place.mlflow == "postgresql://ablate:s3cret@db/mlflow"
    assert place.shown()["mlflow"] == "postgresql://ablate:***@db/mlflow"
    assert "s3cret" not in repr(place)


def test_what_is_missing_in_the_environment_does_not_matter_where_a_flag_goes_before_it(bare):
    (bare / "here" / "ablate.toml").write_text(
        '[profile.lab]\nmlflow = "postgresql://ablate:$NOWHERE@db/mlflow"'
    )
    assert find_settings("lab", mlflow="none").mlflow is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://user:secret@host/db", "postgresql://user:***@host/db"),
        ("postgresql://user:se:cr/et@host/db", "postgresql://user:***@host/db"),
        ("postgresql://user:sec@ret@host/db", "postgresql://user:***@host/db"),
        (
            "API request to http://u:secret@h:5000/api failed, tried twice",
            "API request to http://u:***@h:5000/api failed, tried twice",
        ),
        ("postgresql://host/db?user=u&password=secret&x=1", "postgresql://host/db?user=u&password=***&x=1"),
        ("postgresql://host/db?sslpassword=secret", "postgresql://host/db?sslpassword=***"),
        ("https://host/mlflow?api_key=secret&x=1", "https://host/mlflow?api_key=***&x=1"),
        ("https://host/a?X-Amz-Signature=secret", "https://host/a?X-Amz-Signature=***"),
        ("http://host:5000/path", "http://host:5000/path"),
        ("postgresql://user@host/db", "postgresql://user@host/db"),
        ("sqlite:////home/me/mlflow.db", "sqlite:////home/me/mlflow.db"),
    ],
)
def test_a_text_is_shown_without_its_passwords(text, shown):
    assert redact(text) == shown


def test_a_password_is_found_outside_its_address_too():
    address = "postgresql://user:s%40cret@host/db"
    assert list(passwords(address)) == ["s%40cret"]
    assert redact("no entry for 's@cret' (s%40cret)", address) == "no entry for '***' (***)"


@pytest.mark.parametrize(
    ("hook", "shown"),
    [
        ("https://hooks.example/T1/key", "https://hooks.example/..."),
        ("http://u:secret@h:80/x", "http://u:***@h:80/..."),
        ("notify-send --token abc", "notify-send"),
    ],
)
def test_a_hook_is_shown_without_its_key(hook, shown):
    assert destination(hook) == shown


def test_the_command_prints_what_is_in_force_and_where_it_comes_from(bare):
    (bare / "here" / "ablate.toml").write_text(
        LAB.replace("http://tracker:5000", "postgresql://ablate:$PW@db/x")
    )
    words = ("status", "--settings", "--profile", "lab", "--state", "other")
    given = {"PW": "s3cret", "HOME": str(bare / "home")}
    text, document = (ablate(*words, *more, **given) for more in ((), ("--json",)))
    assert text.returncode == 0, text.stderr
    lines = {line.split()[0]: line for line in text.stdout.splitlines() if line}
    assert lines["state"].split()[1:] == ["other", "--state"]
    assert "postgresql://ablate:***@db/x" in lines["mlflow"]
    assert lines["mlflow"].endswith("profile lab of ablate.toml")
    assert "s3cret" not in text.stdout + document.stdout
    assert "secret-path" not in text.stdout + document.stdout
    settings = json.loads(document.stdout)
    assert settings["state"] == {"value": "other", "origin": "--state"}
    assert settings.keys() == lines.keys()
