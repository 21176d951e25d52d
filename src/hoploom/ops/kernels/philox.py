"""Philox random numbers and the mixing of keys, for tiles of ids: the arithmetic of csrc/random.h."""

import triton
import triton.language as tl

NARROW_LIMIT = tl.constexpr(1 << 16)


@triton.jit
def mix(state, value):
    """Return keys with a value mixed in, all uint64, like hoploom.keys.mix (the finaliser of splitmix64)."""
    z = (state ^ value) + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def philox(key, c0, c1, c2, c3):
    """Return four uint32 words for a uint64 key and four uint32 counter words, all of one shape."""
    k0 = key.to(tl.uint32)
    k1 = (key >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = p1.to(tl.uint32)
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = p0.to(tl.uint32)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def block_of(key, ids, stream, number):
    """Return four random 32-bit words per id: block `number` of the id's random stream `stream`."""
    low = ids.to(tl.uint32)
    none = low ^ low
    return philox(key, low, (ids >> 32).to(tl.uint32), none + stream, none + number.to(tl.uint32))


@triton.jit
def word(key, ids, stream, draw):
    """Return 32 random bits per id: word draw % 4 of block draw // 4. Tiles have one shape; ids and draw are int64."""
    w0, w1, w2, w3 = block_of(key, ids, stream, draw // 4)
    place = draw % 4
    return tl.where(place == 0, w0, tl.where(place == 1, w1, tl.where(place == 2, w2, w3)))


@triton.jit
def wide(key, ids, stream, draw):
    """Return 64 random bits per id: two words of one block, the first word as the high bits."""
    w0, w1, w2, w3 = block_of(key, ids, stream, draw // 2)
    is_second = draw % 2 == 1
    return tl.where(is_second, w2, w0).to(tl.uint64) << 32 | tl.where(is_second, w3, w1).to(tl.uint64)


@triton.jit
def bounded(key, ids, stream, draw, bound, population):
    """Return a random integer in [0, bound) per id, all int64; from 64 random bits if the population exceeds 2^16."""
    narrow = (word(key, ids, stream, draw).to(tl.uint64) * bound.to(tl.uint64)) >> 32
    is_wide = population > NARROW_LIMIT
    out = narrow
    if tl.max(is_wide.to(tl.int32).reshape([is_wide.numel]), 0) > 0:
        out = tl.where(is_wide, tl.umulhi(wide(key, ids, stream, draw), bound.to(tl.uint64)), narrow)
    return out.to(tl.int64)
