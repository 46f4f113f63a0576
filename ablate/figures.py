"""Numbers as pictures, each named by its question. The only file that knows seaborn; colours are safe for the colour-blind."""

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from ablate.results import ArmSummary
from ablate.surface import Metric

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


def slot_errors(records: pd.DataFrame) -> Figure:
    """Signal to quantisation noise of each operand slot over the run, mean over layers, one panel a slot."""
    pattern = r"^quant/(?P<slot>[a-z]+\.[a-z])/sqnr_db$"
    chosen = records.assign(slot=records["metric"].str.extract(pattern)["slot"]).dropna(subset="slot")
    grid = sns.relplot(
        chosen, x="step", y="value", hue="arm", col="slot", col_wrap=3, kind="line", errorbar=None, height=2.4, aspect=1.2, palette=PALETTE
    )
    grid.set_axis_labels("step", "SQNR, dB").set_titles("{col_name}")
    return grid.figure
