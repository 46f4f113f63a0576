"""The engine `scaled_mm`: the bytes that tensor cores get, factors, shapes, refusals; and FP8, which torch multiplies on a CPU.

FP4 and MX products run over a double that reads the bytes by code of its own (`support.tensor_cores`). What real
kernels return is no matter of these tests.
"""

import pytest
import torch
import torch.nn.functional as F
from support.cases import every
from support.linears import drawn, run
from support.tensor_cores import FAULTS, Broken, TensorCores, exact_product
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ablate.engines import converter
from ablate.engines.emulated_layer import EmulatedLinear
from ablate.engines.hardware import Machine, scaled_refusal
from ablate.engines.scaled_mm import Factors, Native, ScaledLinear, convert
from ablate.numerics.encoded import decode, encode
from ablate.numerics.kernels.cuda import PLAIN
from ablate.numerics.philox import Clock
from ablate.numerics.product import alpha, split_product
from ablate.numerics.quantize import Operand, quantize
from ablate.numerics.spec import BlockScale, Outer, Quant, Range, Transform
from ablate.numerics.stored import swizzle, unswizzle
from ablate.recipes import PRESETS
from ablate.recipes.recipe import SLOTS, Dgrad, Fprop, Products, Run, Wgrad
from ablate.recipes.scaled_mapping import NAMES, families, plan, refusals
from ablate.recipes.te_mapping import variants

BACKENDS = ("cublaslt", "cudnn", "cutlass")
SHAPES = ((64, 96, 128), (40, 96, 48), (33, 81, 17), (16, 272, 130))
"""Tokens, inputs and outputs: multiples of 32; of 8; of nothing; more than a tile of 128 rows."""
OPERANDS = {"fprop": ("fprop.x", "fprop.w"), "dgrad": ("dgrad.g", "dgrad.w"), "wgrad": ("wgrad.g", "wgrad.x")}


def native(cores: TensorCores, backend: str = "cublaslt") -> Native:
    return Native(backend, cores.scaled_mm, cores.mm_fp4)


class Kept:
    """A layer that keeps its products: both operands, the output's type, the result, and its last steps."""

    def multiply(self, a, b, out, finish=PLAIN):
        result = super().multiply(a, b, out, finish)
        self.seen.append((a, b, out, result, finish))
        return result


class Emulated(Kept, EmulatedLinear):
    """The emulator's layer."""


class Scaled(Kept, ScaledLinear):
    """The engine's layer."""


def pair(products: Products, shape: tuple[int, int, int], how: Native) -> tuple[Emulated, Scaled]:
    """An emulated and a scaled layer with one weight, at step 3."""
    layers = []
    for kind, more in ((Emulated, {}), (Scaled, {"native": how})):
        linear = nn.Linear(shape[1], shape[2], bias=False)
        linear.weight.data = drawn(shape[2], shape[1], seed=0) * 0.1
        layer = kind(linear, "blocks.0.linear", Clock(seed=5, step=3), torch.bfloat16, **more)
        layer.products, layer.seen = products, []
        layers.append(layer)
    return layers[0], layers[1]


