"""Corpora and batches: what is read is what was written, splits are fixed, and batches are functions of their arguments alone."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from ablate.training.data import Shards, jobs, open_corpus, prepared
from ablate.training.data.batches import training_batch, validation_batches
from ablate.training.data.corpus import Corpus
from ablate.training.workloads.gpt import Gpt


def counting(train: int = 1000, val: int = 300) -> Corpus:
    """Token i is i: a window shows where it starts."""
    return Corpus(np.arange(train, dtype=np.uint16), np.arange(val, dtype=np.uint16), train, "0", None)


def write(path, tokens, header: int | None = None, dtype=np.uint16):
    """A token shard: raw, or with llm.c's header of that magic number."""
    head = np.zeros(256, dtype=np.int32)
    head[:3] = header or 0, 1, len(tokens)
    path.write_bytes((head.tobytes() if header else b"") + np.asarray(tokens, dtype=dtype).tobytes())
    return str(path)


def source(tmp_path, train, val, **fields) -> Shards:
    return Shards(train=train, val=val, **{"vocab": 50, **fields})


# --- shards ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "dtype"), [(None, np.uint16), (20240520, np.uint16), (20240801, np.uint32)]
)
def test_a_shard_is_read_as_it_was_written(tmp_path, header, dtype):
    tokens = np.arange(700) % 50
    train = write(tmp_path / "a.bin", tokens, header, dtype)
    corpus = open_corpus(source(tmp_path, train, write(tmp_path / "v.bin", range(8))))
    np.testing.assert_array_equal(corpus.train, tokens)
    np.testing.assert_array_equal(corpus.val, range(8))
    assert corpus.vocab == 50


def test_raw_uint32_shards_say_so(tmp_path):
    path = write(tmp_path / "a.bin", [70000, 1], dtype=np.uint32)
    np.testing.assert_array_equal(
        open_corpus(source(tmp_path, path, path, vocab=70001, dtype="uint32")).train, [70000, 1]
    )


def test_a_glob_joins_shards_in_order_of_name(tmp_path):
    for name, first in (("t2", 10), ("t1", 0), ("t3", 20)):
        write(tmp_path / f"{name}.bin", range(first, first + 10))
    val = write(tmp_path / "v.bin", range(8))
    np.testing.assert_array_equal(
        open_corpus(source(tmp_path, str(tmp_path / "t*.bin"), val)).train, range(30)
    )


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(OSError, match=r"no file matches .*nothing\.bin"):
        open_corpus(source(tmp_path, str(tmp_path / "nothing.bin"), "x"))


@pytest.mark.parametrize("size", [13, 1025, 3])
def test_half_a_token_is_refused(tmp_path, size):
    (tmp_path / "odd.bin").write_bytes(bytes(size))
    with pytest.raises(ValueError, match=rf"odd\.bin: {size} bytes are not a whole number of uint16 tokens"):
        open_corpus(source(tmp_path, str(tmp_path / "odd.bin"), str(tmp_path / "odd.bin")))


def test_a_shard_of_one_token_is_read(tmp_path):
    path = write(tmp_path / "one.bin", [7])
    assert open_corpus(source(tmp_path, path, path)).train[:].tolist() == [7]


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "empty.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"empty\.bin"):
        open_corpus(source(tmp_path, str(tmp_path / "empty.bin"), str(tmp_path / "empty.bin")))


@pytest.mark.parametrize("count", [-5, -600])
def test_a_header_with_a_negative_count_is_told_in_a_sentence(tmp_path, count):
    """As a writer leaves it that counts more tokens than 32 bits hold: 2**32 - 5 of them come back as -5."""
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240520, 1, count
    (tmp_path / "negative.bin").write_bytes(header.tobytes() + bytes(200))
    source = Shards(train=str(tmp_path / "negative.bin"), val=str(tmp_path / "negative.bin"), vocab=64)
    said = rf"negative\.bin: its header counts {count} tokens: damaged, or written with more than the 2,147,483,647 tokens"
    with pytest.raises(ValueError, match=said):
        open_corpus(source)
    assert "header counts" in dict(Gpt(data=source).problems())["data"]


