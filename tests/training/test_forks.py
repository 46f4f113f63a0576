"""A forked trial trains what its definition says: the trunk's own steps, then windows at a falling rate, bit for bit."""

import gc
import json
import random
import weakref
from contextlib import closing
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import here
from support.experiments import SHAPE, ledger, problems, shards, statuses, sweep, tiny, values, write
from support.ranks import in_ranks
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ablate.errors import InputError
from ablate.execution.shared_prefixes import Family
from ablate.execution.trial_runner import run
from ablate.experiment.forked_design import resolved
from ablate.experiment.schema import Design
from ablate.experiment.trial_spec import TrialSpec
from ablate.recipes import PRESETS, Recipe
from ablate.store.trial_store import Store
from ablate.training import distributed
from ablate.training.checkpoints import Checkpoints
from ablate.training.fork_design import Forks
from ablate.training.forked_training import train_forks
from ablate.training.loop import Loop, Telemetry, Twin
from ablate.training.metric_names import QUANTITIES, cell_of
from ablate.training.rank_layout import Layout
from ablate.training.workloads.gpt import Gpt

STEPS = 12
FORKS = Forks(trunk=PRESETS["bf16"](), positions=(5, 8), windows=(2, 4))
UNMEASURED = Telemetry(every=0, shadow=0, log=3)
OFTEN = {"log": 1, "every": 0, "shadow": 0, "checkpoint": 0}
CLOCKS = ("throughput/", "memory/", "comm/")


def gpt(folder: Path, **changes: Any) -> Gpt:
    shape = {"data": shards(folder), "steps": STEPS, "eval_every": 4, "lr": 3e-3}
    return Gpt(**(SHAPE | shape | changes))


def trial(folder: Path, recipe: str = "nvfp4", **fields: Any) -> TrialSpec:
    fields = {"forks": FORKS, "config": gpt(folder), "seed": 0} | fields
    return TrialSpec(workload="gpt", recipe=PRESETS[recipe](), engine="emulated", device="cpu", **fields)


def own(events: Any) -> list[str]:
    """Return the contents of events or records without the fields in which any two runs differ."""
    return [
        json.dumps([event["step"], {k: v for k, v in event["metrics"].items() if not k.startswith(CLOCKS)}])
        for event in events
    ]


def told(spec: TrialSpec) -> list[str]:
    return own({"step": record.step, "metrics": record.metrics} for record in spec.records(UNMEASURED))


def last(spec: TrialSpec) -> dict[str, float]:
    return list(spec.records(UNMEASURED))[-1].metrics


# What a window is


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
def test_a_window_at_the_trunks_own_rate_is_the_rest_of_the_plain_run(recipe, tmp_path):
    """The oracle is the plain run of the same recipe: state, batches, rates and draws of every step must be its own."""
    forks = Forks(trunk=PRESETS[recipe](), positions=(5, 8), windows=(STEPS - 8, STEPS - 5), anneal=False)
    plain = last(trial(tmp_path, recipe, forks=None))
    records = list(trial(tmp_path, recipe, forks=forks).records(UNMEASURED))
    every = {name: value for record in records for name, value in record.metrics.items()}
    assert every[f"fork/5/{STEPS - 5}/loss"] == every[f"fork/8/{STEPS - 8}/loss"] == plain["val/loss"]
    for position, steps in ((5, STEPS - 5), (8, STEPS - 8)):
        shorter = Forks(trunk=PRESETS[recipe](), positions=(position,), windows=(steps,), anneal=False)
        assert last(trial(tmp_path, recipe, forks=shorter))["val/loss"] == plain["val/loss"]
        assert last(trial(tmp_path, recipe, forks=shorter))["val/loss_bf16"] == plain["val/loss_bf16"]


def test_the_rate_of_a_window_falls_linearly_from_the_trunks(tmp_path):
    """By exact fractions: step j of w has (1 - j / w) of the trunk's rate at the position."""
    seen: list[set[float]] = []

    def noting(optimizer, *_) -> None:
        seen.append({group["lr"] for group in optimizer.param_groups})

    spec, hook = trial(tmp_path), register_optimizer_step_pre_hook(noting)
    list(spec.records(UNMEASURED))
    hook.remove()
    config = spec.config
    expected = [config.lr_at(step) for step in range(8)]
    for position in (5, 8):
        for steps in (2, 4):
            shares = [1 - Fraction(step, steps) for step in range(steps)]
            expected += [config.lr_at(position) * float(share) for share in shares]
    assert all(len(rates) == 1 for rates in seen)  # every group of parameters has it
    assert [rate for (rate,) in seen] == pytest.approx(expected, rel=1e-12)


