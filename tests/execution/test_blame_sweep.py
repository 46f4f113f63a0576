"""A search for a cause as a sweep runs it: planted culprits in real trainings, an interruption, and refusals."""

import json
from typing import Any

import pytest
from support.experiments import ledger, problems, sweep, tiny, values, write
from support.made_up import member

from ablate.execution.controller import Controller
from ablate.execution.progress import Progress
from ablate.execution.sweep_facts import describe
from ablate.execution.workers import Inline
from ablate.experiment.load import load
from ablate.reports.answer import Answer
from ablate.results.blame import names_of, planned, replayed
from ablate.results.comparisons import Comparisons
from ablate.results.headline import headline_of
from ablate.store.ledger import Ledger

CUT = {"transform": {"clamp": 0.1, "residual": False}}
"""Quantiser that cuts nearly all values off."""


def planted(quant: dict[str, Any], seeds: int = 3, budget: int = 20) -> dict[str, Any]:
    """Keys of a search for the one kind of layer whose forward product has another quantiser."""
    rule = {"match": {"name": "*.mlp.up"}, "use": {"fprop": {"x": quant, "w": quant}}}
    return {
        "shape": {"steps": 16, "eval_every": 16, "lr": 0.01},
        "recipe": {"from": "nvfp4", "layers": {"rules": [rule]}},
        "ablate": None,
        "seeds": seeds,
        "blame": {"where": "kinds", "budget": budget, "most": 1},
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """A search for the planted kind of layer, run inline to its end; leave it as it is."""
    folder = tmp_path_factory.mktemp("planted")
    outcome, _ = sweep(tiny(folder, **planted(CUT)), folder)
    assert outcome.status == "done"
    return folder


def test_a_planted_quantiser_is_named_and_nothing_is_left_without_it(found):
    book = ledger(found)
    search, names = replayed(book), names_of(book)
    assert [names.units[unit] for unit in search.culprits] == ["mlp.up"]
    assert not search.exceeds(search.rest)
    assert search.runs == len(book.members()) <= 20
    answer = headline_of(Comparisons(book))
    assert answer.lead == "Culprit:"
    assert answer.text.startswith("mlp.up alone: +0.1")
    assert f"The search took {search.runs} of at most 20 runs." in answer.text
    assert answer.checks[0].text == f"{search.runs} of {search.runs} runs finished"
    assert all(verdict.kind == "worse" for verdict in answer.verdicts)
    book.close()


def test_the_page_shows_the_evidence_on_each_unit_by_round(found, tmp_path):
    answer = Answer.open(found, "tiny", tmp_path)
    page = answer.show("", *answer.blame()).html()
    search = replayed(answer.ledger)
    assert page.count('<td class="number less"') == len(search.rounds) * search.design.units > 0
    assert page.count("+0.1") >= 1
    assert len((tmp_path / "search.csv").read_text().splitlines()) == 1 + search.design.units


def test_random_halves_are_no_arms_of_the_answer(found):
    book = ledger(found)
    halves = {arm.name for arm in book.arms() if arm.role == "half"}
    assert halves
    assert {arm.name for arm in Comparisons(book).arms} == {
        "bf16",
        "nvfp4 changed",
        "only mlp.up",
        "without mlp.up",
    }
    assert set(replayed(book).design.search_seeds) == {m.seed for m in book.members() if m.name in halves}
    book.close()


def test_a_culprit_is_worse_in_the_table_of_arms_too(tmp_path):
    """Proved at 5 % one-sided, t = 2.6; Holm's correction over the table of arms would leave it undecided."""
    keys = {"seeds": 4, "blame": {"where": "kinds", "budget": 30, "most": 1}}
    experiment = tiny(tmp_path, ablate=None, recipe="nvfp4", **keys)
    book = Ledger(tmp_path / "sweeps" / "tiny" / "ledger.db")
    describe(book, experiment)
    culprit, arms = experiment.blamed[2].units.index("mlp.up"), {}
    spread = [0.01 + 0.01 * 2 / 2.6 * z for z in (-1.1619, -0.3873, 0.3873, 1.1619)]
    while (search := replayed(book)).wanted:
        for units, seed in search.wanted:
            name = names_of(book).arm(search.stage, units)
            role = {"gap": "listed" if units else "baseline", "search": "half"}.get(search.stage, "alone")
            if name not in arms:
                arms[name] = book.add_arm(name, {}, arms.get("bf16"), None, role)
            harm = spread[seed % 4] if culprit in units else 1e-4 * (seed % 3) if units else 0.0
            member(
                book,
                arms[name],
                seed,
                [(4, {"val/loss": 3 + harm})],
                spec=experiment.spec(experiment.arms[0], seed, "cpu").wire,
            )
    assert [names_of(book).units[unit] for unit in replayed(book).culprits] == ["mlp.up"]
    verdicts = {arm.name: arm.verdict.kind for arm in Comparisons(book).arms if arm.gap}
    assert verdicts == {"nvfp4": "undecided", "only mlp.up": "worse", "without mlp.up": "undecided"}
    assert [verdict.kind for verdict in headline_of(Comparisons(book)).verdicts] == ["worse"]
    book.close()


@pytest.mark.slow
def test_an_interrupted_search_ends_as_if_it_had_not_been(found, tmp_path):
    experiment, done = tiny(tmp_path, **planted(CUT)), 0
    run = Controller(experiment, tmp_path, "cpu", Inline, None).run()
    while done < 9:
        step = next(run)
        done = step.done if isinstance(step, Progress) else done
    run.close()
    outcome, _ = sweep(experiment, tmp_path)
    assert 0 < outcome.ran < 12
    assert values(tmp_path) == values(found)


def test_a_lost_ledger_is_made_again_from_the_runs(found, tmp_path):
    experiment = load(found / "tiny.yaml")
    before = values(found)
    (tmp_path / "trials").symlink_to(found / "trials")
    outcome, _ = sweep(experiment, tmp_path)
    assert outcome.ran == 0
    assert values(tmp_path) == before


def test_a_planted_divergence_is_traced(tmp_path):
    outcome, _ = sweep(tiny(tmp_path, **planted({"error": {"times": 1e38}}, 5, 28)), tmp_path)
    assert outcome.status == "done"
    book = ledger(tmp_path)
    search, names = replayed(book), names_of(book)
    assert search.diverges
    assert [names.units[unit] for unit in search.culprits] == ["mlp.up"]
    assert "diverges on 5 of 5 seeds" in headline_of(Comparisons(book)).text
    book.close()


def test_a_plan_states_runs_units_error_rate_and_the_smallest_damage(tmp_path):
    design, _, names = tiny(tmp_path, **planted(CUT)).blamed
    text = planned(design, names)
    assert names.units == ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    for part in ("4 units", "mlp.down", "at most 20 runs", "5 %", "standard deviations"):
        assert part in text


def test_parts_of_a_recipe_are_units_beside_a_quantised_baseline(tmp_path):
    recipe = {"from": "nvfp4", "wgrad": {"g": {"rounding": "nearest"}, "hadamard": None}}
    recipe["fprop"] = {"x": {"outer": None}, "w": {"outer": None}}
    keys = {"recipe": recipe, "against": "nvfp4", "blame": {"what": "parts"}, "ablate": None, "seeds": 4}
    _, units, names = tiny(tmp_path, **keys).blamed
    assert set(names.units) == {"rounding", "hadamard", "outer"}
    alone = units.recipe(frozenset([names.units.index("outer")]))
    assert alone.fprop.x.outer is None
    assert alone.wgrad.hadamard is not None
    assert units.recipe(frozenset(range(3))) == units.whole
    assert units.recipe(frozenset()) == units.base


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"blame": {"where": "blocks", "budget": 60}}, "blame.where"),
        ({"blame": {"where": "kinds", "budget": 12}}, "blame.budget"),
        ({"blame": {"where": "rows"}}, "blame.where"),
        ({"blame": {"what": "parts"}}, "blame:"),
        ({"blame": {"what": "parts"}, "against": {"recipe": "nvfp4", "rht": False}}, "blame.what: one unit"),
        ({"blame": {"where": "kinds"}, "seeds": 2}, "seeds:"),
        ({"blame": {"where": "kinds"}, "ablate": {"rht": [True, False]}}, "ablate:"),
        ({"blame": {"where": "kinds"}, "seeds": {"start": 3, "most": 6}}, "seeds:"),
        ({"blame": {"where": "kinds"}, "against": "mxfp4"}, "blame:"),
        ({"blame": {"where": "kinds"}, "recipe": "bf16"}, "blame:"),
        ({"blame": {"where": "kinds"}, "against": {"recipe": "bf16", "lr": 0.1}}, "blame: against changes"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else value,
)
def test_a_search_that_cannot_be_run_is_refused_at_its_key(tmp_path, change, path):
    keys = {"shape": {"layers": 1}, "ablate": None, "seeds": 3} | change
    shown = [str(problem) for problem in problems(write(tmp_path, **keys))]
    assert any(f": {path}" in line for line in shown), shown
