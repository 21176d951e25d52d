"""hoploom.keys.mix for arrays, in NumPy: torch has no unsigned arithmetic."""

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]


def mix_words(state: Words, value: Words) -> Words:
    """Return the keys with one 64-bit value each mixed in."""
    z: Words = (state ^ value) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
