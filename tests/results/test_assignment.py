"""Assignments of layers: the programme beside all subsets, maps as files, controls, the command."""

import csv
import json
import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import scipy.stats
import torch
from support.commands import here
from support.experiments import sweep, tiny
from support.made_up import member

from ablate.errors import InputError
from ablate.execution.sweep_facts import describe
from ablate.experiment.load import load
from ablate.experiment.recipe_source import load as recipe_of
from ablate.recipes import PRESETS
from ablate.recipes.cells import fp4_share, grid, within
from ablate.recipes.layers import located
from ablate.results.assignment import Map, Measured, recorded_layers
from ablate.results.assignment.check import CLOSE, RANDOM, controls
from ablate.results.comparisons import Comparisons
from ablate.store.ledger import Ledger
from ablate.store.trial_store import Store

KINDS = ("attn.qkv", "mlp.up")
NVFP4 = PRESETS["nvfp4"]()
LEVELS = [("blocks", "recipe"), ("blocks", "products"), ("kinds", "products"), ("layers", "recipe"),
          ("kinds", "operands")]  # fmt: skip


def model(draw, blocks=3):
    """Return the layers of a model, of random sizes."""
    names = {f"blocks.{block}.{kind}": () for block in range(blocks) for kind in KINDS}
    sizes = {name: draw.randint(1, 9) * 16 for name in names}
    return located(names, weights=sizes.__getitem__)


def together(name, unit):
    """Return the unit of a cell, read off its name: its layers, and its product if products are decided."""
    *where, what = name.split() if " " in name else (name, "")
    if "fprop" not in name and "dgrad" not in name and "wgrad" not in name:
        return name
    return " ".join(where) + (f" {what.partition('.')[0]}" if unit == "product" else "")


def choices(measured, unit):
    """Yield (share of FLOPs in FP4, damage) of every choice of units."""
    groups = {}
    for cell in measured.cells:
        groups.setdefault(together(cell.name, unit), []).append(cell)
    for chosen in product((False, True), repeat=len(groups)):
        units = [cells for cells, taken in zip(groups.values(), chosen, strict=True) if taken]
        recipe = within(measured.recipe, measured.layers, [each.cell for cells in units for each in cells])
        yield (
            fp4_share(recipe, measured.layers),
            sum(max(0.0, sum(each.damage for each in cells)) for cells in units),
        )


@pytest.mark.parametrize("unit", ["layer", "product"])
@pytest.mark.parametrize(("seed", "level"), [*enumerate(LEVELS)])
def test_no_subset_of_units_is_better(seed, level, unit):
    draw = random.Random(seed)
    layers = model(draw)
    cells = grid(NVFP4, layers, *level)
    measured = Map(
        NVFP4, layers, tuple(Measured(name, cell, draw.gauss(1, 1)) for name, cell in cells.items())
    )
    possible = list(choices(measured, unit))
    for _ in range(6):
        share = draw.random()
        best = measured.assign(share, unit=unit)
        assert best.share >= share - 1e-6
        least = min(damage for part, damage in possible if part >= share - 1e-9)
        assert best.damage == pytest.approx(least, abs=1e-5)  # of 1: the weight of the share in a tie
        assert (best.share, best.damage) in [pytest.approx(each) for each in possible]
        most = draw.random() * 6
        widest = measured.assign(damage=most, unit=unit)
        assert widest.damage <= most + 1e-6
        assert widest.share == pytest.approx(
            max(part for part, damage in possible if damage <= most), abs=1e-6
        )
        assert best.share == pytest.approx(fp4_share(best.recipe, layers))


def test_a_frontier_falls_with_its_share():
    draw = random.Random(3)
    layers = model(draw, 4)
    cells = grid(NVFP4, layers, "layers", "recipe")
    measured = Map(NVFP4, layers, tuple(Measured(name, cell, draw.random()) for name, cell in cells.items()))
    rows = measured.frontier()
    assert rows[0].recipe == NVFP4
    assert [row.share for row in rows] == sorted((row.share for row in rows), reverse=True)
    assert [row.damage for row in rows] == sorted((row.damage for row in rows), reverse=True)


