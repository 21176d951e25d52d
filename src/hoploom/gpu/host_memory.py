"""Host memory that all processes of this host share: the first process writes it, the others map it.

The memory is a file in /dev/shm, named after its contents and locked: exclusively by a process that writes, shared by
processes that read. Locks end with their process: a file that a killed process left is written again, or removed by the
next process that places a store. The last process to close a file removes it. A header, written last, marks it whole.
"""

import errno
import fcntl
import hashlib
import json
import mmap
import os
import stat
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from hoploom.config.values import as_bytes
from hoploom.errors import ConfigError, StoreError
from hoploom.ops.deadline import BUSY, CLOSE_DEADLINE, idle
from hoploom.system import Closing, memory_limit

FOLDER = Path("/dev/shm")
HEADER = mmap.PAGESIZE  # bytes before the values
DEADLINE = 600.0  # seconds to wait for the writing process
PAUSE = 0.02  # seconds between two tries of a lock
PORTABLE, MAPPED = 1, 2  # flags of cudaHostRegister
STILL_READ: list[Any] = []  # memory closed while a device may have read it; never freed

Fill = Callable[[Tensor], object]  # writes the contents to [size] uint8


def shared_name(*what: Any) -> str:
    """Return the file name for the contents that `what` describes; it differs between users."""
    digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()
    return f"{_prefix()}{digest[:40]}"


class HostMemory(Closing):
    """Bytes shared by all processes of this host that open the same name."""

    def __init__(self, name: str, size: int, fill: Fill, *, seconds: float = DEADLINE) -> None:
        self.path, self.size = FOLDER / name, size
        self._unpin: finalize[[Tensor, torch.device], HostMemory] | None = None
        descriptor = self._open(fill, time.monotonic() + seconds, seconds)
        self._leave = finalize(self, _leave, self.path, descriptor)  # runs at the latest when the interpreter ends
        self.bytes = _mapped(descriptor, size)

    def register(self, device: torch.device) -> None:
        """Pin the memory, so that kernels on a GPU can read it."""
        if device.type != "cuda" or self.size == 0:
            return
        with torch.cuda.device(device):
            code = int(_runtime().cudaHostRegister(self.bytes.data_ptr(), self.size, PORTABLE | MAPPED))
        if code:
            _forget_refusal(device)
            size = as_bytes(self.size)
            raise ConfigError(
                f"{size} of host memory cannot be pinned for {device} (CUDA error {code}); give this process more "
                "memory, or place more on the device or less of the store"
            )
        self._unpin = finalize(self, _unregister, self.bytes, device)  # runs without `close`, too

    def close(self, is_idle: bool = True) -> None:
        """Stop using the file; the last user removes it. Unless `is_idle`, memory stays pinned and is never freed."""
        try:
            if self._unpin is not None and is_idle:
                self._unpin()  # runs once
            elif self._unpin is not None:
                STILL_READ.append(self._unpin.detach())
        finally:
            self.bytes = torch.empty(0, dtype=torch.uint8)
            self._leave()  # runs once

    def _open(self, fill: Fill, until: float, seconds: float) -> int:
        """Open the complete file, which may have to be written first; return a descriptor that holds a shared lock."""
        while time.monotonic() < until:
            descriptor = _open_own(self.path)
            try:
                if self._ready(descriptor, fill):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
            time.sleep(PAUSE)
        raise StoreError(
            f"{self.path} was being written by another process for {seconds:g} seconds; look whether that one still "
            "makes headway, then try again"
        )

    def _ready(self, descriptor: int, fill: Fill) -> bool:
        """Write the file if it is incomplete and unused; return whether it is complete and locked by this process."""
        if not _lock(descriptor, fcntl.LOCK_SH) or not _is_at(self.path, descriptor):
            return False
        if self._is_whole(descriptor):
            return True
        if not _lock(descriptor, fcntl.LOCK_EX) or not _is_at(self.path, descriptor):
            return False
        if not self._is_whole(descriptor):
            self._write(descriptor, fill)
        # The file is unlocked for a moment between both locks, in which another process may remove it as unused.
        return _lock(descriptor, fcntl.LOCK_SH) and _is_at(self.path, descriptor)

    def _is_whole(self, descriptor: int) -> bool:
        header = self._header()
        return os.fstat(descriptor).st_size == HEADER + self.size and os.pread(descriptor, len(header), 0) == header

    def _header(self) -> bytes:
        return f"hoploom 1 {self.size} whole".encode()

    def _write(self, descriptor: int, fill: Fill) -> None:
        os.ftruncate(descriptor, 0)
        try:
            check_fits(self.size)
            os.posix_fallocate(descriptor, 0, HEADER + self.size)  # else a full disk is a bus error later
            fill(_mapped(descriptor, self.size))
            os.pwrite(descriptor, self._header(), 0)
        except BaseException as error:
            self.path.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise _too_little(self.size) from error
            raise


