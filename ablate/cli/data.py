"""`ablate data prepare`: text to token shards that any workload reads. `ablate data show`: what a source of
data holds. Torch-free.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, FileSizeColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ablate.cli.common import console
from ablate.errors import InputError
from ablate.training.data import jobs, open_corpus, open_images, prepared, shards
from ablate.training.data.documents import named
from ablate.training.data.tokenisers import FILE, checked, open_tokeniser

app = typer.Typer(help="Prepare text for training, or look at data.", no_args_is_help=True)

_HUB = "hub:"
_FIRST_TOKENS = 60
_DATASET = "Datasets"


@app.command()
def prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...",
            help="Text files or globs, .jsonl, .parquet; or hub:NAME, a dataset of the hub.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder to write; must be empty, or not there.")],
    tokenizer: Annotated[
        str,
        typer.Option(
            help="bytes; bpe:N, trained here to N tokens; the path of a tokenizer.json; a model's name on the hub."
        ),
    ] = "bytes",
    val: Annotated[
        list[str] | None,
        typer.Option(help="Text to validate on; default: documents of the input are held out."),
    ] = None,
    val_fraction: Annotated[
        float, typer.Option(min=0.0001, max=0.9, help="The part of the text that is held out.")
    ] = 0.01,
    shard_tokens: Annotated[
        int, typer.Option(min=1, max=1 << 30, help="The most tokens in a file.")
    ] = 100_000_000,
    column: Annotated[str, typer.Option(help="Of the documents in .jsonl, .parquet and datasets.")] = "text",
    config: Annotated[
        str | None, typer.Option(help="Configuration of the dataset.", rich_help_panel=_DATASET)
    ] = None,
    split: Annotated[str, typer.Option(help="Of the dataset.", rich_help_panel=_DATASET)] = "train",
    revision: Annotated[
        str | None, typer.Option(help="Commit, tag or branch; default: the newest.", rich_help_panel=_DATASET)
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Training tokens after which to end.", rich_help_panel=_DATASET)
    ] = None,
) -> None:
    """Tokenise text into shards, and print the lines of YAML that name them."""
    how = {"tokenizer": tokenizer, "shard_tokens": shard_tokens, "tokens": tokens}
    with _told(), _made(out):
        checked(tokenizer)
        if inputs[0].startswith(_HUB):
            if len(inputs) > 1 or val:
                raise ValueError(f"{inputs[0]}: a dataset stands alone; give no other INPUT and no --val")
            where = {
                "config": config,
                "split": split,
                "val_split": None,
                "revision": revision,
                "column": column,
            }
            job = jobs.of_dataset(inputs[0].removeprefix(_HUB), **where, val_fraction=val_fraction, **how)
        else:
            job = jobs.of_files(inputs, val, column, val_fraction, **how)
        with _progress() as progress:
            told = prepared.prepare(out, job.watched(progress))
    screen = console()
    screen.print(_table(_rows(told)))
    screen.print("\nIn an experiment:", style="dim")
    screen.print(f"workload: {{gpt: {{data: {{prepared: {out}}}}}}}", soft_wrap=True)


@app.command()
def show(
    what: Annotated[
        str,
        typer.Argument(
            metavar="PATH", help="A prepared folder, a token shard, or stdlib, prose, digits, photos."
        ),
    ],
) -> None:
    """Print what data hold: counts, vocabulary, fingerprint, and the first words."""
    with _told():
        rows = list(_looks().get(what, _on_disk)(what))
    console().print(_table(rows))


def _looks() -> dict[str, Callable[[str], Iterator[tuple[str, str]]]]:
    return {"stdlib": _bytes, "prose": _bytes, "digits": _images, "photos": _images}


def _rows(told: prepared.About) -> Iterator[tuple[str, str]]:
    for name, part in (("train", told.train), ("val", told.val)):
        files = f"{len(part.shards)} file{'s' if len(part.shards) > 1 else ''}"
        documents = (
            f", {part.documents:,} documents" if part.documents else ""
        )  # none begins in parts of a file that were held out
        yield name, f"{part.tokens:,} tokens in {files}, {part.bytes:,} bytes{documents}"
    yield "tokenizer", f"{told.tokenizer}, {told.vocab:,} tokens, {told.bytes_per_token:.3g} bytes a token"
    yield "source", ", ".join(f"{key}: {value}" for key, value in told.source.items() if value is not None)
    yield "fingerprint", told.fingerprint


def _on_disk(what: str) -> Iterator[tuple[str, str]]:
    folder = Path(what).expanduser()
    if not folder.is_dir():
        yield from _shard(what)
        return
    told, train, _ = prepared.read(folder)
    yield from _rows(told)
    decode = open_tokeniser(str(folder / FILE), lambda: ()).decode
    yield "begins", decode(train[:_FIRST_TOKENS])


def _shard(what: str) -> Iterator[tuple[str, str]]:
    for path in named([what]):
        tokens = shards.read(path, "uint16")
        yield str(path), f"{len(tokens):,} tokens of {tokens.dtype}, the largest id {tokens[:].max()}"
        yield "begins", " ".join(map(str, tokens[:_FIRST_TOKENS]))


def _bytes(what: str) -> Iterator[tuple[str, str]]:
    corpus = open_corpus(what)
    yield "train", f"{len(corpus.train):,} tokens"
    yield "val", f"{len(corpus.val):,} tokens"
    yield "tokenizer", f"bytes, {corpus.vocab} tokens"
    yield "fingerprint", corpus.fingerprint
    yield "begins", corpus.train[:_FIRST_TOKENS].tobytes().decode(errors="replace")


def _images(what: str) -> Iterator[tuple[str, str]]:
    images = open_images(what)
    channels, height, width = images.shape
    yield (
        "train",
        f"{len(images.train):,} images of {width}x{height}, {channels} channels, {images.classes} classes",
    )
    yield "val", f"{len(images.val):,} images"
    yield "mean", ", ".join(f"{value:.3f}" for value in images.mean)
    yield "deviation", ", ".join(f"{value:.3f}" for value in images.deviation)
    yield "fingerprint", images.fingerprint


def _table(rows: Iterator[tuple[str, str]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for name, value in rows:
        table.add_row(Text(name, "bold"), Text(value, overflow="fold"))
    return table


@contextmanager
def _told() -> Iterator[None]:
    """What is wrong with the data is the user's to know, in a sentence."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise InputError([str(error)]) from None


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """A folder for what is written; nothing of it is left where that fails."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder}: is not empty; name a folder that is, or is not there")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        shutil.rmtree(folder)
        raise


@contextmanager
def _progress() -> Iterator[Callable[[str, int], None]]:
    """How many bytes of text are done, where somebody looks."""
    screen = console()
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        FileSizeColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        tasks = {}

        def step(what: str, size: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=None)
            bar.advance(tasks[what], size)

        yield step
