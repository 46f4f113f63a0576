"""A trial that goes on from a checkpoint is the trial that was never interrupted, bit for bit, whatever its recipe remembers."""

import hashlib
import io
import json
import os
import random
import signal
import threading
from collections import OrderedDict
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.cases import Tier
from support.experiments import SHAPE, events_of, shards, tiny, until
from support.gates import Gate

from ablate.errors import InputError
from ablate.execution.controller import Controller
from ablate.execution.forecast import forecast
from ablate.execution.messages import TrialRequest
from ablate.execution.progress import RunOptions
from ablate.execution.shared_prefixes import Family
from ablate.execution.supervisor import Supervisor
from ablate.execution.trial_runner import run
from ablate.execution.workers import Inline
from ablate.experiment.arms import StartingPoint
from ablate.experiment.trial_spec import TrialSpec
from ablate.numerics import product
from ablate.numerics.product import MODES
from ablate.recipes import PRESETS
from ablate.recipes.recipe import Phase
from ablate.store.ledger import Ledger
from ablate.store.trial_store import Store
from ablate.training.checkpoint_footer import CHECKPOINT_VERSION, SealedWriter, unsealed
from ablate.training.checkpoints import Checkpoints
from ablate.training.metric_names import PRODUCT_BITS
from ablate.training.workloads.gpt import Gpt

STEPS = 8
OWN = ("throughput/", "memory/")
"""Metrics in which any two runs differ."""


def config(folder: Path, **changes) -> Gpt:
    return Gpt(**(SHAPE | {"data": shards(folder), "steps": STEPS, "eval_every": 4} | changes))


def test_a_checkpoint_is_whole_or_not_there(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path / "checkpoint.pt", "trial", 0)
    checkpoints.leave(3, {"step": 3}, (False, True))

    def torn(content, file):
        file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(OSError, match="No space left"):
        checkpoints.leave(4, {"step": 4}, (False, True))
    monkeypatch.undo()
    assert Checkpoints(tmp_path / "checkpoint.pt", "trial", 0).take()["step"] == 3


def test_processes_of_one_id_write_the_same_shared_state_without_harm(tmp_path):
    """Containers that share a state folder have processes of one id. One writes while another does."""

    class Meanwhile:
        def __reduce__(self):
            Checkpoints(tmp_path / "b.pt", "b", 0, shared).leave(3, {"step": 3}, (True, False))
            return OrderedDict, ()

    shared = {3: tmp_path / "checkpoints" / "state.pt"}
    checkpoints = Checkpoints(tmp_path / "a.pt", "a", 0, shared)
    checkpoints.leave(3, {"step": 3, "meter": Meanwhile()}, (True, False))
    assert Checkpoints(tmp_path / "c.pt", "c", 0, shared).take()["trial"] == "a"
    assert [*shared[3].parent.iterdir()] == [shared[3]]


# Ctrl-C between opening a file and its `with` leaves the file to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_while_a_checkpoint_is_written_is_ctrl_c(tmp_path):
    """Ctrl-C comes before, while and after the tensor of 64 MB is written, in 60 ms."""

    def interrupt(*_):
        raise KeyboardInterrupt

    checkpoints = Checkpoints(tmp_path / "checkpoint.pt", "trial", 0)
    checkpoints.leave(3, {"step": 3}, (False, True))
    state = {"step": 4, "model": torch.zeros(1 << 24)}
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for milliseconds in range(5, 60, 5):
            signal.setitimer(signal.ITIMER_REAL, milliseconds / 1000)
            with suppress(KeyboardInterrupt):
                checkpoints.leave(4, state, (False, True))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert Checkpoints(tmp_path / "checkpoint.pt", "trial", 0).take()["step"] in (3, 4)


def flip(path: Path, place: float, bit: int = 0) -> None:
    """Flip a bit of a file's byte at a place between 0 and 1."""
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 1 << bit
    path.write_bytes(content)


HARMS = {
    "torn": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "without a footer": lambda path: torch.save({"trial": "trial", "step": 3}, path),
    "another trial": lambda path: Checkpoints(path, "other", 0).leave(3, {"step": 3}, (False, True)),
} | {
    f"a bit at {place}": lambda path, place=place: flip(path, place)
    for place in (0.0, 0.2, 0.4, 0.6, 0.8, 0.97, 1.0)
}


