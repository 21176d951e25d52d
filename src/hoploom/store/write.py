"""Write a store out of core, into a temporary directory that is renamed when complete: no error leaves half a store."""

import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from hoploom.errors import StoreError
from hoploom.ops import read_soon
from hoploom.schema import DTYPE_NAMES, DTYPES, EDGE_ID, Field, Schema
from hoploom.store import format as layout
from hoploom.store.base import Part, range_of
from hoploom.store.format import DISK_FULL, FileEntry, Manifest, PartRange, WorkFolder, id_dtype, sync_folder

CHUNK_BYTES = 8 << 20
SCRATCH = "scratch"
POLYNOMIAL = 0xEDB88320


class ArrayWriter:
    """A .npy file that grows by chunks of rows. Its header, which has the number of rows, is written last."""

    def __init__(self, path: Path, field: Field) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._field, self.num_rows, self._crc, self._bytes = field, 0, 0, 0
        self._file = path.open("wb+")
        self._begin = layout.write_npy_header(self._file, field.dtype, (0, *field.shape))

    def append(self, rows: Tensor) -> None:
        """Append rows; they are cast to the array's dtype."""
        if tuple(rows.shape[1:]) != self._field.shape:
            raise StoreError(f"{self._file.name} got rows of shape {tuple(rows.shape[1:])}, not {self._field.shape}")
        raw = rows.to(DTYPES[self._field.dtype]).contiguous()
        values = raw.reshape(-1).view(torch.uint8).numpy().data if raw.numel() else memoryview(b"")
        self._file.write(values)
        self._crc = zlib.crc32(values, self._crc)
        self._bytes += len(values)
        self.num_rows += rows.shape[0]

    def finish(self) -> FileEntry:
        """Write the header, flush to the disk, and return the size and checksum of the file."""
        self._file.seek(0)
        if layout.write_npy_header(self._file, self._field.dtype, (self.num_rows, *self._field.shape)) != self._begin:
            raise StoreError(f"the header of {self._file.name} does not fit; this NumPy pads headers in another way")
        self._file.seek(0)
        header = self._file.read(self._begin)
        self._file.flush()
        os.fsync(self._file.fileno())
        return FileEntry(self._begin + self._bytes, combine(zlib.crc32(header), self._crc, self._bytes))

    def close(self) -> None:
        """Close the file. A full disk raises no error here, because the unfinished directory is deleted anyway."""
        try:
            self._file.close()
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise


