"""The keys from which all random numbers derive: 64-bit mixes of seed, epoch and step."""

MASK = (1 << 64) - 1


def mix(state: int, value: int) -> int:
    """Return the key `state` with a 64-bit value mixed in (the finaliser of splitmix64)."""
    z = ((state ^ (value & MASK)) + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def as_int64(word: int) -> int:
    """Return the number that has the bits of a 64-bit word as int64, the dtype of keys in tensors."""
    return word - MASK - 1 if word >> 63 else word


def epoch_key(seed: int, epoch: int) -> int:
    """Return the key of the permutation of the seeds in an epoch."""
    return mix(mix(0, seed), epoch)


class BatchKey(int):
    """The key of a step's random numbers: an int, with its epoch and step as attributes."""

    epoch: int
    step: int


def batch_key(seed: int, epoch: int, step: int) -> BatchKey:
    """Return the key of a step's random numbers, the same on every rank."""
    key = BatchKey(mix(epoch_key(seed, epoch), step))
    key.epoch, key.step = epoch, step
    return key


def stream(hop: int, relation: int) -> int:
    """Return a word of the generator's counter that gives each hop and relation random numbers of its own."""
    return hop << 16 | relation


# Streams that no hop uses: hops end well below 2^15.
NEGATIVE_STREAM = 0x8000_0000
# Mixed into a key, as tree numbers are; no tree has one of these numbers.
HOOK = 0x486F_6F6B_0000_0000
BUDGET = 0x4275_6467_6574_0000
# The first key of learned rows, and what is mixed in for the random bits that round them.
LEARNED = 0x4C65_6172_6E65_6400
ROUNDING = 0x526F_756E_6400_0000