@pytest.mark.parametrize("damage", HARMS)
def test_a_checkpoint_that_cannot_be_used_is_told_and_put_aside_and_the_trial_goes_on_without_it(
    damage, tmp_path, capsys
):
    path = tmp_path / "checkpoint.pt"
    Checkpoints(path, "trial", 0).leave(3, {"step": 3, "model": torch.arange(999.0)}, (False, True))
    assert Checkpoints(path, "trial", 60).start == 3
    HARMS[damage](path)
    capsys.readouterr()
    assert Checkpoints(path, "trial", 60).take() is None
    told = capsys.readouterr().out
    assert told.startswith(f"{path}: ")
    assert told.count("\n") == 1
    assert [found.name for found in tmp_path.iterdir()] == ["checkpoint.pt.damaged"]


OFTEN = {"log": 1, "every": 5, "shadow": 5, "checkpoint": 0}


@pytest.fixture(scope="module")
def tenth(tmp_path_factory) -> tuple[TrialSpec, list[dict]]:
    """A trial with a cooldown of a tenth, and its events where nothing disturbs it."""
    folder = tmp_path_factory.mktemp("tenth")
    (spec,) = cooldowns(folder, 0.1)
    return spec, list(run(spec, Store(folder / "plain"), 1, OFTEN))


def begun(spec: TrialSpec, store: Store, steps: int, points=(), how=OFTEN) -> None:
    """Run an attempt and leave it after so many steps, as a kill does."""
    events = run(spec, store, store.begin(spec.id), how, points)
    for event in events:
        if event["step"] == steps and "again" not in event:
            break
    events.close()


def on_disk(store: Store, spec: TrialSpec) -> list[str]:
    """Return the events of a finished trial's folder, checked against its result."""
    return [own(event) for event in store.proven(spec.id, store.result(spec.id))]


WHAT = {
    "a bit of the checkpoint": lambda folder: flip(folder / "checkpoint.pt", 0.5),
    "a digit of a record before it": lambda folder: flip(folder / "events-1.jsonl", 0.2),
    "records before it are gone": lambda folder: (folder / "events-1.jsonl").write_bytes(b""),
}


@pytest.mark.parametrize("what", WHAT)
def test_a_trial_whose_checkpoint_or_records_were_changed_begins_anew_and_ends_as_if_undisturbed(
    what, tenth, tmp_path
):
    (spec, plain), store = tenth, Store(tmp_path / "runs")
    begun(spec, store, 12)
    WHAT[what](store.folder(spec.id))
    told = list(run(spec, store, store.begin(spec.id), OFTEN))
    assert not any("resumed" in event for event in told)
    assert [own(event) for event in told] == on_disk(store, spec) == [own(event) for event in plain]


@pytest.mark.parametrize("then", MODES)
def test_a_trial_keeps_the_mode_of_its_products_on_another_cpu(then, tmp_path, monkeypatch):
    """Sums add in another order there, so it would not be the trial from the start, bit for bit."""
    (spec,) = cooldowns(tmp_path, 0.1)
    (other,) = MODES.keys() - {then}
    store, how = Store(tmp_path / "runs"), OFTEN | {"every": 1}
    with product.multiplying(then):
        plain = [own(event) for event in run(spec, Store(tmp_path / "plain"), 1, how)]
        begun(spec, store, 12, how=how)
    if then == "bf16":  # asked of a CPU without its instructions
        refused = pytest.raises(InputError, match=r"goes on from step 1[12] of a run that multiplied in bf16")
        with product.multiplying(other), refused:
            list(run(spec, store, store.begin(spec.id), how))
        monkeypatch.setenv(product.MODE_VARIABLE, "bf16")
    with nullcontext() if then == "bf16" else product.multiplying(other):
        told = list(run(spec, store, store.begin(spec.id), how))
    assert any("resumed" in event for event in told)
    assert [own(event) for event in told] == plain
    assert {event["metrics"][PRODUCT_BITS] for event in told if PRODUCT_BITS in event["metrics"]} == {
        MODES[then]
    }


