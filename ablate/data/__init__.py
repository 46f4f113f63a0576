"""Where tokens come from. A corpus: two flat arrays of token ids, a vocabulary size, a fingerprint. Opening one is torch-free."""

from ablate.data.corpus import Corpus, Shards, open_corpus

__all__ = ["Corpus", "Shards", "open_corpus"]
