"""Run the conformance kit on the public libraries, and write docs/project/conformance.md from the findings.

    python benchmarks/conformance.py --examine [--again] [NAME ...]    # default: all that are installed
    python benchmarks/conformance.py [--check]                         # the page

Each library runs in a process of its own, since several change what others import. Findings go to
benchmarks/conformance.json, one entry a library, recipe and version; an entry of the installed version and of
these properties is kept, unless `--again`. Libraries need several environments: run it once in each. With
`--check` nothing is written: exit status 1 if the page differs from what would be written, or if a difference
has no explanation.
"""

import argparse
import hashlib
import json
import platform
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from datetime import UTC, datetime
from inspect import getsource
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FINDINGS = ROOT / "benchmarks" / "conformance.json"
PAGE = ROOT / "docs" / "project" / "conformance.md"
LONGEST = 160
"""Characters of a block's computation that are kept."""
MARK = "@@findings "
"""Prefix of the line with the findings in the output of a library's process."""
COLUMNS = 110
"""Largest width of a table or a line in characters."""
SHOWN = 3
"""Properties that the page names for a difference: those with the largest shares."""
RECIPES = {"nvfp4": "NVFP4", "four_over_six": "Four Over Six", "row_scaled": "Row-scaled NVFP4"}
RECIPES |= {"mxfp4": "MXFP4", "mxfp8": "MXFP8"}
CODES = (
    "transformer_engine",
    "torchao",
    "compressed_tensors",
    "modelopt",
    "fouroversix",
    "mlx",
    "auto_round",
    "comfy_kitchen",
    "fireworks_prequant",
    "qwix",
    "qwantize",
    "breccia",
    "quark",
    "brevitas",
    "neural_compressor",
    "gfloat",
    "pychop",
    "custom_float_quant",
    "gguf",
)
"""Libraries in the order of the page."""


@dataclass(frozen=True)
class Cause:
    """Explanation of the differences of a library from a recipe."""

    library: str
    recipes: tuple[str, ...]
    text: str
    properties: tuple[str, ...] = ()
    """Properties that it explains; none: all that have no other explanation."""


