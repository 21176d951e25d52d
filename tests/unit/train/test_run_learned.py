"""Runs with learned rows: on request or by themselves, read by the other commands, and as good as can be."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support.learned_workers import shop
from support.proportions import mrr_of_tastes
from torch import Tensor

import hoploom
from hoploom import ops
from hoploom.cli import main
from hoploom.nn.embedding import Embedding
from hoploom.ranks.context import init
from hoploom.train.checkpoint import Checkpoint, learned_parts
from hoploom.train.runs.run import complete_setup, load_run, run
from hoploom.train.runs.run_file import parse_run_file, read_run_file

pytestmark = pytest.mark.usefixtures("no_sync", "one_thread")
Captured = pytest.CaptureFixture[str]

RUN = """
store = "shop.store"
seed = 3
[model]
name = "rsage"
hidden = 8
[loader]
fanouts = [4, 3]
batch_size = 40
threads = 1
[train]
epochs = 2
[output]
loggers = []
"""
LINE = "'user' has no features: its nodes have learned rows of 8 numbers"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with a run.toml, and a shop whose users have no features."""
    store = shop()
    data = {"user": {}, "item": {"x": store["item"].x[:], "y": store["item"].y[:]}}
    bought = torch.randint(0, 250, (2, 3000), generator=torch.Generator().manual_seed(2))
    edges = {("user", "buys", "item"): bought, ("item", "rev_buys", "user"): bought.flip(0)}
    order = torch.randperm(250, generator=torch.Generator().manual_seed(1))
    splits = {"train": order[:150].sort().values, "val": order[150:200].sort().values}
    splits["test"] = order[200:].sort().values
    made = hoploom.from_tensors(data, edges, num_nodes={"user": 403, "item": 250}, splits={"item": splits})
    made.save(tmp_path / "shop.store")
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path


def command(here: Path, verb: str, *arguments: str, output: str = "run") -> int:
    if verb == "train":
        return main(["train", str(here / "run.toml"), "--set", f"output.folder={here / output}", *arguments])
    return main([verb, str(here / output), *arguments])


def rows_in(here: Path, name: str = "best", output: str = "run", **options: Any) -> Tensor:
    """The users' rows in a checkpoint."""
    with init(device="cpu") as context:
        embedding = Embedding(hoploom.open(here / "shop.store"), "user", **({"dim": 8} | options))
        Checkpoint(here / output, context).restore(name, learned_parts(embedding.store))
    return embedding.rows


def result(here: Path, output: str = "run") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((here / output / "result.json").read_text())
    return {name: value for name, value in found.items() if name != "seconds"}


def test_a_type_without_features_learns_rows_by_itself(here: Path, capsys: Captured) -> None:
    """evaluate, infer and load_run then read the rows of the best epoch."""
    assert command(here, "train", "--set=train.epochs=6") == 0
    assert result(here)["best_epoch"] < 6
    assert f"hoploom: {LINE}" in capsys.readouterr().err.splitlines()
    test = result(here)["test"]
    assert command(here, "evaluate", "--split", "test", "--json") == 0
    assert json.loads(capsys.readouterr().out)["metrics"] == test
    loaded = load_run(here / "run")
    (learned,) = loaded.store.learned
    assert isinstance(learned, Embedding)
    best = rows_in(here)
    assert torch.equal(learned.rows, best)
    assert not torch.equal(best, Embedding(hoploom.open(here / "shop.store"), "user", dim=8, seed=3).rows)
    assert command(here, "infer", "--columns", "prediction") == 0
    (path,) = (here / "run" / "nodes" / "item").glob("*.parquet")
    written = torch.tensor(pytest.importorskip("pyarrow.parquet").read_table(path)["prediction"].to_pylist())
    whole = hoploom.NeighborLoader(loaded.store, [-1, -1], input_nodes="item", batch_size=250, mode="blocks")
    with torch.no_grad():
        assert torch.equal(written, loaded.model(next(iter(whole)))["item"].argmax(dim=1))


