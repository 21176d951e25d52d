"""What the ranks of cluster tests do: spawned processes import it."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import hoploom
from hoploom.deploy.guard import descendants
from hoploom.train import Context
from support.until import until


def loader(store: Any, rank: int, world_size: int, **options: Any) -> hoploom.NeighborLoader:
    return hoploom.NeighborLoader(
        store, [3, 2], batch_size=8, shuffle=True, rank=rank, world_size=world_size, **options
    )  # fmt: skip


def told_of(batches: Any) -> list[dict[str, Any]]:
    return [
        {
            "nodes": batch.n_id.tolist(),
            "edges": batch.edge_index.tolist(),
            "x": batch.x.tolist(),
            "seeds": batch.n_id[: batch.batch_size].tolist(),
        }
        for batch in batches
    ]


def tell_batches(context: Context, folder: str, path: str | None, opening: dict[str, Any]) -> None:
    """Two epochs of this rank, and what its store is, into a file per rank."""
    parts = opening.pop("parts_by_rank", None)
    if parts is not None:
        opening["parts"] = parts[context.rank]
    store = hoploom.open(path, context=context, **opening)
    ranks = context.rank, context.world_size
    told: dict[str, Any] = {"batches": told_of(loader(store, *ranks))}
    told["local"] = told_of(loader(store, *ranks, locality=True))
    told |= {"homes": store.deployment.homes, "parts": len(store.parts), "servers": children()}
    told["temporary"] = [path.name for path in Path(os.environ["TMPDIR"]).iterdir()] if "TMPDIR" in os.environ else []
    Path(folder, f"{context.rank}.json").write_text(json.dumps(told))


def children() -> list[int]:
    found = []
    for pid in descendants(os.getpid()):
        with suppress(FileNotFoundError, ProcessLookupError):
            if b"serve" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def linger_in_rank_one(context: Context, folder: str, path: str) -> None:
    """Rank 0 is done at once; rank 1 asks rank 0's server long after that."""
    store = hoploom.open(path, context=context, serve=True)
    if context.rank == 1:
        until(lambda: context._peers._is_gone(0), "the goodbye of rank 0")  # type: ignore[union-attr]
        told = told_of(loader(store, 0, 1))
        Path(folder, "late.json").write_text(json.dumps(told))
