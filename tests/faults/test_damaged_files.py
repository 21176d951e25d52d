"""Files that get shorter while a store is open: one error that names the file, and no process ends."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.damaged_files import CHECKS, NUM_NODES, X, save_graph, truncate
from support.servers import serving

import hoploom
from hoploom import PeerError

pytestmark = pytest.mark.timeout(120)
SCRIPT = """
import sys
sys.path[:0] = [{tests!r}]
from pathlib import Path
from support import damaged_files
getattr(damaged_files, sys.argv[1])(Path(sys.argv[2]))
print("outlived it")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_graph(tmp_path / "graph.store")
    return tmp_path / "graph.store"


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_a_file_that_gets_shorter_is_one_error(check: str, folder: Path) -> None:
    script = SCRIPT.format(tests=str(Path(__file__).parents[1]))
    given = [sys.executable, "-c", script, check, folder]
    ended = subprocess.run(given, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout) == (0, "outlived it\n"), ended.stderr[-2000:]


def test_a_server_outlives_a_file_that_gets_shorter(folder: Path) -> None:
    with serving(folder, [[]]) as (server,), hoploom.connect([server.address], timeout=6) as store:
        ids = torch.arange(NUM_NODES)
        (whole,) = store.features.gather([hoploom.store.Wanted("node", "x", ids)])
        truncate(folder, X)
        with pytest.raises(PeerError, match=f"{X} cannot be read any more"):  # no replica has that part
            store.features.gather([hoploom.store.Wanted("node", "x", ids)])
        good = ids[: NUM_NODES // 2]  # of the other part
        assert torch.equal(store.features.gather([hoploom.store.Wanted("node", "x", good)])[0], whole[good])
        assert server.process.poll() is None
        assert server.stop() == 0
