"""PyG's scripts for several GPUs run with one import changed: seeds divided by hand, and rank 0 evaluates alone."""

import re
import subprocess
import sys

import pytest
from support import TESTS
from support.ports import free_ports

SCRIPTS = TESTS / "support" / "pyg_scripts"
pytestmark = pytest.mark.timeout(240)


def output_of(name: str, *launcher: str) -> str:
    words = [*launcher, str(SCRIPTS / name), *([] if launcher else [str(free_ports(1)[0])])]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow  # the quick tests run plain DDP with our loaders on two ranks
def test_the_multi_gpu_tutorial() -> None:
    """Rank 0 reads all seeds of its validation loader, not half of them."""
    told = output_of("tutorial.py")
    assert told.count("read 350 of 350 seeds in 3 steps") == 6
    assert "each of 2 ranks reads the 350 seeds that it was given, in 3 steps; 1 seeds of the split 'train'" in told
    assert len(re.findall(r"epoch \d: (\d+) of \1 for validation", told)) == 3


@pytest.mark.slow
def test_the_example_of_several_nodes() -> None:
    """Under torchrun; layer-wise inference on rank 0 alone, with a field added to the loader's data."""
    told = output_of("multi_node.py", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert told.count("read 600 seeds") == 6
    assert re.search(r"epoch 3: accuracy (0\.[89]\d|1\.00) of 1200 nodes", told)


@pytest.mark.slow
def test_the_example_taobao() -> None:
    """Loaders made before the process group, and links; the other rank never waits in a barrier."""
    told = output_of("taobao.py")
    assert len(re.findall(r"auc 0\.\d+ of (\d+) of \1 links", told)) == 2
