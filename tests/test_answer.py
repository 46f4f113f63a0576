"""What a report says: the verdict that the numbers allow and no more, and every loss by name."""

import json
import math

import pytest

from ablate.answer import Answer
from ablate.ledger import Ledger

SPEC = json.dumps({"workload": {"gpt": {"batch": 2, "context": 16}}, "seed": 0, "data": "abc"})
BASE = {0: 3.00, 1: 3.10, 2: 3.20, 3: 3.05}
WORSE = {seed: value + 0.1 + 0.001 * seed for seed, value in BASE.items()}
ALIKE = {seed: value + 0.0001 * (-1) ** seed for seed, value in BASE.items()}
LOOSE = {seed: value + 0.2 * (-1) ** seed for seed, value in BASE.items()}


@pytest.fixture
def book(tmp_path):
    ledger = Ledger(tmp_path / "sweeps" / "x" / "ledger.db")
    ledger.describe(question="Does it?", metric='{"name": "val/loss", "min_effect": 0.01}', search="")
    yield ledger
    ledger.close()


def add(book, name: str, losses: dict, baseline: int | None = 1, knobs: dict | None = None, status="done", optuna=None) -> int:
    arm = book.add_arm(name, {name: True} if knobs is None else knobs, baseline, optuna)
    for seed, loss in losses.items():
        trial = book.add_member(arm, seed, f"{name}/{seed}", SPEC)
        steps = ((10, loss + 0.4), (20, loss + 0.2), (40, loss))
        book.record(trial, [{"step": step, "time": 0.0, "metrics": {"val/loss": value}} for step, value in steps])
        book.settle(trial, status, seconds=3600.0)
    return arm


def said(book) -> str:
    return "\n".join(part.markdown() for part in Answer(book).headline())


def test_the_verdict_names_what_is_decided_and_counts_what_is_not(book):
    add(book, "bf16", BASE, None)
    add(book, "mxfp4", WORSE)
    add(book, "nvfp4", ALIKE)
    add(book, "odd", LOOSE)
    verdict = Answer(book).verdict()
    assert "mxfp4 is worse than bf16, +0.1015 ±0.0021 nats" in verdict
    assert "nvfp4 is equivalent to bf16, " in verdict
    assert verdict.endswith("1 of 3 comparisons is undecided.")  # .2 apart, either way: no number of seeds is worth naming
    assert "odd is" not in verdict


def test_what_does_not_stand_after_holm_says_so(book):
    add(book, "bf16", BASE, None)
    barely = {0: 0.051, 1: 0.02, 2: 0.03, 3: 0.045}
    add(book, "barely", {seed: BASE[seed] + barely[seed] for seed in BASE})
    for number in range(8):
        add(book, f"noise {number}", {seed: value + 0.1 * math.sin(7 * seed + number) for seed, value in BASE.items()})
    assert "barely is worse than bf16, +0.0365 ±0.0224 nats (alone; not after Holm's correction)" in Answer(book).verdict()


def test_tokens_to_match_and_percent_are_those_of_the_curves(book):
    """Each curve falls .2 in a doubling from 320 tokens on: .1015 behind is a factor sqrt 2 and a little."""
    add(book, "bf16", BASE, None)
    add(book, "mxfp4", WORSE)
    row = Answer(book).effects().rows[1]
    by_seed = [2 ** ((WORSE[s] - BASE[s]) / 0.2) - 1 for s in BASE]
    assert row["tokens to match"][1] == pytest.approx(sum(by_seed) / 4, rel=1e-6)
    assert row["in percent"][1] == pytest.approx(sum(WORSE[s] / BASE[s] - 1 for s in BASE) / 4)


@pytest.mark.parametrize(
    ("fill", "expected"),
    [
        (lambda b: add(b, "bf16", BASE, None), "One arm alone has finished"),
        (lambda b: (add(b, "bf16", {0: 3.0}, None), add(b, "a", {0: 3.1})), "One seed an arm"),
        (lambda b: (add(b, "bf16", BASE, None, status="diverged"), add(b, "a", BASE, status="diverged")), "Every run diverged"),
        (lambda b: (add(b, "bf16", BASE, None, status="failed"), add(b, "a", BASE, status="failed")), "Nothing can be said yet"),
    ],
    ids=["one arm", "one seed", "all diverged", "none finished"],
)
def test_where_nothing_can_be_claimed_that_is_said_and_why(book, fill, expected):
    fill(book)
    answer = Answer(book)
    assert answer.verdict().startswith(expected)
    for table in (answer.turned(), answer.averages(), answer.components(), answer.power(), answer.checks(), answer.published()):
        assert table is None or table.html()
    assert answer.effects().html()
    assert answer.method().text


def test_published_and_measured_stand_side_by_side_with_interval_and_verdict(book):
    add(book, "bf16", BASE, None)
    add(book, "mxfp4", WORSE)
    figure = {"arm": "mxfp4", "against": "bf16", "metric": "val/loss", "source": "a paper"}
    book.describe(published=json.dumps([{**figure, "value": value} for value in ("lower", 0.05)]))
    rows = [[cell[0] if isinstance(cell, tuple) else cell for cell in row.values()] for row in Answer(book).published().rows]
    assert rows == [
        ["mxfp4 minus bf16", "val/loss", "lower", "+0.1015 ±0.0021", "disagrees", "a paper"],
        ["mxfp4 minus bf16", "val/loss", "+0.05", "+0.1015 ±0.0021", "agrees (larger here than published)", "a paper"],
    ]


