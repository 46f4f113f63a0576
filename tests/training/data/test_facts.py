"""Tests of the facts about data: counts, the path as it was given, plain values, and no password."""

import json
from types import SimpleNamespace

import pytest
from support.corpus import write_shards

from ablate.training.data.corpus import facts
from ablate.training.data.sources import HubText, TextFiles

pytestmark = pytest.mark.usefixtures("cache")


def test_what_comes_with_packages_is_named_and_counted():
    told = facts("stdlib")
    assert (told["name"], told["type"], told["source"]) == ("stdlib", "package", {"name": "stdlib"})
    assert told["columns"] == {"token": "integer from 0 to 255"}
    assert (told["counts"]["vocabulary"], told["counts"]["bytes per token"]) == (256, 1.0)


def test_a_file_is_named_as_the_experiment_names_it(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("a line\n" * 400)
    monkeypatch.chdir(tmp_path)
    told = facts(TextFiles(text="text.*"))
    assert (told["name"], told["type"], told["source"]) == ("text.*", "local", {"uri": "text.*"})
    assert str(tmp_path) not in json.dumps(told)
    assert sum(told["counts"][key] for key in ("train tokens", "validation tokens")) == 2801
    shards = facts(write_shards(tmp_path))
    assert shards["source"] == {"uri": str(tmp_path / "train.bin")}
    assert "bytes per token" not in shards["counts"]


def test_a_dataset_says_its_commit(monkeypatch):
    api, library = pytest.importorskip("huggingface_hub").HfApi, pytest.importorskip("datasets")
    monkeypatch.setattr(api, "dataset_info", lambda self, name, **_: SimpleNamespace(sha="c0ffee"))
    monkeypatch.setattr(library, "load_dataset", lambda *_, **__: iter(40 * [{"text": "a line\n" * 10}]))
    told = facts(HubText(dataset="some/stories", config="small"))
    assert (told["name"], told["type"]) == ("some/stories", "hugging_face")
    assert told["source"] == {
        "path": "some/stories",
        "config_name": "small",
        "split": "train",
        "revision": "c0ffee",
    }


def test_a_password_in_a_place_is_not_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # in which the address is the path of a file
    (tmp_path / "smb:" / "me:secret@disk").mkdir(parents=True)
    (tmp_path / "smb:" / "me:secret@disk" / "books").write_text("a line\n" * 400)
    told = json.dumps(facts(TextFiles(text="smb://me:secret@disk/books")))
    assert "secret" not in told
    assert "me:***@disk/books" in told


def test_data_that_cannot_be_opened_are_told():
    with pytest.raises(OSError, match="no file matches"):
        facts(TextFiles(text="nowhere.txt"))
