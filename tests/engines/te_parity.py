"""The comparison of TE with the emulator over the double: sound, and wrong in one thing after another; run as a program, prints JSON."""

import contextlib
import io
import json
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import te_double
import torch

warnings.simplefilter("ignore")  # TE's, of a machine without its native part
TE = te_double.install()

import typer  # noqa: E402
from transformer_engine.pytorch.custom_recipes import reference_nvfp4  # noqa: E402
from transformer_engine.pytorch.tensor import nvfp4_tensor  # noqa: E402

from ablate.cli import doctor  # noqa: E402
from ablate.engines import parity_record, te_casts  # noqa: E402
from ablate.engines import transformer_engine as native  # noqa: E402
from ablate.engines.hardware import Machine  # noqa: E402
from ablate.execution.trial_runner import run  # noqa: E402
from ablate.experiment import engine_selection  # noqa: E402
from ablate.experiment.arms import StartingPoint  # noqa: E402
from ablate.experiment.trial_spec import TrialSpec  # noqa: E402
from ablate.recipes.te_mapping import CopyFormat  # noqa: E402
from ablate.store.trial_store import Store  # noqa: E402
from ablate.training.workloads import WORKLOADS  # noqa: E402
from ablate.verification import parity  # noqa: E402
from ablate.verification.parity.bench import Bench  # noqa: E402
from ablate.verification.parity.casts import exact_casts, stochastic_draws  # noqa: E402
from ablate.verification.parity.linears import exact_products  # noqa: E402
from ablate.verification.parity.training import short_training  # noqa: E402

B200 = Machine("2.20.2", native=True, capability=(10, 0))
native.this_machine = engine_selection.this_machine = parity.this_machine = doctor.this_machine = lambda: B200
native.seed = lambda device, number: te_double.DRAWN.manual_seed(number)
SMALL = Bench(
    ("nvfp4", "mxfp8", "fp8"),
    torch.device("cpu"),
    shapes=((32, 64), (96, 160)),
    products=((96, 160, 64),),
    draws=16,
    steps=6,
    model={
        "layers": 2,
        "width": 32,
        "heads": 2,
        "batch": 2,
        "context": 32,
        "eval_tokens": 128,
        "eval_batch": 2,
    },
)
REF = reference_nvfp4.NVFP4QuantizerRef


def rows(check: Callable, family: str = "nvfp4", *more) -> list:
    """Return the rows of the check of one family, at small sizes."""
    return [row for each in check(SMALL, family, *more) for row in each.rows()]


def off(check: Callable, family: str = "nvfp4", *more) -> list[str]:
    """The rows of one check that are off."""
    return [row.what for row in rows(check, family, *more) if row.ok is False]


# --- doubles that are wrong in one thing ----------------------------------------------------------


def blockwise(change: Callable) -> contextlib.AbstractContextManager:
    """The reference with something else made of its codes and scales."""
    whole = REF._quantize_blockwise_reference

    def changed(x, amax, width, height, **options):
        return change(x.shape, height, *(z.clone() for z in whole(x, amax, width, height, **options)))

    return patch.object(REF, "_quantize_blockwise_reference", staticmethod(changed))


def a_scale_one_code_off(shape, height, codes, scales):
    """One block's, of square blocks of one shape."""
    if height == 16 and shape[0] == 96:
        scales.view(torch.uint8)[3, 1] ^= 1
    return codes, scales


def a_code_one_off(shape, height, codes, scales):
    """One of many, of square blocks of one shape."""
    if height == 16 and shape[0] == 96:
        codes[0, 0] ^= 1
    return codes, scales


def signs(*flipped: int) -> contextlib.AbstractContextManager:
    """TE's sign vector with some signs flipped."""
    vector = reference_nvfp4.get_wgrad_sign_vector()
    vector[list(flipped)] *= -1
    return patch.object(reference_nvfp4, "get_wgrad_sign_vector", lambda: vector)


