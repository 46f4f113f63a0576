"""Parity of an engine's kernels and the emulator on this machine: Transformer Engine's; scaled.py has others.

Casts are compared bit for bit, layers up to the order of additions, stochastic rounding by its statistics,
and a short training run by its losses. This package prints and stores nothing; `ablate doctor --engine
transformer_engine` does that. It calls the engine's own functions, so that tests can run it over a test
double of TE's native part. Such tests show that the modules pass the right operands, and nothing about
kernels.
"""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import torch

from ablate import provenance
from ablate.engines import parity_record
from ablate.engines.hardware import Machine, refusal, stray_switch, this_machine
from ablate.engines.transformer_engine import library
from ablate.errors import first_line
from ablate.files import finite
from ablate.reports.figures.parity import overlay
from ablate.verification.check_result import Check, Row, by_group
from ablate.verification.parity.bench import NAMES, Bench
from ablate.verification.parity.casts import exact_casts, stochastic_draws
from ablate.verification.parity.linears import exact_products
from ablate.verification.parity.training import TRAINED, Curves, short_training


def obstacle() -> str | None:
    """Return the reason why no comparison is possible on this machine; None if it is possible."""
    if reason := refusal(this_machine(), {"fp8"}):
        return str(reason)
    if stray := stray_switch():
        return f"{stray} is set and changes Transformer Engine's numbers; unset it"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # driver too old, or torch without CUDA
        return f"torch finds no usable GPU: {first_line(error).rstrip('.')}"
    try:
        library()
    except (RuntimeError, ImportError, OSError) as error:
        return f"Transformer Engine cannot be imported: {first_line(error).rstrip('.')}"
    return None


def bench_of(machine: Machine) -> Bench:
    """Return the bench with all families of formats that this GPU supports."""
    families = tuple(family for family in NAMES if refusal(machine, {family}) is None)
    return Bench(families, torch.device("cuda"), fast_sums=(machine.capability or (0, 0)) < (10, 0))


class ParityDocument(TypedDict):
    """Result of a parity run as JSON, which `ablate doctor` writes and `engine: auto` reads."""

    engine: str
    verdict: str
    sentence: str
    compared: dict[str, object]
    families: dict[str, str]
    fast: bool
    environment: dict[str, str]
    started: float
    seconds: float
    command: list[str]
    rows: list[dict[str, object]]
    losses: dict[str, dict[str, list[float]]]
    gradients: dict[str, dict[str, list[float]]]


