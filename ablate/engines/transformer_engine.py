"""The hardware engine: a model's linear layers computed by Transformer Engine (TE), each by its own recipe.

Like the emulated engine it keeps parameter names and state dicts. A layer is a te.Linear; the matrices of all
packed experts that one product multiplies by are a te.GroupedLinear. TE is imported at the first quantised
product. Refused, with a ValueError: every recipe that TE does not compute exactly (te_mapping.py), and
machines without the hardware for it (hardware.py). Not modelled: the random bits that a GPU draws for
stochastic rounding. Not measured: errors and codes of operands, which TE does not show.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ablate.engines.emulated import Engine, replace_layers
from ablate.engines.emulated_layer import EmulatedLinear, NotInForce
from ablate.engines.expert_layers import EmulatedExpert, Group
from ablate.engines.hardware import refusal, stray_switch, this_machine
from ablate.numerics.history import History
from ablate.numerics.philox import Clock
from ablate.numerics.product import first_order
from ablate.numerics.quantize import Operand
from ablate.numerics.scaling import encode_scale
from ablate.numerics.spec import Outer, Quant
from ablate.recipes.reasons import all_of
from ablate.recipes.recipe import Recipe, Run
from ablate.recipes.targets.experts import expert_refusals, multiple
from ablate.recipes.te_mapping import (
    MULTIPLE,
    TE_ELEMENTS,
    TENSORS,
    Builtin,
    CopyFormat,
    Custom,
    Description,
    families,
    recipe_refusals,
    te_recipe,
    variants,
)

TeObject: TypeAlias = Any
"""Object of Transformer Engine, which has no type annotations: a recipe, a quantiser, a quantised tensor."""
Built: TypeAlias = dict[Description, tuple[nn.Module, TeObject]]
"""Modules of TE that compute one layer, each with its recipe object."""


class Draws:
    """Seeding of the GPU's generator, which TE draws from: once per micro-batch, from the clock alone."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._last: tuple | None = None

    def at(self, device: torch.device) -> None:
        """Seed the generator of `device` if the clock has advanced; call before each product."""
        moment = (self.clock.seed, self.clock.stream, self.clock.step, self.clock.micro_batch)
        if moment != self._last and device.type == "cuda":
            seed(device, int.from_bytes(blake2b(repr(moment).encode(), digest_size=7).digest(), "little"))
        self._last = moment


def seed(device: torch.device, number: int) -> None:
    """Seed the generator of a GPU."""
    torch.cuda.default_generators[
        torch.cuda.current_device() if device.index is None else device.index
    ].manual_seed(number)


class DelayedScale:
    """The scale of one tensor under delayed scaling, computed from the same history as in the emulator.

    TE's casts add their amaxes to that history. TE's own DelayedScaling is not used: it advances its
    histories at the end of each autocast region, and those of gradients after the backward pass of each layer
    that had its own region; it includes evaluation; and its first scale is 1.
    """

    def __init__(self, history: History, clock: Clock, device: torch.device) -> None:
        self.history, self.clock, self.device = history, clock, device

    def quantiser(self, copy: CopyFormat) -> TeObject:
        """Return TE's quantiser by a given scale, set before each cast; the cast's amax joins the history."""
        scale, amax = torch.ones((), device=self.device), torch.zeros(1, device=self.device)
        made = library().te.Float8Quantizer(scale, amax, _dtype(copy))
        cast = made.quantize_impl

        def with_history(x: Tensor) -> TeObject:
            self._set_scale(made.scale, x, copy)
            made.amax.zero_()  # the kernel takes the maximum of this and the new amax
            result = cast(x)
            self.history.note(made.amax[0], self.clock, copy.history)
            return result

        # On the instance, not in a subclass: TE's native part dispatches on the quantiser's exact type.
        made.quantize_impl = with_history
        return made

    def _set_scale(self, scale: Tensor, x: Tensor, copy: CopyFormat) -> None:
        """Set `scale` from the largest amax of the history; from that of `x` if there is none above zero."""
        quant = Quant(element=copy.element, block=None, scale=None, outer=Outer(bound=1.0))
        past = max(map(float, self.history.before(self.clock, copy.history)), default=0.0)
        if past:
            scale.fill_(encode_scale(torch.tensor(past), quant).item())
        else:
            scale.copy_(encode_scale(x.detach().abs().amax().float(), quant))


