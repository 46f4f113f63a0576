"""Health of the operands of the products after quantisation: what stands out, shares, and layers.

All read the last values that each run recorded, as means over its seeds. What stands out comes first: a
reader of a healthy sweep has seen everything after one sentence.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import pandas as pd

from ablate.experiment.schema import Metric
from ablate.reports.figures import tables
from ablate.reports.figures.health import in_order
from ablate.reports.plain_text import inline
from ablate.reports.table import Cell, DrawnTable, Table, only, tinted_map
from ablate.results.number_text import counted, minus, shortened
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
    `quant/<slot>/sqnr_db`, `.../saturated_frac` and `quant/<slot>/<layer>/sqnr_db`."""
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
    layers["below"] = layers.groupby(["arm", "slot"])["sqnr_db"].transform("median") - layers["sqnr_db"]
    weak = layers[layers["below"] >= BELOW].sort_values("below", ascending=False, kind="stable")
    for line in weak.itertuples():
        yield f"{line.slot} of {line.layer} in {line.arm}, {line.sqnr_db:.1f} dB ({line.below:.1f} below)"


def _fallen(records: pd.DataFrame) -> Iterator[str]:
    selected = tables.errors_of_slots(records, {"sqnr_db"}).sort_values("step", kind="stable")
    runs = selected.groupby(["arm", "slot", "seed"], sort=False)["value"]
    ends = pd.DataFrame({"first": runs.first(), "last": runs.last()})
    ends = ends.groupby(["arm", "slot"], sort=False).mean()
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
    """Return the last SQNR (`quant/<slot>/<layer>/sqnr_db`, dB) of every layer's operands, mean over seeds:
    columns arm, slot, layer and sqnr_db, in the order of arms, operands and blocks."""
    fits = {"slot": "slot", "layer": "layer"}
    selected = tables.chosen(
        records, lambda name: name.metric == "sqnr_db" and name.layer is not None, **fits
    )
    runs = tables.last(selected).groupby(["arm", "slot", "layer"], sort=False, as_index=False)
    return _ordered(runs["value"].mean(), selected["arm"]).rename(columns={"value": "sqnr_db"})


def _ordered(lines: pd.DataFrame, arms: Iterable[str]) -> pd.DataFrame:
    """Return lines in the order of `arms`, of operands in a layer, and of blocks if they have layers."""
    order = {arm: number for number, arm in enumerate(dict.fromkeys(arms))}
    keys = pd.DataFrame({"arm": lines["arm"].map(order)})
    keys["slot"] = lines["slot"].map(in_order(lines["slot"]).index)
    if "layer" in lines:
        keys["layer"] = lines["layer"].map(_block)
    return lines.loc[keys.sort_values([*keys], kind="stable").index].reset_index(drop=True)


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
        arms, total = tables.arms(tables.errors_of_slots(records, {error}), Metric(name=error))
        values = {(line.arm, line.slot): float(line.value) for line in shares.itertuples()}
        slots = in_order(shares["slot"])
        rows: list[dict[str, Cell]] = [
            {"arm": arm, **{slot: _percent(values.get((arm, slot))) for slot in slots}} for arm in arms
        ]
        few = f"; {len(arms)} of {total:,} arms" if len(arms) < total else ""
        found.append(Table.of(name, rows, f"{caption} at the end: mean over layers and seeds{few}."))
    return found


def _percent(value: float | None) -> Cell:
    if value is None:
        return None
    return (f"{100 * value:.{1 if value >= 0.001 else 4}f} %" if value else "0", value)


def _by_arm(
    kind: str, group: str, note: str, arms: Mapping[str, tuple[str, str]], numbers: Table, legend: str = ""
) -> DrawnTable:
    """Return drawings of arms, of which a reader opens one at a time, without a script; elsewhere a remark on
    each arm. `kind`: class in the style sheet; `group`: name of the drawings, of which one is open; `arms`:
    remark and drawing of each, the first of which is open."""
    shown = shortened(arms)
    arms = {shown(arm): drawn for arm, drawn in arms.items()}
    opened = [
        f'<details name="{group}"{" open" * (number == 0)}><summary><b>{inline(arm)}</b> {inline(remark)}'
        f"</summary>{drawing}</details>"
        for number, (arm, (remark, drawing)) in enumerate(arms.items())
    ]
    html = f'<div class="{kind}"><p>{note}</p>{legend}{"".join(opened)}</div>'
    text = "\n".join((note, "", *(f"- {arm}: {remark}" for arm, (remark, _) in arms.items())))
    return DrawnTable(html, numbers, text)


def _as_csv(name: str, lines: pd.DataFrame) -> Table:
    """Return a frame as the table of a CSV file, numbers with six digits."""
    cells = lines.map(lambda cell: cell if isinstance(cell, str) else "" if pd.isna(cell) else f"{cell:.6g}")
    table = Table.of(name, cells.to_dict("records"))
    return replace(table, columns=only("csv", *table.columns))


