"""A place: files in a shared folder or a bucket, which are complete or not there."""

import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.object_store import ObjectStore, object_store
from support.ports import free_ports
from support.until import until

from hoploom.errors import ConfigError, StoreError
from hoploom.store.storage_path import StoragePath

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
    with pytest.raises(ConfigError, match="a whole place is never removed"):
        place.remove("")


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
    with pytest.raises(StoreError, match=f"cannot read {place}/nothing: there is no such file"):
        place.open("nothing")


def test_a_missing_bucket_is_named(s3: ObjectStore) -> None:
    place = StoragePath("s3://nobody-made-this-one/graphs")
    for use in (lambda: place.open("x"), lambda: write(place, "x", b"1"), lambda: list(place.names())):
        with pytest.raises(
            StoreError, match="there is no bucket 'nobody-made-this-one'; create it, or correct the URL"
        ):
            use()


def test_an_account_that_may_not_is_told_which_variables_to_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with object_store(tmp_path / "log", INITIAL_NO_AUTH_ACTION_COUNT="1") as server:
        place = StoragePath(f"{server.new_bucket()}/graphs")
        for name, value in server.variables.items():
            monkeypatch.setenv(name, value)
        for use in (lambda: place.open("x"), lambda: write(place, "x", b"1"), lambda: place.size("x")):
            with pytest.raises(StoreError, match=r"access was denied .*set AWS_ACCESS_KEY_ID"):
                use()


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
    with pytest.raises(ConfigError, match="give a shared path, s3://… or gs://…"):
        StoragePath(url)


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
