"""PyG's script for several GPUs runs with one import changed: seeds divided by hand, and rank 0 evaluates alone."""

import re
import subprocess
import sys

import pytest
from support import TESTS
from support.ports import free_ports


@pytest.mark.slow  # the quick tests run plain DDP with our loaders on two ranks
@pytest.mark.timeout(240)
def test_rank_0_reads_all_seeds_of_its_validation_loader_and_not_half_of_them() -> None:
    command = [sys.executable, str(TESTS / "support" / "pyg_scripts" / "tutorial.py"), str(free_ports(1)[0])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    told = done.stdout + done.stderr
    assert told.count("read 350 of 350 seeds in 3 steps") == 6
    assert "each of 2 ranks reads the 350 seeds that it was given, in 3 steps; 1 seeds of the split 'train'" in told
    assert len(re.findall(r"epoch \d: (\d+) of \1 for validation", told)) == 3
