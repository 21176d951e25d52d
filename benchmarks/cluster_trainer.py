"""One trainer of a benchmark: it makes loaders as it is told, and times how long their batches take."""

import time
from collections.abc import Iterator
from typing import Any

import cluster
import graph
import torch

import hoploom
from hoploom.load.loader import Loader
from hoploom.load.presample import Presampling, count_visits
from hoploom.store import Store
from hoploom.store.row_cache import cached, report


class Trainer:
    """Holds stores and loaders by name, and the loop of each."""

    def __init__(self) -> None:
        self._stores: dict[str, Store] = {}
        self._loaders: dict[str, Loader] = {}
        self._loops: dict[str, Iterator[Any]] = {}

    def answer(self, told: dict[str, Any]) -> dict[str, Any]:
        return getattr(self, f"_{told.pop('do')}")(**told)  # type: ignore[no-any-return]

    def _open(
        self, name: str, path: str | None, servers: list[str], *, cache: str = "", over: str = "", **options: Any
    ) -> dict[str, Any]:
        torch.set_num_threads(1)
        if over == "tcp":
            cluster.leave_shared_memory()
        store = hoploom.connect(servers, path, **options) if servers else hoploom.open(str(path))
        if cache:
            plan = Presampling(batch_size=graph.NUM_SEEDS, batches=range(16))
            counts = count_visits(store, graph.FANOUTS, "train", plan)
            store = cached(store, cache, counts)
        self._stores[name] = store
        return {}

    def _load(self, name: str, rank: int, world_size: int, **options: Any) -> dict[str, Any]:
        given = {"batch_size": graph.NUM_SEEDS, "shuffle": True, "rank": rank, "world_size": world_size}
        self._loaders[name] = hoploom.NeighborLoader(self._stores[name], graph.FANOUTS, "train", **given | options)
        return {"steps": len(self._loaders[name])}

    def _walk(self, name: str, batches: int, compute: float = 0.0, skip: int = 0) -> dict[str, Any]:
        """Seconds for so many batches, of which how many were spent waiting; the first ones may be left out."""
        for _ in range(skip):
            self._next(name)
        waited, begin = 0.0, time.perf_counter()
        for _ in range(batches):
            asked = time.perf_counter()
            self._next(name)
            waited += time.perf_counter() - asked
            if compute:
                time.sleep(compute)  # a trainer whose device computes needs no core meanwhile
        return {"seconds": time.perf_counter() - begin, "waited": waited}

    def _travel(self, name: str, batches: int) -> dict[str, Any]:
        """Bytes received for a batch, and the hit rate of the cache."""
        store = self._stores[name]
        before, told = store.traffic()["bytes_received"], report(store)
        seen = (0, 0) if told is None else (told.hits, told.misses)
        self._walk(name, batches)
        self._rest(name)
        received, told = store.traffic()["bytes_received"] - before, report(store)
        asked = 0 if told is None else told.hits + told.misses - sum(seen)
        rate = None if told is None or asked == 0 else (told.hits - seen[0]) / asked
        return {"bytes": received / batches, "hit_rate": rate}

    def _next(self, name: str) -> Any:
        for _ in range(2):
            if name not in self._loops:
                self._loops[name] = iter(self._loaders[name])
            batch = next(self._loops[name], None)
            if batch is not None:
                return batch
            del self._loops[name]
        raise RuntimeError(f"{name} has no batches")

    def _rest(self, name: str) -> dict[str, Any]:
        """End a loop, so that nothing is made ahead while others are timed."""
        self._loops.pop(name).close()  # type: ignore[attr-defined]
        return {}


if __name__ == "__main__":
    cluster.serve_commands(Trainer().answer)