def test_the_last_record_has_the_means_of_the_longest_windows_over_positions_and_parts(tmp_path):
    metrics = last(trial(tmp_path, config=gpt(tmp_path, eval_tokens=640, eval_batch=2)))
    for reading in ("loss", "loss_bf16"):
        cells = [
            value for name, value in metrics.items() if (cell := cell_of(name)) and cell[1:] == (4, reading)
        ]
        parts = [v for n, v in metrics.items() if n.startswith("evaluated/") and n.endswith(f"/{reading}")]
        records = list(
            trial(tmp_path, config=gpt(tmp_path, eval_tokens=640, eval_batch=2)).records(UNMEASURED)
        )
        every = {name: value for record in records for name, value in record.metrics.items() if cell_of(name)}
        longest = [every[f"fork/{position}/4/{reading}"] for position in FORKS.positions]
        assert cells == [every[f"fork/8/4/{reading}"]]  # each window's own stands in the record of its end
        assert metrics[f"val/{reading}"] == pytest.approx(sum(longest) / 2, rel=1e-12)
        assert len(parts) == 20
        assert sum(parts) / 20 == pytest.approx(metrics[f"val/{reading}"], rel=1e-12)


def test_windows_are_read_by_other_recipes_too(tmp_path):
    spec = trial(tmp_path, config=gpt(tmp_path, steps=STEPS, evaluate=["nvfp4"]))
    records = list(spec.records(UNMEASURED))
    every = {name: value for record in records for name, value in record.metrics.items()}
    for quantity in QUANTITIES:
        cells = [every[f"fork/{position}/4/{quantity}@nvfp4"] for position in FORKS.positions]
        assert every[f"val/{quantity}@nvfp4"] == pytest.approx(sum(cells) / 2, rel=1e-12)
    assert "val/loss@nvfp4" in records[-1].metrics
    windows = [record for record in records if record.step > FORKS.trunk_steps]
    assert not any("val/loss@nvfp4" in record.metrics for record in windows[:-1])


def test_levels_are_recorded_at_the_end_alone(tmp_path):
    records = list(trial(tmp_path).records(UNMEASURED))
    windows = [record for record in records if record.step > FORKS.trunk_steps]
    assert not any("train/loss" in record.metrics for record in windows)
    assert [record.step for record in windows if "val/loss" in record.metrics] == [FORKS.steps]
    assert [r.step for r in records if any(map(cell_of, r.metrics))] == [
        window.last for window in FORKS.cells
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"positions": (5, 5)},
        {"positions": (8, 5)},
        {"positions": ()},
        {"windows": (0, 2)},
        {"positions": (0,)},
    ],
)
def test_windows_that_are_none_are_refused(fields):
    with pytest.raises(ValueError, match=r"ascending|position 0"):
        Forks(**({"trunk": PRESETS["bf16"](), "positions": (5,), "windows": (2,)} | fields))


# Twins


@pytest.mark.parametrize("forks", [None, FORKS], ids=["full", "forked"])
@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
def test_a_twin_differs_from_its_run_and_from_no_second_twin(recipe, forks, tmp_path):
    plain, twin = (trial(tmp_path, recipe, forks=forks, twin=twin) for twin in (False, True))
    assert plain.id != twin.id
    assert told(twin) == told(twin) != told(plain)
    assert last(twin)["val/loss"] == pytest.approx(last(plain)["val/loss"], rel=1e-2)


def test_a_recipe_that_draws_has_a_twin_with_the_same_weights_and_another_without_one_ulp(tmp_path):
    config = gpt(tmp_path)
    assert Twin.of(PRESETS["nvfp4"](), "emulated").stream
    assert not Twin.of(PRESETS["nvfp4"](), "transformer_engine").stream
    assert not Twin.of(PRESETS["bf16"](), "emulated").stream
    before, after = (
        Loop(config.prepare(PRESETS["bf16"](), 0, "cpu"), config, UNMEASURED, twin=Twin(False))
        for _ in range(2)
    )
    after.move_weights()
    for one, other in zip(before.parameters, after.parameters, strict=True):
        up = torch.nextafter(one, torch.full_like(one, float("inf")))
        down = torch.nextafter(one, torch.full_like(one, -float("inf")))
        assert ((other == up) | (other == down)).all()
    moved_up = torch.cat(
        [(b > a).flatten() for a, b in zip(before.parameters, after.parameters, strict=True)]
    )
    assert 0.4 < moved_up.float().mean() < 0.6


