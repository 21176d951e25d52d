"""`hoploom check --leaks`: what a run's training batches give away."""

from pathlib import Path

import pytest
import torch
from support.fit_workers import alone

import hoploom
from hoploom import cli
from hoploom.train.runs.leaks import BatchEdges, _later, find_leaks
from hoploom.train.runs.link_splits import shared_links
from hoploom.train.runs.run import training_setup
from hoploom.train.runs.run_file import parse_run_file

BUYS, BOUGHT = ("user", "buys", "item"), ("item", "rev_buys", "user")
LINKS = """
store = "shop.store"
[task]
kind = "link-prediction"
relation = "buys"
[model]
name = "rsage"
[loader]
fanouts = [-1, -1]
batch_size = 64
"""
NODES = """
store = "nodes.store"
[loader]
fanouts = [4, 4]
batch_size = 8
mode = "subgraph"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shop; and nodes in a ring with times, whose second feature is their label."""
    folder = tmp_path_factory.mktemp("leaks")
    generator = torch.Generator().manual_seed(0)
    buys = torch.stack([torch.randint(40, (300,), generator=generator), torch.randint(30, (300,), generator=generator)])
    users, items = {"x": torch.randn(40, 4)}, {"x": torch.randn(30, 4)}
    hoploom.from_tensors({"user": users, "item": items}, {BUYS: buys, BOUGHT: buys.flip(0)}).save(folder / "shop.store")
    count = 60
    ring = torch.stack([torch.arange(4 * count) % count, (torch.arange(4 * count) * 7 + 1) % count])
    labels = torch.arange(count) % 3
    fields = {"x": torch.stack([torch.randn(count), labels.float()], 1), "y": labels, "time": torch.arange(count)}
    fields |= {"year": fields["x"][:, 0].clone(), "other": torch.randn(count)}
    splits = {"train": torch.arange(20, 50), "val": torch.arange(50, 60)}
    store = hoploom.from_tensors(fields, ring, splits=splits, time_attr="time")
    store.save(folder / "nodes.store")
    return folder


@pytest.mark.parametrize("mode", ["blocks", "subgraph"])
@pytest.mark.parametrize(
    ("exclude", "kinds"),
    [
        ("both", []),
        ("self", ["are such links in the opposite direction"]),
        ("reverse", ["are links that their step predicts"]),
        ("none", ["are links that their step predicts", "are such links in the opposite direction"]),
    ],
)
def test_links_that_a_step_sees_are_counted(folder: Path, exclude: str, kinds: list[str], mode: str) -> None:
    run_file = parse_run_file(LINKS, (f"task.exclude={exclude}", f"loader.mode={mode}"), folder=folder)
    leaks = find_leaks(run_file, alone())
    assert leaks.num_batches > 0
    assert leaks.num_edges > 0
    assert [any(kind in found for found in leaks.found) for kind in kinds] == [True] * len(kinds)
    assert len(leaks.found) == len(kinds)


def test_links_in_several_files_are_counted_and_said_when_training_begins(folder: Path, tmp_path: Path) -> None:
    for split, users in {"train": range(30), "val": range(25, 32), "test": range(32, 40)}.items():
        lines = [f"{user},{item}\n" for user in users for item in (1, 1)]  # each twice
        (tmp_path / f"{split}.csv").write_text("".join(["source,destination\n", *lines]))
    run_file = parse_run_file(LINKS, (f"task.links={tmp_path}",), folder=folder)
    said = "5 links are in two files of task.links, train and val; keep each in one"
    assert find_leaks(run_file, alone()).found == [said]
    assert said in training_setup(run_file, hoploom.open(folder / "shop.store")).notes


def test_labels_beside_links_are_looked_for_among_features(tmp_path: Path) -> None:
    items = {"x": torch.randn(30, 4), "y": torch.arange(30) % 3, "year": torch.randn(30)}
    items["x"][:, 2] = items["y"]
    items["x"][:, 3] = items["year"]
    buys = torch.cartesian_prod(torch.arange(8), torch.arange(30)).t()
    data, splits = {"user": {"x": torch.randn(8, 2)}, "item": items}, {"train": torch.arange(20)}
    store = hoploom.from_tensors(data, {BUYS: buys, BOUGHT: buys.flip(0)}, splits={"item": splits})
    store.save(tmp_path / "shop.store")
    given = ('task.more={y="node-classification",year="node-regression"}', 'task.val=""', 'task.test=""')
    leaks = find_leaks(parse_run_file(LINKS, given, folder=tmp_path), alone())
    assert leaks.found == [
        "feature 2 of 'item' equals the label 'y'; leave it out",
        "feature 3 of 'item' equals the label 'year'; leave it out",
    ]


def test_links_of_large_ids_and_relations_are_told_apart() -> None:
    """Where ids are below 1 << 22, three of them exceed 64 bits: codes modulo 1 << 64 of the first links are equal."""
    most = (1 << 22) - 1
    links = {"train": torch.tensor([[1 << 20, most], [0, most], [5, most]])}
    links["val"] = torch.tensor([[0, most], [0, most], [5, most]])
    assert shared_links(links) == ["1 links are in two files of task.links, train and val; keep each in one"]


def test_features_that_are_labels_and_edges_of_the_future_are_found(folder: Path) -> None:
    plain = find_leaks(parse_run_file(NODES, ('task.test=""',), folder=folder), alone())
    assert plain.found == [
        "edges may be later than their seed by the field 'time'; set loader.temporal",
        "feature 1 of 'node' equals the label 'y'; leave it out",
    ]
    more = 'task.more={year="node-regression",other="node-regression"}'
    several = find_leaks(parse_run_file(NODES, ('task.test=""', more), folder=folder), alone())
    assert several.found == [*plain.found, "feature 0 of 'node' equals the label 'year'; leave it out"]
    timed = find_leaks(parse_run_file(NODES, ('task.test=""', "loader.temporal=uniform"), folder=folder), alone())
    assert timed.found == plain.found[1:]
    assert timed.num_edges > 0


def test_the_command_exits_with_one_where_it_finds_leaks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "run.toml"
    path.write_text(LINKS)
    assert cli.main(["check", str(path), "--leaks"]) == 0
    assert capsys.readouterr().out.startswith("ok: ")
    path.write_text(LINKS.replace("[model]", 'exclude = "none"\n[model]'))
    assert cli.main(["check", str(path), "--leaks"]) == 1
    assert "are links that their step predicts; leave task.exclude out" in capsys.readouterr().out


def test_edges_later_than_their_seed_are_counted(folder: Path) -> None:
    """Node v has the time v: of the sources 5, 30 and 31, two are later than 29, and one is later than 30."""
    store = hoploom.open(folder / "nodes.store")
    sources = torch.tensor([5, 30, 31])
    edges = [BatchEdges(sources, sources, sources, torch.tensor([0, 0, 1]))]
    assert _later(store, torch.tensor([29, 29]), edges) == 2
    assert _later(store, torch.tensor([30, 30]), edges) == 1
    assert _later(store, torch.tensor([29, 40]), edges) == 1
