"""A picture, and the house's look: colours for the colour-blind, a mark beside each for grey print, the
question above. It knows no data.

Nothing here is pyplot's: a figure belongs to its picture and to no global list, so that none is left open and
no screen is needed.
"""

import io
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import Colormap
from matplotlib.figure import Figure, SubFigure
from matplotlib.image import AxesImage
from matplotlib.legend import Legend
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullFormatter

from ablate.errors import printable
from ablate.results.plain_text import csv_cell

MOST_ARMS = 40
"""Of a picture: more lines are not read, and take minutes to draw."""
DPI = 150
STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # Matplotlib brings it: text is measured alike everywhere
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": "medium",
    "axes.axisbelow": True,
    "grid.color": "0.92",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": "small",
    "image.cmap": "viridis",  # reads in grey, too
    "image.interpolation": "nearest",
    "hatch.linewidth": 0.5,
    "svg.fonttype": "none",
    "figure.constrained_layout.w_pad": 0.07,  # a browser that measures its own font a little wider still has room
}
COLOURS: Sequence[str] = sns.color_palette("colorblind").as_hex()
GREY = "0.45"
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
HATCHES = ("", "///", "...", "xx", "\\\\\\", "++", "oo", "--")

house = matplotlib.rc_context(STYLE)
"""What every function that draws is decorated with."""


@dataclass(frozen=True, eq=False)
class Picture:
    """A figure, the question that it answers, and the numbers behind it."""

    name: str
    """The stem of its files."""
    question: str
    figure: Figure = field(repr=False)
    data: pd.DataFrame = field(repr=False)
    """What is drawn, tidy."""

    def save(self, folder: Path) -> Path:
        """Write <name>.png, <name>.svg and <name>.csv into a folder, made where it is missing; returns the
        first. Equal pictures give equal bytes."""
        folder.mkdir(parents=True, exist_ok=True)
        self.write(folder / f"{self.name}.svg")
        safe = self.data.rename(columns=csv_cell).apply(
            lambda column: column.map(csv_cell) if _textual(column) else column
        )
        csv = safe.to_csv(index=False, float_format="%.9g", lineterminator="\n")
        (folder / f"{self.name}.csv").write_text(csv, encoding="utf-8")
        return self.write(folder / f"{self.name}.png")

    def write(self, path: Path) -> Path:
        """One file, of the kind that its ending names."""
        if path.suffix == ".svg":
            path.write_text(f'<?xml version="1.0" encoding="utf-8"?>\n{self.svg()}', encoding="utf-8")
        else:
            with matplotlib.rc_context(STYLE):
                self.figure.savefig(
                    path, dpi=DPI, metadata={"Software": None} if path.suffix == ".png" else None
                )
        return path

    def svg(self) -> str:
        """As an element for a page. Every id begins with the picture's name: on a page of several, else,
        one's clip paths cut another."""
        written = io.StringIO()
        with matplotlib.rc_context(STYLE | {"svg.hashsalt": self.name}):
            self.figure.savefig(written, format="svg", metadata={"Date": None, "Title": self.question})
        text = written.getvalue()
        text = re.sub(r"<metadata>.*?</metadata>\s*", "", text[text.index("<svg") :], flags=re.DOTALL)
        return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{self.name}-", text)

    def close(self) -> None:
        """Let go of what the figure holds."""
        self.figure.clear()

    def html(self) -> str:
        """As an element for a page."""
        return f"<figure>{self.svg()}</figure>"

    def markdown(self) -> str:
        """As a link to its file, from the folder above."""
        return f"![{self.question}](figures/{self.name}.svg)"

    def _repr_mimebundle_(
        self, include: Iterable[str] | None = None, exclude: Iterable[str] | None = None
    ) -> dict[str, str]:
        bundle = {"image/svg+xml": self.svg(), "text/markdown": self.markdown()}
        return {
            kind: text
            for kind, text in bundle.items()
            if (include is None or kind in include) and kind not in (exclude or ())
        }


def stem(*words: str) -> str:
    """A file's stem of a figure's and a metric's name: `forest-val-loss`."""
    return "-".join(re.sub(r"[^\w.]+", "-", word).strip("-") for word in words)


def canvas(question: str, width: float, height: float, *notes: str) -> SubFigure:
    """What is drawn on, in inches: below the question, above what has to be said about it."""
    title = textwrap.wrap(question, int(10.5 * width))
    foot = [line for note in notes if note for line in textwrap.wrap(note, int(14.5 * width))]
    above, below = 0.2 * len(title) + 0.16, 0.15 * len(foot) + 0.06
    whole = above + height + below
    figure = Figure(
        figsize=(width, whole), dpi=DPI, layout="constrained"
    )  # a small font is up to a tenth wider at another
    figure.suptitle(
        plain("\n".join(title)),
        x=0.08 / width,
        y=1 - 0.08 / whole,
        ha="left",
        va="top",
        size=11,
        weight="bold",
    ).set_in_layout(False)
    said = figure.text(
        0.08 / width, 0.06 / whole, plain("\n".join(foot)), ha="left", va="bottom", size="small", color="0.35"
    )
    said.set_in_layout(False)
    return figure.subfigures(3, 1, height_ratios=(above, height, below))[1]


