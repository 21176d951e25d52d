"""One server process: the parts it holds, and, with its peers, whole batches of the whole store.

Peers are looked for after the server has begun to listen, so servers may start in any order; what makes batches is
imported then too: it takes seconds that a server of parts alone does not need.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from hoploom.errors import HoploomError
from hoploom.serve.metrics import BATCHES, HELD, Metrics
from hoploom.serve.security import ClientSecurity
from hoploom.serve.service import Service
from hoploom.serve.wire import Message
from hoploom.store import Store, open_store
from hoploom.store.disk import held_parts
from hoploom.store.row_cache import cached, report

WAIT = 5.0  # seconds that a request for a batch waits for the server to get ready
PRESAMPLED = 64  # batches that are looked at to fill the cache
PICKS = 2  # the part of the memory that picks asked for by others may take beside

if TYPE_CHECKING:
    from hoploom.serve.batch_service import Makers


@dataclass(frozen=True)
class Making:
    """How whole batches are made."""

    peers: Sequence[str] = ()  # servers of the other parts
    security: ClientSecurity | None = None
    threads: int = 1
    memory: int = 4 << 30  # bytes of batches made and not yet sent
    cache: str = ""  # of the rows of other parts: 20% or 4GB, those that batches like these ask for most:
    fanouts: Sequence[int] = ()
    seeds: str | tuple[str, str] | None = None
    timeout: float = 15.0  # below that of clients, who can then be told


class Node:
    """What a server process holds; close it when no request is under way any more."""

    def __init__(self, path: Path, parts: Sequence[int] | None, making: Making) -> None:
        self._path, self._making, self.metrics = path, making, Metrics()
        self.parts = sorted(set(held_parts(path) if parts is None else parts))
        self.store = open_store(path, parts=self.parts)
        self._whole: Store | None = None
        self._makers: Makers | None = None
        self._lock, self._counting, self._counted = threading.Lock(), threading.Lock(), (0, 0)
        makes = len(self.parts) == len(self.store.ranges) or making.peers
        more: dict[str, Callable[[Message], Message]] = {"batch": self._batch} if makes else {}
        held = dict(zip(self.parts, self.store.parts, strict=True))
        self.service = Service(self.store, held, making.memory // PICKS, more)

    def warm_up(self) -> None:
        """Get ready for batches without being asked, in the background; a failure shows when one is asked for."""

        if "batch" not in self.service.kinds:
            return

        def get_ready() -> None:
            with suppress(HoploomError):
                self._ready(None)

        threading.Thread(target=get_ready, name="hoploom-warm-up", daemon=True).start()

    def _batch(self, request: Message) -> Message:
        makers = self._ready(WAIT)
        if makers is None:
            return Message({"error": "busy", "message": "the server is still getting ready; ask again, or another"})
        made = makers.answer(request)
        answer = made._replace(done=partial(self._sent, makers, made.done))
        try:
            if "error" not in made.header:
                self.metrics.add(BATCHES, 1)
            self._count(makers)
        except BaseException:  # it will not be sent, and its room would be lost
            self._sent(makers, made.done)
            raise
        return answer

    def _sent(self, makers: "Makers", done: Callable[[], None] | None) -> None:
        try:
            if done is not None:
                done()
        finally:
            self._count(makers)

    def _count(self, makers: "Makers") -> None:
        """What the metrics tell of batches in memory and of the cache."""
        with self._counting:  # around the looking too: what another thread saw later must not be counted earlier
            self.metrics.put(HELD, makers.room.taken)
            told = None if self._whole is None else report(self._whole)
            if told is not None:
                self.metrics.count_cache(told.hits - self._counted[0], told.misses - self._counted[1])
                self._counted = told.hits, told.misses

    def _ready(self, seconds: float | None) -> "Makers | None":
        """Makers over the whole store: the first call meets the peers, and others wait so long for it."""
        if not self._lock.acquire(timeout=-1 if seconds is None else seconds):
            return None
        try:
            if self._makers is None:
                from hoploom.serve.batch_service import Makers

                self._whole = self._whole_store()
                self._makers = Makers(self._whole, self._making.threads, self._making.memory)
            return self._makers
        finally:
            self._lock.release()

    def _whole_store(self) -> Store:
        from hoploom.load.presample import Presampling, count_visits
        from hoploom.serve.connect import connect

        making = self._making
        if len(self.parts) == len(self.store.ranges):
            return self.store
        options = {"timeout": making.timeout, "security": making.security}
        store = connect(making.peers, self._path, parts=self.parts, look_ahead=1, **options)  # type: ignore[arg-type]
        if not making.cache:
            return store
        try:
            plan = Presampling(batches=range(PRESAMPLED), num_threads=making.threads)
            return cached(store, making.cache, count_visits(store, making.fanouts, making.seeds, plan))
        except BaseException:
            store.close()
            raise

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
