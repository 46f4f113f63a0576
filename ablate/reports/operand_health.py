"""Health of the operands of the products after quantisation: what stands out, shares, and layers.

All read the last values that each run recorded, as means over its seeds. What stands out comes first: a
reader of a healthy sweep has seen everything after one sentence.
"""

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ablate.experiment.schema import Metric
from ablate.reports.figures import tables
from ablate.reports.figures.health import in_order
from ablate.reports.plain_text import csv_cell, inline
from ablate.reports.table import Cell, Table, tinted_map
from ablate.results.number_text import counted, minus
from ablate.training.metric_names import PRODUCTS, SQUARED_BIAS, VARIANCE, parse

FALL = 3.0
"""Decibels: an operand that lost this much since its first record has twice the noise for its signal."""
BELOW = 6.0
"""Decibels below the median layer of its operand: four times the noise for its signal."""
BEYOND = 0.1
"""Share of elements beyond the grid: rounded scales of blocks of 16 leave up to 6 % there, their maxima."""
MOST = 0.5
"""Share of an error: Gaussian operands in FP4 have 2 to 10 % in the dead zone, 2 to 15 % in scales."""
USUAL_ZERO = 0.25
"""Share of elements rounded to zero: in small trainings, most operands have 6 to 18 % in NVFP4 and up to 21 %
in MXFP4. A layer with more than 50 % raises an alarm."""
_SHARES = (
    ("elements beyond the grid", "saturated_frac", BEYOND, ".1%", ".2%"),
    ("error in elements that became zero", "dead_share", MOST, ".0%", ".0%"),
    ("error in scales", "scale_share", MOST, ".0%", ".0%"),
)
"""Shares that stand out: meaning, name of the error, limit, and formats of limit and value."""
_MOST_NAMED = 6
_MOST_MAPS = 12
_LOWEST, _HIGHEST = 5.0, 30.0
"""Decibels at the ends of the scale of tints: little of an operand is left below, eight bits are above."""


def exceptions(records: pd.DataFrame) -> list[str]:
    """Return a sentence for each kind of thing that stands out; none for a healthy sweep. It reads
    `quant/<slot>/sqnr_db`, `.../saturated_frac` and `quant/<slot>/sqnr_db/<layer>`."""
    return [
        f"{start} {'; '.join(found[:_MOST_NAMED])}"
        f"{f'; and {len(found) - _MOST_NAMED} more' if len(found) > _MOST_NAMED else ''}."
        for start, found in (
            (f"Layers {BELOW:g} dB or more below their operand's median:", list(_weak_layers(records))),
            (f"Operands that lost {FALL:g} dB or more in training:", list(_fallen(records))),
            *(
                (f"More than {limit:{form}} of the {what}:", list(_above(records, error, limit, digits)))
                for what, error, limit, form, digits in _SHARES
            ),
        )
        if found
    ]


def most_zero(records: pd.DataFrame) -> str:
    """Return a clause on the operand that lost the largest share of its elements (`quant/<slot>/zero_frac`)
    to zero; empty if that is at most `USUAL_ZERO`."""
    worst = next(_above(records, "zero_frac", USUAL_ZERO, ".1%"), "")
    return worst and f"; most rounded to zero: {worst}"


def _weak_layers(records: pd.DataFrame) -> Iterator[str]:
    layers = by_layer(records)
    if layers.empty:
        return
    layers["below"] = layers.groupby(["arm", "slot"])["sqnr_db"].transform("median") - layers["sqnr_db"]
    weak = layers[layers["below"] >= BELOW].sort_values("below", ascending=False, kind="stable")
    for line in weak.itertuples():
        yield f"{line.slot} of {line.layer} in {line.arm}, {line.sqnr_db:.1f} dB ({line.below:.1f} below)"


def _fallen(records: pd.DataFrame) -> Iterator[str]:
    selected = tables.errors_of_slots(records, {"sqnr_db"}).sort_values("step", kind="stable")
    if selected.empty:
        return
    runs = selected.groupby(["arm", "slot", "seed"], sort=False)["value"]
    ends = (
        pd.DataFrame({"first": runs.first(), "last": runs.last()}).groupby(["arm", "slot"], sort=False).mean()
    )
    ends["lost"] = ends["first"] - ends["last"]
    for (arm, slot), line in ends[ends["lost"] >= FALL].sort_values("lost", ascending=False).iterrows():
        yield f"{slot} in {arm}, {line['first']:.1f} to {line['last']:.1f} dB"


def _above(records: pd.DataFrame, error: str, limit: float, form: str) -> Iterator[str]:
    shares = _last_shares(records, error)
    for line in shares[shares["value"] > limit].sort_values("value", ascending=False).itertuples():
        yield f"{line.slot} in {line.arm}, {line.value:{form}}"


