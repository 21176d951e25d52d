"""A mistake that all ranks of torchrun make is printed once; a rank's own is printed as Python does."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import torch
import hoploom
{before}
with hoploom.init(device={device!r}, timeout=30) as context:
    data = hoploom.generate("{folder}/graph.store" + str(context.rank), num_nodes=100, num_features=4)
    {inside}
"""
LOADER = 'hoploom.NeighborLoader(data, [2], "trian")'
GROUP = 'torch.distributed.init_process_group("gloo")'


def said_by(folder: Path, before: str = "", inside: str = LOADER, device: str = "cpu") -> str:
    """What two ranks of torchrun print on stderr until torchrun tells of their ends."""
    script = folder / "train.py"
    script.write_text(SCRIPT.format(before=before, inside=inside, device=device, folder=folder))
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    return done.stderr.partition("torch/distributed/elastic/")[0].partition("ChildFailedError")[0]


@pytest.mark.parametrize("before", ["", GROUP])
def test_a_mistake_of_all_ranks_is_printed_once_with_its_line(before: str, tmp_path: Path) -> None:
    said = said_by(tmp_path, before)
    assert said.count("ConfigError") == 1, said
    assert re.search(r"^(?:\[rank0\]: )?hoploom: \S+/train\.py:7: ConfigError: .*trian", said, re.MULTILINE), said
    assert "Traceback" not in said.partition("ConfigError")[0]


def test_a_mistake_before_ranks_meet_is_printed_once(tmp_path: Path) -> None:
    said = said_by(tmp_path, device="tpu")
    assert said.count("ConfigError") == 1, said


def test_a_mistake_of_one_rank_is_printed_by_that_rank(tmp_path: Path) -> None:
    said = said_by(tmp_path, inside=f"context.rank and {LOADER}; context.barrier()")
    assert len(re.findall(r"^(?:\[rank1\]: )?\S*ConfigError: ", said, re.MULTILINE)) == 1, said
    assert "PeerError: rank 0 of 2 was" in said