ORDER = "where the recipe has a (S/6) and x (1/(s (1/S))). Exact ties of bf16 numbers round otherwise."
LOG2 = "The exponent is a ceiling of an fp32 log2: an amax one ulp above 448 x 2^k keeps the smaller scale."
TIES = "Elements halfway between two codes go to the smaller magnitude, here to the even code"
LOW = (
    "its floor and log2 are computed in bf16 for bf16 tensors, so that an amax up to 4 % below a power of two"
)
CAUSES = (
    Cause(
        "transformer_engine",
        ("nvfp4",),
        "The reference rounds gradients to nearest; only TE's kernels round them stochastically.",
        ("random_gradients",),
    ),
    Cause(
        "torchao",
        ("nvfp4",),
        "The scales of a zero tensor are 0/0, so that all its values become NaN"
        " ([text](upstream.md#torchao-all-zero-tensor)).",
        ("zero_tensor",),
    ),
    Cause(
        "torchao",
        ("nvfp4",),
        "Block scales are 2^-6 or more: a block whose amax is below the tensor's / 28,672 loses bits, and"
        " below a twenty-fourth of that becomes zero.",
        ("every_scale", "subnormal_scales", "zero_block", "random_fp32"),
    ),
    Cause(
        "torchao",
        ("nvfp4",),
        f"It computes (a/6) / (A/2688) and x ((1/(A/2688)) / s), {ORDER} The factor of a tensor"
        f" with amax 6 is"
        " not exactly 1, so that midpoints round down.",
    ),
    Cause(
        "torchao", ("nvfp4", "mxfp4", "mxfp8"), "It refuses tensors that are not contiguous.", ("strides",)
    ),
    Cause("torchao", ("mxfp8",), "Likewise for gradients.", ("product_strides",)),
    Cause(
        "torchao",
        ("mxfp4", "mxfp8"),
        "Blocks whose scale is 2^-127 are divided by 2^-126, or flushed.",
        ("power_of_two_extremes",),
    ),
    Cause("torchao", ("mxfp8",), f"{LOG2} Known: ao#4117.", ("power_of_two_thresholds",)),
    Cause(
        "compressed_tensors",
        ("nvfp4",),
        "A block scale that rounds to zero becomes 0.125; the block is zero all the same.",
        ("subnormal_scales", "zero_block"),
    ),
    Cause(
        "compressed_tensors",
        ("nvfp4",),
        f"It computes 2688/A and a/6 in the dtype of x, in bf16 with an error up to 0.4 %, and x"
        f" / (s/S), {ORDER}",
    ),
    Cause("compressed_tensors", ("mxfp4",), "A NaN makes its block zero.", ("nan_visible",)),
    Cause(
        "modelopt",
        ("nvfp4",),
        "The scales of a zero tensor are 0/0, so that all its values become NaN"
        " ([text](upstream.md#modelopt-all-zero-tensor)).",
        ("zero_tensor",),
    ),
    Cause(
        "modelopt",
        ("nvfp4",),
        "Block scales are 2^-9 or more, and that of a zero block is 1.",
        ("subnormal_scales", "zero_block"),
    ),
    Cause("modelopt", ("nvfp4",), f"It computes a / (6 (A/2688)) and x / (s (A/2688)), {ORDER}"),
    Cause("modelopt", ("mxfp4",), "It refuses tensors that are not contiguous.", ("strides",)),
    Cause("modelopt", ("mxfp4",), "A NaN makes its block zero.", ("nan_visible",)),
    Cause("modelopt", ("mxfp4",), f"{TIES} ([text](upstream.md#modelopt-ties-of-mxfp4))."),
    Cause("modelopt", ("mxfp8",), LOG2, ("power_of_two_thresholds",)),
    Cause(
        "fouroversix",
        ("nvfp4", "four_over_six"),
        "No clamp at 6: where a subnormal scale, or a given amax, is too small for the block,"
        " the rounded value"
        " 8 is stored as the code of -0, so that a block's largest element is lost"
        " ([text](upstream.md#fouroversix-clamp-at-6)).",
        ("subnormal_scales", "saturated_scales"),
    ),
    Cause("fouroversix", ("nvfp4",), f"It computes (a/6) S, {ORDER}"),
    Cause(
        "fouroversix",
        ("mxfp4",),
        "The smallest scale is 2^-126, not 2^-127.",
        ("power_of_two_extremes",),
    ),
    Cause(
        "fouroversix",
        ("mxfp4",),
        "A zero block is divided by a scale of zero; NaN is stored as -1.5, under a scale of 2^-127.",
        ("zero_block", "zero_tensor", "nan_visible"),
    ),
    Cause(
        "mlx",
        ("nvfp4",),
        "On the CPU, NVFP4 refuses an odd number of blocks.",
        ("scale_layout", "shape_lattice"),
    ),
    Cause(
        "mlx",
        ("mxfp4", "mxfp8"),
        "A NaN makes its block finite ([text](upstream.md#mlx-mx-modes-on-the-cpu)).",
        ("nan_visible",),
    ),
    Cause(
        "mlx",
        ("mxfp4", "mxfp8"),
        "The exponent of a scale below 2^-127 wraps around, and such blocks decode to infinity; that of a"
        " zero block is 1.",
        ("power_of_two_extremes", "zero_block"),
    ),
    Cause(
        "mlx",
        ("nvfp4", "mxfp4"),
        f"{TIES}: the CPU takes the nearest entry of a table. Scales and quotients of bf16"
        f" tensors are computed"
        " in bf16.",
    ),
    Cause(
        "auto_round",
        ("mxfp4", "mxfp8"),
        "The exponent of a zero block is set to 1, before the offset of the element.",
        ("zero_block",),
    ),
    Cause("auto_round", ("mxfp8",), LOG2, ("power_of_two_thresholds",)),
    Cause("auto_round", ("nvfp4",), f"It computes S (a (1/6)), {ORDER}"),
    Cause(
        "comfy_kitchen",
        ("nvfp4",),
        "A zero tensor has the scale 0, and its block scales are 0/0: all its values become NaN"
        " ([text](upstream.md#comfy-kitchen-all-zero-tensor)).",
        ("zero_tensor",),
    ),
    Cause(
        "comfy_kitchen",
        ("nvfp4",),
        "The tensor scale amax / 2688 is rounded to the dtype of x, in bf16 with an error up to"
        " 0.4 %, and all"
        f" values change with it. It computes (a/6) / (A/2688), {ORDER}",
    ),
    Cause("comfy_kitchen", ("mxfp8",), LOG2, ("power_of_two_thresholds",)),
    Cause(
        "comfy_kitchen",
        ("mxfp8",),
        "The scale byte 0, 2^-127, is read as zero.",
        ("power_of_two_extremes",),
    ),
    Cause("fireworks_prequant", ("nvfp4",), "It refuses tensors that are not contiguous.", ("strides",)),
    Cause(
        "fireworks_prequant",
        ("nvfp4",),
        f"It multiplies x by S first, then takes amax / 6 and x S (1/s), {ORDER}",
    ),
    Cause(
        "qwix",
        ("mxfp4", "mxfp8"),
        "Its ceiling of log2 is computed in the dtype of x, and jnp.log2 of 2^-15, 2^-13, 2^13"
        " and 2^15 is not"
        " exact on a CPU: scales of half or twice the size ([text](upstream.md#qwix-log2)).",
        ("random_bf16", "every_scale", "power_of_two_thresholds", "stale_scales", "scale_layout"),
    ),
    Cause(
        "qwix",
        ("nvfp4", "mxfp4", "mxfp8"),
        "A scale below 1e-19 becomes 1, and so does that of a zero block: tensors of 1e-20 become zero.",
        ("amax_ladder", "zero_block", "smallest_numbers", "power_of_two_extremes"),
    ),
    Cause(
        "qwix",
        ("nvfp4", "mxfp4", "mxfp8"),
        "Scales and quotients of bf16 tensors are computed in bf16.",
    ),
    Cause(
        "qwantize",
        ("mxfp4",),
        "An amax is 1e-30 or more, and the smallest scale 2^-126.",
        ("power_of_two_extremes", "zero_block"),
    ),
    Cause("qwantize", ("nvfp4", "mxfp4"), f"{TIES}: the nearest entry of a table."),
    Cause(
        "breccia",
        ("mxfp8",),
        "The scale is 2^n with n nearest to log2(amax / 448), by design: elements above 448 saturate.",
        ("random_bf16", "random_fp32", "power_of_two_thresholds", "stale_scales", "strides"),
    ),
    Cause(
        "breccia",
        ("mxfp8",),
        "An amax is 1e-10 or more.",
        ("power_of_two_extremes", "amax_ladder", "small_tensor", "zero_block", "smallest_numbers"),
    ),
    Cause("breccia", ("nvfp4", "mxfp8"), f"{TIES}, and so do block scales: the nearest entry of a table."),
    Cause(
        "brevitas",
        ("mxfp4", "mxfp8"),
        "A scale is 1e-10 / 4 (E2M1) or 1e-10 / 256 (E4M3) or more, its parameter scaling_min_val.",
        ("power_of_two_extremes", "amax_ladder", "zero_block", "smallest_numbers"),
    ),
    Cause(
        "brevitas",
        ("mxfp4", "mxfp8"),
        f"Scales follow OCP's rule, but {LOW} gets twice the scale"
        f" ([text](upstream.md#brevitas-log2-in-bf16)).",
    ),
    Cause(
        "neural_compressor",
        ("mxfp4", "mxfp8"),
        f"Scales follow OCP's rule, but {LOW} gets twice the scale; so do exponents of elements"
        " ([text](upstream.md#neural-compressor-log2-in-bf16)).",
    ),
    Cause("gfloat", ("mxfp4",), "It raises for a NaN, which E2M1 has not.", ("nan_visible",)),
    Cause(
        "custom_float_quant",
        ("mxfp4", "mxfp8"),
        "The largest exponent is reserved for infinity, as in IEEE 754: E2M1 ends at 3, E4M3 at 240"
        " ([text](upstream.md#custom-float-quant-largest-exponent)). A zero block has the scale of an amax of"
        " 1.",
    ),
    Cause("gguf", ("mxfp4",), "A NaN makes its block zero.", ("nan_visible",)),
    Cause("gguf", ("mxfp4",), f"{TIES}: the nearest entry of a table, as in llama.cpp."),
)
PREFACE = """\
# Conformance of public libraries

Do libraries compute the recipes that they name? Each cast went through the conformance kit on one CPU
({where}; `python benchmarks/conformance.py --examine`).
`benchmarks/conformance.json`, from which this page is written, has every property and first block.

A difference is not yet a defect. Most are exact ties that another order of operations rounds to the other
side, or a rule that is stated. A defect has a [text](upstream.md) for its authors, which was not sent.

Not here: libraries whose casts need a GPU (fp-quant) or Python 3.12 (xiaotu-moe); those that round numbers to
a grid and have no block scale (ml_dtypes, jax, torch, onnxruntime); bitsandbytes, whose FP4 is another grid;
llm-compressor, whose casts are those of compressed-tensors.
"""
NOTE = """\
Numbers of properties that hold and that differ, and in brackets the library's own rule of block scales, by
which it is judged; *one level* is NVFP4 without a tensor scale. `infinity_visible` is reported, not judged.
Properties that a library has no function for are left out."""
LEGEND = """\
The properties that differ most, each with the share of the compared numbers that differ; `no`: it does not
hold; `err`: the library raises. a is a block's amax, A the tensor's, s the block scale, S = 2688/A."""


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a table; ValueError if one is wider than COLUMNS."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    lines.insert(1, "|" + "---|" * len(head))
    wide = [line for line in lines if len(line) > COLUMNS]
    if wide:
        raise ValueError(f"wider than {COLUMNS} columns: {wide[0]}")
    return [*lines, ""]