def _last_shares(records: pd.DataFrame, error: str) -> pd.DataFrame:
    """Return the last value of an error of every arm and slot, mean over seeds: columns arm, slot, value."""
    last = tables.last(tables.errors_of_slots(records, {error}))
    return last.groupby(["arm", "slot"], sort=False, as_index=False)["value"].mean()


def by_layer(records: pd.DataFrame) -> pd.DataFrame:
    """Return the last SQNR (`quant/<slot>/sqnr_db/<layer>`, dB) of every layer's operands, mean over seeds:
    columns arm, slot, layer and sqnr_db, in the order of arms, operands and blocks."""
    columns = {"slot": "slot", "layer": "layer"}
    selected = tables.chosen(
        records, lambda name: name.metric == "sqnr_db" and name.layer is not None, **columns
    )
    means = (
        tables.last(selected).groupby(["arm", "slot", "layer"], sort=False, as_index=False)["value"].mean()
    )
    order = {arm: number for number, arm in enumerate(dict.fromkeys(selected["arm"]))}
    keys = pd.DataFrame(
        {
            "arm": means["arm"].map(order),
            "slot": means["slot"].map(in_order(means["slot"]).index),
            "layer": means["layer"].map(_block),
        }
    )
    means = means.loc[keys.sort_values(["arm", "slot", "layer"], kind="stable").index]
    return means.rename(columns={"value": "sqnr_db"}).reset_index(drop=True)


def _block(layer: str) -> tuple[int, ...]:
    """Return a key that sorts blocks.2 before blocks.10; layers of one block keep their order."""
    return tuple(int(part) for part in layer.split(".") if part.isdecimal())


def shares_tables(records: pd.DataFrame) -> list[Table]:
    """Return what became zero (`quant/<slot>/zero_frac`), and what lay beyond the grid (`saturated_frac`): a
    table of arms by operands each."""
    found = []
    for error, name, caption in (
        ("zero_frac", "rounded-to-zero", "Share of an operand's elements that round to zero"),
        ("saturated_frac", "beyond-the-grid", "Share of an operand's elements beyond the grid"),
    ):
        shares = _last_shares(records, error)
        if shares.empty or not shares["value"].any():
            continue
        arms, total = tables.arms(shares.assign(seed=0, step=0, metric=error), Metric(name=error))
        values = {(line.arm, line.slot): float(line.value) for line in shares.itertuples()}
        slots = in_order(shares["slot"])
        rows: list[dict[str, Cell]] = []
        for arm in arms:
            rows.append({"arm": arm, **{slot: _percent(values.get((arm, slot))) for slot in slots}})
        few = f"; {len(arms)} of {total:,} arms" if len(arms) < total else ""
        found.append(Table.of(name, rows, f"{caption} at the end: mean over layers and seeds{few}."))
    return found


def _percent(value: float | None) -> Cell:
    if value is None:
        return None
    return (f"{100 * value:.{1 if value >= 0.001 else 4}f} %" if value else "0", value)


@dataclass(frozen=True)
class LayerMaps:
    """SQNR of every layer by operand, an arm at a time, beside its difference to the first arm's. The arm
    whose lowest value is lowest is open."""

    layers: pd.DataFrame
    """Result of `by_layer`."""

    def _maps(self) -> list[tuple[str, pd.DataFrame]]:
        """Return the arms with the lowest layers, the lowest first."""
        lowest = self.layers.groupby("arm", sort=False)["sqnr_db"].min().sort_values(kind="stable")
        return [(arm, self.layers[self.layers["arm"] == arm]) for arm in lowest.index[:_MOST_MAPS]]

    def _lines(self) -> list[tuple[str, str]]:
        found = []
        for arm, lines in self._maps():
            low = lines.loc[lines["sqnr_db"].idxmin()]
            found.append((arm, f"lowest {low['sqnr_db']:.1f} dB, {low['slot']} of {low['layer']}"))
        return found

    @property
    def _note(self) -> str:
        arms = self.layers["arm"].nunique()
        few = (
            f" Of {counted(arms, 'arm')}, the {_MOST_MAPS} with the lowest layers."
            if arms > _MOST_MAPS
            else ""
        )
        return f"Signal to quantisation noise in dB at the end, mean over seeds; more is better.{few}"

    def html(self) -> str:
        """Return one map an arm, of which a reader opens one at a time: needs no script."""
        first = self.layers["arm"].iloc[0]
        reference = _values(self.layers[self.layers["arm"] == first])
        opened = [
            f'<details name="layers"{" open" if number == 0 else ""}><summary><b>{inline(arm)}</b>'
            f" {inline(low)}</summary>{_map(lines)}"
            f"{_map(lines, first, reference) if arm != first else ''}</details>"
            for number, ((arm, low), (_, lines)) in enumerate(zip(self._lines(), self._maps(), strict=True))
        ]
        return f'<div class="maps"><p>{self._note}</p>{"".join(opened)}</div>'

    def markdown(self) -> str:
        """Return each arm with its lowest layer; the CSV file has them all."""
        return "\n".join((self._note, "", *(f"- {arm}: {low}" for arm, low in self._lines())))

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "layers.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(self.layers.columns)
            for line in self.layers.itertuples(index=False):
                writer.writerow([*(csv_cell(str(text)) for text in line[:3]), f"{line[3]:.6g}"])


