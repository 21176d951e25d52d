"""The examples run as they are, at small size, and learn: their accuracies are far from guessing."""

import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from pyarrow import parquet
from scipy import sparse
from support import ROOT

import hoploom
from hoploom.partition import partition
from hoploom.train import tensorfile

pytestmark = pytest.mark.usefixtures("one_thread")  # small tensors gain nothing from more

EXAMPLES = ROOT / "examples"
COVERED = {
    *("multi_gpu_sage", "multi_node_gcn", "custom_frontier_blocks", "link_prediction", "hetero_rgat"),
    *("worker_mode_sage", "server_client_sage", "real_graphs"),
}
LAUNCH_LIMIT = 110.0  # seconds: five processes import torch

Run = Callable[..., str]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Import an example; ranks that it spawns can import it too."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare the start of a process where one rank is asked for."""
    spawn = hoploom.spawn

    def call(fn: Callable[..., object], nprocs: int, args: Sequence[object]) -> None:
        if nprocs > 1:
            spawn(fn, nprocs, args, device="cpu")
        else:
            with hoploom.init(device="cpu") as context:
                fn(context, *args)

    monkeypatch.setattr(hoploom, "spawn", call)


@pytest.fixture
def run(alone: None, example: Callable[[str], ModuleType], capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Call an example's main with these words; what it prints."""

    def call(name: str, *words: object) -> str:
        example(name).main([str(word) for word in ("--folder", tmp_path, *words)])
        return capfd.readouterr().out

    return call


def number(text: str, what: str) -> float:
    """The last number printed behind these words."""
    return float(re.findall(rf"{what} (\d+\.\d+)", text)[-1])


def write_reddit(root: Path, num_nodes: int, num_classes: int) -> None:
    """The two files that PyG downloads for Reddit, with planted communities."""
    random = np.random.default_rng(0)
    label = np.arange(num_nodes) % num_classes
    feature = random.normal(size=(num_classes, 16))[label] + 2 * random.normal(size=(num_nodes, 16))
    row = np.repeat(np.arange(num_nodes), 10)
    col = random.integers(num_nodes // num_classes, size=len(row)) * num_classes + label[row]
    kinds = random.choice([1, 2, 3], size=num_nodes, p=[0.6, 0.2, 0.2])  # train, val, test
    root.joinpath("raw").mkdir(parents=True)
    np.savez(root / "raw" / "reddit_data.npz", feature=feature, label=label, node_types=kinds)
    sparse.save_npz(
        root / "raw" / "reddit_graph.npz", sparse.coo_matrix((np.ones(len(row)), (row, col)), (num_nodes, num_nodes))
    )


def test_every_example_is_run_and_short_enough_to_read() -> None:
    files = {path.stem: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert set(files) == COVERED
    assert max(files.values()) < 120


@pytest.mark.parametrize("num_processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_reddit_is_learned_from_the_files_that_pyg_downloads(num_processes: int, run: Run, tmp_path: Path) -> None:
    write_reddit(tmp_path / "Reddit", num_nodes=3000, num_classes=5)
    out = run("multi_gpu_sage", "--root", tmp_path / "Reddit", "--epochs", 4, "--processes", num_processes)
    assert re.findall(r"^Epoch (\d+):", out, re.MULTILINE) == ["01", "02", "03", "04"]  # rank 0 alone speaks
    assert number(out, "Test accuracy") > 0.8
    assert hoploom.open(tmp_path / "reddit.store").schema.node_type("node").num_nodes == 3000


def write_physics(path: Path, num_nodes: int) -> sparse.csr_matrix:
    """What PyG downloads for Coauthor-Physics, with five planted communities; its adjacency."""
    random = np.random.default_rng(0)
    label = np.arange(num_nodes) % 5
    row = np.repeat(np.arange(num_nodes), 4)
    col = random.integers(num_nodes // 5, size=len(row)) * 5 + label[row]
    adj = sparse.csr_matrix((np.ones(len(row)), (row, col)), (num_nodes, num_nodes))
    own = sparse.csr_matrix((np.ones(num_nodes), (np.arange(num_nodes), label)), (num_nodes, 5))
    attr = sparse.hstack([own, sparse.random(num_nodes, 35, 0.1, random_state=0)], "csr")
    names = ("data", "indices", "indptr", "shape")
    matrices = {f"{kind}_{name}": getattr(m, name) for kind, m in (("adj", adj), ("attr", attr)) for name in names}
    path.parent.mkdir(parents=True)
    np.savez(path, labels=label, **matrices)
    return adj


def test_physics_is_read_from_the_file_that_pyg_downloads(example: Callable[[str], ModuleType], tmp_path: Path) -> None:
    from torch_geometric.io import read_npz

    path = tmp_path / "Physics" / "raw" / "ms_academic_phy.npz"
    write_physics(path, 200)
    module = example("real_graphs")
    data, pygs = module.read_physics(module.find(tmp_path, "physics"), 8), read_npz(str(path))
    assert data.edge_index.tolist() == pygs.edge_index.tolist()
    assert (data.y.tolist(), data.x.shape) == (pygs.y.tolist(), (200, 8))
    assert sum(data[f"{split}_mask"].int() for split in ("train", "val", "test")).tolist() == [1] * 200


def test_real_graphs_are_learned_from_the_files_that_are_there(
    example: Callable[[str], ModuleType], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_physics(tmp_path / "raw" / "ms_academic_phy.npz", 600)
    module = example("real_graphs")
    monkeypatch.setattr(module, "CASES", {name: case for name, case in module.CASES.items() if "gat" not in name})
    out = run("real_graphs", tmp_path)
    assert "tolokers-sage: no tolokers.npz in" in out
    assert number(out, "physics-sage: accuracy") > 0.6  # one of five classes


def test_one_process_learns_a_generated_graph(run: Run) -> None:
    out = run("multi_gpu_sage", "--nodes", 3000, "--epochs", 6, "--processes", 1)
    assert number(out, "Test accuracy") > 0.3  # one of 41 classes
    assert number(out, "loss") < 3.0  # log(41) is 3.7


def torchrun(folder: Path, *words: object) -> str:
    """The multi-node example under torchrun, with two processes."""
    script = EXAMPLES / "multi_node_gcn.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    done = subprocess.run(
        [str(word) for word in (*command, "--folder", folder, *words)], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def history(folder: Path) -> list[dict[str, float]]:
    """Loss and metrics of every epoch up to the last checkpoint."""
    state = tensorfile.read(folder / "last.safetensors")
    return list(state["parts"]["standing"]["history"])


def test_the_multi_node_script_goes_on_where_it_stopped(run: Run, tmp_path: Path) -> None:
    assert "with 1 processes" in run("multi_node_gcn", "--nodes", 6000, "--epochs", 1)
    [first] = history(tmp_path)
    assert number(run("multi_node_gcn", "--nodes", 6000, "--epochs", 3), "Test accuracy") > 0.7  # one of 172 classes
    assert [epoch["epoch"] for epoch in history(tmp_path)] == [0, 1, 2]
    assert history(tmp_path)[0] == first


@pytest.mark.slow
def test_the_multi_node_script_learns_under_torchrun_and_goes_on_where_it_stopped(run: Run, tmp_path: Path) -> None:
    assert "with 1 processes" in run("multi_node_gcn", "--nodes", 6000, "--epochs", 1)
    [first] = history(tmp_path)
    out = torchrun(tmp_path, "--nodes", 6000, "--epochs", 3)
    assert out.count("with 2 processes") == 1
    assert number(out, "Test accuracy") > 0.7  # one of 172 classes
    assert [epoch["epoch"] for epoch in history(tmp_path)] == [0, 1, 2]
    assert history(tmp_path)[0] == first


def test_the_most_trusted_neighbours_tell_more_than_random_ones(run: Run, tmp_path: Path) -> None:
    words = ("--nodes", 3000, "--epochs", 3, "--processes", 1)
    trusted = run("custom_frontier_blocks", *words)
    assert tmp_path.joinpath("best.safetensors").exists()
    assert number(trusted, "Test accuracy") > 0.9
    assert (
        number(trusted, "Test accuracy") > number(run("custom_frontier_blocks", *words, "--uniform"), "accuracy") + 0.2
    )


def test_the_hook_keeps_the_most_trusted_sources_of_each_seed(example: Callable[[str], ModuleType]) -> None:
    module = example("custom_frontier_blocks")
    trust = torch.rand(100, generator=torch.Generator().manual_seed(0))

    class Everything:
        """A layer's graph in which sources 10 d to 10 d + 9 lead to seed d."""

        def sample_neighbors(self, seeds: torch.Tensor, fanout: int) -> hoploom.Edges:
            sources = (10 * seeds.view(-1, 1) + torch.arange(10)).flatten()
            return hoploom.Edges(sources, seeds.repeat_interleave(10), sources)

    kept = module.most_trusted(trust, 0, Everything(), torch.tensor([7, 2]))
    for seed in (2, 7):
        expected = 10 * seed + trust[10 * seed : 10 * seed + 10].topk(module.FANOUTS[0]).indices
        assert torch.equal(kept.sources[kept.destinations == seed], expected)


def test_no_link_that_is_asked_about_is_a_message_edge(example: Callable[[str], ModuleType]) -> None:
    module = example("link_prediction")
    _, edge_index = module.make_friends(400)
    links = module.split_links(edge_index)
    ends = {name: {frozenset(pair) for pair in pairs.T.tolist()} for name, pairs in links.items()}
    everything = frozenset().union(*ends.values())
    assert sum(map(len, ends.values())) == len(everything)  # no pair is in two splits, in either direction
    assert everything == {frozenset(pair) for pair in edge_index.T.tolist() if pair[0] != pair[1]}
    shares = {name: len(pairs) / len(everything) for name, pairs in ends.items()}
    assert shares == pytest.approx(module.SHARES, abs=0.001)


def test_links_are_predicted_far_better_than_by_chance(run: Run) -> None:
    out = run("link_prediction", "--nodes", 3000, "--epochs", 4, "--processes", 1)
    assert number(out, "AUROC") > 0.75


def test_papers_are_classified_and_every_prediction_is_written(run: Run, tmp_path: Path) -> None:
    out = run("hetero_rgat", "--nodes", 2000, "--epochs", 3, "--processes", 1)
    assert number(out, "accuracy of the test papers") > 0.5  # one of 16 fields
    table = parquet.read_table(tmp_path / "predictions" / "paper")
    assert sorted(table["id"].to_pylist()) == list(range(2000))
    assert table.column_names == ["id", "embedding", "prediction"]


# --- clusters ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the examples, and beside them what their cluster files serve: a store in two parts."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(EXAMPLES, folder / "examples")
    hoploom.generate(folder / "graph.store", num_nodes=4000, num_features=16, num_classes=5, homophily=0.8)
    partition(folder / "graph.store", folder / "demo" / "graph.parts", 2, fanouts=[15, 10])
    return folder


def started(checkout: Path, *words: str) -> str:
    """What a command prints in that folder."""
    done = subprocess.run(
        [sys.executable, "-m", *words, "--epochs", "5"],
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=LAUNCH_LIMIT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def launched(checkout: Path, cluster: str, script: str) -> str:
    return started(checkout, "hoploom", "launch", f"examples/{cluster}.toml", "--", f"examples/{script}.py")


def curve(text: str) -> list[tuple[float, float]]:
    """Loss and validation accuracy of every epoch."""
    found = re.findall(r"Epoch \d+: loss (\S+), validation accuracy (\S+)$", text, re.MULTILINE)
    return [(float(loss), float(accuracy)) for loss, accuracy in found]


def in_one_process(
    name: str, checkout: Path, example: Callable[[str], ModuleType], capfd: pytest.CaptureFixture[str]
) -> list[tuple[float, float]]:
    """The curve of a cluster's script where the whole store is on this host."""
    example(name).main(["--store", str(checkout / "demo" / "graph.parts"), "--epochs", "5"])
    return curve(capfd.readouterr().out)


@pytest.mark.parametrize("script", ["worker_mode_sage", "server_client_sage"])
def test_the_scripts_of_clusters_learn_in_one_process(
    script: str, checkout: Path, example: Callable[[str], ModuleType], capfd: pytest.CaptureFixture[str]
) -> None:
    assert in_one_process(script, checkout, example, capfd)[-1][1] > 0.6  # one of five classes


@pytest.mark.slow
def test_two_hosts_that_map_a_part_each_learn(checkout: Path) -> None:
    out = launched(checkout, "worker_mode", "worker_mode_sage")
    assert "one/trainers | rank 0 of 2 maps 1 of 2 parts" in out
    assert "two/trainers | rank 1 of 2 maps 1 of 2 parts" in out
    assert re.findall(r'^(\w+)/server +\| {"ready": .*\[(\d)\]', out, re.MULTILINE) in (
        [("one", "0"), ("two", "1")],
        [("two", "1"), ("one", "0")],
    )
    assert curve(out)[-1][1] > 0.6  # one of five classes
    shares = re.findall(r"rank \d: \S+ rows held in .*; (\S+) % of", out)
    assert len(shares) == 2
    assert min(map(float, shares)) > 20  # a cache of 20 % of the rows, chosen by visits


@pytest.mark.slow
def test_trainers_without_a_graph_learn_what_one_process_with_all_of_it_learns(
    checkout: Path,
    example: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    out = launched(checkout, "server_client", "server_client_sage")
    assert all(f"train1/trainer-{rank} | rank {rank} of 2 maps 0 of 2 parts" in out for rank in range(2))
    module = example("server_client_sage")
    monkeypatch.setattr(module, "BATCH_SIZE", 2 * module.BATCH_SIZE)  # the same seeds a step, with half the ranks
    expected = in_one_process("server_client_sage", checkout, example, capfd)
    assert expected[-1][1] > 0.6
    assert len(curve(out)) == 5
    for found, alone in zip(curve(out), expected, strict=True):
        assert found == pytest.approx(alone, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["worker_mode_sage", "server_client_sage"])
def test_the_scripts_of_clusters_run_under_plain_torchrun(script: str, checkout: Path) -> None:
    words = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", f"examples/{script}.py")
    out = started(checkout, *words, "--store", "demo/graph.parts")
    assert "rank 0 of 2 maps 2 of 2 parts" in out
    assert curve(out)[-1][1] > 0.6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "what", "least"),
    [("custom_frontier_blocks", "accuracy", 0.9), ("link_prediction", "AUROC", 0.7), ("hetero_rgat", "papers", 0.5)],
)
def test_two_processes_learn_as_well(name: str, what: str, least: float, run: Run) -> None:
    assert number(run(name, "--nodes", 3000, "--epochs", 6, "--processes", 2), what) > least
