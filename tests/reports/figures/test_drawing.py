"""Pictures of a sweep: one file a metric, with every arm, and published figures where there are any."""

import math

import pytest
from matplotlib.legend import Legend

from ablate.experiment.schema import Metric, Published
from ablate.reports.figures import decay, errors_by_slot
from ablate.store.ledger import Ledger
from ablate.store.records import frame

ERROR, MEAN = Metric(name="quant/fprop.x/rel_mse"), Metric(name="mean/dgrad.g/rel_mse")
PUBLISHED = [
    Published(arm="sr", metric=ERROR.name, value=9e-3, source="a paper"),
    Published(arm="sr", metric=MEAN.name, value=5e-3, step=4, source="a paper"),
]


@pytest.fixture
def book(tmp_path):
    ledger = Ledger(tmp_path / "ledger.db")
    base = ledger.add_arm("base", {"recipe": "nvfp4"}, None, None)
    for arm, level in (
        (base, 1e-2),
        (ledger.add_arm("sr", {"sr": True}, base, None), 2e-3),
        (ledger.add_arm("none", {}, base, None), math.nan),
    ):
        for seed in range(2):
            trial = ledger.add_member(arm, seed, f"{arm}/{seed}", "{}")
            events = [
                {"step": n, "time": 0.0, "metrics": {ERROR.name: level, MEAN.name: level / n}} for n in (1, 4)
            ]
            ledger.record(trial, events)
            ledger.settle(trial, "done")
    yield ledger
    ledger.close()


def test_a_decay_has_log_axes_and_its_published_points(book):
    axes = decay(frame(book), MEAN.name, PUBLISHED).figure.axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert [
        (line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines if line.get_marker() == "D"
    ] == [(4, 5e-3)]


def test_of_many_arms_the_best_are_drawn_and_that_is_said(book):
    base = book.arms()[0].arm
    for number in range(60):
        trial = book.add_member(
            book.add_arm(f"arm {number}", {"n": number}, base, None), 0, f"many/{number}", "{}"
        )
        book.record(trial, [{"step": 1, "time": 0.0, "metrics": {ERROR.name: 1.0 - number / 100}}])
        book.settle(trial, "done")
    figure = errors_by_slot(frame(book)).figure
    shown = {label.get_text() for legend in figure.findobj(Legend) for label in legend.get_texts()}
    assert shown == {"base", "sr", *(f"arm {number}" for number in range(22, 60))}
    assert any("The best 40 of 62 arms" in text.get_text() for text in figure.texts)
