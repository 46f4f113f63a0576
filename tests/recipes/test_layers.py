"""Layer rules: which layers a match selects, its two spellings, and why it selects none."""

import itertools
from fnmatch import fnmatchcase

import pytest
from pydantic import ValidationError
from support.cases import every

from ablate.recipes.layers import Match, block_name, block_of, blocks_in, located, select
from ablate.recipes.recipe import Rule

KINDS = {"attention.qkv": "Attention", "attention.out": "Attention", "mlp.up": "SwiGLU", "mlp.down": "SwiGLU"}
STACKS = [("encoder.layers", "Encoder", 3), ("decoder.decoder_layers", "Decoder", 5)]
CLASSES = {
    f"{stack}.{block}.{name}": {"Model", half, kind, "Linear"}
    for stack, half, count in STACKS
    for block in range(count)
    for name, kind in KINDS.items()
}
MODEL = located(CLASSES)
"""An encoder of three blocks and a decoder of five: eight blocks of four layers."""
BLOCKS = {
    "first:1": [0],
    "first:3": [0, 1, 2],
    "last:2": [6, 7],
    "last:99": [0, 1, 2, 3, 4, 5, 6, 7],
    "first:0.3": [0, 1, 2],
    "last:0.25": [6, 7],
    "last:.26": [5, 6, 7],
    "0-0": [0],
    "2-4": [2, 3, 4],
    "6-40": [6, 7],
}
NAMES = ["*", "*.mlp.down", "encoder.*", "*.layers.[02].*", "decoder.decoder_layers.4.attention.qkv"]
WITHIN = ["Attention", "Att*", "Encoder", "Linear", "*"]


@pytest.mark.parametrize(
    ("name", "number", "block"),
    [
        ("blocks.3.mlp.up", 3, "blocks.3"),
        ("model.layers.11.q", 11, "model.layers.11"),
        ("transformer.h.0.c", 0, "transformer.h.0"),
        ("decoder.decoder_layers.2.fc", 2, "decoder.decoder_layers.2"),
        ("stages.1.layers.2.fc", 2, "stages.1.layers.2"),
        ("head", -1, None),
        ("subblocks.3.up", -1, None),
        ("blocks.x.up", -1, None),
        ("blocks.3", -1, None),
    ],
)
def test_the_block_of_a_layer_is_in_its_name(name, number, block):
    assert (block_of(name), block_name(name)) == (number, block)


def test_blocks_are_counted_through_the_whole_model():
    assert [layer.block for layer in MODEL] == [block for block in range(8) for _ in KINDS]
    assert blocks_in(MODEL) == 8
    with pytest.raises(ValueError, match=r"^head is in no numbered block"):
        located({"head": ()})


@every(name=[None, *NAMES], within=[None, *WITHIN])
def test_a_layer_is_selected_if_all_given_fields_hold(name, within):
    for blocks, numbers in (BLOCKS | {None: range(8)}).items():
        if (blocks, name, within) == (None, None, None):
            continue
        match = Match(blocks=blocks, name=name, within=within)
        expected = [
            layer
            for layer in CLASSES
            if [*CLASSES].index(layer) // 4 in numbers
            and (name is None or fnmatchcase(layer, name))
            and (within is None or any(fnmatchcase(one, within) for one in CLASSES[layer]))
        ]
        selection = select(match, MODEL)
        assert [layer.name for layer in selection.layers] == expected
        assert (selection.lacking is None) == (selection.reason is None) == bool(expected)


SHORT = {
    "blocks.*.mlp.down": {"name": "blocks.*.mlp.down"},
    "*": {"name": "*"},
    "class:Attention": {"within": "Attention"},
    "class:class:x": {"within": "class:x"},
    "Attention": {"name": "Attention"},
}
"""Strings, and the fields that they are short for."""


