"""Pictures and their common style: colours for colour-blind readers, a marker beside each colour for grey
print, the question as title.

pyplot is not used: a figure belongs to its picture and to no global list, so none stays open, and no screen
is needed.
"""

import io
import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import Colormap
from matplotlib.figure import Figure, SubFigure
from matplotlib.image import AxesImage
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullFormatter
from matplotlib.typing import RcKeyType

from ablate.errors import printable
from ablate.experiment.roles import CONFIRM, WINNER
from ablate.experiment.schema import Metric
from ablate.reports.page import file_stem
from ablate.reports.plain_text import csv_cell, html_text, with_minus

MOST_ARMS = 40
"""Largest number of arms in a picture. Readers cannot tell more lines apart, and they take minutes to
draw."""
DPI = 150
"""Dots per inch of PNG files."""
STYLE: dict[RcKeyType, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # part of Matplotlib, so text has the same width on every machine
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
    "image.cmap": "viridis",  # also readable in grey
    "image.interpolation": "nearest",
    "hatch.linewidth": 0.5,
    "svg.fonttype": "none",
    "figure.constrained_layout.w_pad": 0.07,  # room for browsers whose font is a little wider
}


def _palette() -> Sequence[str]:
    """Return seaborn's palette for readers who are blind to some colours. Seaborn goes without the parts of
    scipy that it imports for densities and dendrograms alone, which take nearly a second."""
    hidden = [name for name in ("scipy.stats", "scipy.cluster") if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # makes its import fail
    try:
        import seaborn
    finally:
        for name in hidden:
            del sys.modules[name]
    return seaborn.color_palette("colorblind").as_hex()


COLOURS = _palette()
GREY = "0.45"
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_Dash = str | tuple[int, tuple[float, ...]]
"""Line style of matplotlib: its name, or offset and lengths of dashes."""
_DASHES: tuple[_Dash, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
HATCHES = ("", "///", "...", "xx", "\\\\\\", "++", "oo", "--")

house = matplotlib.rc_context(STYLE)
"""Decorator of functions that draw: sets the style while they run."""


@dataclass(frozen=True, eq=False)
class Picture:
    """A figure, the question that it answers, and the numbers behind it."""

    name: str
    """Stem of its files' names."""
    question: str
    figure: Figure = field(repr=False)
    data: pd.DataFrame = field(repr=False)
    """Numbers that are drawn, as a tidy frame."""

    def save(self, folder: Path) -> Path:
        """Write <name>.svg and <name>.csv to a folder, which is created if it is missing, and return the path
        of the SVG file. Equal pictures give equal bytes."""
        folder.mkdir(parents=True, exist_ok=True)
        safe = self.data.rename(columns=csv_cell).apply(
            lambda column: column if pd.api.types.is_numeric_dtype(column) else column.map(csv_cell)
        )
        csv = safe.to_csv(index=False, float_format="%.9g", lineterminator="\n")
        (folder / f"{self.name}.csv").write_text(csv, encoding="utf-8")
        return self.write(folder / f"{self.name}.svg")

    def write(self, path: Path) -> Path:
        """Write one file, in the format that its suffix names, and return its path."""
        if path.suffix == ".svg":
            path.write_text(f'<?xml version="1.0" encoding="utf-8"?>\n{self.svg}', encoding="utf-8")
        else:
            metadata = {"Software": None} if path.suffix == ".png" else None
            with matplotlib.rc_context(STYLE):
                self.figure.savefig(path, dpi=DPI, metadata=metadata)
        return path

    @cached_property
    def svg(self) -> str:
        """The figure as an SVG element for a page, drawn once. Every id begins with the picture's name: on a
        page with several pictures, equal ids would let the clip path of one cut another."""
        written = io.StringIO()
        settings: dict[RcKeyType, Any] = {**STYLE, "svg.hashsalt": self.name}
        with matplotlib.rc_context(settings):
            # Not by savefig, which draws twice: once to find out how large the figure is.
            FigureCanvasSVG(self.figure).print_svg(written, metadata={"Date": None, "Title": self.question})
            self.figure.dpi = DPI
        text = written.getvalue()
        text = re.sub(r"<metadata>.*?</metadata>\s*", "", text[text.index("<svg") :], flags=re.DOTALL)
        # Entries of a legend are buttons, which an image would hide from screen readers.
        role = "group" if 'id="key-' in text else "img"
        text = f'<svg role="{role}" aria-label="{html_text(self.question)}"{text.removeprefix("<svg")}'
        return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{self.name}-", text)

    def close(self) -> None:
        """Free the memory of the figure."""
        self.figure.clear()

    def html(self) -> str:
        return f"<figure>{self.svg}</figure>"

    def markdown(self) -> str:
        """Return a Markdown link to its file, relative to the folder above `figures`."""
        return f"![{self.question}](figures/{self.name}.svg)"

    def _repr_mimebundle_(
        self, include: Iterable[str] | None = None, exclude: Iterable[str] | None = None
    ) -> dict[str, str]:
        bundle = {"image/svg+xml": self.svg, "text/markdown": self.markdown()}
        return {
            kind: text
            for kind, text in bundle.items()
            if (include is None or kind in include) and kind not in (exclude or ())
        }


Location = Literal["outside right center", "outside lower center", "outside lower left"]
"""Position of a legend."""


class Drawing:
    """A new figure with its question above and notes below, of which empty ones are left out. `body` is the
    part between them, to draw on. `width`: of the figure; `height`: of the body, both in inches."""

    def __init__(self, question: str, width: float, height: float, *notes: str) -> None:
        self.question = question
        title = textwrap.wrap(question, int(10.5 * width))
        foot = [line for note in notes if note for line in textwrap.wrap(note, int(14.5 * width))]
        above, below = 0.2 * len(title) + 0.16, 0.15 * len(foot) + 0.06
        whole = above + height + below
        # The resolution of the PNG files: at another one, a small font is up to a tenth wider.
        self.figure = Figure(figsize=(width, whole), dpi=DPI, layout="constrained")
        left, top, bottom = 0.08 / width, 1 - 0.08 / whole, 0.06 / whole
        head: dict[str, Any] = {"ha": "left", "va": "top", "size": 11, "weight": "bold"}
        note: dict[str, Any] = {"ha": "left", "va": "bottom", "size": "small", "color": "0.35"}
        self.figure.suptitle(plain("\n".join(title)), x=left, y=top, **head).set_in_layout(False)
        self.figure.text(left, bottom, plain("\n".join(foot)), **note).set_in_layout(False)
        parts = self.figure.subfigures(3, 1, squeeze=False, height_ratios=(above, height, below))
        self.body: SubFigure = parts[1, 0]

    def panels(self, count: int, columns: int, **shared: Any) -> list[Axes]:
        """Return `count` axes in rows of at most `columns`. The rest of the last row stays empty."""
        columns = min(columns, count)
        axes = self.body.subplots(-(-count // columns), columns, squeeze=False, **shared).ravel()
        for spare in axes[count:]:
            spare.remove()
        return list(axes[:count])

    def legend(
        self, handles: Iterable[Any], labels: Sequence[str], location: Location = "outside right center"
    ) -> Legend:
        """Add a legend outside of the axes. Below them, its entries are in one row. `handles`: artists, or
        containers of bars, which the types of matplotlib leave out."""
        columns = 1 if location == "outside right center" else len(labels)
        return self.body.legend(handles, [label(text, 26) for text in labels], loc=location, ncols=columns)

    def key(self, looks: Mapping[str, "Mark"], **style: Any) -> Legend:
        """Add a legend of series by their marks. `style`: further properties of lines, or others in place of
        the marks'."""
        handles = [Line2D([], [], **mark._asdict() | style) for mark in looks.values()]
        return self.legend(handles, list(looks))

    def picture(self, data: pd.DataFrame, *words: str) -> Picture:
        """Return the picture with the numbers that are drawn. `words`: names of the figure and its metrics,
        from which its files have their names: `curves-val-loss`. It is laid out once, here, so that writing
        it again gives the same bytes."""
        figure = self.figure
        if engine := figure.get_layout_engine():
            engine.execute(figure)
        figure.set_layout_engine("none")
        box = self.body.bbox_relative  # the last digits of the solver depend on memory addresses
        box.p0, box.p1 = np.round(box.p0, 6), np.round(box.p1, 6)
        for axes in figure.axes:
            axes.set_position(np.round(axes.get_position().bounds, 6))
        return Picture(file_stem(*words), self.question, figure, data.reset_index(drop=True))


class Mark(NamedTuple):
    """Colour, marker and line style of one series, which differ from those of others in colour and in
    grey."""

    color: str
    marker: str
    linestyle: _Dash


def marks(names: Iterable[str], baselines: Collection[str] = ()) -> dict[str, Mark]:
    """Return a mark for each name, those of `baselines` in grey. The first 140 are distinct, and the first 28
    are distinct in print.

    `names`: all arms in their order, drawn or not, so that an arm looks the same in every figure.
    """
    looks, used = dict[str, Mark](), {True: 0, False: 0}
    for name in dict.fromkeys(names):
        i = used[grey := name in baselines]
        used[grey] += 1
        colour = GREY if grey else COLOURS[i % len(COLOURS)]
        looks[name] = Mark(colour, _MARKERS[i % len(_MARKERS)], _DASHES[i % len(_DASHES)])
    return looks


def plain(text: str) -> str:
    """Return text that is drawn literally: `$` starts no formula, and no character breaks the XML of an
    SVG. Negative numbers have a minus sign."""
    return with_minus(printable(text)).replace("$", r"\$")


def label(text: str, width: int = 34, lines: int = 2) -> str:
    """Return a long name on several lines of `width` characters, broken at spaces, or else behind
    punctuation.

    The middle of a name that is still too long is left out, since names differ at their ends. An underscore
    at the start gets a thin space before it, because a legend leaves such labels out.
    """
    text, most = text.replace(CONFIRM, WINNER), (width - 3) * lines
    if len(text) > most:
        text = f"{text[: most // 2]}…{text[-(most // 2) :]}"
    if len(text) > width:
        if any(len(word) > width for word in text.split()):
            text = re.sub(r"([./=_,])(?=\S)", "\\1\x1f ", text)
        text = "\n".join(textwrap.wrap(text, width)).replace("\x1f ", "").replace("\x1f", "")
    return plain(f"\u2009{text}" if text.startswith("_") else text)


def rows(axes: Axes, labels: Sequence[str]) -> None:
    """Label rows along y, the first on top."""
    axes.set_yticks(range(len(labels)), [label(text) for text in labels])
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")


def name_column(labels: Iterable[str]) -> float:
    """Return the width in inches that the names of rows need."""
    return 0.4 + 0.075 * max((len(line) for text in labels for line in label(text).split("\n")), default=0)


def heat(
    axes: Axes,
    values: np.ndarray,
    low: float,
    high: float,
    texts: Sequence[Sequence[str]] | None = None,
    cmap: str | Colormap | None = None,
) -> AxesImage:
    """Draw a matrix [rows, columns] as one image, with texts [rows][columns] in its cells if there are any.
    NaN is grey; `low` and `high` have the first and the last colour. `cmap`: None for the style's."""
    if not isinstance(cmap, Colormap):
        cmap = matplotlib.colormaps[cmap or "viridis"].with_extremes(bad="0.88")
    image = axes.imshow(np.ma.masked_invalid(values), aspect="auto", vmin=low, vmax=high, cmap=cmap)
    for row, line in enumerate(texts or ()):
        for column, text in enumerate(line):
            colour = _readable(image, values[row, column])
            axes.text(column, row, plain(text), ha="center", va="center", size="small", color=colour)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return image


def _readable(image: AxesImage, value: float) -> str:
    """Return black or white, whichever has more contrast with the colour of a value."""
    red, green, blue, _ = image.to_rgba(np.asarray(value))
    return "black" if not np.isfinite(value) or 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def log_axis(axis: Axis) -> None:
    """Label the ticks of a log axis as numbers instead of powers: 0.001, 1, 10k. An axis that spans less than
    a factor of 30 also has ticks between the powers of ten."""
    low, high = axis.get_view_interval()
    between = (1, 2, 5) if high > 5 * low else (1, 1.5, 2, 3, 4, 5, 6, 8)
    axis.set_major_locator(LogLocator(subs=(1,) if high > 30 * low else between))
    small = FuncFormatter(lambda value, _: with_minus(f"{value:g}"))
    axis.set_major_formatter(EngFormatter(sep="") if low >= 0.5 else small)
    axis.set_minor_formatter(NullFormatter())


def best_of(shown: int, total: int) -> str:
    """Return a note on how many are drawn; empty if all are."""
    return "" if shown == total else f"The best {shown} of {total:,} arms, baselines among them."


def better(metric: Metric) -> str:
    """Return the direction of a metric, for the label of an axis."""
    return "less is better" if metric.direction == "minimize" else "more is better"
