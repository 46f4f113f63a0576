"""Data: text as tokens and images as arrays, each with a fingerprint of its content. Opened without torch.

A corpus is two flat arrays of token ids and a vocabulary; an image set is uint8 arrays with classes. Files
`batches` and `augment` draw a step's batch from them, by counter from the seed.
"""

from ablate.training.data.corpus import Corpus, open_corpus
from ablate.training.data.images import Augment, ImageSet, ImageSource, RandAugment, open_images
from ablate.training.data.kinds import located, places, without_places
from ablate.training.data.sources import Shards

__all__ = [
    "Augment",
    "Corpus",
    "ImageSet",
    "ImageSource",
    "RandAugment",
    "Shards",
    "located",
    "open_corpus",
    "open_images",
    "places",
    "without_places",
]