def layer_maps(records: pd.DataFrame) -> DrawnTable | None:
    """Return the SQNR of every layer by operand (`quant/<slot>/<layer>/sqnr_db`, dB), an arm at a time,
    beside its difference to the first arm's; the arm with the lowest value is open. None if no layer was
    recorded."""
    layers = by_layer(records)
    if layers.empty:
        return None
    first = layers["arm"].iloc[0]
    by_arm = {str(arm): lines for arm, lines in layers.groupby("arm", sort=False)}
    lowest = layers.groupby("arm", sort=False)["sqnr_db"].min().sort_values(kind="stable")
    arms: dict[str, tuple[str, str]] = {}
    for arm in lowest.index[:_MOST_MAPS]:
        lines = by_arm[arm]
        low = lines.loc[lines["sqnr_db"].idxmin()]
        beside = _map(lines, first, by_arm[first]) if arm != first else ""
        remark = f"lowest {low['sqnr_db']:.1f} dB, {low['slot']} of {low['layer']}"
        arms[arm] = remark, f"{_map(lines)}{beside}"
    few = f" Of {counted(len(by_arm), 'arm')}, the {_MOST_MAPS} with the lowest layers."
    note = "Signal to quantisation noise in dB at the end, mean over seeds; more is better."
    note += few if len(by_arm) > _MOST_MAPS else ""
    return _by_arm("maps", "layers", note, arms, _as_csv("layers", layers))


_PARTS = {
    "dead": ("dead zone", "elements that became zero"),
    "scale": ("scale bias", "what other scales would remove"),
    "grid": ("grid noise", "distance to the points of the grid"),
}
"""Parts of an operand's error: name and meaning, in the order of a bar."""
_SPLIT_NOTE = (
    "Why: three parts that add up to the energy of each operand's error, at the end, means over layers and"
    " seeds; and the gain of its product, where 1 is unbiased."
)


def error_split(records: pd.DataFrame) -> DrawnTable | None:
    """Return the parts of the operands' errors as bars, an arm at a time, from `quant/<slot>/dead_share`,
    `.../scale_share`, `.../grid_share`, `.../sqnr_db` and `gemm/<product>/gain`; those with the least noise
    of the grid first. None if they were not recorded."""
    errors = {"dead": "dead_share", "scale": "scale_share", "grid": "grid_share", "sqnr_db": "sqnr_db"}
    whole, *others = (
        _last_shares(records, error).rename(columns={"value": name}) for name, error in errors.items()
    )
    if whole.empty:
        return None
    for column in others:
        whole = whole.merge(column, "left", ["arm", "slot"])
    gains = tables.chosen(
        records,
        lambda name: name.family == PRODUCTS and name.layer is None and name.metric == "gain",
        product="slot",
    )
    gain = tables.last(gains).groupby(["arm", "product"], sort=False)["value"].mean()
    products = whole["slot"].str.partition(".")[0]
    whole["gain"] = [gain.get(key, math.nan) for key in zip(whole["arm"], products, strict=True)]
    whole = _ordered(whole, whole["arm"])
    arms: dict[str, tuple[str, str]] = {}
    for arm, lines in sorted(
        whole.groupby("arm", sort=False), key=lambda group: float(group[1]["grid"].min())
    ):
        least = lines.loc[(lines["dead"] + lines["scale"]).idxmax()]
        arms[str(arm)] = f"least grid noise {least['grid']:.0%}, {least['slot']}", _split_table(lines)
    legend = "".join(
        f'<span><i class="{part}"></i>{name}: {meaning}</span>' for part, (name, meaning) in _PARTS.items()
    )
    numbers = _as_csv("error_split", whole)
    return _by_arm("split", "split", _SPLIT_NOTE, arms, numbers, f'<p class="legend">{legend}</p>')


def _split_table(lines: pd.DataFrame) -> str:
    """Return one arm's operands as a table with bars."""
    heads = ["SQNR, dB", *(name for name, _ in _PARTS.values())]
    head = "".join(f'<th scope="col" class="number">{name}</th>' for name in heads)
    rows = []
    for line in lines.to_dict("records"):
        shares = {part: 100 * line[part] for part in _PARTS}
        numbers = "".join(f'<td class="number">{share:.1f} %</td>' for share in shares.values())
        widths = "".join(
            f'<i class="{part}" style="width:{min(100.0, max(0.0, share)):.1f}%"></i>'
            for part, share in shares.items()
        )
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


def _map(lines: pd.DataFrame, first: str = "", reference: pd.DataFrame | None = None) -> str:
    """Return layers by operands as a table, tinted by what was lost, or by the difference to a reference."""
    values, title = _values(lines), ""
    if reference is not None:
        other = _values(reference)
        values = {at: value - other[at] for at, value in values.items() if at in other}
        title = f"<caption>dB more (blue) or less (red) than {inline(first)}</caption>"

    def cell(layer: str, slot: str) -> str:
        value = values.get((layer, slot))
        if value is None:
            return "<td></td>"
        if not title:
            lost = min(1.0, max(0.0, (_HIGHEST - value) / (_HIGHEST - _LOWEST)))
            return f'<td class="number" style="--lost:{100 * lost:.0f}%">{value:.1f}</td>'
        kind, share = "more" if value > 0 else "less", 100 * min(1.0, abs(value) / FALL)
        return f'<td class="number {kind}" style="--share:{share:.0f}%">{minus(f"{value:+z.1f}")}</td>'

    slots, layers = dict.fromkeys(lines["slot"]), sorted(dict.fromkeys(lines["layer"]), key=_block)
    rows = {layer: [cell(layer, slot) for slot in slots] for layer in layers}
    return tinted_map(slots, rows, title) if values else ""


def recorded(records: pd.DataFrame) -> bool:
    """Return True if any error of an operand was recorded."""
    return any(parse(str(text)).family == "quant" for text in records["metric"].unique())
