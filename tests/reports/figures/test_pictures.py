"""Promises of every figure, whatever it shows: files, numbers, a question, ids of its own; and its drawing of few or many values."""

import re
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt
from matplotlib.collections import FillBetweenPolyCollection
from support import made_up
from support.cases import every
from support.made_up import LOSS, SPEED

from ablate.experiment.schema import Metric
from ablate.reports import figures
from ablate.reports.figures import Picture
from ablate.results import summary
from ablate.results.attribution import grid
from ablate.store.ledger import Ledger
from ablate.store.records import frame


class Sweep:
    """Results that figures are drawn from."""

    def __init__(self, ledger: Ledger, metric: Metric = LOSS) -> None:
        self.metric, self.arms, self.table = metric, summary.summaries(ledger, metric), frame(ledger)
        self.speeds = summary.summaries(ledger, SPEED)
        ledger.close()


FROM_A_SWEEP = {
    "interaction": lambda of: figures.interaction(grid(of.arms), of.metric),
    "throughput_gap": lambda of: figures.throughput_gap(of.arms, of.metric),
    "operand_errors": lambda of: figures.operand_errors(of.table, of.arms, of.metric),
    "curves": lambda of: figures.curves(of.table, of.metric.name),
    "gap_curve": lambda of: figures.gap_curve(of.table, of.metric),
    "decay": lambda of: figures.decay(of.table, of.metric.name),
    "slot_errors": lambda of: figures.slot_errors(of.table),
    "divergence": lambda of: figures.divergence(of.arms, of.table),
    "errors_by_slot": lambda of: figures.errors_by_slot(of.table),
    "history": lambda of: figures.history(of.arms, of.metric),
    "objectives": lambda of: figures.objectives({of.metric: of.arms, SPEED: of.speeds}),
}
OF_A_SEARCH = {"history", "objectives"}
LINES = [
    {"operation": name, "dtype": dtype, "back end": end, "ms": speed + ord(name[0]), "a": 0.25, "b": 0.75}
    for name in ("nearest", "stochastic")
    for dtype in ("bf16", "fp32")
    for end, speed in (("reference", 10), ("cpu", 1))
]
SPEEDS = [
    {"shape": shape, "size": "64x32x32", "preset": preset, "engine": engine}
    | {
        f"{way} {what}": value
        for way in ("forward", "backward")
        for what, value in (("TFLOP/s", 3.0), ("peak", 4.0), ("of peak", 0.75))
    }
    for shape in ("llama-8b qkv", "64x32x32")
    for preset, engine in (("bf16", "torch"), ("nvfp4", "transformer_engine"))
]
VALUES = np.random.default_rng(3).normal(size=2000)
OF_ITS_OWN = {
    "importance": lambda: figures.importance({"lr": 0.7, "recipe.wgrad.g.rounding": 0.3}),
    "bars": lambda: figures.bars(LINES, "ms", "operation", "back end"),
    "shares": lambda: figures.shares(LINES[:1] + LINES[-1:], "ms", "operation", ("a", "b")),
    "speeds": lambda: figures.speeds(SPEEDS, "TFLOP/s"),
    "rotation_histogram": lambda: figures.rotation_histogram(VALUES**3, VALUES),
    "rounding_histogram": lambda: figures.rounding_histogram(
        VALUES, np.round(VALUES), np.floor(VALUES + 0.3)
    ),
}
NAMES = sorted(FROM_A_SWEEP | OF_ITS_OWN)


@pytest.fixture(scope="module")
def sweeps():
    with tempfile.TemporaryDirectory() as folder:
        yield {"grid": Sweep(made_up.grid(Path(folder))), "search": Sweep(made_up.search(Path(folder)))}


@pytest.fixture(scope="module")
def draw(sweeps):
    """Draws a picture anew; `drawn` remembers it."""

    def drawn(name: str) -> Picture:
        if name in OF_ITS_OWN:
            return OF_ITS_OWN[name]()
        return FROM_A_SWEEP[name](sweeps["search" if name in OF_A_SEARCH else "grid"])

    return drawn


@pytest.fixture(scope="module")
def saved(draw, tmp_path_factory):
    """Every picture once, with the folder that it is saved in."""
    folder = tmp_path_factory.mktemp("pictures")
    pictures = {name: draw(name) for name in NAMES}
    for picture in pictures.values():
        picture.save(folder)
    return pictures, folder


def test_every_function_that_draws_is_looked_at():
    assert set(NAMES) == set(figures.__all__) - {"Picture", "draw"}


