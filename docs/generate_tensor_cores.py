"""Write the end of docs/run/tensor_cores.md: every preset and operand, on tensor cores or emulated.

`python docs/generate_tensor_cores.py [--check]`. With `--check` nothing is written: exit status 1 if the page
differs from what would be written.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from ablate.engines import SCALED
from ablate.recipes import PRESETS, Recipe
from ablate.recipes.reasons import grouped
from ablate.recipes.recipe import SLOTS
from ablate.recipes.scaled_mapping import Backend, Verdict, entirely_native, parts
from ablate.recipes.te_mapping import recipe_refusals
from ablate.reports.tensor_cores import words

PAGE = Path(__file__).parent / "run" / "tensor_cores.md"
_BACKENDS: tuple[Backend, ...] = ("cublaslt", "cudnn", "cutlass")
HEADING = "## Every preset"
"""Heading of the generated part of docs/run/tensor_cores.md, which is its end."""
_PREFACE = f"""\
{HEADING}

This part is generated (`make pages`). It says in which format `scaled_mm` multiplies the operands of each
preset, or which fields the hardware lacks. "And parts": what a `transform` takes out of an operand is
emulated. A preset whose schedule changes its products has several rows. `ablate plan` prints the same for an
experiment.
"""


def presets() -> str:
    """Return the generated part of docs/run/tensor_cores.md, from its heading to the end of the page."""
    quantised = {name: make() for name, make in PRESETS.items() if not make().plain}
    return "\n".join([_PREFACE, *_counts(quantised), "", *_rows(quantised), ""])


def _counts(quantised: dict[str, Recipe]) -> Iterator[str]:
    by_te = [name for name, recipe in quantised.items() if not any(recipe_refusals(recipe))]
    yield f"Of {len(PRESETS)} presets {len(quantised)} quantise something.\n"
    yield "| engine | presets whose quantised products are all on tensor cores | some of them | none |"
    yield "|---|---|---|---|"
    yield f"| `transformer_engine` | {len(by_te)} | | {len(quantised) - len(by_te)} |"
    for backend in _BACKENDS:
        whole = [name for name, recipe in quantised.items() if entirely_native(recipe, backend)]
        some = [
            name
            for name, recipe in quantised.items()
            if name not in whole
            and {given.runs for one in parts(recipe, backend) for given in one.values()}
            >= {"native", "emulated"}
        ]
        name = SCALED if backend == "cublaslt" else f"{SCALED}:{backend}"
        yield f"| `{name}` | {len(whole)} | {len(some)} | {len(quantised) - len(whole) - len(some)} |"


def _rows(quantised: dict[str, Recipe]) -> Iterator[str]:
    yield "| preset | operands | emulated because | TE |"
    yield "|---|---|---|---|"
    for name, recipe in quantised.items():
        by_te = "no" if any(recipe_refusals(recipe)) else "yes"
        for number, one in enumerate(parts(recipe)):
            title = f"`{name}`" if number == 0 else f"`{name}`, later"
            cells = {slot: words(one[slot.partition(".")[0]]) for slot in SLOTS}
            yield f"| {title} | {_alike(cells)} | {_reasons(one.values())} | {by_te} |"


def _alike(cells: dict[str, str]) -> str:
    """Return the formats of operands, each with the products or operands that have it; one alone for all."""
    slots: dict[str, list[str]] = {}
    for slot, text in cells.items():
        slots.setdefault(text, []).append(slot)
    if len(slots) == 1:
        return next(iter(slots))
    return "; ".join(f"{', '.join(_products(several))} {text}" for text, several in slots.items())


def _products(slots: list[str]) -> Iterator[str]:
    """Yield a product if both of its operands are among the slots, else the slot."""
    for product in dict.fromkeys(slot.partition(".")[0] for slot in slots):
        own = [slot for slot in slots if slot.startswith(f"{product}.")]
        yield from [product] if len(own) == 2 else own


def _reasons(given: Iterable[Verdict]) -> str:
    reasons = (reason for one in given if one.runs == "emulated" for reason in one.reasons)
    return "; ".join(grouped(reasons)).replace("|", "/")


if __name__ == "__main__":
    page = PAGE.read_text()
    by_hand = page.partition(f"{HEADING}\n")[0].rstrip()
    text = f"{by_hand}\n\n{presets()}"
    if "--check" in sys.argv[1:]:
        sys.exit(0 if page == text else f"{PAGE.name} is stale: run make pages")
    PAGE.write_text(text)
