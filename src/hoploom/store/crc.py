"""The CRC-32 of two pieces one after the other, from the CRC-32 of each: a header may be written last.

Appending zero bytes to a text is linear in its CRC, so it is a matrix over bits; powers of it are found by squaring.
"""

POLYNOMIAL = 0xEDB88320
Matrix = list[int]  # [32]: what each bit of a CRC becomes


def combine(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of a + b, where `first` is that of a, `second` that of b.

    >>> combine(zlib.crc32(b"hop"), zlib.crc32(b"loom"), 4) == zlib.crc32(b"hoploom")
    True
    """
    step = [POLYNOMIAL] + [1 << bit for bit in range(31)]  # one zero bit
    for _ in range(3):
        step = _times(step, step)  # one zero byte
    while second_bytes:
        if second_bytes & 1:
            first = _apply(step, first)
        step = _times(step, step)
        second_bytes >>= 1
    return first ^ second


def _apply(matrix: Matrix, crc: int) -> int:
    out = 0
    for bit in range(32):
        if crc >> bit & 1:
            out ^= matrix[bit]
    return out


def _times(left: Matrix, right: Matrix) -> Matrix:
    return [_apply(left, column) for column in right]
