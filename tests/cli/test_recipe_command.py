"""`ablate recipe show` and `diff`: every preset can be read, knobs turn first, mistakes are told with the way out."""

import json

import pytest
from support.cases import every
from support.commands import INLINE, here
from support.experiments import ablate

from ablate.cli.recipe import layers_of, resolve
from ablate.errors import InputError
from ablate.numerics.spec import Dge, Quant, Select
from ablate.recipes import PRESETS, SLOTS, Recipe
from ablate.recipes.recipe_text import cells, differences, placements, rest


def test_a_table_tells_apart_operands_that_one_field_tells_apart():
    scaled = {"block": "32x32", "scale": {"format": "e8m0", "rounding": "ceil"}, "outer": None}
    for pair in (
        [Quant(select=Select(among="scales", map_to=values)) for values in ((6.0, 4.0), (6.0, 5.0))],
        [Quant(estimator=Dge(clip=clip)) for clip in (2.0, 3.0)],
        [Quant(**scaled | {"scale": scaled["scale"] | more}) for more in ({}, {"halve_below": 0.87})],
    ):
        assert len({cells(quant, "bf16") for quant in pair}) == 2, pair[1]


def test_show_prints_three_products_with_six_operands_and_the_source():
    done = ablate("recipe", "show", "nvfp4")
    assert done.returncode == 0, done.stderr
    for words in (
        *SLOTS,
        "y = x w^T",
        "dx = g w",
        "dw = g^T x",
        "16x16",
        "stochastic, 8 bits",
        "rotated by 16, signs fixed",
        "2509.25149",
    ):
        assert words in done.stdout


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_shown_and_its_json_is_itself(name, capsys):
    from ablate.cli.options import Flags
    from ablate.cli.recipe import show

    show(name, Flags(), None, False)
    shown = capsys.readouterr().out
    assert all(slot in shown for slot in SLOTS)
    show(name, Flags(), None, True)
    assert Recipe.model_validate_json(capsys.readouterr().out) == PRESETS[name]()


@pytest.mark.parametrize("form", ["--json", "--yaml"])
@pytest.mark.parametrize("name", PRESETS)
def test_what_is_printed_of_a_preset_is_a_recipe_file_of_it(name, form, tmp_path):
    file = tmp_path / f"mine.{form[2:]}"
    file.write_text(here("recipe", "show", name, form).stdout)
    assert resolve(str(file), []) == PRESETS[name]()
    assert "are the same recipe" in here("recipe", "diff", file, name).stdout
    shown = here("recipe", "show", file).stdout
    assert all(slot in shown for slot in SLOTS)


def test_knobs_are_turned_in_a_recipe_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(here("recipe", "show", "four_over_six", "--yaml").stdout)
    assert resolve(str(file), ["rht=false"]) == resolve("four_over_six", ["rht=false"])


def test_an_arm_of_a_sweep_is_a_recipe_wherever_one_is_named(tmp_path):
    path, state = tmp_path / "mine.yaml", tmp_path / "state"
    path.write_text(
        "schema: 1\nquestion: q\nworkload: {idle: {steps: 2}}\nablate: {rht: [true, false]}\nseeds: 2\n"
    )
    made = here("sweep", path, "--state", state, *INLINE)
    assert made.returncode == 0, made.stderr
    wanted = here("recipe", "export", "nvfp4", "--set", "rht=false", "--to", "json").stdout
    for source, more in (("mine:rht=false", ("--state", state)), (f"{path}:rht=false", ())):
        done = here("recipe", "export", source, "--to", "json", *more, ABLATE_STATE=str(state))
        assert (done.stdout, done.returncode) == (wanted, 0), done.stderr
    here_too = {"ABLATE_STATE": str(state)}
    assert "the same recipe" in here("recipe", "diff", "mine:rht=true", "nvfp4", **here_too).stdout
    assert "mine:rht=false" in here("recipe", "export", "mine:rht=false", "--to", "te", **here_too).stdout
    for source, named in (
        ("mine:rht=flase", "'rht=false' is the nearest"),
        ("mien:rht=false", "'mine' is the nearest"),
        ("mine:", "name an arm as mine:ARM"),
    ):
        done = here("recipe", "export", source, "--to", "te", **here_too)
        assert (done.returncode, named in done.stderr) == (2, True), done.stderr


def test_knobs_are_turned_before_it_is_shown():
    done = here(
        "recipe",
        "show",
        "nvfp4",
        "--set",
        "rht=false",
        "--set",
        "recipe.wgrad.x.rounding=stochastic",
        "--json",
    )
    wgrad = json.loads(done.stdout)["wgrad"]
    assert (wgrad["hadamard"], wgrad["x"]["rounding"]) == (None, "stochastic")


