"""The tokens of a step, drawn by counter from the seed: every arm of a seed sees the same batches."""

import numpy as np
import torch
from torch import Tensor

from ablate.numerics.philox import STREAMS, philox
from ablate.training.data.corpus import Corpus
from ablate.training.data.shards import Tokens

Batch = tuple[Tensor, Tensor]
"""Inputs and targets, int64 [sequences, context]; the targets are the tokens one position later."""


def training_batch(
    corpus: Corpus, seed: int, step: int, micro_batch: int, sequences: int, context: int
) -> Batch:
    """Return random windows of the training text, on the CPU, a function of the arguments alone.

    The text has more tokens than `context`. ValueError for an id beyond the vocabulary.
    """
    counter = torch.zeros(4, sequences, dtype=torch.int64)
    counter[0] = torch.arange(sequences)
    counter[1], counter[2] = step, micro_batch
    words = philox(counter, (seed & 0xFFFFFFFF, STREAMS["data"] << 8))
    starts = (words[0] << 31 | words[1] >> 1) % (len(corpus.train) - context)
    return _windows(corpus, corpus.train, starts.tolist(), context)


def validation_batches(corpus: Corpus, tokens: int, sequences: int, context: int) -> list[Batch]:
    """Return evenly spaced windows of the validation text, the same for every seed and arm.

    As many whole batches as fit into `tokens`, but at least one; the text has more than `context` + 1 tokens.
    ValueError for an id beyond the vocabulary.
    """
    count = max(1, tokens // (sequences * context)) * sequences
    starts = np.linspace(0, len(corpus.val) - context - 1, count, dtype=np.int64).tolist()
    return [
        _windows(corpus, corpus.val, starts[i : i + sequences], context) for i in range(0, count, sequences)
    ]


def _windows(corpus: Corpus, tokens: Tokens, starts: list[int], context: int) -> Batch:
    rows = np.stack([tokens[start : start + context + 1] for start in starts]).astype(np.int64)
    if rows.max() >= corpus.vocab:
        raise ValueError(f"token id {rows.max()} in the data is beyond the vocabulary of {corpus.vocab}")
    batch = torch.from_numpy(rows)
    return batch[:, :-1], batch[:, 1:]
