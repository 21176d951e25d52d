"""A store of which this host holds some parts, while others answer for the rest."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from hoploom.config.values import as_int
from hoploom.errors import ConfigError
from hoploom.store.base import Shard
from hoploom.store.budget import read_memory
from hoploom.store.mapping import held_parts, topology_fits
from hoploom.store.row_cache import Nearer
from hoploom.store.sharded import Sharded
from hoploom.store.store import Store, open_store

Topology = Literal["auto", "local", "parted"]
LOOK_AHEAD = 4  # batches whose missing rows are fetched together


def read_topology(topology: object) -> None:
    """Raise ConfigError for another word than these."""
    if topology not in ("auto", "local", "parted"):
        raise ConfigError(f"topology is {topology!r}; choose 'auto', 'local' or 'parted'")


def open_own(
    folder: Path, parts: Sequence[int] | None, topology: Topology, memory: int | str | None
) -> tuple[Store, list[int]]:
    """These parts, or those whose files are here, and the edges of all parts if `topology` says so; their numbers."""
    budget = None if memory is None else read_memory(memory)
    given = held_parts(folder) if parts is None else parts
    all_lists = topology == "local" or (topology == "auto" and topology_fits(folder, budget))
    mapped = open_store(folder, parts=given, topology="all" if all_lists else "own", memory=budget)
    return mapped, sorted(set(map(int, given)))  # open_store has checked them


def join_parts(local: Store, own: Sequence[int], remote: Callable[[int], Shard]) -> Store:
    """This host's own parts are mapped or on its disk; `remote` answers for the others, by number."""
    all_lists = len(local.topology) == len(local.ranges)
    shards: list[Shard] = []
    for number, here in enumerate(local.shards):
        if number in own:
            shards.append(here)
        elif all_lists:
            assert isinstance(local.graph, Sharded)
            shards.append(Nearer(remote(number), local.graph.shards[number], local.topology[number].tables.keys()))
        else:
            shards.append(remote(number))
    sharded = Sharded(local.schema, shards, local.ranges)
    return replace(local, graph=local.graph if all_lists else sharded, features=sharded, shards=tuple(shards))


def read_look_ahead(given: int | None) -> int | None:
    """The batches whose missing rows are fetched together, as the user gives them."""
    return None if given is None else as_int("look_ahead", given, 1, "give a count of batches")


def steps_ahead(store: Store, given: int | None) -> int | None:
    """The same for loaders of this store; None: as many as fit its budget."""
    has_window = store.budget is not None and store.budget.window > 0
    return LOOK_AHEAD if given is None and not has_window else given
