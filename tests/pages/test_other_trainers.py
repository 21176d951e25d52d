"""Lightning and accelerate with two processes: each seed once, whoever makes the loader; and their examples.

Neither wraps our loaders again, since they are no DataLoader of torch; both save and restore their position.
"""

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from support import trainer_workers
from support.graphs import ring
from support.trainer_workers import NUM_TRAIN

import hoploom
from hoploom.ingest.synthetic import generate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT = 240  # seconds that a command may take
EXAMPLES = Path(__file__).parents[2] / "examples"
PYTHON, WORKER = [sys.executable], str(Path(trainer_workers.__file__))
TORCHRUN = [*PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LAUNCH = [*PYTHON, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
LAUNCH += ["--main_process_port", "0"]
WAYS = {  # who makes the loaders, and who starts the ranks
    "lightning-method": (PYTHON, "lightning-method"),
    "lightning-direct-torchrun": (TORCHRUN, "lightning-direct"),
    "accelerate-torchrun": (TORCHRUN, "accelerate"),
    "accelerate-launch": (LAUNCH, "accelerate"),
}
Notes = dict[tuple[str, int], list[list[int]]]  # by split and epoch: the seeds of each batch


def run(command: list[str], *, code: int = 0) -> str:
    paths = [str(Path(WORKER).parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": ":".join(filter(None, paths))}, timeout=LIMIT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert (done.returncode == 0) == (code == 0), done.stdout[-5000:]
    return done.stdout


def noted(folder: Path, name: str) -> list[Notes]:
    ranks = []
    for rank in range(2):
        notes: Notes = defaultdict(list)
        for split, epoch, seeds in json.loads((folder / f"{name}-{rank}.json").read_text()):
            notes[split, epoch].append(seeds)
        ranks.append(notes)
    return ranks


@pytest.mark.parametrize("way", WAYS)
def test_every_seed_comes_once_over_the_ranks(way: str, tmp_path: Path) -> None:
    pytest.importorskip(way.partition("-")[0])
    launcher, how = WAYS[way]
    hoploom.from_pyg(ring(100)).save(tmp_path / "graph.store")
    run([*launcher, WORKER, how, str(tmp_path), "whole", "-1"])
    whole = noted(tmp_path, "whole")
    for epoch in (0, 1):
        for split, num_seeds in (("train", NUM_TRAIN), ("val", 31)):
            batches = [rank[split, epoch] for rank in whole]
            assert sorted(seed for rank in batches for batch in rank for seed in batch) == list(range(num_seeds))
            assert len(batches[0]) == len(batches[1]) == -(-num_seeds // 16)
    assert whole[0]["train", 0] != whole[0]["train", 1]  # shuffled anew
    if how != "accelerate":
        return
    for name, num_steps in (("begun", 3), ("rest", -1)):  # a stopped epoch goes on
        run([*launcher, WORKER, how, str(tmp_path), name, str(num_steps)])
    for rank, begun, rest in zip(whole, noted(tmp_path, "begun"), noted(tmp_path, "rest"), strict=True):
        assert begun["train", 0] + rest["train", 0] == rank["train", 0]
        assert rest["train", 1] == rank["train", 1]


def test_lightning_goes_on_at_the_very_next_batch_from_a_checkpoint_of_any_step(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    hoploom.from_pyg(ring(100)).save(tmp_path / "graph.store")
    run([*TORCHRUN, WORKER, "lightning-resumed", str(tmp_path), "whole", "-1"])
    whole = noted(tmp_path, "whole")
    num_steps = len(whole[0]["train", 0])
    for done in range(1, 2 * num_steps):
        for before, rest in zip(whole, noted(tmp_path, f"from-{done}"), strict=True):
            epoch, step = divmod(done, num_steps)
            assert rest["train", epoch] == before["train", epoch][step:], f"from step {done}"
            assert epoch == 1 or rest["train", 1] == before["train", 1]
            assert len(rest["val", 1]) == len(before["val", 1])


def test_a_loader_made_before_lightnings_process_group_is_one_clear_error(tmp_path: Path) -> None:
    """Lightning starts the script again for each further rank, without RANK."""
    pytest.importorskip("lightning")
    hoploom.from_pyg(ring(100)).save(tmp_path / "graph.store")
    said = run([*PYTHON, WORKER, "lightning-direct", str(tmp_path), "none", "-1"], code=1)
    errors = {line for line in said.splitlines() if line.startswith("hoploom.errors.")}
    assert any("RANK is not set" in line and "with Lightning in train_dataloader()" in line for line in errors)


@pytest.mark.parametrize(
    ("command", "script"),
    [(PYTHON, "lightning_ddp.py"), (TORCHRUN, "accelerate_loop.py")],
    ids=lambda one: str(one)[-12:],
)
def test_the_example_learns_and_goes_on(command: list[str], script: str, tmp_path: Path) -> None:
    pytest.importorskip(script.partition("_")[0])
    store = generate(tmp_path / "graph.store", num_nodes=2000, num_features=16, num_classes=4)
    said = run([*command, str(EXAMPLES / script), str(tmp_path), "2"])
    (accuracy,) = re.findall(r"(?:accuracy'?:?) ([\d.]+)(?: of|, 'seeds)", said)[-1:]
    assert float(accuracy) > 0.8
    assert re.search(rf"\b{len(store.split('train'))}\b", said), "the ranks' seeds are not summed to all of them"
    again = run([*command, str(EXAMPLES / script), str(tmp_path), "3", *["--resume"][: "lightning" in script]])
    assert "Epoch 2" in again or ("epoch 3" in again and "epoch 2" not in again)
