"""The loaders that run.toml names: what the model asks of them, and which fanouts they take."""

from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hoploom
from hoploom import Store
from hoploom.train.runs import parse_run_file
from hoploom.train.runs.run import eval_loader, make_model, train_loader, training_setup

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
