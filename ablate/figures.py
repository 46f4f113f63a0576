"""Numbers as pictures, each named by its question. The only file that knows seaborn; colours are safe for the colour-blind."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # files only: a window would need a screen

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from ablate.ledger import Ledger
from ablate.results import ArmSummary, frame, summaries
from ablate.surface import Metric, Published

PALETTE = "colorblind"


def forest(arms: list[ArmSummary], metric: Metric) -> Figure:
    """Each arm's gap to its baseline with its 95 % paired interval; the band is what does not matter."""
    compared = [arm for arm in arms if arm.gap is not None and arm.gap.pairs]
    figure, axes = plt.subplots(figsize=(7, 0.5 * len(compared) + 1.4), layout="constrained")
    if metric.min_effect:
        axes.axvspan(-metric.min_effect, metric.min_effect, color="0.92", zorder=0)
    axes.axvline(0, color="0.4", linewidth=1)
    colours = sns.color_palette(PALETTE)
    for row, arm in enumerate(reversed(compared)):
        half = arm.gap.high - arm.gap.mean if arm.gap.has_interval else 0
        axes.errorbar(arm.gap.mean, row, xerr=half, fmt="o", color=colours[0], capsize=4)
    axes.set_yticks(range(len(compared)), [arm.name for arm in reversed(compared)])
    axes.set_xlabel(f"{metric.name}: arm minus baseline, 95 % paired t interval")
    axes.set_title("How far is each arm from its baseline?", loc="left")
    sns.despine(figure, left=True)
    return figure


def curves(records: pd.DataFrame, name: str) -> Figure:
    """A metric over steps, one line an arm, the band from the smallest to the largest seed."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    chosen = records[records["metric"] == name]
    sns.lineplot(chosen, x="step", y="value", hue="arm", errorbar=("pi", 100), palette=PALETTE, ax=axes)
    axes.set_ylabel(name)
    axes.set_title(f"How does {name} develop?", loc="left")
    axes.legend(title=None, frameon=False)
    sns.despine(figure)
    return figure


def bars(lines: list[dict], value: str, label: str, hue: str) -> Figure:
    """Measured values as bars, a group for each label coloured by `hue`; a panel for each shape and dtype."""
    data = pd.DataFrame(lines)
    panels = [name for name in ("shape", "dtype") if name in data and name != label and data[name].nunique() > 1]
    data["panel"] = data[panels].agg(", ".join, axis=1) if panels else ""
    height = 0.25 * data.groupby("panel").size().max() + 1.5
    grid = sns.catplot(
        data, x=value, y=label, hue=hue, col="panel", col_wrap=2 if panels else None, kind="bar", height=height, aspect=5 / height,
        palette=PALETTE, errorbar=None,
    )  # fmt: skip
    grid.set_titles("{col_name}").set_ylabels("")
    sns.move_legend(grid, "lower center", bbox_to_anchor=(0.5, 1.0), ncol=4, title=None)
    return grid.figure


def shares(lines: list[dict], value: str, label: str, parts: Sequence[str]) -> Figure:
    """Each line's value as a bar, divided into the shares of its parts."""
    figure, axes = plt.subplots(figsize=(7, 0.5 * len(lines) + 1.6), layout="constrained")
    data = pd.DataFrame({part: [line[value] * line[part] for line in lines] for part in parts}, index=[line[label] for line in lines])
    data[::-1].plot.barh(stacked=True, ax=axes, color=sns.color_palette(PALETTE), width=0.7)
    axes.set_xlabel(value)
    axes.set_title("Where does a step spend its time?", loc="left")
    axes.get_legend().remove()
    figure.legend(frameon=False, ncol=len(parts), loc="outside lower center", fontsize="small")
    sns.despine(figure)
    return figure