@pytest.mark.parametrize("text", SHORT)
def test_a_string_and_its_field_are_one_match_that_is_written_as_the_string(text):
    one, other = Rule(match=text), Rule.model_validate({"match": SHORT[text]})
    assert one == other
    assert hash(one) == hash(other)
    assert one.match.fields == SHORT[text]
    assert one.model_dump_json() == other.model_dump_json()
    assert one.model_dump(mode="json") == one.model_dump() == {"match": text, "use": None}


@pytest.mark.parametrize("given", range(1, 8))
def test_what_is_written_is_read_as_the_same_match(given):
    values = {"blocks": "last:2", "name": "class:odd.name", "within": "Attention"}
    fields = {name: values[name] for bit, name in enumerate(values) if given >> bit & 1}
    rule = Rule(match=Match(**fields))
    assert Rule.model_validate_json(rule.model_dump_json()) == rule
    assert Rule.model_validate(rule.model_dump()) == rule
    assert (rule.model_dump()["match"] == "class:Attention") == (fields == {"within": "Attention"})


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("last:02", "last:2"),
        ("first:0.150", "first:0.15"),
        ("last:.5", "last:0.5"),
        ("00-07", "0-7"),
        ("last:0.00001", "last:0.00001"),
    ],
)
def test_blocks_have_one_spelling(written, canonical):
    assert Match(blocks=written) == Match(blocks=canonical)
    assert Match(blocks=canonical).model_dump() == {"blocks": canonical}


WRONG = [
    "last:0",
    "first:0.0",
    "last:1.5",
    "last:-1",
    "last",
    "2",
    "4-2",
    "first:\u0663",
    "last:2 ",
    "",
    "middle:2",
    "last:1e-1",
    "-1-2",
]


@every(blocks=WRONG)
def test_blocks_that_mean_nothing_are_refused(blocks):
    with pytest.raises(ValidationError) as refusal:
        Match(blocks=blocks)
    assert [problem["loc"] for problem in refusal.value.errors()] == [("blocks",)]


@pytest.mark.parametrize(
    "match",
    [
        {},
        3,
        None,
        ["*"],
        "",
        "class:",
        {"name": ""},
        {"block": "last:2"},
        {"blocks": 2},
        {"class": "Attention"},
    ],
)
def test_a_match_that_says_nothing_is_refused(match):
    with pytest.raises(ValidationError) as refusal:
        Rule.model_validate({"match": match})
    assert {problem["loc"][0] for problem in refusal.value.errors()} == {"match"}


@pytest.mark.parametrize(
    ("match", "lacking", "there"),
    [
        ("*.mlp.dwon", "name", {layer.name for layer in MODEL}),
        ("class:Atention", "within", {"Model", "Encoder", "Decoder", "Attention", "SwiGLU", "Linear"}),
        ({"blocks": "8-9"}, "blocks", {"0-7"}),
        ({"blocks": "8-9", "name": "*"}, "blocks", {"0-7"}),
        ({"blocks": "last:2", "name": "*.mlp.dwon"}, "name", {layer.name for layer in MODEL}),
        ({"blocks": "last:2", "within": "Encoder"}, "match", {layer.name for layer in MODEL}),
    ],
)
def test_a_match_that_selects_nothing_says_which_field_and_what_there_is(match, lacking, there):
    match = Match.model_validate(match)
    selection = select(match, MODEL)
    assert (selection.layers, selection.lacking, set(selection.there)) == ((), lacking, there)
    assert selection.given == (str(match) if lacking == "match" else match.fields[lacking])


def test_the_nearest_name_or_class_is_in_the_sentence():
    reasons = [
        select(Match.model_validate(match), MODEL).reason
        for match in ("class:Atention", "encoder.layers.2.mlp.dwon")
    ]
    assert [
        "'Attention' is the nearest" in reasons[0],
        "'encoder.layers.2.mlp.down' is the nearest" in reasons[1],
    ] == [True, True]


def test_a_model_without_layers_has_none_to_select():
    for match in itertools.chain(SHORT, ({"blocks": blocks} for blocks in BLOCKS)):
        assert select(Match.model_validate(match), ()).layers == ()