def layer_maps(records: pd.DataFrame) -> LayerMaps | None:
    """Return the maps of all arms by `quant/<slot>/sqnr_db/<layer>` (dB); None if no layer was recorded."""
    layers = by_layer(records)
    return None if layers.empty else LayerMaps(layers)


_PARTS = {
    "dead": ("dead zone", "elements that became zero"),
    "scale": ("scale bias", "what other scales would remove"),
    "grid": ("grid noise", "distance to the points of the grid"),
}
"""Parts of an operand's error: name and meaning, in the order of a bar."""


@dataclass(frozen=True)
class ErrorSplit:
    """Parts of the error of every operand, beside the gain of its product, an arm at a time."""

    operands: pd.DataFrame
    """Columns arm, slot, dead, scale, grid (shares of the error's energy), sqnr_db, and gain (of the product;
    NaN if it was not recorded), in the order of arms and operands."""

    def html(self) -> str:
        """Return a table an arm, with the three parts as a bar, of which a reader opens one at a time."""
        legend = "".join(
            f'<span><i class="{part}"></i>{name}: {meaning}</span>'
            for part, (name, meaning) in _PARTS.items()
        )
        opened = [
            f'<details name="split"{" open" if number == 0 else ""}><summary><b>{inline(str(arm))}</b>'
            f" {inline(self._most(lines))}</summary>{_split_table(lines)}</details>"
            for number, (arm, lines) in enumerate(self._arms())
        ]
        return f'<div class="split"><p>{_SPLIT_NOTE}</p><p class="legend">{legend}</p>{"".join(opened)}</div>'

    @staticmethod
    def _most(lines: pd.DataFrame) -> str:
        """Return the operand with the largest part that is not noise of the grid."""
        line = lines.loc[(lines["dead"] + lines["scale"]).idxmax()]
        return f"least grid noise {line['grid']:.0%}, {line['slot']}"

    def markdown(self) -> str:
        """Return the operand of each arm with the least noise of the grid; the CSV file has them all."""
        return "\n".join((_SPLIT_NOTE, "", *(f"- {arm}: {self._most(lines)}" for arm, lines in self._arms())))

    def _arms(self) -> list[tuple[object, pd.DataFrame]]:
        """Return each arm with its operands, those with the least noise of the grid first."""
        groups = self.operands.groupby("arm", sort=False)
        return sorted(groups, key=lambda group: float(group[1]["grid"].min()))

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        text = self.operands.assign(arm=self.operands["arm"].map(lambda arm: csv_cell(str(arm))))
        text.to_csv(folder / "error_split.csv", index=False, float_format="%.6g", lineterminator="\n")


_SPLIT_NOTE = (
    "Why: three parts that add up to the energy of each operand's error, at the end, means over layers and"
    " seeds; and the gain of its product, where 1 is unbiased."
)


