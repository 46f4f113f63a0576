"""Differential tests of the quantiser against the public implementations that are installed.

Every peer is optional and imported inside its own function; none is installed here. If a peer deliberately
computes something else, this is left out, or compared with the largest fraction of mismatches that the
difference explains, and the reason.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ablate.numerics.formats import ELEMENTS, SCALES
from ablate.numerics.quantize import quantize
from ablate.numerics.rounding import ROUNDINGS, SCALE_ROUNDINGS
from ablate.numerics.spec import Hadamard, Outer, Quant, Select
from ablate.verification.peer_comparison import (
    Arrays,
    PeerComparison,
    cast,
    count,
    mx,
    on_tensors,
    on_values,
    quantized,
    quiet,
    shell,
    shells,
    values,
    version,
)


def compare(peer: str) -> list[PeerComparison]:
    """Compare the quantiser with one of PEERS, in everything that both compute alike.

    It takes about a second, mostly for importing torchao.

    Raises:
        ModuleNotFoundError: The peer is not installed.
        Exception: Any error of the peer, if its interface has changed.
    """
    installed = version(peer)
    if installed is None:
        raise ModuleNotFoundError(f"{peer} is not installed; {INSTALL[peer]}", name=peer)
    return [replace(comparison, peer=peer, version=installed) for comparison in PEERS[peer]()]


# --- Transformer Engine ---------------------------------------------------------------------------


class _Quantizer:
    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise


class _Storage:
    pass


@cache
def te_reference() -> SimpleNamespace:
    """Return Transformer Engine's reference modules: `nvfp4`, `current_scaling`, `gemm`, and `formats`
    (Fp4Formats).

    The wheel without extras has no native part, so that a plain import fails. These modules need only three
    names of that part.
    """
    root = "transformer_engine.pytorch"
    with shells("transformer_engine", "pytorch", "pytorch.custom_recipes", "pytorch.tensor"):
        shell(f"{root}.quantized_tensor", Quantizer=_Quantizer, QuantizedTensorStorage=_Storage)
        shell(f"{root}.tensor.utils", is_custom=lambda _: True)
        names = ("gemm", "reference_utils", "reference_nvfp4", "reference_current_scaling")
        gemm, utils, nvfp4, current = (
            importlib.import_module(f"{root}.custom_recipes.{name}") for name in names
        )
    return SimpleNamespace(nvfp4=nvfp4, current_scaling=current, gemm=gemm, formats=utils.Fp4Formats)


def te_quantizer(tile: tuple[int, int] = (1, 16), rht: bool = False, **options: Any) -> Any:
    """Return TE's reference quantiser for 1x16 or 16x16 tiles.

    `rht` turns on its column-wise random Hadamard transform. `options` are TE's own: row_scaled_nvfp4,
    nvfp4_use_4over6, nvfp4_e4m3_max, nvfp4_4over6_err_mode.
    """
    te = te_reference()
    return te.nvfp4.NVFP4QuantizerRef(dtype=te.formats.E2M1, quant_tile_shape=tile, with_rht=rht, **options)


def te_values(codes: Tensor, scales: Tensor) -> Tensor:
    """Return code times scale, fp32 [rows, columns], of packed codes and block scales."""
    decoded = te_reference().nvfp4.cast_from_fp4x2(codes, torch.float32)
    return decoded * scales.to(torch.float32).repeat_interleave(decoded.shape[1] // scales.shape[1], dim=1)


def transformer_engine() -> Iterator[PeerComparison]:
    """Compare with the reference of NVIDIA's own kernel tests; NVFP4 must be equal bit for bit."""
    for block in ("1x16", "16x16"):
        yield _te_copies(f"NVFP4 {block}", Quant(block=block))
    yield _te_copies("NVFP4 1x16, transpose rotated by 16", Quant(), Hadamard())
    yield _te_copies(
        "NVFP4 1x16, one amax a row", Quant(outer=Outer(granularity="row")), row_scaled_nvfp4=True
    )
    for block, criterion, bound in (
        ("1x16", "mae", 256),
        ("1x16", "mse", 256),
        ("1x16", "mse", 448),
        ("16x16", "mae", 256),
    ):
        quant = Quant(
            block=block, select=Select(among="scales", criterion=criterion), outer=Outer(bound=float(bound))
        )
        options = {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": bound, "nvfp4_4over6_err_mode": criterion}
        yield _te_copies(f"Four Over Six {block} {criterion}, bound {bound}", quant, None, **options)
    yield on_tensors("MXFP4 1x32, ceil", partial(quantized, mx("e2m1", "ceil")), _te_mxfp4)
    eight_bits = {name: dtype for name, dtype in HARDWARE.items() if ELEMENTS[name].bits == 8}
    for (
        element,
        dtype,
    ) in eight_bits.items():  # where S overflows, TE caps it by the input's dtype and not at FLT_MAX
        what = f"FP8 {element} codes, one scale a tensor"
        yield on_tensors(what, partial(_current, element), partial(_te_current, dtype), without="subnormal")


def _te_copies(what: str, quant: Quant, rotation: Hadamard | None = None, **options: Any) -> PeerComparison:
    """Compare values and block scales of a tensor and of its (rotated) transpose."""

    def ours(x: Tensor) -> Arrays:
        return *quantized(quant, x), *quantized(quant, x.t(), rotation)

    def theirs(x: Tensor) -> Arrays:
        q = te_quantizer(quant.tile, rht=rotation is not None, **options).quantize(x)
        return te_values(q.data, q.scale), q.scale, te_values(q.data_t, q.scale_t), q.scale_t

    # TE rotates by a product in bf16, which flushes subnormals on a CPU with bf16 instructions; the quantiser
    # never flushes.
    return on_tensors(f"{what}, both copies", ours, theirs, without="subnormal" if rotation else "")


def _te_mxfp4(x: Tensor) -> Arrays:
    # TE's quantize() fails for power-of-two scales, since they have no global amax.
    reference = te_reference().nvfp4.NVFP4QuantizerRef._quantize_blockwise_reference
    codes, scales = reference(x, None, 32, 1, pow_2_scales=True, eps=0.0)
    return te_values(codes, scales), scales


def _te_current(dtype: torch.dtype, x: Tensor) -> Arrays:
    return (te_reference().current_scaling.CurrentScalingQuantizerRef(dtype).quantize(x).data,)


def _current(element: str, x: Tensor) -> Arrays:
    return (quantize(x, Quant(element=element, block=None, scale=None, outer=Outer(bound=1.0))).values,)


HARDWARE = {name: getattr(torch, element.dtype) for name, element in ELEMENTS.items() if element.dtype}
"""Element formats that torch has a type for."""


# --- torchao --------------------------------------------------------------------------------------


def torchao() -> Iterator[PeerComparison]:
    """Compare with PyTorch's MX formats, scales by floor and by ceil, its E2M1 cast, and its NVFP4.

    Its NVFP4 divides in another order.
    """
    with quiet():
        from torchao.prototype.mx_formats import constants, kernels, mx_tensor, nvfp4_tensor
        from torchao.prototype.mx_formats.config import ScaleCalculationMode as Mode

    def theirs(dtype: torch.dtype | str, mode: Mode, x: Tensor) -> Arrays:
        scale, data = mx_tensor.to_mx(x, dtype, 32, mode)
        return mx_tensor.to_dtype(data, scale, dtype, 32, torch.float32), scale

    def nvfp4(x: Tensor) -> Arrays:
        scale, data = nvfp4_tensor.nvfp4_quantize(
            x, 16, nvfp4_tensor.per_tensor_amax_to_scale(x.abs().amax())
        )
        return (
            kernels.f4_unpacked_to_f32(kernels.unpack_uint4(data)) * scale.float().repeat_interleave(16, 1),
        )

    six_bits = {"e2m3": constants.DTYPE_FP6_E2M3, "e3m2": constants.DTYPE_FP6_E3M2}
    for element, dtype in {**HARDWARE, **six_bits}.items():
        for rule, mode in {"floor": Mode.FLOOR, "ceil": Mode.RCEIL}.items():
            # torchao stores 2^-127 as the smallest scale, but divides by 2^-126 (floor) or by 1 (ceil).
            what, ours = f"MX {element} 1x32, {rule}", partial(quantized, mx(element, rule))
            yield on_tensors(what, ours, partial(theirs, dtype, mode), without="subnormal")

    yield on_values(
        "cast to e2m1",
        ELEMENTS["e2m1"],
        cast("e2m1"),
        lambda y: kernels.f4_unpacked_to_f32(kernels.f32_to_f4_unpacked(y)),
    )
    why = (
        "torchao rounds amax / 2688 and divides by that, so exact ties move by an ulp; it keeps block scales"
        " at 2^-6 or more"
    )
    yield on_tensors(
        "NVFP4 1x16",
        lambda x: quantized(Quant(), x)[:1],
        nvfp4,
        without="zero subnormal",
        allowed=0.02,
        why=why,
    )


# --- gfloat ---------------------------------------------------------------------------------------


def gfloat() -> Iterator[PeerComparison]:
    """Compare with Graphcore's definitions in double precision: grids, roundings, OCP's rule for MX."""
    import gfloat as gf
    from gfloat import RoundMode, formats

    def info(k: int, precision: int, bias: int, **rules: Any) -> gf.FormatInfo:
        rules = {
            "is_signed": True,
            "has_nz": True,
            "num_high_nans": 0,
            "has_subnormals": True,
            "is_twos_complement": False,
        } | rules
        return gf.FormatInfo(f"k{k}p{precision}", k, precision, bias=bias, domain=gf.Domain.Finite, **rules)

    def theirs(info: gf.FormatInfo, mode: RoundMode, y: Tensor, **bits: Any) -> Tensor:
        return torch.from_numpy(gf.round_ndarray(info, y.double().numpy(), mode, sat=True, **bits))

    def stochastic(name: str, width: int) -> PeerComparison:
        """Compare stochastic casts: rounding up if 2^width f >= bits + 1 is gfloat's mode with ~bits."""
        grid = ELEMENTS[name]
        bits = torch.randint(
            0, 1 << width, values(grid).shape, generator=torch.Generator().manual_seed(width)
        )
        given = {"srbits": (1 << width) - 1 - bits.numpy(), "srnumbits": width}
        ours = partial(ROUNDINGS["stochastic"], grid=grid, bits=bits.float(), width=width)
        other = partial(theirs, elements[name], RoundMode.StochasticFastest, **given)
        return on_values(f"stochastic cast to {name}, {width} bits", grid, ours, other)

    def blocks(name: str, x: Tensor) -> Arrays:
        tiles = x.double().view(-1, 32).numpy()
        scales = np.array([[gf.compute_scale_amax(elements[name].emax, tile)] for tile in tiles])
        rounded = gf.round_ndarray(elements[name], tiles / scales, sat=True) * scales
        return torch.from_numpy(rounded).view(x.shape), torch.from_numpy(scales).view(x.shape[0], -1)

    nearest, floor, ceil = RoundMode.TiesToEven, RoundMode.TowardZero, RoundMode.TowardPositive
    elements = {
        "e2m1": formats.format_info_ocp_e2m1,
        "e2m3": formats.format_info_ocp_e2m3,
        "e3m2": formats.format_info_ocp_e3m2,
        "e4m3": formats.format_info_ocp_e4m3,
        "e5m2": formats.format_info_ocp_e5m2,
    }
    for name, kind in {**elements, "e1m2": info(4, 3, bias=1), "e3m0": info(4, 1, bias=3)}.items():
        yield on_values(f"cast to {name}", ELEMENTS[name], cast(name), partial(theirs, kind, nearest))
    fraction = partial(theirs, info(4, 3, bias=1), nearest)
    yield on_values("cast to int4", ELEMENTS["int4"], cast("int4"), lambda y: fraction(y.double() / 4) * 4)
    for name in elements:
        yield from (stochastic(name, width) for width in (8, 16, 24))
    ue5m3 = info(
        8, 4, bias=15, is_signed=False, has_nz=False, num_high_nans=8
    )  # the top binade stays unused: up to 61440
    for name, kind in {"e4m3": elements["e4m3"], "ue5m3": ue5m3}.items():
        for rule, mode in {"nearest": nearest, "floor": floor, "ceil": ceil}.items():
            ours = partial(SCALE_ROUNDINGS[rule], grid=SCALES[name])
            yield on_values(
                f"block scale to {name}, {rule}",
                SCALES[name],
                ours,
                partial(theirs, kind, mode),
                signed=False,
            )
    for name in elements:
        yield on_tensors(
            f"MX {name} 1x32, floor", partial(quantized, mx(name, "floor")), partial(blocks, name)
        )


# --- ml_dtypes ------------------------------------------------------------------------------------


def ml_dtypes() -> Iterator[PeerComparison]:
    """Compare with the number types of JAX and TensorFlow: grids, casts, and NVFP4 in NumPy with them."""
    import ml_dtypes as md

    types = {
        "e2m1": md.float4_e2m1fn,
        "e2m3": md.float6_e2m3fn,
        "e3m2": md.float6_e3m2fn,
        "e4m3": md.float8_e4m3fn,
        "e5m2": md.float8_e5m2,
    }

    def theirs(name: str, y: np.ndarray) -> np.ndarray:
        top = np.float32(ELEMENTS[name].max)  # their FP8 casts overflow to NaN or infinity
        return np.clip(y, -top, top).astype(types[name]).astype(np.float32)

    for name, dtype in types.items():
        codes = np.arange(2 ** ELEMENTS[name].bits, dtype=np.uint8).view(dtype).astype(np.float32)
        points = torch.from_numpy(codes[np.isfinite(codes)])
        yield count(f"every code of {name} stays itself", [(cast(name)(points), points)])
        yield on_values(
            f"cast to {name}",
            ELEMENTS[name],
            cast(name),
            lambda y, name=name: torch.from_numpy(theirs(name, y.numpy())),
        )
    for block in ("1x16", "16x16"):
        numpy = partial(_numpy_nvfp4, theirs, int(block.split("x")[0]))
        yield on_tensors(f"NVFP4 {block}", partial(quantized, Quant(block=block)), numpy)


def _numpy_nvfp4(cast: Callable, rows: int, x: Tensor) -> Arrays:
    """Quantise with two-level scaling in Transformer Engine's order, one fp32 rounding per step."""
    one, top = np.float32(1), np.finfo(np.float32).max
    tiles = x.float().numpy().reshape(x.shape[0] // rows, rows, x.shape[1] // 16, 16)
    amax = np.abs(tiles).max()
    with np.errstate(divide="ignore", over="ignore"):
        outer = np.minimum(np.float32(2688) / amax, top) if amax else one
        multiplier = outer * (one / np.float32(6))
        scale = cast("e4m3", np.minimum(np.abs(tiles).max(axis=(1, 3), keepdims=True) * multiplier, top))
        codes = cast("e2m1", tiles * np.minimum(one / (scale * (one / outer)), top))
    return torch.from_numpy((codes * scale).reshape(x.shape)), torch.from_numpy(
        np.repeat(scale[:, 0, :, 0], rows, axis=0)
    )


# --- fouroversix ----------------------------------------------------------------------------------


def fouroversix() -> Iterator[PeerComparison]:
    """Compare with the PyTorch reference of Four Over Six, which also has IF4, NVINT4 and MXFP4 by ceil.

    It divides by zero in a zero MXFP4 block, and its outer scale overflows for subnormal tensors; both are
    left out.
    """
    with shells("fouroversix", "quantize", "quantize.pytorch"):
        reference = importlib.import_module("fouroversix.quantize.pytorch.reference")

    def theirs(dtype: str, rule: str, block: str, x: Tensor) -> Arrays:
        kind, rule = reference.DataType(dtype), reference.ScaleRule(rule)
        options = {
            "pack_values": False,
            "use_blackwell_scale_layout": False,
            "block_scale_2d": block == "16x16",
        }
        codes, scales, _ = reference.quantize_to_fp4(x, fp4_format=kind, scale_rule=rule, **options)
        scales = scales.float().view(x.shape[0], -1)
        steps = torch.where(scales < 0, 6 / 7, 1.0).repeat_interleave(
            kind.block_size, 1
        )  # IF4's sign: a block on the INT4 grid
        return codes.float() * steps * scales.abs().repeat_interleave(kind.block_size, 1), scales.abs()

    why = "its sums of errors run in another order, which decides between nearly equal candidates"
    for block, criterion, rule in (
        ("1x16", "mse", "mse"),
        ("1x16", "mae", "mae"),
        ("1x16", "absmax", "abs_max"),
        ("16x16", "mse", "mse"),
    ):
        quant = Quant(
            block=block, select=Select(among="scales", criterion=criterion), outer=Outer(bound=256.0)
        )
        exact = rule == "abs_max"
        yield on_tensors(
            f"Four Over Six {block} {criterion}, bound 256",
            partial(quantized, quant),
            partial(theirs, "nvfp4", rule, block),
            without="subnormal",
            allowed=0.0 if exact else 0.001,
            why="" if exact else why,
        )
    why = (
        "its sums of errors run in another order, and it multiplies by fp32(7/6) where we divide by"
        " fp32(6/7): ties differ"
    )
    if4 = partial(quantized, Quant(select=Select(among="grids", criterion="mse")))
    yield on_tensors(
        "IF4 1x16 mse",
        if4,
        partial(theirs, "if4", "mse", "1x16"),
        without="subnormal",
        allowed=0.001,
        why=why,
    )
    ceil = partial(quantized, mx("e2m1", "ceil"))
    yield on_tensors(
        "MXFP4 1x32, ceil",
        ceil,
        partial(theirs, "mxfp4", "static_6", "1x32"),
        without="zero zero_blocks subnormal",
    )
    why = (
        "it takes block_amax / 6 * S, the order of Transformer Engine up to 2.14, where exact ties of E4M3"
        " round otherwise"
    )
    for name, dtype, element in (("NVFP4", "nvfp4", "e2m1"), ("NVINT4", "nvint4", "int4")):
        ours = partial(quantized, Quant(element=element))
        yield on_tensors(
            f"{name} 1x16",
            ours,
            partial(theirs, dtype, "static_6", "1x16"),
            without="subnormal",
            allowed=0.005,
            why=why,
        )


INSTALL = {
    "transformer_engine": "pip install transformer-engine==2.20.2, without extras: pure Python, no GPU",
    "ml_dtypes": "pip install ml_dtypes",
    "gfloat": "pip install gfloat",
    "torchao": "pip install torchao",
    "fouroversix": "SKIP_CUDA_BUILD=1 pip install --no-build-isolation --no-deps fouroversix",
}
PEERS = {
    "transformer_engine": transformer_engine,
    "ml_dtypes": ml_dtypes,
    "gfloat": gfloat,
    "torchao": torchao,
    "fouroversix": fouroversix,
}
"""Comparisons by the name under which each package is installed and imported."""