def slot_errors(records: pd.DataFrame) -> Figure:
    """Signal to quantisation noise of each operand slot over the run, mean over layers, one panel a slot."""
    pattern = r"^quant/(?P<slot>[a-z]+\.[a-z])/sqnr_db$"
    chosen = records.assign(slot=records["metric"].str.extract(pattern)["slot"]).dropna(subset="slot")
    grid = sns.relplot(
        chosen, x="step", y="value", hue="arm", col="slot", col_wrap=3, kind="line", errorbar=None, height=2.4, aspect=1.2, palette=PALETTE
    )
    grid.set_axis_labels("step", "SQNR, dB").set_titles("{col_name}")
    return grid.figure


def dots(arms: list[ArmSummary], metric: Metric, published: Sequence[Published] = ()) -> Figure:
    """Every arm's metric, a dot a seed; its baseline and what was published of it beside. A log axis where they span a factor of 8."""
    measured = {arm.name: arm for arm in arms if arm.values}
    compared = [arm for arm in measured.values() if arm.baseline in measured]
    several = len({arm.baseline for arm in compared}) > 1
    shown = compared if several else list(measured.values())  # each baseline beside its arm, or one for all
    figure, axes = plt.subplots(figsize=(8, 0.36 * len(shown) + 1.8), layout="constrained")
    colours = sns.color_palette(PALETTE)
    rows = {arm.name: row for row, arm in enumerate(reversed(shown))}
    for arm in shown:
        axes.plot(list(arm.values.values()), [rows[arm.name]] * len(arm.values), "o", color=colours[0], alpha=0.7, label="arm, by seed")
        if several:
            base = measured[arm.baseline].values.values()
            axes.plot(list(base), [rows[arm.name]] * len(base), "|", markersize=14, color="0.45", label="its baseline, by seed")
    for line in published:
        if line.metric == metric.name and line.step is None and line.arm in rows:
            axes.plot(line.value, rows[line.arm], "D", markersize=11, fillstyle="none", color=colours[3], label="published")
    values = [abs(value) for arm in measured.values() for value in arm.values.values()]
    if min(values) > 0 and max(values) > 8 * min(values):
        axes.set_xscale("log")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.margins(y=0.6 / len(rows))
    axes.grid(axis="x", color="0.9")
    axes.set_xlabel(metric.name)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside upper left", ncols=3, frameon=False)
    sns.despine(figure, left=True)
    return figure


def decay(records: pd.DataFrame, metric: str, published: Sequence[Published] = ()) -> Figure:
    """A metric over steps on log axes, one line an arm, with published figures where there are any: does it fall as 1 / steps?"""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    chosen = records[records["metric"] == metric]
    arms = list(dict.fromkeys(chosen["arm"]))
    sns.lineplot(chosen, x="step", y="value", hue="arm", hue_order=arms, marker="o", errorbar=("pi", 100), palette=PALETTE, ax=axes)
    colours = dict(zip(arms, sns.color_palette(PALETTE), strict=False))
    for line in published:
        if line.metric == metric and line.step and line.arm in colours:
            axes.plot(line.step, line.value, "D", markersize=11, fillstyle="none", color=colours[line.arm])
    axes.set(xscale="log", yscale="log", xlabel="independent draws in the mean", ylabel=metric)
    axes.set_title("Lines are measured, diamonds published", loc="left", fontsize="medium")
    axes.legend(title=None, frameon=False)
    axes.grid(color="0.9")
    sns.despine(figure)
    return figure


def draw(ledger: Ledger, metrics: Sequence[Metric], published: Sequence[Published], folder: Path) -> list[Path]:
    """One picture a metric, as PNG files in `folder`: arms by seed, or a decay where the metric was recorded at several draws."""
    folder.mkdir(parents=True, exist_ok=True)
    records = None
    paths = []
    for metric in metrics:
        arms = summaries(ledger, metric)
        if not any(arm.values for arm in arms):
            continue
        if metric.name.startswith("mean/"):
            records = frame(ledger) if records is None else records
            figure = decay(records, metric.name, published)
        else:
            figure = dots(arms, metric, published)
        paths.append(folder / f"{metric.name.replace('/', '-')}.png")
        figure.savefig(paths[-1], dpi=150)
        plt.close(figure)
    return paths
