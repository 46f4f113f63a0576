"""Packed experts on the engine `scaled_mm`: every product of every expert equals an exact product of the emulator's operands."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from support.cases import every
from support.packed_experts import SIZES, Model, results, routed
from support.tensor_cores import FAULTS, Broken, TensorCores, exact_product
from torch import Tensor

from ablate.engines import emulated
from ablate.engines.emulated import Engine, replace_layers
from ablate.engines.emulated_layer import EmulatedLinear
from ablate.engines.expert_layers import EmulatedExpert
from ablate.engines.scaled_mm import Native, ScaledExpert, convert
from ablate.numerics.encoded import COLUMNS, ROWS
from ablate.numerics.kernels.cuda import PLAIN, Finish
from ablate.numerics.philox import Clock
from ablate.numerics.product import split_product
from ablate.numerics.quantize import Operand
from ablate.recipes import PRESETS
from ablate.recipes.experts import Experts
from ablate.recipes.recipe import Layers, Recipe, Run
from ablate.recipes.scaled_mapping import FP4, plan, verdict
from ablate.reports.tensor_cores import OF_EXPERTS
from ablate.training.alarms import alerts
from ablate.training.metrics import SlotErrors
from ablate.training.operand_metrics import ALARMS

LAYOUTS = ({}, {"gate": False}, {"transposed": True}, {"interleaved": True, "bias": True})


class Exact(EmulatedExpert):
    """An emulated expert whose products on tensor cores are of fp64 sums, and near those of the emulator."""

    def __init__(self, *place, backend: str, **how) -> None:
        super().__init__(*place, **how)
        self.backend = backend

    def multiply(
        self, a: list[Operand], b: list[Operand], out: torch.dtype, finish: Finish = PLAIN
    ) -> Tensor:
        ours = super().multiply(a, b, out, finish)
        if verdict(a[0].quant, b[0].quant, out == torch.float32, self.backend).family is None:
            return ours
        single = len(a) == len(b) == 1
        first = exact_product(a[0], b[0], out if single else torch.float32)
        exact = split_product(a, b, out, first, finish)
        bound = 2.0**-7 * exact.double().abs() + 1e-5 * exact.double().abs().max()
        assert ((ours.double() - exact.double()).abs() <= bound).all()
        return exact


def everywhere(preset: str, **fields) -> Recipe:
    """Return a preset that applies to all layers."""
    return PRESETS[preset]().model_copy(update={"layers": Layers(), **fields})


def scaled(recipe: Recipe, cores: TensorCores, backend: str = "cublaslt", **layout) -> tuple[Model, Engine]:
    """Return a model on tensor cores, at the first of ten steps."""
    native = Native(backend, cores.scaled_mm, cores.mm_fp4)
    return made(Engine, partial(ScaledExpert, native=native), recipe, **layout)


def exact(recipe: Recipe, backend: str = "cublaslt", **layout) -> tuple[Model, Engine]:
    """Return the same model, emulated with exact sums."""
    return made(Engine, partial(Exact, backend=backend), recipe, **layout)


def made(
    engine: type[Engine], expert: Callable[..., EmulatedExpert], recipe: Recipe, **layout
) -> tuple[Model, Engine]:
    """Return a model of these layers, and its engine."""
    model, clock = Model(**layout), Clock(seed=11)
    replace_layers(model, recipe, clock, EmulatedLinear, expert)
    driver = engine(model, recipe, clock)
    driver.at(0, Run(10))
    return model, driver


def compared(recipe: Recipe, backend: str = "cublaslt", cores: TensorCores | None = None, **layout) -> None:
    """Compare output, and gradients of tokens and of every expert, bit for bit; and count the products."""
    cores, batch = cores or TensorCores(), routed()
    model, _ = scaled(recipe, cores, backend, **layout)
    seen, expected = results(model, batch), results(exact(recipe, backend, **layout)[0], batch)
    assert {name: torch.equal(value, expected[name]) for name, value in seen.items()} == dict.fromkeys(
        seen, True
    )
    down = seen["blocks.0.experts.down_proj"]
    assert [bool(gradient.any()) for gradient in down] == [size > 0 for size in SIZES]
    planned = plan(recipe.at(0, Run(10)).products, backend).values()
    matrices = 2 + (recipe.experts.gate_up == "split" and layout.get("gate", True))
    multiplied = sum(given.runs == "native" for given in planned) * matrices * (len(SIZES) - 1)
    assert len(cores.calls) == multiplied  # none for the expert without tokens


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_experts_of_every_preset_compute_what_the_emulator_computes(preset):
    compared(everywhere(preset))


@every(preset=("nvfp4", "mxfp8", "fp8_current"), layout=LAYOUTS, gate_up=("fused", "split"))
def test_experts_of_every_layout_compute_what_the_emulator_computes(preset, layout, gate_up):
    compared(everywhere(preset, experts=Experts(gate_up=gate_up)), **layout)


@every(preset=("nvfp4", "mxfp4", "row_scaled"), backend=("cudnn", "cutlass"))
def test_flashinfer_multiplies_experts_too(preset, backend):
    cores = TensorCores()
    compared(everywhere(preset), backend, cores)
    given = plan(PRESETS[preset]().products, backend).values()
    assert {call.options["backend"] for call in cores.calls if "backend" in call.options} == {
        backend for one in given if one.family in FP4
    }


def test_torch_multiplies_experts_in_fp8_on_a_cpu():
    """The real call, whose sums are in fp32 as the emulator's are."""
    recipe, batch = everywhere("fp8_current"), routed()
    model, reference = Model(), Model()
    engine = convert(model, recipe, Clock(seed=11))
    engine.at(0, Run(10))
    emulated.convert(reference, recipe, Clock(seed=11)).at(0, Run(10))
    assert {type(layer) for layer in engine.layers.values()} == {ScaledExpert}
    theirs = results(reference, batch)
    for name, value in results(model, batch).items():
        # A sum on the other side of a boundary of bf16, and what becomes of it in the second product.
        assert (value - theirs[name]).norm() <= 2.0**-8 * theirs[name].norm(), name