def cell(row: dict[str, Any]) -> str:
    """Return a finding in at most four characters."""
    words = {"pass": "ok", "variant": "var", "report": "rep", "n/a": "-"}
    if row["outcome"] in words:
        return words[row["outcome"]]
    if " raises for " in row.get("detail", ""):
        return "err"
    if row["cases"] == 1:
        return "no"
    part = row["differing"] / row["cases"]
    return "<1%" if part < 0.01 else f"{part:.0%}"


def share(row: dict[str, Any]) -> float:
    """Return the part of the compared numbers that differ; 1 if the library raises."""
    return 1.0 if cell(row) == "err" else row["differing"] / row["cases"]


def overview(findings: dict[str, Any]) -> list[str]:
    """Return the table of libraries: by recipe, the numbers of properties that hold and that differ."""
    rows = []
    for name, entry in findings.items():
        cells = []
        for recipe in RECIPES:
            part = entry["recipes"].get(recipe)
            if part is None:
                cells.append("")
                continue
            holds, differs = (
                sum(row["outcome"] in kinds for row in part["rows"].values())
                for kinds in (("pass", "variant"), ("fail",))
            )
            cells.append(f"{holds}, {differs}" + (f" ({part['change']})" if part["change"] else ""))
        rows.append([f"`{name}`", entry["version"], *cells])
    return table(["library", "version", *RECIPES.values()], rows)