class Once(torch.autograd.Function):
    """Identity on both inputs of a product that raises for a second derivative, which TE does not compute.
    Its backward pass gives the gradients to an observer, if there is one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, seen: "Seen | None" = None) -> tuple[Tensor, Tensor]:
        ctx.seen = seen
        return x.view_as(x), w.view_as(w)

    @staticmethod
    @first_order
    def backward(ctx: Any, dx: Tensor, dw: Tensor) -> tuple[Tensor, Tensor, None]:
        if ctx.seen:
            needed = ctx.needs_input_grad
            ctx.seen.gradients(dx if needed[0] else None, dw if needed[1] else None)
        return dx, dw, None


class Seen:
    """One call of a layer, for the probe: its operands, and the output's gradient when there is one."""

    def __init__(self, layer: EmulatedLinear, x: Tensor, w: Tensor) -> None:
        self.layer, self.x, self.w, self.dy = layer, x.detach(), w.detach(), None
        self.products, self.micro_batch = layer.products, layer.clock.micro_batch

    def output(self, y: Tensor) -> Tensor:
        """Give the output to the probe, and return it so that its gradient will be kept."""
        if probe := self.layer.context.probe:
            probe.output(self.layer, self.products, self.x, self.w, y.detach())
        if y.requires_grad:
            y.register_hook(self._keep)
        return y

    def _keep(self, dy: Tensor) -> None:
        self.dy = dy.detach()

    def gradients(self, dx: Tensor | None, dw: Tensor | None) -> None:
        """Give the gradients to the probe, at the moment of the call."""
        if self.dy is not None and (probe := self.layer.context.probe):
            kept = (self.x, self.w, None, None)
            with self.layer.clock.within(self.micro_batch):
                probe.gradients(self.layer, self.products, kept, self.dy, (dx, dw))


class NativeLinear(EmulatedLinear):
    """A layer computed by te.Linear, or in high precision if its products quantise nothing.

    It shares the parameters of the layer that it replaces. It has one te.Linear for each TE recipe that the
    schedule puts in force: a te.Linear called under a second recipe of the same class silently keeps the
    quantisers of the first (TransformerEngineBaseModule.set_meta_tensor compares classes alone).
    """

    emulates = False

    def __init__(self, linear: nn.Module, name: str, clock: Clock, dtype: torch.dtype, draws: Draws) -> None:
        super().__init__(linear, name, clock, dtype)
        self.draws = draws
        self.built: Built = {}
        for row, column in TENSORS.values():
            self.histories[column] = self.histories[row]  # TE makes both copies by one cast

    def forward(self, x: Tensor) -> Tensor:
        """Return x w^T + bias, [..., in] to [..., out], in the dtype of `x`; autocast is disabled inside. The
        bias is added in high precision. ValueError if the number of tokens is not a multiple of MULTIPLE."""
        # The emulated layer takes no tokens too, and raises for `NotInForce`.
        if self.emulated or not x.numel() or isinstance(self.products, NotInForce):
            return super().forward(x)
        description = described(self.products)
        if description is None:
            return super().forward(x)
        rows = x.reshape(-1, self.in_features).to(torch.bfloat16).contiguous()
        if rows.shape[0] % MULTIPLE:
            raise ValueError(
                f"{self.name}: {rows.shape[0]} tokens, and Transformer Engine takes multiples of {MULTIPLE}"
            )
        self.draws.at(rows.device)
        with torch.autocast(rows.device.type, enabled=False):
            weight = self.weight.to(torch.bfloat16).contiguous()
            seen = Seen(self, rows, weight) if self.context.probe else None
            y = self._product(description, *Once.apply(rows, weight, seen))
            y = seen.output(y) if seen else y
        self.observed("output", y.detach().abs().amax().float())
        y = y.to(x.dtype) if self.bias is None else (y + self.bias).to(x.dtype)
        return y.view(*x.shape[:-1], self.out_features)

    def _product(self, description: Builtin | Custom, x: Tensor, w: Tensor) -> Tensor:
        if description not in self.built:
            layer = library().te.Linear(
                self.in_features, self.out_features, bias=False, params_dtype=torch.bfloat16, device="meta"
            )
            self.built[description] = layer, self._recipe(description)
        return multiplied(self.name, *self.built[description], {"weight": w}, x)

    def _recipe(self, description: Builtin | Custom) -> TeObject:
        """Return TE's recipe object: shared by all layers, or this layer's own if it has amax histories."""
        if not isinstance(description, Custom) or "fp8_delayed" not in formats(description):
            return build(description)
        delayed = {
            tensor: DelayedScale(self.histories[slots[0]], self.clock, self.weight.device)
            for tensor, slots in TENSORS.items()
        }
        return library().recipes.CustomRecipe(qfactory=factory(description, delayed), backward_override=None)