def test_a_reading_by_another_recipe_is_emulated():
    cores, recipe, batch = TensorCores(), PRESETS["mxfp8"](), routed()
    model, engine = scaled(recipe, cores)
    reference = Model()
    other = emulated.convert(reference, recipe, Clock(seed=11))
    other.at(0, Run(10))
    with torch.no_grad(), engine.reading(everywhere("nvfp4")), other.reading(everywhere("nvfp4")):
        assert torch.equal(model(*batch), reference(*batch))
    assert not cores.calls
    model(*batch)
    assert cores.calls


# --- faults ---------------------------------------------------------------------------------------


class Neighbours(TensorCores):
    """Tensor cores that read an expert's scales where those of the expert before lie."""

    before = None

    def scaled_mm(self, a, b, scale_a, kind_a, scale_b, kind_b, **options) -> Tensor:
        own, before = scale_a, self.before
        self.before = own
        if before is not None and before[0].shape == own[0].shape:
            scale_a = [before[0], *own[1:]]
        return super().scaled_mm(a, b, scale_a, kind_a, scale_b, kind_b, **options)


@every(fault=(*FAULTS, "neighbours"))
def test_a_fault_is_seen_in_the_results_and_by_the_alarm_on_gains(fault):
    wrong = Neighbours() if fault == "neighbours" else Broken(fault)
    with pytest.raises(AssertionError):
        compared(everywhere("nvfp4"), cores=wrong)
    alarms = {}
    for name, cores in (("right", TensorCores()), ("wrong", wrong)):
        model, engine = scaled(everywhere("nvfp4"), cores)
        telemetry = SlotErrors()
        engine.listen(telemetry)
        results(model, routed())
        alarms[name] = [alert for alert in alerts(telemetry.metrics(), ALARMS) if alert.name.family == "gemm"]
    assert not alarms["right"]
    assert {alert.name.layer for alert in alarms["wrong"]} >= {"blocks.0.experts.5.down"}


def test_the_plan_says_how_tokens_are_padded():
    assert f"multiple of {ROWS} with zeros" in OF_EXPERTS
    assert ROWS == COLUMNS
