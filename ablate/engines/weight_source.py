"""The content of a weight that a cast was made of, to know when the cast may be used again: `Source`."""

from torch import Tensor


class Source:
    """Content of a weight at one moment: equal for the same memory in the same version.

    A version alone would not do: another tensor in the weight's place (torch.func.functional_call,
    `load_state_dict(assign=True)`, `p.data = ...`) often has the same one. The alias keeps the memory, so
    that a later tensor cannot take its address. Not seen is a change in place through `.data`, which torch
    does not count.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.detach()
        # An inference tensor counts no versions, so it equals none.
        self.version = object() if weight.is_inference() else weight._version

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Source)
            and self.version == other.version
            and self.weight.data_ptr() == other.weight.data_ptr()
            and self.weight.shape == other.weight.shape
            and self.weight.stride() == other.weight.stride()
            and self.weight.dtype == other.weight.dtype
        )
