"""Faulty and correct subjects for the conformance kit, and what the kit says of each.

    python benchmarks/conformance_mutants.py --direct      # compare each with the reference on chosen data
    python benchmarks/conformance_mutants.py > benchmarks/conformance_mutants.csv
    python benchmarks/conformance_mutants.py --set fourth  # that set alone

A mutant is a published numerical fault of an FP4 or MX library, or in the fourth set perhaps a plausible one,
rebuilt so that nothing else differs. Each has its source, what went wrong, the name of the fault, and data
that show it; some faults need a particular shape, magnitude, stride or earlier call. The names were written
down before the kit's properties were read. A control is correct but written otherwise, and equals the
reference bit for bit. The later sets (conformance_held_out.py, conformance_third.py, conformance_fourth.py)
were committed before the kit was run on them.

A mutant is seen if a row of the kit failed; whether it was also named is for a person to judge, from the
columns `fault`, `named_by_kit` and `said`. What fails on a control is a false alarm.
"""

import argparse
import csv
import sys
from collections.abc import Iterator

import conformance_subjects as subjects
import torch
from conformance_fourth import FOURTH, FOURTH_CONTROLS
from conformance_held_out import HELD_OUT, HELD_OUT_CONTROLS
from conformance_subjects import (
    ALL,
    E4M3,
    GRADIENT,
    MXFP4,
    MXFP8,
    NVFP4,
    ONE_IDLE,
    OVER_SIX,
    ROTATION,
    SQUARE,
    Control,
    Layer,
    Mutant,
    layer_data,
    normal,
    reference,
    skewed,
    spread,
    with_zeros,
)
from conformance_third import THIRD, THIRD_CONTROLS
from torch import Tensor

import ablate
from ablate.numerics.hadamard import rotate
from ablate.numerics.spec import Outer, Quant
from ablate.numerics.stored import unswizzle
from ablate.recipes.presets import PRESETS
from ablate.verification.conformance.examination import Examination
from ablate.verification.conformance.properties import PROPERTIES
from ablate.verification.conformance.result import Outcome, Row
from ablate.verification.conformance.run import examined
from ablate.verification.conformance.subject import Quantised, Subject

