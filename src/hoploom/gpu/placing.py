"""Plan where a store's tensors go and check that they fit; then copy them to device or host memory.

Sizes that do not fit raise ConfigError with the numbers. "auto" leaves a quarter of the device's free memory, and 2 GiB
at least, to training. Kernels find rows by the addresses of runs of rows, so one gather reads both kinds of memory.
"""

import os
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from hoploom.config.values import as_bytes
from hoploom.errors import ConfigError, StoreError
from hoploom.gpu import host_memory as hostmemory
from hoploom.gpu.host_memory import HostMemory, shared_name
from hoploom.gpu.packed_tensors import FieldColumn, PackedTensors, columns_of, pack_topology
from hoploom.gpu.placed_store import Lease, PlacedStore, Placement
from hoploom.ops.deadline import BUSY, DEADLINE, idle
from hoploom.ops.kernels.gather import Segments
from hoploom.ops.kernels.launch import DeviceLists
from hoploom.ranks.context import Ranks, gather_json
from hoploom.schema import DTYPE_NAMES, Field, Owner, Schema
from hoploom.store import Store
from hoploom.store.base import covers
from hoploom.system import memory_limit

LEAST_FREE = 2 << 30  # bytes of device memory that "auto" leaves to training,
FREE_SHARE = 4  # and a quarter of what is free
ROUNDING = 1e-6  # of a row: 0.29 * 100 are 29
BOOT = Path("/proc/sys/kernel/random/boot_id")
Spans = list[tuple[int, int]]  # ranges of ids


@dataclass(frozen=True)
class PlacePlan:
    """A placement: what is copied, and to which memory."""

    device: torch.device
    identity: str  # of the store; in the names of the files that processes share
    topology: Literal["device", "host"] | None
    relations: tuple[PackedTensors, ...]  # empty: topology stays as it is
    share: float  # of every part's rows that goes to the device
    columns: tuple[FieldColumn, ...]  # empty: features stay as they are
    chosen: str = ""  # for "auto": the free memory that it was chosen by

    @property
    def device_bytes(self) -> int:
        """Bytes on the device."""
        topology = sum(block.num_bytes for block in self.relations) if self.topology == "device" else 0
        return topology + sum(column.block(self.device_ids(column)).num_bytes for column in self.columns)

    def device_ids(self, column: FieldColumn) -> Spans:
        """Return the ids whose rows go to the device: the first of every part."""
        parts = zip(column.firsts, column.counts, strict=True)
        return merge_ranges([(first, first + self._num_hot(count)) for first, count in parts])

    def host_ids(self, column: FieldColumn) -> Spans:
        """Return the ids whose rows go to host memory: the others."""
        parts = zip(column.firsts, column.counts, strict=True)
        return merge_ranges([(first + self._num_hot(count), first + count) for first, count in parts])

    def _num_hot(self, count: int) -> int:
        return int(self.share * count + ROUNDING)

    @cached_property
    def files(self) -> dict[str, PackedTensors]:
        """The tensors that go to host memory, by file name."""
        found = {}
        if self.topology == "host":
            found = {self.relation_file(index): block for index, block in enumerate(self.relations)}
        blocks = {self.column_file(column): column.block(self.host_ids(column)) for column in self.columns}
        return found | {name: block for name, block in blocks.items() if block.num_bytes}

    def relation_file(self, index: int) -> str:
        return shared_name(self.identity, index, str(self.relations[index].columns))

    def column_file(self, column: FieldColumn) -> str:
        return shared_name(self.identity, column.owner, column.name, column.field.dtype, self.host_ids(column))


def merge_ranges(spans: Spans) -> Spans:
    """Return the ranges without empty ones, adjacent ones merged."""
    out: Spans = []
    for begin, end in spans:
        if out and out[-1][1] == begin:
            out[-1] = out[-1][0], end
        elif end > begin:
            out.append((begin, end))
    return out


