"""Text to tokens: what is decoded is what was read, splits are disjoint and whole, what is kept is kept once, and bad text is placed."""

import hashlib
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from ablate import cache as cache_module
from ablate.training.data import Shards, documents, open_corpus, places, prepared
from ablate.training.data.jobs import of_files
from ablate.training.data.sources import HubText, PreparedText, TextFiles, TextSource
from ablate.training.data.tokenisers import SEPARATOR, open_tokeniser

pytestmark = pytest.mark.usefixtures("cache")

STORIES = [
    f"Story {n}: the café closed at {n % 24} o'clock,\nand {'nobody ' * (n % 5)}came.\n" for n in range(400)
]


def stories(folder: Path, name: str = "stories.txt") -> Path:
    (folder / name).write_text("".join(STORIES), encoding="utf-8")
    return folder / name


def lines(folder: Path, name: str = "stories.jsonl", column: str = "text") -> Path:
    (folder / name).write_text(
        "".join(json.dumps({"id": n, column: story}) + "\n" for n, story in enumerate(STORIES))
    )
    return folder / name


def made(folder: Path, *patterns: Path | str, **how) -> prepared.About:
    how = {"val": None, "column": "text", "val_fraction": 0.05} | how
    folder.mkdir()
    job = of_files([str(p) for p in patterns], how.pop("val"), how.pop("column"), how.pop("val_fraction"))
    return prepared.prepare(folder, replace(job, **how))


def decoded(folder: Path, ids) -> str:
    return open_tokeniser(str(folder), lambda: ()).decode(np.asarray(ids))


# --- what comes out is what went in ---------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:400"])
def test_training_and_validation_text_are_the_documents_each_once(tmp_path, tokenizer):
    made(tmp_path / "out", lines(tmp_path), tokenizer=tokenizer)
    about, train, val = prepared.read(tmp_path / "out")
    separator = SEPARATOR if tokenizer != "bytes" else "\0"
    parts = [decoded(tmp_path / "out", ids).split(separator)[1:] for ids in (train, val)]
    assert [len(part) for part in parts] == [about.train.documents, about.val.documents]
    assert sorted(parts[0] + parts[1]) == sorted(STORIES)
    held = sum(len(story.encode()) for story in parts[1]) / sum(len(story.encode()) for story in STORIES)
    assert 0.04 < held < 0.06


def test_a_long_file_is_held_out_in_pieces_that_leave_nothing_out(tmp_path):
    made(tmp_path / "out", stories(tmp_path))
    _, train, val = prepared.read(tmp_path / "out")
    texts = [np.asarray(ids).astype(np.uint8).tobytes() for ids in (train, val)]
    assert texts[0].startswith(b"\0Story 0:")
    assert b"\0" not in texts[0][1:] + texts[1]
    whole = "".join(STORIES).encode()
    assert len(texts[0]) + len(texts[1]) == len(whole) + 1
    assert 0.04 < len(texts[1]) / len(whole) < 0.08
    assert sorted(b"".join(texts)[1:].splitlines()) == sorted(whole.splitlines())  # cut at ends of lines


def test_bytes_take_anything(tmp_path):
    content = bytes(range(256)) * 40
    (tmp_path / "any").write_bytes(content)
    made(tmp_path / "out", tmp_path / "any", val=[str(tmp_path / "any")])
    corpus = open_corpus(PreparedText(prepared=str(tmp_path / "out")))
    assert np.asarray(corpus.train[1:]).astype(np.uint8).tobytes() == content
    assert (corpus.vocab, corpus.bytes_per_token) == (256, 1.0)


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet=" \n\r\t\u00a0\u2003abAB.,'é漢😀0", max_size=400), longest=st.integers(8, 60))
def test_pieces_are_the_text_whole_characters_and_short_enough(tmp_path_factory, text, longest):
    path = tmp_path_factory.mktemp("pieces") / "text"
    path.write_bytes(text.encode())
    found = list(documents.pieces([path], "text", longest))
    assert b"".join(piece.content for piece in found) == text.encode()
    assert "".join(piece.content.decode() for piece in found) == text
    assert all(0 < len(piece.content) <= longest for piece in found)
    assert [piece.first for piece in found] == [n == 0 for n in range(len(found))]
    assert [piece.offset for piece in found] == [
        sum(len(p.content) for p in found[:n]) for n in range(len(found))
    ]


