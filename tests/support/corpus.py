"""A small synthetic corpus that is the same on every machine."""

from pathlib import Path

import numpy as np

from ablate.training.data import Shards


def write_shards(folder: Path, train: int = 20_000, val: int = 4_000, vocab: int = 64) -> Shards:
    """Two raw uint16 shards from a small integer generator: x -> 1103515245 x + 12345 mod 2^31, thinned so that tokens repeat."""
    state, tokens = 1, np.empty(train + val, dtype=np.uint16)
    for i in range(train + val):
        state = (1103515245 * state + 12345) % 2**31
        draw = (state >> 16) % vocab
        tokens[i] = (
            (tokens[i - 1] + 1) % vocab if i and draw < vocab // 2 else draw
        )  # half the text is predictable
    tokens[:train].tofile(folder / "train.bin")
    tokens[train:].tofile(folder / "val.bin")
    return Shards(train=str(folder / "train.bin"), val=str(folder / "val.bin"), vocab=vocab)
