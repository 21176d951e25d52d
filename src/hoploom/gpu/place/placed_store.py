"""What of a store lies where kernels read it: lists to sample from, rows to gather, and a table that says where.

Fields that were not placed stay on the host: their ids go there and their rows come back, which waits for the device.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from hoploom.config.values import as_bytes, as_share
from hoploom.errors import ConfigError, PeerError, StoreError
from hoploom.ops.deadline import BUSY, CLOSE_DEADLINE, idle
from hoploom.ops.kernels.forms import DeviceLists
from hoploom.ops.kernels.gather import Segments, gather
from hoploom.schema import DTYPES, EDGE_ID, Field, Owner, Schema
from hoploom.store.base import FeatureStore, Triple, Wanted


@dataclass
class Lease:
    """What is shared with other processes, until it is closed."""

    device: torch.device  # whose kernels read it
    closes: list[Callable[[bool, bool], None]] = field(default_factory=list)  # (wait for other ranks, device is idle)
    closed: bool = False

    def close(self, *, wait: bool) -> None:
        """Give all back; StoreError if the device may still read it, and then it stays for good."""
        closes, self.closes, self.closed = self.closes, [], True
        if not closes:
            return
        with ExitStack() as last_first:  # all of them, whatever one of them raises
            is_idle = True
            try:
                is_idle = idle(self.device, CLOSE_DEADLINE)
            except RuntimeError:  # of a kernel: none runs any more
                wait = False
                raise
            finally:
                for close in closes:
                    last_first.callback(close, wait, is_idle)
            if not is_idle:
                raise StoreError(
                    f"{self.device} still reads the placed store {CLOSE_DEADLINE:g} s after it was closed; {BUSY}"
                )

    def check(self) -> None:
        """Raise ConfigError once closed: addresses lead nowhere then."""
        if self.closed:
            raise ConfigError(
                "the placed store is closed; place the opened store again, and close it after the last batch"
            )


@dataclass(frozen=True)
class Placement:
    """Where one relation's topology or one field lies."""

    what: str  # "topology of node to node", "x of paper"
    kept: str  # "int64", "float32 as int8"
    where: str  # "cuda:0", "cuda:0 and host"
    share: float  # of the rows in device memory, this device's or a peer's
    device_bytes: int  # on this device
    host_bytes: int  # shared by the processes of this host

    @property
    def cells(self) -> tuple[str, ...]:
        sizes = (as_bytes(self.device_bytes), as_bytes(self.host_bytes))
        return self.what, self.kept, self.where, as_share(self.share), *sizes


