"""Relative paths of data and models begin at the experiment file, wherever the command is run; they are no part of a trial's id."""

import json
import shutil
from pathlib import Path

import pytest
from support.experiments import SHAPE, VOCAB, problems, shards, tiny, write

from ablate.experiment.load import load
from ablate.experiment.plan_notes import remarks
from ablate.experiment.trial_spec import TrialSpec
from ablate.training.data import located
from ablate.training.data.sources import HubText, PreparedText, TextFiles
from ablate.training.workloads.gpt import Gpt

RELATIVE = {"train": "tokens/train.bin", "val": "tokens/val*.bin", "vocab": VOCAB}


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """An experiment whose data lie in a folder beside it, named relatively."""
    folder = tmp_path / "project"
    shards(folder / "tokens")
    return write(folder, workload={"gpt": SHAPE | {"data": RELATIVE}})


def first(path: Path) -> TrialSpec:
    experiment = load(path, "cpu")
    return experiment.spec(experiment.arms[0], 0, "cpu")


def test_data_are_found_beside_the_file_from_any_working_directory(beside, tmp_path, monkeypatch):
    absolute = tiny(tmp_path / "other", shape={"data": shards(tmp_path / "elsewhere")})
    ids = {absolute.spec(absolute.arms[0], 0, "cpu").id}
    for where in (beside.parent, tmp_path, Path("/")):
        monkeypatch.chdir(where)
        spec = first(beside)
        ids.add(spec.id)
        assert spec.config.data.train == str(beside.parent / "tokens" / "train.bin")
        assert list(remarks(load(beside, "cpu"))) == []
    assert len(ids) == 1
    assert len(first(beside).config.corpus.train) == 10_000


def test_the_path_of_the_file_itself_may_be_relative(beside, monkeypatch):
    monkeypatch.chdir(beside.parent)
    assert first(Path(beside.name)).config.data.train == str(beside.parent / "tokens" / "train.bin")


def test_what_crosses_to_a_worker_is_found_in_its_working_directory(beside, tmp_path, monkeypatch):
    monkeypatch.chdir(beside.parent)
    wire = first(beside).wire
    monkeypatch.chdir("/")
    assert TrialSpec.parse(wire).config.corpus.vocab == VOCAB


def test_what_lies_in_the_working_directory_alone_is_not_taken_for_data_beside_the_file(
    beside, tmp_path, monkeypatch
):
    (work := tmp_path / "work").mkdir()
    shutil.move(beside.parent / "tokens", work / "tokens")
    monkeypatch.chdir(work)
    (problem,) = problems(beside)
    assert str(beside.parent / "tokens" / "train.bin") in problem.message
    found = located(Gpt(model="tokens"), beside.parent)  # torch's libraries would read ./tokens
    assert found.model == str(beside.parent / "tokens")


def test_what_lies_in_both_is_taken_from_beside_the_file(beside, tmp_path, monkeypatch):
    shards(tmp_path / "tokens", tokens=24_000)
    monkeypatch.chdir(tmp_path)
    assert len(first(beside).config.corpus.train) == 10_000


def test_what_lies_in_neither_is_refused_with_the_path_that_was_looked_for(beside, monkeypatch):
    shutil.rmtree(beside.parent / "tokens")
    (problem,) = problems(beside)
    assert str(beside.parent / "tokens" / "train.bin") in problem.message


def test_the_names_of_arms_are_as_written(beside, monkeypatch):
    shards(beside.parent / "more", tokens=24_000)
    other = {"train": "more/train.bin", "val": "more/val.bin", "vocab": VOCAB}
    path = write(
        beside.parent,
        "two",
        workload={"gpt": SHAPE | {"data": RELATIVE}},
        ablate={"workload.data": [RELATIVE, other]},
    )
    arms = [arm for arm in load(path, "cpu").arms if "data" in arm.name]
    assert all(str(beside.parent) not in json.dumps(arm.knobs) + arm.name for arm in arms)
    assert {len(arm.config.corpus.train) for arm in arms} == {10_000, 20_000}


@pytest.mark.parametrize(
    ("source", "field"),
    [
        (TextFiles(text="a", tokenizer="bytes"), "text"),
        (TextFiles(text="/x", val="a"), "val"),
        (TextFiles(text="/x", tokenizer="./a"), "tokenizer"),
        (HubText(dataset="a"), "dataset"),
        (PreparedText(prepared="a"), "prepared"),
        (Gpt(model="a"), "model"),
    ],
)
def test_every_field_that_holds_a_path_is_made_absolute(source, field, tmp_path, monkeypatch):
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "a").mkdir()
    monkeypatch.chdir(tmp_path)
    found = located(source, tmp_path / "file")
    assert Path(getattr(found, field)) == tmp_path / "file" / "a"
    assert found.model_copy(update={field: getattr(source, field)}) == source


def test_names_on_a_hub_and_words_stay_as_they_are(tmp_path):
    for source in (
        HubText(dataset="a/b", tokenizer="gpt2"),
        Gpt(model="a/b"),
        TextFiles(text="/a"),
    ):
        assert located(source, tmp_path) == source


@pytest.mark.filterwarnings("ignore")
def test_the_id_of_trials_on_a_hubs_layout_of_text_is_of_the_folder_and_not_of_the_working_directory(
    tmp_path, monkeypatch
):
    pytest.importorskip("datasets")
    project, link = tmp_path / "project", tmp_path / "link"
    (project / "pets").mkdir(parents=True)
    rows = [{"text": f"document {number}, " + "words " * 40} for number in range(200)]
    (project / "pets" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    link.symlink_to(project)

    def spec(file: Path) -> TrialSpec:
        experiment = load(file, "cpu")
        assert list(remarks(experiment)) == []
        return experiment.spec(experiment.arms[0], 0, "cpu")

    def gpt(name: str, dataset: str) -> Path:
        return write(project, name, {"data": {"dataset": dataset, "tokens": 2000, "val_fraction": 0.2}})

    relative, absolute = gpt("relative", "pets"), gpt("absolute", str(project / "pets"))
    ids = {spec(absolute).id}
    for where, file in (
        (project, "relative.yaml"),
        (tmp_path, "project/relative.yaml"),
        (tmp_path, "link/relative.yaml"),
    ):
        monkeypatch.chdir(where)
        ids.add(spec(Path(file)).id)
    monkeypatch.chdir(project / "pets")
    for file in (relative, Path("../relative.yaml"), link / "relative.yaml"):
        ids.add(spec(file).id)
    assert len(ids) == 1
    monkeypatch.chdir("/")
    assert TrialSpec.parse(spec(relative).wire).id in ids
