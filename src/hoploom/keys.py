"""The keys that all randomness derives from: 64-bit mixes of seed, epoch and step."""

MASK = (1 << 64) - 1


def mix(state: int, value: int) -> int:
    """Fold one 64-bit value into a key (the finaliser of splitmix64)."""
    z = ((state ^ (value & MASK)) + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def epoch_key(seed: int, epoch: int) -> int:
    """What an epoch's permutation derives from."""
    return mix(mix(0, seed), epoch)


def batch_key(seed: int, epoch: int, step: int) -> int:
    """What the picks of one step derive from, on every rank."""
    return mix(epoch_key(seed, epoch), step)


def stream(hop: int, relation: int) -> int:
    """The third counter word: which hop and relation a draw is for."""
    return hop << 16 | relation


# Streams that no hop uses: hops end well below 2^15.
NEGATIVE_STREAM = 0x8000_0000
