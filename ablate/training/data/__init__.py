"""Data: text as tokens, with a fingerprint of its content. Opened without torch.

A corpus is two flat arrays of token ids and a vocabulary; file `batches` draws a step's batch from it, by
counter from the seed.
"""

from ablate.training.data.corpus import Corpus, open_corpus
from ablate.training.data.sources import Shards, located, places, without_places

__all__ = [
    "Corpus",
    "Shards",
    "located",
    "open_corpus",
    "places",
    "without_places",
]
