"""Files that get shorter while a store is open: one error that names the file, and no process ends."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.damaged_files import CHECKS, NUM_NODES, X, save_graph, truncate
from support.servers import serving

import hoploom
from hoploom import StoreError

pytestmark = pytest.mark.timeout(120)
SCRIPT = """
import sys, traceback
sys.path[:0] = [{tests!r}]
from pathlib import Path
from support import damaged_files
for check in damaged_files.CHECKS:
    folder = Path({folder!r}) / check.__name__
    folder.mkdir()
    damaged_files.save_graph(folder / "graph.store")
    try:
        check(folder / "graph.store")
        print(check.__name__, "outlived it", flush=True)
    except Exception:
        traceback.print_exc()
"""


@pytest.fixture(scope="module")
def outlived(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[str], str]:
    """The exit status of a process that damages one store after the other, and what it says; its errors, too."""
    script = SCRIPT.format(tests=str(Path(__file__).parents[1]), folder=str(tmp_path_factory.mktemp("damaged")))
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    return ended.returncode, ended.stdout.splitlines(), f"exit status {ended.returncode}\n{ended.stderr[-6000:]}"


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_a_file_that_gets_shorter_is_one_error(check: str, outlived: tuple[int, list[str], str]) -> None:
    _, lines, errors = outlived
    assert f"{check} outlived it" in lines, errors


def test_a_process_whose_files_got_shorter_ends_cleanly(outlived: tuple[int, list[str], str]) -> None:
    status, _, errors = outlived
    assert status == 0, errors


def test_a_server_outlives_a_file_that_gets_shorter(tmp_path: Path) -> None:
    folder = tmp_path / "graph.store"
    save_graph(folder)
    with serving(folder, [[]]) as (server,), hoploom.connect([server.address], timeout=6) as store:
        ids = torch.arange(NUM_NODES)
        (whole,) = store.features.gather([hoploom.store.Wanted("node", "x", ids)])
        truncate(folder, X)
        with pytest.raises(StoreError, match=f"{X} cannot be read any more"):  # no replica has that part
            store.features.gather([hoploom.store.Wanted("node", "x", ids)])
        good = ids[: NUM_NODES // 2]  # of the other part
        assert torch.equal(store.features.gather([hoploom.store.Wanted("node", "x", good)])[0], whole[good])
        assert server.process.poll() is None
        assert server.stop() == 0
