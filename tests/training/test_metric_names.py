"""Names of metrics: text and parts are the same thing, and no file but their own takes a text apart."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.cases import every

from ablate.recipes.recipe import SLOTS
from ablate.results.forked import readings_of
from ablate.store.ledger import Ledger
from ablate.training import metric_names
from ablate.training.metric_names import (
    ARITHMETIC,
    ENDINGS,
    PRODUCT_BITS,
    SQUARED_BIAS,
    TOKENS_MEDIAN,
    TOKENS_MIN,
    VARIANCE,
    Name,
    cell_of,
    parse,
    part_metric,
    part_of,
    recordable,
    window_metric,
)
from ablate.training.operand_metrics import OPERAND_METRICS
from ablate.training.workloads import WORKLOADS
from ablate.training.workloads.gpt import Gpt

ROOT = Path(metric_names.__file__).parent
FAMILIES = {
    *("train", "val", "grad", "nan", "guard", "weights", "comm", "flops", "throughput", "memory"),
    *("quant", "gemm", "mean", "gap", "routing"),
}
PART = st.text("abz_.*", max_size=6) | st.sampled_from(sorted(FAMILIES)) | st.just("a/b")


@cache
def constants() -> dict[Path, set[str]]:
    """Texts in each file's code, the constant parts of f-strings included, docstrings and comments left out."""
    found = {}
    for path in ROOT.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        texts = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        found[path] = {node.value for node in texts if id(node) not in docstrings}
    return found


@cache
def recorded() -> list[str]:
    """Every name that this package records: those in its code, what workloads list, and every operand error of every layer."""
    written = re.compile(rf"({'|'.join(FAMILIES)})/[a-z0-9_]+")
    names = (
        {text for texts in constants().values() for text in texts if written.fullmatch(text)}
        | {"tokens"}
        | ENDINGS
    )
    names |= {metric for workload in WORKLOADS.values() for metric in workload.METRICS or ()}
    layers = (None, *Gpt(layers=2).linears)
    names |= {
        "/".join(filter(None, ("quant", slot, layer, error)))
        for slot in SLOTS
        for layer in layers
        for error in OPERAND_METRICS
    }
    return sorted(names)


def test_every_recorded_name_survives_its_parts():
    names = recorded()
    assert len(names) > 700
    for text in names:
        assert str(parse(text)) == text
        assert parse(text).family in FAMILIES or text == "tokens"
        match text.split("/"):
            case [metric]:
                expected = Name(None, None, None, metric)
            case [family, metric]:
                expected = Name(family, None, None, metric)
            case [family, slot, metric]:
                expected = Name(family, slot, None, metric)
            case [family, slot, layer, metric]:
                expected = Name(family, slot, layer, metric)
        assert parse(text) == expected


@given(st.text() | st.lists(PART, min_size=1, max_size=6).map("/".join))
@example("quant//sqnr_db")
@example("quant/fprop.x/a/b/sqnr_db")
@example("/loss")
@example("")
def test_any_text_is_a_name_and_survives(text):
    assert str(parse(text)) == text
    assert Name(*(getattr(parse(text), field) for field in ("family", "slot", "layer", "metric"))) == parse(
        text
    )


@pytest.mark.parametrize(
    "text",
    [
        *("evaluated/gsm8k/loss", "evaluated/-1/loss", "evaluated/1_0/loss", "evaluated//loss"),
        *("fork/a/b/loss", "fork/3/b/loss", "fork/3/0/loss", "fork/\u0663/4/loss", "fork/\u00b2/4/loss"),
        *("evaluated/3", "fork/3/4", "fork/3/4/", "fork", "val/3/4/loss"),
    ],
)
def test_a_metric_of_a_users_own_in_a_family_of_windows_is_no_reading_of_a_window(text):
    assert cell_of(text) is None
    assert part_of(text) is None
    assert readings_of([(0, {text: 1.0, "fork/3/4/loss": 2.0})], "loss").windows == [4]


@given(st.integers(0, 10**9), st.integers(1, 10**9), st.sampled_from(["loss", "loss@nvfp4", "my/own"]))
def test_a_reading_of_a_window_has_its_numbers(position, window, own):
    names = window_metric(position, window, own), part_metric(position, own)
    assert all(map(recordable, names))
    assert cell_of(names[0]) == (position, window, own)
    assert part_of(names[1]) == (position, own)


