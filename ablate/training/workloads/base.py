"""Contract of a workload: what plans, sweeps and reports ask of it, and what it declares that it can do.

A workload is anything that yields records, given a recipe and a seed: one class in a file of this folder, and
a line in `WORKLOADS`. Nobody asks for its class. A caller asks for an ability, which is one of the flags
below, or for a property that is None without it. `tests/training/workloads/test_contract.py` uses each
ability that a class declares, and checks that those it does not declare are refused.

Importing a workload does not import torch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ablate.files import Json
from ablate.numerics.spec import Spec
from ablate.recipes.experts import ONLY_IN_FORKS
from ablate.recipes.layers import Layer, blocks_in
from ablate.recipes.recipe import Recipe, Run
from ablate.training.hyperparameters import Training

if TYPE_CHECKING:
    from ablate.training.data.sources import TextSource
    from ablate.training.loop import PreparedRun, Record
    from ablate.training.models.source import Outline
    from ablate.training.own_code.exports import Exported
    from ablate.training.trial_run import TrialRun


class Workload(Spec):
    """Frozen spec of what a trial computes beside its recipe, seed and engine."""

    VERSION: ClassVar[int]
    """Raise it by hand if the same spec would give other bits."""
    METRICS: ClassVar[frozenset[str] | None]
    """Metrics that an experiment can compare; None: any name."""
    UNITS: ClassVar[dict[str, str]] = {}
    """Units of metrics, for those that have one."""
    SAME_BITS: ClassVar[frozenset[str]] = frozenset()
    """Fields that change how a run is written down or computed, but none of its numbers."""

    own_code: ClassVar[bool] = False
    """The training is a user's own code: its metrics, its speed and its use of GPUs are not known before it
    has run, and `files` are part of its identity."""
    forks: ClassVar[bool] = False
    """It can train the windows of a forked design. Own code does so from `own_checkpoint`, other workloads
    from a trunk that they train."""
    twins: ClassVar[bool] = False
    """It can run a recipe and seed a second time with a difference that does not matter."""
    measures: ClassVar[bool] = False
    """Telemetry sets the steps at which operands and gradients of its layers are measured."""
    resumes: ClassVar[bool] = False
    """It writes the checkpoints that it is given, and continues from them."""
    trains: ClassVar[bool] = True
    """False: it measures tensors, and has no model."""
    pretrained: ClassVar[bool] = False
    """Each run begins from trained weights."""
    context_free: ClassVar[bool] = False
    """Its facts (`summary`) have the val/loss of a model that ignores its input."""
    in_process: ClassVar[bool] = True
    """It computes in the trial's own process, which then starts the GPU."""
    steps_timed: ClassVar[bool] = False
    """Its tokens/s are those of steps alone, without the loading of data."""

    if TYPE_CHECKING:  # fields of some workloads, which must not replace a property

        @property
        def steps(self) -> int:
            """Length of a run."""

        @property
        def tokens_per_step(self) -> int:
            """Tokens, or samples, of one step."""

    @property
    def training(self) -> Training | None:
        """Settings of the training loop; None if it does not train a model of this package. With them it can
        be computed by several ranks, on every engine, and its final weights can be kept."""
        return None

    @property
    def imports(self) -> tuple[str, ...]:
        """Modules that a trial needs and that take seconds to import; a worker imports them once."""
        return ()

    @property
    def linear_layers(self) -> tuple[Layer, ...]:
        """Layers that a recipe applies to and layer rules select from, in the model's order."""
        return ()

    @property
    def linears(self) -> tuple[str, ...]:
        return tuple(layer.name for layer in self.linear_layers)

    @property
    def has_experts(self) -> bool:
        """True if layers are matrices of experts that a model packs into one tensor."""
        return any("Expert" in layer.classes for layer in self.linear_layers)

    @property
    def blocks(self) -> int:
        """Number of transformer blocks, which a layer policy counts."""
        return blocks_in(self.linear_layers)

    @property
    def data_source(self) -> TextSource | None:
        """Source of its text, if it has one, for the ledger to describe."""
        return None

    @property
    def outline(self) -> Outline | None:
        """Shape of its model, if that is one of another library."""
        return None

    @property
    def of_readings(self) -> frozenset[str]:
        """Metrics of the recipes by which evaluations also read the weights."""
        return frozenset()

    @property
    def stacks(self) -> tuple[str, ...]:
        """Training stacks that recipes are exported to; empty if an engine computes them."""
        return ()

    def command(self, recipe: Recipe, seed: int, device: str) -> Exported | None:
        """Return the command of a trial for readers, `TRIAL` for its folder; None if it is not a command."""
        return None

    @property
    def own_checkpoint(self) -> str | None:
        """File or folder of weights that own code starts from; None if there are none."""
        return None

    @property
    def length(self) -> Run:
        """Length of a run, on which schedules depend."""
        return Run(self.steps, self.tokens_per_step)

    @abstractmethod
    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, reason) for each field that cannot run: contradictions and unreadable files."""

    def remarks(self) -> Iterator[str]:
        """Yield one sentence for each weakness of a configuration that can run all the same."""
        return iter(())

    def contradictions(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        """Yield (field, reason) for each field that cannot run with an arm's recipe, with its layer rules and
        schedule; `recipe.<path>` is a field of the recipe."""
        return iter(())

    def computed(self, recipe: Recipe) -> Recipe:
        """Return the recipe without the products that a run never computes."""
        return recipe

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a digest that identifies the content of the data."""

    def files(self) -> Iterator[Path]:
        """Yield the files of own code whose content the fingerprint has; OSError, SyntaxError as it."""
        return iter(())

    @abstractmethod
    def identity(self) -> dict[str, Json]:
        """Return the fields that determine the numbers, without paths."""

    @abstractmethod
    def recorded(self, metric: str) -> range:
        """Return the steps before the last at which every trial has the metric, to prune by."""

    def summary(self) -> dict[str, float]:
        """Return facts about the data that put the numbers in proportion; by default none."""
        return {}

    @abstractmethod
    def cost(self, quantised: bool) -> float:
        """Return rough CPU seconds of one trial, of a recipe that quantises any product or none."""

    def prepare(self, recipe: Recipe, seed: int, device: str, engine: str = "emulated") -> PreparedRun:
        """Return model and data with the recipe applied by an engine of `engines.ENGINES`, on `cpu` or
        `cuda`. The seed is that of weights, data order and rounding. ValueError if the engine cannot apply
        the recipe to this model, or there is none."""
        raise ValueError(f"workload {type(self).__name__.lower()} trains no model of this package")

    def records(self, run: TrialRun) -> Iterator[Record]:
        """Return the records of a trial, one after each step that measured something. All ranks call it.
        ValueError if the workload has not the ability that the run needs, engine or ranks cannot compute it,
        or the data are damaged; OSError if the data cannot be read, or a checkpoint cannot be written."""
        for needed, ability in ((run.forks, "forks"), (run.twin, "twins")):
            if needed and not getattr(self, ability):
                raise ValueError(f"workload {type(self).__name__.lower()} has no {ability}")
        if run.recipe.experts.replays and not run.forks:
            raise ValueError(f"recipe.experts.routing replay {ONLY_IN_FORKS}")
        return self.compute(run)

    @abstractmethod
    def compute(self, run: TrialRun) -> Iterator[Record]:
        """Yield the records of a trial that this class is able to run."""
