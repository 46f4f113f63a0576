"""Checks of modules of experts that have their layers: `refuse_other` and `refuse_parts`.

The quantised forward pass takes the place of a module's own, which may do more: scale its result, or lay its
weights out otherwise than its attributes say. Both are called once, unquantised, on the same random tokens.
"""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from ablate.errors import first_line, some_of

_MOST = 0.05
"""Largest relative L2 distance: ten times what rounding operands to bf16 makes."""


def refuse_other(module: nn.Module, name: str) -> None:
    """Raise ValueError if a module that is not transformers' own computes something else than its experts.
    Its instance has the new forward pass, with products in high precision."""
    weight = module.down_proj
    if type(module).__module__.startswith("transformers.") or weight.is_meta:
        return
    generator = torch.Generator().manual_seed(0)
    width = weight.shape[2 if module.is_transposed else 1]
    tokens = module.num_experts  # one for each expert
    x = torch.randn(tokens, width, generator=generator).to(weight)
    index = torch.arange(tokens, device=weight.device)[:, None]
    factors = (torch.rand(tokens, 1, generator=generator) + 0.5).to(weight)
    advice = (
        "its attributes must say how its weights are laid out, and its forward pass must add up gate, up and"
        " down of each token's experts and nothing else (docs/reference/families.md)"
    )
    try:
        with torch.no_grad():
            own = type(module).forward(module, x, index, factors).double()
            apart = (module.forward(x, index, factors) - own).norm()
            same = bool(apart <= _MOST * own.norm())
    except (AttributeError, RuntimeError, TypeError, IndexError, ValueError) as error:
        reason = first_line(error)
        raise ValueError(f"{name}: its experts cannot be computed ({reason}); {advice}") from None
    if not same:
        distance = float(apart / own.norm())
        raise ValueError(
            f"{name}: its own forward pass differs by {distance:.2g} of its result from its experts; {advice}"
        )


def refuse_parts(stacks: Mapping[str, nn.Module], wanted: Callable[[str, nn.Module], bool]) -> None:
    """Raise ValueError if a filter, as in `emulated.convert`, takes a stack of experts and leaves out layers
    of it, which it cannot do. The stacks, by name, have their layers."""
    for name, module in stacks.items():
        left = [layer.name for layer in module.forward.layers if not wanted(layer.name, layer)]
        if left:
            raise ValueError(
                f"the filter leaves out {some_of(left, 1)} of a stack that it takes; leave out {name}, or"
                f' keep single experts in high precision by a layer rule: {{match: {{name: "{left[0]}"}}}}'
                " in recipe.layers.rules"
            )
