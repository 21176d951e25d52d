"""A run made from run.toml and a store: setup, model, schedules, loaders, and the links that are held out."""

import re
import sys
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import hoploom
from hoploom import ConfigError, DataError, HoploomError, Store, StoreError
from hoploom.ingest.synthetic import generate
from hoploom.ranks.context import init
from hoploom.train.runs.link_splits import LinkShares, hold_out, write_links
from hoploom.train.runs.run import (
    eval_loader,
    make_model,
    relation_of,
    run,
    train_loader,
    training_setup,
)
from hoploom.train.runs.run_file import RunFile, parse_run_file
from hoploom.train.runs.schedules import make_optimizer, make_scheduler


def small_store(**fields: Any) -> Store:
    """Ten nodes in a ring."""
    ring = torch.stack([torch.arange(10), (torch.arange(10) + 1) % 10])
    splits = {"train": torch.arange(6), "val": torch.arange(6, 8), "test": torch.arange(8, 10), "none": torch.arange(0)}
    x = torch.randn(10, 3)
    return hoploom.from_tensors({"x": x, "y": torch.arange(10) % 3} | fields, ring, splits=splits)


def run_file_with(*overrides: str) -> RunFile:
    return parse_run_file('store = "s"\n[loader]\nfanouts = [2]\n', overrides)


DISAGREEMENTS: list[tuple[list[str], dict[str, Any], type[HoploomError], str]] = [
    (["task.label=z"], {}, ConfigError, r"^--set task.label=z: task.label names 'z', no field of 'node'"),
    (["task.val=valid"], {}, ConfigError, r'valid.*has the splits .*; task.val = "" does without'),
    (["task.train=trian"], {}, ConfigError, r"the split 'trian' is in no node type"),
    (["task.train=none"], {}, ConfigError, r"the split 'none' of 'node' is empty"),
    (["task.node_type=nod"], {}, ConfigError, r"names 'nod', no node type.*did you mean 'node'\?"),
    (["task.num_classes=2"], {}, DataError, r"node 2 is a seed with the label y=2"),
    (["task.label=m"], {"m": torch.ones(10, 4)}, ConfigError, r'rows of shape \[4\].*task.kind = "multi-label"'),
    (
        ["task.label=m"],
        {"m": torch.ones(10).long().index_fill(0, torch.tensor(4), -1)},
        DataError,
        r"label m=-1; .*a null label in a table becomes -1",
    ),
    (["task.label=m"], {"m": torch.zeros(10).long()}, ConfigError, r"the largest label 'm' of the splits is 0"),
    (["train.monitor=acuracy"], {}, ConfigError, r"train.monitor is 'acuracy'.*did you mean 'accuracy'\?"),
    (["loader.weighted=true"], {}, ConfigError, r"built without weight_attr"),
    (["loader.temporal=last"], {}, ConfigError, r"built without time_attr"),
    (["loader.relation_fanouts.too=[1]"], {}, ConfigError, r"names 'too', no relation; there are \['node to node'\]"),
    (["task.kind=link-prediction", "task.relation=a b c"], {}, ConfigError, r"names 'a b c', no relation"),
    (["task.kind=link-prediction", "task.links=nowhere"], {}, ConfigError, r"nowhere has no train, val or test as"),
]


