"""Training of a forked trial: the trunk up to its last position, then every window from the trunk's states.

`fork_design` defines what a window is. Here a trial trains the trunk only as far as nobody has left its
states, and then each window with its own model, optimizer and engine, which begin from a state of the trunk.
The steps that records are counted by go on over all windows: the trunk's first, then window after window.

An interrupted trial goes on in the window in which it was. What earlier windows ended with is part of its
checkpoint.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from statistics import fmean

from ablate.engines.routing import Routes
from ablate.recipes.recipe import Recipe
from ablate.training.checkpoints import Checkpoints, Readings, RunState
from ablate.training.distributed import world
from ablate.training.fork_design import Forks, Window, parts_of
from ablate.training.hyperparameters import Training
from ablate.training.loop import Loop, PreparedRun, Record, Twin
from ablate.training.metric_names import ENDINGS, plain_metric
from ablate.training.trial_run import Telemetry, TrialRun, beats

_TRAIN_LOSSES = frozenset({"train/loss", "train/recent_loss"})
"""Not recorded within windows, as no metric of an evaluation is: at a falling rate, and with a jump from each
window to the next, a curve of them says nothing."""

_NEVER = Telemetry(every=0, shadow=0, log=1 << 30)


class Trunk:
    """States of a trunk at the positions of its windows: in the trial's shared files, or in memory without
    any. Every method is collective. Rank 0 alone reads and writes."""

    def __init__(self, checkpoints: Checkpoints | None, begun: int = 0) -> None:
        """Begin with the shared files. `begun` is the step of the state that the trial itself continues from.
        States before it stay in memory: a file names the records that it was left after, and those before are
        another trial's."""
        self._checkpoints, self._ranks, self._begun = checkpoints, world(), begun
        self._kept: dict[int, RunState] = {}

    def has(self, step: int) -> bool:
        files = self._checkpoints.shared if self._checkpoints else {}
        return self._ranks.broadcast(step in self._kept or (step in files and files[step].exists()))

    def read(self, step: int) -> RunState | None:
        """Return the state after a step; None if there is none, or if its file is damaged."""
        state = deepcopy(self._kept.get(step))  # an optimizer trains the moments that it loads
        if state is None and self._checkpoints and step in self._checkpoints.shared:
            state = self._checkpoints.read(step)
        return self._ranks.broadcast(state)

    def leave(self, step: int, loop: Loop, wanted: bool) -> None:
        """Keep the state after `step` steps of the trunk, if a window begins there (`wanted`) or others want
        it."""
        lasting = self._checkpoints if step >= self._begun else None
        loop.leave(step, lasting)
        in_file = self._ranks.broadcast(bool(lasting and step in lasting.shared))
        if wanted and not in_file:
            self._kept[step] = deepcopy(loop.state(step))  # whose tensors change as training goes on


def train_forks(
    prepare: Callable[[Recipe], PreparedRun],
    config: Training,
    run: TrialRun,
) -> Iterator[Record]:
    """Train the trunk as far as needed, then all windows, and yield their records. OSError if a checkpoint
    cannot be written, or a state of the trunk cannot be read.

    The last record has `val/loss` and `val/loss_bf16` at the end of the longest window, as means over the
    positions; the same for parts of the validation data (`evaluated/<part>/...`); and every window's own
    (`fork/<position>/<window>/...`). The run ends early if a guard stops a window. All ranks call it.

    `prepare` returns the model with a recipe applied, and its data. `config` is the trunk's: a window begins
    with its rate at the position. The run's checkpoint files have the trunk's states, too.
    """
    forks, checkpoints, ranks = run.forks, run.checkpoints, world()
    assert forks, "a forked trial has windows"
    twin = Twin.of(run.recipe, run.engine) if run.twin else None
    state = ranks.broadcast(checkpoints.take() if checkpoints else None)
    begun = state["step"] if state else 0
    trunk = Trunk(checkpoints, begun)
    readings: Readings = dict(state.get("readings", {})) if state else {}
    left = [window for window in forks.cells if window.last > begun]

    def to_positions(missing: list[int]) -> Iterator[Record]:
        assert forks.trunk is not None
        records = _train_trunk(prepare(forks.trunk), config, missing, state, run, trunk)
        yield from (record for record in records if record.step > begun)

    missing = [p for p in sorted({window.position for window in left}) if not trunk.has(p)]
    if forks.trunk and missing:
        yield from to_positions(missing)
        if not trunk.has(missing[-1]):  # the guard stopped the trunk
            return
    for window in left:
        own = state if state and state["step"] > window.begun else None
        origin = None
        replays = run.recipe.experts.replays
        needs_trunk = forks.trunk and (own is None or replays)
        if needs_trunk and (origin := trunk.read(window.position)) is None:
            begun = max(begun, window.begun)  # its file was removed or damaged
            yield from to_positions([window.position])
            if (origin := trunk.read(window.position)) is None:
                raise OSError(
                    f"the state of the trunk after step {window.position} can be written but not read"
                )
        routes = Routes()
        if replays:
            unquantised = prepare(Recipe(dtype=run.recipe.dtype))
            for _ in beats(_recorded(routes, unquantised, config, (forks, window), deepcopy(origin))):
                yield Record(max(begun, window.begun), {})
            del unquantised
        loop = Loop(prepare(run.recipe), config, run.telemetry, (forks, window), twin)
        first = _begin(loop, window, own, origin, twin)
        if replays:
            routes.replay(loop.run.engine, loop.run.model)
        state = own = origin = None  # as large as the model and its moments
        leave = partial(loop.leave, checkpoints=checkpoints, readings=readings)
        for record in loop.records(first, loop.last, leave):
            if record and not ENDINGS.isdisjoint(record.metrics):
                yield record
                return
            if loop.over:
                assert loop.evaluated is not None, "a window ends with an evaluation"
                readings[window.key] = dict(loop.evaluated)
            if record:
                # Levels are in the trial's last record alone.
                levels = {*_TRAIN_LOSSES, *map(plain_metric, loop.evaluated or ())}
                kept = {name: value for name, value in record.metrics.items() if name not in levels}
                record = record._replace(metrics=kept)
            yield from filter(None, [_ended(record, window, readings, forks) if loop.over else record])
        del loop, leave  # before the next window's is made: two models may not fit


