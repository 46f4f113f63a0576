"""The matrices of packed experts as quantised layers, and their products: `EmulatedExpert` and `Group`.

A matrix of one expert is a view of the parameter [experts, out, in] that holds all of them. `Group`
multiplies the tokens of all experts of a layer in one autograd function: by few calls if grouped.py covers
the recipe, or for each expert by the same `forward` and `backward` of products.py that a layer calls, with
equal bits. Without quantisation it is torch's grouped product. An expert without tokens is not multiplied;
its gradient is zero.

On a GPU, which takes as long for a launch as for many tokens, one launch quantises an operand of all experts
(`_cast_rows`). The products find it in their layers (`EmulatedLinear.made`), with the bits of each by itself.

    group = Group(layers)                          # one EmulatedExpert of each expert
    y = group(rows, counts)                        # rows sorted by expert, and the number of each
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ablate.engines import emulated_layer, grouped
from ablate.engines.emulated_layer import EmulatedLinear
from ablate.engines.products import backward, forward
from ablate.numerics import on_gpu
from ablate.numerics.kernels import cuda
from ablate.numerics.philox import Clock, site
from ablate.numerics.product import first_order, linear
from ablate.numerics.quantize import Operand, quantize
from ablate.numerics.scaling import histogram
from ablate.recipes.recipe import SLOTS, Products

_LAYOUT = (
    "num_experts",
    "has_gate",
    "has_bias",
    "is_transposed",
    "is_concatenated",
    "has_post_expert_norm",
    "down_proj",
)
"""Attributes of a module of experts with packed weights."""

DENSE = {"Llama4TextExperts": dict(zip(_LAYOUT[1:6], (True, False, True, True, False), strict=True))}
"""Layout of modules whose experts each receive all tokens, scaled by the router before, by class."""


def loads(index: Tensor, experts: int) -> Tensor:
    """Return the number of times that each expert is chosen, int64 [experts], without a wait for a GPU.
    `index` has numbers of experts, any integers, of any shape; those that no expert has are left out."""
    # The ends take what is out of range.
    return histogram(index.flatten().clamp(-1, experts) + 1, experts + 2)[1:-1]


def is_packed(module: nn.Module) -> bool:
    """Return True for a module of experts that says how its packed weights are laid out, or is known."""
    return type(module).__name__ in DENSE or all(hasattr(module, name) for name in _LAYOUT)


def incomplete(module: nn.Module) -> str:
    """Return which attributes a module with packed experts' weights lacks; "" if it has none or all. Modules
    of transformers, which nobody could complete, have ""."""
    if type(module).__module__.startswith("transformers."):
        return ""
    weights = (getattr(module, name, None) for name in ("gate_up_proj", "up_proj", "down_proj"))
    lacking = [name for name in _LAYOUT if not hasattr(module, name)]
    packed = any(isinstance(weight, nn.Parameter) and weight.ndim == 3 for weight in weights)
    if not packed or not lacking or len(lacking) == len(_LAYOUT):
        return ""
    return (
        f"declares {len(_LAYOUT) - len(lacking)} of {len(_LAYOUT)} attributes of experts;"
        f" {', '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} missing (docs/examples/own_experts.py)"
    )


def parameters_of(module: nn.Module) -> tuple[str, str]:
    """Return the names of the parameters that the two grouped products multiply by."""
    return ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"


def chosen_experts(module: nn.Module) -> int:
    """Return the number of experts that each token is sent to, by the configuration; all if it is unknown."""
    sources = (module, getattr(module, "config", None))
    names = ("num_experts_per_tok", "num_experts_per_token", "top_k", "moe_topk", "moe_k", "top_k_experts")
    known = (getattr(source, name, None) for source in sources for name in names)
    return next((number for number in known if isinstance(number, int)), module.num_experts)


class EmulatedExpert(EmulatedLinear):
    """One matrix of one expert, whose weight [out, in] is a view of the parameter that holds all experts'.
    `module` owns the parameter; `part` is `all`, or the rows of `gate` or `up` within gate and up."""

    def __init__(
        self,
        module: nn.Module,
        parameter: str,
        expert: int,
        part: str,
        name: str,
        clock: Clock,
        dtype: torch.dtype,
    ) -> None:
        rows, columns = _matrices(getattr(module, parameter), module, part)[expert].shape
        super().__init__(nn.Linear(columns, rows, bias=False, device="meta"), name, clock, dtype)
        del self._parameters["weight"]
        # Not registered: the module is the parent of this layer.
        self.__dict__.update(module=module, parameter=parameter, expert=expert, rows=part)

    @property
    def owner(self) -> nn.Parameter:
        """The parameter that holds the weights of all experts, which optimizers update."""
        if "module" not in self.__dict__:
            raise AttributeError("the layer is not complete")
        return getattr(self.module, self.parameter)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight [out, in], a view of `owner`."""
        return self.part(self.owner)

    def part(self, packed: Tensor) -> Tensor:
        """Return this layer's matrix [out, in] of a tensor like `owner`, such as its gradient; a view."""
        return _matrices(packed[self.expert], self.module, self.rows)

    def group(self, layers: Sequence["EmulatedExpert"]) -> "Group":
        """Return the grouped product of the layers of all experts, of which this is one."""
        return Group(layers)

    @property
    def work(self) -> int:
        """Elements of the weight that a token of the model is multiplied by, on average over experts."""
        chosen = chosen_experts(self.module)
        return self.in_features * self.out_features * chosen // self.module.num_experts

    @property
    def divided(self) -> None:
        """None: ranks gather the tokens of experts, and each quantises all of them."""

    def share_state(self, name: str) -> None:
        """Draw random words by the site of another name, that of all experts of the module."""
        self._sites = {slot: site(name, slot) for slot in SLOTS}
        self._turns = {slot: site(name, slot.partition(".")[0]) for slot in SLOTS}