def test_a_mode_that_the_environment_asks_for_is_not_overruled_by_a_checkpoint(tmp_path, monkeypatch):
    (spec,) = cooldowns(tmp_path, 0.1)
    store = Store(tmp_path / "runs")
    with product.multiplying("fp32"):
        begun(spec, store, 12)
    monkeypatch.setenv(product.MODE_VARIABLE, "bf16")
    with pytest.raises(
        InputError, match="ABLATE_PRODUCTS asks for bf16 here; set it to fp32, or leave it out"
    ):
        list(run(spec, store, store.begin(spec.id), OFTEN))
    monkeypatch.setenv(product.MODE_VARIABLE, "fp8")
    with pytest.raises(InputError, match="ABLATE_PRODUCTS=fp8: CPUs multiply in bf16 or fp32"):
        list(run(spec, store, store.begin(spec.id), OFTEN))


def test_a_fork_goes_on_in_the_mode_of_its_trunk(tmp_path):
    specs, store = cooldowns(tmp_path, 0, 0.5), Store(tmp_path / "runs")
    family = Family(specs)
    with product.multiplying("fp32"):
        list(run(specs[0], store, 1, OFTEN, family.points(specs[0])))
        scratch = [own(event) for event in run(specs[1], Store(tmp_path / "scratch"), 1, OFTEN)]
    with product.multiplying("bf16"):
        forked = list(run(specs[1], store, 1, OFTEN, family.points(specs[1])))
    assert [own(event) for event in forked] == scratch
    fresh = [event["metrics"] for event in forked if not event.get("again")]
    assert {metrics[PRODUCT_BITS] for metrics in fresh if PRODUCT_BITS in metrics} == {32}


def test_a_trial_goes_on_from_an_earlier_state_where_the_furthest_that_others_left_was_changed(
    tmp_path, capsys
):
    specs, store = cooldowns(tmp_path, 0, 0.1, 0.5), Store(tmp_path / "runs")
    family = Family(specs)
    quiet = OFTEN | {"checkpoint": 60}
    list(run(specs[0], store, 1, quiet, family.points(specs[0])))
    ((_, furthest), *_) = family.points(specs[1])
    flip(store.shared(furthest), 0.5)
    told = list(run(specs[1], store, 1, quiet, family.points(specs[1])))
    assert [event["resumed"] for event in told if "resumed" in event] == [10]
    assert str(store.shared(furthest)) in capsys.readouterr().out
    assert store.shared(furthest).exists()  # left again, whole
    plain = [own(event) for event in run(specs[1], Store(tmp_path / "plain"), 1, quiet)]
    assert [own(event) for event in told] == on_disk(store, specs[1]) == plain


def test_what_an_attempt_does_again_is_recorded_as_it_was_at_first_with_whatever_is_new(tenth, tmp_path):
    """Else a ledger that heard the first attempt would hold other times than the files."""
    (spec, plain), store = tenth, Store(tmp_path / "runs")
    begun(spec, store, 12, how=OFTEN | {"checkpoint": 60})  # without a checkpoint of its own
    first = list(store.events(spec.id))
    told = list(run(spec, store, store.begin(spec.id), OFTEN | {"every": 3, "shadow": 3}))
    times = {(event["step"], name): event["time"] for event in told for name in event["metrics"]}
    assert all(times[event["step"], name] == event["time"] for event in first for name in event["metrics"])
    kept = {
        (event["step"], name): event["time"]
        for event in store.proven(spec.id, store.result(spec.id))
        for name in event["metrics"]
    }
    assert kept == times
    assert len(times) > sum(len(event["metrics"]) for event in plain)