def plan_placement(
    store: Store,
    topology: Literal["device", "host", "auto"] | None,
    features: str | float | None,
    device: torch.device,
    among: Ranks | None,
) -> PlacePlan:
    """Plan the placement; raise ConfigError if it is impossible or does not fit. Collective over `among`, if given.

    `features` are "device", "host", "auto", a share of the rows as a float or bytes as an int.
    """
    _check_reach(store, topology is not None, features is not None)
    relations = () if topology is None else _relations(store)
    columns = () if features is None else tuple(_columns(store))
    free, num_ranks = free_memory_of_ranks(device, among)
    memory = f"{as_bytes(free)} free" + (f" for each of {num_ranks} ranks" if num_ranks > 1 else "")
    left = min(free, max(LEAST_FREE, free // FREE_SHARE))
    budget, topology_bytes = free - left, sum(block.num_bytes for block in relations)
    chosen = ""
    if "auto" in (topology, features):
        chosen = f"auto: {device} had {memory}, of which {as_bytes(left)} are left to training"
    if topology == "auto":
        topology = "device" if topology_bytes <= budget else "host"
    budget -= topology_bytes if topology == "device" else 0
    share = 0.0 if features is None else _share(features, columns, budget)
    identity = store.identity or secrets.token_hex(16)
    plan = PlacePlan(device, identity, topology, relations, share, columns, chosen)
    if plan.device_bytes > free:
        raise ConfigError(
            f"placing this takes {as_bytes(plan.device_bytes)} of {device}, which has {memory}; "
            "give features='auto', a smaller share such as '20%' or 'host', or topology='host'"
        )
    hostmemory.check_fits(hostmemory.unwritten_bytes({name: block.num_bytes for name, block in plan.files.items()}))
    return plan


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on the device; on the CPU, those that this process may use."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else memory_limit()


def device_key(device: torch.device) -> str:
    """Return a key that identifies the device among all of the host, whichever of them a process sees."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else str(device)


def host_key() -> list[str | int]:
    """Return a key that is equal for all processes that share host memory."""
    try:
        return [BOOT.read_text().strip(), os.stat(hostmemory.FOLDER).st_dev]
    except OSError:  # no Linux, or no /dev/shm: this process alone
        return [secrets.token_hex(16)]


def free_memory_of_ranks(device: torch.device, among: Ranks | None) -> tuple[int, int]:
    """Return the bytes of device memory free for this rank, and the number of ranks that share the device.

    These are the least of all ranks of this host: they must choose alike to share files in host memory. Collective.
    """
    if among is None:
        return free_memory(device), 1
    found = gather_json(among, [host_key(), free_memory(device), device_key(device)])
    own = [(free, key) for host, free, key in found if host == found[among.rank][0]]
    counts = Counter(key for _, key in own)
    return min((free // counts[key], counts[key]) for free, key in own)


# --- what there is to place ----------------------------------------------------------------------


def _check_reach(store: Store, with_topology: bool, with_features: bool) -> None:
    """Raise ConfigError unless this process has all that is to be placed."""
    if store.placed is not None:
        raise ConfigError(
            "the store is placed already, or was; give topology and features in one call, on the opened store again"
        )
    here = "open all parts of the store on this host, or leave it as it is: batches are copied to the device"
    if with_topology and not covers(store.schema, store.topology):
        raise ConfigError(f"the topology cannot be placed: some of it is on another host; {here}")
    if with_features and not covers(store.schema, store.parts):
        raise ConfigError(f"the features cannot be placed: some of them are on another host; {here}")
    for owner, name in fields_of(store.schema) if with_features else ():
        if not all((owner, name) in part.tables for part in store.parts):
            raise ConfigError(
                f"field {name!r} of {owner!r} cannot be placed: it lies in no table of this process; {here}"
            )


def fields_of(schema: Schema) -> dict[tuple[Owner, str], Field]:
    """Return the fields of all node types and relations."""
    of_nodes: dict[tuple[Owner, str], Field] = {
        (t.name, n): field for t in schema.node_types for n, field in t.fields.items()
    }
    return of_nodes | {(r.key, name): field for r in schema.relations for name, field in r.fields.items()}


def _relations(store: Store) -> tuple[PackedTensors, ...]:
    return tuple(
        pack_topology([part.lists[index] for part in store.topology], store.schema.node_types[source].num_nodes)
        for index, source in enumerate(store.schema.sources)
    )


def _columns(store: Store) -> list[FieldColumn]:
    schema, columns = store.schema, []
    for (owner, name), field in fields_of(schema).items():
        if isinstance(owner, str):
            counts = [part.num_nodes[schema.type_index[owner]] for part in store.parts]
        else:
            counts = [part.lists[schema.relation_index[owner]].num_edges for part in store.parts]
        columns.append(FieldColumn(owner, name, field, store.parts, tuple(counts)))
    return columns


# --- what goes where -----------------------------------------------------------------------------


def _share(wanted: str | float, columns: tuple[FieldColumn, ...], budget: int) -> float:
    """Return the share of the rows that goes to the device; for "auto" in whole percent, so that ranks agree."""
    total = sum(column.num_rows * column.field.row_bytes for column in columns)
    if isinstance(wanted, float):
        return wanted
    if isinstance(wanted, int):
        most = max((count for column in columns for count in column.counts), default=0)
        least = -(-total // max(1, most))
        if 0 < wanted < least:
            raise ConfigError(
                f"features is {wanted} bytes, which hold no row of this store; give '{least}B' or more, a share such "
                "as '20%', or 'host'"
            )
        return min(1.0, wanted / max(1, total))
    if wanted == "auto":
        whole = sum(column.block([(0, column.num_rows)]).num_bytes for column in columns)
        return 1.0 if whole <= budget else max(0, 100 * budget // whole) / 100
    return 0.0 if wanted == "host" else 1.0


# --- copies --------------------------------------------------------------------------------------


def copy_store(
    store: Store,
    topology: Literal["device", "host", "auto"] | None,
    features: str | float | None,
    device: torch.device,
    among: Ranks | None,
) -> PlacedStore:
    """Copy topology and features, as `plan_placement` plans it. Collective over `among`, if given."""
    plan = plan_placement(store, topology, features, device, among)
    hostmemory.sweep(keep=plan.files)
    lease = Lease(device)
    try:
        lists = None if plan.topology is None else tuple(_place_topology(store, plan, lease))
        fields = {(column.owner, column.name): _place_rows(column, plan, lease) for column in plan.columns}
        if not idle(device, DEADLINE):  # readers are on streams of their own
            raise StoreError(f"{device} has not taken in the store within {DEADLINE:g} s; {BUSY}, then try again")
    except BaseException:
        with suppress(StoreError):
            lease.close()
        raise
    report = []
    for relation, block in zip(store.schema.relations, plan.relations, strict=False):
        what, kept = f"topology of {' '.join(relation.key)}", DTYPE_NAMES[block.columns[1][1]]
        if plan.topology == "device":
            report.append(Placement(what, kept, str(device), 1.0, block.num_bytes, 0))
        else:
            report.append(Placement(what, kept, "host", 0.0, 0, block.num_bytes))
    report += [_report(column, plan) for column in plan.columns]
    return PlacedStore(store.schema, device, lists, fields, store.features, tuple(report), lease, plan.chosen)


def _on_device(block: PackedTensors, device: torch.device) -> list[Tensor]:
    """Return tensors in device memory, filled."""
    try:
        raw = torch.empty(block.num_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{device} has no {as_bytes(block.num_bytes)} in one piece: {error}"[:400]
            + "; give features='auto' or a smaller share, or topology='host'"
        ) from error
    block.fill_bytes(raw)
    return block.views(raw)


def _in_host_memory(block: PackedTensors, name: str, device: torch.device, lease: Lease) -> list[Tensor]:
    """Return tensors in memory that the processes of this host share and kernels read."""
    memory = HostMemory(name, block.num_bytes, block.fill_bytes)
    lease.closes.append(memory.close)
    memory.register(device)
    return block.views(memory.bytes)


def _place_topology(store: Store, plan: PlacePlan, lease: Lease) -> Iterator[DeviceLists]:
    """Place the lists of each relation."""
    for index, block in enumerate(plan.relations):
        if plan.topology == "device":
            tensors = _on_device(block, plan.device)
        else:
            tensors = _in_host_memory(block, plan.relation_file(index), plan.device, lease)
        others = columns_of([part.lists[index] for part in store.topology])
        yield DeviceLists(tensors[0], tensors[1], plan.device, **dict(zip(others, tensors[2:], strict=True)))


def _place_rows(column: FieldColumn, plan: PlacePlan, lease: Lease) -> Segments:
    """Place the first rows of every part in device memory, the others in host memory."""
    hot, rest = plan.device_ids(column), plan.host_ids(column)
    (on_device,) = _on_device(column.block(hot), plan.device)
    runs = _runs_of(hot, on_device)
    if rest:
        block = column.block(rest)
        runs += _runs_of(rest, *_in_host_memory(block, plan.column_file(column), plan.device, lease))
    runs = sorted(runs, key=lambda run: run[0]) or [(0, on_device)]
    return Segments.of(runs, plan.device)


def _runs_of(spans: Spans, rows: Tensor) -> list[tuple[int, Tensor]]:
    """Split the rows of consecutive ranges into one run per range: its first id, and its rows."""
    pieces = torch.split(rows, [end - begin for begin, end in spans])
    return [(begin, own) for (begin, end), own in zip(spans, pieces, strict=True) if end > begin]


def _report(column: FieldColumn, plan: PlacePlan) -> Placement:
    owner = column.owner if isinstance(column.owner, str) else " ".join(column.owner)
    hot, rest = plan.device_ids(column), plan.host_ids(column)
    on_device, in_host = (sum(end - begin for begin, end in spans) for spans in (hot, rest))
    return Placement(
        f"{column.name} of {owner}",
        column.field.dtype,
        " and ".join(name for name, count in ((str(plan.device), on_device), ("host", in_host)) if count) or "-",
        on_device / max(1, column.num_rows),
        column.block(hot).num_bytes,
        column.block(rest).num_bytes,
    )
