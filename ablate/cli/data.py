"""`ablate data prepare`: convert text to token shards or, with `--show`, describe a source. Without torch."""

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    FileSizeColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from ablate.cli.common import console, plain_table
from ablate.cli.option_groups import App
from ablate.errors import InputError, as_input_error
from ablate.files import user_path
from ablate.training.data import jobs, open_corpus, prepared, shards
from ablate.training.data.documents import named
from ablate.training.data.sources import HubText
from ablate.training.data.tokenisers import FILE, kind, open_tokeniser

app = App(help="Prepare text for training, or describe a data source.", no_args_is_help=True)

_HUB = "hub:"
_FIRST_TOKENS = 60


@dataclass(frozen=True)
class TextOptions:
    """Options on the text and its tokens.

    Args:
        tokenizer: bytes; bpe:N to train one; path of a tokenizer.json; or name of a model on the hub.
        val: Text files for validation; default: hold out documents of the input.
        val_fraction: Fraction of the text to hold out for validation.
        shard_tokens: Maximum number of tokens in one shard.
        column: Column or key of the text in .jsonl, .parquet and datasets.
    """

    tokenizer: str = "bytes"
    val: list[str] | None = None
    val_fraction: Annotated[float, typer.Option(min=0.0001, max=0.9)] = 0.01
    shard_tokens: Annotated[int, typer.Option(min=1, max=1 << 30)] = 100_000_000
    column: str = "text"


@dataclass(frozen=True)
class DatasetOptions:
    """Options on a dataset of the hub, and on how much is read.

    Args:
        config: Name of the dataset's configuration.
        split: Split of the dataset.
        revision: Commit, tag or branch of the dataset; default: the newest.
        tokens: Stop after this many training tokens.
    """

    panel: ClassVar = "Datasets"
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    tokens: Annotated[int | None, typer.Option(min=1)] = None


@app.command()
def prepare(
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT...")],
    text: TextOptions,
    dataset: DatasetOptions,
    out: Path | None = None,
    show: bool = False,
) -> None:
    """Tokenise text into shards, and print the YAML that refers to them; or describe a data source.

    Args:
        inputs: Text files or globs, .jsonl, .parquet; or hub:NAME for a dataset of the Hugging Face hub. With
          --show: a prepared folder, token shards, or one of stdlib, prose, digits, photos.
        out: Output folder; must be empty or must not exist.
        show: Describe INPUT instead: counts, vocabulary, fingerprint, beginning of the text.
    """
    if show:
        if out or (text, dataset) != (TextOptions(), DatasetOptions()):
            raise InputError("--show: describes data as they are and writes nothing; omit the other options")
        with as_input_error(OSError, ValueError):
            rows = [row for source in inputs for row in _described(source)]
        console().print(_table(rows))
        return
    if out is None:
        raise InputError("--out FOLDER is needed for the shards; --show describes INPUT and writes nothing")
    screen = console()
    with as_input_error(OSError, ValueError), _output_folder(out):
        kind(text.tokenizer)
        job, tokens = _job(inputs, text, dataset), dataset.tokens
        job = replace(job, tokenizer=text.tokenizer, shard_tokens=text.shard_tokens, tokens=tokens)
        with _progress(screen) as progress:
            about = prepared.prepare(out, replace(job, progress=progress))
    screen.print(_table(_rows(about)))
    screen.print("\nIn an experiment:", style="dim")
    screen.lines(f"workload: {{gpt: {{data: {{prepared: {out}}}}}}}")


def _job(inputs: list[str], text: TextOptions, dataset: DatasetOptions) -> jobs.Job:
    if not inputs[0].startswith(_HUB):
        return jobs.of_files(inputs, text.val, text.column, text.val_fraction)
    if len(inputs) > 1 or text.val:
        raise ValueError(f"{inputs[0]}: a dataset must be the only input; give no other INPUT and no --val")
    values = {name: value for name, value in vars(dataset).items() if name != "tokens"}
    values |= {"column": text.column, "val_fraction": text.val_fraction}
    return jobs.of_dataset(HubText(dataset=inputs[0].removeprefix(_HUB), **values))


def _rows(about: prepared.About) -> Iterator[tuple[str, str]]:
    for name, part in (("train", about.train), ("val", about.val)):
        files = f"{len(part.shards)} file{'s' if len(part.shards) > 1 else ''}"
        # A part of a file that was held out may hold no beginning of a document.
        documents = f", {part.documents:,} documents" if part.documents else ""
        yield name, f"{part.tokens:,} tokens in {files}, {part.bytes:,} bytes{documents}"
    yield "tokenizer", f"{about.tokenizer}, {about.vocab:,} tokens, {about.bytes_per_token:.3g} bytes a token"
    yield "source", ", ".join(f"{key}: {value}" for key, value in about.source.items() if value is not None)
    yield "fingerprint", about.fingerprint


def _described(source: str) -> Iterator[tuple[str, str]]:
    """Yield names and values of a source that needs no file, a prepared folder, or token shards."""
    folder = user_path(source)
    if source in ("stdlib", "prose"):
        corpus = open_corpus("prose" if source == "prose" else "stdlib")
        yield "train", f"{len(corpus.train):,} tokens"
        yield "val", f"{len(corpus.val):,} tokens"
        yield "tokenizer", f"bytes, {corpus.vocab} tokens"
        yield "fingerprint", corpus.fingerprint
        yield "begins", corpus.train[:_FIRST_TOKENS].tobytes().decode(errors="replace")
    elif folder.is_dir():
        about, train, _ = prepared.read(folder)
        yield from _rows(about)
        yield "begins", open_tokeniser(str(folder / FILE), lambda: ()).decode(train[:_FIRST_TOKENS])
    else:
        for path in named([source]):
            tokens = shards.read(path, "uint16")
            yield str(path), f"{len(tokens):,} tokens of {tokens.dtype}, the largest id {tokens[:].max()}"
            yield "begins", " ".join(map(str, tokens[:_FIRST_TOKENS]))


def _table(rows: Iterable[tuple[str, str]]) -> Table:
    return plain_table(rows=([Text(name, "bold"), Text(value, overflow="fold")] for name, value in rows))


@contextmanager
def _output_folder(folder: Path) -> Iterator[None]:
    """Create the output folder, and remove it if the block fails."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder}: is not empty; name an empty folder or a new one")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        shutil.rmtree(folder)
        raise


@contextmanager
def _progress(screen: Console) -> Iterator[Callable[[str, int], None]]:
    activity = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), activity, BarColumn(), FileSizeColumn(), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        tasks: dict[str, TaskID] = defaultdict(lambda: bar.add_task("", total=None))

        def step(task: str, size: int) -> None:
            bar.update(tasks[task], description=task, advance=size)

        yield step
