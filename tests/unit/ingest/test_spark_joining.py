"""Ranges of bytes are joined from pieces: the same files for any size of ranges, and however often a task runs."""

import io
import json
import zlib
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.object_store import object_store

from hoploom.errors import StoreError
from hoploom.schema import Field
from hoploom.store.format import FileEntry
from hoploom.store.storage_path import StoragePath

pytest.importorskip("pyspark")
from hoploom.ingest.spark.joining import (
    JoinTask,
    Piece,
    PieceWriter,
    WholeFile,
    join_tasks,
    joined_files,
    write_plan,
)

FEATURES, IDS = Field("float32", (3,)), Field("int64")
PIECE = 10 * FEATURES.row_bytes  # bytes of the features that a task has written


def expected() -> dict[str, bytes]:
    """Every file as NumPy writes it. Rows are their numbers; the k-th node of an indptr has k edges."""
    edges = np.arange(40).cumsum()
    arrays = {
        "x.npy": np.arange(120, dtype=np.float32).reshape(40, 3),
        "csc.indptr.npy": np.concatenate([[0], edges]),
        "one/split.npy": np.arange(7),
        "none/csc.indptr.npy": np.zeros(1, np.int64),
        "none/split.npy": np.zeros(0, np.int64),
    }
    made = {}
    for name, array in arrays.items():
        np.save(file := io.BytesIO(), array)
        made[name] = file.getvalue()
    return made


def pieces(staging: StoragePath) -> list[WholeFile]:
    """Four ranges of ten nodes; the second half of the third has none."""
    found: dict[str, list[Piece]] = {"x.npy": [], "csc.indptr.npy": [], "one/split.npy": []}
    edges = []
    for number, (begin, end) in enumerate(((0, 10), (10, 20), (20, 20), (20, 40))):
        with PieceWriter(staging, number) as writer:
            writer.append("x.npy", FEATURES, torch.arange(3 * begin, 3 * end, dtype=torch.float32).view(-1, 3))
            writer.finish("x.npy", FEATURES)
            counts = torch.arange(begin, end)
            writer.append("csc.indptr.npy", IDS, torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]))
            writer.finish("csc.indptr.npy", IDS)
            if number == 1:
                writer.append("one/split.npy", IDS, torch.arange(7))
                writer.finish("one/split.npy", IDS)
        edges.append(int(counts.sum()))
        for name, piece in writer.pieces.items():
            found[name].append(piece)
    return [
        WholeFile("x.npy", FEATURES, tuple(found["x.npy"])),
        WholeFile("csc.indptr.npy", IDS, tuple(found["csc.indptr.npy"]), tuple(accumulate(edges[:-1], initial=0))),
        WholeFile("one/split.npy", IDS, tuple(found["one/split.npy"])),
        WholeFile("none/csc.indptr.npy", IDS, ()),
        WholeFile("none/split.npy", IDS, ()),
    ]


@pytest.fixture
def staging(tmp_path: Path) -> StoragePath:
    (tmp_path / "staging").mkdir()
    return StoragePath(str(tmp_path / "staging"))


@pytest.fixture
def target(tmp_path: Path) -> StoragePath:
    for folder in ("one", "none"):
        (tmp_path / "target" / folder).mkdir(parents=True)
    return StoragePath(str(tmp_path / "target"))


def as_sent(answer: Any) -> Any:
    return json.loads(json.dumps(answer))


def read(place: StoragePath) -> dict[str, bytes]:
    found = {}
    for name, _ in place.names():
        with place.open(name) as file:
            found[name] = file.read()
    return found


def entries(files: dict[str, bytes]) -> dict[str, FileEntry]:
    return {name: FileEntry(len(raw), zlib.crc32(raw)) for name, raw in files.items()}


@pytest.mark.parametrize("most", [8, 64, PIECE - 8, PIECE, PIECE + 8, 3 * PIECE, 1 << 20, 1 << 30])
def test_ranges_of_any_size_make_the_same_files(staging: StoragePath, target: StoragePath, most: int) -> None:
    files = pieces(staging)
    tasks = join_tasks(files, most, in_ranges=True)
    assert all(sum(one.bytes for one in task) <= most for task in tasks)
    write_plan(staging, "plan", tasks)
    task = JoinTask(staging, target, "plan", in_ranges=True)
    answers = {number: as_sent(task.write(number, None)) for number in reversed(range(len(tasks)))}
    made = joined_files(staging, files, tasks, [answers[number] for number in range(len(tasks))])
    assert read(target) == expected()
    assert made == entries(expected())


