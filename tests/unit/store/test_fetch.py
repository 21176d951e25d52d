"""Files of a shared folder or a bucket are complete or not there, and so are the parts that a host fetches."""

import json
import pickle
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
from support.object_store import ObjectStore, object_store
from support.ports import free_ports
from support.refusals import assert_raises
from support.stores import contents
from support.until import until

import hoploom
from hoploom.cli import main, stores
from hoploom.errors import ConfigError, StoreError
from hoploom.store import fetch as fetch_module
from hoploom.store.check import problems
from hoploom.store.fetch import fetch
from hoploom.store.format import read_manifest
from hoploom.store.storage_path import StoragePath
from hoploom.store.store import held_parts

MANY = 25 << 20  # bytes: more than the first piece that an upload sends


@pytest.fixture(params=["path", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> StoragePath:
    if request.param == "path":
        (tmp_path / "shared").mkdir()
        return StoragePath(str(tmp_path / "shared"))
    return StoragePath(f"{request.getfixturevalue('s3').new_bucket()}/graphs/papers")


def write(place: StoragePath, name: str, contents: bytes) -> None:
    with place.create(name) as file:
        file.write(contents)


def write_and_raise(place: StoragePath, size: int, error: type[BaseException]) -> None:
    with place.create("folder/x") as file:
        file.write(bytes(size))
        raise error


def test_a_file_is_read_as_it_was_written(place: StoragePath) -> None:
    with place.create("a/b.npy") as file:
        assert file.write(b"0123") == 4
        file.write(memoryview(b"456789"))
        assert file.tell() == 10
    with place.open("a/b.npy") as file:
        assert file.seekable()
        file.seek(6)
        assert file.read(2) == b"67"
        file.seek(0)
        assert file.read() == b"0123456789"
    assert place.size("a/b.npy") == 10
    assert place.size("a/c.npy") is place.size("a") is None


def test_a_file_is_replaced(place: StoragePath) -> None:
    write(place, "one", b"before")
    write(place, "one", b"after")
    assert list(place.names()) == [("one", 5)]
    with place.open("one") as file:
        assert file.read() == b"after"


def test_names_go_through_all_folders(place: StoragePath) -> None:
    odd = "b/a%2Eb~to~c d"  # names of a store's files have % and ~ in them
    for name in (odd, "a/x", "a/deep/y", "ab"):
        write(place, name, name.encode())
    assert sorted(place.names()) == [("a/deep/y", 8), ("a/x", 3), ("ab", 2), (odd, len(odd))]
    assert sorted(place.names("a")) == [("a/deep/y", 8), ("a/x", 3)]
    assert sorted((place / "a").names()) == [("deep/y", 8), ("x", 3)]
    assert list(place.names("nowhere")) == []


def test_a_folder_or_a_file_is_removed(place: StoragePath) -> None:
    for name in ("a/x", "a/deep/y", "ab", "c"):
        write(place, name, b"1")
    place.remove("a")
    place.remove("c")
    place.remove("nowhere")
    assert list(place.names()) == [("ab", 1)]
    assert_raises(ConfigError, "a whole place is never removed", place.remove, "")


def test_a_folder_that_is_removed_leaves_no_object(s3: ObjectStore) -> None:
    bucket = s3.new_bucket()
    for name in ("a/x", "a/deep/y", "b"):
        write(StoragePath(bucket), name, b"1")
    StoragePath(bucket).remove("a")
    assert s3.keys(bucket) == ["b"]


def test_a_place_is_sent_as_its_url(place: StoragePath) -> None:
    write(place, "x", b"1")  # pyarrow's file system is open
    assert pickle.loads(pickle.dumps(place)) == place
    assert len(pickle.dumps(place)) < 300
    assert str(place / "x") == f"{place}/x"


@pytest.mark.parametrize("written", [3, MANY])
def test_a_file_whose_writer_fails_never_appears(place: StoragePath, written: int) -> None:
    with pytest.raises(ZeroDivisionError):
        write_and_raise(place, written, ZeroDivisionError)
    assert list(place.names()) == []
    write(place, "folder/x", b"whole")
    with pytest.raises(KeyboardInterrupt):
        write_and_raise(place, written, KeyboardInterrupt)
    assert list(place.names()) == [("folder/x", 5)]  # the one that was there


@pytest.mark.slow
def test_an_upload_that_fails_is_left_unfinished(s3: ObjectStore) -> None:
    """What becomes of it is the bucket's own rule; the end of the process does not finish it either."""
    bucket = s3.new_bucket()
    failing = f"""
from hoploom.store.storage_path import StoragePath
with StoragePath({bucket!r}).create("x") as file:
    file.write(bytes({MANY}))
    raise ZeroDivisionError
"""
    done = subprocess.run([sys.executable, "-c", failing], capture_output=True, text=True, check=False)
    assert "ZeroDivisionError" in done.stderr
    assert s3.unfinished(bucket) == 1
    assert list(StoragePath(bucket).names()) == []


@pytest.mark.slow
def test_a_file_whose_writer_is_killed_never_appears(place: StoragePath, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    writing = f"""
import sys, pathlib
from hoploom.store.storage_path import StoragePath
with StoragePath({place.url!r}).create("x") as file:
    file.write(bytes({MANY}))
    pathlib.Path({str(begun)!r}).touch()
    sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", writing], stdin=subprocess.PIPE) as process:
        until(begun.exists)
        process.send_signal(signal.SIGKILL)
    assert list(place.names()) == []
    assert place.size("x") is None


def test_a_folder_that_has_been_removed_is_not_made_again(tmp_path: Path) -> None:
    place = StoragePath(str(tmp_path / "staging"))
    with (
        pytest.raises(StoreError, match=r"cannot write .*/staging.*there is no such file"),
        place.create("pieces/0") as file,
    ):
        file.write(b"late")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_is_named(place: StoragePath) -> None:
    assert_raises(StoreError, f"cannot read {place}/nothing: there is no such file", place.open, "nothing")


def test_a_missing_bucket_is_named(s3: ObjectStore) -> None:
    place = StoragePath("s3://nobody-made-this-one/graphs")
    for use in (lambda: place.open("x"), lambda: write(place, "x", b"1"), lambda: list(place.names())):
        assert_raises(StoreError, "there is no bucket 'nobody-made-this-one'; create it, or correct the URL", use)


def test_an_account_that_may_not_is_told_which_variables_to_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with object_store(tmp_path / "log", INITIAL_NO_AUTH_ACTION_COUNT="1") as server:
        place = StoragePath(f"{server.new_bucket()}/graphs")
        for name, value in server.variables.items():
            monkeypatch.setenv(name, value)
        for use in (lambda: place.open("x"), lambda: write(place, "x", b"1"), lambda: place.size("x")):
            assert_raises(StoreError, r"access was denied .*set AWS_ACCESS_KEY_ID", use)


@pytest.mark.slow  # pyarrow asks three times
def test_a_server_that_is_not_there_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    for name, value in ObjectStore(f"http://127.0.0.1:{port}").variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreError, match=r"the server does not answer .*set AWS_ENDPOINT_URL"):
        StoragePath("s3://unreached/graphs").open("x")


def test_a_full_disk_leaves_nothing(small_disk) -> None:  # type: ignore[no-untyped-def]
    place = StoragePath(str(small_disk("size=64k")))
    with pytest.raises(StoreError, match=r"cannot write .*: the disk is full; free some space"):
        write(place, "x", bytes(1 << 20))
    assert list(Path(place.url).iterdir()) == []


@pytest.mark.parametrize("url", ["hdfs://name/graphs", "dbfs:/graphs", "http://host/graphs"])
def test_a_url_of_another_kind_is_refused(url: str) -> None:
    assert_raises(ConfigError, "give a shared path, s3://… or gs://…", StoragePath, url)


@pytest.mark.parametrize("url", ["s3://", "s3://key:secret@bucket/x", "s3://bucket?region=eu/x"])
def test_a_url_that_holds_more_than_a_bucket_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match="give s3://BUCKET/PATH and nothing else") as refused:
        StoragePath(url)
    assert "secret" not in str(refused.value)


def test_a_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert StoragePath("graphs").path == StoragePath(f"file://{tmp_path}/graphs").path == tmp_path / "graphs"
    assert StoragePath("s3://bucket/graphs/").path is None
    assert StoragePath("s3://bucket/graphs/").url == "s3://bucket/graphs"


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
        done = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    return done


def test_a_killed_fetch_is_no_store_and_the_next_one_goes_on(s3: ObjectStore, store: Path, tmp_path: Path) -> None:
    source, here = uploaded(store, s3), tmp_path / "here"
    done = kill_in_the_middle(source, here)
    assert list(here.rglob(".*.npy.partial"))  # in the middle of a file
    assert_raises(StoreError, r"is no store: it has no store.json", hoploom.open, here)
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
    assert_raises(StoreError, f"{last} has checksum", fetch, source, here, [1])
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
    assert_raises(StoreError, r"here holds another store, not that of .*; give another folder", fetch, source, here)
    assert contents(here) == before


def test_what_is_left_of_a_fetch_of_another_store_is_refused(source: StoragePath, store: Path, tmp_path: Path) -> None:
    here, broken = tmp_path / "here", tmp_path / "broken"
    shutil.copytree(store, broken)
    (broken / "store.json").write_text((store / "store.json").read_text() + " ")
    (broken / X).unlink()
    with pytest.raises(StoreError, match=f"cannot read {broken}/{X}: there is no such file"):
        fetch(StoragePath(str(broken)), here)
    assert_raises(StoreError, "here holds a fetch of another store that was stopped", fetch, source, here)


def test_a_build_that_has_not_finished_is_named(source: StoragePath, tmp_path: Path) -> None:
    source.remove("store.json")
    with pytest.raises(StoreError, match=r"has no store.json: its build has not finished, or it is no store"):
        fetch(source, tmp_path / "here")
    assert not (tmp_path / "here").exists()


def test_a_part_that_there_is_not_is_named(source: StoragePath, tmp_path: Path) -> None:
    assert_raises(ConfigError, r"there is no part 3: .* has parts 0 to 2", fetch, source, tmp_path / "here", [0, 3])


def test_a_file_that_ends_too_early_is_named(source: StoragePath, store: Path, tmp_path: Path) -> None:
    with source.create(X) as file:
        file.write((store / X).read_bytes()[:-1])
    assert_raises(StoreError, f"{X} ends after .*; write the store there again", fetch, source, tmp_path / "here")


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
        assert_raises(StoreError, r"the disk is full writing .* run the same command again", fetch, source, disk)
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