def _recorded(
    routes: Routes, run: PreparedRun, config: Training, window: tuple[Forks, Window], origin: RunState | None
) -> Iterator[None]:
    """Train a window without quantisation, record its routes, and yield after each step. An interrupted trial
    records them again: they are a function of the trunk's state."""
    loop = Loop(run, config, _NEVER, window)
    first, end = _begin(loop, window[1], None, origin, None), loop.last
    loop.last += 1  # no step of it is the last, which is evaluated
    routes.record(run.engine, run.model)
    for step, _ in enumerate(loop.records(first, end, lambda step: None), first):
        if loop.over:
            raise ValueError(
                f"experts.routing replay: the guard stopped the unquantised training at step {step}, so there"
                " are no routes to replay; use routing: free"
            )
        yield


def _train_trunk(
    prepared: PreparedRun,
    config: Training,
    missing: Sequence[int],
    state: RunState | None,
    run: TrialRun,
    trunk: Trunk,
) -> Iterator[Record]:
    """Train the trunk to the last missing position, from the furthest state before the first."""
    loop = Loop(prepared, config, run.telemetry)
    shared = run.checkpoints.shared if run.checkpoints else {}
    earlier = sorted(step for step in shared if step < missing[0])
    start = state if state and state["step"] < missing[0] else None
    for step in reversed(world().broadcast(earlier)):
        if start is not None and start["step"] >= step:
            break
        if trunk.has(step) and (found := trunk.read(step)):
            start = found
            break
    first = loop.restore(start)
    records = loop.records(first, missing[-1], lambda step: trunk.leave(step, loop, step in missing))
    yield from filter(None, records)
    if not loop.over:
        trunk.leave(missing[-1], loop, True)


def _begin(
    loop: Loop, window: Window, own: RunState | None, origin: RunState | None, twin: Twin | None
) -> int:
    """Restore the state in which the window's next step begins, and return that step by the trunk's clock:
    the trial's `own` checkpoint within this window, or, if it has not begun, the trunk's state `origin` at
    its position (None without a trunk)."""
    if own is not None:
        return loop.restore(own) - loop.counted
    if origin is not None:
        loop.restore_weights(origin)
    if twin and not twin.stream:
        loop.move_weights()
    return window.position


def _ended(record: Record | None, window: Window, readings: Readings, forks: Forks) -> Record:
    """Return the record of a window's last step with the window's readings; of the last, with all."""
    assert record is not None, "the last step of a window is recorded"
    own = {window.metric(name): fmean(losses) for name, losses in readings[window.key].items()}
    if window != forks.cells[-1]:
        return record._replace(metrics=record.metrics | own)
    keys = [Window(position, forks.windows[-1], 0).key for position in forks.positions]
    parts: dict[str, float] = {}
    for name in readings[window.key]:
        batches = [fmean(each) for each in zip(*(readings[key][name] for key in keys), strict=True)]
        parts[plain_metric(name)] = fmean(batches)
        shares = parts_of(batches, name)
        parts |= shares if len(shares) > 1 else {}
    return record._replace(metrics=record.metrics | own | parts)
