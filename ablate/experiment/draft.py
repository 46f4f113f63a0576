"""An experiment file that has been read, before it is known that it can be run: `Draft`, and its baseline."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ablate.engines.hardware import Machine
from ablate.experiment.arms import Arm, Knobs, StartingPoint
from ablate.experiment.engine_selection import Choice, choose
from ablate.experiment.schema import ExperimentFile, Metric
from ablate.experiment.search_space import Dimension
from ablate.experiment.yaml_document import Document


@dataclass(frozen=True)
class Against:
    """Baseline that a file names: knobs, applied at each arm's own workload values, or one arm, for all
    others."""

    knobs: Knobs
    arm: Arm | None = None
    """The arm that was named, which keeps its own workload values."""

    def pins(self, knob: str) -> bool:
        """Return True if the baseline itself sets this workload knob, a part of it, or a path that contains
        it."""
        return any(f"{knob}.".startswith(f"{own}.") or f"{own}.".startswith(f"{knob}.") for own in self.knobs)


@dataclass(frozen=True)
class Draft:
    """Contents of an experiment file with their types: its knobs, arms and metrics."""

    name: str
    document: Document
    keys: ExperimentFile
    """Keys of the file with their types and defaults; with all arms, `design.bad` is the name of one."""
    base: StartingPoint
    space: Mapping[str, Dimension]
    """Knobs of `ablate`."""
    metrics: tuple[Metric, ...]
    """Metrics by which arms are compared, the main one first."""
    device: str | None
    """Class of device that trials will run on; None: that of this machine."""
    machine: Machine | None
    """Machine that the engine is chosen for; None: this one."""
    arms: tuple[Arm, ...] = ()
    """Arms that the file lists, then also those that are added, baselines first: all arms of a grid, only
    the baseline of a search."""
    ends: tuple[Arm, ...] = ()
    """Arms at the ends of a search's knobs, which stand for those that it will propose."""
    against: Against = Against({})
    added: frozenset[str] = frozenset()
    """Names of those baselines that the file does not list."""

    @cached_property
    def choice(self) -> Choice:
        """Engine of all arms. ValueError if the engine that the file names cannot compute them."""
        return choose(
            self.keys.engine,
            (*self.arms, *self.ends),
            self.device,
            layout=self.keys.resources.most,
            machine=self.machine,
        )

    def baseline(self, knobs: Knobs) -> Arm:
        """Return the baseline of an arm with these knobs. KnobError if it cannot be built. It is the arm that
        the file names, or the baseline's knobs at the arm's workload values, except for values that the
        baseline sets itself."""
        if self.against.arm is not None:
            return self.against.arm
        workload = {
            knob: value
            for knob, value in knobs.items()
            if knob.startswith("workload.") and not self.against.pins(knob)
        }
        return self.base.arm({**self.against.knobs, **workload})
