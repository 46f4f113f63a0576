"""Linear layers computed by Transformer Engine's kernels, each under a recipe of its own. Names and state dicts stay; TE is imported late.

Not modelled: which bits a GPU draws for stochastic rounding. What TE does not show is not measured: errors and codes of operands.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ablate.engines.emulated import Engine, quantisable, replaced
from ablate.engines.emulated_layer import DTYPES, EmulatedLinear
from ablate.engines.hardware import refusal, stray_switch, this_machine
from ablate.engines.te_mapping import (
    MULTIPLE,
    TE_ELEMENTS,
    TENSORS,
    Builtin,
    Custom,
    Description,
    Format,
    families,
    recipe_refusals,
    te_recipe,
    variants,
)
from ablate.numerics.history import History
from ablate.numerics.philox import Clock
from ablate.numerics.product import first_order
from ablate.numerics.quantize import Operand
from ablate.numerics.scaling import encode_scale
from ablate.numerics.spec import Outer, Quant
from ablate.recipes.recipe import Products, Recipe, Run


class Draws:
    """What TE draws from the device's generator, determined by the moment: it is seeded at the first product of each micro-batch."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._last: tuple | None = None

    def at(self, device: torch.device) -> None:
        """Before a product on `device`: seed, where the moment is another than at the last one."""
        moment = (self.clock.seed, self.clock.stream, self.clock.step, self.clock.micro_batch)
        if moment != self._last and device.type == "cuda":
            seed(device, int.from_bytes(blake2b(repr(moment).encode(), digest_size=7).digest(), "little"))
        self._last = moment


def seed(device: torch.device, number: int) -> None:
    """Let what TE draws on this GPU from now on follow from `number`."""
    torch.cuda.default_generators[
        torch.cuda.current_device() if device.index is None else device.index
    ].manual_seed(number)


class Memory:
    """The scale of one tensor under delayed scaling, from the history that the emulator keeps too; TE's casts add their amaxes to it.

    TE's own DelayedScaling is not used. It moves its histories on at each autocast region's end, and those of gradients after the backward
    pass of each layer that had a region of its own; it counts evaluation in; and its first scale is 1.
    """

    def __init__(self, history: History, clock: Clock, device: torch.device) -> None:
        self.history, self.clock, self.device = history, clock, device

    def quantiser(self, copy: Format) -> Any:
        """TE's quantiser of a given scale, which gets its scale before each cast, and tells its amax after it."""
        scale, amax = torch.ones((), device=self.device), torch.zeros(1, device=self.device)
        made = library().te.Float8Quantizer(scale, amax, _dtype(copy))
        cast = made.quantize_impl

        def remembered(x: Tensor) -> Any:
            self._scale(made.scale, x, copy)
            made.amax.zero_()  # the kernel keeps the larger one
            found = cast(x)
            self.history.note(made.amax[0], self.clock, copy.history)
            return found

        made.quantize_impl = (
            remembered  # no class of our own: the native part knows quantisers by their exact type
        )
        return made

    def _scale(self, scale: Tensor, x: Tensor, copy: Format) -> None:
        """Set `scale`: by the largest amax of the steps before, by that of `x` where they have none."""
        quant = Quant(element=copy.element, block=None, scale=None, outer=Outer(bound=1.0))
        past = max(map(float, self.history.before(self.clock, copy.history)), default=0.0)
        if past:
            scale.fill_(encode_scale(torch.tensor(past), quant).item())
        else:
            scale.copy_(encode_scale(x.detach().abs().amax().float(), quant))