def finished(name: str, question: str, body: SubFigure, data: pd.DataFrame) -> Picture:
    """The picture of a canvas. It is laid out once, here, so that writing it a second time gives what it gave
    before."""
    figure = body.get_figure(root=True)
    figure.get_layout_engine().execute(figure)
    figure.set_layout_engine("none")
    place = body.bbox_relative  # the solver's last digits depend on where its variables lie in memory
    place.p0, place.p1 = np.round(place.p0, 6), np.round(place.p1, 6)
    for axes in figure.axes:
        axes.set_position(np.round(axes.get_position().bounds, 6))
    return Picture(name, question, figure, data.reset_index(drop=True))


def panels(body: SubFigure, count: int, columns: int, **shared: bool) -> list[Axes]:
    """So many axes in rows of so many; what is left of the last row stays empty."""
    columns = min(columns, count)
    axes = body.subplots(-(-count // columns), columns, squeeze=False, **shared).ravel()
    for spare in axes[count:]:
        spare.remove()
    return list(axes[:count])


class Mark(NamedTuple):
    """How one of several is told from the others, in colour and without."""

    color: str
    marker: str
    linestyle: Any


def marks(names: Iterable[str]) -> dict[str, Mark]:
    """A mark for each name: no two alike among the first 140, nor in grey among the first 28."""
    distinct = dict.fromkeys(names)
    return {
        name: Mark(
            COLOURS[place % len(COLOURS)], _MARKERS[place % len(_MARKERS)], _DASHES[place % len(_DASHES)]
        )
        for place, name in enumerate(distinct)
    }


def plain(text: str) -> str:
    """Text that is drawn as it is: a dollar begins no formula, and no character breaks the XML of an SVG."""
    return printable(text).replace("$", r"\$")


def _textual(column: pd.Series) -> bool:
    """Return True if the cells of a column may be text."""
    return not pd.api.types.is_numeric_dtype(column)


def label(text: str, width: int = 34, lines: int = 2) -> str:
    """A long name over so many lines, broken at spaces, else behind dots and the like; of a longer one the
    middle is left out, since names differ at their ends. None begins with an underscore, which a legend would
    leave out."""
    most = (width - 3) * lines
    if len(text) > most:
        text = f"{text[: most // 2]}…{text[-(most // 2) :]}"
    if len(text) > width:
        breakable = (
            text
            if all(len(word) <= width for word in text.split())
            else re.sub(r"([./=_,])(?=\S)", "\\1\x1f ", text)
        )
        text = "\n".join(textwrap.wrap(breakable, width)).replace("\x1f ", "").replace("\x1f", "")
    return plain(f"\u2009{text}" if text.startswith("_") else text)


def legend(
    body: SubFigure, handles: Sequence[Any], labels: Sequence[str], where: str = "right center"
) -> Legend:
    """What is which, outside of the axes."""
    columns = len(labels) if where.startswith("lower") else 1
    return body.legend(handles, [label(text, 26) for text in labels], loc=f"outside {where}", ncols=columns)


def rows(axes: Axes, labels: Sequence[str]) -> None:
    """Named rows along y, the first on top."""
    axes.set_yticks(range(len(labels)), [label(text) for text in labels])
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")


def name_column(labels: Iterable[str]) -> float:
    """Inches that the names of rows take."""
    return 0.4 + 0.075 * max((len(line) for text in labels for line in label(text).split("\n")), default=0)


def heat(
    axes: Axes,
    values: np.ndarray,
    low: float,
    high: float,
    said: Sequence[Sequence[str]] | None = None,
    cmap: Any = None,
) -> AxesImage:
    """A matrix as an image, one picture in the file whatever its size, with words in its cells where there
    are any. NaN is grey."""
    colours: Colormap = (
        matplotlib.colormaps[cmap or STYLE["image.cmap"]].with_extremes(bad="0.88")
        if not isinstance(cmap, Colormap)
        else cmap
    )
    image = axes.imshow(np.ma.masked_invalid(values), aspect="auto", vmin=low, vmax=high, cmap=colours)
    for row, line in enumerate(said or ()):
        for column, text in enumerate(line):
            axes.text(
                column,
                row,
                plain(text),
                ha="center",
                va="center",
                size="small",
                color=_readable(image, values[row, column]),
            )
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return image


def _readable(image: AxesImage, value: float) -> str:
    """Black or white, whichever is read better upon the colour of a value."""
    red, green, blue, _ = image.to_rgba(value)
    return "black" if not np.isfinite(value) or 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def log_axis(axis: Axis) -> None:
    """Ticks of a log axis as numbers rather than as powers: 0.001, 1, 10k; where it spans little, at 2 and 5
    between them, too."""
    low, high = axis.get_view_interval()
    wide = high > 30 * low
    axis.set_major_locator(
        LogLocator(subs=(1,) if wide else (1, 2, 5) if high > 5 * low else (1, 1.5, 2, 3, 4, 5, 6, 8))
    )
    axis.set_major_formatter(
        EngFormatter(sep="") if low >= 0.5 else FuncFormatter(lambda value, _: f"{value:g}")
    )
    axis.set_minor_formatter(NullFormatter())


def best_of(shown: int, total: int, what: str = "arms") -> str:
    """What is said where not all are drawn."""
    return "" if shown == total else f"The best {shown} of {total:,} {what}, baselines among them."


def better(minimize: bool) -> str:
    """Which way is good, beside an axis' name."""
    return "less is better" if minimize else "more is better"
