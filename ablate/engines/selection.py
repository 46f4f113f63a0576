"""The layers of a model that an engine replaces (`quantisable`), and their replacement (`replaced`).

A layer is replaced if it lies in a block, is a linear layer (linears.py), and is not `exempt`. It may be
registered under several names, and is then replaced under all of them:

    for engine in (emulated, scaled_mm, transformer_engine):
        replaced(model, quantisable(model), make)           # make(layer, its first name)

Refused, with a ValueError: a layer whose weight is computed before each call, a layer that is used inside and
outside the blocks, a layer that a proof shows to compute something else, and a model of which nothing would
be replaced. The message of the latter names what was passed over, and why.
"""

import warnings
from collections.abc import Callable, Collection, Sequence
from difflib import get_close_matches

from torch import nn

from ablate.engines.blocks import layer_table, left
from ablate.engines.emulated_layer import EmulatedLinear
from ablate.engines.exempt import altered, exempt
from ablate.engines.linears import (
    Linears,
    is_linear,
    is_named,
    is_taken,
    is_transposed,
    needs_proof,
    refuse_idle,
    refuse_other,
)
from ablate.errors import by_key
from ablate.recipes.layers import LISTS, BlockOf, block_name


def replaced(
    model: nn.Module,
    first: Sequence[str],
    make: Callable[[nn.Module, str], EmulatedLinear],
    block: BlockOf = block_name,
    left_out: Collection[str] = (),
) -> None:
    """Replace layers, given by their first names, under all their names, by `make(layer, first name)`.
    `left_out` are those that a user's filter left out. ValueError if there is no layer, one is shown not to
    be a linear layer, or one with a transposed parameter has adapters already; nothing is replaced then."""
    if not first:
        raise ValueError(_why_nothing(model, block, left_out))
    for name in first:
        layer = model.get_submodule(name)
        around = model.get_submodule(name.rpartition(".")[0])
        if is_transposed(layer) and getattr(around, "base_layer", None) is layer:
            raise ValueError(  # peft would add its update to a view that is turned: wrong, or lost
                f"{name}: a {type(layer).__name__} that has adapters already cannot take their merge once it"
                " is converted; call get_peft_model after the conversion"
            )
        if needs_proof(type(layer)):
            refuse_other(layer, name)
    if unknown := [
        listed for listed in _unknown_lists(model, block) if not any(n.startswith(listed) for n in first)
    ]:
        warnings.warn(f"not quantised: {_nearest(unknown)}", stacklevel=4)
    names = all_names(model, is_linear)
    for name in first:
        layer = make(model.get_submodule(name), name)
        for alias in names[name]:
            parent, _, child = alias.rpartition(".")
            setattr(model.get_submodule(parent), child, layer)


def all_names(model: nn.Module, chosen: Callable[[nn.Module], bool]) -> dict[str, list[str]]:
    """Return all names of each chosen module, keyed by the first."""
    modules = model.named_modules(remove_duplicate=False)
    by_module = by_key((module, name) for name, module in modules if chosen(module))
    return {names[0]: names for names in by_module.values()}


def quantisable(model: nn.Module, block: BlockOf = block_name, linears: Linears = ()) -> list[str]:
    """Return the names of the layers that `convert` replaces: every nn.Linear in a block, but for those that
    are `exempt`, such as routers.

    Among other classes, those of linears.py are replaced, and those that `linears` selects, by class or by
    globs on names. A layer that has several names is listed by its first. ValueError if the weight of a layer
    is computed before each call, or its `forward` was replaced, which conversion would bypass; a layer is
    used outside the blocks too; or one of `linears` selects none.
    """
    result, present = [], []
    for name, names in all_names(model, is_linear).items():
        inside = [alias for alias in names if block(alias) is not None]
        module = model.get_submodule(name)
        if not inside or isinstance(module, EmulatedLinear):
            continue
        present.append((inside[0], module))
        if not is_named(inside[0], linears) and exempt(model, inside[0], block(inside[0]) or ""):
            continue
        taken = is_taken(module, inside[0], linears)
        if why := altered(module, taken):
            raise ValueError(f"{inside[0]}: {why}")
        if taken:
            if outside := sorted(set(names) - set(inside)):
                raise ValueError(
                    f"{inside[0]} and {outside[0]} are one nn.Linear, inside a block and outside;"
                    " give each a layer of its own"
                )
            result.append(name)
    refuse_idle(linears, present)
    return result


def _unknown_lists(model: nn.Module, block: BlockOf) -> list[str]:
    """Return the module lists whose members have linear layers and are no blocks."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and block(f"{name}.0.") is None
        and any(is_linear(part) for member in module for part in member.modules() if part is not member)
    ]


def _why_nothing(model: nn.Module, block: BlockOf, left_out: Collection[str]) -> str:
    if any(isinstance(module, EmulatedLinear) for module in model.modules()):
        return "the model is converted already; convert it once"
    rows = layer_table(model, block, left_out)
    if any(row.block for row in rows):
        return f"nothing of the model would be quantised; passed over, the largest first: {left(rows)}"
    if unknown := _unknown_lists(model, block):
        return f"nothing of the model would be quantised: {_nearest(unknown)}"
    return (
        "nothing of the model would be quantised: it has no nn.Linear in a list of numbered blocks;"
        f" put its blocks in an nn.ModuleList that is named {', '.join(LISTS[:-1])} or {LISTS[-1]}"
    )


def _nearest(lists: Sequence[str]) -> str:
    near = get_close_matches(lists[0].rpartition(".")[2], LISTS, 3, 0.3) or LISTS
    return (
        f"the blocks in {lists[0]!r}, since that is no name of a list of blocks;"
        f" rename it, the nearest: {', '.join(near)}"
    )