def test_a_text_in_pieces_has_the_tokens_of_the_whole(tmp_path):
    path = tmp_path / "text"
    path.write_text("".join(f"{story}\n    and\n\n\tso  on\n" for story in STORIES))
    tokeniser = open_tokeniser("bpe:500", lambda: documents.pieces([path], "text", 1 << 20))
    for longest in (100, 130, 200):
        pieces = list(documents.pieces([path], "text", longest))
        assert len(pieces) > 100
        (whole,) = tokeniser.encode([documents.Piece(path.read_bytes(), True, "whole")])
        np.testing.assert_array_equal(np.concatenate(tokeniser.encode(pieces)), whole)


# --- tokenisers -----------------------------------------------------------------------------------


def test_a_tokeniser_is_the_same_bytes_for_the_same_text_whatever_the_threads(tmp_path):
    path = stories(tmp_path)
    code = f"""from ablate.training.data import documents as d, tokenisers as t
print(t.open_tokeniser("bpe:600", lambda: d.pieces([d.Path({str(path)!r})], "text", 300)).json)"""
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            check=True,
            env={"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads},
        )
        for threads in ("1", "4")
    ]
    digests = {hashlib.sha256(run.stdout).hexdigest() for run in runs}
    assert len(digests) == 1
    assert len(json.loads(runs[0].stdout)["model"]["vocab"]) == 600


def test_the_written_tokenizer_is_the_one_that_wrote_the_shards_also_for_others(tmp_path):
    from tokenizers import Tokenizer

    for word in ("bytes", "bpe:400"):
        out = tmp_path / word.replace(":", "")
        made(out, stories(tmp_path), tokenizer=word)
        theirs = Tokenizer.from_file(str(out / "tokenizer.json"))
        _, train, _ = prepared.read(out)
        text = theirs.decode(np.asarray(train[1:200]).tolist(), skip_special_tokens=False)
        assert text.startswith("Story 0: the café closed at 0 o'clock,\nand came.\nStory 1")
        assert (
            theirs.encode("the café", add_special_tokens=False).ids
            == open_tokeniser(str(out), lambda: ())
            .encode([documents.Piece("the café".encode(), True, "x")])[0]
            .tolist()
        )


def test_a_prepared_tokeniser_gives_another_text_the_same_ids(tmp_path):
    made(tmp_path / "out", stories(tmp_path), tokenizer="bpe:400")
    made(tmp_path / "again", stories(tmp_path), tokenizer=str(tmp_path / "out"))
    about, again = prepared.about(tmp_path / "out"), prepared.about(tmp_path / "again")
    assert (again.vocab, again.separator, again.train.tokens, again.fingerprint) == (
        400,
        0,
        about.train.tokens,
        about.fingerprint,
    )


