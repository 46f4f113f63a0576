"""Tests of outliers among operands: each is reported once, with its numbers, and a healthy sweep has none."""

import re

import pandas as pd
import pytest

from ablate.reports.figures.style import MOST_ARMS
from ablate.reports.operand_health import (
    BELOW,
    BEYOND,
    FALL,
    USUAL_ZERO,
    error_split,
    exceptions,
    gradient_error,
    layer_maps,
    most_zero,
    shares_tables,
)

LAYERS = [f"blocks.{number}.mlp.up" for number in range(12)]


def records(**changed: float) -> pd.DataFrame:
    """Two arms on two seeds: 20 dB everywhere, no element beyond the grid. `changed`: last values of arm b by metric,
    with dots as in the names."""
    usual = {f"quant/fprop.x/{layer}/sqnr_db": 20.0 for layer in LAYERS}
    usual |= {
        "quant/fprop.x/sqnr_db": 20.0,
        "quant/fprop.x/saturated_frac": 0.0,
        "quant/fprop.x/zero_frac": 0.05,
    }
    lines = [
        {
            "sweep": "s",
            "arm": arm,
            "baseline": None if arm == "a" else "a",
            "seed": seed,
            "step": step,
            "tokens": step,
        }
        | {"metric": name, "value": changed.get(name, value) if (arm, step) == ("b", 9) else value}
        for arm in "ab"
        for seed in (0, 1)
        for step in (1, 9)
        for name, value in usual.items()
    ]
    return pd.DataFrame(lines)


def test_a_healthy_sweep_has_nothing_to_say():
    assert exceptions(records()) == []


@pytest.mark.parametrize(
    ("name", "limit", "better", "words"),
    [
        (
            "quant/fprop.x/blocks.3.mlp.up/sqnr_db",
            20 - BELOW,
            0.1,
            "fprop.x of blocks.3.mlp.up in b, 14.0 dB (6.0 below)",
        ),
        ("quant/fprop.x/sqnr_db", 20 - FALL, 0.1, "fprop.x in b, 20.0 to 17.0 dB"),
        ("quant/fprop.x/saturated_frac", BEYOND + 0.001, -0.002, "fprop.x in b, 10.10%"),
    ],
)
def test_what_crosses_its_limit_is_named_with_its_numbers_and_what_does_not_is_not(
    name, limit, better, words
):
    (sentence,) = exceptions(records(**{name: limit}))
    assert sentence.endswith(f": {words}.")
    assert exceptions(records(**{name: limit + better})) == []


@pytest.mark.parametrize(
    ("share", "clause"),
    [(USUAL_ZERO, ""), (0.277, "; most rounded to zero: fprop.x in b, 27.7%")],
)
def test_the_largest_share_rounded_to_zero_is_named_if_it_is_unusual(share, clause):
    table = records(**{"quant/fprop.x/zero_frac": share})
    assert (most_zero(table), exceptions(table)) == (clause, [])


def test_of_many_the_worst_are_named_and_the_rest_are_counted():
    few = {f"quant/fprop.x/{layer}/sqnr_db": 13.0 - number for number, layer in enumerate(LAYERS[:5])}
    (sentence,) = exceptions(records(**few))
    assert re.findall(r"blocks\.(\d+)", sentence) == ["4", "3", "2", "1", "0"]
    both = pd.concat(
        [records(**few), records(**few).assign(arm=lambda lines: lines["arm"] + "2")], ignore_index=True
    )
    assert exceptions(both)[0].endswith("; and 4 more.")


def test_the_map_of_the_arm_with_the_lowest_layer_is_open_and_the_others_are_a_click_away():
    maps = layer_maps(records(**{"quant/fprop.x/blocks.10.mlp.up/sqnr_db": 4.0}))
    html = maps.html()
    first, second = re.findall(r"<details(.*?)><summary><b>(.*?)</b> (.*?)</summary>", html)
    assert first == (' name="layers" open', "b", "lowest 4.0 dB, fprop.x of blocks.10.mlp.up")
    assert second[:2] == (' name="layers"', "a")
    assert html.index("blocks.2.mlp.up") < html.index("blocks.10.mlp.up</th>")  # by number
    assert layer_maps(records().iloc[:0]) is None