@given(st.none() | PART, st.none() | PART, st.none() | PART, PART)
def test_parts_are_refused_or_survive_as_text(family, slot, layer, metric):
    try:
        name = Name(family, slot, layer, metric)
    except ValueError:
        return
    assert parse(str(name)) == name


@pytest.mark.parametrize(
    "parts",
    [
        (None, None, None, "a/b"),
        ("a/b", None, None, "loss"),
        ("val", "fprop.x", None, "loss"),
        ("val", None, "blocks.0", "loss"),
        ("quant", None, "blocks.0", "sqnr_db"),
        ("quant", "fprop/x", None, "sqnr_db"),
        ("quant", "fprop.x", "blocks.0", "a/b"),
    ],
)
def test_parts_that_would_parse_to_others_are_refused(parts):
    with pytest.raises(ValueError, match=r"slot|slash"):
        Name(*parts)


@every(
    text__facts=[
        ("val/loss", "for_tracker of_data"),
        ("train/loss", "for_tracker of_data"),
        ("valid/loss", "for_tracker"),
        ("tokens", "for_tracker"),
        ("throughput/step_ms", "for_tracker of_machine"),
        ("memory/rss", "for_tracker of_machine"),
        ("nan/loss", "for_tracker is_count"),
        ("nan/activation", "for_tracker is_count is_total"),
        ("nan/steps_skipped", "for_tracker is_total"),
        ("nan/first_step", "for_tracker"),
        ("quant/fprop.x/sqnr_db", "for_tracker"),
        ("quant/fprop.x/zero_frac", "for_tracker"),
        ("quant/fprop.x/rel_mse", ""),
        ("quant/fprop.x/blocks.0/sqnr_db", ""),
        ("quant/fprop.x/blocks/0/sqnr_db", ""),
        ("quant/sqnr_db", ""),
        ("gemm/wgrad/rel_mse", "for_tracker"),
        ("routing/flipped", "for_tracker"),
        ("routing/tokens_min", ""),
    ]
)
def test_a_name_says_what_follows_from_it(text, facts):
    properties = ("for_tracker", "is_count", "is_total", "of_data", "of_machine")
    assert {name for name in properties if getattr(parse(text), name)} == set(facts.split())


def test_a_tracker_gets_two_metrics_of_each_quantiser_and_all_others():
    """The oracle is the rule on the text of a name."""
    for text in set(recorded()) - {
        PRODUCT_BITS,
        ARITHMETIC,
        SQUARED_BIAS,
        VARIANCE,
        TOKENS_MEDIAN,
        TOKENS_MIN,
    }:
        sent = not text.startswith("quant/") or (
            text.count("/") == 2 and text.endswith(("/sqnr_db", "/zero_frac"))
        )
        assert parse(text).for_tracker == sent


def test_single_layers_are_left_out_of_last_values(tmp_path):
    """The oracle is SQLite's own pattern."""
    book = Ledger(tmp_path / "ledger.db")
    trial = book.add_member(book.add_arm("a", {}, None, None), 0, "t", '{"seed": 0}')
    names = [*recorded(), "quant/a/b/c/d", "Quant/a/b/c", "loss"]
    book.record(trial, [{"step": 1, "time": 1.0, "metrics": dict.fromkeys(names, 1.0)}])
    wanted = {text for (text,) in book.db.execute("SELECT text FROM names WHERE NOT text GLOB 'quant/*/*/*'")}
    assert set(book.last_values(trial)) == wanted
    assert set(book.finals(lambda name: name.family == "quant")[trial]) == {
        text for text in wanted if text.startswith("quant/")
    }
    book.close()


def test_each_distinct_name_is_parsed_once():
    assert parse("val/loss") is parse("val/" + "loss")


def test_no_other_file_writes_the_slash_of_a_family():
    """`startswith("quant/")`, `f"quant/{slot}"` and patterns such as `quant/*/sqnr_db` have such a constant."""
    fragment = re.compile(rf"\^?(({'|'.join(FAMILIES)})/($|[^a-z])|(quant|gemm|mean)/)")
    for path, texts in constants().items():
        wrong = {text for text in texts if fragment.match(text)}
        assert not wrong or path.name == "metric_names.py", f"{path.relative_to(ROOT)}: {wrong}"
