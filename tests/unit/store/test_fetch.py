"""Bringing parts of a store to a host: complete or not there, resumed, and checked."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.graphs import random_graph, save_in_parts
from support.object_store import ObjectStore
from support.stores import contents

import hoploom
from hoploom.cli import main, stores
from hoploom.errors import ConfigError, StoreError
from hoploom.store import fetch as fetch_module
from hoploom.store.check import problems
from hoploom.store.fetch import fetch
from hoploom.store.format import read_manifest
from hoploom.store.storage_path import StoragePath
from hoploom.store.store import held_parts

X = "part-00001/nodes/node/x.npy"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three parts."""
    folder = tmp_path_factory.mktemp("made") / "graph.parts"
    save_in_parts(hoploom.from_pyg(random_graph(300, 900, 1)), folder, 3)
    return folder


@pytest.fixture(params=["path", "s3"])
def source(request: pytest.FixtureRequest, tmp_path: Path, store: Path) -> StoragePath:
    if request.param == "path":
        return StoragePath(str(shutil.copytree(store, tmp_path / "shared" / "graph.parts")))
    return uploaded(store, request.getfixturevalue("s3"))


def uploaded(store: Path, s3: ObjectStore) -> StoragePath:
    place = StoragePath(f"{s3.new_bucket()}/graph.parts")
    for path in store.rglob("*.*"):
        with place.create(str(path.relative_to(store))) as file:
            file.write(path.read_bytes())
    return place


def size_of(store: Path, *parts: int) -> int:
    folders = {f"part-{part:05d}" for part in parts}
    return sum(entry.bytes for name, entry in read_manifest(store).files.items() if name.split("/")[0] in folders)


def test_all_parts_come_byte_for_byte_and_only_once(source: StoragePath, store: Path, tmp_path: Path) -> None:
    first = fetch(source, tmp_path / "nvme" / "graph.parts")
    assert contents(tmp_path / "nvme" / "graph.parts") == contents(store)
    assert first.transferred == first.bytes == size_of(store, 0, 1, 2)
    again = fetch(source, tmp_path / "nvme" / "graph.parts")
    assert (again.transferred, again.bytes) == (0, first.bytes)