@pytest.mark.parametrize("unit", ["layer", "product"])
def test_controls_have_the_share_of_the_assignment_and_are_other_choices(unit):
    draw = random.Random(5)
    layers = model(draw, 6)
    cells = grid(NVFP4, layers, "layers", "products")
    measured = Map(NVFP4, layers, tuple(Measured(name, cell, draw.random()) for name, cell in cells.items()))
    best = measured.assign(0.6, unit=unit)
    others = controls(measured, best, unit)
    assert [name for name in others if name.startswith("random")] == [
        f"random {n + 1}" for n in range(RANDOM)
    ]
    recipes = [best.recipe, *others.values()]
    assert all(recipe not in recipes[:number] for number, recipe in enumerate(recipes))
    assert all(
        abs(fp4_share(others[name], layers) - best.share) <= CLOSE for name in others if "random" in name
    )
    kept = {placed.layers for placed in others["last layers"].placements(layers) if placed.products is None}
    assert layers[-1] in {layer for group in kept for layer in group}
    assert controls(measured, best, unit) == others


def written(path, rows):
    with path.open("w") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_map_is_read_from_a_table_or_from_json_and_scaled_down(tmp_path):
    layers = model(random.Random(0))
    rows = [
        {"cell": "block 0 fprop", "damage": 0.016, "times": 4},
        {"cell": "block 0 dgrad", "damage": 0.001},
    ]
    rows[1] |= {"times": 4, "exponent": 1.5}
    table = written(tmp_path / "map.csv", [{"exponent": ""} | row for row in rows])
    (tmp_path / "map.json").write_text(json.dumps(rows))
    for file in (table, tmp_path / "map.json"):
        measured = Map.of(file, NVFP4, layers)
        assert [cell.damage for cell in measured.cells] == pytest.approx([0.001, 0.000125])


@pytest.mark.parametrize(("rows", "problem"), [
    ([{"cell": "block 7", "damage": 1}], "line 2: 'block 7' is not a cell; 'block "),
    ([{"cell": "block 0", "damage": "nan"}], "line 2: damage must be finite"),
    ([{"cell": "block 0"}], "line 2: has no field 'damage'"),
    ([{"cell": "block 0", "damage": 1}, {"cell": "block 0 fprop", "damage": 1}], "overlap in blocks.0"),
    ([{"cell": "block 0 fprop.x", "damage": 1}], "no cell holds both operands"),
])  # fmt: skip
def test_a_map_that_gives_no_programme_is_refused_with_the_line(tmp_path, rows, problem):
    with pytest.raises(InputError, match=problem):
        Map.of(written(tmp_path / "map.csv", rows), NVFP4, model(random.Random(0)))


def test_the_command_writes_a_recipe_file_and_the_experiment_that_checks_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    experiment = {
        "schema": 1,
        "question": "Where?",
        "workload": {"gpt": {"layers": 4, "width": 32, "heads": 2, "steps": 40}},
        "recipe": "nvfp4",
        "ablate": {"rht": [True, False]},
        "seeds": 2,
        "design": {"positions": [0.5], "window": 0.1},
    }
    (tmp_path / "x.yaml").write_text(json.dumps(experiment))
    rows = [{"cell": f"block {block}", "damage": damage} for block, damage in enumerate((5, 1, 4, 2))]
    written(tmp_path / "map.csv", rows)
    done = here("recipe", "assign", "map.csv", "-x", "x.yaml", "--fp4-share", "0.5", "--check", "check.yaml")
    assert done.returncode == 0, done.stderr
    assert "50.0%" in done.stdout
    recipe = recipe_of(tmp_path / "assigned.yaml")
    check = load(tmp_path / "check.yaml")
    layers = check.base.config.linear_layers
    assert {layer.block for placed in recipe.placements(layers) if placed.products is None
            for layer in placed.layers} == {0, 2}  # fmt: skip
    arms = {arm.name: arm for arm in check.arms}
    assert arms["assignment"].recipe == recipe
    assert {"last layers", "both ends", "random 5", "bf16", "all in nvfp4"} <= {*arms}
    assert not {*check.seeds} & {0, 1}
    assert all(arm.baseline == "assignment" for arm in arms.values() if arm.name != "assignment")
    exported = here("recipe", "export", "assigned.yaml", "--to", "yaml")
    assert exported.returncode == 0, exported.stderr


