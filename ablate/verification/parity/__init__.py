"""Whether Transformer Engine's kernels compute what the emulator computes, on the machine that this runs on.

Casts bit for bit, layers up to the order of additions, stochastic rounding by its statistics, and a short
training. It prints nothing and keeps nothing: `ablate doctor --engine transformer_engine` does. The engine's
own functions are called, so that tests run all of it over a double of TE's native part; what that shows is
that modules pass the right operands, and nothing about kernels.
"""

import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ablate import provenance
from ablate.engines import parity_record
from ablate.engines.hardware import Machine, driver, refusal, stray_switch, this_machine
from ablate.engines.te_mapping import Family
from ablate.engines.transformer_engine import library
from ablate.results.figures.parity import overlay
from ablate.verification.check_result import Check, Row
from ablate.verification.parity.bench import NAMES, Bench
from ablate.verification.parity.casts import exact_casts
from ablate.verification.parity.draws import stochastic_draws
from ablate.verification.parity.linears import exact_products
from ablate.verification.parity.training import TRAINED, Curves, short_training


def obstacle() -> str | None:
    """Why nothing can be compared here, in a sentence; None where something can."""
    if reason := refusal(this_machine(), {"fp8"}):
        return str(reason)
    if stray := stray_switch():
        return f"{stray} is set and changes Transformer Engine's numbers; unset it"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # a driver that is too old; a torch without CUDA
        return f"torch finds no usable GPU: {_first(error)}"
    try:
        library()
    except (RuntimeError, ImportError, OSError) as error:
        return f"Transformer Engine cannot be imported: {_first(error)}"
    return None


def _first(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def bench_of(machine: Machine) -> Bench:
    """All that this GPU computes."""
    families = tuple(family for family in NAMES if refusal(machine, {family}) is None)
    return Bench(families, torch.device("cuda"), fast_sums=machine.capability < (10, 0))


class Comparison:
    """One run of all checks: rows as they are found, then a verdict and a document."""

    def __init__(self, machine: Machine, bench: Bench, fast: bool = False) -> None:
        self.machine, self.bench, self.fast = machine, bench, fast
        self.rows: list[tuple[Family | None, str, Row]] = []
        self.curves: list[Curves] = []
        self._started, self._clock = time.time(), time.monotonic()

    def checks(self) -> list[tuple[Family | None, Check]]:
        """What is looked at, each of one family of formats, in the order of the headings."""
        looks = [exact_casts, exact_products, stochastic_draws]
        if not self.fast:
            looks.append(partial(short_training, curves=self.curves))
        found: list[tuple[Family | None, Check]] = [(None, Check("What is compared", self.subject))]
        return found + [
            (family, check)
            for look in looks
            for family in self.bench.families
            for check in look(self.bench, family)
        ]

    def groups(self, status: Any = None) -> Iterator[tuple[str, list[Row]]]:
        """Each heading with its rows, as soon as they are all there; `status`, if any, says what is being
        looked at.
        """
        checks = self.checks()
        for group in dict.fromkeys(check.group for _, check in checks):
            found = []
            for number, (family, check) in enumerate(checks, 1):
                if check.group == group:
                    if status:
                        status.update(f"[dim]{number} of {len(checks)}[/] {group}: {check.name} ...")
                    for row in check.rows():
                        found.append(row)
                        self.rows.append((family, group, row))
            if found:
                yield group, found

    def subject(self) -> Iterator[Row]:
        """The GPU, versions, and what is left out, with the reason."""
        facts = self.environment()
        yield Row("GPU", ", ".join(facts[key] for key in ("gpu", "capability") if facts.get(key)))
        yield Row("driver, torch", ", ".join(facts[key] for key in ("driver", "torch") if facts.get(key)))
        yield Row(
            "transformer-engine, products by",
            f"{facts['transformer-engine']}, {facts.get('fp4_backend', 'unknown')}",
        )
        for family, name in NAMES.items():
            if family not in self.bench.families:
                reason = refusal(self.machine, {family})
                yield Row(name, f"left out: {reason.why if reason else 'not asked for'}")
        if self.fast:
            yield Row("a short training", "left out: --fast")

    def environment(self) -> dict[str, str]:
        """Versions and hardware, those that a trial by this engine records, and the driver's."""
        facts = provenance.environment() | {"transformer-engine": str(self.machine.version)}
        if self.machine.capability:
            facts["capability"] = f"SM {self.machine.capability[0]}.{self.machine.capability[1]}"
        if found := driver():
            facts["driver"] = found
        return facts

    def families(self) -> dict[Family, str]:
        """The verdict on each family that was compared: off where one row of it is."""
        off = {family for family, _, row in self.rows if row.ok is False}
        return {
            family: parity_record.OFF if {family, None} & off else parity_record.AGREES
            for family in self.bench.families
        }

    @property
    def agrees(self) -> bool:
        """True if no row is off."""
        return not any(row.ok is False for _, _, row in self.rows)

    def verdict(self) -> str:
        """One sentence, or a few: what agrees, what is off and where that shows, what was left out."""
        judged = [row for _, _, row in self.rows if row.ok is not None]
        off = [(family, row) for family, _, row in self.rows if row.ok is False]
        whose = (
            f"Transformer Engine {self.machine.version} on {self.environment().get('gpu', 'this machine')}"
        )
        names = {family: NAMES[family] for family in self.bench.families}
        if off:
            families = dict.fromkeys(names.get(family, "all") for family, _ in off)
            row = off[0][1]
            return (
                f"{whose} does not compute what the emulator computes in {' and '.join(families)}:"
                f" {len(off)} of {len(judged)} checks are "
                f"off, first {row.what}: {row.measured}; expected {row.expected}. Believe the emulator."
            )
        left = [name for family, name in NAMES.items() if family not in names]
        more = f" Not compared: {' and '.join(left)}." if left else ""
        short = (
            " No training was compared (--fast), so that `engine: auto` stays with the emulator."
            if self.fast
            else ""
        )
        return (
            f"{whose} computes what the emulator computes in {' and '.join(names.values())}: all"
            f" {len(judged)} checks agree.{more}{short}"
        )

    def document(self) -> dict[str, Any]:
        """All of it, plain values alone."""
        return {
            "engine": "transformer_engine",
            "verdict": parity_record.AGREES if self.agrees else parity_record.OFF,
            "sentence": self.verdict(),
            "compared": parity_record.subject(self.machine),
            "families": self.families(),
            "fast": self.fast,
            "environment": self.environment(),
            "started": self._started,
            "seconds": round(time.monotonic() - self._clock, 2),
            "command": sys.argv[1:],
            "rows": [{"family": family, "group": group, **vars(row)} for family, group, row in self.rows],
            "losses": {TRAINED[found.family]: found.losses for found in self.curves},
            "gradients": {TRAINED[found.family]: found.gradients for found in self.curves},
        }

    def draw(self, path: Path) -> Path | None:
        """The losses as one PNG; None where nothing was trained."""
        picture = overlay({TRAINED[found.family]: found.losses for found in self.curves})
        if picture is None:
            return None
        picture.write(path)
        picture.close()
        return path