def test_a_truncated_shard_is_refused(tmp_path):
    path = write(tmp_path / "cut.bin", range(100), header=20240520)
    with open(path, "r+b") as file:
        file.truncate(1024 + 150)
    with pytest.raises(ValueError, match=r"cut\.bin: truncated: its header counts 100 tokens"):
        open_corpus(source(tmp_path, path, path))


@pytest.mark.parametrize(
    "fields", [{"vocab": 1}, {"dtype": "int8"}, {"bytes_per_token": 0.0}, {"tokeniser": "gpt2"}]
)
def test_an_impossible_source_is_refused(fields):
    with pytest.raises(ValidationError):
        Shards(**{"train": "a", "val": "b", "vocab": 10, **fields})


def test_the_fingerprint_is_that_of_the_content(tmp_path):
    tokens = np.arange(5000) % 50
    a, same = write(tmp_path / "a.bin", tokens), write(tmp_path / "same.bin", tokens)
    changed, val = write(tmp_path / "b.bin", np.roll(tokens, 1)), write(tmp_path / "v.bin", range(8))
    prints = [open_corpus(source(tmp_path, train, val)).fingerprint for train in (a, same, changed)]
    assert prints[0] == prints[1] != prints[2]
    assert open_corpus(source(tmp_path, a, val, vocab=51)).fingerprint != prints[0]


def test_an_edit_between_the_sampled_windows_of_a_large_shard_is_seen(tmp_path):
    """Windows of 64 KiB are sampled, 64 of a shard: of 5 MB, ids from 32,768 to 39,161 are in none."""
    text = np.random.default_rng(0).integers(97, 123, 5_100_000, dtype=np.uint8).tobytes()
    (tmp_path / "text.txt").write_bytes(b"\n".join(text[i : i + 99] for i in range(0, len(text), 99)))
    (tmp_path / "books").mkdir()
    job = jobs.of_files([str(tmp_path / "text.txt")], None, "text", 0.01)
    prepared.prepare(tmp_path / "books", replace(job, shard_tokens=2_500_000))
    shard = tmp_path / "books" / "train_000000.bin"
    raw = {"train": str(shard), "val": str(tmp_path / "books" / "val_000000.bin"), "vocab": 256}
    before = open_corpus(Shards(**raw)).fingerprint
    prepared.read(tmp_path / "books")
    with shard.open("r+b") as file:
        file.seek(1024 + 2 * 35_000)
        file.write(bytes(2))
    again = raw | {"val": raw["val"].replace("/val_", "/./val_")}  # sources are opened once a process
    assert open_corpus(Shards(**again)).fingerprint != before
    with pytest.raises(ValueError, match=r"are not those that data\.json describes"):
        prepared.read(tmp_path / "books")


def test_a_vocabulary_that_was_edited_in_a_prepared_folder_is_refused(tmp_path):
    (tmp_path / "text.txt").write_text("some words\n" * 1000)
    (tmp_path / "books").mkdir()
    prepared.prepare(tmp_path / "books", jobs.of_files([str(tmp_path / "text.txt")], None, "text", 0.01))
    about = tmp_path / "books" / "data.json"
    about.write_text(about.read_text().replace('"vocab": 256', '"vocab": 300'))
    with pytest.raises(ValueError, match=r"are not those that data\.json describes"):
        prepared.read(tmp_path / "books")


EDITS = {
    "format": (2, "1", None),
    "source": ("text.txt", None),
    "tokenizer": (7, None),
    "vocab": (1, 256.5, "256", None),
    "separator": (-1, 256, "0", 1.5),
    "bytes_per_token": (0, -1.0, 4.2, float("inf"), "1"),
    "train.tokens": (0, -5, 2.5, "9", None),
    "train.bytes": (-1, 2.5, "9", None),
    "train.documents": (-1, 2.5, "9", None),
    "train.shards": ([], "train_000000.bin", [7], ["../books/train_000000.bin"], ["/etc/hosts"]),
    "val.bytes": (-1, 2.5, None),
    "val.documents": (-1, True),
    "fingerprint": (7, None),
    "sample": (7, None),
}
"""Values that no field of data.json has in that folder, by the field's path."""


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in EDITS.items() for value in values]
)
def test_a_field_that_was_edited_in_a_prepared_folder_is_refused_by_its_name(field, value, tmp_path):
    (tmp_path / "text.txt").write_text("some words\n" * 1000)
    (tmp_path / "books").mkdir()
    prepared.prepare(tmp_path / "books", jobs.of_files([str(tmp_path / "text.txt")], None, "text", 0.01))
    about = tmp_path / "books" / "data.json"
    content = json.loads(about.read_text())
    *above, last = field.split(".")
    holder = content[above[0]] if above else content
    assert last in holder
    holder[last] = value
    about.write_text(json.dumps(content))
    with pytest.raises((ValueError, OSError)) as refusal:
        prepared.read(tmp_path / "books")
    assert str(tmp_path / "books") in str(refusal.value)
    if field != "train.shards" or not isinstance(value, list):
        assert last in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_the_unigram_entropy_of_uniform_tokens_is_log_vocab():
    corpus = Corpus(
        np.arange(6400, dtype=np.uint16) % 64, np.arange(640, dtype=np.uint16) % 64, 64, "0", None
    )
    assert corpus.unigram_entropy() == pytest.approx(np.log(64))