@pytest.mark.slow
def test_a_killed_worker_costs_the_steps_since_the_last_checkpoint_and_no_record(tmp_path, monkeypatch):
    """A real child process, killed in the middle of a trial; the next attempt goes on where the checkpoint stands."""
    workload, gate = config(tmp_path, steps=40, eval_every=40), Gate(tmp_path)
    gate.shut()
    monkeypatch.setenv("PYTHONPATH", gate.environment["PYTHONPATH"])
    spec = TrialSpec(
        workload="gpt", config=workload, recipe=PRESETS["nvfp4"](), seed=0, engine="emulated", device="cpu"
    )
    request = TrialRequest(
        spec.id, spec.wire, str(tmp_path / "runs"), 1, {"log": 1, "every": 40, "checkpoint": 0.05}
    )
    store, supervisor = Store(tmp_path / "runs"), Supervisor()
    checkpoint, told = (store.folder(spec.id) / name for name in ("checkpoint.pt", "events-1.jsonl"))
    killer = threading.Thread(
        target=kill_when, args=(lambda: checkpoint.exists() and told.stat().st_size, supervisor)
    )
    killer.start()
    first = events_of(supervisor.run(request))
    killer.join()
    assert store.result(spec.id) is None
    gate.open()
    messages = list(supervisor.run(replace(request, attempt=2)))
    supervisor.close()
    second = events_of(messages)
    assert messages[-1].status == "done"
    (resumed,) = [event["resumed"] for event in second if "resumed" in event]
    assert 0 < resumed <= first[-1]["step"]
    assert [event["step"] for event in second] == list(
        range(1, 41)
    )  # those before it are told again, from the first attempt's file
    assert next(event["step"] for event in second if "resumed" in event) == resumed + 1
    assert not checkpoint.exists()
    undisturbed = list(run(spec, Store(tmp_path / "undisturbed"), 1, request.telemetry))
    assert [own(event) for event in second] == [own(event) for event in undisturbed]


def own(event: dict) -> str:
    return json.dumps(
        [event["step"], {name: value for name, value in event["metrics"].items() if not name.startswith(OWN)}]
    )


def kill_when(ready, supervisor: Supervisor) -> None:
    """Kill the trial's process, not the warm one that it was forked from, once `ready`."""
    until(ready)
    warm = supervisor.child.pid
    (trial,) = map(int, Path(f"/proc/{warm}/task/{warm}/children").read_text().split())
    os.kill(trial, signal.SIGKILL)


# --- forks ----------------------------------------------------------------------------------------


def cooldowns(folder: Path, *fractions: float) -> list[TrialSpec]:
    base = StartingPoint("gpt", config(folder, steps=20, eval_every=5).model_dump(mode="json"), "nvfp4")
    arms = [base.arm({"cooldown": fraction}) for fraction in fractions]
    return [
        TrialSpec(workload="gpt", config=a.config, recipe=a.recipe, seed=0, engine="emulated", device="cpu")
        for a in arms
    ]


def test_what_a_sweep_over_cooldown_shares_is_counted(tmp_path):
    family = Family(cooldowns(tmp_path, 0, 0.05, 0.1, 0.15, 0.2, 0.25))
    assert sum(family.steps().values()) == 20 + 1 + 2 + 3 + 4 + 5  # of 120, 3.4 times fewer


def test_trials_part_where_their_recipes_do(tmp_path):
    none, tenth, half = cooldowns(tmp_path, 0, 0.1, 0.5)
    assert (none.alike(tenth), none.alike(half), tenth.alike(half)) == (18, 10, 10)
    family = Family([none, tenth, half])
    assert [step for step, _ in family.points(none)] == [18, 10]
    assert [step for step, _ in family.points(half)] == [10]
    assert dict(family.points(none))[10] == dict(family.points(half))[10] == none.history(10)
    assert none.history(18) != half.history(18)


def test_another_seed_another_model_and_another_recipe_share_nothing(tmp_path):
    (spec,) = cooldowns(tmp_path, 0.1)
    others = [
        spec.model_copy(update={"seed": 1}),
        spec.model_copy(update={"config": spec.config.model_copy(update={"lr": 1e-4})}),
        spec.model_copy(update={"recipe": PRESETS["mxfp4"]()}),
    ]
    assert not Family([spec, *others]).points(spec)


def test_a_shared_state_under_the_name_of_another_is_put_aside(tmp_path, capsys):
    """A copy of another seed's state, or of another step's, is whole: only its name tells that it is not what was asked for."""
    shared = {step: tmp_path / f"{name}.pt" for step, name in ((10, "ten"), (20, "twenty"))}
    Checkpoints(tmp_path / "a" / "checkpoint.pt", "a", 60, shared).leave(10, {"step": 10}, (True, False))
    shared[20].write_bytes(shared[10].read_bytes())
    found = Checkpoints(tmp_path / "b" / "checkpoint.pt", "b", 60, shared)
    assert (found.start, found.trunk) == (10, {"trial": "a", "step": 10})
    assert "twenty.pt: the state of trial a after step 10 under another's name" in capsys.readouterr().out
    assert (tmp_path / "twenty.pt.damaged").exists()


