"""One server process: the parts it holds, and, with its peers, whole batches of the whole store.

Peers are looked for when the first batch is asked for, so servers may start in any order; what makes batches is
imported then too: it takes seconds that a server of parts alone does not need.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from hoploom.serve.metrics import BATCHES, Metrics
from hoploom.serve.security import ClientSecurity
from hoploom.serve.service import Service
from hoploom.serve.wire import Message
from hoploom.store import Store
from hoploom.store.disk import held_parts, open_store

if TYPE_CHECKING:
    from hoploom.serve.makers import Makers


@dataclass(frozen=True)
class Making:
    """How whole batches are made."""

    peers: Sequence[str] = ()  # servers of the other parts
    security: ClientSecurity | None = None
    threads: int = 1
    memory: int = 4 << 30  # bytes of batches made and not yet sent
    cache: str = ""  # of the rows of other parts: 20% or 4GB
    timeout: float = 15.0  # below that of clients, who can then be told


class Node:
    """What a server process holds; close it when no request is under way any more."""

    def __init__(self, path: Path, parts: Sequence[int] | None, making: Making) -> None:
        self._path, self._making, self.metrics = path, making, Metrics()
        self.parts = sorted(set(held_parts(path) if parts is None else parts))
        self.store = open_store(path, parts=self.parts)
        self._whole: Store | None = None
        self._makers: Makers | None = None
        self._lock = threading.Lock()
        makes = len(self.parts) == len(self.store.ranges) or making.peers
        more: dict[str, Callable[[Message], Message]] = {"batch": self._batch} if makes else {}
        self.service = Service(self.store, dict(zip(self.parts, self.store.parts, strict=True)), more)

    def _batch(self, request: Message) -> Message:
        made = self._ready().answer(request)
        if "error" not in made.header:
            self.metrics.add(BATCHES, 1)
        return made

    def _ready(self) -> "Makers":
        """Makers over the whole store; the first call meets the peers."""
        with self._lock:
            if self._makers is None:
                from hoploom.serve.makers import Makers

                self._whole = self._whole_store()
                self._makers = Makers(self._whole, self._making.threads, self._making.memory)
            return self._makers

    def _whole_store(self) -> Store:
        from hoploom.serve.connect import connect

        making = self._making
        if len(self.parts) == len(self.store.ranges):
            return self.store
        return connect(
            making.peers, self._path, parts=self.parts, timeout=making.timeout, security=making.security, look_ahead=1
        )

    def close(self) -> None:
        """Leave the peers."""
        if self._whole is not None:
            self._whole.close()

    def __enter__(self) -> "Node":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
