"""Blocks of a model, found by its structure, and the reason why each of its matrices is quantised or not.

Recipes speak of transformer blocks: their linear layers are quantised, embeddings and the output head are
not, and "the last two blocks" stay in high precision. A model of somebody else's names its blocks as it
likes. They are found by structure, from the outside in:

    self.stages = nn.ModuleList([Stage(), Stage()])     each member of a module list is a block
    nn.Sequential(Stage(), Stage())                     so is each of several members of one class
    self.stage1, self.stage2 = Stage(), Stage()         so are siblings of one class, if there is no list

A module without a linear layer inside is no block. If a model has module lists with well-known names
(`blocks`, `layers`, `h`, ...), these are its blocks and no others are looked for.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from ablate.engines import experts
from ablate.engines.emulated_layer import EmulatedLinear
from ablate.engines.exempt import exempt
from ablate.engines.expert_layers import incomplete, is_packed
from ablate.engines.linears import is_linear, is_taken, needs_proof
from ablate.errors import by_key, nearest, some_of
from ablate.recipes.layers import BlockOf, block_name
from ablate.recipes.recipe import Placement

_NAMED = 5
"""Layers in high precision by one part of a recipe that `summary` names."""
_LISTED = 5
"""Reasons for layers left out that `left` names."""


class LayerRow(NamedTuple):
    """One matrix of a model that a matrix product multiplies by, and whether the recipe applies to it."""

    name: str
    """Qualified name of its module, or of the parameter where a module holds several."""
    shape: tuple[int, ...]
    """Shape of the weight, [out, in] of an nn.Linear."""
    weights: int
    """Number of elements."""
    block: str | None
    """Name of the block that it lies in; None for none."""
    converted: bool
    reason: str
    """Reason if it is not converted; empty if it is."""
    proven: str = ""
    """Its class, if it was converted because a proof showed that it is a linear layer."""


def find_blocks(model: nn.Module, pattern: str | None = None) -> tuple[str, ...]:
    """Return the names of a model's blocks, converted or not, in its order; none lies in another. `pattern`:
    glob on names (ValueError if it matches no module with a linear layer); None: by structure."""
    # Under all its names: a block that a model calls several times is a block each time.
    modules = model.named_modules(remove_duplicate=False)
    holders = [name for name, module in modules if name and _linears(module)]
    if pattern is not None:
        matched = [name for name in holders if fnmatchcase(name, pattern)]
        if not matched:
            raise ValueError(
                f"blocks {pattern!r} matches no module with a linear layer; {nearest(pattern, holders)}"
            )
        return _outermost(matched)
    named = (block_name(f"{name}.") for name in holders if not is_linear(model.get_submodule(name)))
    if blocks := tuple(dict.fromkeys(filter(None, named))):
        return blocks
    parents = model.named_modules(remove_duplicate=False)
    siblings = (child for name, parent in parents for child in _alike(_holders(parent, name)))
    return _outermost(_listed(model)) or _outermost(siblings)


def block_finder(blocks: Collection[str]) -> BlockOf:
    """Return a function that returns the block of a module, given their names; None for a module in none."""
    known = frozenset(blocks)

    def block(name: str) -> str | None:
        parts = name.split(".")
        return next((b for n in range(1, len(parts) + 1) if (b := ".".join(parts[:n])) in known), None)

    return block


def layer_table(model: nn.Module, block: BlockOf, left_out: Collection[str] = ()) -> list[LayerRow]:
    """Return a row for every matrix of a converted model, embeddings and convolutions excepted. `left_out`:
    layers that the user's filter left out. ValueError for a parameter that has no shape yet."""
    rows, seen = [], set()
    for name, module in model.named_modules():
        for parameter, weight in module.named_parameters(recurse=False):
            if is_lazy(weight):
                raise ValueError(
                    f"{name}: its {parameter} has no shape before the first call; call the model once, and"
                    " convert it then"
                )
            known = isinstance(module, nn.Embedding) or (
                type(module).__name__.startswith("Conv") and weight.ndim > 2
            )
            thin = min(weight.shape, default=0) < 2 and not is_linear(module)
            bias = parameter.endswith("_bias") and is_packed(module)
            if weight.ndim < 2 or known or thin or bias or id(weight) in seen:
                continue
            seen.add(id(weight))
            path = name if is_linear(module) else f"{name}.{parameter}".lstrip(".")
            reason = "left out by the filter" if name in left_out else why_left(model, name, block(name))
            original = module.original if isinstance(module, EmulatedLinear) else nn.Linear
            proven = original.__name__ if needs_proof(original) else ""
            shape, size = tuple(weight.shape), weight.numel()
            rows.append(LayerRow(path, shape, size, block(name), not reason, reason, proven))
    return rows