def test_a_map_stands_beside_its_difference_to_the_first_arm_on_a_scale_of_two_colours():
    worse, better = "quant/fprop.x/blocks.1.mlp.up/sqnr_db", "quant/fprop.x/blocks.2.mlp.up/sqnr_db"
    html = layer_maps(records(**{worse: 18.5, better: 26.0})).html()
    of_b, of_a = html.split("</details>")[:2]
    assert (of_b.count("<table"), of_a.count("<table")) == (2, 1)
    _, difference = of_b.split("dB more (blue) or less (red) than a")
    cells = re.findall(r'<td class="number (\w+)" style="--share:(\d+)%">(.*?)</td>', difference)
    assert cells[1:4] == [("less", "50", "\u22121.5"), ("more", "100", "+6.0"), ("less", "0", "+0.0")]


def test_shares_are_a_row_an_arm_and_a_column_an_operand():
    zero, beyond = shares_tables(records(**{"quant/fprop.x/saturated_frac": 0.00004}))
    assert [row["fprop.x"] for row in zero.rows] == [("5.0 %", 0.05)] * 2
    assert [row["fprop.x"][0] for row in beyond.rows] == ["0", "0.0040 %"]
    assert len(shares_tables(records())) == 1  # nothing lies beyond the grid: no table says so


def test_a_table_of_shares_has_the_arms_that_lose_least_over_all_operands():
    zero = records().query("arm == 'a' and metric == 'quant/fprop.x/zero_frac'")
    lines = [
        zero.assign(arm=f"arm {number}", metric=f"quant/{slot}/zero_frac", value=share)
        for number in range(MOST_ARMS + 1)
        for slot, share in (("fprop.x", 0.01 * number), ("wgrad.g", 0.05 - 0.001 * number))
    ]
    (table,) = shares_tables(pd.concat(lines, ignore_index=True))
    assert [row["arm"] for row in table.rows] == [f"arm {number}" for number in range(MOST_ARMS)]
    assert f"; {MOST_ARMS} of {MOST_ARMS + 1} arms." in table.caption


def split(**changed: float) -> pd.DataFrame:
    """Records of arm b with parts of an error, and with its gradient's."""
    parts = {
        "quant/fprop.x/dead_share": 0.05,
        "quant/fprop.x/scale_share": 0.1,
        "quant/fprop.x/grid_share": 0.85,
    }
    more = {"gemm/fprop/gain": 0.98, "grad/variance": 0.02, "grad/squared_bias": -0.001}
    first = records()
    own = first[(first["arm"] == "b") & (first["metric"] == "quant/fprop.x/sqnr_db")]
    lines = [
        own.assign(metric=name, value=changed.get(name, value)) for name, value in (parts | more).items()
    ]
    return pd.concat([first, *lines], ignore_index=True)


def test_parts_of_an_error_stand_beside_the_gain_of_the_product(tmp_path):
    assert error_split(records()) is None
    found = error_split(split())
    html = found.html()
    found.save(tmp_path)
    (line,) = pd.read_csv(tmp_path / "error_split.csv").to_dict("records")
    assert line == {
        "arm": "b", "slot": "fprop.x", "dead": 0.05, "scale": 0.1, "grid": 0.85, "sqnr_db": 20.0, "gain": 0.98
    }  # fmt: skip
    assert re.findall(r'<i class="(\w+)" style="width:([\d.]+)%">', html) == [
        ("dead", "5.0"), ("scale", "10.0"), ("grid", "85.0")
    ]  # fmt: skip
    assert "0.9800" in html


@pytest.mark.parametrize("part", ["dead", "scale"])
def test_an_error_that_is_mostly_no_noise_of_the_grid_is_named(part):
    assert exceptions(split()) == []
    (sentence,) = exceptions(split(**{f"quant/fprop.x/{part}_share": 0.6}))
    assert "fprop.x in b, 60%" in sentence


def test_variance_and_bias_of_the_gradient_are_means_over_records():
    assert gradient_error(records()) is None
    (row,) = gradient_error(split()).rows
    assert (row["arm"], row["variance"], row["squared bias"]) == ("b", ("2 %", 0.02), ("−0.1 %", -0.001))