def test_a_trained_run_is_read_without_its_optimizers_state(
    here: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither drawn, nor is there memory for the state."""
    assert command(here, "train", "--set=optimizer.learned=lazy_adam") == 0
    best = rows_in(here, optimizer="lazy_adam")
    for path in (here / "run").glob("*.state"):
        path.unlink()

    def never(*given: Any, **options: Any) -> None:
        raise AssertionError("drawn")

    monkeypatch.setattr(ops, "draw_rows", never)
    (learned,) = load_run(here / "run").store.learned
    assert isinstance(learned, Embedding)
    assert (learned.state.numel(), learned.rows.equal(best)) == (0, True)
    assert not learned(torch.tensor([1])).requires_grad
    assert command(here, "evaluate", "--split", "test") == 0
    assert command(here, "infer", "--columns", "prediction") == 0
    assert main(["check", "--leaks", str(here / "run.toml")]) == 0


def test_learned_rows_count_as_parameters(here: Path, capsys: Captured) -> None:
    assert command(here, "train") == 0
    weights = sum(each.numel() for each in load_run(here / "run").model.parameters())
    assert result(here)["num_parameters"] == weights + 403 * 8
    assert f"{weights + 403 * 8:,} parameters" in capsys.readouterr().out


def test_a_stopped_run_resumes_with_its_rows(here: Path) -> None:
    assert command(here, "train", "--set=train.epochs=1") == 0
    assert command(here, "train", "--resume") == 0
    assert command(here, "train", output="whole") == 0
    assert torch.equal(rows_in(here, "last"), rows_in(here, "last", "whole"))
    assert result(here) == result(here, "whole")


def test_widths_and_their_optimizer_are_keys(here: Path, capsys: Captured) -> None:
    """Also beside features."""
    keys = ["model.learned={user = 5, item = 3}", "optimizer.learned=lazy_adam", "optimizer.learned_lr=0.02"]
    assert command(here, "train", *(f"--set={key}" for key in keys)) == 0
    assert LINE not in capsys.readouterr().err
    learned = {each.node_type: each for each in load_run(here / "run").store.learned}
    users = learned["user"]
    assert isinstance(users, Embedding)
    assert (users.dim, learned["item"].join) == (5, "cat")
    with init(device="cpu") as context:
        setup = complete_setup(
            read_run_file(here / "run" / "run.toml"), hoploom.open(here / "shop.store"), context, trains=True
        )
    trained = setup.store.learned[0]
    assert isinstance(trained, Embedding)
    assert (trained.rule.name, trained.lr) == ("lazy_adam", 0.02)


PLACES: list[tuple[str, list[str]]] = [
    ("{user = 8}", []),
    ("{user = 128}", ["user"]),
    ("{user = 40, item = 40}", ["item"]),  # 66 kB, and 41 kB more
]


@pytest.mark.parametrize(("widths", "on_disk"), PLACES, ids=[widths for widths, _ in PLACES])
def test_only_rows_that_exceed_the_memory_are_in_the_scratch_folder(
    here: Path, widths: str, on_disk: list[str]
) -> None:
    keys = [f"model.learned={widths}", "memory='70KB'", f"scratch={here}"]
    with init(device="cpu") as context:
        setup = complete_setup(
            parse_run_file(RUN, keys, folder=here),
            hoploom.open(here / "shop.store", memory="70KB", scratch=here),
            context,
            trains=True,
        )
    files = {learned.node_type: learned._file for learned in setup.store.learned if isinstance(learned, Embedding)}
    assert [name for name, file in files.items() if file >= 0] == on_disk


WRONG = [
    (["model.learned={usr = 5}"], r"model.learned.*names 'usr', no node type; there are \['user', 'item'\]"),
    (["model.learned={user = 0}"], r"model.learned.*0"),
    (["optimizer.learned=adam"], r"optimizer.learned.*adam.*lazy_adam"),
    (["optimizer.learned_lr=0"], r"optimizer.learned_lr.*0"),
    (["memory='1GB'", "scratch=/no/such/folder"], r"/no/such/folder"),
    (["train.precision=fp16"], r"fp16"),
]


@pytest.mark.parametrize(("keys", "said"), WRONG, ids=[" ".join(keys) for keys, _ in WRONG])
def test_wrong_keys_are_one_line(here: Path, capsys: Captured, keys: list[str], said: str) -> None:
    assert command(here, "train", *(f"--set={key}" for key in keys)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("hoploom: ")
    assert re.search(said, error)


@pytest.mark.slow  # two processes import torch
def test_two_processes_learn_the_rows_of_one(here: Path, capfd: Captured) -> None:
    assert command(here, "train", "--processes", "2") == 0
    assert capfd.readouterr().err.count(LINE) == 1
    assert command(here, "train", output="one") == 0
    by_two, by_one = rows_in(here, "last"), rows_in(here, "last", "one")
    assert float((by_two - by_one).norm() / by_one.norm()) < 1e-4  # Adam makes much of the last bits
    assert command(here, "evaluate", "--split", "test", "--json") == 0


# --- as good as can be ------------------------------------------------------------------------------

BLOCKS, NODES, DEGREE, OWN = 4, 8000, 16, 0.5  # half of a node's links are to its own block


def blocks(folder: Path) -> float:
    """Write a stochastic block model, whose labels are the blocks. Return the best accuracy of its test split.

    All blocks have the same degrees. All blocks but its own are as likely for a neighbour, so the likelihood of a
    node's neighbours, given their true blocks, is largest for the block that most of them have.
    """
    draw = torch.Generator().manual_seed(1)
    block, num_links = torch.arange(NODES) % BLOCKS, NODES * DEGREE // 2
    ends = torch.randint(NODES, (num_links,), generator=draw)
    others = (block[ends] + 1 + torch.randint(BLOCKS - 1, (num_links,), generator=draw)) % BLOCKS
    chosen = torch.where(torch.rand(num_links, generator=draw) < OWN, block[ends], others)
    links = torch.stack([ends, chosen + BLOCKS * torch.randint(NODES // BLOCKS, (num_links,), generator=draw)])
    links = torch.cat([links, links.flip(0)], dim=1)
    order, cuts = torch.randperm(NODES, generator=draw), (NODES * 8 // 10, NODES * 85 // 100)
    named = zip(("train", "val", "test"), order.tensor_split(cuts), strict=True)
    splits = {name: ids.sort().values for name, ids in named}
    hoploom.from_tensors({"y": block}, links, num_nodes=NODES, splits=splits).save(folder / "blocks.store")
    counts = torch.zeros(NODES, BLOCKS).index_put_((links[1], block[links[0]]), torch.tensor(1.0), accumulate=True)
    is_best = (counts == counts.amax(dim=1, keepdim=True)).double()  # a draw among the best
    chance = is_best[torch.arange(NODES), block] / is_best.sum(dim=1)
    return float(chance[splits["test"]].mean())


def test_blocks_are_found_without_features(tmp_path: Path) -> None:
    bayes = blocks(tmp_path)
    assert 0.85 < bayes < 0.95
    text = 'store = "blocks.store"\n[loader]\nfanouts = [-1, -1]\nbatch_size = 256\nthreads = 1\n'
    with init(device="cpu") as context:
        found = run(
            parse_run_file(text, ["train.epochs=3", "output.loggers=[]"], folder=tmp_path), context, progress=False
        )
    assert found.test["accuracy"] > 0.95 * bayes


TASTES, KINDS, USERS, LINKS = 20, 30, 1500, 10  # tastes, items of each, users, and items that a user rates
CANDIDATES = 100


RECOMMEND = """
store = "tastes.store"
[task]
kind = "link-prediction"
relation = "rates"
loss = "softmax"
negatives = 10
metrics = ["mrr"]
val_share = 0.1
test_share = 0.05
[model]
name = "rsage"
[loader]
fanouts = [10]
batch_size = 256
threads = 1
"""


def test_tastes_are_found_without_features(tmp_path: Path) -> None:
    """Every user rates random items of one taste, and nothing else tells tastes apart."""
    draw = torch.Generator().manual_seed(1)
    items = torch.stack([torch.randperm(KINDS, generator=draw)[:LINKS] for _ in range(USERS)])
    rated = (torch.arange(USERS)[:, None] % TASTES * KINDS + items).view(-1)
    links = torch.stack([torch.arange(USERS).repeat_interleave(LINKS), rated])
    edges = {("user", "rates", "item"): links, ("item", "rev_rates", "user"): links.flip(0)}
    store = hoploom.from_tensors({"user": {}, "item": {}}, edges, num_nodes={"user": USERS, "item": TASTES * KINDS})
    store.save(tmp_path / "tastes.store")
    keys = ["train.epochs=2", "output.loggers=[]", f"task.eval_negatives={CANDIDATES}"]
    with init(device="cpu") as context:
        found = run(parse_run_file(RECOMMEND, keys, folder=tmp_path), context, progress=False)
    assert found.outcome.best is not None
    assert found.outcome.best > 0.95 * mrr_of_tastes(TASTES, CANDIDATES, TASTES * KINDS)


def test_exported_rows_are_features_of_another_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    learned = Embedding(shop(), "user", dim=8)
    learned.export("rows.parquet")
    known = torch.arange(learned.rows.shape[0])
    pq.write_table(pa.table({"from": known[1:].numpy(), "to": known[:-1].numpy()}), "knows.parquet")
    Path("graph.toml").write_text(
        '[nodes.user]\nfiles = "rows.parquet"\nid = "id"\nfeatures = "row"\n'
        '[edges."user knows user"]\nfiles = "knows.parquet"\nsource = "from"\ndestination = "to"\n'
    )
    assert main(["build", "graph.toml", "-o", "people.store"]) == 0
    store = hoploom.open("people.store")
    originals = torch.from_numpy(store.ids("user").original(range(len(known))))
    assert sorted(originals.tolist()) == known.tolist()
    assert torch.equal(store["user"].x[:], learned.rows[originals])