def test_a_schedule_that_waits_for_a_measurement_is_shared_only_whole(tmp_path):
    (spec,) = cooldowns(tmp_path, 0)
    waits = spec.model_copy(update={"recipe": PRESETS["fp4_all_the_way"]()})
    later = waits.recipe.model_copy(update={"schedule": (Phase(start="step:10"), *waits.recipe.schedule)})
    assert not Family([waits, waits.model_copy(update={"recipe": later})]).points(waits)


def test_a_forked_trial_is_the_trial_from_scratch_bit_for_bit_and_replays_whole(tmp_path):
    specs, store = cooldowns(tmp_path, 0, 0.1, 0.5), Store(tmp_path / "forked")
    family, how = Family(specs), {"log": 1, "every": 3, "shadow": 4, "checkpoint": 60}
    ran = 0
    for spec in specs:
        forked = list(run(spec, store, 1, how, family.points(spec)))
        scratch = list(run(spec, Store(tmp_path / "scratch"), 1, how))
        assert [own(event) for event in forked] == [own(event) for event in scratch]
        assert [own(event) for event in store.events(spec.id)] == [own(event) for event in scratch]
        ran += sum(1 for line in (store.folder(spec.id) / "events-1.jsonl").read_text().splitlines())
    assert ran == 20 + 2 + 10
    trunk = json.loads((store.folder(specs[2].id) / "trunk-1.json").read_text())
    assert trunk == {"trial": specs[0].id, "step": 10}


def test_a_sweep_runs_what_its_trials_share_once_and_leaves_no_shared_checkpoint(tmp_path):
    experiment = tiny(
        tmp_path,
        shape={"steps": 20, "eval_every": 5},
        ablate={"cooldown": [0.25, 0.1, 0]},
        telemetry={"log": 1},
    )
    forked, scratch = finish(experiment, tmp_path / "a"), finish(experiment, tmp_path / "b", fork=False)
    assert forked == scratch
    own_steps = {
        root: sum(
            len(path.read_text().splitlines())
            for path in (tmp_path / root / "trials").glob("*/events-*.jsonl")
        )
        for root in "ab"
    }
    assert own_steps == {"a": 2 * (20 + 20 + 2 + 5), "b": 2 * 4 * 20}  # bf16 and three arms, two seeds
    assert not list((tmp_path / "a" / "checkpoints").iterdir())


GRIDS = {
    "arms that part at different steps": {"arms": ["0", "0.1", "0.5"]},
    "arms that are equal to the end": {"arms": ["0.1", "0.11"]},
    "equal arms, and one that parts from them": {"arms": ["0.1", "0.11", "0.5"]},
    "equal arms that part from one that is done": {"arms": ["0.5", "0.1", "0.11"], "done": ["0.5"]},
    "a trunk that is done": {"arms": ["0", "0.1", "0.11", "0.5"], "done": ["0", "0.1"], "seeds": 2},
    "an earlier run that was ended between two arms": {"arms": ["0.1", "0.11", "0.5"], "ended": 12},
    "a trial that was killed and has a checkpoint": {"arms": ["bf16", "mxfp4"], "killed": 7},
    "a trial that was killed behind a state that it left": {"arms": ["0.1", "0.5"], "killed": 14},
    "a trial that was killed before the state that it is to leave": {"arms": ["0.1", "0.5"], "killed": 7},
    "a trial that was killed behind a state that it did not leave": {
        "arms": ["0.1", "0.5"],
        "killed": 14,
        "fork": False,
    },
    "a killed trial, and two that begin as it does": {
        "arms": ["0.1", "0.5", "0.51"],
        "killed": 14,
        "fork": False,
    },
}


DRAWN = 8 if Tier.whole else 2


