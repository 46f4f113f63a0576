"""No text of a page lies over another, and none leaves the page: on narrow and wide screens, and in print."""

import base64
import json
import os
import shutil
import subprocess
import time
from contextlib import closing
from pathlib import Path

import pytest
from support.browser import MISSING, chrome, misplaced
from support.experiments import sweep, tiny

from ablate.cli.report import make
from ablate.cli.servers.reports import index
from ablate.files import Holder, lock
from ablate.store.ledger import Ledger
from ablate.store.trial_store import Store

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason="; ".join(MISSING)),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

METRIC = {"metric": {"name": "val/loss", "min_effect": 0.01}}
REASONS = ("ValueError: no batch (/home/me/train.py:5)", "MemoryError: 2 TiB (/home/me/train.py:5)")
LONG = "/data/" + "a_long_name_without_a_space_" * 6 + "rank_00.pt"
LOG = 'loading\n  File "/home/me/train.py", line 5, in helper\n    return load("' + LONG + '")\n{}\n'
KINDS = {
    "grid": METRIC
    | {"ablate": {"rht": [True, False], "sr": [True, False]}, "seeds": 3, "shape": {"eval_every": 1}},
    "forked": METRIC
    | {"design": {"trunk": "bf16", "positions": [0.5], "window": 0.5, "horizons": [1, 2], "bad": "mxfp4"}}
    | {"seeds": 2, "shape": {"steps": 8, "eval_every": 4}},
    "search": METRIC
    | {"search": {"sampler": "random", "trials": 3}}
    | {"ablate": {"cooldown": {"uniform": [0.25, 0.5]}, "rht": [True, False]}},
    "tensors": {
        "workload": {"tensors": {"tokens": 32, "inputs": 32, "outputs": 32, "draws": 4}},
        "metric": [{"name": "gemm/wgrad/rel_mse"}, {"name": "quant/wgrad.g/zero_frac"}],
    },
    "alone": {"seeds": 1},
}
FIRST = {"forked": ["ablation"], "search": ["search"], "alone": ["ablation"]}
"""Notebooks of kinds whose second page is like that of another kind."""
SIZES = [(390, "screen"), (1366, "screen"), (1440, "screen"), (1920, "screen"), (718, "print")]
"""Widths of windows in CSS pixels; the last one is that of the text on A4 paper."""
PAGES = [*KINDS, "failed", "running", "list"]


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    """A sweep of each kind, and the grid as if its code failed in every run (`failed/`), and as if it were running (`running/`)."""
    folder = tmp_path_factory.mktemp("layout")
    for name, keys in KINDS.items():
        sweep(tiny(folder, name, question="Does it matter, and by how much?", **keys), folder)
    for part in ("running", "failed"):
        shutil.copytree(folder / "sweeps" / "grid", folder / part / "sweeps" / "grid")
    shutil.copytree(folder / "trials", folder / "failed" / "trials")
    (folder / "running" / "trials").symlink_to(folder / "trials")
    with closing(Ledger(folder / "running" / "sweeps" / "grid" / "ledger.db")) as ledger:
        for trial in (9, 10, 11):
            ledger.settle(trial, "pending")
        ledger.start_attempt(12, 2, time.time())
        ledger.describe(left=json.dumps([time.time(), 600.0]))
    with closing(Ledger(folder / "failed" / "sweeps" / "grid" / "ledger.db")) as ledger:
        for member in ledger.members():
            ledger.settle(member.trial, "failed", REASONS[member.seed > 0])
            Store(folder / "failed").log(member.id, 1).write_text(LOG.format(REASONS[member.seed > 0]))
    return folder


@pytest.fixture(scope="module")
def pages(state) -> dict[str, list[Path]]:
    """Files of the pages by kind."""
    made = {name: make(state, name, FIRST.get(name)).pages for name in KINDS}
    made["failed"] = make(state / "failed", "grid", ["ablation"]).pages
    held = state / "running" / "sweeps" / "grid" / "lock"
    with lock(held):
        held.write_text(Holder(1, os.uname().nodename).content)
        made["running"] = make(state / "running", "grid", ["ablation"]).pages
        (state / "list.html").write_text(index(state))
    return {name: [*files] for name, files in made.items()} | {"list": [state / "list.html"]}


@pytest.fixture(scope="module")
def browser():
    driver = chrome()
    yield driver
    driver.quit()


@pytest.mark.parametrize("kind", PAGES)
def test_no_text_lies_over_another_or_leaves_the_page(browser, pages, kind):
    for page in pages[kind]:
        browser.get(page.as_uri())
        problems = {size: misplaced(browser, *size) for size in SIZES}
        assert not any(problems.values()), problems