MUTANTS = {
    "through_bf16": Mutant(
        "vllm-project/compressed-tensors#824",
        "FP4 rounding cast its fp32 input to bf16 first, so 2.500004 became the tie 2.5 and then 2, not 3.",
        "elements rounded twice, through bf16",
        "nvfp4",
        subjects.through_bf16,
        (normal(256, 256, dtype=torch.float32),),
        "normal fp32; of bf16, too, a few codes",
    ),
    "linear_view": Mutant(
        "vllm-project/vllm#49092",
        "The quantiser read a column-sliced view as if it were contiguous: only the first row was right.",
        "strides of a non-contiguous input ignored",
        "nvfp4",
        subjects.linear_view,
        (normal(64, 128)[:, 32:96],),
        "a slice of columns",
        (normal(64, 64),),
    ),
    "zero_block_nan": Mutant(
        "NVIDIA/Model-Optimizer#1397",
        "The scale of an all-zero block was set to 1 before the outer factor, and the E4M3 cast overflowed to"
        " NaN.",
        "NaN scale for a block of zeros (E4M3 cast without saturation)",
        "nvfp4",
        subjects.zero_block_nan,
        (with_zeros(),),
        "a block of zeros in a tensor with an amax below 5.79",
        (normal(16, 64),),
    ),
    "unrounded_scale": Mutant(
        "NVIDIA/Model-Optimizer#2243",
        "Elements were divided by the fp32 block scale, while the stored block scale was rounded to E4M3.",
        "codes made with the unrounded block scale",
        "nvfp4",
        subjects.unrounded_scale,
        (normal(64, 64),),
        "any data",
    ),
    "clamped_outer": Mutant(
        "pytorch/ao#2604",
        "The tensor's fp32 scale was clamped to [2^-6, 448], the range of a normal E4M3 number.",
        "outer scale clamped: tensors with small (or huge) amax lose their range",
        "nvfp4",
        subjects.clamped_outer,
        (normal(64, 64, scale=1e-4),),
        "amax below 42 (scales of coarser blocks), loss of values below about 0.1",
        (normal(64, 64, scale=100.0),),
    ),
    "signed_amax": Mutant(
        "vllm-project/vllm#20578",
        "The global scale of weights came from the largest value, not from the largest magnitude.",
        "amax without absolute values: the largest negative weights saturate",
        "nvfp4",
        subjects.signed_amax,
        (skewed(),),
        "weights whose largest magnitude is negative",
        (-skewed(),),
    ),
    "ties_away": Mutant(
        "ROCm/aiter#3992",
        "The E2M1 conversion compared with >= at every midpoint, so ties went away from zero, not to even.",
        "ties of elements away from zero",
        "mxfp4",
        subjects.ties_away,
        (normal(64, 64),),
        "bf16, where ties are frequent, as scales are powers of two",
    ),
    "lost_smallest_scale": Mutant(
        "NVIDIA/TransformerEngine#3262",
        "E8M0 code 0, 2^-127, was shifted into the exponent field of fp32, which gives 0.",
        "smallest E8M0 scale (2^-127) decoded as 0",
        "mxfp8",
        subjects.lost_smallest_scale,
        (normal(32, 64, dtype=torch.float32, scale=2.0**-122),),
        "blocks with an amax of at most 448 * 2^-127",
        (normal(32, 64),),
    ),
    "error_by_decode_scale": Mutant(
        "radixark/miles#1261, flashinfer-ai/flashinfer#3448",
        "Candidates of Four Over Six were scored through the global decode scale, not through amax/(6*256):"
        " blocks near a tie chose the other.",
        "Four Over Six picks the worse candidate in nearly tied blocks (order of operations in the error)",
        "four_over_six",
        subjects.error_by_decode_scale,
        (normal(512, 512, seed=1, scale=0.02),),
        "bf16: up to one block in five thousand, depending on amax",
        (normal(16, 32),),
    ),
    "dropped_seed": Mutant(
        "AMD-AGI/Primus-Turbo#365",
        "Launches could get the seed 0, so every call rounded stochastically with the same bits.",
        "stochastic rounding ignores the seed; errors do not average out over calls",
        "nvfp4",
        subjects.dropped_seed,
        (normal(64, 64), 1),
        "any seed other than 0",
        (normal(64, 64), 0),
    ),
    "low_bits": Mutant(
        "uxlfoundation/oneDNN#2903",
        "The random bits were added four to five places too low, so stochastic rounding nearly always rounded"
        " down (reported of f32 to f8; here E2M1).",
        "stochastic rounding biased toward zero",
        "nvfp4",
        subjects.low_bits,
        (normal(64, 64), 1),
        "any data",
    ),
    "tiles_by_columns": Mutant(
        "NVIDIA/TransformerEngine#3485",
        "Swizzled scales were read with another order and extent of 128x4 tiles than they were written with:"
        " every tile past the first got other scales.",
        "order of the tiles of swizzled scales",
        "nvfp4",
        subjects.tiles_by_columns,
        (normal(256, 128),),
        "more than 128 rows and more than 64 columns",
        (normal(128, 256),),
    ),
    "stale_tail": Mutant(
        "vllm-project/vllm#57014",
        "The last rows % 8 rows of the Hadamard transform were read from stale shared memory, if there were"
        " more than 8192 rows and the remainder was 1 to 4.",
        "rotation wrong in the last rows of a large tensor",
        "nvfp4",
        subjects.stale_tail,
        (normal(8195, 16),),
        "8193 rows or more, with a remainder of 1 to 4 modulo 8",
        (normal(8192, 16),),
    ),
    "split_sums": Mutant(
        "modular/modular#7165",
        "A split-K matrix product wrote partial sums in bf16 and added them in bf16.",
        "partial sums of a long contraction rounded to bf16 (accumulation not in fp32)",
        "nvfp4",
        subjects.split_sums,
        layer_data(64, 512),
        "contractions of 256 or more, with a result of fewer than eight 128x128 tiles",
        layer_data(64, 128),
    ),
    "stale_gradient": Mutant(
        "meta-pytorch/MSLK#158, pytorch/pytorch#172439",
        "The weight gradients of experts without tokens were left as the allocator's memory was.",
        "dw of an expert without tokens is not zero (uninitialised memory)",
        "nvfp4",
        subjects.stale_gradient,
        ONE_IDLE,
        "an expert without tokens, after a call of the same shapes in which it had some",
        ALL,
        ALL,
    ),
}
"""Faulty subjects. `clamped_outer` and `low_bits` carry over what was reported of a neighbouring format."""
CONTROLS = {
    "in_numpy": Control(
        "nvfp4", subjects.in_numpy, (normal(64, 64), normal(64, 64, dtype=torch.float32), spread())
    ),
    "in_pieces": Control("nvfp4", subjects.in_pieces, (normal(128, 64), spread(torch.float32), with_zeros())),
    "in_fp64": Control(
        "mxfp4", subjects.in_fp64, (normal(64, 64), spread(torch.float32), normal(64, 64, scale=2.0**-126))
    ),
    "in_bytes": Control("nvfp4", subjects.in_bytes, (normal(160, 144), spread(), with_zeros())),
    "in_other_order": Control("nvfp4", subjects.in_other_order, (normal(64, 64), spread(torch.float32))),
}
"""Correct subjects, written otherwise."""
SETS = {
    "first": (MUTANTS, CONTROLS),
    "second": (HELD_OUT, HELD_OUT_CONTROLS),
    "third": (THIRD, THIRD_CONTROLS),
    "fourth": (FOURTH, FOURTH_CONTROLS),
}
QUANTS = {"nvfp4": NVFP4, "mxfp4": MXFP4, "mxfp8": MXFP8, "four_over_six": OVER_SIX}


