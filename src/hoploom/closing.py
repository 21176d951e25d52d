"""What is used in a `with` block, and closed at its end."""

from types import TracebackType
from typing import Self


class Closing:
    """Gives a class that has close() its `with` block."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