UNREACHED = """
const shown = one => one.outerHTML.slice(0, 90), all = part => [...document.querySelectorAll(part)];
return [
  ...(all("main").length === 1 && all("h1").length === 1 ? [] : ["main and h1"]),
  ...all("th:not([scope]), img:not([alt]), figure svg:not([aria-label])"),
  ...all("main svg:not([aria-label]):not([aria-hidden]):not(svg svg)"),
  ...all("body *").filter(one => one.onclick && one.tabIndex < 0 && !one.id.endsWith("-line")),
  ...all(".scroll, pre").filter(one => one.checkVisibility() && one.scrollWidth > one.clientWidth && one.tabIndex < 0),
].map(one => typeof one === "string" ? one : shown(one));
"""
"""Elements that a screen reader cannot name or a keyboard cannot reach. The texts of a legend stand for its lines."""
LIGHT = """
const channel = part => (part /= 255) <= 0.04 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
const light = colour => colour.match(/[\\d.]+/g).slice(0, 3).map(Number).map(channel)
  .reduce((sum, part, place) => sum + part * [0.2126, 0.7152, 0.0722][place], 0.05);
"""
"""Luminance of a colour, as WCAG 2 defines it."""
CONTRAST = (
    LIGHT
    + """
const band = document.querySelector(".drawn .margin"), around = getComputedStyle(document.body).backgroundColor;
const [low, high] = [light(getComputedStyle(band).stroke), light(around)].sort((one, other) => one - other);
return high / low;
"""
)
"""Contrast of the outline of the region of effects too small to matter with the page."""
FAINT = (
    LIGHT
    + """
const ground = one => { for (; one; one = one.parentElement) { const colour = getComputedStyle(one).backgroundColor;
  if (!/, 0\\)$|transparent/.test(colour) && !colour.startsWith("color")) return colour; } return "rgb(255, 255, 255)"; };
const own = one => [...one.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
return [...document.querySelectorAll("body *:not(svg *):not(script)")].filter(one => own(one) && one.checkVisibility())
  .map(one => [light(getComputedStyle(one).color), light(ground(one)), one.outerHTML.slice(0, 90)])
  .filter(([ink, paper]) => Math.max(ink, paper) / Math.min(ink, paper) < 4.5).map(each => each[2]);
"""
)
"""Texts with a contrast below 4.5, the least of WCAG 2.2 AA. Tinted cells of maps are left out: their ground is mixed."""


@pytest.mark.parametrize("kind", PAGES)
def test_everything_has_a_name_and_is_reached_by_the_keyboard(browser, pages, kind):
    for page in pages[kind]:
        browser.get(page.as_uri())
        assert browser.execute_script(UNREACHED) == []


@pytest.mark.parametrize("width", [390, 1366])
def test_the_reason_of_a_failed_run_is_not_cut_off(browser, pages, width):
    browser.get(pages["failed"][0].as_uri())
    browser.set_window_size(width, 900)
    box = "const box = document.querySelector('#table-failures').parentElement;"
    assert LONG in browser.execute_script(f"{box} return box.textContent;")
    assert browser.execute_script(f"{box} return box.scrollWidth <= box.clientWidth;")


@pytest.mark.skipif(not shutil.which("pdftotext"), reason="pdftotext is missing")
def test_the_head_of_a_table_is_printed_on_each_of_its_sheets(browser, pages, tmp_path):
    browser.get(pages["grid"][0].as_uri())
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"paperHeight": 5})["data"]
    (tmp_path / "page.pdf").write_bytes(base64.b64decode(printed))
    done = subprocess.run(
        ["pdftotext", "-layout", "page.pdf", "-"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    sheets = [sheet for sheet in done.stdout.split("\f") if "spec.json" in sheet]
    assert len(sheets) > 1
    assert all("specification" in sheet for sheet in sheets), sheets


SPLIT = """
const lines = text => { const range = document.createRange(); range.selectNodeContents(text); return range.getClientRects().length; };
return [...document.querySelectorAll(".scroll td:first-child")].filter(cell => cell.textContent.trim() === "registered")
  .map(cell => lines(cell));
"""
"""Lines of each first cell that is the word `registered`."""


def test_a_word_in_a_narrow_column_is_printed_in_one_line(browser, pages):
    browser.get(pages["grid"][0].as_uri())
    browser.set_window_size(720, 900)  # about a sheet of A4
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert browser.execute_script(SPLIT) == [1]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", PAGES)
def test_every_text_can_be_read_on_its_ground(browser, pages, scheme, kind):
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "screen", "features": features})
    for page in pages[kind]:
        browser.get(page.as_uri())
        assert browser.execute_script(FAINT) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_region_of_no_interest_stands_out(browser, pages, scheme):
    browser.get(pages["grid"][0].as_uri())
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "screen", "features": features})
    assert browser.execute_script(CONTRAST) >= 3


@pytest.mark.parametrize(
    ("css", "problem"),
    [
        ("body { display: block; } nav.contents { position: fixed; left: 4rem; }", "over each other: "),
        ("p { white-space: nowrap; }", "leaves the page: "),
        (".drawn svg { width: 40px; } .drawn text { font-size: 60px; }", "over each other: 0 | +0."),
    ],
    ids=["a layer", "no wrapping", "numbers of an axis"],
)
def test_a_misplaced_text_would_be_seen(browser, pages, css, problem):
    browser.get(pages["grid"][0].as_uri())
    browser.execute_script(
        "document.head.appendChild(document.createElement('style')).textContent = arguments[0]", css
    )
    assert any(text.startswith(problem) for text in misplaced(browser, 1366))
