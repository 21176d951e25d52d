"""A file in scratch space: it has no name, so nothing is left behind, whatever ends the process."""

import errno
import os
import tempfile
from pathlib import Path

from hoploom.config.values import as_bytes
from hoploom.errors import StoreError
from hoploom.ops import DiskFile

BLOCK = 4096  # writes past the page cache begin and end at multiples of it
SHARE = 0.5  # of what is free in scratch space


class ScratchFile:
    """A file without a name that is written past the page cache where its file system allows that."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.num_bytes = -(-num_bytes // BLOCK) * BLOCK
        self.end = 0  # of what is written
        descriptor = -1
        try:
            descriptor = _open_without_name(folder)
            os.posix_fallocate(descriptor, 0, self.num_bytes)
            path = f"/proc/self/fd/{descriptor}"
            self.opened = DiskFile(path)
            self._descriptor = os.open(path, os.O_WRONLY | (os.O_DIRECT if self.opened.is_direct else 0))
        except OSError as error:
            way_out = f"it needs {as_bytes(self.num_bytes)} at a time; give scratch another folder, or leave it out"
            raise StoreError(f"scratch space {folder} cannot be used: {error.strerror}; {way_out}") from error
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def __enter__(self) -> "ScratchFile":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)

    def append(self, blocks: memoryview) -> None:
        try:
            while blocks:
                written = os.pwrite(self._descriptor, blocks, self.end)
                self.end += written
                blocks = blocks[written:]
        except OSError as error:
            raise StoreError(f"scratch space cannot be written: {error.strerror}; check its disk") from error


def _open_without_name(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    descriptor, path = tempfile.mkstemp(prefix="hoploom-", dir=folder)  # a file system that knows only names
    os.unlink(path)
    return descriptor
