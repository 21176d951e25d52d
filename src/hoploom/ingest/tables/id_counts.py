"""What must be known of a node type's ids before their numbers are used. Tasks count some ids each."""

from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc


def is_utf8(texts: pa.Array) -> bool:
    """Whether all texts are what their type says."""
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


@dataclass
class IdCounts:
    """Counts of some ids."""

    sizes: dict[int, int] = field(default_factory=dict)  # ids by part
    nulls: int = 0
    repeated: int = 0  # rows whose id has come before
    width: int = 1  # bytes of the longest text
    is_utf8: bool = True  # whether all texts are: DuckDB refuses others, Spark reads them
    zero: str | None = None  # the least of the texts that were seen with a zero byte

    @property
    def num_ids(self) -> int:
        return sum(self.sizes.values())

    def add(self, other: "IdCounts") -> None:
        for part, rows in other.sizes.items():
            self.sizes[part] = self.sizes.get(part, 0) + rows
        self.nulls += other.nulls
        self.repeated += other.repeated
        self.width = max(self.width, other.width)
        self.is_utf8 &= other.is_utf8
        self.zero = min((zero for zero in (self.zero, other.zero) if zero is not None), default=None)

    def add_texts(self, ids: pa.Array) -> None:
        """Add the width of texts, and one of them that holds a zero byte."""
        if not is_utf8(ids):
            self.is_utf8 = False
            return
        width, zeros = pc.max(pc.binary_length(ids)).as_py() or 0, pc.match_substring(ids, "\0")
        zero = ids.filter(zeros)[0].as_py() if pc.any(zeros).as_py() else None
        self.add(IdCounts(width=width, zero=zero))