@pytest.mark.parametrize(
    ("overrides", "fields", "kind", "message"), DISAGREEMENTS, ids=[" ".join(entry[0]) for entry in DISAGREEMENTS]
)
def test_a_run_file_that_does_not_fit_the_store_is_refused(
    overrides: list[str], fields: dict[str, Any], kind: type[HoploomError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        training_setup(run_file_with(*overrides), small_store(**fields))


def test_a_mistyped_short_name_of_a_relation_gets_a_hint() -> None:
    edges = {
        ("author", "writes", "paper"): torch.zeros(2, 1).long(),
        ("paper", "cites", "paper"): torch.ones(2, 1).long(),
    }
    schema = hoploom.from_tensors({"author": {}, "paper": {}}, edges, num_nodes={"author": 1, "paper": 2}).schema
    for name, meant in {"writs": "writes", "author writ paper": "author writes paper"}.items():
        with pytest.raises(ConfigError, match=f"task.relation names '{name}', no relation; .* did you mean '{meant}'"):
            relation_of(run_file_with(), "task.relation", schema, name)


def test_the_classes_of_all_splits_are_counted() -> None:
    labels = torch.zeros(10, dtype=torch.int64)
    labels[9] = 5  # in the test split only
    assert training_setup(run_file_with(), small_store(y=labels)).num_outputs == 6
    assert training_setup(run_file_with("task.num_classes=9"), small_store(y=labels)).num_outputs == 9


FACTORIES = [  # my_model.py, what the message says
    ("import nowhere", "my_model cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
    ("def built(store, n): ...", r"my_model \(/.*my_model.py\) has no function 'make'; write one"),
    ("make = 128", r"my_model \(/.*my_model.py\) has no function 'make'; write one"),
    ("def make(store, n): return 3", r"returned a int; make it a torch.nn.Module"),
    ("def make(store): ...", r"failed: TypeError: make\(\) takes 1 positional argument but 2 were given"),
]


@pytest.mark.parametrize(("code", "message"), FACTORIES, ids=["import", "name", "number", "type", "signature"])
def test_a_factory_that_makes_no_model_is_named(
    graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"my_model_{abs(hash(code))}"
    (tmp_path / f"{name}.py").write_text(code)
    run_file = parse_run_file(f'store = "graph.store"\n[model]\nfactory = "{name}:make"\n', folder=tmp_path)
    setup = training_setup(run_file, hoploom.open(graph))
    with pytest.raises(ConfigError, match=message.replace("my_model", name)) as raised:
        make_model(run_file, setup)
    assert str(raised.value).startswith("run.toml:3: ")


def rates(*overrides: str, num_batches: int = 10, steps: int = 40) -> list[float]:
    """The learning rate of every step."""
    run_file = run_file_with("train.epochs=4", "optimizer.lr=1.0", *overrides)
    optimizer = make_optimizer(run_file, torch.nn.Linear(1, 1))
    scheduler: Any = make_scheduler(run_file, optimizer, num_batches, "max")
    found = []
    for _ in range(steps):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return found


def test_schedules_follow_their_curves() -> None:
    cosine = rates("scheduler.name=cosine", "scheduler.min_lr=0.2")
    assert (cosine[0], cosine[20]) == (1.0, pytest.approx(0.6))
    assert cosine == sorted(cosine, reverse=True)
    assert rates("scheduler.name=cosine", "train.max_steps=20", steps=30)[20:] == [0.0] * 10
    warm = rates("scheduler.name=warmup-cosine", "scheduler.warmup=0.25")
    assert warm[:11] == pytest.approx([(step + 1) / 10 for step in range(10)] + [1.0])
    cuts = rates("scheduler.name=step", "scheduler.every=2", "scheduler.factor=0.1", "train.accumulate=3")
    assert cuts[:17] == pytest.approx([1.0] * 8 + [0.1] * 8 + [0.01])  # ten batches make four steps an epoch


ALONE: Any = SimpleNamespace(rank=0, world_size=1, num_cores=2, device=torch.device("cpu"))


def random_store(x: torch.Tensor) -> Store:
    torch.manual_seed(0)
    edge_index = torch.randint(len(x), (2, 12 * len(x)))
    nodes = torch.arange(len(x))
    splits = {"train": nodes[:40], "val": nodes[40:50], "test": nodes[50:]}
    return hoploom.from_tensors({"x": x, "y": nodes % 3}, edge_index, splits=splits)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_a_step_has_the_same_seeds_for_any_number_of_processes(world_size: int) -> None:
    """16 seeds go to 3 processes as 5, 5 and 6."""
    run_file = parse_run_file('store = "s"\n[loader]\nfanouts = [2, 2]\nbatch_size = 16\n')
    setup = training_setup(run_file, random_store(torch.randn(60, 8)))

    def steps(world_size: int, rank: int) -> list[list[int]]:
        place: Any = SimpleNamespace(**vars(ALONE) | {"rank": rank, "world_size": world_size})
        loader = train_loader(run_file, setup, place, make_model(run_file, setup))
        return [batch.n_id[: batch.batch_size].tolist() for batch in loader]

    shares = [steps(world_size, rank) for rank in range(world_size)]
    assert [[*chain(*of_ranks)] for of_ranks in zip(*shares, strict=True)] == steps(1, 0)
    for of_ranks in zip(*shares, strict=True):
        sizes = [len(seeds) for seeds in of_ranks]
        assert max(sizes) - min(sizes) <= 1


def made(store: Store, *overrides: str) -> tuple[Any, Any, Any]:
    run_file = parse_run_file('store = "s"\n[loader]\nfanouts = [2, 2]\nbatch_size = 16\n', overrides)
    setup = training_setup(run_file, store)
    model = make_model(run_file, setup)
    return model, train_loader(run_file, setup, ALONE, model), eval_loader(run_file, setup, ALONE, model, "val")


@pytest.mark.parametrize("kind", ["node-classification", "link-prediction"])
def test_a_gcn_is_told_the_degrees_and_a_sage_gets_layer_one_aggregated(kind: str) -> None:
    store = random_store(torch.randn(60, 8))
    for name, field in (("gcn", "in_degree"), ("sage", "aggregated")):
        for loader in made(store, f"task.kind={kind}", f"model.name={name}")[1:]:
            assert field in next(iter(loader))


@pytest.mark.parametrize("name", ["sage", "gin"])
def test_whole_numbers_as_features_are_trained_on(name: str) -> None:
    model, train, _ = made(random_store(torch.randint(-9, 9, (60, 8), dtype=torch.int8)), f"model.name={name}")
    assert model(next(iter(train))).isfinite().all()


def test_fanouts_of_a_relation_hold_where_evaluation_has_the_same_fanouts_of_its_own() -> None:
    store = random_store(torch.randn(60, 8))
    apart = ("loader.eval_fanouts=[2, 2]", "loader.relation_fanouts={'node to node' = [1, 1]}")
    _, train, val = made(store, *apart)
    for loader, most in ((train, 1), (val, 2)):
        counts = torch.cat([block.edge_index[1].bincount() for batch in loader for block in batch.blocks])
        assert int(counts.max()) == most


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph of two parts with edge weights."""
    folder = tmp_path_factory.mktemp("graphs") / "graph.store"
    generate(folder, num_nodes=2000, avg_degree=8, num_features=8, num_classes=4, num_parts=2, weights=True)
    return folder


def with_copies(links: torch.Tensor) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in links.t()]


def pairs(links: torch.Tensor) -> set[tuple[int, int]]:
    return set(with_copies(links))


def edges_of(store: Store, index: int) -> list[tuple[int, int]]:
    found = []
    for part in store.parts:
        lists = part.lists[index]
        for row in range(lists.indptr.numel() - 1):
            span = slice(int(lists.indptr[row]), int(lists.indptr[row + 1]))
            found += [(int(source), lists.first_node + row) for source in lists.indices[span]]
    return found


def weights_of(store: Store) -> list[tuple[int, int, float]]:
    """Every edge with its weight, as a batch of the whole graph has them."""
    num_nodes = store.schema.node_types[0].num_nodes
    batch = next(iter(hoploom.NeighborLoader(store, [-1], batch_size=num_nodes)))
    ends = batch.n_id[batch.edge_index]
    return sorted(zip(ends[0].tolist(), ends[1].tolist(), batch.weight.tolist(), strict=True))


def test_held_out_links_leave_the_graph_in_both_directions(graph: Path) -> None:
    store = hoploom.open(graph)
    key = store.schema.relations[0].key
    before = edges_of(store, 0)
    held_out = hold_out(store, key, (), LinkShares(5, 0.2, 0.1))
    splits = {name: pairs(ends) for name, ends in held_out.links.items()}
    assert sorted(edges_of(held_out.store, 0)) == sorted(e for e in before if e in splits["train"])
    assert held_out.store.schema.relations[0].num_edges == held_out.links["train"].shape[1]
    assert sum(ends.shape[1] for ends in held_out.links.values()) == len(before)
    for part in held_out.store.parts:
        weight = part.lists[0].weight
        assert torch.equal(weight, part.tables[key, "weight"].rows)
    for name, mine in splits.items():
        turned = {(b, a) for a, b in mine}
        assert all(not (mine | turned) & other for other_name, other in splits.items() if other_name != name)
    assert weights_of(held_out.store) == [entry for entry in weights_of(store) if entry[:2] in splits["train"]]
    assert held_out.links["val"].shape[1] / len(before) == pytest.approx(0.2, abs=0.02)
    assert held_out.links["test"].shape[1] / len(before) == pytest.approx(0.1, abs=0.02)


def test_the_reverse_of_a_held_out_link_is_held_out_too() -> None:
    writes = torch.stack([torch.arange(200) % 20, torch.arange(200) % 50])
    numbers = torch.arange(200, dtype=torch.float32)
    edges = {
        ("author", "writes", "paper"): {"edge_index": writes, "w": numbers},
        ("paper", "by", "author"): {"edge_index": writes.flip(0), "w": numbers},
    }
    store = hoploom.from_tensors({"author": {}, "paper": {}}, edges, num_nodes={"author": 20, "paper": 50})
    held_out = hold_out(store, ("author", "writes", "paper"), [("paper", "by", "author")], LinkShares(0, 0.3, 0.0))
    left = [sorted(edges_of(held_out.store, index)) for index in range(2)]
    assert left[0] == sorted((b, a) for a, b in left[1])
    assert 0 < len(left[0]) < 180
    # every edge that is left keeps its own fields
    loader = hoploom.NeighborLoader(held_out.store, [-1], input_nodes="paper", batch_size=50)
    batch = next(iter(loader))["author", "writes", "paper"]
    assert {tuple(writes[:, int(number)].tolist()) for number in batch.w} == set(left[0])


def test_a_graph_without_held_out_links_has_the_limits_of_its_store(graph: Path, tmp_path: Path) -> None:
    store = hoploom.open(graph, memory=8 * hoploom.open(graph).num_nodes + 1000, scratch=tmp_path)
    (key,) = store.schema.relation_index
    left = hold_out(store, key, (), LinkShares(5, 0.2, 0.1)).store
    assert left.reads is store.reads is not None
    assert (left.budget, left.scratch) == (store.budget, tmp_path)


def test_links_can_be_given_as_files(graph: Path, tmp_path: Path) -> None:
    ends = np.stack([np.arange(300), np.arange(300) + 7])
    (tmp_path / "links").mkdir()
    np.save(tmp_path / "links" / "train.npy", ends)
    np.save(tmp_path / "links" / "test.npy", ends[:, :50] + 1)
    text = 'store = "graph.store"\n[task]\nkind = "link-prediction"\nlinks = "links"\n'
    setup = training_setup(parse_run_file(text, folder=tmp_path), hoploom.open(graph))
    assert {split: ends.shape[1] for split, ends in setup.seeds.items()} == {"train": 300, "test": 50}
    assert torch.equal(setup.seeds["test"], torch.from_numpy(ends[:, :50] + 1))
    for bad, message in ((ends.T, r"holds int64 \[300, 2\]"), (ends * 1.0, "holds float64"), (ends[:, :0], "no link")):
        np.save(tmp_path / "links" / "val.npy", bad)
        with pytest.raises(ConfigError, match=rf"^run.toml:4: .*val.npy {message}|^run.toml:4: .*{message}"):
            training_setup(parse_run_file(text, folder=tmp_path), hoploom.open(graph))
    (tmp_path / "links" / "val.npy").write_bytes(b"no array")
    with pytest.raises(ConfigError, match=r"val.npy: it is no .npy file"):
        training_setup(parse_run_file(text, folder=tmp_path), hoploom.open(graph))


KEY = ("user", "buys", "item")
BUYS = torch.stack([torch.arange(320) % 40, (torch.arange(320) * 7 + torch.arange(320) // 40) % 30])
PREDICT = """
store = "s"
[task]
kind = "link-prediction"
relation = "buys"
val_share = 0.1
test_share = 0.2
[loader]
fanouts = [-1, -1]
mode = "subgraph"
batch_size = 64
"""


def shop(*, reverse: str = "rev_buys") -> Store:
    """40 users with text ids buy 8 of 30 items with integer ids; the reverse has the same edges in another order."""
    edges = {KEY: BUYS, ("item", reverse, "user"): BUYS.flip(0, 1).contiguous()}
    names = torch.tensor([list(f"u{user:02d}".encode()) for user in range(40)], dtype=torch.uint8)
    users = {"x": torch.randn(40, 4), "original_id": names}
    items = {"x": torch.randn(30, 4), "original_id": torch.arange(30) * 10 + 5}
    return hoploom.from_tensors({"user": users, "item": items}, edges)


def messages(batch: Any, key: tuple[str, str, str]) -> set[tuple[int, int]]:
    ends = batch[key].edge_index
    return pairs(torch.stack([batch[key[0]].n_id[ends[0]], batch[key[2]].n_id[ends[1]]]))


@pytest.mark.parametrize("reverse", ["rev_buys", "bought_by"])
def test_no_batch_has_a_held_out_link_in_either_direction(reverse: str) -> None:
    store, run_file = shop(reverse=reverse), parse_run_file(PREDICT)
    setup = training_setup(run_file, store)
    held_out = pairs(setup.seeds["val"][1]) | pairs(setup.seeds["test"][1])
    assert len(held_out) > 50
    context: Any = SimpleNamespace(rank=0, world_size=1, num_cores=2, device=torch.device("cpu"))
    passed = set[tuple[int, int]]()
    for batch in train_loader(run_file, setup, context, make_model(run_file, setup)):
        passed |= messages(batch, KEY) | {(b, a) for a, b in messages(batch, ("item", reverse, "user"))}
    assert passed == pairs(setup.seeds["train"][1])
    assert not passed & held_out
    assert re.fullmatch(
        rf"(\d+) edges of 'user buys item' .*; in the opposite direction, \1 of 'item {reverse} user'", *setup.notes
    )
    assert not {(b, a) for a, b in edges_of(setup.store, 1)} & held_out


@pytest.mark.parametrize("reverse", ["rev_buys", "bought_by"])
@pytest.mark.parametrize(
    ("overrides", "leaks"), [((), (0, 0)), (("task.exclude=none",), (1, 1)), (("task.exclude=self",), (0, 1))]
)
def test_a_step_of_training_does_not_see_the_links_that_it_predicts(
    reverse: str, overrides: tuple[str, ...], leaks: tuple[int, int]
) -> None:
    store, run_file = shop(reverse=reverse), parse_run_file(PREDICT, overrides)
    setup = training_setup(run_file, store)
    seen = [0, 0]
    for batch in train_loader(run_file, setup, ALONE, make_model(run_file, setup)):
        ends = batch[KEY].edge_label_index[:, batch[KEY].edge_label == 1]
        predicted = pairs(torch.stack([batch["user"].n_id[ends[0]], batch["item"].n_id[ends[1]]]))
        seen[0] += len(predicted & messages(batch, KEY))
        seen[1] += len(predicted & {(b, a) for a, b in messages(batch, ("item", reverse, "user"))})
    assert tuple(min(1, count) for count in seen) == leaks


def test_a_run_ranks_links_among_candidates() -> None:
    """Three in training, and in evaluation as many as eval_negatives says."""
    overrides = ("task.loss=bpr", "task.negatives=3", "task.eval_negatives=7", "task.metrics=['mrr', 'hits@3']")
    run_file = parse_run_file(PREDICT, overrides)
    setup = training_setup(run_file, shop())
    assert setup.task.monitor == ("mrr", "max")
    assert setup.task.metrics == ("mrr", "hits@3", "ranks")  # for the report
    model = make_model(run_file, setup)
    for loader, count in (
        (train_loader(run_file, setup, ALONE, model), 3),
        (eval_loader(run_file, setup, ALONE, model, "val"), 7),
    ):
        assert {batch["item"].dst_neg_index.shape[1] for batch in loader} == {count}


def candidates_of(*overrides: str) -> list[Any]:
    """For training and validation, what the batches of a run on links have as candidates."""
    run_file = parse_run_file(PREDICT, ("task.loss=softmax", "task.metrics=['mrr']", *overrides))
    setup = training_setup(run_file, shop())
    model = make_model(run_file, setup)
    loaders = train_loader(run_file, setup, ALONE, model), eval_loader(run_file, setup, ALONE, model, "val")
    return [
        [(batch[end].n_id[batch[end].dst_neg_index.clamp(min=0)], batch[end].dst_neg_index >= 0) for batch in loader]
        for loader in loaders
        for end in ["item"]
    ]


@pytest.mark.parametrize("kind", ["degree", "joint", "all"])
def test_a_run_chooses_the_candidates_of_training_and_all_are_those_of_evaluation_too(kind: str) -> None:
    train, val = candidates_of(f"task.candidates={kind}", "task.negatives=4", "task.eval_negatives=5")
    widths = {nodes.shape[1] for nodes, _ in train}, {nodes.shape[1] for nodes, _ in val}
    others = shop().schema.node_type("item").num_nodes - 1
    assert widths == (({others}, {others}) if kind == "all" else ({4}, {5}))
    uniform, of_val = candidates_of("task.negatives=4", "task.eval_negatives=5")
    assert kind == "all" or not torch.equal(train[0][0], uniform[0][0])
    assert kind == "all" or all(torch.equal(one[0], other[0]) for one, other in zip(val, of_val, strict=True))


def test_strict_negatives_of_a_run_are_true_links_of_no_split() -> None:
    """Of each user, the items that are left are those in no split."""
    run_file = parse_run_file(PREDICT)
    links = torch.cat([ends for _, ends in training_setup(run_file, shop()).seeds.values()], dim=1)
    true = [len(set(links[1, links[0] == user].tolist())) for user in range(int(links[0].max()) + 1)]
    num_items = shop().schema.node_type("item").num_nodes
    for split in candidates_of("task.candidates=all", "task.strict_negatives=true"):
        assert set(torch.cat([is_there.sum(1) for _, is_there in split]).tolist()) <= {num_items - few for few in true}


def test_strict_negatives_of_an_undirected_graph_are_no_held_out_links_backwards(tmp_path: Path) -> None:
    """The file lists each link once, and both of its directions are held out."""
    links = torch.cat([torch.stack([torch.arange(30), (torch.arange(30) + step) % 30]) for step in (1, 2)], dim=1)
    edges = torch.cat([links, links.flip(0)], dim=1)
    store = hoploom.from_tensors({"x": torch.randn(30, 4)}, edges)
    np.save(tmp_path / "test.npy", links[:, ::3].numpy())
    overrides = ("task.kind=link-prediction", "task.loss=softmax", "task.candidates=all", "task.strict_negatives=true")
    run_file = run_file_with(*overrides, f"task.links={tmp_path}", "task.metrics=['mrr']")
    setup = training_setup(run_file, store)
    drawn = set()
    for batch in train_loader(run_file, setup, ALONE, make_model(run_file, setup)):
        for source, others in zip(batch.n_id[batch.src_index].tolist(), batch.dst_neg_index, strict=True):
            drawn |= {(source, other) for other in batch.n_id[others[others >= 0]].tolist()}
    assert drawn
    assert not drawn & pairs(edges)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("task.metrics=['mmr']", r"^--set task.metrics=.*: metric 'mmr' is unknown; choose from"),
        (
            "task.loss=mae",
            r"^--set task.loss=mae: task.loss is 'mae'; for this task, choose one of \['binary', 'focal'",
        ),
        (
            "task.eval_negatives=9",
            r"task.metrics has hits@10, and a link has 9 candidates; give more",
        ),
        ("task.negatives=1.5", r"task.negatives is 1.5, and 'bpr' ranks each link among them; give a whole number"),
        (
            "train.monitor=auroc",
            r"train.monitor is 'auroc', no metric of LinkPrediction; give one of \['val_loss', 'mrr'",
        ),
    ],
)
def test_a_run_of_links_that_cannot_be_names_the_key(override: str, message: str) -> None:
    def loader() -> Any:
        run_file = parse_run_file(PREDICT, ("task.loss=bpr", override))
        setup = training_setup(run_file, shop())
        return train_loader(run_file, setup, ALONE, make_model(run_file, setup))

    with pytest.raises(ConfigError, match=message):
        loader()


def test_candidates_are_for_links_that_are_ranked() -> None:
    run_file = parse_run_file(PREDICT, ("task.candidates=joint",))
    setup = training_setup(run_file, shop())
    with pytest.raises(ConfigError, match=r"task.candidates is 'joint', .*; set task.loss"):
        train_loader(run_file, setup, ALONE, make_model(run_file, setup))


BACK, ALSO_BACK = ("item", "rev_buys", "user"), ("item", "bought_by", "user")
TWICE = torch.tensor([[0, 0, 5], [0, 0, 5]])  # edges of `buys` that stand in it once more


@pytest.mark.parametrize("kind", ["rev_ holds other edges", "two reverses", "copies in one direction"])
def test_held_out_links_leave_every_relation_that_leads_back(kind: str) -> None:
    """Whatever its name, its size and its other edges, which stay."""
    back = BUYS.flip(0, 1).contiguous()
    other = torch.stack([torch.arange(320) % 30, torch.arange(320) % 40])
    edges = {KEY: BUYS, BACK: back if kind == "two reverses" else other, ALSO_BACK: back}
    if kind == "copies in one direction":
        edges = {KEY: torch.cat([BUYS, TWICE], dim=1), BACK: back}
    store = hoploom.from_tensors({"user": {}, "item": {}}, edges, num_nodes={"user": 40, "item": 30})
    assert [relation.reverse for relation in store.schema.relations] == [None] * len(edges)  # names prove nothing
    setup = training_setup(parse_run_file(PREDICT), store)
    held_out = {(b, a) for a, b in pairs(torch.cat([setup.seeds["val"][1], setup.seeds["test"][1]], dim=1))}
    for index, (key, given) in list(enumerate(edges.items()))[1:]:
        kept = sorted(edge for edge in with_copies(given) if edge not in held_out)
        assert sorted(edges_of(setup.store, index)) == kept
        assert f"{given.shape[1] - len(kept)} of '{' '.join(key)}'" in setup.notes[0]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_the_drawn_split_is_written_with_original_ids_and_can_be_given_back(
    tmp_path: Path, suffix: str, one_thread: None, no_sync: None
) -> None:
    """The files of the run folder hold out the same links: the same graph and the same seeds."""
    shop().save(tmp_path / "s")
    overrides = ["train.max_steps=1", "loader.threads=1", "model.name=rsage", "output.loggers=[]"]
    run_file = parse_run_file(PREDICT, overrides, folder=tmp_path)
    with init(device="cpu") as context:
        run(run_file, context, progress=False)
    links = tmp_path / "run" / "links"
    lines = (links / "test.csv").read_text().splitlines()
    assert lines[0] == "source,destination"
    assert all(re.fullmatch(r"u\d\d,\d*5", line) for line in lines[1:])
    if suffix == "parquet":
        pandas, parquet = pytest.importorskip("pyarrow.csv"), pytest.importorskip("pyarrow.parquet")
        for path in list(links.glob("*.csv")):
            parquet.write_table(pandas.read_csv(path), path.with_suffix(".parquet"))
            path.unlink()
    store = hoploom.open(tmp_path / "s")
    drawn = training_setup(run_file, store)
    text = PREDICT.replace("val_share = 0.1\ntest_share = 0.2", 'links = "run/links"')
    given = training_setup(parse_run_file(text, folder=tmp_path), store)
    assert list(given.seeds) == list(drawn.seeds)
    assert all(torch.equal(given.seeds[split][1], drawn.seeds[split][1]) for split in drawn.seeds)
    assert all(edges_of(given.store, index) == edges_of(drawn.store, index) for index in range(2))


def test_links_are_written_whole_once(tmp_path: Path, one_thread: None, no_sync: None) -> None:
    """A file that cannot be written leaves no other behind; a run that goes on keeps those of its first part."""
    shop().save(tmp_path / "s")
    options = ["loader.threads=1", "model.name=rsage", "output.loggers=[]"]
    links = tmp_path / "run" / "links"
    links.parent.mkdir()
    links.write_text("no folder")
    with init(device="cpu") as context:
        with pytest.raises(StoreError, match=r"cannot write .*val.csv"):
            run(parse_run_file(PREDICT, [*options, "train.max_steps=1"], folder=tmp_path), context, progress=False)
        links.unlink()
        run(parse_run_file(PREDICT, [*options, "train.max_steps=1"], folder=tmp_path), context, progress=False)
        text = (links / "test.csv").read_text()
        (links / "val.csv").write_text("kept")
        (links / "test.csv").unlink()
        more = parse_run_file(PREDICT, [*options, "train.max_steps=2"], folder=tmp_path)
        run(more, context, resume=True, progress=False)
    assert ((links / "val.csv").read_text(), (links / "test.csv").read_text()) == ("kept", text)
    store, setup = hoploom.open(tmp_path / "s"), training_setup(more, hoploom.open(tmp_path / "s"))
    outside = (setup.seeds["val"][0], torch.full((2, 1), 99))
    with pytest.raises(ConfigError, match="out of range"):
        write_links(tmp_path / "out", store, {"val": outside}, {}, keep=False)
    assert not list((tmp_path / "out").iterdir())


def test_given_links_that_are_edges_of_the_graph_leave_it(tmp_path: Path) -> None:
    """In one relation with both directions, too."""
    ring = torch.stack([torch.arange(10), (torch.arange(10) + 1) % 10])
    store = hoploom.from_tensors({"x": torch.randn(10, 3)}, torch.cat([ring, ring.flip(0)], dim=1))
    for split, ends in {"train": ring[:, :5], "test": ring[:, 8:]}.items():
        np.save(tmp_path / f"{split}.npy", ends.numpy())
    text = f'store = "s"\n[task]\nkind = "link-prediction"\nlinks = "{tmp_path}"\n'
    setup = training_setup(parse_run_file(text), store)
    assert pairs(setup.seeds["train"]) == {(v, v + 1) for v in range(5)}
    assert set(edges_of(setup.store, 0)) == {e for v in range(8) for e in ((v, v + 1), (v + 1, v))}
    assert setup.notes == ("4 edges of 'node to node' are held out of the graph, in both directions",)


WRONG = [
    ("val.csv", "source,target\nu01,15\n", r"columns \['source', 'target'\]; name those with the ids source and dest"),
    ("val.csv", "source,destination\nu01,15\nu99,5\n", r"'user' has no node with the id 'u99'; give ids such as 'u00'"),
    ("val.csv", "source,destination\nu01,12\n", r"'item' has no node with the id 12; give ids such as 5"),
    ("val.csv", "source,destination\nu01,a\n", r"ids of 'item' are \['a'\]...; give ids such as 5"),
    ("test.csv", "source,destination\n", "holds no link; give at least one, or remove the file"),
    ("val.csv", "source,destination\nu01,15\nu02\n", "line 3: it has too few values; give each link its source and"),
    ("val.csv", f"source,destination\n{'u' * 200_000},15\n", r"line 2: field larger than field limit"),
    ("test.parquet", "no table", "test.parquet: "),
    ("valid.csv", "source,destination\nu01,15\n", "has valid.csv, and the files are train.csv, val.csv and test.csv; "),
]


def test_a_share_that_holds_out_no_link_is_refused() -> None:
    for name, share in (("val", 0.1), ("test", 0.2)):
        text = PREDICT.replace(f"{name}_share = {share}", f"{name}_share = 1e-9")
        with pytest.raises(
            ConfigError, match=f"task.{name}_share is 1e-09, and no edge of 'user buys item' is held out"
        ):
            training_setup(parse_run_file(text), shop())


@pytest.mark.parametrize(("name", "content", "message"), WRONG)
def test_links_in_a_file_that_will_not_do_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    text = PREDICT.replace("val_share = 0.1\ntest_share = 0.2", f'links = "{tmp_path}"')
    with pytest.raises(ConfigError, match=rf"^run.toml:6: .*{name}.*{message}|^run.toml:6: .*{message}"):
        training_setup(parse_run_file(text), shop())
