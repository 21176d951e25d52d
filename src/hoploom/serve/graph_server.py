"""One server process. It answers requests for the parts that it holds and, with its peers, makes whole batches.

Servers may start in any order, because a server looks for its peers after it has begun to listen. The code that makes
batches is imported when it is needed: the import of PyG takes seconds.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hoploom.errors import HoploomError
from hoploom.serve.memory_budget import BusyError
from hoploom.serve.metrics import Metrics
from hoploom.serve.security import ClientSecurity
from hoploom.serve.service import Handler, Service
from hoploom.store import Store, open_store
from hoploom.store.row_cache import cached, report
from hoploom.store.store import held_parts, topology_fits
from hoploom.system import Closing

if TYPE_CHECKING:
    from hoploom.serve.batch_service import BatchService

READY_TIMEOUT = 5.0  # seconds that a request for a batch waits for the connections to the peers
PRESAMPLED = 64  # batches that are sampled to find the rows for the cache
PICKS = 2  # besides batches, requests and picks may take the memory limit of batches divided by this


@dataclass(frozen=True)
class BatchOptions:
    """Options of a server that makes whole batches, and memory limits of the batches and of the store."""

    peers: Sequence[str] = ()  # servers of the other parts
    security: ClientSecurity | None = None
    threads: int = 1
    memory: int = 4 << 30  # limit in bytes for batches that are not sent yet
    cache: str = ""  # size of the cache for rows of other parts, such as 20% or 4GB; empty: no cache
    fanouts: Sequence[int] = ()  # the cache holds the rows that batches with these fanouts and seeds need most
    seeds: str | tuple[str, str] | None = None
    timeout: float = 15.0  # seconds for peers: fewer than clients wait, so that they get this server's error
    store_memory: int | None = None  # bytes of the store that the process may hold in memory; None: no limit
    place: Callable[[Store], Store] | None = None  # copies the opened parts to a GPU, which then answers


class GraphServer(Closing):
    """The store, peers and metrics of a server process. Call `close` when no request is in flight any more."""

    def __init__(self, path: Path, parts: Sequence[int] | None, options: BatchOptions) -> None:
        self._options = options
        self.metrics = Metrics(lambda: 0 if self._batches is None else self._batches.budget.taken, self._cache_rows)
        self.parts = sorted(set(held_parts(path) if parts is None else parts))
        all_lists = bool(options.peers) and topology_fits(path, options.store_memory)
        topology: Literal["all", "own"] = "all" if all_lists else "own"
        opened = open_store(path, parts=self.parts, topology=topology, memory=options.store_memory)
        self.store = opened if options.place is None else options.place(opened)
        self._whole: Store | None = None
        self._batches: BatchService | None = None
        self._lock = threading.Lock()
        makes_batches = len(self.parts) == len(self.store.ranges) or options.peers
        more: dict[str, Handler] = {}
        if makes_batches:
            more["batch"] = lambda request, context: self._batch_service(READY_TIMEOUT).answer(request, context)
        held = dict(zip(self.parts, self.store.parts, strict=True))
        self.service = Service(self.store, held, options.memory // PICKS, more)

    def warm_up(self) -> None:
        """In the background, connect to the peers and fill the cache. After an error, the first request tries again."""
        if not self._options.peers:
            return

        def connect_quietly() -> None:
            with suppress(HoploomError):
                self._batch_service()

        threading.Thread(target=connect_quietly, name="hoploom-warm-up", daemon=True).start()

    def _cache_rows(self) -> tuple[int, int]:
        """Return the hits and misses of the row cache so far, in rows; (0, 0) without a cache."""
        counted = None if self._whole is None else report(self._whole)
        return (0, 0) if counted is None else (counted.hits, counted.misses)

    def _batch_service(self, timeout: float = -1) -> "BatchService":
        """Return the service that makes batches. The first call connects to the peers; concurrent calls wait for it."""
        if not self._lock.acquire(timeout=timeout):
            raise BusyError("the server is still getting ready")
        try:
            if self._batches is None:
                from hoploom.serve.batch_service import BatchService

                self._whole = self._connect()
                self._batches = BatchService(self._whole, self._options.threads, self._options.memory)
            return self._batches
        finally:
            self._lock.release()

    def _connect(self) -> Store:
        """Return a store of all parts, from this server and its peers. If the options ask for it, rows are cached."""
        from hoploom.load.presample import Presampling, count_visits
        from hoploom.serve.connect import join
        from hoploom.serve.peers import Peers

        options = self._options
        if len(self.parts) == len(self.store.ranges):
            return self.store
        peers = Peers(options.peers, options.security or ClientSecurity(), options.timeout, own=self.parts)
        store = join(peers, self.store, self.parts, look_ahead=1)
        if not options.cache:
            return store
        try:
            plan = Presampling(batches=range(PRESAMPLED), num_threads=options.threads)
            return cached(store, options.cache, count_visits(store, options.fanouts, options.seeds, plan))
        except BaseException:
            store.close()
            raise

    def close(self) -> None:
        """Close the connections to the peers, and free the memory of a placed store."""
        try:
            if self._whole is not None:
                self._whole.close()
        finally:
            self.store.close()
