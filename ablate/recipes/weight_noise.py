"""Description of Gaussian noise on the weights of norms, which falls over a run (QeRL, arXiv 2510.11696)."""

from pydantic import Field, model_validator

from ablate.numerics.spec import Spec


class Noise(Spec):
    """Noise on the norms that feed a block's linear layers, drawn anew for each micro-batch of training.

    QeRL adds N(0, sigma^2) to the weight of an RMSNorm. The run is cut into `stages + 1` equal parts. The
    first has no noise, as in the authors' public code; then sigma falls exponentially from `start` to `end`.
    A window of a forked design has the noise of the steps that it begins at. Not modelled: reinforcement
    learning, whose rollouts QeRL perturbs (here: every forward pass of training).
    """

    start: float = Field(1e-2, gt=0, le=1)
    """Standard deviation in the first stage with noise."""
    end: float = Field(1e-4, gt=0, le=1)
    """Standard deviation in the last stage."""
    stages: int = Field(10, ge=2, le=10**6)
    """Number of stages with noise."""

    @model_validator(mode="after")
    def _falls(self) -> "Noise":
        if self.end > self.start:
            raise ValueError(f"weights.noise.end {self.end:g} is above start {self.start:g}: the noise falls")
        return self

    def sigma(self, step: int, steps: int) -> float:
        """Return the standard deviation in an optimizer step, from 0; 0 in the first part of the run."""
        stage = min(step * (self.stages + 1) // steps, self.stages)
        if stage == 0:
            return 0.0
        return self.start * (self.end / self.start) ** ((stage - 1) / (self.stages - 1))