@pytest.mark.parametrize(
    ("preset", "turned", "words"),
    [
        ("nvfp5", [], "nvfp5: no such preset; 'nvfp4'"),
        ("nothing.yaml", [], "nothing.yaml: no such recipe file"),
        (f"{'n' * 300}.yaml", [], f"{'n' * 300}.yaml: no such recipe file"),
        ("nvfp4", ["rht"], "--set rht: write knob=value"),
        ("nvfp4", ["rth=true"], "--set rth: no such knob; 'rht'"),
        ("nvfp4", ["rht=flase"], "--set rht: input should be a valid boolean"),
        ("bf16", ["sr=true"], "--set sr: this recipe does not quantise dgrad.g or wgrad.g"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(preset, turned, words):
    with pytest.raises(InputError) as error:
        resolve(preset, turned)
    assert str(error.value).startswith(words)
    assert "\n" not in str(error.value)


def test_a_mistake_ends_with_status_2_and_no_traceback():
    done = here("recipe", "show", "nvfp5")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


RULES = '[{"match": {"blocks": "last:1", "name": "*.mlp.*"}}, {"match": "*.o_proj"}]'
QWEN = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
}


@pytest.fixture
def model(tmp_path):
    """A folder with the configuration of a model of two blocks, with four layers in attention and three in the MLP."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    return str(tmp_path)


def test_rules_are_shown_one_by_one_with_their_fields():
    lines = list(rest(resolve("nvfp4", [f"recipe.layers.rules={RULES}"])))
    assert lines == [
        "layers.rules.0, blocks last:1, name *.mlp.*: high precision",
        "layers.rules.1, name *.o_proj: high precision",
    ]


@pytest.mark.parametrize(
    ("turned", "expected"),
    [
        ([], [("own", 14)]),
        (["skip_last=1"], [("own", 7), ("skipped", 7)]),
        ([f"recipe.layers.rules={RULES}", "skip_first=1"], [(0, 3), (1, 2), ("own", 3), ("skipped", 6)]),
    ],
)
def test_the_layers_of_a_model_are_counted_by_what_decides_about_them(turned, expected, model):
    recipe = resolve("nvfp4", turned)
    layers = layers_of(model, recipe)
    assert [(placement.decider, len(placement.layers)) for placement in recipe.placements(layers)] == expected
    lines = list(placements(recipe, layers))
    assert [
        f": {count} of 14 layers" in line for line, (_, count) in zip(lines[:-1], expected, strict=True)
    ] == [True] * len(expected)
    assert [line.endswith("high precision") for line in lines[:-1]] == [
        decider != "own" for decider, _ in expected
    ]


@pytest.mark.parametrize("match", ["*.o_prj", {"blocks": "2-4"}, "class:Qwen2Attention"])
def test_a_rule_that_selects_no_layer_of_the_shown_model_is_refused(match, model):
    recipe = resolve("nvfp4", [f"recipe.layers.rules={json.dumps([{'match': '*.mlp.*'}, {'match': match}])}"])
    with pytest.raises(InputError) as refusal:
        layers_of(model, recipe)
    assert [str(problem).partition(": ")[0] for problem in refusal.value.problems] == [
        "recipe.layers.rules.1.match"
    ]


def test_a_model_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"^--model "):
        layers_of(str(tmp_path / "none"), PRESETS["nvfp4"]())


def test_diff_names_the_path_and_both_values_of_what_differs():
    done = here("recipe", "diff", "nvfp4", "quartet2")
    head, *rows = done.stdout.splitlines()
    assert head.split() == ["field", "nvfp4", "quartet2"]
    lines = {line.split()[0]: line.rstrip() for line in rows}
    assert lines["fprop.w.block"].split() == ["fprop.w.block", "16x16", "1x16"]
    assert lines["dgrad.hadamard"].split(maxsplit=2) == ["dgrad.hadamard", "off", "size 128, signs per_step"]
    assert "fprop.x.element" not in lines


def test_what_is_the_same_is_said_to_be():
    assert "are the same recipe" in here("recipe", "diff", "nvfp4", "nvfp4").stdout


def value_at(tree: dict, path: str):
    for part in path.split("."):
        tree = tree[part]
    return tree


@every(name=PRESETS)
def test_the_differences_from_nvfp4_are_all_of_them(name):
    """Walking them from one recipe gives the other."""
    one, other = PRESETS["nvfp4"]().model_dump(mode="json"), PRESETS[name]().model_dump(mode="json")
    for path, *_ in differences(one, other):
        parent, _, last = path.rpartition(".")
        (value_at(one, parent) if parent else one)[last] = value_at(other, path)
    assert one == other
