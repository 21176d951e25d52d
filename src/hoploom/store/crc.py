"""The CRC-32 of two pieces one after the other, from the CRC-32 of each: a header may be written last.

Appending zero bytes to a text is linear in its CRC, so it is a matrix over bits; powers of it are found by squaring.
"""

from functools import cache

POLYNOMIAL = 0xEDB88320
Matrix = list[int]  # [32]: what each bit of a CRC becomes


def combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of a + b, where `first` is that of a, `second` that of b.

    >>> combine(zlib.crc32(b"hop"), zlib.crc32(b"loom"), 4) == zlib.crc32(b"hoploom")
    True
    """
    for bit in range(second_bytes.bit_length()):
        if second_bytes >> bit & 1:
            first = _apply(_zero_bytes(bit), first)
    return first ^ second


@cache
def _zero_bytes(power: int) -> Matrix:
    """What 2 to the power of this many zero bytes do to a CRC."""
    if power == 0:
        step = [POLYNOMIAL] + [1 << bit for bit in range(31)]  # one zero bit
        for _ in range(3):
            step = _times(step, step)
        return step
    return _times(_zero_bytes(power - 1), _zero_bytes(power - 1))


def _apply(matrix: Matrix, crc: int) -> int:
    out = 0
    for bit in range(32):
        if crc >> bit & 1:
            out ^= matrix[bit]
    return out


def _times(left: Matrix, right: Matrix) -> Matrix:
    return [_apply(left, column) for column in right]