# --- direct comparison ----------------------------------------------------------------------------


def parts(made: "Quantised | Tensor", subject: Subject, x: Tensor) -> dict[str, Tensor]:
    """Return what a cast returned in one form: codes a byte each, scales as a matrix."""
    if isinstance(made, Tensor):
        return {"values": made}
    found = {name: getattr(made, name) for name in ("values", "codes", "scales", "outer")}
    found = {name: part for name, part in found.items() if part is not None}
    if "codes" in found and found["codes"].shape != x.shape:
        found["codes"] = torch.stack((found["codes"] & 15, found["codes"] >> 4), 2).flatten(1)
    if "scales" in found:
        stored = found["scales"]
        stored = unswizzle(stored, len(x), x.shape[1] // 16) if subject.swizzled else stored
        found["scales"] = (stored.view(E4M3) if stored.dtype == torch.uint8 else stored).float()
    return found


def different(one: Tensor, other: Tensor) -> int:
    """Return how many numbers differ in their bits; all NaN are alike."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    words = [z.contiguous().view(bits[z.element_size()]) for z in (one, other)]
    return int(((words[0] != words[1]) & ~(one.isnan() & other.isnan())).sum())


def against_reference(subject: Subject, recipe: str, name: str, data: tuple, before: tuple | None) -> str:
    """Return in words how the results of one of a subject's functions differ; empty if they do not."""
    quant, function, own = QUANTS[recipe], getattr(subject, name), Layer()
    right = {
        "cast": lambda x: reference(x, quant),
        "cast_given": lambda x, amax: reference(x, Quant(outer=Outer(statistic=f"static:{amax.item()}"))),
        "cast_square": lambda x: reference(x, SQUARE),
        "cast_stochastic": lambda x, seed: reference(x, GRADIENT, seed),
        "rotate": lambda x: rotate(x, ROTATION),
        "product": own.product,
        "grouped": own.grouped,
    }[name]
    if before is not None:
        function(*before), right(*before)
    made, wanted = function(*data), right(*data)
    if name in ("product", "grouped"):
        pairs = dict(zip(("y", "dx", "dw"), zip(made, wanted, strict=True), strict=True))
    else:
        whole = parts(wanted, Subject(""), data[0])
        pairs = {key: (part, whole[key]) for key, part in parts(made, subject, data[0]).items()}
    counts = {key: (different(*pair), pair[0].numel()) for key, pair in pairs.items()}
    return ", ".join(f"{count} of {size} {key}" for key, (count, size) in counts.items() if count)


def functions(subject: Subject) -> list[str]:
    """Return the names of the functions that a subject has."""
    names = ("cast", "cast_given", "cast_square", "cast_stochastic", "rotate", "product", "grouped")
    return [name for name in names if getattr(subject, name)]


def compared(mutant: Mutant) -> tuple[str, str]:
    """Return how a mutant differs from the reference on the data that show it, and on those that hide it."""
    [function] = functions(mutant.subject())
    shown = against_reference(mutant.subject(), mutant.recipe, function, mutant.shows, mutant.before)
    if mutant.hides is None:
        return shown, ""
    return shown, against_reference(mutant.subject(), mutant.recipe, function, mutant.hides, None)


def deviations(control: Control) -> dict[str, str]:
    """Return how each function of a control differs from the reference; empty texts if it does not."""
    data: dict[str, list[tuple]] = {
        "cast_given": [(x, x.abs().amax().float() / 2) for x in control.data],
        "cast_stochastic": [(x, 5) for x in control.data],
        "product": [layer_data(96, 80)],
        "grouped": [ALL, ONE_IDLE],
    }
    found = {}
    for name in functions(control.subject()):
        given = data.get(name, [(x,) for x in control.data])
        if name == "cast_stochastic" and control.own_draws:
            wrong = [biased(control.subject(), x) for x in control.data]
        else:
            wrong = [against_reference(control.subject(), control.recipe, name, one, None) for one in given]
        found[name] = "; ".join(filter(None, wrong))
    return found


def biased(subject: Subject, x: Tensor, draws: int = 400) -> str:
    """Return in words how many means over `draws` seeds are 5 standard errors off the reference's."""
    seeds = range(draws)
    assert subject.cast_stochastic is not None
    own = torch.stack([parts(subject.cast_stochastic(x, seed), subject, x)["values"] for seed in seeds])
    right = torch.stack([parts(reference(x, GRADIENT, seed), subject, x)["values"] for seed in seeds])
    both = torch.cat((own, right))
    error = (both.amax(0) - both.amin(0)) / 2 * (2 / draws) ** 0.5
    count = int(((own.mean(0) - right.mean(0)).abs() > 5 * error).sum())
    return f"mean of {count} of {x.numel()} values" if count else ""


def compare() -> bool:
    """Print how each subject differs from the reference; return True if all is as the registry says."""
    right = True
    for name, mutant in (MUTANTS | HELD_OUT | THIRD | FOURTH).items():
        shown, hidden = compared(mutant)
        right &= bool(shown) and not hidden
        print(f"{name}: {shown or 'NO DIFFERENCE'}{hidden and f'; ordinary data: {hidden}'}")
    for name, control in (CONTROLS | HELD_OUT_CONTROLS | THIRD_CONTROLS | FOURTH_CONTROLS).items():
        for function, wrong in deviations(control).items():
            right &= not wrong
            print(f"{name}: {function}: {wrong or 'equal'}")
    return right


# --- what the kit says ----------------------------------------------------------------------------

COLUMNS = (
    "set",
    "subject",
    "kind",
    "recipe",
    "source",
    "fault",
    "seen",
    "properties",
    "named_by_kit",
    "said",
)


def findings(subject: Subject, recipe: str) -> list[Row]:
    """Return the kit's rows on a subject: those of `ablate.conform`, which also names faults, or of each
    property where this version has none.
    """
    if hasattr(ablate, "conform"):
        return list(ablate.conform(subject, recipe).rows)
    bench = Examination(subject, PRESETS[recipe]())
    return [examined(bench, one) for one in PROPERTIES.values()]


def said(row: Row) -> str:
    """Return a row that failed as one line: property, numbers, sentence, and the first block."""
    texts = [f"{row.property} {row.differing}/{row.cases}", row.detail, row.block.place if row.block else ""]
    return ": ".join(filter(None, texts))


def table(sets: dict[str, tuple[dict[str, Mutant], dict[str, Control]]]) -> Iterator[dict[str, str]]:
    """Run the kit on each subject of these sets and yield a row of the table."""
    for number, (mutants, controls) in sets.items():
        for name, one in (mutants | controls).items():
            failed = [row for row in findings(one.subject(), one.recipe) if row.outcome == Outcome.FAIL]
            mutant = isinstance(one, Mutant)
            yield {
                "set": number,
                "subject": name,
                "kind": "mutant" if mutant else "control",
                "recipe": one.recipe,
                "source": one.source if mutant else "",
                "fault": one.fault if mutant else "",
                "seen": "yes" if failed else "no",
                "properties": " ".join(row.property for row in failed),
                "named_by_kit": ", ".join(sorted({row.fault for row in failed if row.fault})),
                "said": " | ".join(said(row) for row in failed[:4]),
            }


def main() -> None:
    """Compare with the reference, or run the kit and write a row for each subject."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--direct", action="store_true", help="compare with the reference, without the kit")
    parser.add_argument("--set", choices=SETS, help="only this set")
    asked = parser.parse_args()
    if asked.direct:
        sys.exit(not compare())
    out = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    out.writeheader()
    sets = {asked.set: SETS[asked.set]} if asked.set else SETS
    seen = {(number, kind): 0 for number in sets for kind in ("mutant", "control")}
    for row in table(sets):
        out.writerow(row)
        sys.stdout.flush()
        seen[row["set"], row["kind"]] += row["seen"] == "yes"
    for number, (mutants, controls) in sets.items():
        print(
            f"{number} set: seen {seen[number, 'mutant']} of {len(mutants)};"
            f" false alarms {seen[number, 'control']} of {len(controls)}",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()