def explained(findings: dict[str, Any]) -> dict[Cause, list[tuple[str, str, dict[str, Any]]]]:
    """Return the failed rows of each cause, as recipe, property and finding.

    Raises:
        ValueError: a difference has no cause, or a cause explains nothing.
    """
    found: dict[Cause, list[tuple[str, str, dict[str, Any]]]] = {cause: [] for cause in CAUSES}
    for name, entry in findings.items():
        for recipe, part in entry["recipes"].items():
            causes = [cause for cause in CAUSES if cause.library == name and recipe in cause.recipes]
            for one, row in part["rows"].items():
                if row["outcome"] != "fail":
                    continue
                named = [cause for cause in causes if one in cause.properties]
                fitting = named or [cause for cause in causes if not cause.properties]
                if not fitting:
                    raise ValueError(f"{name}, {recipe}, {one}: no explanation")
                for cause in fitting:
                    found[cause].append((recipe, one, row))
    idle = [(cause.library, cause.text) for cause, rows in found.items() if not rows]
    if idle:
        raise ValueError(f"explains nothing: {idle[0]}")
    return found


def differences(findings: dict[str, Any]) -> list[str]:
    """Return the explanations, each with the properties that differ most, and their shares."""
    lines: list[str] = []
    library = ""
    for cause, rows in explained(findings).items():
        if cause.library != library:
            library = cause.library
            lines += ["", f"### {library}", ""]
        recipes = list(dict.fromkeys(recipe for recipe, _, _ in rows))
        shares: dict[str, dict[str, None]] = {}
        for _, one, row in rows:
            shares.setdefault(one, {})[cell(row)] = None
        largest = sorted(shares, key=lambda one: -max(share(row) for _, name, row in rows if name == one))
        alike: dict[str, list[str]] = {}
        for one in largest[:SHOWN]:
            alike.setdefault(", ".join(shares[one]), []).append(f"`{one}`")
        names = [f"{', '.join(several)} {found}" for found, several in alike.items()]
        if len(largest) > SHOWN:
            names.append(f"{len(largest) - SHOWN} more")
        where = ", ".join(RECIPES[recipe] for recipe in recipes)
        item = f"- {where}. {cause.text} In {'; '.join(names)}."
        lines += textwrap.wrap(item, COLUMNS, subsequent_indent="  ", break_on_hyphens=False)
    return lines