def _unregister(pages: Tensor, device: torch.device) -> None:
    """Unpin pages before they are unmapped: CUDA would treat later maps at this address as pinned."""
    with torch.cuda.device(device):
        is_idle = True
        try:
            is_idle = idle(device, CLOSE_DEADLINE)  # kernels may still read it
        finally:
            if is_idle and int(_runtime().cudaHostUnregister(pages.data_ptr())):  # waits for kernels without a limit
                _forget_refusal(device)
    if not is_idle:
        STILL_READ.append(pages)
        raise StoreError(f"{device} still reads host memory {CLOSE_DEADLINE:g} s after it was closed; {BUSY}")


def _forget_refusal(device: torch.device) -> None:
    """Clear CUDA's last error, which torch would raise after the next kernel."""
    with suppress(RuntimeError):
        torch.empty(1, device=device).fill_(1)


def _leave(path: Path, descriptor: int) -> None:
    _remove_if_unused(path, descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_UN)  # the map duplicates the descriptor, and both hold the lock
    os.close(descriptor)


def check_fits(size: int) -> None:
    """Raise ConfigError unless `size` more bytes of shared host memory are free."""
    if size and size + HEADER > _free():
        raise _too_little(size)


def sweep(keep: Collection[str] = ()) -> None:
    """Remove this user's shared files that no living process uses, except files named in `keep`."""
    for path in FOLDER.glob(f"{_prefix()}*"):
        if path.name in keep:
            continue
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # removed meanwhile, or another user's
            continue
        try:
            _remove_if_unused(path, descriptor)
        finally:
            os.close(descriptor)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _prefix() -> str:
    return f"hoploom-{os.getuid()}-"


def _open_own(path: Path) -> int:
    """Open the file, or create it; raise StoreError if it is another user's."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise StoreError(f"{path} cannot be opened: {error}; place nothing in host memory, or mend that") from error
    found = os.fstat(descriptor)
    if found.st_uid != os.getuid() or not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise StoreError(f"{path} is not a file of this user; remove it")
    return descriptor


def _mapped(descriptor: int, size: int) -> Tensor:
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(descriptor, HEADER + size), dtype=torch.uint8, count=size, offset=HEADER)


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    """Return whether `path` still names the file that is open as `descriptor`."""
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove_if_unused(path: Path, descriptor: int) -> None:
    if _lock(descriptor, fcntl.LOCK_EX) and _is_at(path, descriptor):
        path.unlink(missing_ok=True)


def _free() -> int:
    """Return how many bytes can be placed: free in the folder, and within this process's memory limit."""
    try:
        found = os.statvfs(FOLDER)
    except OSError as error:
        raise ConfigError(f"host memory is shared in {FOLDER}, which is not there: {error}; mount a tmpfs") from error
    return min(found.f_bavail * found.f_frsize, memory_limit())


def _too_little(size: int) -> ConfigError:
    needed, free = as_bytes(size), as_bytes(_free())
    return ConfigError(
        f"placing needs {needed} of host memory in {FOLDER}, where {free} are free; enlarge it (mount -o "
        f"remount,size=... {FOLDER}, docker run --shm-size=...), or place more on the device"
    )