class NativeExpert(EmulatedExpert):
    """One matrix of one expert, which `NativeGroup` multiplies with those of the other experts. The arguments
    are those of `EmulatedExpert`, then `draws`."""

    emulates = False

    def __init__(self, *place: Any, draws: Draws, **how: Any) -> None:
        super().__init__(*place, **how)
        self.draws = draws

    def group(self, layers: Sequence[EmulatedExpert]) -> "NativeGroup":
        """Return the grouped product of the layers of all experts, of which this is one."""
        return NativeGroup(layers, self)


class NativeGroup(Group):
    """The layers of all experts that one te.GroupedLinear multiplies by, one for each TE recipe in force.

    Each expert has scales, blocks and rotations of its own there, as in the emulator. TE takes its rows in
    multiples (`multiple`), so rows of zeros are appended, which change no amax and no block. TE leaves out an
    expert without rows, and makes its gradient zero (`te_general_grouped_gemm`, TE 2.20).
    """

    def __init__(self, layers: Sequence[EmulatedExpert], first: NativeExpert) -> None:
        super().__init__(layers)
        self.first = first
        self.built: Built = {}

    def __call__(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the products of each expert's rows and weight (`Group`); ValueError if recipes differ."""
        first, products = self.first, self.first.products
        if first.emulated or not len(rows) or all(layer.products.plain for layer in self.layers):
            return super().__call__(rows, counts)
        for layer in self.layers:
            if layer.products is not products and layer.products != products:
                raise ValueError(
                    f"{layer.name} and {first.name} are quantised differently, and te.GroupedLinear has one"
                    " recipe for all experts; use engine: scaled_mm or emulated"
                )
        description, whole = described(products), multiple(products)
        assert description is not None
        if description not in self.built:
            module = library().te.GroupedLinear(
                len(self.layers),
                first.in_features,
                first.out_features,
                bias=False,
                params_dtype=torch.bfloat16,
                device="meta",
                use_grouped_tensor=False,  # None: an environment variable would select other kernels
            )
            self.built[description] = module, build(description)
        first.draws.at(rows.device)
        x, w = Once.apply(rows.to(torch.bfloat16), self.weights(torch.bfloat16).contiguous())
        parts, weights = list(x.split(list(counts))), list(w.unbind())
        seen: dict[int, Seen] = {}
        for number, layer in enumerate(self.layers) if first.context.probe else ():
            if counts[number]:
                seen[number] = each = Seen(layer, parts[number], weights[number])
                parts[number], weights[number] = Once.apply(parts[number], weights[number], each)
        zeros = x.new_zeros(whole, x.shape[1])
        sizes = [size for count in counts for size in (count, -count % whole)]
        y = multiplied(
            first.name,
            *self.built[description],
            {f"weight{number}": weight for number, weight in enumerate(weights)},
            torch.cat([piece for part in parts for piece in (part, zeros[: -len(part) % whole])]),
            torch.tensor(sizes).view(-1, 2).sum(1),
        )
        outputs = list(y.split(sizes)[::2])
        for number, (layer, count) in enumerate(zip(self.layers, counts, strict=True)):
            if number in seen:
                outputs[number] = seen[number].output(outputs[number])
            if count:
                layer.observed("output", outputs[number].detach().abs().amax().float())
        return torch.cat(outputs).to(rows.dtype)


class NativeEngine(Engine):
    """An engine of `NativeLinear` layers. Its probe receives whole passes alone: TE does not show quantised
    operands."""

    def at(self, step: int, run: Run, *, counted: bool = True) -> Recipe:
        """Put the recipe of one step in force in every layer; see `Engine.at`."""
        pending = [amaxes for amaxes in self.histories(step - 1) if isinstance(amaxes[step - 1], Tensor)]
        if pending:  # one transfer for all amaxes, so that later no scale waits for the GPU
            values = torch.stack([amaxes[step - 1] for amaxes in pending]).tolist()
            for amaxes, amax in zip(pending, values, strict=True):
                amaxes[step - 1] = amax
        return super().at(step, run, counted=counted)

    def weight_casts(self) -> Iterator[tuple[str, tuple[Tensor, Operand]]]:
        """Yield nothing: TE does not show its casts."""
        yield from ()


def convert(model: nn.Module, recipe: Recipe, clock: Clock) -> NativeEngine:
    """Replace every nn.Linear inside a transformer block, and the matrices of packed experts there, in place.

    All is as in the emulated engine's `convert`, its errors too, but that the model is on a GPU. ValueError
    if TE cannot train by the recipe, on this machine or at all; an environment variable would change TE's
    numbers; or a layer's size is not a multiple of MULTIPLE.
    """
    reason = all_of(recipe_refusals(recipe)) or refusal(this_machine(), families(variants(recipe)))
    if reason:
        raise ValueError(f"engine transformer_engine: {reason}")
    if stray := stray_switch():
        raise ValueError(
            f"engine transformer_engine: {stray} is set and changes numbers whatever the recipe is; unset it"
        )
    draws = Draws(clock)
    linear, expert = (partial(kind, draws=draws) for kind in (NativeLinear, NativeExpert))
    replace_layers(model, recipe, clock, linear, expert)
    engine = NativeEngine(model, recipe, clock)
    for name, layer in {} if recipe.plain else engine.layers.items():
        if layer.in_features % MULTIPLE or layer.out_features % MULTIPLE:
            raise ValueError(
                f"{name}: {layer.in_features} to {layer.out_features} features,"
                f" and Transformer Engine takes multiples of {MULTIPLE}; use engine: emulated"
            )
    if engine.experts and (reason := all_of(expert_refusals(recipe, engine.placed))):
        raise ValueError(f"engine transformer_engine: {reason}; or use engine: scaled_mm or emulated")
    return engine


# --- a description as TE's objects ----------------------------------------------------------------


@lru_cache(maxsize=1)
def library() -> SimpleNamespace:
    """Import TE and return the parts of it that are used here."""
    import transformer_engine.common.recipe as recipes
    import transformer_engine.pytorch as te

    return SimpleNamespace(recipes=recipes, te=te)


described = lru_cache(maxsize=256)(te_recipe)
"""`te_recipe`, computed once for equal products."""


def multiplied(
    name: str, module: nn.Module, recipe: TeObject, weights: dict[str, Tensor], *inputs: Tensor
) -> Tensor:
    """Return the output of a module of TE with given weights under a recipe, differentiable in both.
    RuntimeError if TE has used another recipe."""
    with library().te.autocast(enabled=True, recipe=recipe):
        y = torch.func.functional_call(module, weights, inputs)
    applied = module.fp8 and all(
        getattr(module.fp8_meta.get(key), "recipe", None) is recipe for key in ("scaling_fwd", "scaling_bwd")
    )
    if not applied:
        raise RuntimeError(f"{name}: Transformer Engine did not apply the recipe in force, {recipe}")
    return y


@lru_cache(maxsize=256)
def build(description: Builtin | Custom) -> TeObject:
    """Return TE's recipe object, the same for the same description: layers compare recipes by identity."""
    recipes = library().recipes
    if isinstance(description, Custom):
        return recipes.CustomRecipe(qfactory=factory(description), backward_override=None)
    options = dict(description.options)
    if "fp8_format" in options:
        options["fp8_format"] = recipes.Format[options["fp8_format"]]
    return getattr(recipes, description.name)(**options)


def formats(description: Builtin | Custom) -> set[str]:
    """Return the families of formats of a `Custom`; an empty set for a `Builtin`."""
    tensors = [getattr(description, tensor) for tensor in TENSORS] if isinstance(description, Custom) else []
    return {copy.family for copies in tensors for copy in (copies.row, copies.column)}


def factory(
    custom: Custom, delayed: Mapping[str, DelayedScale] | None = None
) -> Callable[[TeObject], TeObject]:
    """Return the function that TE calls for the quantiser of each tensor of a layer. Outputs of the layer get
    one that leaves them as they are. `delayed`: scales by tensor, for those with delayed scaling."""

    def for_role(role: TeObject) -> TeObject:
        copies = getattr(custom, role.tensor_type, None) if role is not None and role.tensor_type else None
        if copies is None:
            return quantiser(CopyFormat())
        if copies.row.family == "fp8_delayed":
            assert delayed is not None
            return delayed[role.tensor_type].quantiser(copies.row)
        if not copies.requantised and copies.row == replace(copies.column, rotated=False, signs=True):
            return quantiser(copies.column)  # TE rotates the columnwise copy alone
        source = "rowwise_dequantized" if copies.requantised else "original"
        row, column = quantiser(copies.row), quantiser(copies.column)
        return library().te.HybridQuantizer(
            rowwise_quantizer=row, columnwise_quantizer=column, columnwise_source=source
        )

    return for_role


def quantiser(copy: CopyFormat) -> TeObject:
    """Return TE's quantiser of one format, for both copies; it is called with a tensor."""
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


def _dtype(copy: CopyFormat) -> TeObject:
    return getattr(library().te.DType, TE_ELEMENTS[copy.element])