def drawn(up: Callable) -> contextlib.AbstractContextManager:
    """Stochastic rounding whose random numbers, 0 to 255 an element, come from elsewhere."""
    whole = torch.randint
    return patch.object(torch, "randint", lambda high, shape, **kw: up(whole(high, shape, **kw)))


def copied() -> contextlib.AbstractContextManager:
    """Both copies drawn from the same bits, each element's."""
    kept: dict[tuple, torch.Tensor] = {}

    def the_same(bits):
        turned = kept.pop((bits.shape[1], bits.shape[0]), None)
        if turned is None:
            kept[tuple(bits.shape)] = bits
        return bits if turned is None else turned.t().contiguous()

    return drawn(the_same)


def a_third_value() -> contextlib.AbstractContextManager:
    whole = te_double.drawn

    def changed(*args, **options):
        codes, scales = whole(*args, **options)
        codes[0, 0] = 0x77
        codes[1, 0] = 0xFF
        return codes, scales

    return patch.object(te_double, "drawn", changed)


def multiplied(change: Callable) -> contextlib.AbstractContextManager:
    """TE's product of FP4 operands, changed."""
    whole = REF.qgemm

    def changed(self, *args, **options):
        return change(whole(self, *args, **options), options["gemm_type"].value)

    return patch.object(REF, "qgemm", changed)


def added() -> contextlib.AbstractContextManager:
    """Products of experts, of which the second's dw is added to the first's."""
    native = sys.modules["transformer_engine_torch"]
    whole = native.te_general_grouped_gemm

    def changed(a, a_turned, b, b_turned, out, kind, rows, bias, bias_kind, single, *more):
        made = whole(a, a_turned, b, b_turned, out, kind, rows, bias, bias_kind, single, *more)
        if not single:
            out[0].add_(out[1])
        return made

    return patch.object(native, "te_general_grouped_gemm", changed)


def weights_in_rows() -> contextlib.AbstractContextManager:
    """Weights whose blocks are 1x16, whatever the recipe says."""
    whole = te_double.reference
    return patch.object(
        nvfp4_tensor, "NVFP4Quantizer", lambda **options: whole(**options | {"with_2d_quantization": False})
    )


def exponents(change: Callable) -> contextlib.AbstractContextManager:
    """MXFP8's rounding of exponents."""
    return patch.object(torch, "ceil", change)


def power_of_two() -> contextlib.AbstractContextManager:
    """FP8 whose scale is a power of two."""
    whole = te_double.current
    return patch.object(
        TE,
        "Float8CurrentScalingQuantizer",
        lambda *args, **kw: whole(*args, **kw | {"force_pow_2_scales": True}),
    )


def larger() -> contextlib.AbstractContextManager:
    """Casts by a given scale that leave an amax half as large again as it is."""
    whole = te_double.scaled

    def changed(x, quantiser, *more):
        made = whole(x, quantiser, *more)
        quantiser.amax.mul_(1.5)
        return made

    return patch.object(sys.modules["transformer_engine_torch"], "quantize", changed)