@pytest.mark.parametrize("case", [*GRIDS, *range(DRAWN)])
def test_a_sweep_computes_as_many_steps_as_its_plan_counts(case, tmp_path):
    """Check named cases, and arms and finished arms that are drawn."""
    draw = random.Random(case)
    arms = draw.sample(
        ["0", "0.05", "0.1", "0.11", "0.12", "0.25", "0.26", "0.5", "bf16", "mxfp4"], draw.randint(2, 5)
    )
    drawn = {"arms": arms, "done": draw.sample(arms, draw.randint(0, 2)), "seeds": draw.randint(1, 2)}
    given = {"seeds": 1, "done": [], "ended": 0, "killed": 0, "fork": True} | (
        drawn if case in range(DRAWN) else GRIDS[case]
    )
    keys = {
        "shape": {"steps": 20, "eval_every": 20, "width": 16, "context": 8, "batch": 1, "layers": 1},
        "ablate": None,
    }
    keys |= {
        "telemetry": {"log": 1, "every": 20, "checkpoint": 0 if given["killed"] else 60},
        "seeds": given["seeds"],
    }

    def named(*names: str):
        arms = {name: {"cooldown": float(name)} if name[0].isdigit() else {"recipe": name} for name in names}
        return tiny(tmp_path, "-".join(names), arms=arms, against=names[0], **keys)

    def steps() -> int:
        return sum(
            len(path.read_text().splitlines())
            for path in (tmp_path / "state" / "trials").glob("*/events-*.jsonl")
        )

    if given["done"]:
        finish(named(*given["done"]), tmp_path / "state")
    experiment = named(*given["arms"])
    if reached := given["ended"] or given["killed"]:
        options = RunOptions(fork=given["fork"])
        with closing(Controller(experiment, tmp_path / "state", "cpu", Inline, None, options).run()) as run:
            next(
                step
                for step in run
                if sum(r.step for r in step.running) >= reached and (step.done or given["killed"])
            )
    before, planned = steps(), forecast(experiment, tmp_path / "state", "cpu")
    finish(experiment, tmp_path / "state")
    assert planned.steps == steps() - before
    assert planned.alone == 20 * planned.trials
    assert planned.resumed == (
        given["killed"] and reached - 1
    )  # a checkpoint is left when the step's record was taken
    assert planned.steps <= planned.alone - planned.resumed


def of_another_version(path: Path) -> None:
    with path.open("wb") as file:
        writer = SealedWriter(file)
        writer.write(b"state")
        writer.seal({"version": CHECKPOINT_VERSION + 1, "trial": "trial", "step": 3})


class WriteOnly(io.RawIOBase):
    """A file that can be written from its beginning to its end, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.content = b""

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        self.content += bytes(data)
        return len(bytes(data))


def test_a_checkpoint_is_hashed_while_it_is_written(tmp_path):
    file, path = WriteOnly(), tmp_path / "checkpoint.pt"
    writer = SealedWriter(file)
    torch.save({"model": torch.arange(100_000.0)}, writer)
    size = len(file.content)
    writer.seal({"version": CHECKPOINT_VERSION, "trial": "trial", "step": 3})
    path.write_bytes(file.content)
    about = unsealed(path)
    assert (about["size"], about["sha256"]) == (size, hashlib.sha256(file.content[:size]).hexdigest())
    assert torch.equal(torch.load(path)["model"], torch.arange(100_000.0))


class Clock:
    """Seconds that pass where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("cost", "apart"), [(0.5, 60), (3, 60), (30, 570)])
def test_checkpoints_take_a_twentieth_of_the_time_at_most(tmp_path, cost, apart):
    clock = Clock()
    checkpoints = Checkpoints(tmp_path / "checkpoint.pt", "trial", 60, clock=clock)
    began, written = [], 0.0
    for step in range(1, 3000):
        clock.now += 1.0
        if checkpoints.wanted(step)[1]:
            began.append(clock.now)
            clock.now += cost  # the state is gathered, and then written
            checkpoints.leave(step, {"step": step}, (False, True))
            written += cost
    assert began[0] == 60
    assert {later - earlier - cost for earlier, later in pairwise(began)} <= {apart, apart + 0.5, apart + 1}
    assert written <= 0.05 * clock.now + cost


def test_every_step_has_a_checkpoint_if_that_is_asked_for(tmp_path):
    clock = Clock()
    checkpoints = Checkpoints(tmp_path / "checkpoint.pt", "trial", 0, clock=clock)
    for step in range(1, 4):
        assert checkpoints.wanted(step)[1]
        clock.now += 30
        checkpoints.leave(step, {"step": step}, (False, True))


