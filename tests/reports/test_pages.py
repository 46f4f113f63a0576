"""Tests of the pages in a real browser over real servers: runs beside each other, the study with its note, the list."""

import json
import os
from pathlib import Path

import pytest
from support.browser import MISSING, chrome
from support.experiments import end, start, sweep, tiny, until
from support.processes import addresses

from ablate.cli.report import make
from ablate.execution.search.annotations import decorate
from ablate.reports.evidence import study_markdown
from ablate.results.summary import summaries
from ablate.store.checked_ledger import open_ledger

pytestmark = [
    pytest.mark.browser,
    pytest.mark.services,
    pytest.mark.skipif(bool(MISSING), reason="; ".join(MISSING)),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

SECONDS = 60
SEARCH = {
    "search": {"sampler": "random", "trials": 10},
    "ablate": {"cooldown": {"uniform": [0.25, 0.5]}, "rht": [True, False]},
    "metric": {"name": "val/loss", "min_effect": 0.01},
}


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    """A grid that is drawn in MLflow and a search that is not, both dressed; leave them as they are."""
    folder = tmp_path_factory.mktemp("pages")
    store = f"sqlite:///{folder / 'mlflow.db'}"
    sweep(tiny(folder, "searched", question="Which cooldown is best?", seeds=1, **SEARCH), folder)
    sweep(tiny(folder, "grid", question="Does the rotation matter?", shape={"steps": 8}), folder, store)
    for name in ("searched", "grid"):
        book = open_ledger(folder, name)
        decorate(
            folder / "sweeps" / name / "optuna.log",
            name,
            study_markdown(book),
            summaries(book),
            book.facts.metric,
        )
        book.close()
    return folder


@pytest.fixture(scope="module")
def found(state):
    """The addresses of a running `ablate ui`, of the grid."""
    process = start("ui", "grid", "--state", state)
    yield addresses(process)
    end(process)


@pytest.fixture(scope="module")
def browser():
    driver = chrome()
    yield driver
    driver.quit()


def text(browser) -> str:
    pictures = "Array.from(document.querySelectorAll('svg text'), e => e.textContent)"
    return browser.execute_script(f"return document.body.innerText + ' ' + {pictures}.join(' ')")


def sees(browser, *words: str) -> str:
    """Wait until the page shows all these words; AssertionError with what it shows where it never does."""
    try:
        return until(
            lambda: (shown := text(browser)) and all(word in shown for word in words) and shown, SECONDS, 0.2
        )
    except AssertionError:
        raise AssertionError(
            f"the page shows no {[word for word in words if word not in text(browser)]}: {text(browser)[:2000]}"
        ) from None
    finally:
        picture(browser, os.environ.get("PYTEST_CURRENT_TEST", "page"))


def scrolled(browser) -> str:
    """Return the text of the page once everything in it that scrolls is at its end: long tables hold only the visible rows."""
    browser.execute_script(
        "document.querySelectorAll('*').forEach(e => { if (e.scrollHeight > e.clientHeight) e.scrollTop = 1e6 })"
    )
    return text(browser)


def picture(browser, name: str) -> None:
    """Keep what the page looks like where ABLATE_PICTURES names a folder."""
    folder = os.environ.get("ABLATE_PICTURES")
    if folder:
        browser.save_screenshot(
            str(Path(folder) / f"{name.partition('::')[2].partition(' ')[0].replace('/', '_')}.png")
        )


def runs(server: str, name: str) -> dict[str, dict]:
    """The members' runs of a sweep by their names, asked by REST."""
    import urllib.request

    def ask(path: str, body: dict | None = None) -> dict:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{server}/api/2.0/mlflow/{path}", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer)

    experiment = ask(f"experiments/get-by-name?experiment_name={name}")["experiment"]["experiment_id"]
    answer = ask("runs/search", {"experiment_ids": [experiment], "filter": "tags.`ablate.kind` = 'trial'"})
    return {run["info"]["run_name"]: run for run in answer["runs"]}


def test_the_view_of_a_sweep_shows_its_runs_with_what_was_turned_and_the_gap(browser, found):
    browser.get(found["MLflow"])
    shown = sees(browser, "Group: rht=true", "Group: rht=false", "Group: bf16", "val/loss", "val/loss_gap")
    assert "\ngrid\n" not in shown.partition("Run Name")[2]  # the sweep's own run is no arm


def test_two_runs_are_compared_with_their_knobs_and_metrics(browser, found):
    server = found["MLflow"].partition("/#")[0]
    known = runs(server, "grid")
    chosen = [known["rht=true seed=0"], known["bf16 seed=0"]]
    ids = json.dumps([run["info"]["run_id"] for run in chosen])
    experiment = chosen[0]["info"]["experiment_id"]
    browser.get(f'{server}/#/compare-runs?runs={ids}&experiments=["{experiment}"]')
    shown = sees(
        browser, "rht=true seed=0", "bf16 seed=0", "ablate.rht", "recipe.wgrad.hadamard", "val/loss_gap"
    )
    params = shown.partition("Show diff only")[2]
    assert (
        params.index("ablate.rht") < params.index("arm") < params.index("recipe.") < params.index("workload.")
    )
    losses = [next(m["value"] for m in run["data"]["metrics"] if m["key"] == "val/loss") for run in chosen]
    metrics = until(lambda: (below := scrolled(browser)) and "val/loss" in below and below, SECONDS, 0.5)
    assert all(f"{loss:.2f}" in metrics for loss in losses)


def test_the_sweeps_own_run_tells_its_question_and_its_answer(browser, found):
    import urllib.request

    server, experiment = (
        found["MLflow"].partition("/#")[0],
        found["MLflow"].partition("/experiments/")[2].partition("/")[0],
    )
    body = json.dumps({"experiment_ids": [experiment], "filter": "tags.`ablate.kind` = 'sweep'"}).encode()
    request = urllib.request.Request(
        f"{server}/api/2.0/mlflow/runs/search", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        (run,) = json.load(answer)["runs"]
    browser.get(f"{server}/#/experiments/{experiment}/runs/{run['info']['run_id']}")
    sees(browser, "Does the rotation matter?", "gap to baseline", "rht=false")


def studies(board: str) -> dict[str, int]:
    """The numbers of all studies by name, asked by REST."""
    import urllib.request

    with urllib.request.urlopen(f"{board}/api/studies", timeout=300) as answer:
        return {study["study_name"]: study["study_id"] for study in json.load(answer)["study_summaries"]}


def test_the_dashboard_shows_the_study_its_history_and_importance_and_our_note(browser, state, found):
    board = found["Optuna"].partition("/dashboard")[0]
    browser.get(f"{board}/dashboard")
    sees(browser, "grid", "searched")
    numbers = studies(board)
    browser.get(f"{board}/dashboard/studies/{numbers['searched']}")
    sees(browser, "searched", "History", "Hyperparameter Importance", "cooldown", "rht")
    browser.get(f"{board}/dashboard/studies/{numbers['searched']}/note")
    sees(browser, "Which cooldown is best?", "gap to baseline")


def test_of_a_grid_the_dashboard_opens_on_the_note_with_the_answer(browser, found):
    browser.get(found["Optuna"])
    shown = sees(browser, "Does the rotation matter?", "gap to baseline", "effect on val/loss")
    assert "rht, true instead of false" in shown
    assert "best trial has the lowest mean val/loss. That is not a verdict" in shown


def test_the_dashboard_draws_the_gaps(browser, found):
    browser.get(found["Optuna"].removesuffix("/note"))
    sees(browser, "How far is each arm from its baseline?", "rht=true", "arm minus baseline, paired")


def test_an_arms_page_in_the_dashboard_says_what_came_of_it(browser, found):
    browser.get(f"{found['Optuna'].removesuffix('/note')}/trials?numbers=0")
    sees(browser, "rht=true: ", "against bf16 over 2 seeds", "verdict ", "gap ", "mlflow_runs [")


def test_the_list_of_reports_names_every_sweep_and_its_question(browser, found):
    browser.get(found["Reports"])
    sees(browser, "grid", "Does the rotation matter?", "searched", "Which cooldown is best?")


@pytest.fixture(scope="module")
def report(state):
    return make(state, "grid")


def test_a_report_opens_from_its_file_asks_for_nothing_and_shows_its_figures(browser, report):
    for page in report.pages:
        browser.get(page.as_uri())
        sees(browser, "Does the rotation matter?")
        asked = browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
        assert [name for name in asked if not name.startswith(("file:", "data:"))] == []
        sizes = browser.execute_script(
            "return [...document.querySelectorAll('figure svg')].map(e => [e.clientWidth, e.clientHeight])"
        )
        assert sizes
        assert all(width > 200 and height > 50 for width, height in sizes)


def test_a_reports_answer_stands_on_the_first_screen(browser, report):
    browser.get(report.index.as_uri())
    for part in ("p.verdict", "ul.chips", "tr.question"):
        place = f"document.querySelector({part!r}).getBoundingClientRect().bottom"
        assert browser.execute_script(f"return {place} < innerHeight"), part


def test_a_command_is_copied_by_its_button_and_sections_are_reached_from_the_contents(browser, report):
    browser.get(report.index.as_uri())
    anchors = browser.execute_script(
        "return [...document.querySelectorAll('nav.contents a')].map(a => a.hash.slice(1))"
    )
    assert anchors
    assert all(browser.execute_script(f"return !!document.getElementById({name!r})") for name in anchors)
    assert browser.execute_script(
        "return [...document.querySelectorAll('button.copy')].every(b => !b.hidden)"
    )


def test_a_click_on_an_arm_in_a_legend_hides_its_lines_and_another_shows_them(browser, report):
    browser.get((report.folder / "training_health.html").as_uri())
    lines = (
        "[...document.querySelectorAll('#curves-train-loss-arm-1-line-0, #curves-train-loss-arm-1-band-0')]"
    )
    shown = f"return {lines}.map(line => line.style.display)"
    pressed = "return document.querySelector('#curves-train-loss-key-1-text').getAttribute('aria-pressed')"
    click = "document.querySelector('#curves-train-loss-key-1-text').dispatchEvent(new Event('click'))"
    for hidden in (True, False):
        browser.execute_script(click)
        assert browser.execute_script(shown) == ["none" if hidden else ""] * 2
        assert browser.execute_script(pressed) == ("false" if hidden else "true")
    others = "return document.querySelector('#curves-train-loss-arm-0-line-0').style.display"
    assert browser.execute_script(others) == ""


def test_a_click_on_a_tables_head_sorts_it_and_another_turns_it_round(browser, report):
    browser.get(report.index.as_uri())
    head = "document.querySelector('#table-effects-val-loss th:nth-child(2) button')"
    cells = "[...document.querySelectorAll('#table-effects-val-loss tbody tr')].map(r => Number(r.cells[1].dataset.sort))"
    for turned in (False, True):
        browser.execute_script(f"{head}.click()")
        values = browser.execute_script(f"return {cells}")
        assert values == sorted(values, reverse=turned)
    assert len(set(values)) > 1