@dataclass(frozen=True, repr=False)
class PlacedStore:
    """The parts of a store that kernels read, made by `Store.place`.

    >>> store = hoploom.place(hoploom.open("papers.store"), topology="cuda", features="20%")
    >>> print(store.placed)
    """

    schema: Schema
    device: torch.device
    relations: tuple[DeviceLists, ...] | None
    fields: Mapping[tuple[Owner, str], Segments]  # those that are placed
    host: FeatureStore  # answers for the others
    report: tuple[Placement, ...]
    lease: Lease
    chosen: str = ""  # what "auto" went by

    @property
    def lists(self) -> tuple[DeviceLists, ...] | None:
        """Every relation's in-edges, all parts merged; None where topology was not placed."""
        self.lease.check()
        return self.relations

    def __repr__(self) -> str:
        return "PlacedStore({}: {}, host: {})".format(self.device, *self._totals())

    def __str__(self) -> str:
        """A table of what lies where."""
        titles = ("what", "dtype", "where", "rows on device", "device bytes", "host bytes")
        total = ("all", "", "", "", *self._totals())
        rows = [titles, *(placement.cells for placement in self.report), total]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
        return "\n".join([f"placed on {self.device}", *(line.rstrip() for line in lines), self.chosen]).rstrip("\n")

    def _totals(self) -> tuple[str, str]:
        return as_bytes(sum(p.device_bytes for p in self.report)), as_bytes(sum(p.host_bytes for p in self.report))

    def gather(
        self,
        wanted: Sequence[Triple],
        sizes: Sequence[Tensor | None] | None = None,
        *,
        outs: Sequence[Tensor] | None = None,
        faults: Tensor | None = None,
    ) -> list[Tensor]:
        """The rows wanted, on the device, of ids on the device; each in its field's own dtype.

        `sizes` say on the device how many of the ids count, [] int64 each: rows beyond are not written. `outs` is where
        rows go, else they are new. With `faults` ([1] int64) nothing is waited for, and an id out of range is noted in
        it; without, this waits for the device and raises IndexError, as a store on the host does.

        >>> (x,) = store.placed.gather([Wanted("node", "x", ids)])
        """
        self.lease.check()
        noted = torch.zeros(1, dtype=torch.int64, device=self.device) if faults is None else faults
        none = [None] * len(wanted)
        sizes = none if sizes is None else sizes
        each = zip(wanted, sizes, none if outs is None else outs, strict=True)
        rows = [self._rows(want, size, out, noted) for want, size, out in each]
        if faults is None and bool(noted):  # the one wait
            self._refuse_ids(wanted, sizes)
        return rows

    def empty(self, owner: Owner, name: str, count: int) -> Tensor:
        """Memory on the device for rows of a field."""
        of_field = self.field(owner, name)
        return torch.empty((count, *of_field.shape), dtype=DTYPES[of_field.dtype], device=self.device)

    def close(self, *, wait: bool = True) -> None:
        """Give back what is shared with other processes; with ranks that read each other's memory, all of them call.

        `wait=False` is for leaving after an error: the other ranks are not waited for.
        """
        self.lease.close(wait=wait)

    def __enter__(self) -> "PlacedStore":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with nullcontext() if error is None else suppress(StoreError, PeerError):  # the first error is the one to tell
            self.close(wait=error is None)

    def field(self, owner: Owner, name: str) -> Field:
        """A field's type and shape."""
        described: Any = self.schema.node_type(owner) if isinstance(owner, str) else self.schema.relation(owner)
        if name == EDGE_ID and name not in described.fields:
            return Field("int64")  # a relation in the user's own order: ids are positions
        if name not in described.fields:
            raise ConfigError(f"{owner!r} has no field {name!r}; it has {sorted(described.fields)}")
        return described.fields[name]  # type: ignore[no-any-return]

    def _rows(self, want: Triple, size: Tensor | None, out: Tensor | None, faults: Tensor) -> Tensor:
        owner, name, ids = want
        self._check_ids(owner, name, ids)
        segments = self.fields.get((owner, name))
        out = self.empty(owner, name, ids.numel()) if out is None else out
        if segments is not None:
            gather(segments, ids.contiguous(), out, faults=faults, size=size)
            return out
        count = ids.numel() if size is None else int(size)
        if name == EDGE_ID and name not in self.schema.relation(owner).fields:  # type: ignore[arg-type]
            out[:count].copy_(ids[:count])
        else:
            (rows,) = self.host.gather([Wanted(owner, name, ids[:count].cpu())])
            out[:count].copy_(rows)
        return out

    def _check_ids(self, owner: Owner, name: str, ids: Tensor) -> None:
        is_there = ids.device == self.device or (owner, name) not in self.fields
        if ids.dtype != torch.int64 or ids.dim() != 1 or not is_there:
            given = f"{str(ids.dtype).removeprefix('torch.')} of shape {list(ids.shape)} on {ids.device}"
            raise ConfigError(f"the ids of {name!r} are {given}; give int64 of shape [n] on {self.device}")

    def _refuse_ids(self, wanted: Sequence[Triple], sizes: Sequence[Tensor | None]) -> None:
        """Raise IndexError for the first id that is out of range of what is placed; the host looked at the others."""
        for (owner, name, ids), size in zip(wanted, sizes, strict=True):
            segments = self.fields.get((owner, name))
            if segments is None:
                continue
            end, counted = segments.end, ids if size is None else ids[: int(size)]
            wrong = counted[(counted < 0) | (counted >= end)]
            if wrong.numel():
                raise IndexError(
                    f"id {int(wrong[0])} is out of range [0, {end}) of {name!r} of {owner!r}; give ids in it"
                )