def test_one_part_comes_alone_and_others_join_it(source: StoragePath, store: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    assert fetch(source, here, [1]).transferred == size_of(store, 1)
    assert held_parts(here) == [1]
    assert hoploom.open(here, parts=[1]).identity == hoploom.open(store).identity
    assert fetch(source, here, [2, 1, 2]).transferred == size_of(store, 2)
    assert held_parts(here) == [1, 2]
    fetch(source, here)
    assert list(problems(here)) == []


def test_pieces_of_any_size_make_the_same_files(
    source: StoragePath, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "PIECE", 1000)
    seen: list[tuple[str, int, int]] = []
    fetch(source, tmp_path / "here", show=lambda *shown: seen.append(shown))
    assert contents(tmp_path / "here") == contents(store)
    total = size_of(store, 0, 1, 2)
    assert seen[-1] == ("fetching", total, total)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


STOPPED = """
import sys
from pathlib import Path
from types import SimpleNamespace
from hoploom.store import fetch
from hoploom.store.storage_path import StoragePath
fetch.PIECE = 1000
def show(what, done, total):
    if done > 6000:
        print(done, flush=True)
        sys.stdin.read()
fetch.fetch(StoragePath(sys.argv[1]), Path(sys.argv[2]), show=show)
"""


def kill_in_the_middle(source: StoragePath, folder: Path) -> int:
    """Bytes that had come."""
    command = [sys.executable, "-c", STOPPED, source.url, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        done = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    return done


def test_a_killed_fetch_is_no_store_and_the_next_one_goes_on(s3: ObjectStore, store: Path, tmp_path: Path) -> None:
    source, here = uploaded(store, s3), tmp_path / "here"
    done = kill_in_the_middle(source, here)
    assert list(here.rglob(".*.npy.partial"))  # in the middle of a file
    with pytest.raises(StoreError, match=r"is no store: it has no store.json"):
        hoploom.open(here)
    seen: list[str] = []
    resumed = fetch(source, here, show=lambda what, *_: seen.append(what))
    assert resumed.bytes - done <= resumed.transferred < resumed.bytes  # complete files are kept
    assert set(seen) == {"checking", "fetching"}
    assert contents(here) == contents(store)


@pytest.mark.slow
def test_what_a_killed_fetch_left_is_checked(s3: ObjectStore, store: Path, tmp_path: Path) -> None:
    source, here = uploaded(store, s3), tmp_path / "here"
    kill_in_the_middle(source, here)
    (whole, *_) = here.rglob("*/[a-z]*.npy")
    raw = bytearray(whole.read_bytes())
    raw[-1] ^= 1
    whole.write_bytes(raw)
    fetch(source, here)
    assert contents(here) == contents(store)


def test_more_parts_that_stop_leave_the_store_as_it_was(source: StoragePath, store: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    *_, last = (name for name in read_manifest(store).files if name.startswith("part-00001"))
    fetch(source, here, [0])
    with source.create(last) as file:
        file.write(bytes((store / last).stat().st_size))
    with pytest.raises(StoreError, match=f"{last} has checksum"):
        fetch(source, here, [1])
    assert held_parts(here) == [0]
    with source.create(last) as file:
        file.write((store / last).read_bytes())
    assert fetch(source, here, [1]).transferred == (store / last).stat().st_size  # the other files had come
    assert held_parts(here) == [0, 1]


def test_two_fetches_into_one_folder_take_turns(source: StoragePath, store: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda parts: fetch(source, tmp_path / "here", parts), ([0, 1], [1, 2], [0, 1, 2])))
    assert sum(result.transferred for result in results) == size_of(store, 0, 1, 2)
    assert contents(tmp_path / "here") == contents(store)


def test_another_store_is_refused(source: StoragePath, tmp_path: Path) -> None:
    here = tmp_path / "here"
    save_in_parts(hoploom.from_pyg(random_graph(300, 900, 2)), here, 3)
    before = contents(here)
    with pytest.raises(StoreError, match=r"here holds another store, not that of .*; give another folder"):
        fetch(source, here)
    assert contents(here) == before


def test_what_is_left_of_a_fetch_of_another_store_is_refused(source: StoragePath, store: Path, tmp_path: Path) -> None:
    here, broken = tmp_path / "here", tmp_path / "broken"
    shutil.copytree(store, broken)
    (broken / "store.json").write_text((store / "store.json").read_text() + " ")
    (broken / X).unlink()
    with pytest.raises(StoreError, match=f"cannot read {broken}/{X}: there is no such file"):
        fetch(StoragePath(str(broken)), here)
    with pytest.raises(StoreError, match="here holds a fetch of another store that was stopped"):
        fetch(source, here)


def test_a_build_that_has_not_finished_is_named(source: StoragePath, tmp_path: Path) -> None:
    source.remove("store.json")
    with pytest.raises(StoreError, match=r"has no store.json: its build has not finished, or it is no store"):
        fetch(source, tmp_path / "here")
    assert not (tmp_path / "here").exists()


def test_a_part_that_there_is_not_is_named(source: StoragePath, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no part 3: .* has parts 0 to 2"):
        fetch(source, tmp_path / "here", [0, 3])


def test_a_file_that_ends_too_early_is_named(source: StoragePath, store: Path, tmp_path: Path) -> None:
    with source.create(X) as file:
        file.write((store / X).read_bytes()[:-1])
    with pytest.raises(StoreError, match=f"{X} ends after .*; write the store there again"):
        fetch(source, tmp_path / "here")


def test_a_disk_without_the_space_is_named_at_once(
    source: StoragePath, store: Path, small_disk: Callable[[str], Path]
) -> None:
    with pytest.raises(StoreError, match=r"needs .* GB more, and its disk has .* GB free; free some space"):
        fetch(source, small_disk("size=24k"))


def test_a_disk_that_fills_up_meanwhile_keeps_what_came(
    store: Path, small_disk: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, source = small_disk("size=24k"), StoragePath(str(store))
    with monkeypatch.context() as patched:
        patched.setattr(fetch_module.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 30))
        with pytest.raises(StoreError, match=r"the disk is full writing .* run the same command again"):
            fetch(source, disk)
    subprocess.run(["mount", "-o", "remount,size=16m", disk], check=True)
    resumed = fetch(source, disk)
    assert 0 < resumed.transferred < resumed.bytes
    assert contents(disk) == contents(store)


def test_the_command_says_what_came_and_how_fast(
    source: StoragePath,
    store: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stores, "SECONDS_BETWEEN_LINES", 0.0)
    words = ["fetch", source.url, "--to", str(tmp_path / "here"), "--part", "1", "--part", "2"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"parts 1,2 of {source} are in {tmp_path / 'here'}: ")
    assert out.endswith("/s; 0.0 MB were there\n")
    assert "fetching: 0.0 MB of 0.0 MB, " in err
    assert main([*words, "--json"]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert (told["parts"], told["transferred"], told["bytes"]) == ([1, 2], 0, size_of(store, 1, 2))
    assert err.endswith("; they were there\n")


def test_an_interrupted_command_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch_module, "fetch", interrupted)
    assert main(["fetch", str(tmp_path), "--to", str(tmp_path / "here")]) == 130
    assert "run the same command again: complete files are kept" in capsys.readouterr().err
