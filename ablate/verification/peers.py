"""Differential tests of the quantiser against Transformer Engine's reference, torchao and ml_dtypes.

Each is optional and imported inside its own function. Both sides quantise the same tensors, and no number may
differ: +0 equals -0, NaN equals nothing. Deliberate differences of a library are left out. Other public
libraries are in benchmarks/libraries.py.
"""

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from importlib import metadata
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ablate.numerics.formats import ELEMENTS
from ablate.numerics.quantize import Operand, quantize
from ablate.numerics.rounding import ROUNDINGS
from ablate.numerics.spec import BlockScale, Hadamard, Outer, Quant, Range, Select
from ablate.verification.check_result import Row, present

Arrays = tuple[Tensor, ...]


@contextmanager
def shells(package: str, *subpackages: str) -> Iterator[None]:
    """Replace a package and some of its subpackages by empty modules within the block. Their submodules can
    then be imported, for a library whose `__init__` needs something that is missing. Afterwards sys.modules
    is restored, so that a real import still works."""

    def loaded() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] == package]

    kept = {name: sys.modules.pop(name) for name in loaded()}
    try:
        for name in (package, *(f"{package}.{sub}" for sub in subpackages)):
            shell(name, __path__=[str(metadata.distribution(package).locate_file(name.replace(".", "/")))])
        yield
    finally:
        for name in loaded():
            del sys.modules[name]
        sys.modules.update(kept)


def shell(name: str, **attributes: object) -> None:
    """Put a module with these attributes alone into sys.modules."""
    vars(sys.modules.setdefault(name, ModuleType(name))).update(attributes)


@cache
def tensors() -> dict[str, Tensor]:
    """Return the fixed bf16 tensors [64, 256], by name, that every quantiser receives."""
    shape, g = (64, 256), torch.Generator().manual_seed(20)
    normal = partial(torch.randn, shape, generator=g)
    exponent = torch.randint(-14, 1, (64, 1), generator=g)
    hit = torch.rand(shape, generator=g) < 0.01
    kept = torch.rand(2, 8, generator=g) < 0.5
    kinds = {
        "gaussian": normal(),
        "outliers": torch.where(hit, 1e4, 1.0) * normal(),  # most E4M3 scales become subnormal or zero
        "ties": torch.randint(-24, 25, shape, generator=g) * 0.25 * 2.0**exponent,  # of E2M1 and of E4M3
        "spread": normal() * 2.0**exponent,  # block scales over the whole of E4M3
        "zero_blocks": normal() * kept.repeat_interleave(32, 0).repeat_interleave(32, 1),
        "zero": torch.zeros(shape),
        "tiny": normal() * 1e-30,
        "huge": normal() * 1e30,
        "subnormal": normal() * 2.0**-130,
    }
    return {name: x.bfloat16() for name, x in kinds.items()}


def compared(what: str, ours: Callable, theirs: Callable, without: str = "", inputs: Arrays = ()) -> Row:
    """Compare two functions of a tensor on `inputs`, or on `tensors` but for those that `without` names."""
    used = inputs or [x for name, x in tensors().items() if name not in without.split()]
    pairs = [pair for x in used for pair in zip(ours(x), theirs(x), strict=True)]
    if other := [(list(a.shape), list(b.shape)) for a, b in pairs if a.shape != b.shape]:
        raise ValueError(f"{what}: ours is {other[0][0]}, theirs {other[0][1]}")
    elements = sum(a.numel() for a, _ in pairs)
    differ = sum(int((a.double() != b.double()).sum()) for a, b in pairs)
    return Row(what, f"{differ:,} of {elements:,} differ", "0 differ", elements > 0 and not differ)


def cast(element: str, theirs: Callable[[Tensor], Tensor]) -> Row:
    """Compare the cast to an element format, to nearest: Gaussians, every finite bf16 number (all numbers and
    halfway points of a small format are such), and its fp32 neighbours."""
    exact = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16).float()
    near = [torch.nextafter(exact, torch.tensor(end)) for end in (0.0, float("inf"))]
    y = torch.cat((exact, *near, torch.randn(8192, generator=torch.Generator().manual_seed(21))))
    ours: Callable[[Tensor], Tensor] = partial(ROUNDINGS["nearest"], grid=ELEMENTS[element])
    return compared(f"cast to {element}", lambda y: (ours(y),), lambda y: (theirs(y),), "", (y, -y))