@pytest.mark.parametrize("options", [(), ("--fp4-share", "0.5", "--damage", "1")])
def test_exactly_one_bound_is_given(tmp_path, options):
    assert here("recipe", "assign", "map.csv", "-x", "x.yaml", *options).returncode == 2


def mapped(folder, experiment, damage):
    """Write the ledger of a map whose arms have a known damage; `damage`: of an arm's name and a seed."""
    book, base = Ledger(folder / "runs" / "sweeps" / "m" / "ledger.db"), None
    describe(book, experiment)
    for arm in experiment.arms:
        number = book.add_arm(arm.name, dict(arm.knobs), base, None, "listed" if base else "baseline")
        base = base or number
        for seed in range(4):
            loss = {"val/loss": 3 + damage(arm.name, seed)}
            member(book, number, seed, [(4, loss)], spec=experiment.spec(arm, seed, "cpu").wire)
    return book


def test_a_sweep_with_a_map_is_assigned_by_its_name(tmp_path, monkeypatch):
    """Block 1 has a third of the damage of the others, so it stays in FP4."""
    monkeypatch.chdir(tmp_path)
    experiment = tiny(tmp_path, "m", {"layers": 3}, ablate=None, seeds=2, map={"operands": "recipe"})
    sizes = {"block 0": 0.03, "block 1": 0.01, "block 2": 0.03}
    places = {arm.name: place for place, arm in enumerate(experiment.arms)}
    mapped(
        tmp_path, experiment, lambda arm, seed: sizes.get(arm, 0) + 0.001 * seed * (places[arm] % 3)
    ).close()
    done = here("recipe", "assign", "m", "--fp4-share", "0.3", "--check", "check.yaml")
    assert done.returncode == 0, done.stderr
    assert not {*load(tmp_path / "check.yaml").seeds} & {0, 1, 2, 3}  # two of which `--seeds` added
    placed = recipe_of(tmp_path / "assigned.yaml").placements(experiment.base.config.linear_layers)
    assert {layer.block for each in placed if each.products for layer in each.layers} == {1}
    assert "Damage at the recipe's own error is not measured" in done.stdout
    assert "±" in done.stdout
    assert "neither a sweep" in here("recipe", "assign", "other", "--fp4-share", "0.3").stderr
    assert here("recipe", "assign", "x.csv", "--fp4-share", "0.3").returncode == 2


def test_a_map_of_noise_is_no_ground_for_a_choice(tmp_path):
    """Damages alternate in sign over seeds, so none is told from zero."""
    experiment = tiny(tmp_path, "m", {"layers": 3}, ablate=None, seeds=4, map={"operands": "recipe"})
    book = mapped(tmp_path, experiment, lambda arm, seed: 0.01 * (-1) ** seed * (arm != "bf16"))
    config = experiment.base.config
    with pytest.raises(InputError, match="told from zero"):
        Map.of_sweep(Comparisons(book), NVFP4, config.linear_layers)


