"""A bit that flips in a file of a store: who serves it or trains on it with `verify` is told, and stops."""

import os
from pathlib import Path

import pytest
from support.damage import INDICES, X, flip
from support.graphs import ring, save_in_parts
from support.servers import serving
from support.until import until

import hoploom
from hoploom import StoreError
from hoploom.ranks.context import init
from hoploom.store.verification import Verification
from hoploom.train.runs import read_run_file, run

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