class StoreWriter:
    """A writer of a new store, complete at the end of its `with` block; after an error, the store does not exist."""

    def __init__(self, path: str | Path, schema: Schema | None = None, parts: Sequence[PartRange] = ()) -> None:
        self._target = Path(path)
        self._schema, self._parts = schema, tuple(parts)
        self._files: dict[str, FileEntry] = {}
        self._open: dict[str, ArrayWriter] = {}
        self._work: WorkFolder | None = None

    def __enter__(self) -> "StoreWriter":
        self._refuse_existing()
        try:
            self._work = WorkFolder(self._target)
        except OSError as error:
            raise self._explained(error) from error
        return self

    def _refuse_existing(self) -> None:
        if os.path.lexists(self._target):
            raise StoreError(f"{self._target} exists; give another path, or remove it first")

    @property
    def _folder(self) -> Path:
        assert self._work is not None
        return self._work.path

    @property
    def scratch(self) -> Path:
        """A folder on the same disk for temporary files; it is removed when the writer closes."""
        folder = self._folder / SCRATCH
        folder.mkdir(exist_ok=True)
        return folder

    def path_of(self, name: str) -> Path:
        """Return the path of an array in the temporary directory, while the store is being written."""
        return layout.inside(self._folder, name)

    def describe(self, schema: Schema, parts: Sequence[PartRange]) -> None:
        """Set the schema and the ranges of the parts, if they were not known before."""
        self._schema, self._parts = schema, tuple(parts)

    def write(self, name: str, dtype: str, shape: tuple[int, ...], chunks: Iterable[Tensor]) -> None:
        """Write a whole array from chunks of its rows."""
        with self._explaining():
            for chunk in chunks:
                self.append(name, Field(dtype, shape[1:]), chunk)
        rows = self.finish(name, Field(dtype, shape[1:]))
        if rows != shape[0]:
            raise StoreError(f"{name} got {rows} rows of {shape[0]}")

    def add(self, name: str, entry: FileEntry) -> None:
        """Add an array that is already at `path_of(name)`, flushed to the disk."""
        self._files[name] = entry

    def append(self, name: str, field: Field, rows: Tensor) -> None:
        """Append rows to the array `name`, which the first call creates; `finish` completes it."""
        with self._explaining():
            if name not in self._open:
                self._open[name] = ArrayWriter(layout.inside(self._folder, name), field)
            self._open[name].append(rows)

    def finish(self, name: str, field: Field) -> int:
        """Complete an array, and return its number of rows. If nothing was appended, the array is empty."""
        self.append(name, field, torch.empty((0, *field.shape), dtype=DTYPES[field.dtype]))
        with self._explaining():
            array = self._open[name]
            self._files[name] = array.finish()
            array.close()
            del self._open[name]
        return array.num_rows

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise (error if isinstance(error, StoreError) else self._explained(error)) from error

    def _explained(self, error: OSError) -> StoreError:
        if error.errno in DISK_FULL:
            return StoreError(f"the disk is full writing {self._target} and nothing was kept; free some space")
        return StoreError(f"cannot write {self._target}: {error}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._work is not None
        try:
            for array in self._open.values():
                array.close()
            if error is None:
                with self._explaining():
                    self._complete(self._folder)
            elif isinstance(error, OSError) and error.errno in DISK_FULL:
                raise self._explained(error) from error
        finally:
            self._work.close()

    def _complete(self, folder: Path) -> None:
        assert self._schema is not None
        assert not self._open
        shutil.rmtree(folder / SCRATCH, ignore_errors=True)
        text = layout.manifest_to_json(Manifest(self._schema, self._parts, self._files))
        with (folder / layout.STORE_FILE).open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        for inner in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
            sync_folder(inner)
        self._refuse_existing()  # a rename would replace an empty directory
        try:
            os.rename(folder, self._target)
        except OSError:
            self._refuse_existing()  # if another writer was first
            raise
        sync_folder(self._target.absolute().parent)


def write_parts(path: str | Path, schema: Schema, parts: Sequence[Part]) -> None:
    """Write a new store from parts that are in this process."""
    with StoreWriter(path, schema, [range_of(part) for part in parts]) as writer:
        for number, part in enumerate(parts):
            for node_type in schema.node_types:
                for name in node_type.fields:
                    rows = part.tables[node_type.name, name].rows
                    _write_rows(writer, layout.node_file(number, node_type.name, name), rows)
            for (type_name, split), ids in part.splits.items():
                _write_rows(writer, layout.split_file(number, type_name, split), ids)
            for index in range(len(schema.relations)):
                _write_edges(writer, number, part, index)
            part.require_whole()


def _write_edges(writer: StoreWriter, number: int, part: Part, index: int) -> None:
    relation, lists = part.schema.relations[index], part.lists[index]
    order = part.tables.get((relation.key, EDGE_ID))
    for name in relation.fields:
        table = part.tables[relation.key, name]
        in_order = order.rows if table.by_edge_id and order is not None else None
        _write_rows(writer, layout.edge_file(number, relation, name), table.rows, in_order)
    files = {name: layout.topology_file(number, relation, name) for name in ("indptr", "indices", "weight", "time")}
    _write_rows(writer, files["indptr"], lists.indptr)
    dtype, shape = id_dtype(part.schema.node_types[part.schema.sources[index]].num_nodes), tuple(lists.indices.shape)
    writer.write(files["indices"], dtype, shape, _chunks(lists.indices))
    if lists.weight is not None:
        _write_rows(writer, files["weight"], lists.weight)
    if lists.edge_time is not None:
        _write_rows(writer, files["time"], lists.edge_time)
    elif lists.source_time is not None:
        chunks = (lists.source_time[sources.to(torch.int64)] for sources in _chunks(lists.indices))
        writer.write(files["time"], "int64", shape, chunks)


def _write_rows(writer: StoreWriter, name: str, rows: Tensor, order: Tensor | None = None) -> None:
    writer.write(name, DTYPE_NAMES[rows.dtype], tuple(rows.shape), _chunks(rows, order))


def _chunks(rows: Tensor, order: Tensor | None = None) -> Iterator[Tensor]:
    """Yield the rows, or rows[order] if `order` is given, in chunks of about CHUNK_BYTES."""
    count = rows.shape[0]
    row_bytes = max(1, rows[0].numel() * rows.element_size()) if count else 1
    step = max(1, CHUNK_BYTES // row_bytes)
    for begin in range(0, count, step):
        read_soon((rows if order is None else order)[begin : begin + 2 * step])
        yield rows[begin : begin + step] if order is None else rows[order[begin : begin + step]]


# --- the CRC-32 of a file whose header is written last --------------------------------------


def combine(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC-32 of two joined byte strings from the CRC-32 of each. The second has `second_bytes` bytes."""
    shift, power, left = 1 << 31, 1 << 30, 8 * second_bytes  # the polynomials 1 and x; x once for every bit of b
    while left:
        if left & 1:
            shift = _product(shift, power)
        power, left = _product(power, power), left >> 1
    return _product(shift, first) ^ second


def _product(one: int, other: int) -> int:
    """Return the product of two polynomials over GF(2), modulo the CRC's polynomial. The highest bit is the power 0."""
    out = 0
    for bit in range(31, -1, -1):
        if one >> bit & 1:
            out ^= other
        other = other >> 1 ^ (POLYNOMIAL if other & 1 else 0)
    return out
