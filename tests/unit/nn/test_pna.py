"""PNA equals PyG's with the same weights, in outputs and all gradients."""

from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from support.layer_gradients import assert_same, outputs_and_gradients, same_weights
from torch import Tensor
from torch_geometric.data import Data

import hoploom
import hoploom.nn as hnn
from hoploom import NeighborLoader
from hoploom.nn import views_of

AGGREGATORS = ["mean", "min", "max", "std", "var", "sum"]
SCALERS = ["identity", "amplification", "attenuation", "linear", "inverse_linear"]
KEY = ("node", "to", "node")
DEGREES = torch.tensor([3, 0, 5, 9, 20, 3])

CASES: dict[str, dict[str, Any]] = {
    "paper": {"aggregators": ["mean", "min", "max", "std"], "scalers": ["identity", "amplification", "attenuation"]},
    "all": {},
    "one": {"aggregators": ["min"], "scalers": ["linear"]},
    "max": {"aggregators": ["sum", "max"], "scalers": ["identity"]},
    "var_first": {"aggregators": ["var", "min"], "scalers": ["inverse_linear", "identity"]},
    "edges": {"edge_dim": 3},
    "edges_std": {"edge_dim": 3, "aggregators": ["std", "sum"]},
    "edges_min": {"edge_dim": 3, "aggregators": ["min", "mean"]},
    "towers": {"towers": 4, "edge_dim": 3},
    "towers_divide": {"towers": 4, "divide_input": True, "edge_dim": 3},
    "post_layers": {"post_layers": 3, "act": "elu", "towers": 2},
    "trained_averages": {"train_norm": True, "towers": 2, "divide_input": True},
}


def graph() -> tuple[Tensor, Tensor, Tensor]:
    """x, edge_index and edge_attr of 40 nodes; three have no in-edges."""
    torch.manual_seed(2)
    return torch.randn(40, 8), torch.randint(37, (2, 200)), torch.randn(200, 3)


@pytest.mark.parametrize("name", CASES)
def test_pna_is_pygs_with_the_same_weights(name: str) -> None:
    options = {"aggregators": AGGREGATORS, "scalers": SCALERS, "deg": DEGREES} | CASES[name]
    ours, theirs = (of.PNAConv(8, 12, **options).double() for of in (hnn, pyg))
    same_weights(ours, theirs)
    x, edge_index, edge_attr = graph()
    given = {"x": x} | ({"edge_attr": edge_attr} if "edge_dim" in options else {})
    given = {name: rows.double() for name, rows in given.items()}  # gradients of small deviations need it
    found, expected = (
        outputs_and_gradients(conv, given, lambda given, conv=conv: {"x": conv(edge_index=edge_index, **given)})
        if conv is theirs
        else outputs_and_gradients(conv, given, lambda given, conv=conv: {"x": conv(edges=edge_index, **given)})
        for conv in (ours, theirs)
    )
    assert_same(found, expected)


@pytest.mark.parametrize("mode", ["blocks", "subgraph"])
def test_pna_on_the_views_of_a_batch_gives_what_the_whole_graph_gives(mode: str) -> None:
    x, edge_index, edge_attr = graph()
    data = Data(x=x, edge_index=edge_index, edge_attr=edge_attr)
    deg = hoploom.from_pyg(data).degree_histogram(KEY)
    assert torch.equal(deg, torch.bincount(torch.bincount(edge_index[1], minlength=40)))
    torch.manual_seed(0)
    first, second = (hnn.PNAConv(8, 8, AGGREGATORS, SCALERS, deg, edge_dim=3, towers=2).double() for _ in range(2))
    whole = second(first(x.double(), edge_index, edge_attr=edge_attr), edge_index, edge_attr=edge_attr)
    for batch in NeighborLoader(data, [-1, -1], batch_size=9, mode=mode, fields={"edge_attr", "x"}):
        one, two = (view.edges[KEY] for view in views_of(batch, 2, ["edge_attr"]))
        out = second(first(batch.x[: one.num_sources].double(), one), two)
        torch.testing.assert_close(out[: batch.batch_size], whole[batch.input_id], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("edge_dim", [None, 3])
def test_pna_in_half_precision_is_near_that_in_single(edge_dim: int | None, dtype: torch.dtype) -> None:
    x, edge_index, edge_attr = graph()
    conv = hnn.PNAConv(8, 12, ["mean", "min", "std"], SCALERS, DEGREES, edge_dim)
    given = {} if edge_dim is None else {"edge_attr": edge_attr}
    expected = conv(x, edge_index, **given)
    found = conv.to(dtype)(x.to(dtype), edge_index, **{name: rows.to(dtype) for name, rows in given.items()})
    found.sum().backward()
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, atol=0.05, rtol=0.05)


def test_pna_has_the_same_bits_with_any_number_of_threads() -> None:
    torch.manual_seed(0)
    x, edge_index, edge_attr = torch.randn(500, 8), torch.randint(500, (2, 60_000)), torch.randn(60_000, 3)
    conv, found, before = hnn.PNAConv(8, 8, AGGREGATORS, SCALERS, DEGREES, edge_dim=3), [], torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        conv.zero_grad()
        out = conv(x, edge_index, edge_attr=edge_attr)
        out.square().mean().backward()
        found.append(
            torch.cat([out.detach().flatten(), *(parameter.grad.flatten() for parameter in conv.parameters())])
        )
    torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deg": None}, "deg is None; .*store.degree_histogram"),
        ({"deg": torch.tensor([7])}, "deg is .*store.degree_histogram"),
        ({"aggregators": ["median"]}, "aggregators is .'median'.; give a list of some of"),
        ({"aggregators": "mean"}, "aggregators is 'mean'; give a list"),
        ({"scalers": []}, "scalers is ..; give a list of some of .'identity'"),
        ({"pre_layers": 2}, "pre_layers=2 needs a row of its own for each edge; .*torch_geometric.nn"),
        ({"towers": 0}, "towers is 0; give a whole number of at least 1"),
        ({"towers": 5}, "out_channels=12 are divided among towers=5"),
        ({"towers": 3, "divide_input": True}, "in_channels=8 .* towers=3"),
        ({"in_channels": -1}, "in_channels is -1"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(options: dict[str, Any], message: str) -> None:
    given = {"aggregators": AGGREGATORS, "scalers": SCALERS, "deg": DEGREES}
    with pytest.raises(hoploom.ConfigError, match=message):
        hnn.PNAConv(**{"in_channels": 8, "out_channels": 12} | given | options)


@pytest.mark.parametrize(("edge_dim", "width"), [(3, None), (3, 2), (None, 3)])
def test_edge_features_are_those_that_the_layer_was_made_for(edge_dim: int | None, width: int | None) -> None:
    x, edge_index, edge_attr = graph()
    conv = hnn.PNAConv(8, 12, AGGREGATORS, SCALERS, DEGREES, edge_dim)
    with pytest.raises(hoploom.ConfigError, match="edge_attr"):
        conv(x, edge_index, edge_attr=None if width is None else edge_attr[:, :width])
