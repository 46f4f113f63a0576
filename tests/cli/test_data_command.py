"""`ablate data prepare`, also with `--show`: what is printed can be pasted and run, mistakes are told in a sentence and leave nothing behind."""

import re

import numpy as np
import pytest
import typer
from support.experiments import ablate
from typer.testing import CliRunner

from ablate.cli.data import app
from ablate.errors import InputError
from ablate.training.data import open_corpus
from ablate.training.data.sources import PreparedText

DATA = typer.Typer()
DATA.add_typer(app, name="data")
TEXT = "".join(f"Line {n} of a text about nothing in particular.\n" for n in range(600))


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A folder with a text, and a cache of its own."""
    monkeypatch.setenv("ABLATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def ran(*words: str) -> str:
    done = CliRunner().invoke(DATA, ["data", *words])
    if isinstance(done.exception, InputError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:400"])
def test_what_is_prepared_is_shown_and_its_yaml_can_be_pasted(place, tokenizer):
    printed = ran("prepare", "text.txt", "--out", "out", "--tokenizer", tokenizer, "--val-fraction", "0.1")
    (place / "x.yaml").write_text(
        "schema: 1\nquestion: Does it run?\n"
        + re.search(r"workload: .*", printed)[0]
        + "\nablate: {rht: [true]}\nseeds: 1\n"
    )
    done = ablate("plan", "x.yaml")
    assert done.returncode == 0, done.stderr
    corpus, shown = open_corpus(PreparedText(prepared=str(place / "out"))), ran("prepare", "out", "--show")
    counts = [f"{number:,} tokens" for number in (len(corpus.train), len(corpus.val), corpus.vocab)]
    for words in (*counts, corpus.fingerprint, "Line 0 of a text"):
        assert words in shown
        assert words in printed + "Line 0 of a text"


def test_several_files_and_a_text_to_validate_on(place):
    (place / "other.txt").write_text("held out")
    ran("prepare", "text.txt", "text.txt", "--val", "other.txt", "--out", "out", "--shard-tokens", "5000")
    corpus = open_corpus(PreparedText(prepared=str(place / "out")))
    assert np.asarray(corpus.val).astype(np.uint8).tobytes() == b"\0held out"
    assert np.asarray(corpus.train).astype(np.uint8).tobytes() == b"\0" + TEXT.encode()
    assert len(list((place / "out").glob("train_*.bin"))) == -(-len(TEXT) // 5000)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("stdlib", ("256 tokens", "begins")),
        ("prose", ("256 tokens", "begins")),
    ],
)
def test_what_needs_no_file_is_shown_too(what, words):
    shown = ran("prepare", what, "--show")
    assert all(word in shown for word in (*words, "fingerprint"))


def test_a_shard_is_shown_by_its_ids(place):
    np.array([3, 1, 4], np.uint16).tofile(place / "raw.bin")
    shown = ran("prepare", "raw.bin", "--show")
    assert "3 tokens of uint16, the largest id 4" in shown
    assert "3 1 4" in shown


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["prepare", "nothing.txt", "--out", "out"], "no file matches 'nothing.txt'"),
        (["prepare", ".", "--out", "out"], "no file matches '.': it is a folder"),
        (["prepare", "text.txt", "--out", "."], ".: is not empty"),
        (["prepare", "text.txt", "--out", "text.txt"], "text.txt: is not empty"),
        (["prepare", "text.txt", "--out", "out", "--tokenizer", "bpe:many"], "bpe:N takes N tokens"),
        (
            ["prepare", "text.txt", "--out", "out", "--tokenizer", "text.txt"],
            "text.txt: not a tokenizer.json",
        ),
        (["prepare", "hub:a/b", "text.txt", "--out", "out"], "hub:a/b: a dataset must be the only input"),
        (["prepare", "text.txt"], "--out FOLDER is needed"),
        (["prepare", "stdlib", "--show", "--out", "out"], "--show: describes data as they are"),
        (["prepare", "stdlib", "--show", "--split", "test"], "--show: describes data as they are"),
        (["prepare", "nothing", "--show"], "no file matches 'nothing'"),
        (["prepare", "cache", "--show"], "cache: no data.json there"),
    ],
)
def test_a_mistake_is_told_in_one_sentence_and_nothing_is_left(place, words, told):
    (place / "cache").mkdir()
    with pytest.raises(InputError) as error:
        ran(*words)
    assert told in str(error.value)
    assert "\n" not in str(error.value)
    assert not (place / "out").exists()


def test_a_failure_half_way_leaves_nothing(place):
    (place / "bad.txt").write_bytes(TEXT.encode() * 20 + b"\xff")
    with pytest.raises(InputError, match=r"bad\.txt: byte \d+ \(0xff\) is not UTF-8"):
        ran("prepare", "text.txt", "bad.txt", "--out", "out", "--tokenizer", "bpe:300")
    assert not (place / "out").exists()


def test_the_command_is_told_from_outside_with_status_2():
    done = ablate("data", "prepare", "nothing", "--show")
    assert (done.returncode, done.stderr) == (2, "no file matches 'nothing'\n")