def why_left(model: nn.Module, name: str, block: str | None) -> str:
    """Return why the matrices that a module has as parameters of its own stay in high precision; "" if they
    do not. `block` is the one that it lies in, None for none."""
    module = model.get_submodule(name)
    kind = type(module).__name__
    if isinstance(module, EmulatedLinear) or experts.is_attached(module):
        return ""
    if isinstance(module, nn.MultiheadAttention):
        return "nn.MultiheadAttention multiplies by its parameters itself (give it nn.Linear projections)"
    if reason := incomplete(module):
        return reason
    if "expert" in kind.lower() and not is_linear(module):
        return f"the experts' weights, packed into one tensor by {kind}, which does not describe its layout"
    if not is_linear(module):
        return f"a parameter of {kind}, which is no nn.Linear"
    if block is None:
        return "outside of the blocks"
    if reason := exempt(model, name, block):
        return reason
    if is_taken(module, name):
        return "not converted"
    reason = f"a subclass of nn.Linear ({kind}), which may compute something else"
    remedy = f" (if it computes x W^T + b, linears=[{kind}] takes it)"
    return reason if type(module).__module__.startswith("transformers.") else reason + remedy


@contextmanager
def passed_over(names: set[str]) -> Iterator[set[str]]:
    """Add the classes of layers that are called within this context and that no recipe applies to, since they
    are subclasses of nn.Linear with code of their own."""

    def look(module: nn.Module, *_: object) -> None:
        if isinstance(module, nn.Linear) and not isinstance(module, EmulatedLinear):
            names.update([type(module).__name__] * needs_proof(type(module)))

    handle = nn.modules.module.register_module_forward_hook(look)
    try:
        yield names
    finally:
        handle.remove()


def converted_share(rows: Sequence[LayerRow]) -> float:
    """Return the share of the matrices' weights that are converted."""
    return sum(row.weights for row in rows if row.converted) / max(1, sum(row.weights for row in rows))


def left(rows: Iterable[LayerRow]) -> str:
    """Name the largest matrices that are not converted, one for each reason, and count the others."""
    passed = sorted((row for row in rows if not row.converted), key=lambda row: -row.weights)
    by_reason = by_key((row.reason, row) for row in passed)
    return "; ".join(
        f"{first.name} {list(first.shape)}{f' and {len(more)} more' if more else ''}: {reason}"
        for reason, (first, *more) in [*by_reason.items()][:_LISTED]
    )


def summary(rows: Sequence[LayerRow], placements: Sequence[Placement]) -> str:
    """Describe a converted model: numbers of layers and stacks of experts, their share, and what is left.
    `rows`: all its matrices; `placements`: its converted layers, by the part of the recipe that decides."""
    done = [row for row in rows if row.converted]
    stacks = [row for row in done if len(row.shape) > 2]
    parts = [f"{len(done) - len(stacks)} layers"] if len(done) > len(stacks) or not stacks else []
    parts += [f"{len(stacks)} stacks of {stacks[0].shape[0]} experts"] if stacks else []
    head = f"{' and '.join(parts)} converted, {converted_share(rows):.1%} of the weights"
    proven = Counter(row.proven for row in done if row.proven)
    shown = [f"{count} of them by proof that {kind} is a linear layer" for kind, count in proven.items()]
    others = [f"  {row.name} {list(row.shape)}: {row.reason}" for row in rows if not row.converted]
    kept = [
        f"  {len(part.layers)} layer{'s' * (len(part.layers) > 1)} by"
        f" {'counts of blocks' if part.decider == 'skipped' else 'a rule'}:"
        f" {some_of([layer.name for layer in part.layers], _NAMED)}"
        for part in placements
        if part.products is None
    ]
    kept = ["in high precision:", *kept] if kept else []
    return "\n".join((head, *shown, *kept, *(["not converted:", *others] if others else ())))


def _linears(module: nn.Module) -> bool:
    return any(is_linear(part) or is_packed(part) for part in module.modules())


def _holders(parent: nn.Module, prefix: str) -> dict[str, nn.Module]:
    """Return the children of a module that hold linear layers and are none themselves, by full name."""
    return {
        f"{prefix}.{name}".lstrip("."): child
        for name, child in parent._modules.items()  # named_children leaves out repeated ones
        if child is not None and not is_linear(child) and _linears(child)
    }


def _listed(model: nn.Module) -> Iterator[str]:
    """Yield the members of module lists, and those of sequences that have several members of one class."""
    for name, parent in model.named_modules(remove_duplicate=False):
        children = _holders(parent, name)
        if isinstance(parent, nn.ModuleList) or (isinstance(parent, nn.Sequential) and _alike(children)):
            yield from children


def _alike(children: dict[str, nn.Module]) -> list[str]:
    """Return the names of those children whose class another child has too."""
    classes = by_key((type(child), name) for name, child in children.items())
    return [name for names in classes.values() if len(names) > 1 for name in names]


def _outermost(names: Iterator[str] | Sequence[str]) -> tuple[str, ...]:
    """Return the names that lie in no other of them."""
    names = list(dict.fromkeys(names))
    return tuple(name for name in names if not any(name.startswith(f"{other}.") for other in names))
