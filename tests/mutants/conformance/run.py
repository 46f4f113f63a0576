"""Compare mutants with the reference on the data that show them, and count those that the kit sees."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from ablate.numerics.hadamard import rotate
from ablate.numerics.spec import Outer, Quant
from ablate.numerics.stored import unswizzle
from ablate.verification.conformance.result import Outcome
from ablate.verification.conformance.run import Findings, conform
from ablate.verification.conformance.subject import Quantised, Subject
from mutants.conformance.first import FIRST
from mutants.conformance.fourth import FOURTH
from mutants.conformance.second import SECOND
from mutants.conformance.subjects import (
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
    reference,
)
from mutants.conformance.third import THIRD

SETS = {"first": FIRST, "second": SECOND, "third": THIRD, "fourth": FOURTH}
QUANTS = {"nvfp4": NVFP4, "mxfp4": MXFP4, "mxfp8": MXFP8, "four_over_six": OVER_SIX}


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


# --- what the kit sees ----------------------------------------------------------------------------


def examined(name: str) -> Iterator[tuple[str, Mutant | Control, Findings]]:
    """Run the kit on each subject of a set; yield its name, the subject and the findings."""
    for subject, one in (SETS[name].mutants | SETS[name].controls).items():
        yield subject, one, conform(one.subject(), one.recipe)


def main() -> None:
    """Print the rows that fail of each subject, and how many mutants and controls of each set have any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", choices=SETS, action="append", help="only this set; repeatable")
    asked = parser.parse_args()
    totals = []
    for name in asked.set or SETS:
        seen = {Mutant: 0, Control: 0}
        for subject, one, findings in examined(name):
            failed = [row for row in findings.rows if row.outcome == Outcome.FAIL]
            seen[type(one)] += bool(failed)
            rows = " ".join(row.property for row in failed) or "nothing"
            stage = next((row.stage for row in failed if row.stage), "")
            print(f"{name} {type(one).__name__.lower()} {subject}: {rows}; {stage or 'no stage'}", flush=True)
        made = SETS[name]
        totals.append(
            f"{name} set: seen {seen[Mutant]} of {len(made.mutants)};"
            f" false alarms {seen[Control]} of {len(made.controls)}"
        )
    print("\n".join(totals))


if __name__ == "__main__":
    main()