def mx(element: str, rounding: str) -> Quant:
    """Return an MX quantiser: 1x32 blocks with power-of-two scales, and no outer scale. `rounding` is OCP's
    `floor`, which maps the power of two at or below a block's amax to the element's largest power of two, or
    `ceil`, which never saturates."""
    top = ELEMENTS[element].top_power if rounding == "floor" else None
    scale = BlockScale(format="e8m0", rounding=rounding)
    return Quant(element=element, block="1x32", scale=scale, range=Range(map_to=top), outer=None)


def quantized(quant: Quant, x: Tensor, rotation: Hadamard | None = None) -> Arrays:
    """Return code times block scale [rows, columns], and the block scales [rows, blocks]."""
    operand = quantize(x, quant, rotation=rotation)
    return operand.values, row_scales(operand)


def row_scales(operand: Operand) -> Tensor:
    """Return the block scales of each row, [rows, blocks]."""
    return present(operand.block_scale)[:, 0, :, 0].repeat_interleave(present(operand.quant).tile[0], 0)


class _Quantizer:
    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise


@cache
def te_reference() -> SimpleNamespace:
    """Return Transformer Engine's reference modules `nvfp4`, `current_scaling` and `gemm`, and its `formats`.
    The wheel without extras has no native part, so that a plain import fails. These modules need only three
    names of that part."""
    root = "transformer_engine.pytorch"
    with shells("transformer_engine", "pytorch", "pytorch.custom_recipes", "pytorch.tensor"):
        shell(f"{root}.quantized_tensor", Quantizer=_Quantizer, QuantizedTensorStorage=object)
        shell(f"{root}.tensor.utils", is_custom=lambda _: True)
        names = ("gemm", "reference_utils", "reference_nvfp4", "reference_current_scaling")
        gemm, utils, nvfp4, current = (
            importlib.import_module(f"{root}.custom_recipes.{name}") for name in names
        )
    return SimpleNamespace(nvfp4=nvfp4, current_scaling=current, gemm=gemm, formats=utils.Fp4Formats)


def te_quantizer(tile: tuple[int, int] = (1, 16), rht: bool = False, **options: Any) -> Any:
    """Return TE's reference quantiser for 1x16 or 16x16 tiles. `rht` turns on its column-wise random Hadamard
    transform. `options` are TE's own: row_scaled_nvfp4, nvfp4_use_4over6, nvfp4_e4m3_max,
    nvfp4_4over6_err_mode."""
    te = te_reference()
    return te.nvfp4.NVFP4QuantizerRef(dtype=te.formats.E2M1, quant_tile_shape=tile, with_rht=rht, **options)