def inputs(shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """x with outliers, and dy whose rows are of many sizes."""
    tokens, inside, outside = shape
    sizes = torch.linspace(-8, 0, tokens).exp2().bfloat16().float()[:, None]
    return drawn(tokens, inside, seed=1, outliers=True), (
        drawn(tokens, outside, seed=2) * sizes
    ).bfloat16().float()


def every_product():
    """Yield the products of every preset that quantises something, over its schedule, each once."""
    every = (products for make in PRESETS.values() for products in variants(make()))
    return [products for products in dict.fromkeys(every) if not products.plain]


def compared(
    products: Products, shape, backend: str = "cublaslt", cores: TensorCores | None = None
) -> dict[str, int]:
    """Compare the bytes of every native product with the emulator's operands, and results with an fp64 product of them.

    Returns the number of elements compared, by slot.
    """
    cores = cores or TensorCores()
    first = len(cores.calls)
    emulated, scaled = pair(products, shape, native(cores, backend))
    x, dy = inputs(shape)
    run(emulated, x, dy)
    run(scaled, x, dy)
    planned = plan(products, backend)
    calls = iter(cores.calls[first:])
    assert len(cores.calls) - first == sum(given.runs == "native" for given in planned.values())
    counts = {}
    for (name, given), ours, theirs in zip(planned.items(), emulated.seen, scaled.seen, strict=True):
        (a, b, out, result, finish), returned = ours, theirs[3]
        if given.runs != "native":
            assert torch.equal(result, returned), name
            continue
        call = next(calls)
        for slot, (operand, *_), read in zip(OPERANDS[name], (a, b), (call.a, call.b), strict=True):
            rows, columns = operand.values.shape
            assert torch.equal(read[:rows, :columns], operand.values.double()), slot
            assert not read[rows:].any(), slot
            assert not read[:, columns:].any(), slot
            counts[slot] = operand.values.numel()
        rests = exact_product(a[0], b[0], torch.float32 if given.parts else out)
        expected = split_product(a, b, out, rests, finish)
        assert torch.equal(returned, expected), name
        # The emulator's own result, whose sums are in fp32 and in another order.
        far = (result.double() - expected.double()).abs()
        bound = 2.0**-7 * expected.double().abs() + 1e-5 * expected.double().abs().max()
        assert (far <= bound).all(), name
    return counts


# --- the bytes, the factor and the result of every preset -----------------------------------------


@pytest.fixture(scope="module")
def all_presets() -> tuple[dict[str, int], TensorCores]:
    """The comparison of every preset at two odd shapes: elements compared by slot, and the calls."""
    cores, counts = TensorCores(), dict.fromkeys(SLOTS, 0)
    for products in every_product():
        for shape in SHAPES[2:]:
            for slot, count in compared(products, shape, cores=cores).items():
                counts[slot] += count
    return counts, cores


def test_operands_of_every_native_product_of_every_preset_are_the_emulators(all_presets):
    """Bit for bit; and each result is that of an fp64 product, rounded once."""
    counts, cores = all_presets
    assert min(counts.values()) > 50_000
    assert len(cores.calls) > 80


@every(backend=("cudnn", "cutlass"), shape=SHAPES[1:3])
def test_flashinfer_gets_the_same_bytes(backend, shape):
    for name in ("nvfp4", "mxfp4", "mxfp4_backward", "quartet2", "row_scaled", "averis"):
        compared(PRESETS[name]().products, shape, backend)


EXTRA = {
    "blocks of 64, e4m3": Quant(block="1x64"),
    "blocks of 32x32, e8m0": Quant(
        block="32x32", scale=BlockScale(format="e8m0", rounding="ceil"), outer=None
    ),
    "blocks of 128, e8m0": Quant(block="1x128", scale=BlockScale(format="e8m0"), outer=None),
    "no block scale": Quant(block=None, scale=None, outer=Outer(bound=1.0)),
    "no outer scale": Quant(outer=None),
    "rows": Quant(outer=Outer(granularity="row")),
    "percentile": Quant(outer=Outer(statistic="percentile:0.9")),
    "int4 in e4m3": Quant(element="int4", scale=BlockScale(format="e8m0"), block="1x32", outer=None),
    "e3m0 in e4m3": Quant(element="e3m0", block=None, scale=None, outer=Outer(bound=1.0)),
    "MXFP4 with an outer scale": Quant(
        block="1x32", scale=BlockScale(format="e8m0"), outer=Outer(bound=2.0**10)
    ),
    "MXFP4, rows": Quant(
        block="1x32", scale=BlockScale(format="e8m0"), outer=Outer(granularity="row", bound=2.0**10)
    ),
    "prescaled": Quant(
        block="1x32",
        scale=BlockScale(format="e8m0", rounding="floor"),
        range=Range(map_to=4.0, prescale=0.75),
        outer=None,
    ),
    "the mean apart": Quant(transform=Transform(mean=True)),
    "channels apart, rows": Quant(transform=Transform(channels=0.1), outer=Outer(granularity="row")),
    "MXFP4, patched": Quant(
        block="1x32", scale=BlockScale(format="e8m0"), outer=None, transform=Transform(patch=0.1)
    ),
    "FP8, clamped": Quant(
        element="e4m3", block=None, scale=None, outer=Outer(bound=1.0), transform=Transform(clamp=0.99)
    ),
}
FAMILIES = {
    "blocks of 64, e4m3": "nvfp4",
    "blocks of 32x32, e8m0": "mxfp4",
    "blocks of 128, e8m0": "mxfp4",
    "no block scale": "nvfp4",
    "no outer scale": "nvfp4",
    "rows": "nvfp4",
    "percentile": "nvfp4",
    "int4 in e4m3": "mxfp8",
    "e3m0 in e4m3": "fp8",
    "MXFP4 with an outer scale": "mxfp8",
    "MXFP4, rows": "mxfp8",
    "prescaled": "mxfp8",
    "the mean apart": "nvfp4",
    "channels apart, rows": "nvfp4",
    "MXFP4, patched": "mxfp8",
    "FP8, clamped": "fp8",
}


@every(name=EXTRA, wide=(False, True))
def test_what_no_preset_has_fits_too(name, wide):
    """Also with every product left in fp32, where the result has no rounding to hide behind."""
    quant, out = EXTRA[name], "fp32_out" if wide else "bf16_out"
    products = Products(
        fprop=Fprop(x=quant, w=quant, gemm=out),
        dgrad=Dgrad(g=quant, w=quant, gemm=out),
        wgrad=Wgrad(g=quant, x=quant, dw="fp32" if wide else "bf16"),
    )
    family = "mxfp8" if wide and FAMILIES[name] == "mxfp4" else FAMILIES[name]
    assert {given.family for given in plan(products).values()} == {family}
    compared(products, SHAPES[2])


def test_operands_of_two_kinds_meet_in_a_family_that_holds_both():
    four = Quant(block="1x32", scale=BlockScale(format="e8m0"), outer=None)
    eight = four.model_copy(update={"element": "e4m3"})
    products = Products(fprop=Fprop(x=eight, w=four), wgrad=Wgrad(g=four, x=eight))
    assert [plan(products)[name].family for name in ("fprop", "wgrad")] == ["mxfp8", "mxfp8"]
    compared(products, SHAPES[1])


# --- torch's own function -------------------------------------------------------------------------


def test_the_installed_torchs_shape_function_takes_every_call(all_presets):
    """torch's own checks for a GPU, on tensors without memory; of MXFP4 they count the scales of half of K."""
    checked = set()
    with FakeTensorMode():
        for call in all_presets[1].calls:
            mat_a, _, _, kind, *_ = call.arguments
            sort = (mat_a.dtype, str(kind), call.a.shape, call.b.shape, call.out)
            if sort in checked or (
                mat_a.dtype == torch.float4_e2m1fn_x2 and kind == [F.ScalingType.BlockWise1x32]
            ):
                continue
            result = F.scaled_mm(*map(on_gpu, call.arguments), **call.options)
            assert result.shape == (len(call.a), len(call.b))
            assert result.dtype == call.out
            checked.add(sort)
    assert {sort[0] for sort in checked} == {torch.float4_e2m1fn_x2, torch.float8_e4m3fn, torch.float8_e5m2}
    assert len(checked) > 20


def on_gpu(value):
    """An argument with its tensors' shapes, strides and dtypes on a GPU that need not exist."""
    if isinstance(value, list):
        return [on_gpu(one) for one in value]
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda:0")


FP8 = Quant(element="e4m3", block=None, scale=None, outer=Outer(bound=1.0))
ROWS = FP8.model_copy(update={"outer": Outer(granularity="row", bound=1.0)})


@every(x=(FP8, ROWS), w=(FP8, ROWS), g=("e4m3", "e5m2"), shape=SHAPES[1:3], wide=(False, True))
def test_torch_multiplies_fp8_on_a_cpu_as_the_emulator_does(x, w, g, shape, wide):
    """The real call. It differs by the order of additions, and with rows by the order of two factors."""
    gradient = x.model_copy(update={"element": g})
    out = "fp32_out" if wide else "bf16_out"
    products = Products(
        fprop=Fprop(x=x, w=w, gemm=out),
        dgrad=Dgrad(g=gradient, w=w, gemm=out),
        wgrad=Wgrad(g=gradient, x=x, dw="fp32" if wide else "bf16"),
    )
    assert {given.family for given in plan(products).values()} == {"fp8"}
    emulated, scaled = pair(products, shape, Native())
    inside = inputs(shape)
    run(emulated, *inside)
    run(scaled, *inside)
    for ((a,), (b,), out, ours, _), (*_, theirs, _) in zip(emulated.seen, scaled.seen, strict=True):
        expected = exact_product(a, b, torch.float32).double()
        reach = magnitudes(a, b) * 2.0**-20
        step = 2.0**-7 * expected.abs() if out == torch.bfloat16 else 0.0
        for got in (ours, theirs):
            assert ((got.double() - expected).abs() <= reach + step).all()


def magnitudes(a: Operand, b: Operand) -> Tensor:
    """Sums of the magnitudes of all terms, with their factor."""
    return a.dequantize().abs().double() @ b.dequantize().abs().double().t()


# --- layout and codes -----------------------------------------------------------------------------


@every(rows=(1, 33, 128, 130, 300), columns=(1, 4, 9))
def test_scales_lie_where_cublas_manual_and_torchao_put_them(rows, columns):
    from torchao.prototype.mx_formats.utils import from_blocked, to_blocked

    g = torch.Generator().manual_seed(rows * 100 + columns)
    scales = torch.randint(0, 255, (rows, columns), generator=g, dtype=torch.uint8)
    flat = swizzle(scales)
    row, column = (
        axis.flatten() for axis in torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    )
    tile = row // 128 * -(-columns // 4) + column // 4
    place = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
    assert torch.equal(flat[place], scales[row, column])
    assert torch.equal(flat, to_blocked(scales, use_triton_kernel=False).flatten())
    tall, wide = rows + -rows % 128, columns + -columns % 4
    assert torch.equal(from_blocked(flat, tall, wide)[:rows, :columns], scales)
    assert torch.equal(unswizzle(flat, rows, columns), scales)


def test_a_known_operand_has_known_bytes():
    """Codes 1, -6, 0.5 and -0 in one block: even columns in the low nibbles; the scale of row 33 at byte 33 % 32 * 16 + 4."""
    values = torch.zeros(34, 16)
    values[33, :4] = torch.tensor([1.0, -6.0, 0.5, -0.0]) * 0.25
    scale = torch.ones(34, 1, 1, 1)
    scale[33] = 0.25
    made = encode(Operand(values, Quant(), torch.tensor(1.0), scale), "nvfp4")
    assert made.data.view(torch.uint8)[33, :2].tolist() == [0x2 | 0xF << 4, 0x1 | 0x8 << 4]
    assert made.scales.view(torch.uint8)[20].item() == 0x28  # 0.25 in e4m3: exponent 5, bias 7
    assert made.scales.view(torch.uint8)[0].item() == 0x38  # 1, of row 0
    assert made.data.shape == (64, 16)


@every(family=NAMES)
def test_what_is_encoded_is_read_back(family):
    quants = {
        "nvfp4": Quant(block="16x16"),
        "mxfp4": EXTRA["blocks of 32x32, e8m0"],
        "fp8": FP8,
        "mxfp8": EXTRA["int4 in e4m3"],
    }
    operand = quantize(drawn(45, 100, seed=3) * 37, quants[family])
    made = encode(operand, family)
    back = decode(made)
    assert torch.equal(back[:45, : operand.values.shape[1]], operand.values.float())
    assert not back[45:].any()


@pytest.mark.parametrize("preset", ["nvfp4", "mxfp4", "mxfp8", "fp8_current"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_stays_so(preset, bad):
    """FP4 has no code for it: it must not become a 6."""
    products = PRESETS[preset]().products
    cores = TensorCores()
    emulated, scaled = pair(products, (32, 64, 32), native(cores))
    x, _ = inputs((32, 64, 32))
    x[5, 7] = bad
    with torch.no_grad():
        ours, theirs = emulated(x), scaled(x)
    assert not ours[5].isfinite().any()
    assert torch.equal(ours.isfinite(), theirs.isfinite())
    assert int(emulated.nonfinite) == int(scaled.nonfinite) == 1


def test_a_block_of_scale_zero_adds_nothing():
    x = torch.ones(32, 64) * 2.0**100
    x[:, :16] = 2.0**-40
    operand = quantize(x.bfloat16(), Quant())
    assert not operand.block_scale[:, 0, 0].any()
    back = decode(encode(operand, "nvfp4"))
    assert torch.equal(back, operand.values.float())
    assert not back[:, :16].any()


@every(shape=((0, 64, 32), (32, 64, 32)))
def test_a_layer_without_tokens_has_an_empty_output_and_no_gradient(shape):
    for preset in ("nvfp4", "fp8_current"):
        _, scaled = pair(PRESETS[preset]().products, shape, native(TensorCores()))
        y, dx, dw = run(scaled, torch.zeros(shape[0], 64), torch.zeros(shape[0], 32))
        assert y.shape == (shape[0], 32)
        assert not dw.any()
        assert dx.shape == (shape[0], 64)


# --- faults that the comparison finds -------------------------------------------------------------


@every(fault=FAULTS)
def test_a_fault_would_be_seen(fault):
    with pytest.raises(AssertionError):
        compared(PRESETS["nvfp4"]().products, SHAPES[0], cores=Broken(fault))


# --- factors --------------------------------------------------------------------------------------


def test_the_factor_of_a_product_is_the_emulators_alpha_to_the_bit():
    a = quantize(drawn(32, 64, seed=7) * 3.1, Quant())
    b = quantize(drawn(48, 64, seed=8) * 0.07, Quant(outer=Outer(bound=256.0)))
    cores = TensorCores()
    made = [encode(part, "nvfp4") for part in (a, b)]
    native(cores).product(*made, Factors.of(a, b), torch.bfloat16)
    assert torch.equal(cores.calls[0].factor, alpha(a, b))
    native(cores, "cudnn").product(*made, Factors.of(a, b), torch.bfloat16)
    assert torch.equal(cores.calls[1].factor, alpha(a, b))


def test_factors_of_rows_of_fp8_are_two_whose_product_is_alpha_up_to_three_roundings():
    a, b = (quantize(drawn(rows, 64, seed=rows), ROWS) for rows in (32, 48))
    factors = Factors.of(a, b)
    own, other = factors.rows
    assert torch.equal(factors.matrix, alpha(a, b))
    assert ((own * other.t() - factors.matrix).abs() <= 2.0**-22 * factors.matrix).all()


# --- the engine -----------------------------------------------------------------------------------


class Net(nn.Module):
    """Two blocks of one layer, and a head that is left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"a": nn.Linear(32, 32)}) for _ in range(2))
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block["a"](x).tanh()
        return self.head(x)


GPU = Machine(capability=(10, 0), torch="2.13.0")


def test_convert_replaces_the_layers_of_blocks_and_counts_what_a_recipe_needs():
    net = Net()
    keys = [*net.state_dict()]
    engine = convert(net, PRESETS["fp8_current"](), Clock(0))
    engine.at(0, Run(2))
    assert [type(layer) for layer in engine.layers.values()] == [ScaledLinear, ScaledLinear]
    assert type(net.head) is nn.Linear
    assert [*net.state_dict()] == keys
    net(drawn(16, 32, seed=1)).sum().backward()


@pytest.mark.parametrize(
    ("engine", "preset", "where"),
    [
        ("scaled_mm", "nvfp4", "torch multiplies NVFP4 on GPUs alone"),
        ("scaled_mm", "mxfp8", "torch multiplies MXFP8 on GPUs alone"),
        ("scaled_mm:cudnn", "nvfp4", "FlashInfer is not installed"),
    ],
)
def test_a_cpu_refuses_what_torch_does_not_multiply_there(engine, preset, where):
    with pytest.raises(ValueError, match=f"engine {engine}: {where}"):
        converter(engine)(Net(), PRESETS[preset](), Clock(0))


def test_flashinfer_refuses_fp32_products_and_torch_does_not():
    recipe = PRESETS["nvfp4"]()
    recipe = recipe.model_copy(update={"wgrad": recipe.wgrad.model_copy(update={"dw": "fp32"})})
    with pytest.raises(ValueError, match=r"wgrad\.dw fp32: FlashInfer"):
        convert(Net(), recipe, Clock(0), "cudnn", machine=GPU)
    assert list(refusals(recipe)) == []


MACHINES = {
    (8, 0): set(),
    (8, 9): {"fp8"},
    (9, 0): {"fp8"},
    (10, 0): {"fp8", "mxfp8", "nvfp4", "mxfp4"},
    (10, 3): {"fp8", "mxfp8", "nvfp4", "mxfp4"},
    (12, 0): {"fp8", "mxfp8", "nvfp4"},
}


@every(capability=MACHINES, family=NAMES)
def test_a_gpu_multiplies_these_families(capability, family):
    machine = Machine(capability=capability, torch="2.13.0")
    assert (scaled_refusal(machine, "cuda", [family]) is None) == (family in MACHINES[capability])


def test_an_old_torch_and_a_missing_flashinfer_are_named():
    assert "2.9.1" in str(scaled_refusal(Machine(capability=(10, 0), torch="2.9.1"), "cuda", ["fp8"]))
    assert "FlashInfer" in str(scaled_refusal(GPU, "cuda", ["nvfp4"], "cudnn"))
    assert scaled_refusal(GPU, "cuda", ["fp8"], "cudnn") is None
    rtx = Machine(capability=(12, 0), torch="2.13.0", flashinfer="0.7.2")
    assert "scaled_mm:cudnn" in str(scaled_refusal(rtx, "cuda", ["mxfp4"]))
    assert scaled_refusal(rtx, "cuda", ["mxfp4"], "cudnn") is None


def test_a_weight_is_encoded_once_while_it_stays_still():
    cores = TensorCores()
    _, scaled = pair(PRESETS["nvfp4"]().products, (32, 64, 32), native(cores))
    x, dy = inputs((32, 64, 32))
    first = run(scaled, x, dy)
    scaled.casts.begin()
    for _ in range(2):
        assert all(map(torch.equal, first, run(scaled, x, dy)))
    weights = [call.arguments[1].data_ptr() for call in cores.calls[3:]]
    assert weights[0] == weights[3]
    assert weights[1] == weights[4]
    scaled.weight.data.mul_(2)
    scaled.casts.begin()
    assert torch.equal(run(scaled, x, dy)[0], 2 * first[0])  # all scales double, the old bytes are gone


def test_the_presets_need_every_family():
    assert {family for make in PRESETS.values() for family in families(make())} == {*NAMES}