def test_a_published_tokeniser_neither_cuts_nor_pads_and_its_separator_is_found(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    library = Tokenizer(models.WordLevel({"a": 7, "b": 2, "?": 3}, unk_token="?"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(["</s>"])
    library.enable_truncation(2)
    library.enable_padding(length=2)
    library.save(str(tmp_path / "t.json"))
    tokeniser = open_tokeniser(str(tmp_path / "t.json"), lambda: ())
    assert [
        ids.tolist()
        for ids in tokeniser.encode([documents.Piece(b"a b a", True, "x"), documents.Piece(b"c", True, "y")])
    ] == [
        [7, 2, 7],
        [3],
    ]
    assert tokeniser.vocab == 8
    assert tokeniser.separator == library.token_to_id("</s>")


def test_a_large_vocabulary_is_stored_in_four_bytes_in_llm_cs_layout(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    library = Tokenizer(models.WordLevel({"a": 70000, "?": 1}, unk_token="?"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.save(str(tmp_path / "t.json"))
    (tmp_path / "text").write_text("a b a")
    made(
        tmp_path / "out", tmp_path / "text", tokenizer=str(tmp_path / "t.json"), val=[str(tmp_path / "text")]
    )
    content = (tmp_path / "out" / "train_000000.bin").read_bytes()
    assert np.frombuffer(content[:12], np.int32).tolist() == [20240801, 7, 3]
    assert np.frombuffer(content[1024:], np.uint32).tolist() == [70000, 1, 70000]


# --- shards ---------------------------------------------------------------------------------------


def test_shards_are_in_llm_cs_layout_and_read_as_one_text(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    one, many = made(whole, stories(tmp_path)), made(parts, stories(tmp_path), shard_tokens=1000)
    assert len(many.train.shards) == -(-many.train.tokens // 1000) > 5
    content = (parts / "train_000001.bin").read_bytes()
    assert np.frombuffer(content[:12], np.int32).tolist() == [20240520, 1, 1000]
    assert len(content) == 1024 + 2000
    a, b = (open_corpus(PreparedText(prepared=str(folder))) for folder in (whole, parts))
    np.testing.assert_array_equal(a.train, b.train)
    for start in (0, 990, 999, 1000, 2500, len(a.train) - 20):
        np.testing.assert_array_equal(a.train[start : start + 1020], b.train[start : start + 1020])
    assert (one.fingerprint, a.fingerprint, a.unigram_entropy()) == (
        many.fingerprint,
        b.fingerprint,
        b.unigram_entropy(),
    )
    c = open_corpus(Shards(train=str(parts / "train_*.bin"), val=str(parts / "val_*.bin"), vocab=256))
    np.testing.assert_array_equal(a.train, c.train)


def test_a_window_across_files_is_a_batch(tmp_path):
    import torch

    from ablate.training.data.batches import training_batch

    made(tmp_path / "whole", stories(tmp_path))
    made(tmp_path / "parts", stories(tmp_path), shard_tokens=50)
    batches = [
        training_batch(open_corpus(PreparedText(prepared=str(tmp_path / name))), 0, 0, 0, 8, 128)
        for name in ("whole", "parts")
    ]
    assert torch.equal(batches[0][0], batches[1][0])
    assert torch.equal(batches[0][1], batches[1][1])


def test_a_text_of_more_files_than_a_process_may_open_is_read(tmp_path):
    about = made(tmp_path / "many", stories(tmp_path), shard_tokens=20)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    now = len(os.listdir("/proc/self/fd"))
    assert len(about.train.shards) > 400
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (now + 200, before[1]))
        corpus = open_corpus(PreparedText(prepared=str(tmp_path / "many")))
        assert len(corpus.train[:]) == about.train.tokens
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_training_ends_after_so_many_tokens(tmp_path):
    about = made(tmp_path / "out", lines(tmp_path), tokens=5000)
    assert about.train.tokens == 5000
    assert 0 < about.val.tokens < 1000


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda out: (out / "train_000000.bin").unlink(), r"train_000000\.bin is missing"),
        (lambda out: (out / "data.json").unlink(), r"no data\.json there; `ablate data prepare"),
        (
            lambda out: (out / "data.json").write_text("{}"),
            r"data\.json: not as `ablate data prepare` writes it",
        ),
        (lambda out: cut(out / "train_000000.bin"), "truncated: its header counts"),
        (lambda out: turn(out / "val_000000.bin", 1030, b"!"), "are not those that"),
        (lambda out: turn(out / "train_000000.bin", 1031, b"\7"), "is beyond the vocabulary of 256"),
    ],
    ids=["missing", "no data.json", "another", "truncated", "changed", "beyond"],
)
def test_a_prepared_folder_that_was_spoilt_is_told(tmp_path, spoil, told):
    made(tmp_path / "out", stories(tmp_path))
    spoil(tmp_path / "out")
    with pytest.raises((OSError, ValueError), match=told):
        open_corpus(PreparedText(prepared=str(tmp_path / "out")))


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)


def turn(path: Path, place: int, byte: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        file.write(byte)


# --- text named in an experiment ------------------------------------------------------------------


def test_text_is_the_same_corpus_as_the_folder_prepared_of_it(tmp_path):
    path = stories(tmp_path)
    about = made(tmp_path / "out", path, tokenizer="bpe:400", val_fraction=0.01)
    corpus = open_corpus(TextFiles(text=str(path), tokenizer="bpe:400"))
    assert (corpus.fingerprint, corpus.vocab, corpus.bytes_per_token) == (
        about.fingerprint,
        about.vocab,
        about.bytes_per_token,
    )
    np.testing.assert_array_equal(
        corpus.train, open_corpus(PreparedText(prepared=str(tmp_path / "out"))).train
    )


def test_what_was_made_is_kept_by_content(tmp_path, cache):
    path, copy = stories(tmp_path), stories(tmp_path, "copy.txt")
    first = open_corpus(TextFiles(text=str(path)))
    before = {file: file.stat() for file in (cache / "corpora").glob("*/*")}
    assert open_corpus(TextFiles(text=str(copy))).fingerprint == first.fingerprint
    assert {file: file.stat() for file in (cache / "corpora").glob("*/*")} == before
    assert len([folder for folder in (cache / "corpora").iterdir() if folder.is_dir()]) == 1


def test_a_changed_text_is_another_corpus(tmp_path):
    path = stories(tmp_path)
    first = open_corpus(TextFiles(text=str(path)))
    path.write_text(path.read_text().replace("closed", "opened"))
    open_corpus.__globals__["_opened"].cache_clear()
    assert open_corpus(TextFiles(text=str(path))).fingerprint != first.fingerprint


def test_a_file_is_read_again_when_it_may_have_changed_and_only_then(tmp_path, monkeypatch):
    path = stories(tmp_path)
    with monkeypatch.context() as context:
        now = time.time
        context.setattr(time, "time", lambda: now() + 3600)  # a change just now cannot be dated back
        first = cache_module.digest([path])
        cache_module.note(cache_module.stamp([path]), "noted")
        assert cache_module.digest([path]) == "noted"
    path.write_text(path.read_text().replace("closed", "opened"))
    now = path.stat().st_mtime_ns
    second = cache_module.digest([path])
    path.write_text(
        path.read_text().replace("opened", "tended")
    )  # of the same size, and in the same moment for a coarse clock
    os.utime(path, ns=(now, now))
    assert len({first, second, cache_module.digest([path])}) == 3


def test_two_processes_at_once_make_it_once_and_agree(tmp_path, cache):
    path = stories(tmp_path)
    code = f"""
import time, ablate.training.data.prepared as p
make = p.prepare
def counted(*words):
    open({str(tmp_path / "made")!r}, "a").write("x")
    time.sleep(1)  # until the others are there
    return make(*words)
p.prepare = counted
from ablate.training.data.corpus import open_corpus
from ablate.training.data.sources import TextFiles
print(open_corpus(TextFiles(text={str(path)!r}, tokenizer="bpe:600")).fingerprint)"""
    runs = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    told = {run.communicate(timeout=300)[0] for run in runs}
    assert all(run.returncode == 0 for run in runs)
    assert len(told) == 1
    assert (tmp_path / "made").read_text() == "x"
    assert not list((cache / "corpora").glob("*.making"))


def test_what_a_killed_process_left_is_no_corpus(tmp_path, cache):
    path = stories(tmp_path)
    first = open_corpus(TextFiles(text=str(path)))
    (folder,) = [folder for folder in (cache / "corpora").iterdir() if folder.is_dir()]
    torn = folder.with_name(f"{folder.name}.making")
    folder.rename(torn)
    (torn / "train_000000.bin").write_bytes(b"torn")
    open_corpus.__globals__["_opened"].cache_clear()
    assert open_corpus(TextFiles(text=str(path))).fingerprint == first.fingerprint
    assert not torn.exists()


def test_a_cache_that_cannot_be_written_is_told_with_the_way_out(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ABLATE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(OSError, match=r"the cache cannot be written \(Not a directory\); set ABLATE_CACHE"):
        open_corpus(TextFiles(text=str(stories(tmp_path))))


def test_parquet_and_json_lines_hold_the_same_documents(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(
        pa.table({"id": range(len(STORIES)), "story": STORIES}), tmp_path / "s.parquet", row_group_size=90
    )
    parquet = made(tmp_path / "a", tmp_path / "s.parquet", column="story")
    assert (
        parquet.fingerprint
        == made(tmp_path / "b", lines(tmp_path, column="story"), column="story").fingerprint
    )


@pytest.mark.parametrize(
    ("name", "content", "how", "told"),
    [
        ("t.txt", b"", {}, "there is no text: the files are empty"),
        ("t.txt", b"short", {}, "nothing is left to validate on"),
        (
            "t.txt",
            b"a\n" * 3000 + b"\xff\xfe",
            {"tokenizer": "bpe:300"},
            r"t\.txt: byte 6000 \(0xff\) is not UTF-8",
        ),
        ("t.txt", b"text", {"tokenizer": "nowhere.json"}, "there is no file nowhere.json"),
        ("t.txt.gz", b"\x1f\x8b", {}, r"t\.txt\.gz: a \.gz file is no text; unpack it first"),
        ("t.bin", b"ids", {}, r"t\.bin: a \.bin file is no text"),
        (
            "t.jsonl",
            b'{"text": "a"}\n{"text": 3}\n',
            {},
            r"t\.jsonl:2: no text in column 'text'; its columns: text",
        ),
        (
            "t.jsonl",
            b'{"text": "a"}\n{"body": "b"}\n',
            {},
            r"t\.jsonl:2: no text in column 'text'; its columns: body",
        ),
        ("t.jsonl", b'{"text": "a"}\n{"te', {}, r"t\.jsonl:2: not JSON"),
        ("t.jsonl", b"[" * 100_000, {}, r"t\.jsonl:1: not JSON"),
        ("t.parquet", b"PAR1", {}, r"t\.parquet: not a Parquet file that can be read"),
    ],
)
def test_bad_text_is_told_with_its_place(tmp_path, name, content, how, told):
    (tmp_path / name).write_bytes(content)
    with pytest.raises((OSError, ValueError), match=told):
        made(tmp_path / "out", tmp_path / name, **how)


@pytest.mark.parametrize(
    ("vocab", "told"),
    [({}, "tokenizer .*: it has no tokens"), ({"b": 0}, "tokenizer .*: it cannot encode the text: .*UNK")],
)
def test_a_vocabulary_that_lacks_the_text_is_told(tmp_path, vocab, told):
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}
    (tmp_path / "t.json").write_text(json.dumps({"model": model}))
    (tmp_path / "t.txt").write_text("a b")
    with pytest.raises(ValueError, match=told):
        made(tmp_path / "out", tmp_path / "t.txt", tokenizer=str(tmp_path / "t.json"))


def test_a_file_that_is_no_tokenizer_is_told(tmp_path):
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(ValueError, match=r"t\.json: not a tokenizer\.json"):
        open_tokeniser(str(tmp_path / "t.json"), lambda: ())


# --- datasets -------------------------------------------------------------------------------------


def test_files_of_a_dataset_that_change_their_splits_are_another_version_of_it(tmp_path):
    """In the same order by name, so that their bytes one after the other are the same."""
    from ablate.training.data import hub

    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text(split)
    first = hub.version(str(tmp_path), None, "")
    (tmp_path / "train.jsonl").rename(tmp_path / "test.jsonl")
    (tmp_path / "validation.jsonl").rename(tmp_path / "train.jsonl")
    assert hub.version(str(tmp_path), None, "") != first


@pytest.mark.filterwarnings("ignore")
def test_a_dataset_in_a_local_folder_is_read_by_the_library_and_ends_at_the_tokens(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    lines(tmp_path / "set", "train.jsonl")
    source = HubText(dataset=str(tmp_path / "set"), tokens=3000, val_fraction=0.05)
    corpus = open_corpus(source)
    assert len(corpus.train) == 3000
    assert np.asarray(corpus.train[:10]).astype(np.uint8).tobytes() == b"\0Story 0: "


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"column": "body"}, "row 0: no text in column 'body'; its columns: id, text"),
        ({"split": "test"}, "split test: cannot be read: "),
    ],
)
def test_a_wrong_column_or_split_of_a_dataset_is_told(tmp_path, fields, told):
    pytest.importorskip("datasets")
    lines(tmp_path, "train.jsonl")
    with pytest.raises((OSError, ValueError), match=told) as error:
        open_corpus(HubText(dataset=str(tmp_path), **fields))
    assert "\n" not in str(error.value)


@pytest.mark.filterwarnings("ignore")
def test_a_hub_that_cannot_be_reached_is_told_in_one_sentence_with_what_there_is_instead(monkeypatch):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://me:secret@127.0.0.1:9")
    with pytest.raises(
        OSError,
        match=r"dataset some/stories: http://me:\*\*\*@127\.0\.0\.1:9 cannot be reached \(.*\)",
    ) as error:
        open_corpus(HubText(dataset="some/stories"))
    message = str(error.value)
    assert all(word in message for word in ("data: stdlib", "{text: files}", "ablate data prepare hub:NAME"))
    assert "\n" not in message
    assert "secret" not in message
    with pytest.raises(
        OSError, match=r"dataset some/other/stories: not a name on http.*'namespace/repo_name'"
    ):
        open_corpus(HubText(dataset="some/other/stories"))
    with pytest.raises(OSError, match=r"tokenizer some/model: .* cannot be reached .*`bytes`, `bpe:N`"):
        open_tokeniser("some/model", lambda: ())


@pytest.mark.filterwarnings("ignore")
def test_a_commit_is_asked_for_once(tmp_path, monkeypatch):
    from ablate.training.data import hub

    api, asked = pytest.importorskip("huggingface_hub").HfApi, []
    info = SimpleNamespace(sha="c0ffee")
    monkeypatch.setattr(api, "dataset_info", lambda self, name, **_: asked.append(name) or info)
    assert [hub.version("some/stories", None, "") for _ in range(3)] == ["c0ffee"] * 3
    assert hub.version("some/stories", "v2", "") == "c0ffee"
    assert len(asked) == 2


def test_without_the_library_the_extra_is_named(tmp_path, monkeypatch):
    lines(tmp_path, "train.jsonl")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(OSError, match=r"pip install 'ablate-fp4\[hf\]'"):
        open_corpus(HubText(dataset=str(tmp_path)))


def test_nothing_reaches_a_network_unless_a_dataset_is_named(tmp_path):
    path = stories(tmp_path)
    code = f"""
import socket, sys
def refuse(*words): raise SystemExit(f"a connection to {{words}}")
socket.socket.connect = socket.getaddrinfo = refuse
from ablate.training.data.corpus import open_corpus
from ablate.training.data.sources import TextFiles
open_corpus("stdlib"); open_corpus(TextFiles(text={str(path)!r}, tokenizer="bpe:300"))
print(*sys.modules)"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert not {"torch", "transformers", "datasets", "huggingface_hub"} & set(run.stdout.split())


# --- the words ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("stdlb", "must be stdlib or prose, or have one of the keys train, text, dataset, prepared"),
        ({"vocab": 3}, "must be stdlib or prose, or have one of the keys"),
        ({"train": "a", "val": "b"}, "vocab"),
        ({"text": "a", "tokenizer": "bpe:12"}, "bpe:N takes N tokens, from 257"),
        ({"text": "a", "tokenizer": "two words"}, "must be bytes, bpe:N, the path"),
        ({"text": "a", "vocab": 3}, "vocab"),
        ({"prepared": "a", "tokenizer": "bytes"}, "tokenizer"),
    ],
)
def test_a_source_that_is_none_is_refused_once_with_what_there_is(value, told):
    with pytest.raises(ValidationError) as error:
        TypeAdapter(TextSource).validate_python(value)
    assert error.value.error_count() == 1
    assert told in str(error.value)


def test_a_source_survives_json_and_names_its_places():
    kinds = TypeAdapter(TextSource)
    for value in (
        "stdlib",
        {"train": "a", "val": "b", "vocab": 9},
        {"text": "a"},
        {"dataset": "a/b"},
        {"prepared": "a"},
    ):
        source = kinds.validate_python(value)
        assert kinds.validate_json(kinds.dump_json(source)) == source
        assert hash(source) == hash(kinds.validate_python(value))
        assert places(source) <= ({*type(source).model_fields} if isinstance(value, dict) else set())
    assert places(Shards(train="a", val="b", vocab=9)) == {"train", "val"}


def test_a_part_of_a_source_is_a_knob_and_a_mistyped_one_is_told_with_the_nearest(tmp_path):
    from ablate.experiment.arms import KnobError, StartingPoint

    path = str(stories(tmp_path))
    base = StartingPoint("gpt", {"data": {"text": path}}, "bf16")
    arm = base.arm({"workload.data.tokenizer": "bpe:300", "workload.data.val_fraction": 0.1})
    assert arm.config.data == TextFiles(text=path, tokenizer="bpe:300", val_fraction=0.1)
    with pytest.raises(
        KnobError, match=r"data\.text\.tokeniser: no such key; 'tokenizer' is the nearest of tokenizer"
    ):
        StartingPoint("gpt", {"data": {"text": path, "tokeniser": "bytes"}}, "bf16").arm({})