def test_what_is_missing_and_what_diverged_is_said_with_its_seeds(book):
    add(book, "bf16", BASE, None)
    arm = add(book, "a", {0: 3.1, 1: 3.2})
    for seed, status in ((2, "diverged"), (3, "failed")):
        book.settle(book.add_member(arm, seed, f"a/{seed}", SPEC), status, "why")
    text = said(book)
    assert "**Half done:** 1 of 8 runs are missing (1 failed)" in text
    assert "**Diverged:** a on seeds 2." in text
    assert Answer(book).arms[1].verdict.startswith("diverged on 1 of 4 seeds; on the others: ")


def test_a_metric_that_some_finished_runs_lack_is_said(book):
    add(book, "bf16", BASE, None)
    arm = add(book, "a", {0: 3.1, 1: 3.2})
    book.settle(book.add_member(arm, 2, "a/2", SPEC), "done")
    assert "**val/loss is missing** in finished runs of a." in said(book)


def test_a_searchs_best_arm_is_not_declared_on_the_data_that_chose_it(book):
    book.describe(search="tpe")
    add(book, "bf16", BASE, None, knobs={"recipe": "bf16"})
    for number in range(3):
        add(book, f"lr={number}", {s: v - 0.1 * number for s, v in WORSE.items()}, knobs={"workload.lr": number}, optuna=number)
    verdict = Answer(book).verdict()
    assert verdict.startswith("The best of 3 arms is lr=2, ")
    assert "exploratory, until it is run again on fresh seeds" in verdict
    again = add(book, "again", dict.fromkeys(range(10, 14), 3.0), None)
    add(book, "confirm: lr=2", {seed + 10: 2.9 + 0.001 * seed for seed in range(4)}, again)
    assert "confirm: lr=2 is better than again" in Answer(book).verdict()


def test_provenance_counts_cost_and_names_the_data(book):
    add(book, "bf16", BASE, None)
    facts = {row["what"]: row["which"] for row in Answer(book).provenance().rows}
    assert facts["cost"] == "4.00 worker-hours"
    assert facts["data"] == "abc"


def test_a_share_of_the_baseline_says_what_matters(book):
    book.describe(metric='{"name": "val/loss", "min_effect": "10%"}')
    add(book, "bf16", BASE, None)
    add(book, "mxfp4", WORSE)
    arm = Answer(book).arms[1]
    assert arm.margin == pytest.approx(0.1 * sum(BASE.values()) / 4)
    assert arm.verdict == "equivalent"


def leave(book, *left: tuple[str, int, str]) -> None:
    """Files that runs left: (arm, seed, file)."""
    for arm, seed, name in left:
        folder = book.path.parents[2] / "trials" / arm / f"{seed}" / "artifacts"  # an id is `arm/seed` here
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{arm} {seed} {name}")


def test_of_what_runs_left_each_arm_shows_the_pictures_of_its_first_seed_that_is_done(book):
    add(book, "bf16", BASE, None)
    add(book, "nvfp4", WORSE)
    add(book, "late", {2: 3.3, 1: 3.2})
    add(book, "lost", BASE, status="diverged")
    leave(book, ("bf16", 0, "grid.png"), ("bf16", 0, "more.png"), ("bf16", 0, "notes.txt"), ("bf16", 1, "grid.png"))
    leave(book, ("nvfp4", 1, "grid.png"), ("late", 1, "grid.png"), ("late", 2, "grid.png"), ("lost", 0, "grid.png"))
    found = {gallery.name: [(title, path.read_text()) for title, path in gallery.pictures] for gallery in Answer(book).left()}
    # Seed 0 of nvfp4 left nothing: another seed's picture beside the first one's would be of other weights.
    assert found == {"grid": [("bf16", "bf16 0 grid.png"), ("late", "late 1 grid.png")], "more": [("bf16", "bf16 0 more.png")]}


def test_where_no_run_left_anything_there_is_no_section(book):
    add(book, "bf16", BASE, None)
    assert Answer(book).left() == []
    assert Answer(book).show("What the runs left", Answer(book).left()).html() == ""


def test_a_loss_is_in_nats_where_its_workload_says_so(book):
    add(book, "bf16", BASE, None)
    assert Answer(book).unit == "nats"


def test_a_loss_of_pixels_is_in_no_nats(tmp_path, monkeypatch):
    monkeypatch.setattr("test_answer.SPEC", json.dumps({"workload": {"mae": {}}}))
    book = Ledger(tmp_path / "sweeps" / "y" / "ledger.db")
    book.describe(question="Does it?", metric='{"name": "val/loss"}', search="")
    add(book, "bf16", BASE, None)
    add(book, "mxfp4", WORSE)
    assert "mxfp4 is worse than bf16, +0.1015 ±0.0021." in Answer(book).verdict()
    book.close()


def test_what_guards_did_is_told_a_run_a_line(book):
    add(book, "bf16", BASE, None)
    assert Answer(book).interventions() is None
    arm = add(book, "nvfp4", ALIKE)
    trial = book.add_member(arm, 2, "nvfp4/2", SPEC)
    for step in (5, 12, 31):
        book.record(trial, [{"step": step, "time": 0.0, "metrics": {}, "events": [f"loss {step} is too much; step skipped"]}])
    (row,) = Answer(book).interventions().rows
    assert (row["arm"], row["seed"], row["interventions"]) == ("nvfp4", "2", ("3", 3))
    assert (row["first step"][1], row["last step"][1], row["the first"]) == (5, 31, "loss 5 is too much; step skipped")
