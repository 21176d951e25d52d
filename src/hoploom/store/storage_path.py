"""A folder that every host can reach: on a shared file system, or in an object store (s3://, gs://) by pyarrow.

A file appears under its name when it is complete, or not at all. A failed upload is never finished: the bytes that were
sent stay in the bucket, invisible, until a lifecycle rule removes them.
"""

import ctypes
import io
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import ENOENT
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from hoploom.errors import ConfigError, StoreError
from hoploom.store.format import DISK_FULL, regular, sync_folder
from hoploom.system import needs

OBJECT_STORES = {"s3": "", "gs": "?retry_limit_seconds=60"}  # pyarrow's options: by default, gs retries for 15 minutes
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
BUCKET = re.compile(r"[A-Za-z0-9._-]+")
BUFFER = 1 << 20
CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, to an account that may use this bucket",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS to the key file of an account that may use this bucket",
}
ENDPOINT = {
    "s3": "check the network; for a server other than Amazon's, set AWS_ENDPOINT_URL to its address",
    "gs": "check the network",
}
DENIED = re.compile(
    r"ACCESS_DENIED|ACCESS_KEY|SIGNATURE|TOKEN|CREDENTIALS|HTTP status 40[13]|PERMISSION|UNAUTHENTICATED|access token"
)
UNREACHABLE = re.compile(r"NETWORK_CONNECTION|UNAVAILABLE|DEADLINE_EXCEEDED|curlCode|resolve host")


