"""Rows that no seed needs are left out where that changes no seed's row, and nowhere else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from support.fit_workers import NUM_CLASSES, alone, labelled
from torch import Tensor, nn
from torch_geometric.transforms import AddSelfLoops, ToUndirected

from hoploom import ConfigError, NeighborLoader
from hoploom.train.batch_adapter import BatchAdapter, adapted
from hoploom.train.evaluation import evaluate
from hoploom.train.tasks import NodeClassification

FANOUTS = [3, 2, 2]


class Centred(nn.Module):
    """A norm that looks at all rows, and is none of PyG's."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def loader_of(transform: Callable[[Any], Any] | None = None) -> NeighborLoader:
    return NeighborLoader(labelled(), FANOUTS, "train", batch_size=4, transform=transform)


def model_of(**options: Any) -> pyg.GraphSAGE:
    torch.manual_seed(4)
    return pyg.GraphSAGE(6, 8, 3, NUM_CLASSES, **options)


def without_some(batch: Any) -> Any:
    batch.edge_index = batch.edge_index[:, ::2]
    return batch


@pytest.mark.parametrize(
    "transform",
    [lambda batch: batch.coalesce(), ToUndirected(), AddSelfLoops(), without_some],
    ids=["sorted", "both ways", "loops", "fewer"],
)
def test_nothing_is_trimmed_of_what_a_transform_made(transform: Callable[[Any], Any]) -> None:
    loader, model, task = loader_of(transform), model_of().eval(), NodeClassification(NUM_CLASSES)
    losses = [
        task.losses(model(batch.x, batch.edge_index)[: batch.batch_size], task.targets(batch)) for batch in loader
    ]
    assert evaluate(model, loader, task, alone())["loss"] == pytest.approx(torch.cat(losses).mean().item(), abs=1e-6)


def test_counts_that_do_not_add_up_are_not_trimmed_by() -> None:
    batch, model = without_some(next(iter(loader_of()))), model_of()
    torch.testing.assert_close(BatchAdapter(model)(batch), model(batch.x, batch.edge_index))


def test_a_forward_that_asks_for_counts_is_told_that_they_do_not_add_up() -> None:
    class Trimming(pyg.GraphSAGE):
        def forward(
            self, x: Tensor, edge_index: Tensor, num_sampled_nodes_per_hop: Any, num_sampled_edges_per_hop: Any
        ) -> Tensor:  # type: ignore[override]
            raise AssertionError

    said = r"takes 'num_sampled_nodes_per_hop', but the loader's transform changed .* no longer match; leave"
    with pytest.raises(ConfigError, match=said):
        evaluate(Trimming(6, 8, 3, NUM_CLASSES), loader_of(without_some), NodeClassification(NUM_CLASSES), alone())


@pytest.mark.parametrize("options", [{"norm": Centred()}, {"act": Centred()}], ids=["norm", "activation"])
def test_nothing_is_trimmed_where_a_layer_may_look_at_all_rows(options: dict[str, Any]) -> None:
    loader, model = loader_of(), model_of(**options)
    batch = next(iter(loader))
    torch.testing.assert_close(adapted(model, loader)(batch), model(batch.x, batch.edge_index))


@pytest.mark.parametrize("options", [{}, {"norm": nn.LayerNorm(8)}, {"act": "elu"}], ids=["plain", "norm", "elu"])
def test_three_layers_are_trimmed_where_each_looks_at_its_own_rows(options: dict[str, Any]) -> None:
    loader, model = loader_of(), model_of(**options).eval()
    batch = next(iter(loader))
    trimmed, plain = adapted(model, loader)(batch), model(batch.x, batch.edge_index)
    assert trimmed.shape[0] < plain.shape[0]
    torch.testing.assert_close(trimmed[:4], plain[:4])