def wrong(names: list[str]) -> dict[str, list[str]]:
    """Each of the faults, and the rows that are off because of it."""
    faults = {
        "nothing": (contextlib.nullcontext(), exact_casts),
        "a weight's block scale one code off": (blockwise(a_scale_one_code_off), exact_casts),
        "a weight's code one off": (blockwise(a_code_one_off), exact_casts),
        "a rotation's sign flipped": (signs(4), exact_casts),
        "an MXFP8 scale rounded down": (exponents(torch.floor), exact_casts, "mxfp8"),
        "an FP8 scale of a power of two": (power_of_two(), exact_casts, "fp8"),
        "a delayed amax half as large again": (larger(), exact_products, "fp8"),
        "draws that go up too often": (drawn(lambda bits: bits * 7 // 8), stochastic_draws),
        "draws that go up too seldom": (drawn(lambda bits: (bits + 40).clamp(max=255)), stochastic_draws),
        "to nearest in the place of draws": (
            drawn(lambda bits: torch.full_like(bits, 127)),
            stochastic_draws,
        ),
        "one set of bits for both copies": (copied(), stochastic_draws),
        "one bit for two neighbours": (
            drawn(lambda bits: bits[:, ::2].repeat_interleave(2, dim=1)),
            stochastic_draws,
        ),
        "draws that no seed determines": (patch.object(native, "seed", lambda *_: None), stochastic_draws),
        "draws that never change": (drawn(torch.zeros_like), stochastic_draws),
        "a draw that is neither neighbour": (a_third_value(), stochastic_draws),
        "y rounded twice": (
            multiplied(lambda z, which: (z.float() * 3).bfloat16().float().div(3).to(z.dtype)),
            exact_products,
        ),
        "dgrad a hundredth larger": (
            multiplied(lambda z, which: z * 1.01 if which == "dgrad" else z),
            exact_products,
        ),
        "a rotation of one side of wgrad that is not the other's": (
            patch.object(REF, "_apply_rht", _one_side),
            exact_products,
        ),
        "an expert's dw added to another's": (added(), exact_products),
        "dgrad of the wrong sign, in training": (
            multiplied(lambda z, which: -z if which == "dgrad" else z),
            short_training,
            "nvfp4",
            [],
        ),
        "weights in rows, in training": (weights_in_rows(), short_training, "nvfp4", []),
    }
    found = {}
    for name in names:
        fault, check, *more = faults[name]
        with fault:
            found[name] = off(check, *more)
    return found


_apply = REF._apply_rht


def _one_side(self, x):
    """Rotated with another sign where x^T [160 features, tokens] is, so that the rotation does not cancel."""
    with signs(4) if x.shape[0] == 160 else contextlib.nullcontext():
        return _apply(self, x)


# --- the whole, by its command --------------------------------------------------------------------


def commanded(*words: str, bench: Bench = SMALL) -> dict[str, object]:
    """`ablate doctor --engine transformer_engine` here: its status, what it printed, and what it wrote."""
    application = typer.Typer(pretty_exceptions_enable=False)
    application.command()(doctor.doctor)
    said, status = io.StringIO(), 0
    with (
        contextlib.redirect_stdout(said),
        patch.object(parity, "obstacle", lambda: None),
        patch.object(parity, "bench_of", lambda _: bench),
    ):
        try:
            application(["--engine", "transformer_engine", *words])
        except SystemExit as end:
            status = end.code
    return {
        "status": status,
        "said": said.getvalue(),
        "kept": parity_record.record_path(B200).exists(),
        "files": sorted(os.listdir()),
    }


def chosen() -> dict[str, object]:
    """Return the engine that `auto` selects for arms of each family on this made-up machine."""
    arms = [
        StartingPoint("gpt", {}, "nvfp4").arm({"recipe": preset})
        for preset in ("bf16", "nvfp4", "mxfp8", "fp8_current")
    ]
    return vars(engine_selection.choose("auto", arms, "cuda", machine=B200))


def whole() -> dict[str, object]:
    """The command in turn: quick, off, whole, as JSON; what `auto` takes after each."""
    found = {"before": chosen()}
    found["fast"] = commanded("--fast", "--record", "fast.json") | {"auto": chosen()}
    with signs(4):
        found["off"] = commanded("--record", "off.json", bench=replace(SMALL, steps=2)) | {"auto": chosen()}
    found["agrees"] = commanded() | {"auto": chosen()}
    with drawn(torch.zeros_like):
        found["fast and off"] = commanded("--fast", "--json", "--record", "again.json") | {"auto": chosen()}
    return found


def trial() -> dict[str, str]:
    """The environment that a trial by this engine records."""
    recipe = StartingPoint("gpt", {}, "nvfp4").arm({"sr": False}).recipe
    config = WORKLOADS["gpt"](**SMALL.model, steps=2)
    spec = TrialSpec(
        workload="gpt", config=config, recipe=recipe, seed=0, engine="transformer_engine", device="cpu"
    )
    store = Store(Path("state"))
    list(run(spec, store, 1, {}))
    return store.result(spec.id)["environment"]


def storage() -> dict[str, bool]:
    """Return True if values read from TE's own storage, in its own shapes and with random bytes as padding, are those that were stored."""
    from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage
    from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage
    from transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage import NVFP4TensorStorage

    shape, kinds = (96, 160), torch.Generator().manual_seed(4)
    x = torch.randn(shape, generator=kinds).bfloat16()

    def padded(scales, kind, columnwise):
        raw = scales.contiguous().view(torch.uint8)
        full = torch.full(
            te_double.NATIVE[kind].get_scale_shape(te_double.NATIVE[kind], shape, columnwise),
            255,
            dtype=torch.uint8,
        )
        assert full.shape != raw.shape
        full[: raw.shape[0], : raw.shape[1]] = raw
        return full

    def alike(read, copy):
        pairs = zip(read, te_casts.casts(x, copy), strict=True)
        return all(
            torch.equal(a.codes, b.codes) and torch.equal(a.scales, b.scales) and a.amax == b.amax
            for a, b in pairs
        )

    made, names = native.quantiser(CopyFormat("nvfp4", "e2m1"))(x), ("rowwise", "columnwise")
    kept = {f"{way}_data": getattr(made, f"_{way}_data") for way in names}
    kept |= {
        f"{way}_scale_inv": padded(getattr(made, f"_{way}_scale_inv"), "NVFP4", way == "columnwise")
        for way in names
    }
    kept |= {f"amax_{way}": getattr(made, f"_amax_{way}") for way in names}
    nvfp4 = NVFP4TensorStorage(
        **kept, fp4_dtype=TE.DType.kFloat4E2M1, quantizer=None, with_gemm_swizzled_scales=False
    )
    found = {
        "nvfp4": alike(
            te_casts.nvfp4_casts(nvfp4, shape, CopyFormat("nvfp4", "e2m1")), CopyFormat("nvfp4", "e2m1")
        )
    }

    made, eight = native.quantiser(CopyFormat("mxfp8", "e4m3"))(x), TE.DType.kFloat8E4M3
    kept = {f"{way}_data": getattr(made, f"_{way}_data").contiguous().view(torch.uint8) for way in names}
    kept |= {
        f"{way}_scale_inv": padded(getattr(made, f"_{way}_scale_inv"), "MXFP8", way == "columnwise")
        for way in names
    }
    mxfp8 = MXFP8TensorStorage(**kept, fp8_dtype=eight, quantizer=None, with_gemm_swizzled_scales=False)
    found["mxfp8"] = alike(
        te_casts.mxfp8_casts(mxfp8, shape, CopyFormat("mxfp8", "e4m3")), CopyFormat("mxfp8", "e4m3")
    )

    made = native.quantiser(CopyFormat("fp8", "e4m3"))(x)
    for name, turned in (("fp8", None), ("fp8 with its transpose", made.data_t.view(torch.uint8))):
        data = {"data": made.data.view(torch.uint8), "data_transpose": turned, "fp8_scale_inv": made.scale}
        fp8 = Float8TensorStorage(**data, fp8_dtype=eight)
        found[name] = alike(
            te_casts.fp8_casts(fp8, shape, CopyFormat("fp8", "e4m3")), CopyFormat("fp8", "e4m3")
        )
    return found


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    os.environ["NVTE_DEBUG"] = "0"
    print(
        json.dumps({"wrong": wrong(sys.argv[2:]), "whole": whole(), "trial": trial(), "storage": storage()})
    )