def _matrices(packed: Tensor, module: nn.Module, part: str) -> Tensor:
    """Return the matrix [..., out, in] of one expert, or of all, as a view."""
    whole = packed.mT if module.is_transposed else packed
    if part == "all":
        return whole
    if module.is_concatenated:
        half = whole.shape[-2] // 2
        return whole[..., :half, :] if part == "gate" else whole[..., half:, :]
    return whole[..., 0 if part == "gate" else 1 :: 2, :]


class Group:
    """The layers of all experts that one grouped product multiplies by: one of each expert, alike."""

    def __init__(self, layers: Sequence[EmulatedExpert]) -> None:
        self.layers = list(layers)

    def __call__(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the products of each expert's rows with its weight, [rows, out] in the dtype of `rows`,
        without a bias. `rows` are tokens sorted by expert [rows, in], `counts` the numbers of each."""
        batches = [layer.begin_call() for layer in self.layers]
        first = self.layers[0]
        products = [layer.products for layer in self.layers]
        if all(each.plain for each in products):
            y = self._unquantised(rows.to(first.dtype), counts).to(rows.dtype)
        else:
            y = GroupedCall.apply(rows, first.owner, self.layers, products, batches, counts)
        if first.context.grouped is not None:
            first.context.grouped(self.layers, rows, counts, y)
        return y

    def weights(self, dtype: torch.dtype) -> Tensor:
        """Return the matrices of all experts in a dtype, [experts, out, in]."""
        first = self.layers[0]
        matrices = _matrices(first.owner.to(dtype), first.module, first.rows)
        return matrices if first.rows == "all" else matrices.contiguous()

    def _unquantised(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the product that torch's grouped_mm computes, which takes rows of whole 16 bytes alone."""
        weight = self.weights(rows.dtype)
        if rows.is_cuda and not any(size * rows.element_size() % 16 for size in weight.shape[1:]):
            ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=rows.device)
            return F.grouped_mm(rows, weight.transpose(-2, -1), offs=ends)
        return torch.cat([linear(x, w) for x, w in zip(rows.split(list(counts)), weight, strict=True)])