@dataclass(frozen=True)
class StoragePath:
    """A folder of files. It holds only its URL, so it can be sent to other processes."""

    url: str

    def __post_init__(self) -> None:
        url = re.sub(r"^file:(//)?(?=/)", "", self.url)
        if SCHEME.match(url) is None:
            url = os.path.abspath(url)
        else:
            scheme, bucket, path = _split(url)
            if scheme not in OBJECT_STORES or "://" not in url:
                raise ConfigError(f"{url}: Hoploom cannot use {scheme}; give a shared path, s3://… or gs://…")
            if not BUCKET.fullmatch(bucket):
                raise ConfigError(
                    f"give {scheme}://BUCKET/PATH and nothing else; keys and endpoints are read from the environment"
                )
            url = f"{scheme}://{bucket}/{path.strip('/')}".rstrip("/")
        object.__setattr__(self, "url", url)

    def __truediv__(self, name: str) -> "StoragePath":
        return StoragePath(f"{self.url}/{name}")

    def __str__(self) -> str:
        return self.url

    @property
    def path(self) -> Path | None:
        """The folder on this host; None for an object store."""
        return None if SCHEME.match(self.url) else Path(self.url)

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading and seeking."""
        with self._explained("read", name):
            if self.path is not None:
                return regular(self.path / name).open("rb", buffering=BUFFER)
            file = self._objects.open_input_file(self._key(name))
        return io.BufferedReader(_ExplainedFile(file, partial(self._explained, "read", name), reads=True), BUFFER)

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Open a file for writing in a `with` block. The file appears under its name only if the block has no error."""
        make = self._create_local if self.path is not None else self._create_object
        yield from make(name)

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes; None if the file does not exist."""
        with self._explained("read", name):
            if self.path is not None:
                path = self.path / name
                return path.stat().st_size if path.is_file() else None
            about = self._objects.get_file_info(self._key(name))
        return int(about.size) if about.is_file else None

    def names(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """Yield the name and size in bytes of each file in the subfolder `prefix` and in the folders below it."""
        if self.path is not None:
            for folder, folders, files in os.walk(self.path / prefix):
                folders.sort()
                for path in (Path(folder, name) for name in sorted(files)):
                    with suppress(FileNotFoundError):  # removed in the meantime
                        if not path.name.startswith(".") and path.is_file():  # hidden files are being written
                            yield str(path.relative_to(self.path)), path.stat().st_size
            return
        from pyarrow.fs import FileSelector

        base, folder = self._key(""), self._key(prefix).rstrip("/")
        with self._explained("list", prefix):
            listed = self._objects.get_file_info(FileSelector(folder, recursive=True, allow_not_found=True))
            if not listed and not self._has_bucket():
                raise FileNotFoundError(folder)
        yield from sorted((one.path.removeprefix(base), int(one.size)) for one in listed if one.is_file)

    def remove(self, prefix: str) -> None:
        """Remove a file, or a folder with its contents; do nothing if it does not exist."""
        if not prefix.strip("/"):
            raise ConfigError(f"a whole place is never removed; name what to remove in {self.url}")
        with self._explained("remove", prefix):
            if self.path is not None:
                path = self.path / prefix
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
                return
            key = self._key(prefix).rstrip("/")
            if self._objects.get_file_info(key).is_file:
                self._objects.delete_file(key)
            else:
                with suppress(FileNotFoundError):
                    self._objects.delete_dir(key)

    def _create_local(self, name: str) -> Iterator[BinaryIO]:
        assert self.path is not None
        path = self.path / name
        temporary = path.with_name(f".{path.name}.partial-{secrets.token_hex(8)}")
        try:
            with self._explained("write", name):
                if not self.path.exists():  # a late process must not recreate a folder that was removed
                    raise FileNotFoundError(ENOENT, os.strerror(ENOENT), str(self.path))
                path.parent.mkdir(parents=True, exist_ok=True)
                file = temporary.open("wb", buffering=BUFFER)
            try:
                yield self._writer(file, name)
                with self._explained("write", name):
                    file.flush()
                    os.fsync(file.fileno())
            finally:
                with suppress(OSError):  # after a failed write, close fails again
                    file.close()
            with self._explained("write", name):
                os.replace(temporary, path)
                sync_folder(path.parent)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def _create_object(self, name: str) -> Iterator[BinaryIO]:
        with self._explained("write", name):
            upload = self._objects.open_output_stream(self._key(name))
        try:
            yield self._writer(upload, name)
            with self._explained("write", name):
                upload.close()
        except BaseException:
            # pyarrow completes an upload that is closed or collected: leak this one, so that it never is.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(upload))
            raise

    def _writer(self, file: Any, name: str) -> BinaryIO:
        return cast(BinaryIO, _ExplainedFile(file, partial(self._explained, "write", name), reads=False))

    @property
    def _objects(self) -> Any:
        scheme, bucket, _ = _split(self.url)
        return _file_system(scheme, bucket)

    def _key(self, name: str) -> str:
        """Return pyarrow's name of a file: BUCKET/PATH/NAME."""
        _, bucket, path = _split(self.url)
        return "/".join(filter(None, (bucket, path))) + "/" + name

    @contextmanager
    def _explained(self, verb: str, name: str) -> Iterator[None]:
        """Turn an OSError in this block into a StoreError with a hint."""
        try:
            yield
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(f"cannot {verb} {self.url}/{name}: {self._reason(error)}") from error

    def _reason(self, error: OSError) -> str:
        reason = str(error).split(" (Request ID")[0].splitlines()[0].rstrip(".: ")
        is_missing = isinstance(error, FileNotFoundError)
        if self.path is None:
            scheme, bucket, _ = _split(self.url)
            if DENIED.search(reason):
                return f"access was denied ({reason}); {CREDENTIALS[scheme]}"
            if UNREACHABLE.search(reason):
                return f"the server does not answer ({reason}); {ENDPOINT[scheme]}"
            if "NO_SUCH_BUCKET" in reason or (is_missing and not self._has_bucket()):
                return f"there is no bucket {bucket!r}; create it, or correct the URL"
        elif error.errno in DISK_FULL:
            return "the disk is full; free some space"
        return "there is no such file" if is_missing else reason

    def _has_bucket(self) -> bool:
        with suppress(OSError):
            return bool(self._objects.get_file_info(_split(self.url)[1]).type.value)
        return True  # unknown: report the first error


class _ExplainedFile(io.RawIOBase):
    """A file object whose errors have hints. In a file for writing, close() does nothing: `create` ends the upload."""

    def __init__(self, file: Any, explained: Callable[[], Any], *, reads: bool) -> None:
        self._file, self._explained, self._reads = file, explained, reads

    def readable(self) -> bool:
        return self._reads

    def seekable(self) -> bool:
        return self._reads

    def writable(self) -> bool:
        return not self._reads

    def readinto(self, buffer: Any) -> int:
        with self._explained():
            return int(self._file.readinto(buffer))

    def write(self, piece: Any) -> int:
        with self._explained():
            return int(self._file.write(piece))

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        if self._reads:
            with suppress(OSError):  # after a failed read, close fails again
                self._file.close()
        super().close()


def _split(url: str) -> tuple[str, str, str]:
    """Return the scheme, bucket and path of a URL."""
    scheme, _, rest = url.partition(":")
    bucket, _, path = rest.removeprefix("//").partition("/")
    return scheme, bucket, path


@cache
def _file_system(scheme: str, bucket: str) -> Any:
    with needs("tables"):
        from pyarrow.fs import FileSystem
    return FileSystem.from_uri(f"{scheme}://{bucket}{OBJECT_STORES[scheme]}")[0]