def drawing(name: str) -> bool:
    """Return True if a preset's JSON names a rounding or a rotation that draws, read without the recipe's own answer."""
    text = json.dumps(PRESETS[name]().model_dump(mode="json"))
    return any(word in text for word in ('"stochastic"', '"ms_eden"', '"per_step"', '"per_call"'))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_draws_if_its_text_says_so(name):
    assert PRESETS[name]().draws == drawing(name)


# Shared states, interruptions


def test_a_trunk_is_trained_once_for_all_arms_and_its_trial_is_the_plain_run(tmp_path):
    plain, arms = trial(tmp_path, "bf16", forks=None), [trial(tmp_path, name) for name in ("bf16", "nvfp4")]
    family = Family([*arms, plain])
    assert sum(family.steps().values()) == FORKS.steps + (FORKS.steps - 8) + (STEPS - 8)
    for position in FORKS.positions:
        names = {dict(family.points(spec))[position] for spec in (*arms, plain)}
        assert names == {plain.history(position)}
    other = trial(tmp_path, forks=Forks(trunk=PRESETS["bf16"](), positions=(5,), windows=(3,)))
    assert dict(Family([other, arms[1]]).points(other)) == {5: plain.history(5)}


@pytest.mark.parametrize(
    "order", [("bf16", "nvfp4"), ("nvfp4", "bf16"), ("plain", "nvfp4"), ("longer", "nvfp4")]
)
def test_a_trial_that_begins_from_states_that_another_left_is_the_trial_alone(order, tmp_path):
    specs = {
        "bf16": trial(tmp_path, "bf16"),
        "nvfp4": trial(tmp_path),
        "plain": trial(tmp_path, "bf16", forks=None),
        "longer": trial(tmp_path, forks=Forks(trunk=PRESETS["bf16"](), positions=(8, 9), windows=(1,))),
    }
    family, store = Family(specs[name] for name in order), Store(tmp_path / "runs")
    for name in order:
        events = list(run(specs[name], store, 1, OFTEN, family.points(specs[name])))
        alone = list(run(specs[name], Store(tmp_path / f"alone-{name}"), 1, OFTEN))
        assert own(events) == own(alone)


@pytest.mark.slow
def test_a_trial_that_is_ended_anywhere_goes_on_as_if_undisturbed(tmp_path):
    """Ended after every single record, with states in files or without, until it is done."""
    spec, measured = trial(tmp_path), OFTEN | {"every": 100, "shadow": 100}
    alone = own(run(spec, Store(tmp_path / "alone"), 1, measured))
    for points in (Family([spec]).points(spec), []):
        store = Store(tmp_path / f"runs{len(points)}")
        for _ in range(FORKS.steps + 1):
            events = run(spec, store, store.begin(spec.id), measured, points)
            fresh = (event for event in events if "again" not in event)
            if next(fresh, None) is None:
                break
            next(fresh, None)  # a checkpoint is written before a step: two steps an attempt
            events.close()
        assert own(run(spec, store, store.begin(spec.id), measured, points)) == alone


