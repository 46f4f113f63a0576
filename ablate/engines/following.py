"""A linear layer in the place of another: how it becomes that layer, is undone, and is copied.

The problem. A layer that computes by a recipe replaces an nn.Linear that others hold on to: optimizers its
parameters, users its hooks and attributes. Afterwards the nn.Linear is wanted back. And training loops copy
models (a moving average of the weights, a teacher), whose layers no engine drives.

The idea. `Replacement` shares the parameters, hooks and attributes of the layer that it replaces, and
`plain` gives them back. In place of another class of linear layers (linears.py), it is an instance of that
class too, whose methods, such as those of its state dict, stay; transformers' Conv1D keeps its parameter
[in, out], and `weight` is the transposed view. A deep copy has parameters of its own, and follows the layer
that it was copied from: at each call it takes over that layer's products.

    layer = EmulatedLinear(linear, ...)      # a Replacement; linear's optimizer and hooks keep working
    average = deepcopy(layer)                # computes by the products that are in force in `layer`
    linear = layer.plain()

Refused: pickling, with a TypeError.
"""

import weakref
from collections.abc import Iterable
from copy import deepcopy
from functools import cache
from typing import ClassVar, NoReturn, Self

from torch import Tensor, nn

from ablate.engines.linears import features, is_transposed
from ablate.numerics.history import History
from ablate.numerics.philox import Clock
from ablate.recipes.recipe import Products


class Replacement(nn.Linear):
    """An nn.Linear with the parameters, hooks and attributes of the linear layer that it replaces."""

    shared: ClassVar[frozenset[str]]
    """Attributes that a copy has in common with its leader."""
    dropped: ClassVar[frozenset[str]]
    """Attributes that are None in a copy."""
    original: ClassVar[type[nn.Module]] = nn.Linear
    """Class of the layer that it replaces."""
    name: str = ""
    clock: Clock
    products: Products
    target: Tensor | None
    histories: dict[str, History]

    def __init__(self, linear: nn.Module) -> None:
        super().__init__(*features(linear), linear.bias is not None, device="meta")
        self._added = {key: value for key, value in vars(linear).items() if key not in vars(self)}
        """Attributes that its class or a user gave the layer, some by the names of this one's own."""
        _move(linear, self, vars(linear).keys())
        original = linear.original if isinstance(linear, Replacement) else type(linear)
        if original is not nn.Linear:
            self.__class__ = _instance_of(type(self), original, is_transposed(linear))  # type: ignore[arg-type]

    def plain_but(self, own: Iterable[str]) -> nn.Module:
        """Return a layer of the original class with this one's parameters, hooks and attributes but `own`,
        the names of attributes that are this layer's alone."""
        plain = object.__new__(self.original)
        nn.Module.__init__(plain)
        sizes = set() if issubclass(self.original, nn.Linear) else {"in_features", "out_features"}
        _move(self, plain, vars(self).keys() - own - sizes - {"_leader", "_own_histories"})
        plain.__dict__.update({key: value for key, value in self._added.items() if key in own})
        return plain

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Return a layer with copied parameters that follows the steps of this one."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        excluded = self.dropped | {"_leader", "_own_histories"}
        copied.__dict__.update(
            {
                name: value if name in self.shared else deepcopy(value, memo)
                for name, value in vars(self).items()
                if name not in excluded
            }
        )
        copied.__dict__ |= dict.fromkeys(self.dropped)
        # In an evaluation, the histories of a copy are its leader's.
        own = deepcopy(vars(self).get("_own_histories", self.histories), memo)
        copied.__dict__["_own_histories"] = copied.__dict__["histories"] = own
        copied.__dict__["_leader"] = vars(self).get("_leader", self)  # no submodule of the copy
        return copied

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise TypeError: a layer belongs to its handle, which a pickled one would not find again."""
        raise TypeError(
            f"{self.name} is converted, and cannot be pickled; save the model's state_dict() instead,"
            " or call restore() of its handle first"
        )

    def follow(self) -> None:
        """Take over what is in force in the layer that this one is a copy of, if it is one."""
        if "_leader" in vars(self):
            leader = vars(self)["_leader"]
            self.products, self.target = leader.products, leader.target
            # An evaluation adds no amax; a call in a step would add one to the training's history.
            evaluating = self.clock.stream == "evaluation"
            self.histories = leader.histories if evaluating else vars(self)["_own_histories"]


class Transposed(nn.Module):
    """The weight of a layer whose parameter is [in, out], as that of transformers' Conv1D."""

    @property
    def owner(self) -> nn.Parameter:
        """The parameter [in, out], which optimizers update."""
        return self._parameters["weight"]

    @property
    def weight(self) -> Tensor:
        """The weight [out, in], a view of `owner`."""
        return self.owner.t()

    def part(self, like: Tensor) -> Tensor:
        """Return a tensor like `owner`, such as its gradient, as [out, in]; a view."""
        return like.t()


@cache
def _instance_of(kind: type[Replacement], original: type[nn.Module], transposed: bool) -> type[Replacement]:
    """Return a class whose instances are of `kind`, and of the class that they replace."""
    bases = (kind, original)
    return type(kind.__name__, (Transposed, *bases) if transposed else bases, {"original": original})


def _move(source: nn.Module, target: nn.Module, names: Iterable[str]) -> None:
    """Give `target` the attributes of `source` with these names: parameters, mode, hooks and a user's own.
    The dictionaries of hooks are the same objects, so that existing handles still remove their hooks."""
    target.__dict__.update({name: vars(source)[name] for name in names})
    target._parameters, target._buffers = dict(source._parameters), dict(source._buffers)
    for hook in target._load_state_dict_pre_hooks.values():
        if hook.with_module:  # torch keeps a weak reference to the old module, which is soon deleted
            hook.module = weakref.ref(target)