def test_small_files_share_tasks_and_large_ones_have_several() -> None:
    piece = Piece("a", 1000, 8000, 0)
    small = [WholeFile(f"small{number}", IDS, (piece,)) for number in range(512)]
    assert len(join_tasks(small, 256 << 20, in_ranges=True)) == 4  # each costs as much as 2 MB
    large = [WholeFile("large", IDS, tuple(Piece(str(n), 1 << 24, 1 << 27, 0) for n in range(8)))]
    tasks = join_tasks(large, 256 << 20, in_ranges=True)
    assert [one.begin for task in tasks for one in task] == [n << 28 for n in range(5)]  # the header is in the first
    assert len(join_tasks(large, 256 << 20, in_ranges=False)) == 1


def test_a_task_that_was_cut_off_and_one_that_runs_late_change_nothing(
    staging: StoragePath, target: StoragePath
) -> None:
    files = pieces(staging)
    tasks = join_tasks(files, PIECE, in_ranges=True)
    write_plan(staging, "plan", tasks)
    task = JoinTask(staging, target, "plan", in_ranges=True)
    first = tasks[0][0]
    with target.write_range(first.name, first.size, first.begin) as file:
        file.write(first.head[:50].encode("latin-1"))  # and it was killed
    assert target.size(first.name) == first.size
    answers = [as_sent(task.write(number, None)) for number in range(len(tasks))]
    task.write(1, None)  # it was slow, and another one has taken its place
    assert joined_files(staging, files, tasks, answers) == entries(expected())
    assert read(target) == expected()
    assert not list(Path(target.url).rglob(".*"))


def test_late_tasks_make_no_folders_of_a_store_that_is_gone(
    staging: StoragePath, target: StoragePath, tmp_path: Path
) -> None:
    tasks = join_tasks(pieces(staging), PIECE, in_ranges=True)
    write_plan(staging, "plan", tasks)
    gone = StoragePath(str(tmp_path / "gone"))
    with pytest.raises(StoreError, match="there is no such file"):
        JoinTask(staging, gone, "plan", in_ranges=True).write(0, None)
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("most", [64, 1 << 20])
@pytest.mark.parametrize("name", ["x.npy", "csc.indptr.npy"])
def test_a_piece_that_has_changed_is_noticed(staging: StoragePath, target: StoragePath, name: str, most: int) -> None:
    files = pieces(staging)
    tasks = join_tasks(files, most, in_ranges=True)
    write_plan(staging, "plan", tasks)
    (piece,) = [piece for file in files if file.name == name for piece in file.pieces[3:]]
    path = Path(staging.url) / piece.name
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    task = JoinTask(staging, target, "plan", in_ranges=True)
    answers = [as_sent(task.write(number, None)) for number in range(len(tasks))]
    with pytest.raises(StoreError, match=rf"{name}/000003 is not what was written; check the disk"):
        joined_files(staging, files, tasks, answers)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreError, match=rf"{name}/000003 is cut short; check the disk"):
        [task.write(number, None) for number in range(len(tasks))]


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with object_store(tmp_path_factory.mktemp("moto") / "log") as store, pytest.MonkeyPatch.context() as patch:
        for name, value in store.variables.items():
            patch.setenv(name, value)
        yield store.new_bucket()


@pytest.mark.slow
def test_in_a_bucket_a_file_is_written_by_one_task(bucket: str) -> None:
    staging, target = StoragePath(f"{bucket}/staging"), StoragePath(f"{bucket}/target")
    assert not staging.takes_ranges()
    files = pieces(staging)
    tasks = join_tasks(files, PIECE, in_ranges=False)
    assert [one.name for task in tasks for one in task] == [file.name for file in files]
    write_plan(staging, "plan", tasks)
    task = JoinTask(staging, target, "plan", in_ranges=False)
    answers = [as_sent(task.write(number, None)) for number in range(len(tasks))]
    assert joined_files(staging, files, tasks, answers) == entries(expected()) == entries(read(target))
