"""Where tokens come from. A corpus is two flat arrays of token ids, a vocabulary size and a fingerprint; opening one is torch-free."""

from ablate.data.corpus import Corpus, Shards, open_corpus

__all__ = ["Corpus", "Shards", "open_corpus"]