# --- the embedded default -------------------------------------------------------------------------


def test_the_standard_library_is_a_corpus_of_bytes():
    corpus = open_corpus("stdlib")
    assert corpus.vocab == 256
    assert corpus.bytes_per_token == 1
    assert len(corpus.train) > 1_000_000
    assert 0.05 < len(corpus.val) / len(corpus.train) < 0.2  # one file in ten, by a hash of its name
    assert b"import" in corpus.train[:100_000].tobytes()
    assert len(corpus.fingerprint) == 16


# --- batches --------------------------------------------------------------------------------------


def test_targets_are_the_inputs_one_token_later():
    batches = [training_batch(counting(), 0, 0, 0, 8, 16), *validation_batches(counting(), 256, 4, 16)]
    for inputs, targets in batches:
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.shape == targets.shape
        assert torch.equal(inputs + 1, targets)
        assert torch.equal(inputs[:, 1:], inputs[:, :-1] + 1)


def test_a_training_batch_is_a_function_of_seed_step_and_micro_batch():
    corpus = counting()
    first = training_batch(corpus, 1, 2, 3, 8, 16)[0]
    torch.rand(5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(training_batch(corpus, 1, 2, 3, 8, 16)[0], first)
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4), (1, 3, 2)):
        assert not torch.equal(training_batch(corpus, *other, 8, 16)[0], first)


def test_a_larger_batch_begins_with_the_smaller_one():
    small, large = (training_batch(counting(), 0, 0, 0, sequences, 16)[0] for sequences in (2, 6))
    assert torch.equal(large[:2], small)


def test_training_windows_reach_every_start_and_never_the_end():
    corpus = counting(train=20)
    starts = {int(row[0]) for step in range(40) for row in training_batch(corpus, 0, step, 0, 8, 16)[0]}
    assert starts == {0, 1, 2, 3}  # the last window ends with the last token as its target


def test_training_starts_are_uniform():
    starts = torch.cat([training_batch(counting(1016), 0, step, 0, 64, 16)[0][:, 0] for step in range(100)])
    counts = torch.bincount(starts // 100, minlength=10).double()
    assert len(counts) == 10
    assert (counts - 640).abs().max() < 5 * 640**0.5  # 6,400 draws over ten bins: five standard deviations


@pytest.mark.parametrize(("tokens", "count"), [(64, 1), (128, 2), (1, 1), (200, 3)])
def test_validation_takes_the_tokens_it_was_given_in_whole_batches(tokens, count):
    batches = validation_batches(counting(), tokens, 4, 16)
    assert len(batches) == count
    assert all(inputs.shape == (4, 16) for inputs, _ in batches)


def test_validation_windows_are_evenly_spaced_over_the_whole_text():
    starts = torch.cat([inputs[:, 0] for inputs, _ in validation_batches(counting(val=300), 512, 4, 16)])
    assert starts[0] == 0
    assert starts[-1] == 300 - 16 - 1
    assert starts.diff().min() >= starts.diff().max() - 1


def test_tokens_come_out_as_written_whatever_their_type():
    top = np.array([65535] * 40, dtype=np.uint16)
    inputs, _ = training_batch(Corpus(top, top, 65536, "0", None), 0, 0, 0, 2, 8)
    assert (inputs == 65535).all()
