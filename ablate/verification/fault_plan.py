"""Plan of fault injection: the order of the kinds of faults, and the small sweep that receives them."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ablate.verification.injections import FAULTS, HARMS, MIGRATION

CHECKPOINT_SECONDS = 0.2
"""Seconds between checkpoints of the sweep's trials."""
PATIENCE_SECONDS = 5
"""Patience of the sweep: seconds without a message after which a trial may count as hung."""


def deck(names: list[str], rng: np.random.Generator) -> Iterator[str]:
    """Yield kinds of faults without end, in shuffled rounds that contain every kind.

    Kinds that leave the command running come more often, since they cost less time.
    """
    cards = [name for name in names for _ in range(_weight(name))]
    while True:
        yield from (cards[i] for i in rng.permutation(len(cards)))


def _weight(name: str) -> int:
    return 3 if name in HARMS else 1 if name == MIGRATION or FAULTS[name].ends else 2


def experiment(folder: Path, faults: int) -> str:
    """Return the YAML of a cooldown grid with two seeds, whose trials share prefixes, and write its corpus.

    The sweep takes about ten seconds of one core, and less for so few faults that half of it suffices.
    """
    steps = 200 if faults > 5 else 100
    counter = np.arange(12_000, dtype=np.uint64)
    text = ((counter * 2654435761 % 2**32 >> 20) % 64).astype(np.uint16)
    for name, part in (("train", text[:10_000]), ("val", text[10_000:])):
        part.tofile(folder / f"{name}.bin")
    data = {"train": str(folder / "train.bin"), "val": str(folder / "val.bin"), "vocab": 64}
    shape = {
        "layers": 1,
        "width": 32,
        "heads": 2,
        "context": 16,
        "batch": 2,
        "steps": steps,
        "eval_every": steps // 5,
        "eval_tokens": 64,
    }
    content = {
        "schema": 1,
        "question": "Is anything lost?",
        "workload": {"gpt": shape | {"data": data}},
        "ablate": {"cooldown": [0, 0.1, 0.25]},
        "seeds": 2,
        "retry": 100,
        "patience": PATIENCE_SECONDS,
        "telemetry": {"checkpoint": CHECKPOINT_SECONDS, "log": 5},
    }
    return json.dumps(content, indent=1)
