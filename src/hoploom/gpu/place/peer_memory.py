"""Memory spread over the ranks of one host: each rank holds a share on its device and reads the others' in place.

Ranks exchange handles as JSON: CUDA handles, or names of files in shared memory for kernels in the interpreter. A share
must outlive the last kernel of any rank that reads it. So closing is collective: each rank has waited for its own
device, closes the others' shares, waits for the other ranks, and only then frees its own.
"""

import base64
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from hoploom.errors import ConfigError, PeerError
from hoploom.gpu.place import host_memory as hostmemory
from hoploom.gpu.place.host_memory import Fill, HostMemory, shared_name
from hoploom.ops.deadline import BUSY, DEADLINE, idle
from hoploom.ranks.context import Ranks, gather_json

BOOT = Path("/proc/sys/kernel/random/boot_id")


class PlacingRanks(Ranks, Protocol):
    """The ranks that place together, such as the context that `hoploom.init` returns."""

    def barrier(self) -> None:
        """Wait for all ranks, up to a timeout."""


def ranks_of_host(among: PlacingRanks) -> tuple[int, ...]:
    """Return the ranks that share memory with this one, itself included, ascending. Collective."""
    try:
        place = [BOOT.read_text().strip(), os.stat(hostmemory.FOLDER).st_dev]
    except OSError:  # no Linux, or no /dev/shm: this rank alone
        place = [secrets.token_hex(16), among.rank]
    return tuple(rank for rank, other in enumerate(gather_json(among, place)) if other == place)


class PeerMemory:
    """One block of bytes per rank of this host. Creating and closing it are collective.

    `sizes` are the bytes of each rank in `ranks`; `fill` writes this rank's share.
    """

    def __init__(
        self, among: PlacingRanks, ranks: Sequence[int], sizes: Sequence[int], fill: Fill, device: torch.device
    ) -> None:
        self._among, self._closed = among, False
        own = list(ranks).index(among.rank)
        share = _DeviceShare if device.type == "cuda" else _HostShare
        self._own: _DeviceShare | _HostShare = share(sizes[own], fill, device)
        try:
            handles = gather_json(among, {str(rank): self._own.export() for rank in ranks if rank != among.rank})
            self.bytes = [  # per rank: [size] uint8
                self._own.bytes if rank == among.rank else self._own.open(handles[rank][str(among.rank)], size)
                for rank, size in zip(ranks, sizes, strict=True)
            ]
        except BaseException:
            self._own.close()
            raise

    def close(self, *, wait: bool = True, is_idle: bool = True) -> None:
        """Free the own share after all ranks have closed it; `wait=False` does not wait for them.

        With `is_idle=False` kernels of this rank may still read the shares, so all of them stay.
        """
        if self._closed:
            return
        self._closed = True
        if not is_idle:
            hostmemory.STILL_READ.append(self)
            return
        try:
            self.bytes = []
            self._own.leave_others()
            if wait:
                self._among.barrier()
        finally:
            self._own.close()


class _HostShare:
    """A share in a file of shared memory."""

    def __init__(self, size: int, fill: Fill, device: torch.device) -> None:
        self._memory = HostMemory(shared_name("peer", secrets.token_hex(16)), size, fill)
        self._others: list[HostMemory] = []
        self.bytes = self._memory.bytes

    def export(self) -> Any:
        return self._memory.path.name

    def open(self, handle: Any, size: int) -> Tensor:
        def fill(raw: Tensor) -> None:
            raise PeerError(
                "a rank of this host has left while its memory was being opened; read the output of that rank"
            )

        self._others.append(HostMemory(str(handle), size, fill))
        return self._others[-1].bytes

    def leave_others(self) -> None:
        for memory in self._others:
            memory.close()

    def close(self) -> None:
        self.leave_others()
        self.bytes = self.bytes[:0]
        self._memory.close()


class _DeviceShare:
    """A share in a GPU's memory."""

    def __init__(self, size: int, fill: Fill, device: torch.device) -> None:
        self._device = device
        self.bytes = torch.empty(size, dtype=torch.uint8, device=device)
        fill(self.bytes)
        if not idle(device, DEADLINE):  # so that readers need not wait for an event of this process
            raise PeerError(f"{device} has not filled its share of the rows within {DEADLINE:g} s; {BUSY}")

    def export(self) -> Any:
        """Return a handle for one reader, as JSON values: torch counts readers by handles."""
        if not self.bytes.numel():
            return None
        shared = self.bytes.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        return [{"bytes": base64.b64encode(v).decode()} if isinstance(v, bytes) else v for v in shared]

    def open(self, handle: Any, size: int) -> Tensor:
        """Return another rank's share, mapped for this rank's GPU, on whichever GPU it is stored."""
        if handle is None:
            return self.bytes[:0]
        words = [base64.b64decode(word["bytes"]) if isinstance(word, dict) else word for word in handle]
        words[0], words[-1] = self._device.index, False  # the reader's own device; no event to wait for
        try:
            with torch.cuda.device(self._device):
                storage = torch.UntypedStorage._new_shared_cuda(*words)
        except RuntimeError as error:
            raise ConfigError(
                f"{self._device} cannot read the memory of another GPU of this host: {error}"[:300]
                + "; GPUs must reach each other (nvidia-smi topo -p2p r); place features='20%' or 'host' instead"
            ) from error
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)[:size]

    def leave_others(self) -> None:
        pass  # a handle is closed with the last tensor over it

    def close(self) -> None:
        self.bytes = self.bytes[:0].clone()
