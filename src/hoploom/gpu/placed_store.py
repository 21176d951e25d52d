"""A placed store: edge lists that kernels sample from, rows that they gather, and a table of the memory in use.

Fields that are not placed stay on the host: ids are copied to the host and rows back, which waits for the device. So do
fields of which some rows are on other hosts, except in loaders, which fetch these rows ahead of time.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hoploom import ops
from hoploom.config.values import aligned, as_bytes, as_share
from hoploom.errors import ConfigError, StoreError
from hoploom.ops.deadline import BUSY, CLOSE_DEADLINE, idle, on_host
from hoploom.ops.kernels.gather import Segments, gather
from hoploom.ops.kernels.launch import DeviceLists
from hoploom.schema import DTYPES, EDGE_ID, Field, Schema, TypeKey
from hoploom.store.base import FeatureStore, Triple, Wanted
from hoploom.system import Closing, memory_limit

LEAST_FREE = 2 << 30  # bytes of device memory that "auto" leaves to training,
FREE_SHARE = 4  # and a quarter of what is free


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on the device; on the CPU, those that this process may use."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else memory_limit()


def left_to_training(free: int) -> int:
    """Return the bytes of free device memory that "auto" leaves to training."""
    return min(free, max(LEAST_FREE, free // FREE_SHARE))


@dataclass
class Lease:
    """The host memory that a placed store shares with other processes. `close` ends its use by this process."""

    device: torch.device  # whose kernels read the memory
    closes: list[Callable[[bool], None]] = field(default_factory=list)  # each is called with: is the device idle?
    closed: bool = False

    def close(self) -> None:
        """Close the shared memory. If the device may still read it, keep it for good and raise StoreError."""
        closes, self.closes, self.closed = self.closes, [], True
        if not closes:
            return
        with ExitStack() as last_first:  # calls all of them, even if one raises
            is_idle = True  # after an error of a kernel, too: no kernel runs any more
            try:
                is_idle = idle(self.device, CLOSE_DEADLINE)
            finally:
                for close in closes:
                    last_first.callback(close, is_idle)
            if not is_idle:
                raise StoreError(
                    f"{self.device} still reads the placed store {CLOSE_DEADLINE:g} s after it was closed; {BUSY}"
                )

    def check(self) -> None:
        """Raise ConfigError if the lease is closed, because kernels would read invalid addresses."""
        if self.closed:
            raise ConfigError(
                "the placed store is closed; place the opened store again, and close it after the last batch"
            )


@dataclass(frozen=True)
class Placement:
    """A row of the table that `print(store.placed)` shows: the memory of one relation's topology or of one field."""

    what: str  # "topology of node to node", "x of paper"
    dtype: str
    where: str  # "cuda:0", "cuda:0 and host"
    share: float  # of the rows that are in device memory
    device_bytes: int  # on this device
    host_bytes: int  # shared by the processes of this host

    @property
    def cells(self) -> tuple[str, ...]:
        sizes = (as_bytes(self.device_bytes), as_bytes(self.host_bytes))
        return self.what, self.dtype, self.where, as_share(self.share), *sizes


@dataclass(frozen=True, repr=False)
class PlacedStore(Closing):
    """The tensors of a store that GPU kernels read, copied by `hoploom.place`."""

    schema: Schema
    device: torch.device
    relations: tuple[DeviceLists, ...] | None  # of all parts merged
    of_parts: Sequence[tuple[DeviceLists, ...]]  # of each part by itself, if other parts are on other hosts
    fields: Mapping[tuple[TypeKey, str], Segments]  # of which all rows are placed
    partial: Mapping[tuple[TypeKey, str], list[tuple[int, Tensor]]]  # of which some are: (first id, rows), ascending
    host: FeatureStore  # for other rows
    report: tuple[Placement, ...]
    lease: Lease
    share: float = 0.0  # of the feature rows that are in device memory
    chosen: str = ""  # with "auto": a line for the report about the free memory that decided

    @property
    def lists(self) -> tuple[DeviceLists, ...] | None:
        """The in-edges of every relation, all parts merged; None if not all of the topology is placed."""
        self.lease.check()
        return self.relations

    def __repr__(self) -> str:
        return "PlacedStore({}: {}, host: {})".format(self.device, *self._totals())

    def __str__(self) -> str:
        """Return a table of the placed tensors and their memory."""
        titles = ("what", "dtype", "where", "rows on device", "device bytes", "host bytes")
        total = ("all", "", "", "", *self._totals())
        rows = [titles, *(placement.cells for placement in self.report), total]
        lines = aligned(rows, [False] * len(titles))
        return "\n".join([f"placed on {self.device}", *lines, self.chosen]).rstrip("\n")

    def _totals(self) -> tuple[str, str]:
        return as_bytes(sum(p.device_bytes for p in self.report)), as_bytes(sum(p.host_bytes for p in self.report))

    def gather(
        self, wanted: Sequence[Triple], faults: Tensor, outs: Sequence[Tensor | None] | None = None
    ) -> list[Tensor]:
        """Return the rows of each (type, field, ids) in `wanted`, in the field's dtype. Ids and rows are on the device.

        Ids out of range of a placed field set a fault code in `faults` [1] int64, and their rows stay as they were.
        `outs` are tensors to write the rows to.

        >>> (x,) = store.placed.gather([Wanted("node", "x", ids)], torch.zeros(1, dtype=torch.int64, device="cuda"))
        """
        self.lease.check()
        return [self._rows(*one, faults) for one in zip(wanted, outs or [None] * len(wanted), strict=True)]

    def device_for(self, num_bytes: int, taken: str) -> torch.device | None:
        """Return the device if more rows belong there: if all features are, and there is memory. Else return None.

        Without "auto", raise ConfigError if there is none; `taken` begins the message.
        """
        if self.share < 1:
            return None
        free = free_memory(self.device)
        if num_bytes <= free - (left_to_training(free) if self.chosen else 0):
            return self.device
        if self.chosen:
            return None
        left = f"{as_bytes(num_bytes)} of {self.device}, which has {as_bytes(free)} free"
        raise ConfigError(f"{taken} {left}; place the store with features='auto' or features='host'")

    def empty(self, owner: TypeKey, name: str, count: int) -> Tensor:
        """Return an uninitialised tensor on the device for `count` rows of a field."""
        of_field = self.field(owner, name)
        return torch.empty((count, *of_field.shape), dtype=DTYPES[of_field.dtype], device=self.device)

    def close(self) -> None:
        """Close the shared host memory; raise StoreError if the device may still read it."""
        self.lease.close()

    def field(self, owner: TypeKey, name: str) -> Field:
        """Return a field's dtype and shape."""
        described = self.schema.described(owner)
        if name == EDGE_ID and name not in described.fields:
            return Field("int64")  # edges are stored in the user's order: edge ids are positions
        return described.fields[name]

    def _rows(self, want: Triple, out: Tensor | None, faults: Tensor) -> Tensor:
        owner, name, ids = want
        segments = self.fields.get((owner, name))
        out = self.empty(owner, name, ids.numel()) if out is None else out
        if segments is not None:
            gather(segments, ids.contiguous(), out, faults=faults)
            return out
        if name == EDGE_ID and name not in self.schema.relation(owner).fields:  # type: ignore[arg-type]
            out.copy_(ids)
        else:
            empty = ops.empty_pinned if out.is_cuda else ops.empty
            (rows,) = self.host.gather([Wanted(owner, name, on_host(ids, "computed ids"))], empty=empty)
            out.copy_(rows, non_blocking=True)
        return out