SPOILT = {
    "cut short": lambda path, content: path.write_bytes(content[:-1]),
    "a footer that was changed": lambda path, content: path.write_bytes(
        content.replace(b'"step": 3', b'"step": 4')
    ),
    "another version's": lambda path, content: of_another_version(path),
    "no checkpoint": lambda path, content: path.write_bytes(b""),
    "another trial's": lambda path, content: path.rename(path.parent.parent / "other" / path.name),
}


@pytest.mark.parametrize("what", SPOILT)
def test_a_checkpoint_that_no_trial_goes_on_from_is_not_counted(what, tmp_path):
    store = Store(tmp_path)
    for name in ("trial", "other"):
        store.folder(name).mkdir(parents=True)
    path = store.folder("trial") / "checkpoint.pt"
    Checkpoints(path, "trial", 0).leave(3, {"step": 3}, (False, True))
    assert (store.checkpoint_step("trial"), store.checkpoint_step("other")) == (3, 0)
    SPOILT[what](path, path.read_bytes())
    assert [store.checkpoint_step(name) for name in ("trial", "other")] == [0, 0]


TRUNK = {
    "shape": {"steps": 20, "eval_every": 20, "width": 16, "context": 8, "batch": 1},
    "telemetry": {"log": 1},
    "seeds": 1,
}


def left(state: Path) -> set[str]:
    """The shared checkpoints of a state folder."""
    return {path.name for path in (state / "checkpoints").iterdir()}


def interrupted(experiment, state: Path) -> None:
    """Run a sweep over cooldown until a shared state lies there, and leave it."""
    with closing(Controller(experiment, state, "cpu", Inline, None).run()) as run:
        next(step for step in run if (state / "checkpoints").exists() and step.running and step.done)
    assert left(state)


@pytest.mark.parametrize("then", ["without forks", "without the arms", "with one arm finished"])
def test_checkpoints_that_no_trial_can_use_any_more_go_at_the_end_of_a_sweep(then, tmp_path):
    interrupted(tiny(tmp_path, ablate={"cooldown": [0, 0.25, 0.5]}, **TRUNK), tmp_path)
    (tmp_path / "checkpoints" / "half.pt.123").write_bytes(b"written by a trial that was killed")
    edited = {"cooldown": [0, 0.25, 0.5]} if then == "without forks" else {"rht": [True, False]}
    edited = {"cooldown": [0]} if then == "with one arm finished" else edited
    finish(tiny(tmp_path, ablate=edited, **TRUNK), tmp_path, fork=then != "without forks")
    assert not left(tmp_path)


def test_checkpoints_that_another_unfinished_sweep_wants_stay(tmp_path):
    """Also those that both sweeps share; and all but the own ones, where the other does not say what it wants."""
    other = tiny(tmp_path, "other", ablate={"cooldown": [0, 0.25, 0.5]}, **TRUNK)
    interrupted(other, tmp_path)
    before = left(tmp_path)
    finish(tiny(tmp_path, ablate={"cooldown": [0, 0.25]}, **TRUNK), tmp_path)
    assert left(tmp_path) == before
    with closing(Ledger(tmp_path / "sweeps" / "other" / "ledger.db")) as book:
        book.db.execute("DELETE FROM sweep WHERE key IN ('shared', 'ended')")
    finish(tiny(tmp_path, "third", ablate={"rht": [True]}, **TRUNK), tmp_path)
    assert left(tmp_path) == before
    finish(other, tmp_path)
    assert not left(tmp_path)


def finish(experiment, state: Path, fork: bool = True) -> dict:
    """Every member's records, but for what differs between any two runs."""
    controller = Controller(experiment, state, "cpu", Inline, None, RunOptions(fork=fork))
    *_, outcome = controller.run()
    assert (outcome.status, outcome.failed) == ("done", 0)
    ledger = Ledger(controller.folder / "ledger.db")
    found = {
        (m.name, m.seed): [
            (step, name, value)
            for step, name, value, _ in ledger.records(m.trial)
            if not name.startswith(OWN)
        ]
        for m in ledger.members()
    }
    ledger.close()
    return {key: sorted(records) for key, records in found.items()}