class GroupedCall(torch.autograd.Function):
    """The autograd function of a grouped product: what `products.Call` computes, for one expert after the
    other."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        packed: Tensor,
        layers: Sequence[EmulatedExpert],
        products: Sequence[Products],
        batches: Sequence[int],
        counts: Sequence[int],
    ) -> Tensor:
        ctx.layers, ctx.products, ctx.batches, ctx.counts = layers, products, batches, counts
        ctx.like, ctx.dtype = (packed.shape, packed.dtype), rows.dtype
        ctx.grouped = _in_one_tensor(layers, batches) and grouped.covers(layers, rows)
        ctx.together = not ctx.grouped and _cast_together(layers, products, batches, rows)
        if ctx.grouped:
            with layers[0].clock.within(batches[0]):
                made = grouped.forward(layers, rows, packed, counts)
            if made is not None:
                ctx.save_for_backward(*made[1], rows, packed)
                return made[0]
            ctx.grouped = False
        y = rows.new_empty(len(rows), layers[0].out_features)
        kept: list[Tensor | None] = []
        rows = rows.to(torch.bfloat16) if ctx.together else rows
        with emulated_layer.kept(layers, "made"):
            if ctx.together:
                with layers[0].clock.within(batches[0]):
                    _cast_rows(layers, products[0], rows, counts, ("fprop.x", None))
                    _cast_weights(layers, products[0], packed, counts, "fprop.w")
            for number, (begin, end) in enumerate(_spans(counts)):
                layer, of_layer = layers[number], products[number]
                if begin == end:
                    kept += (None, None, None, None)
                    continue
                with layer.clock.within(batches[number]):
                    y[begin:end], of_expert = forward(layer, of_layer, rows[begin:end], layer.part(packed))
                kept += of_expert
        # Those of each expert are views of the last two.
        ctx.save_for_backward(*kept, *((rows, packed) if ctx.together else ()))
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[:2]
        saved, layers = ctx.saved_tensors, ctx.layers
        if ctx.grouped:
            kept, (rows, packed) = grouped.Kept(*saved[:3]), saved[3:]
            with layers[0].clock.within(ctx.batches[0]), torch.autocast(dy.device.type, enabled=False):
                made = grouped.backward(layers, kept, dy, ctx.counts, needs, ctx.products[0])
            if made is not None:
                for layer in layers:
                    layer.end_call(ctx.batches[0])
                return _returned(ctx, *made)
            each = zip(layers, _spans(ctx.counts), strict=True)
            pairs = ((rows[begin:end].to(torch.bfloat16), layer.part(packed)) for layer, (begin, end) in each)
            saved = [tensor for x, w in pairs for tensor in (x, w, None, None)]
        dx = dy.new_zeros(len(dy), layers[0].in_features, dtype=ctx.dtype) if needs[0] else None
        shape, dtype = ctx.like
        dw = dy.new_zeros(shape, dtype=dtype) if needs[1] else None
        with torch.autocast(dy.device.type, enabled=False), emulated_layer.kept(layers, "made"):
            if ctx.together:
                (rows, packed), dy = saved[-2:], dy.to(torch.bfloat16).contiguous()
                of_dy = "dgrad.g" if needs[0] else None, "wgrad.g" if needs[1] else None
                with layers[0].clock.within(ctx.batches[0]):
                    _cast_rows(layers, ctx.products[0], dy, ctx.counts, of_dy)
                    if needs[0]:
                        _cast_weights(layers, ctx.products[0], packed, ctx.counts, "dgrad.w")
                    if needs[1]:
                        _cast_rows(layers, ctx.products[0], rows, ctx.counts, (None, "wgrad.x"))
            for number, (begin, end) in enumerate(_spans(ctx.counts)):
                layer = layers[number]
                if begin < end:
                    kept = saved[4 * number : 4 * number + 4]
                    with layer.clock.within(ctx.batches[number]):
                        of_x, of_w = backward(layer, ctx.products[number], kept, dy[begin:end], needs)
                    if dx is not None:
                        dx[begin:end] = of_x
                    if dw is not None:
                        layer.part(dw).copy_(of_w)
                layer.end_call(ctx.batches[number])
        return _returned(ctx, dx, dw)


def _in_one_tensor(layers: Sequence[EmulatedExpert], batches: Sequence[int]) -> bool:
    """Return True if the layers' weights are the packed tensor, and nothing observes a single layer, or
    multiplies for it."""
    first = layers[0]
    whole = first.rows == "all" and not first.module.is_transposed and first.emulates
    return whole and first.context.probe is None and all(batch == batches[0] for batch in batches)


def _cast_together(
    layers: Sequence[EmulatedExpert], products: Sequence[Products], batches: Sequence[int], rows: Tensor
) -> bool:
    """Return True if one launch quantises an operand of all experts (`on_gpu.in_parts` says of which forms).
    Not if telemetry sees each with its source, experts differ in products, or weights have targets."""
    first = layers[0]
    return (
        cuda.runs_on(rows.device)
        and len(rows) > 0
        # Products take bf16 rows, and return that dtype, which must not round what they compute.
        and (rows.dtype == torch.bfloat16 or products[0].fprop.gemm == "bf16_out")
        and first.emulates
        and first.context.probe is None
        and all(each is products[0] or each == products[0] for each in products)
        and all(batch == batches[0] for batch in batches)
        and all(layer.target is None and layer.quantize is quantize for layer in layers)
    )


def _cast_rows(
    layers: Sequence[EmulatedExpert],
    products: Products,
    x: Tensor,
    counts: Sequence[int],
    slots: tuple[str | None, str | None],
) -> None:
    """Give the layers their operands of both slots, along the rows of x and down its columns, of which one
    launch can make those of all experts. x is bf16 [sum of counts, columns]; an expert with a count of zero
    gets none."""
    copies: list[on_gpu.Copies | None] = [None, None]
    for number, slot in enumerate(slots):
        quant = products.slot(slot) if slot and not products.dequantised(slot) else None
        rotation = getattr(products, slot.partition(".")[0]).hadamard if slot else None
        if slot and quant and on_gpu.in_parts(quant, rotation):
            draws = [layer.draws_at(slot) for layer in layers]
            copies[number] = quant, rotation, [(draw["where"], draw["product"]) for draw in draws]
    spans = [(begin, end - begin) for begin, end in _spans(counts)]
    made = on_gpu.quantize_parts(x, spans, (copies[0], copies[1]), layers[0].clock, quantize)
    for slot, copy, parts in zip(slots, copies, made, strict=True):
        for layer, one, count in zip(layers, parts, counts, strict=bool(parts)):
            if slot and copy and count:
                layer.made = layer.made | {slot: Operand(one.values, copy[0], *one[1:])}


def _cast_weights(
    layers: Sequence[EmulatedExpert], products: Products, packed: Tensor, counts: Sequence[int], slot: str
) -> None:
    """Give the layers that have tokens their operand of the weights, unless all are kept from before."""
    quant, rotation = products.slot(slot), getattr(products, slot.partition(".")[0]).hadamard
    used = [layer for layer, count in zip(layers, counts, strict=True) if count]
    if quant is None or all(layer.casts.find(slot, quant, rotation, layer.part(packed)) for layer in used):
        return
    weights, down = _matrices(packed.detach(), layers[0].module, layers[0].rows), slot == "dgrad.w"
    if weights.mT.is_contiguous():
        weights, down = weights.mT, not down
    memory, counts = weights.to(torch.bfloat16).flatten(0, 1).contiguous(), [weights.shape[1]] * len(layers)
    _cast_rows(layers, products, memory, counts, (None, slot) if down else (slot, None))


def _returned(ctx: Any, dx: Tensor | None, dw: Tensor | None) -> tuple[Tensor | None, ...]:
    divided = ctx.layers[0].context.divided
    if dw is not None and divided is not None and divided.index:
        dw.zero_()  # every rank has the whole one, and they are added later
    dx, dw = None if dx is None else dx.to(ctx.dtype), None if dw is None else dw.to(ctx.like[1])
    return dx, dw, None, None, None, None


def _spans(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    return pairwise(accumulate(counts, initial=0))