def te_values(codes: Tensor, scales: Tensor) -> Tensor:
    """Return code times scale, fp32 [rows, columns], of packed codes and block scales."""
    decoded = te_reference().nvfp4.cast_from_fp4x2(codes, torch.float32)
    return decoded * scales.to(torch.float32).repeat_interleave(decoded.shape[1] // scales.shape[1], dim=1)


def te_mxfp4(x: Tensor) -> Arrays:
    """Return packed codes and scales. TE's quantize() itself fails: these scales have no global amax."""
    reference = te_reference().nvfp4.NVFP4QuantizerRef._quantize_blockwise_reference
    return reference(x, None, 32, 1, pow_2_scales=True, eps=0.0)


def _te_copies(what: str, quant: Quant, rotation: Hadamard | None = None, **options: Any) -> Row:
    """Compare values and block scales of a tensor and of its (rotated) transpose."""

    def ours(x: Tensor) -> Arrays:
        return *quantized(quant, x), *quantized(quant, x.t(), rotation)

    def theirs(x: Tensor) -> Arrays:
        q = te_quantizer(quant.tile, rht=rotation is not None, **options).quantize(x)
        return te_values(q.data, q.scale), q.scale, te_values(q.data_t, q.scale_t), q.scale_t

    # TE rotates by a product in bf16, which flushes subnormals on a CPU with bf16 instructions; the quantiser
    # never flushes.
    return compared(f"{what}, both copies", ours, theirs, "subnormal" if rotation else "")


def transformer_engine() -> Iterator[Row]:
    """Compare with the reference of NVIDIA's own kernel tests; NVFP4 must be equal bit for bit."""
    for block in ("1x16", "16x16"):
        yield _te_copies(f"NVFP4 {block}", Quant(block=block))
    yield _te_copies("NVFP4 1x16, transpose rotated by 16", Quant(), Hadamard())
    by_row = Quant(outer=Outer(granularity="row"))
    yield _te_copies("NVFP4 1x16, one amax a row", by_row, row_scaled_nvfp4=True)
    chosen = (("1x16", "mae", 256), ("1x16", "mse", 256), ("1x16", "mse", 448), ("16x16", "mae", 256))
    for block, criterion, bound in chosen:
        select = Select(among="scales", criterion=criterion)
        quant = Quant(block=block, select=select, outer=Outer(bound=float(bound)))
        options = {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": bound, "nvfp4_4over6_err_mode": criterion}
        yield _te_copies(f"Four Over Six {block} {criterion}, bound {bound}", quant, None, **options)

    def mxfp4(x: Tensor) -> Arrays:
        codes, scales = te_mxfp4(x)
        return te_values(codes, scales), scales

    yield compared("MXFP4 1x32, ceil", partial(quantized, mx("e2m1", "ceil")), mxfp4)


def torchao() -> Iterator[Row]:
    """Compare with PyTorch's MX formats, scales by floor and by ceil, and its E2M1 cast. Its NVFP4 divides in
    another order, so that ties differ (docs/project/conformance.md)."""
    for name in ("torchao", "torch.utils._pytree"):  # they log missing GPU libraries, and deprecations
        logging.getLogger(name).setLevel(logging.ERROR)
    from torchao.prototype.mx_formats import constants, kernels, mx_tensor
    from torchao.prototype.mx_formats.config import ScaleCalculationMode as Mode

    def theirs(dtype: torch.dtype | str, mode: Mode, x: Tensor) -> Arrays:
        scale, data = mx_tensor.to_mx(x, dtype, 32, mode)
        return mx_tensor.to_dtype(data, scale, dtype, 32, torch.float32), scale

    hardware = {name: getattr(torch, one.dtype) for name, one in ELEMENTS.items() if one.dtype}
    six_bits = {"e2m3": constants.DTYPE_FP6_E2M3, "e3m2": constants.DTYPE_FP6_E3M2}
    for element, dtype in {**hardware, **six_bits}.items():
        for rule, mode in {"floor": Mode.FLOOR, "ceil": Mode.RCEIL}.items():
            # torchao stores 2^-127 as the smallest scale, but divides by 2^-126 (floor) or by 1 (ceil).
            ours = partial(quantized, mx(element, rule))
            yield compared(f"MX {element} 1x32, {rule}", ours, partial(theirs, dtype, mode), "subnormal")
    yield cast("e2m1", lambda y: kernels.f4_unpacked_to_f32(kernels.f32_to_f4_unpacked(y)))


def ml_dtypes() -> Iterator[Row]:
    """Compare with the casts of JAX's and TensorFlow's number types."""
    import ml_dtypes as md

    types = {name: f"float{ELEMENTS[name].bits}_{name}fn" for name in ("e2m1", "e2m3", "e3m2", "e4m3")}
    types["e5m2"] = "float8_e5m2"

    def theirs(name: str, y: Tensor) -> Tensor:
        inside = y.clamp(-ELEMENTS[name].max, ELEMENTS[name].max)  # FP8 overflows to NaN or infinity
        return torch.from_numpy(inside.numpy().astype(getattr(md, types[name])).astype("float32"))

    for name in types:
        yield cast(name, partial(theirs, name))


PEERS = {"transformer_engine": transformer_engine, "ml_dtypes": ml_dtypes, "torchao": torchao}
"""Comparisons by the name under which each package is installed and imported."""