@every(name=NAMES)
def test_a_picture_is_two_files(saved, name):
    picture, folder = saved[0][name], saved[1]
    assert picture.name.startswith(name)
    assert (
        (folder / f"{picture.name}.svg")
        .read_text()
        .startswith('<?xml version="1.0" encoding="utf-8"?>\n<svg ')
    )
    back = pd.read_csv(folder / f"{picture.name}.csv")
    assert list(back.columns) == list(picture.data.columns)
    assert 0 < len(back) == len(picture.data)
    for column in back.select_dtypes("number"):
        expected = picture.data[column].to_numpy(float, na_value=np.nan)
        np.testing.assert_allclose(back[column].to_numpy(float), expected, rtol=1e-8, err_msg=column)


@every(name=NAMES)
def test_a_picture_asks_a_question_above_its_axes(saved, name):
    picture = saved[0][name]
    assert picture.question.endswith("?")
    assert picture.figure.get_suptitle().replace("\n", " ") == picture.question
    title, whole = picture.figure.texts[0].get_window_extent(), picture.figure.bbox
    assert title.x0 >= 0
    assert title.x1 <= whole.width
    for axes in picture.figure.axes:
        taken = axes.get_tightbbox()
        assert taken.y1 <= title.y0 + 1
        assert taken.x0 >= -1
        assert taken.x1 <= whole.width + 1


@every(name=NAMES)
def test_equal_pictures_are_equal_files(draw, saved, tmp_path, name):
    again = draw(name)
    file = saved[1] / f"{again.name}.svg"
    assert again.save(tmp_path).read_bytes() == file.read_bytes()
    assert (tmp_path / f"{again.name}.csv").read_bytes() == file.with_suffix(".csv").read_bytes()
    pd.testing.assert_frame_equal(again.data, saved[0][name].data)


def test_pictures_on_one_page_share_no_id_and_fetch_nothing(saved):
    ids = []
    for picture in saved[0].values():
        svg = (saved[1] / f"{picture.name}.svg").read_text().partition("\n")[2]
        ids += re.findall(r'\bid="([^"]+)"', svg)
        assert set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', svg)) <= {
            pair for one in ids for pair in ((one, ""), ("", one))
        }
        assert set(re.findall(r"https?://[^\s\"'<]+", svg)) <= {
            "http://www.w3.org/2000/svg",
            "http://www.w3.org/1999/xlink",
        }
        assert svg.startswith("<svg ")
        assert "<metadata" not in svg
    assert len(ids) == len(set(ids)) > 500


def test_a_picture_shows_itself_in_a_notebook(saved):
    picture = saved[0]["importance"]
    bundle = picture._repr_mimebundle_()
    assert bundle["image/svg+xml"] == picture.svg
    assert bundle["text/markdown"] == f"![{picture.question}](figures/importance.svg)"
    assert picture._repr_mimebundle_(include={"image/svg+xml"}).keys() == {"image/svg+xml"}
    assert picture._repr_mimebundle_(exclude={"image/svg+xml"}).keys() == {"text/markdown"}


def test_text_is_text_and_nothing_is_left_open(saved):
    assert ">importance, a share of 1</text>" in saved[0]["importance"].svg
    assert plt.get_fignums() == []


def test_a_closed_picture_holds_nothing(draw):
    picture = draw("importance")
    picture.close()
    assert picture.figure.axes == []


# --- sweeps that have little, or much -------------------------------------------------------------


def nothing(folder: Path) -> Ledger:
    ledger = Ledger(folder / "nothing" / "ledger.db")
    ledger.add_member(ledger.add_arm("bf16", {}, None, None), 0, "0/0", made_up.SPEC)
    return ledger


def diverged(folder: Path) -> Ledger:
    """Every run, its baseline's too, from the first step on."""
    ledger = Ledger(folder / "diverged" / "ledger.db")
    base = ledger.add_arm("bf16", {}, None, None)
    for arm in (base, ledger.add_arm("sr", {"sr": True}, base, None)):
        for seed in range(2):
            made_up.member(
                ledger,
                arm,
                seed,
                [(1, {"val/loss": np.nan, "nan/first_step": 1.0, "nan/loss": 1.0})],
                "diverged",
            )
    return ledger


