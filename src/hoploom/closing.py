"""A mixin for classes with close() that are used in `with` blocks."""

from types import TracebackType
from typing import Self


class Closing:
    """Mixin that closes the object at the end of its `with` block."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