@pytest.mark.slow
def test_a_trial_whose_trunks_states_were_removed_or_damaged_trains_the_trunk_again(tmp_path):
    spec, generator = trial(tmp_path), random.Random(0)
    points = Family([spec]).points(spec)
    alone = own(run(spec, Store(tmp_path / "alone"), 1, OFTEN, points))
    for ended_after in (6, 9, 11, 13, 17):
        store = Store(tmp_path / f"runs{ended_after}")
        events = run(spec, store, store.begin(spec.id), OFTEN, points)
        for event in events:
            if event["step"] == ended_after:
                break
        events.close()
        for _, name in points:
            path = store.shared(name)
            if path.exists() and generator.random() < 0.5:
                path.unlink()
            elif path.exists():
                content = bytearray(path.read_bytes())
                content[len(content) // 2] ^= 1
                path.write_bytes(content)
        assert own(run(spec, store, store.begin(spec.id), OFTEN, points)) == alone


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_two_ranks_train_the_windows_that_one_trains(sharded, tmp_path):
    config = {"config": gpt(tmp_path, batch=1, accumulate=2)}
    (one,) = in_ranks(1, losses_of, trial(tmp_path, **config).wire, False)
    for twin in (False, True):
        both = in_ranks(2, losses_of, trial(tmp_path, twin=twin, **config).wire, sharded)
        assert both[0] == both[1]
        if not twin:
            assert both[0] == one


def losses_of(wire: str, sharded: bool) -> dict[str, float]:
    import torch.distributed as dist

    ranks = dist.get_world_size()
    distributed.become(distributed.World(Layout(ranks, sharded and ranks > 1), dist.get_rank(), "cpu"))
    distributed.world().begun = True
    metrics = list(TrialSpec.parse(wire).records(UNMEASURED))[-1].metrics
    return {name: value for name, value in metrics.items() if "loss" in name and "train" not in name}


def test_a_window_that_diverges_ends_the_trial_at_the_step_that_it_counts(tmp_path):
    config = gpt(tmp_path, lr=1e30, clip=None, warmup=0.9)
    trunk = Forks(trunk=None, positions=(0,), windows=(4, 8), anneal=False)
    records = list(
        trial(tmp_path, forks=trunk, config=config.model_copy(update={"warmup": 0.0})).records(UNMEASURED)
    )
    assert records[-1].metrics["nan/first_step"] == records[-1].step <= trunk.steps
    assert "val/loss" not in records[-1].metrics


def test_forks_without_a_trunk_begin_from_the_workloads_own_weights(tmp_path):
    """The oracle is a plain run of as many steps whose rate is the window's."""
    forks = Forks(trunk=None, positions=(0,), windows=(STEPS,), anneal=False)
    assert last(trial(tmp_path, forks=forks))["val/loss"] == last(trial(tmp_path, forks=None))["val/loss"]


def test_states_in_memory_are_those_in_files(tmp_path):
    spec = trial(tmp_path)
    shared = {step: tmp_path / f"{name}.pt" for step, name in Family([spec]).points(spec)}
    checkpoints = Checkpoints(tmp_path / "own.pt", spec.id, 60, shared)
    prepare = lambda recipe: spec.config.prepare(recipe, 0, "cpu")  # noqa: E731
    in_files = train_forks(prepare, spec.config, spec.trial_run(UNMEASURED, checkpoints))
    in_memory = train_forks(prepare, spec.config, spec.trial_run(UNMEASURED))
    assert own({"step": r.step, "metrics": r.metrics} for r in in_files) == own(
        {"step": r.step, "metrics": r.metrics} for r in in_memory
    )
    assert sorted(path.name for path in shared.values()) == sorted(
        path.name for path in tmp_path.glob("*.pt")
    )


@pytest.mark.parametrize("files", [True, False])
def test_a_window_begins_when_the_model_before_it_is_gone(files, tmp_path):
    """On a large model a second one beside it would not fit."""
    spec = trial(tmp_path)
    shared = {step: tmp_path / f"{name}.pt" for step, name in Family([spec]).points(spec)}
    checkpoints = Checkpoints(tmp_path / "own.pt", spec.id, 60, shared) if files else None
    models: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def prepare(recipe: Recipe) -> Any:
        alive.append(sum(model() is not None for model in models))
        run = spec.config.prepare(recipe, 0, "cpu")
        models.append(weakref.ref(run.model))
        return run

    gc.disable()  # what only the collector frees is not gone
    try:
        for _ in train_forks(prepare, spec.config, spec.trial_run(UNMEASURED, checkpoints)):
            pass
    finally:
        gc.enable()
    assert len(models) == 1 + len(FORKS.cells)
    assert not any(alive)


# As an experiment


def test_a_sweep_in_a_forked_design_has_one_trial_an_arm_and_seed(tmp_path):
    design = {"positions": 2, "window": 0.25, "horizons": [1, 2], "bad": "mxfp4"}
    experiment = tiny(tmp_path, shape={"steps": 8, "eval_every": 8}, design=design, null=True)
    names = ["bf16", "rht=true", "rht=false", "known bad: mxfp4", "null: bf16"]
    assert [arm.name for arm in experiment.arms] == names
    outcome, _ = sweep(experiment, tmp_path / "runs")
    assert outcome.status == "done"
    found = values(tmp_path / "runs")
    assert found.keys() == {(name, seed) for name in names for seed in (0, 1)}
    spec = experiment.spec(experiment.arms[1], 0, "cpu")
    assert spec.forks == Forks(trunk=PRESETS["bf16"](), positions=(3, 5), windows=(2, 4))
    assert found["rht=true", 0] == last(spec)["val/loss"]
    assert found["null: bf16", 0] != found["bf16", 0]
    assert set(statuses(tmp_path / "runs").values()) == {"done"}
    with closing(ledger(tmp_path / "runs")) as book:
        assert {arm.name: arm.role for arm in book.arms()} == {
            "bf16": "baseline",
            "rht=true": "listed",
            "rht=false": "listed",
            "known bad: mxfp4": "bad",
            "null: bf16": "null",
        }
        assert [arm.optuna for arm in book.arms()] == [None, 0, 1, None, None]


@pytest.mark.parametrize(
    ("positions", "fields", "expected"),
    [
        (3, {}, (120, 180, 239)),
        (1, {}, (180,)),
        (2, {"decay": "cosine"}, (120, 240)),
        (2, {"warmup": 0.5}, (150, 239)),
        ((0.1, 0.9), {}, (30, 270)),
    ],
)
def test_positions_lie_between_the_warm_up_and_the_decay(positions, fields, expected, tmp_path):
    config = gpt(tmp_path, steps=300, **fields)
    design = Design(positions=positions, window=0.15, horizons=(1, 2, 4))
    forks = resolved(design, config)
    assert (forks.positions, forks.windows) == (expected, (45, 90, 180))


def test_a_search_in_a_forked_design_proposes_and_confirms(tmp_path):
    experiment = tiny(
        tmp_path,
        shape={"steps": 8, "eval_every": 8},
        ablate={"workload.lr": {"uniform": [1e-4, 1e-2], "log": True}, "rht": [True, False]},
        against="bf16",
        search={"sampler": "random", "trials": 3},
        design={"positions": 1, "window": 0.25, "horizons": [1]},
        seeds=1,
    )
    outcome, _ = sweep(experiment, tmp_path / "runs")
    assert outcome.status == "done"
    assert len(values(tmp_path / "runs")) == 6  # each rate has a baseline of its own


WRONG = {
    "a preset that is none": ({"design": {"trunk": "fp5"}}, "neither a preset"),
    "positions twice": ({"design": {"positions": [0.5, 0.5]}}, "not different steps"),
    "positions in descending order": ({"design": {"positions": [0.8, 0.4]}}, "in ascending order"),
    "a position before the first step behind another": (
        {"design": {"positions": [0.5, 0.001]}},
        "in ascending order",
    ),
    "no position": ({"design": {"positions": []}}, "must be shares of the steps"),
    "positions before the first step": ({"design": {"positions": [0.01, 0.5]}}, "not different steps"),
    "horizons twice": ({"design": {"horizons": [2, 2]}}, "ascending"),
    "a bad arm that is none": ({"design": {"bad": "mxpf4"}}, "neither an arm nor a preset; 'mxfp4'"),
    "phases": ({"design": {}, "ablate": {"cooldown": [0, 0.5]}}, "phases"),
    "seconds": ({"design": {}, "shape": {"time_budget": 5.0}}, "by its seconds"),
    "another metric": ({"design": {}, "metric": {"name": "train/recent_loss"}}, "end of its windows"),
    "a pruner": (
        {
            "design": {},
            "ablate": {"workload.lr": {"uniform": [1e-4, 1e-2]}},
            "search": {"trials": 2, "pruner": "median", "rungs": [2]},
        },
        "nothing to prune by",
    ),
    "figures of full runs": (
        {
            "design": {},
            "published": [{"arm": "rht=true", "metric": "val/loss", "value": 1.0, "source": "a paper"}],
        },
        "figures of full runs",
    ),
    "a workload that cannot": ({"design": {}, "workload": {"idle": {}}}, "trains from a checkpoint"),
    "a twin of what is not trained here": ({"null": True, "workload": {"idle": {}}}, "twin"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_forked_is_refused_at_its_place(case, tmp_path):
    keys, why = WRONG[case]
    keys = {"shape": {"steps": 12}} | keys
    found = [str(problem) for problem in problems(write(tmp_path, **keys))]
    assert any(why in problem for problem in found), found
    assert not any("\n" in problem or "validation error" in problem for problem in found), found


def test_forks_their_trunk_and_a_twin_are_part_of_the_id(tmp_path):
    specs = (
        trial(tmp_path, forks=None),
        trial(tmp_path),
        trial(tmp_path, twin=True),
        replace_trunk(trial(tmp_path)),
    )
    assert [TrialSpec.parse(spec.wire) for spec in specs] == [*specs]
    assert len({spec.id for spec in specs}) == len(specs)


def replace_trunk(spec: TrialSpec) -> TrialSpec:
    trunk: Recipe = PRESETS["fp8_current"]()
    return spec.model_copy(update={"forks": FORKS.model_copy(update={"trunk": trunk})})


def test_states_of_trunks_outlive_their_sweep_and_serve_the_next_until_the_disk_is_short(
    tmp_path, monkeypatch
):
    design = {"positions": 2, "window": 0.25, "horizons": [1]}
    keys = {"shape": {"steps": 8, "eval_every": 8}, "design": design, "seeds": 1}
    sweep(tiny(tmp_path, **keys), tmp_path / "runs")
    states = sorted((tmp_path / "runs" / "checkpoints").iterdir())
    assert len(states) == 2
    written = [path.stat().st_ino for path in states]
    other = tiny(tmp_path, "other", **keys | {"design": design | {"window": 0.5}})
    sweep(other, tmp_path / "runs")
    assert [path.stat().st_ino for path in states] == written  # nobody trained the trunk again
    with closing(ledger(tmp_path / "runs", "other")) as book:
        begun = [json.loads(path.read_bytes()) for path in (tmp_path / "runs").glob("trials/*/trunk-1.json")]
        assert len(begun) == len(book.members()) + 2
    plain = tiny(tmp_path, "plain", **keys | {"design": None, "ablate": {"cooldown": [0.25, 0.5]}})
    sweep(plain, tmp_path / "runs")
    assert sorted((tmp_path / "runs" / "checkpoints").iterdir()) == states
    store = Store(tmp_path / "runs")
    store.trim([path.stem for path in states], 1.0)
    assert all(path.exists() for path in states)
    store.trim([path.stem for path in states], 0.0)
    assert not any(path.exists() for path in states)


def test_a_search_in_forks_is_not_warmed_by_full_runs(tmp_path):
    keys = {
        "shape": {"steps": 8, "eval_every": 8},
        "ablate": {"workload.lr": {"uniform": [1e-4, 1e-2]}},
        "seeds": 1,
    }
    sweep(tiny(tmp_path, "earlier", **keys, search={"sampler": "random", "trials": 2}), tmp_path / "runs")
    design = {"positions": 1, "window": 0.25, "horizons": [1]}
    again = {"sampler": "random", "trials": 2, "warm": ["earlier"]}
    later = tiny(tmp_path, "later", **keys, search=again, design=design)
    with pytest.raises(InputError, match=r"full runs and this search of forks \(bf16\)"):
        sweep(later, tmp_path / "runs")


def test_damage_is_ranked_apart_from_gaps(tmp_path):
    keys = {"shape": {"steps": 8, "eval_every": 8}, "seeds": 1}
    designs = {"full": None, "forked": {"positions": 1, "window": 0.25, "horizons": [1], "bad": "mxfp4"}}
    for name, design in designs.items():
        sweep(tiny(tmp_path, name, **keys, design=design, null=bool(design)), tmp_path / "runs")
    done = here("show", "--json", "--state", tmp_path / "runs")
    entries = json.loads(done.stdout)
    assert {entry["arm"] for entry in entries} == {"rht=true", "rht=false"}  # no check is ranked
    tasks = {name: {entry["task"] for entry in entries if entry["sweep"] == name} for name in designs}
    assert tasks["full"].isdisjoint(tasks["forked"])


def test_arms_that_train_other_windows_are_refused_together(tmp_path):
    """Their damage is of other lengths, and a table would compare the one with the other."""
    design = {"trunk": "bf16", "positions": 2, "window": 0.25, "horizons": [1, 2]}
    for knob, levels in (("workload.steps", [24, 48]), ("workload.decay_fraction", [0.1, 0.5])):
        path = write(tmp_path, shape={"steps": 24, "eval_every": 24}, ablate={knob: levels}, design=design)
        found = [str(problem) for problem in problems(path)]
        assert any("train other windows" in text for text in found), (knob, found)


@pytest.mark.slow
def test_a_position_between_two_that_are_there_raises_no_alarm_and_gives_what_a_fresh_start_gives(
    tmp_path, capfd
):
    """A trial continues from the furthest state; the one before it lies among records of another trial."""

    def run_at(positions: int, state: str) -> dict:
        keys = {"ablate": {"rht": [True, False]}, "seeds": 1, "shape": {"steps": 24, "eval_every": 24}}
        design = {"positions": positions, "window": 0.1, "horizons": [1, 2]}
        sweep(tiny(tmp_path, "one", **keys, design=design), tmp_path / state)
        return values(tmp_path / state, "one")

    run_at(2, "grown")
    grown, fresh = run_at(3, "grown"), run_at(3, "fresh")
    assert grown == fresh
    assert "not those that it was left after" not in capfd.readouterr().out