class _Once(torch.autograd.Function):
    """Both inputs of a product as they are; a second derivative, which TE's backward pass does not have, raises."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return x.view_as(x), w.view_as(w)

    @staticmethod
    @first_order
    def backward(ctx, dx: Tensor, dw: Tensor):
        return dx, dw


class NativeLinear(EmulatedLinear):
    """The layer as te.Linear computes it; in high precision where its products quantise nothing. Shares the parameters it replaces.

    One te.Linear for each recipe of TE that it meets: a te.Linear that meets a second recipe of the same class silently keeps the
    quantisers of the first (TransformerEngineBaseModule.set_meta_tensor asks for the class alone).
    """

    def __init__(self, linear: nn.Linear, name: str, clock: Clock, dtype: torch.dtype, draws: Draws) -> None:
        super().__init__(linear, name, clock, dtype)
        self.draws = draws
        self._mapped: tuple[Products, Description] = (self.products, None)
        self._layers: dict[Description, tuple[nn.Module, Any]] = {}
        for row, column in TENSORS.values():
            self.histories[column] = self.histories[row]  # TE makes both copies by one cast

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out], in x's dtype; the bias is added in high precision. Autocast of torch does not reach in here."""
        if self._mapped[0] is not self.products:
            self._mapped = self.products, te_recipe(self.products)
        description = self._mapped[1]
        if description is None:
            return super().forward(x)
        rows = x.reshape(-1, self.in_features).to(torch.bfloat16).contiguous()
        if rows.shape[0] % MULTIPLE:
            raise ValueError(
                f"{self.name}: {rows.shape[0]} tokens, and Transformer Engine takes multiples of {MULTIPLE}"
            )
        self.draws.at(rows.device)
        with torch.autocast(rows.device.type, enabled=False):
            y = self._product(description, *_Once.apply(rows, self.weight.to(torch.bfloat16)))
        self.nonfinite = self.nonfinite + ~y.detach().isfinite().all()
        y = y.to(x.dtype) if self.bias is None else (y + self.bias).to(x.dtype)
        return y.view(*x.shape[:-1], self.out_features)

    def _product(self, description: Description, x: Tensor, w: Tensor) -> Tensor:
        """y = x w^T under one of TE's recipes, differentiable in both; RuntimeError where TE has used another."""
        te = library()
        if description not in self._layers:
            layer = te.Linear(
                self.in_features, self.out_features, bias=False, params_dtype=torch.bfloat16, device="meta"
            )
            self._layers[description] = layer, self._recipe(description)
        layer, wanted = self._layers[description]
        with te.autocast(enabled=True, recipe=wanted):
            y = torch.func.functional_call(layer, {"weight": w}, (x,))
        took = layer.fp8 and all(
            getattr(layer.fp8_meta.get(key), "recipe", None) is wanted
            for key in ("scaling_fwd", "scaling_bwd")
        )
        if not took:
            raise RuntimeError(
                f"{self.name}: Transformer Engine has not taken up the recipe in force, {wanted}"
            )
        return y

    def _recipe(self, description: Builtin | Custom) -> Any:
        """TE's recipe object: of this layer alone where it has histories."""
        if "fp8_delayed" not in formats(description):
            return build(description)
        memories = {
            tensor: Memory(self.histories[slots[0]], self.clock, self.weight.device)
            for tensor, slots in TENSORS.items()
        }
        return library().recipes.CustomRecipe(qfactory=factory(description, memories), backward_override=None)


class NativeEngine(Engine):
    """Follows the schedule as the emulator's does. It sees no quantised operand, so it tells of none."""

    def at(self, step: int, run: Run) -> Recipe:
        """Put the recipe of step `step` (from 0) of `run` in force, and return it."""
        told = [amaxes for amaxes in self.histories(step - 1) if isinstance(amaxes[step - 1], Tensor)]
        if told:  # as numbers, all at once: a scale waits for none of them then
            for amaxes, amax in zip(
                told, torch.stack([amaxes[step - 1] for amaxes in told]).tolist(), strict=True
            ):
                amaxes[step - 1] = amax
        return super().at(step, run)

    def weight_casts(self) -> dict[str, tuple[Tensor, Operand]]:
        """None: TE keeps the casts to itself."""
        return {}