def test_the_interval_of_an_assignment_is_that_of_the_sum_over_seeds(tmp_path):
    experiment = tiny(
        tmp_path, "m", {"layers": 3}, ablate=None, seeds=4, map={"operands": "recipe", "times": 1}
    )
    noise = np.random.default_rng(2).normal(0.02, 0.002, (3, 4))
    noise[:, :] -= np.array([[0], [0.01], [0.015]])

    def damage(arm, seed):
        return noise[int(arm[-1]), seed] if arm.startswith("block") else 0.0

    measured = Map.of_sweep(
        Comparisons(mapped(tmp_path, experiment, damage)), NVFP4, experiment.base.config.linear_layers
    )
    best = measured.assign(share=0.6)
    assert best.kept == ("block 0",)
    interval = scipy.stats.t.interval(
        0.95, 3, *[(total := noise[1] + noise[2]).mean(), scipy.stats.sem(total)]
    )
    assert best.half == pytest.approx((interval[1] - interval[0]) / 2)
    # An evaluation's error of 0.003 in each of two cells is one of 0.006 in their sum, at any number of seeds.
    evaluated = replace(measured, cells=tuple(each._replace(error=0.003) for each in measured.cells))
    error = np.hypot(scipy.stats.sem(total), 0.006)
    assert evaluated.assign(share=0.6).half == pytest.approx(scipy.stats.t.isf(0.025, 3) * error)


def test_a_map_of_own_code_is_assigned_by_the_layers_that_its_trials_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert here("init", "mine", "--training").returncode == 0
    code = (tmp_path / "mine_train.py").read_text()
    load_and_fall = (
        "    model.load_state_dict(torch.load(trial.start, weights_only=True))\n    trial.checkpoint",
        "        optimizer.param_groups[0]['lr'] = trial.config.lr * trial.lr_factor\n        with trial.step",
    )
    code = code.replace("    trial.checkpoint", load_and_fall[0]).replace(
        "        with trial.step", load_and_fall[1]
    )
    (tmp_path / "mine_train.py").write_text(code)
    space: dict = {}
    exec(code, space)
    torch.manual_seed(0)
    torch.save(space["Net"](32).state_dict(), tmp_path / "start.pt")
    globs = ["blocks.[01].*", "blocks.[23].*"]
    keys = {
        "schema": 1,
        "question": "Where?",
        "workload": {
            "python": {
                "file": "mine_train.py",
                "steps": 24,
                "start": "start.pt",
                "config": {"width": 32, "lr": 3e-3},
            }
        },
        "recipe": "nvfp4",
        "map": {"layers": globs, "operands": "recipe", "times": 16},
        "design": {"trunk": "start", "window": 0.5, "horizons": [1]},
        "seeds": 4,
        "metric": {"name": "val/loss", "direction": "minimize"},
    }
    (tmp_path / "mine.yaml").write_text(json.dumps(keys))
    state = tmp_path / "runs"
    sweep(load(tmp_path / "mine.yaml"), state)
    done = here("recipe", "assign", "mine", "--fp4-share", "0.5", "--check", "check.yaml")
    assert done.returncode == 0, done.stderr
    book = Ledger(state / "sweeps" / "mine" / "ledger.db")
    layers = recorded_layers(book, Store(state))
    assert [layer.name for layer in layers] == [
        f"blocks.{n}.{kind}" for n in range(4) for kind in ("up", "down")
    ]
    assert {layer.weights for layer in layers} == {32 * 128}
    best = Map.of_sweep(Comparisons(book), NVFP4, layers).assign(share=0.5)
    for path in state.glob("trials/*/result.json"):
        result = json.loads(path.read_text())
        path.unlink()
        Store(state).commit(result["id"], {k: v for k, v in result.items() if k not in ("layers", "sha256")})
    with pytest.raises(InputError, match="--seeds 5"):
        recorded_layers(book, Store(state))
    assert best.share == 0.5
    assert len(best.kept) == 1
    assert {*best.kept} < {*globs}
    assert fp4_share(recipe_of(tmp_path / "assigned.yaml"), layers) == 0.5
    assert {"assignment", "random 1", "all in nvfp4"} <= {
        arm.name for arm in load(tmp_path / "check.yaml").arms
    }
