"""Files are joined from pieces: the same for any number of tasks, and however often a task runs."""

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
from hoploom.schema import Field, NodeType, Schema
from hoploom.store.format import FileEntry, PartRange
from hoploom.store.storage_path import StoragePath

pytest.importorskip("pyspark")
from hoploom.ingest.spark import joining
from hoploom.ingest.spark.joining import (
    JoinTask,
    Piece,
    PieceWriter,
    WholeFile,
    join_tasks,
    joined_files,
    write_plan,
)
from hoploom.ingest.spark.target import opened_target

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
    (tmp_path / "target").mkdir()
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


@pytest.mark.parametrize("size", [1, PIECE, 1 << 30])
def test_tasks_of_any_size_make_the_same_files(
    staging: StoragePath, target: StoragePath, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "TASK_BYTES", size)
    monkeypatch.setattr(joining, "SMALL", 1)
    files = pieces(staging)
    tasks = join_tasks(files, 1)
    write_plan(staging, "plan", tasks)
    task = JoinTask(staging, target, "plan")
    answers = {number: as_sent(task.write(number, None)) for number in reversed(range(len(tasks)))}
    task.write(0, None)  # it was slow, and another one had taken its place
    made = joined_files(staging, files, tasks, [answers[number] for number in range(len(tasks))])
    assert read(target) == expected()
    assert made == entries(expected())


def test_small_files_share_tasks_and_large_ones_have_their_own() -> None:
    piece = Piece("a", 1000, 8000, 0)
    small = [WholeFile(f"small{number}", IDS, (piece,)) for number in range(512)]
    assert len(join_tasks([*small, large(4)], 1)) == 5  # each costs as much as 2 MB
    assert [len(task) for task in join_tasks([large(2), large(2), large(1), large(1)], 2)] == [1, 1, 2]


def large(num_pieces: int) -> WholeFile:
    return WholeFile("large", IDS, tuple(Piece(str(number), 1 << 23, 1 << 26, 0) for number in range(num_pieces)))


def test_late_tasks_make_no_folders_of_a_store_that_is_gone(staging: StoragePath, tmp_path: Path) -> None:
    write_plan(staging, "plan", join_tasks(pieces(staging), 1))
    gone = StoragePath(str(tmp_path / "gone"))
    with pytest.raises(StoreError, match="there is no such file"):
        JoinTask(staging, gone, "plan").write(0, None)
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("name", ["x.npy", "csc.indptr.npy"])
def test_a_piece_that_has_changed_is_noticed(staging: StoragePath, target: StoragePath, name: str) -> None:
    files = pieces(staging)
    tasks = join_tasks(files, 1)
    write_plan(staging, "plan", tasks)
    (piece,) = [piece for file in files if file.name == name for piece in file.pieces[3:]]
    path = Path(staging.url) / piece.name
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    task = JoinTask(staging, target, "plan")
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
def test_in_a_bucket_the_files_are_the_same(bucket: str) -> None:
    staging, target = StoragePath(f"{bucket}/staging"), StoragePath(f"{bucket}/target")
    files = pieces(staging)
    tasks = join_tasks(files, 1)
    write_plan(staging, "plan", tasks)
    task = JoinTask(staging, target, "plan")
    answers = [as_sent(task.write(number, None)) for number in range(len(tasks))]
    assert joined_files(staging, files, tasks, answers) == entries(expected()) == entries(read(target))


def test_what_a_killed_task_was_writing_is_no_file_of_the_store(tmp_path: Path) -> None:
    with opened_target(tmp_path / "out.store") as target:
        writing = target.place.create("part-00000/nodes/node/x.npy")
        writing.__enter__().write(b"half")
        target.described = Schema((NodeType("node", 0),), (), True), (PartRange((0,), (0,), (), (), {}),)
    assert [path.name for path in (tmp_path / "out.store").rglob("*") if path.is_file()] == ["store.json"]