def many(folder: Path) -> Ledger:
    ledger = Ledger(folder / "many" / "ledger.db")
    ledger.describe(search="{}")
    base = ledger.add_arm("bf16", {}, None, None, "baseline")
    with ledger.transaction():
        for number in range(1001):
            arm = (
                ledger.add_arm(
                    f"_arm ${number}, {'long ' * 20}{number}", {"n": number}, base, number, "searched"
                )
                if number
                else base
            )
            metrics = {
                LOSS.name: 3 - number / 1e4,
                SPEED.name: 1e3 + number,
                "quant/wgrad.g/sqnr_db": 20.0,
                "quant/wgrad.g/rel_mse": 0.01,
            }
            metrics |= {"quant/wgrad.g/blocks.0.mlp.up/sqnr_db": 20.0, "quant/wgrad.g/zero_frac": 0.1}
            made_up.member(ledger, arm, 0, [(step, metrics) for step in (1, 2, 3)])
    return ledger


@pytest.mark.parametrize("name", sorted(FROM_A_SWEEP))
def test_of_nothing_there_is_no_picture_but_which_runs_are_missing(name, tmp_path):
    picture = FROM_A_SWEEP[name](Sweep(nothing(tmp_path)))
    assert (picture is None) == (name != "divergence")


@pytest.mark.parametrize("name", sorted(FROM_A_SWEEP))
def test_of_a_sweep_that_diverged_there_is_the_picture_that_says_so(name, tmp_path):
    picture = FROM_A_SWEEP[name](Sweep(diverged(tmp_path)))
    assert (picture is None) == (name != "divergence")
    if picture:
        assert list(picture.data["diverged_at_step"]) == [1.0] * 4
        assert list(picture.data["nan/loss"]) == [1.0] * 4


ABOUT_OTHERS = {"divergence", "slot_errors", "errors_by_slot"}
"""Figures of another metric than the sweep's."""


@pytest.mark.parametrize("name", sorted(FROM_A_SWEEP.keys() - ABOUT_OTHERS))
def test_a_metric_that_no_one_recorded_gives_no_picture(name, tmp_path):
    assert (
        FROM_A_SWEEP[name](Sweep(made_up.grid(tmp_path, steps=2), Metric(name="gemm/fprop/rel_mse"))) is None
    )


@pytest.fixture(scope="module")
def lonely(tmp_path_factory):
    return Sweep(made_up.grid(tmp_path_factory.mktemp("lonely"), seeds=1, steps=4, only=1))


@pytest.mark.parametrize(
    "name", sorted(FROM_A_SWEEP.keys() - {"interaction", "operand_errors", "throughput_gap"} - OF_A_SEARCH)
)
def test_one_arm_with_one_seed_is_enough_and_has_no_interval(name, lonely):
    picture = FROM_A_SWEEP[name](lonely)
    assert len(picture.data)
    if name == "gap_curve":
        assert picture.data["low"].isna().all()
    assert not picture.figure.findobj(FillBetweenPolyCollection)  # no band


@pytest.mark.parametrize("name", ["curves", "gap_curve", "operand_errors", "slot_errors", "throughput_gap"])
def test_two_points_are_no_picture(name, tmp_path):
    assert FROM_A_SWEEP[name](Sweep(made_up.grid(tmp_path, seeds=1, steps=2, only=1))) is None


@pytest.mark.parametrize("name", ["curves", "gap_curve", "slot_errors"])
def test_several_seeds_have_a_band(name, saved):
    assert saved[0][name].figure.findobj(FillBetweenPolyCollection)


@pytest.fixture(scope="module")
def thousand(tmp_path_factory):
    return Sweep(many(tmp_path_factory.mktemp("many")))


@pytest.mark.parametrize("name", sorted(FROM_A_SWEEP.keys() - {"interaction"} - OF_A_SEARCH))
def test_of_a_thousand_arms_the_best_forty_are_drawn_and_that_is_said(name, thousand):
    picture = FROM_A_SWEEP[name](thousand)
    assert 39 <= picture.data["arm"].nunique() <= 41
    said = " ".join(text.get_text() for text in picture.figure.texts) + " ".join(
        axes.get_xlabel() for axes in picture.figure.axes
    )
    assert re.search(r"\b4[01] of 1,00[01]", said.replace("\n", " "))
    if name not in ("slot_errors", "errors_by_slot", "divergence"):  # where all arms are alike
        assert any(arm.endswith("long 1000") for arm in picture.data["arm"])


@pytest.mark.parametrize("name", sorted(OF_A_SEARCH))
def test_what_names_no_arm_draws_a_thousand(name, thousand):
    picture = FROM_A_SWEEP[name](thousand)
    assert picture.data["arm"].nunique() >= 1000 if "arm" in picture.data else len(picture.data) == 2