def _split_table(lines: pd.DataFrame) -> str:
    """Return one arm's operands as a table with bars."""
    head = "".join(
        f'<th scope="col" class="number">{name}</th>'
        for name in ("SQNR, dB", *(n for n, _ in _PARTS.values()))
    )
    rows = []
    for line in lines.to_dict("records"):
        widths = "".join(
            f'<i class="{part}" style="width:{100 * min(1.0, max(0.0, line[part])):.1f}%"></i>'
            for part in _PARTS
        )
        numbers = "".join(f'<td class="number">{100 * line[part]:.1f} %</td>' for part in _PARTS)
        gain = "" if pd.isna(line["gain"]) else f"{line['gain']:.4f}"
        sqnr = "" if pd.isna(line["sqnr_db"]) else f"{line['sqnr_db']:.1f}"
        rows.append(
            f'<tr><th scope="row">{inline(line["slot"])}</th><td class="number">{sqnr}</td>{numbers}'
            f'<td class="bars"><span>{widths}</span></td><td class="number">{gain}</td></tr>'
        )
    return (
        f'<div class="scroll"><table><thead><tr><th scope="col">operand</th>{head}<th scope="col">parts</th>'
        '<th scope="col" class="number">gain of the product</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def error_split(records: pd.DataFrame) -> ErrorSplit | None:
    """Return the parts of the operands' errors, from `quant/<slot>/dead_share`, `.../scale_share`,
    `.../grid_share`, `.../sqnr_db` and `gemm/<product>/gain`; None if they were not recorded."""
    columns = {**{part: _last_shares(records, f"{part}_share") for part in _PARTS}}
    columns["sqnr_db"] = _last_shares(records, "sqnr_db")
    if columns["dead"].empty:
        return None
    whole = columns.pop("dead").rename(columns={"value": "dead"})
    for name, column in columns.items():
        whole = whole.merge(column.rename(columns={"value": name}), "left", ["arm", "slot"])
    gains = tables.chosen(
        records,
        lambda name: name.family == PRODUCTS and name.layer is None and name.metric == "gain",
        product="slot",
    )
    found = tables.last(gains).groupby(["arm", "product"], sort=False)["value"].mean()
    whole["gain"] = [
        found.get((line.arm, str(line.slot).partition(".")[0]), math.nan) for line in whole.itertuples()
    ]
    arms = {arm: number for number, arm in enumerate(dict.fromkeys(whole["arm"]))}
    keys = pd.DataFrame(
        {"arm": whole["arm"].map(arms), "slot": whole["slot"].map(in_order(whole["slot"]).index)}
    )
    return ErrorSplit(
        whole.loc[keys.sort_values(["arm", "slot"], kind="stable").index].reset_index(drop=True)
    )


def gradient_error(records: pd.DataFrame) -> Table | None:
    """Return the table of variance and squared bias (`grad/variance`, `grad/squared_bias`) of each arm's
    gradient; None if they were not recorded."""
    rows: list[dict[str, Cell]] = []
    parts = {name: tables.of(records, name) for name in (VARIANCE, SQUARED_BIAS)}
    for arm in dict.fromkeys(parts[VARIANCE]["arm"]):
        row: dict[str, Cell] = {"arm": str(arm)}
        for name, title in ((VARIANCE, "variance"), (SQUARED_BIAS, "squared bias")):
            values = parts[name].loc[parts[name]["arm"] == arm, "value"]
            mean, error = float(values.mean()), float(values.std() / math.sqrt(len(values)))
            spread = "" if math.isnan(error) or not error else f" ±{100 * error:.2g}"
            row[title] = (f"{minus(f'{100 * mean:.3g}')}{spread} %", mean)
        rows.append(row)
    return Table.of("gradient-error", rows, _GRADIENT_NOTE) if rows else None


_GRADIENT_NOTE = (
    "Error of the gradient over the power of the unquantised one, mean over measured steps and seeds with its"
    " standard error. Variance is what stochastic rounding adds and averages out over steps; bias stays."
    " It is estimated from two draws of a step, and may come out below zero."
)


def _values(lines: pd.DataFrame) -> dict[tuple[str, str], float]:
    return {(line.layer, line.slot): float(line.sqnr_db) for line in lines.itertuples()}


def _map(
    lines: pd.DataFrame, first: str = "", reference: Mapping[tuple[str, str], float] | None = None
) -> str:
    """Return layers by operands as a table, tinted by what was lost, or by the difference to a reference."""
    slots, layers = list(dict.fromkeys(lines["slot"])), list(dict.fromkeys(lines["layer"]))
    values, cell = _values(lines), _tinted
    if reference is not None:
        values = {at: value - reference[at] for at, value in values.items() if at in reference}
        cell = _different
    rows = {
        layer: [cell(values.get((layer, slot))) for slot in slots] for layer in sorted(layers, key=_block)
    }
    title = f"<caption>dB more (blue) or less (red) than {inline(first)}</caption>" if first else ""
    return tinted_map(slots, rows, title) if values else ""


def _tinted(value: float | None) -> str:
    if value is None:
        return "<td></td>"
    lost = min(1.0, max(0.0, (_HIGHEST - value) / (_HIGHEST - _LOWEST)))
    return f'<td class="number" style="--lost:{100 * lost:.0f}%">{value:.1f}</td>'


def _different(value: float | None) -> str:
    if value is None:
        return "<td></td>"
    share = 100 * min(1.0, abs(value) / FALL)
    kind = "more" if value > 0 else "less"
    return f'<td class="number {kind}" style="--share:{share:.0f}%">{minus(f"{value:+z.1f}")}</td>'


def recorded(records: pd.DataFrame) -> bool:
    """Return True if any error of an operand was recorded."""
    return any(parse(str(text)).family == "quant" for text in records["metric"].unique())