class ParityRun:
    """One run of all parity checks: yields rows as checks end, then has a verdict and a document."""

    names: Mapping[Any, str] = NAMES
    """Families that can be compared, with their names in messages."""
    question = "Does Transformer Engine train as the emulator does?"
    """Title of the figure."""

    def __init__(self, machine: Machine, bench: Bench, fast: bool = False) -> None:
        self.machine, self.bench, self.fast = machine, bench, fast
        self.rows: list[tuple[str | None, str, Row]] = []
        self.curves: list[Curves] = []
        self._started, self._clock = time.time(), time.monotonic()

    def suites(self) -> list[Callable[[Bench, Any], Iterator[Check]]]:
        return [exact_casts, exact_products, stochastic_draws]

    def checks(self) -> list[Check]:
        """Return all checks with their families of formats, in the order of the headings."""
        suites = self.suites()
        if not self.fast:
            suites.append(partial(short_training, curves=self.curves))
        return [Check("What is compared", self.subject)] + [
            replace(check, family=family)
            for suite in suites
            for family in self.bench.families
            for check in suite(self.bench, family)
        ]

    def groups(self, show: Callable[[str], None] | None = None) -> Iterator[tuple[str, list[Row]]]:
        for group, pairs in by_group(self.checks(), show):
            self.rows += [(check.family, group, row) for check, row in pairs]
            yield group, [row for _, row in pairs]

    @property
    def label(self) -> str:
        return f"Transformer Engine {self.machine.version}"

    def subject(self) -> Iterator[Row]:
        """Yield the GPU, versions, and the families that are left out, with the reason."""
        facts = self.environment()
        yield Row("GPU", ", ".join(facts[key] for key in ("gpu", "capability") if facts.get(key)))
        yield Row("driver, torch", ", ".join(facts[key] for key in ("driver", "torch") if facts.get(key)))
        products = f"{facts['transformer-engine']}, {facts.get('fp4_backend', 'unknown')}"
        yield Row("transformer-engine, products by", products)
        for family, name in NAMES.items():
            if family not in self.bench.families:
                reason = refusal(self.machine, {family})
                yield Row(name, f"left out: {reason.why if reason else 'not asked for'}")
        if self.fast:
            yield Row("a short training", "left out: --fast")

    def environment(self) -> dict[str, str]:
        """Return versions and hardware as a trial with this engine records them, and the driver's version."""
        facts = provenance.environment() | {"transformer-engine": str(self.machine.version)}
        if self.machine.capability:
            facts["capability"] = f"SM {self.machine.capability[0]}.{self.machine.capability[1]}"
        if version := provenance.driver():
            facts["driver"] = version
        return facts

    def families(self) -> dict[str, str]:
        """Return the verdict on each compared family: off if one of its rows is."""
        off = {family for family, _, row in self.rows if row.ok is False}
        return {
            family: parity_record.OFF if {family, None} & off else parity_record.AGREES
            for family in self.bench.families
        }

    @property
    def agrees(self) -> bool:
        return not any(row.ok is False for _, _, row in self.rows)

    def verdict(self) -> str:
        """Return the verdict in words: families that agree or are off, the first row that is off, families
        left out."""
        judged = [row for _, _, row in self.rows if row.ok is not None]
        off = [(family, row) for family, _, row in self.rows if row.ok is False]
        subject = f"{self.label} on {self.environment().get('gpu', 'this machine')}"
        names = {family: self.names[family] for family in self.bench.families}
        if off:
            families = dict.fromkeys(names.get(family, "all") if family else "all" for family, _ in off)
            row = off[0][1]
            return (
                f"{subject} does not compute what the emulator computes in {' and '.join(families)}:"
                f" {len(off)} of {len(judged)} checks are off, first {row.what}: {row.measured}; expected"
                f" {row.expected}. Use the emulator."
            )
        missing = [name for family, name in self.names.items() if family not in names]
        more = f" Not compared: {' and '.join(missing)}." * bool(missing)
        more += (
            " No training was compared (--fast), so that `engine: auto` stays with the emulator." * self.fast
        )
        return (
            f"{subject} computes what the emulator computes in {' and '.join(names.values())}: all"
            f" {len(judged)} checks agree.{more}"
        )

    def document(self) -> ParityDocument:
        return {
            "engine": self.bench.engine,
            "verdict": parity_record.AGREES if self.agrees else parity_record.OFF,
            "sentence": self.verdict(),
            "compared": dict(parity_record.subject(self.machine, self.bench.engine)),
            "families": self.families(),
            "fast": self.fast,
            "environment": self.environment(),
            "started": self._started,
            "seconds": round(time.monotonic() - self._clock, 2),
            "command": sys.argv[1:],
            "rows": [{"family": family, "group": group, **vars(row)} for family, group, row in self.rows],
            "losses": self.losses,
            "gradients": {TRAINED[curves.family]: curves.gradients for curves in self.curves},
        }

    @property
    def losses(self) -> dict[str, dict[str, list[float]]]:
        return {TRAINED[curves.family]: curves.losses for curves in self.curves}

    def write(self, document: ParityDocument, path: Path | None) -> list[Path]:
        """Write the document as JSON, with a figure of the losses beside it if something was trained, and
        return their paths; without `path`, in the current folder, named by GPU and version."""
        compared = document["compared"]
        version = compared.get("transformer_engine") or f"{document['engine']} torch {compared['torch']}"
        parts = (document["environment"].get("gpu", "no-gpu"), version)
        name = "-".join(["parity", *(re.sub(r"[^\w.]+", "-", str(part)) for part in parts)])
        path = path or Path(f"{name}.json")
        path.write_text(json.dumps(finite(document), indent=1) + "\n", encoding="utf-8")
        if (figure := overlay(self.losses, self.question)) is None:
            return [path]
        figure.write(picture := path.with_suffix(".png"))
        figure.close()
        return [path, picture]