def page() -> str:
    """Return the page."""
    kept = json.loads(FINDINGS.read_text())
    findings = {name: kept[name] for name in CODES if name in kept}
    days = sorted({entry["date"] for entry in findings.values()})
    runs = sorted({f"Python {entry['python']}, torch {entry['torch']}" for entry in findings.values()})
    preface = PREFACE.format(where="; ".join([*dict.fromkeys((days[0], days[-1])), *runs]))
    lines = [preface, "## Libraries", "", *overview(findings), NOTE, "", "## Differences", "", LEGEND]
    return "\n".join([*lines, *differences(findings)]) + "\n"


# --- the findings ---------------------------------------------------------------------------------


def examine(name: str) -> dict[str, Any]:
    """Return the findings on all recipes of a library: by recipe, then by property."""
    from libraries import LIBRARIES, claimed, library_subject

    from ablate.verification.conformance.examination import Examination
    from ablate.verification.conformance.properties import PROPERTIES
    from ablate.verification.conformance.result import Outcome
    from ablate.verification.conformance.run import examined

    found = {}
    for recipe, change in LIBRARIES[name].recipes.items():
        bench = Examination(library_subject(name, recipe), claimed(name, recipe))
        kept = {}
        for one in PROPERTIES.values():
            row = examined(bench, one)
            kept[row.property] = finding = {"outcome": row.outcome.value}
            if row.outcome is not Outcome.NOT_APPLICABLE:
                finding |= {"cases": row.cases, "differing": row.differing}
                finding |= {"detail": row.detail} if row.detail else {}
            if row.block is not None and row.outcome is Outcome.FAIL:
                parts = (row.block.place, row.block.computed, row.block.computed_by_subject)
                finding["block"] = [part[:LONGEST] for part in parts]
        found[recipe] = {"change": change, "rows": kept}
    return found


def examine_all(names: list[str], again: bool) -> None:
    """Examine libraries, or all that are installed, each in a process of its own, and keep the findings."""
    import torch
    from libraries import LIBRARIES

    from ablate import files
    from ablate.verification import conformance

    kit = b"".join(path.read_bytes() for path in sorted(Path(conformance.__file__).parent.rglob("*.py")))
    kept = json.loads(FINDINGS.read_text()) if FINDINGS.exists() else {}
    for name in names or [name for name, library in LIBRARIES.items() if library.subject]:
        library, entry = LIBRARIES[name], kept.get(name, {})
        mark = hashlib.sha256(kit + getsource(library.subject).encode()).hexdigest()[:12]
        if library.version is None:
            print(f"{name}: not installed ({library.command})")
            continue
        if (entry.get("version"), entry.get("kit")) == (library.version, mark) and not again:
            print(f"{name} {library.version}: kept, of {entry['date']}")
            continue
        command = [sys.executable, "-W", "ignore", __file__, "--child", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
        if done.returncode or not lines:
            print(f"{name} {library.version}: failed\n{done.stderr[-2000:]}")
            continue
        kept[name] = {
            "version": library.version,
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "python": platform.python_version(),
            "torch": torch.__version__.partition("+")[0],
            "kit": mark,
            "recipes": json.loads(lines[-1].removeprefix(MARK)),
        }
        whole = json.dumps(dict(sorted(kept.items())), indent=1)
        rows = re.sub(r"{\n +\"outcome\"[^{}]*}", lambda row: json.dumps(json.loads(row[0])), whole)
        files.write_text(FINDINGS, rows + "\n")
        print(f"{name} {library.version}: examined")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="libraries; default: all that are installed")
    parser.add_argument("--examine", action="store_true", help="examine libraries; do not write the page")
    parser.add_argument("--again", action="store_true", help="examine again what is in the file")
    parser.add_argument("--check", action="store_true", help="compare the page, write nothing")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(MARK + json.dumps(examine(args.names[0])))
    elif args.examine:
        examine_all(args.names, args.again)
    elif args.names or args.again:
        parser.error("NAME and --again need --examine")
    elif not args.check:
        PAGE.write_text(page())
    elif not PAGE.exists() or PAGE.read_text() != page():
        sys.exit("conformance.md differs: run `make pages`")


if __name__ == "__main__":
    main()
