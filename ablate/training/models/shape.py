"""Shape of this package's transformer, as the workload gpt configures it. Torch-free."""

from typing import Literal

from pydantic import Field

from ablate.numerics.spec import Spec
from ablate.training.hyperparameters import MOST_LAYERS, MOST_WIDTH, Training

_MOST_EXPERTS = 512


class MixtureOfExperts(Spec):
    """Experts in place of the MLP of each block (`models.mixture`)."""

    count: int = Field(ge=2, le=_MOST_EXPERTS)
    """Number of experts."""
    top_k: int = Field(2, ge=1, le=_MOST_EXPERTS)
    """Experts that each token is sent to."""
    hidden: int | None = Field(None, ge=16, le=1 << 48)
    """Width of one expert; null: the MLP's width divided by top_k + shared, rounded up to a multiple of 32.
    """
    shared: int = Field(0, ge=0, le=_MOST_EXPERTS)
    """Further experts that every token passes through, as one MLP."""
    auxiliary: float = Field(0.01, ge=0)
    """Weight of the load-balancing loss of Switch Transformer; 0: none. It is recorded apart, as
    train/imbalance."""


class TransformerShape(Training):
    """Sizes of a `Transformer`, beside the settings of its training."""

    layers: int = Field(4, ge=1, le=MOST_LAYERS)
    width: int = Field(128, ge=16, le=MOST_WIDTH)
    heads: int = Field(4, ge=1, le=MOST_WIDTH)
    kv_heads: int | None = Field(None, ge=1, le=MOST_WIDTH)
    """Key and value heads shared by groups of query heads; null: as many as heads."""
    mlp: Literal["swiglu", "relu2"] = "swiglu"
    hidden: int | None = Field(None, ge=16, le=1 << 48)
    """Width of the MLP; null: 8/3 of the width for swiglu (rounded up to a multiple of 32), 4 for relu2."""
    experts: MixtureOfExperts | None = None
    """Mixture of experts in place of each MLP, such as {count: 8}; null: none."""
    rope_theta: float = Field(10000.0, gt=1)

    @property
    def hidden_width(self) -> int:
        """MLP's width, computed from the other fields if it is null."""
        if self.hidden is not None:
            return self.hidden
        return -(-8 * self.width // 96) * 32 if self.mlp == "swiglu" else 4 * self.width

    @property
    def expert_width(self) -> int:
        """Width of one expert; 0 without experts."""
        if self.experts is None:
            return 0
        parts = self.experts.top_k + self.experts.shared
        return self.experts.hidden or -(-self.hidden_width // (32 * parts)) * 32