def convert(model: nn.Module, recipe: Recipe, clock: Clock) -> NativeEngine:
    """Replace every nn.Linear inside a transformer block, in place. ValueError where TE cannot train by the recipe, here or at all."""
    reason = next(recipe_refusals(recipe), None) or refusal(this_machine(), families(variants(recipe)))
    if reason:
        raise ValueError(f"engine transformer_engine: {reason}")
    if stray := stray_switch():
        raise ValueError(
            f"engine transformer_engine: {stray} is set and would change numbers behind the recipe's back; unset it"
        )
    draws = Draws(clock)
    for name in quantisable(model):
        linear = model.get_submodule(name)
        if not recipe.plain and (linear.in_features % MULTIPLE or linear.out_features % MULTIPLE):
            found = f"{linear.in_features} to {linear.out_features} features"
            raise ValueError(
                f"{name}: {found}, and Transformer Engine takes multiples of {MULTIPLE}; use engine: emulated"
            )
    replaced(model, lambda linear, name: NativeLinear(linear, name, clock, DTYPES[recipe.dtype], draws))
    return NativeEngine(model, recipe, clock)


# --- a description as TE's objects ----------------------------------------------------------------


@lru_cache(maxsize=1)
def library() -> SimpleNamespace:
    """What is used of TE, imported now."""
    import transformer_engine.common.recipe as recipes
    import transformer_engine.pytorch as te

    return SimpleNamespace(recipes=recipes, te=te, Linear=te.Linear, autocast=te.autocast)


@lru_cache(maxsize=256)
def build(description: Builtin | Custom) -> Any:
    """TE's recipe object, the same for the same description: whether a layer took it up is asked by identity."""
    recipes = library().recipes
    if isinstance(description, Custom):
        return recipes.CustomRecipe(qfactory=factory(description), backward_override=None)
    options = dict(description.options)
    if "fp8_format" in options:
        options["fp8_format"] = recipes.Format[options["fp8_format"]]
    return getattr(recipes, description.name)(**options)


def formats(description: Builtin | Custom) -> set[str]:
    """The families of formats that a recipe of single quantisers has; none of one of TE's own."""
    tensors = [getattr(description, tensor) for tensor in TENSORS] if isinstance(description, Custom) else []
    return {copy.family for copies in tensors for copy in (copies.row, copies.column)}


def factory(custom: Custom, memories: Mapping[str, Memory] | None = None) -> Callable[[Any], Any]:
    """The function that TE asks for the quantiser of each tensor of a layer; those that leave the layer are quantised by none.

    `memories`: by tensor, for those with delayed scaling.
    """

    def for_role(role: Any) -> Any:
        copies = getattr(custom, role.tensor_type, None) if role is not None and role.tensor_type else None
        if copies is None:
            return quantiser(Format())
        if copies.row.family == "fp8_delayed":
            return memories[role.tensor_type].quantiser(copies.row)
        if not copies.requantised and copies.row == replace(copies.column, rotated=False, signs=True):
            return quantiser(copies.column)  # TE rotates the columnwise copy alone
        source = "rowwise_dequantized" if copies.requantised else "original"
        row, column = quantiser(copies.row), quantiser(copies.column)
        return library().te.HybridQuantizer(
            rowwise_quantizer=row, columnwise_quantizer=column, columnwise_source=source
        )

    return for_role


def quantiser(copy: Format) -> Any:
    """TE's quantiser of one format, of both copies; called with a tensor it gives the quantised one."""
    te = library().te
    match copy.family:
        case "nvfp4":
            return te.NVFP4Quantizer(
                fp4_dtype=te.DType.kFloat4E2M1,
                with_rht=copy.rotated,
                with_post_rht_amax=copy.rotated,
                with_2d_quantization=copy.square,
                stochastic_rounding=copy.stochastic,
                row_scaled_nvfp4=copy.rows,
                nvfp4_use_4over6=bool(copy.chosen),
                nvfp4_e4m3_max=copy.bound,
                nvfp4_4over6_err_mode=copy.chosen or "MAE",
                with_random_sign_mask=copy.signs,
            )
        case "mxfp8":
            return te.MXFP8Quantizer(_dtype(copy), with_2d_quantization=copy.square)
        case "fp8":
            return te.Float8CurrentScalingQuantizer(
                _dtype(copy), device=torch.device("cuda"), force_pow_2_scales=False
            )
    return te.IdentityQuantizer()


def _dtype(copy: Format) -> Any:
    return getattr(library().te.DType, TE_ELEMENTS[copy.element])
