"""A bit that flips in a file of a store: who serves it or trains on it with `verify` is told, and stops."""

import os
import shutil
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from support.damage import INDICES, X, flip
from support.graphs import ring, save_in_parts
from support.servers import serving
from support.until import until

import hoploom
from hoploom import StoreError
from hoploom.ranks import environment
from hoploom.ranks.context import init
from hoploom.store.check import Verification
from hoploom.train.runs import read_run_file, run

running = import_module("hoploom.train.runs.run")  # the package has a function of this name
pytestmark = pytest.mark.timeout(180)
TOLD = r"checksum \w+, \w+ expected \(a bit has flipped, or it was changed\); restore the file"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_in_parts(hoploom.from_pyg(ring(12)), tmp_path / "store", 2)
    return tmp_path / "store"


@pytest.mark.parametrize("name", [INDICES, X, "part-00000/relations/node~to~node/csc.indptr.npy"])
def test_a_flipped_bit_is_found_in_any_file(path: Path, name: str) -> None:
    with Verification(path, [0, 1]) as verified:
        verified.finish()
    flip(path, name, 150)
    with Verification(path, [0, 1]) as verified, pytest.raises(StoreError, match=f"{name}: {TOLD}"):
        verified.finish()


def test_rows_of_other_parts_may_be_elsewhere(path: Path) -> None:
    (path / X).unlink()
    with Verification(path, [0]) as verified:
        verified.finish()
    with Verification(path, [0, 1]) as verified, pytest.raises(StoreError, match=f"{X}: missing"):
        verified.finish()


def test_files_are_read_slowly_and_a_reader_that_is_closed_ends_at_once(path: Path) -> None:
    with Verification(path, [0, 1], rate=1.0) as verified:  # would take minutes
        assert verified._thread.is_alive()
        until(lambda: os.getpriority(os.PRIO_PROCESS, verified._thread.native_id or 0) == 19)
        verified.check()
    assert not verified._thread.is_alive()


def test_a_server_that_verifies_stops_and_names_the_file(path: Path) -> None:
    flip(path, X, 150)
    with serving(path, [[0], [1]], "--verify") as (sound, damaged):
        assert damaged.process.wait(60) == 1
        assert damaged.process.stderr is not None
        assert f"{X}: checksum" in damaged.process.stderr.read()
        assert sound.process.poll() is None  # it has another part


RUN = """\
store = "store"
verify = true
[task]
val = ""
test = ""
[model]
hidden = 4
[loader]
fanouts = [2]
[train]
epochs = 1
[output]
tensorboard = false
"""


def test_a_run_that_verifies_is_complete_without_damage_alone(path: Path) -> None:
    (path.parent / "run.toml").write_text(RUN)
    flip(path, X, 150)
    run_file = read_run_file(path.parent / "run.toml")
    with init(device="cpu") as context, pytest.raises(StoreError, match=f"{X}: {TOLD}"):
        run(run_file, context, progress=False)
    assert not (run_file.output.folder / "result.json").exists()
    flip(path, X, 150)
    run_file = read_run_file(path.parent / "run.toml", [f"output.folder={path.parent / 'sound'}"])
    with init(device="cpu") as context:
        assert run(run_file, context, progress=False).is_complete


def verifying() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hoploom-verify"]


def test_training_stops_at_the_step_in_which_damage_is_found(path: Path) -> None:
    (path.parent / "run.toml").write_text(RUN)
    flip(path, X, 150)
    taken = []

    def step(module: torch.nn.Module, given: object) -> None:
        if isinstance(module, hoploom.nn.GNN):
            for thread in verifying():
                thread.join(60)
            taken.append(module)

    overrides = ["train.epochs=5", "loader.batch_size=2"]
    run_file = read_run_file(path.parent / "run.toml", overrides)
    hook = torch.nn.modules.module.register_module_forward_pre_hook(step)
    try:
        with init(device="cpu") as context, pytest.raises(StoreError, match=f"{X}: {TOLD}"):
            run(run_file, context, progress=False)
    finally:
        hook.remove()
    assert len(taken) == 1
    assert not list(run_file.output.folder.glob("*.safetensors"))


class Meeting:
    """A context of one rank that lets the reader go on at the third meeting."""

    def __init__(self, go_on: threading.Event) -> None:
        self.met, self.go_on = 0, go_on

    def max(self, value: int) -> int:
        self.met += 1
        if self.met == 3:
            self.go_on.set()
        return value


def test_ranks_meet_while_one_reads_the_rest(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that none waits for another without a sign of life; the message appears once."""
    go_on = threading.Event()
    monkeypatch.setattr(running, "POLL", 0.01)
    monkeypatch.setattr(Verification, "_pause", lambda self, num_bytes: go_on.wait(60))
    context: Any = Meeting(go_on)
    with Verification(path, [0]) as verified:
        running._verify_rest(verified, context, shown=True)
        assert not verified._thread.is_alive()
    assert context.met > 3
    assert capsys.readouterr().err.count("reading the rest of the store's files") == 1


@pytest.mark.parametrize("opened", ["store-1", None])
def test_the_files_that_were_opened_are_verified(
    path: Path, monkeypatch: pytest.MonkeyPatch, opened: str | None
) -> None:
    """Where `hoploom launch` names another store, or none, that of run.toml is not looked at."""
    shutil.copytree(path, path.parent / "store-1")
    (path.parent / "run.toml").write_text(RUN)
    flip(path, X, 150)
    if opened is None:
        shutil.rmtree(path)
    else:
        monkeypatch.setenv(environment.STORE, str(path.parent / opened))
        monkeypatch.setenv(environment.PARTS, "0")
        (path.parent / opened / X).unlink()  # of part 1
    with serving(path.parent / "store-1" if opened is None else intact(path), [[]]) as (server,):
        monkeypatch.setenv(environment.SERVERS, server.address)
        with init(device="cpu") as context:
            assert run(read_run_file(path.parent / "run.toml"), context, progress=False).is_complete


def intact(path: Path) -> Path:
    """Return a copy with all files as they were."""
    shutil.copytree(path, path.parent / "store-2")
    flip(path.parent / "store-2", X, 150)
    return path.parent / "store-2"
