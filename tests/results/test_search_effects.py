"""Effects of a search's knobs are statsmodels' fit of the same arms; the front is what no other arm beats."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import statsmodels.api as sm
from support.books import BASE, add

from ablate.experiment.schema import Metric
from ablate.reports.answer_tables import front_parts, knob_effects_table
from ablate.results.search_effects import knob_effects
from ablate.results.summary import summaries
from ablate.store.ledger import Ledger

LOSS, SPEED = Metric(name="val/loss"), Metric(name="tokens_per_s", direction="maximize")


@pytest.fixture
def usual(tmp_path):
    """An arm as a ledger gives it, to make searched ones of."""
    ledger = Ledger(tmp_path / "sweeps" / "x" / "ledger.db")
    ledger.describe(metric=LOSS.model_dump_json())
    add(ledger, "bf16", {}, None, BASE)
    (arm,) = summaries(ledger)
    ledger.close()
    return arm


def searched(usual, rows):
    """Arms of a search: knobs and value of each."""
    return [
        dataclasses.replace(
            usual, name=f"arm {number}", role="searched", knobs=knobs, values={0: value, 1: value}
        )
        for number, (knobs, value) in enumerate(rows)
    ]


@pytest.mark.parametrize(("unit", "start"), [(1e-12, 0.0), (1.0, 1e9)])
def test_effects_do_not_depend_on_the_units_of_knobs(usual, unit, start):
    draw = np.random.default_rng(4)
    rows = [
        (int(a), int(b), float(c))
        for a, b, c in zip(*draw.integers(9, 30, (2, 20)), draw.normal(2, 0.1, 20), strict=True)
    ]
    small, large = (
        knob_effects(searched(usual, [({"steps": 1000 * a, "eps": b * unit + start}, c) for a, b, c in rows]))
        for unit, start in ((1, 0), (unit, start))
    )
    assert [one.knob for one in small] == [one.knob for one in large] != []
    for one, other in zip(small, large, strict=True):
        assert (other.mean, other.half, other.p) == pytest.approx((one.mean, one.half, one.p))


def test_effects_and_intervals_are_those_of_statsmodels(usual):
    draw = np.random.default_rng(3)
    rows = [
        ({"rht": bool(a), "block": str(b), "lr": float(c), "share": float(d)}, float(e))
        for a, b, c, d, e in zip(
            draw.integers(0, 2, 24),
            draw.choice(["1x16", "1x32", "16x16"], 24, p=[0.6, 0.2, 0.2]),
            np.exp(draw.uniform(-9, -5, 24)),
            draw.uniform(0.1, 0.2, 24),
            draw.normal(2.4, 0.01, 24),
            strict=True,
        )
    ]
    columns = np.array(
        [
            [k["rht"], k["block"] == "1x32", k["block"] == "16x16", np.log2(k["lr"]), k["share"]]
            for k, _ in rows
        ],
        float,
    )
    fit = sm.OLS([value for _, value in rows], sm.add_constant(columns)).fit()
    shares = [k["share"] for k, _ in rows]
    factor = [1, 1, 1, 1, max(shares) - min(shares)]
    expected = {
        (knob, start): (
            fit.params[1 + at] * factor[at],
            np.ptp(fit.conf_int()[1 + at]) / 2 * factor[at],
            fit.pvalues[1 + at],
        )
        for at, (knob, start) in enumerate(
            [
                ("rht", "true instead of false"),
                ("block", "1x32 instead"),
                ("block", "16x16 instead"),
                ("lr", "per doubling"),
                ("share", "from"),
            ]
        )
    }
    found = knob_effects(searched(usual, rows))
    assert len(found) == 5
    table = knob_effects_table(SimpleNamespace(arms=searched(usual, rows), unit="nats"))
    assert table.caption.startswith("Main effects only")
    assert [effect.p for effect in found] == sorted(effect.p for effect in found)
    for (knob, start), (mean, half, p) in expected.items():
        (effect,) = [one for one in found if one.knob == knob and one.change.startswith(start)]
        assert (effect.mean, effect.half, effect.p) == pytest.approx((mean, half, p))


@pytest.mark.parametrize(
    "rows",
    [
        [({"rht": bool(n % 2)}, 2.0 + n) for n in range(6)],  # 4 degrees of freedom
        [({"rht": bool(n % 2), "sr": bool(n % 2)}, 2.0 + n) for n in range(20)],  # always together
        [({"rht": True}, 2.0 + n) for n in range(20)],  # never turned
    ],
)
def test_arms_that_do_not_tell_knobs_apart_have_no_effects(usual, rows):
    assert knob_effects(searched(usual, rows)) == []
    assert knob_effects_table(SimpleNamespace(arms=searched(usual, rows), unit="nats")) is None


def test_the_front_is_a_sentence_and_a_table_of_what_no_other_beats(usual, tmp_path):
    ledger = Ledger(tmp_path / "sweeps" / "x" / "ledger.db", readonly=True)
    points = {"a": (2.40, 900.0), "b": (2.41, 1000.0), "beaten": (2.42, 950.0), "c": (2.50, 1200.0)}

    def arms(at):
        return [
            dataclasses.replace(usual, name=name, values={0: both[at]}, given=(0,), role="searched")
            for name, both in points.items()
        ]

    def sweep(most, several=True):
        objectives = {LOSS: arms(0)[:most], SPEED: arms(1)[:most]} if several else None
        return SimpleNamespace(arms=arms(0)[:most], objectives=objectives, ledger=ledger)

    sentence, table = front_parts(sweep(4))
    assert [row["arm"] for row in table.rows] == ["a", "b", "c"]
    assert sentence.text == (
        "3 of 4 arms are beaten by no other in val/loss and tokens_per_s. From a to c the front goes"
        " val/loss from 2.4000 to 2.5000, and tokens_per_s from 900.0000 to 1,200."
    )
    assert front_parts(sweep(4, several=False)) == []
    assert front_parts(sweep(1))[0].text == "Of 1 arm a is best in val/loss and tokens_per_s alike."
