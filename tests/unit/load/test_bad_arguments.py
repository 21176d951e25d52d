"""Wrong arguments are refused when the loader is made: what, which value, and the way out."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.loader
from support.graphs import library
from support.refusals import assert_refused, both_loaders, events, links, nodes, table
from torch_geometric.data import HeteroData

import hoploom
from hoploom import ConfigError, DataError, HGTLoader, LinkNeighborLoader, NeighborLoader, StoreError
from hoploom.load import arguments as inputs

BAD_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "batch_size 0": ({"batch_size": 0}, "batch_size", "0"),
    "batch_size negative": ({"batch_size": -1}, "batch_size", "-1"),
    "batch_size none": ({"batch_size": None}, "batch_size", "None"),
    "num_workers negative": ({"num_workers": -1}, "num_workers", "-1"),
    "num_workers none": ({"num_workers": None}, "num_workers", "None"),
    "prefetch_factor 0": ({"num_workers": 1, "prefetch_factor": 0}, "prefetch_factor", "0"),
    "timeout negative": ({"timeout": -1}, "timeout", "-1"),
    "timeout none": ({"timeout": None}, "timeout", "None"),
    "timeout nan": ({"timeout": float("nan")}, "timeout", "nan"),
    "rank too large": ({"rank": 2, "world_size": 2}, "rank", "2", "world_size"),
    "rank negative": ({"rank": -1, "world_size": 2}, "rank", "-1", "world_size"),
    "rank without a world": ({"rank": 1}, "world_size is None", "with rank"),
    "a world without a rank": ({"world_size": 2}, "rank is None", "world_size"),
    "world_size 0": ({"rank": 0, "world_size": 0}, "world_size", "0"),
    "more ranks than seeds": ({"rank": 0, "world_size": 17}, "17 ranks", "fewer"),
    "seed a fraction": ({"seed": 1.5}, "seed", "1.5"),
    "unknown subgraph_type": ({"subgraph_type": "whole"}, "subgraph_type", "'whole'", "induced"),
    "unknown mode": ({"mode": "trees"}, "mode", "'trees'", "blocks"),
    "unknown temporal_strategy": ({"temporal_strategy": "first"}, "temporal_strategy", "'first'", "last"),
    "labor and replace": ({"labor": True, "replace": True}, "labor", "replace"),
    "labor and disjoint": ({"labor": True, "disjoint": True}, "labor", "disjoint"),
    "blocks and bidirectional": ({"mode": "blocks", "subgraph_type": "bidirectional"}, "blocks", "bidirectional"),
    "blocks and induced": ({"mode": "blocks", "subgraph_type": "induced"}, "blocks", "induced"),
    "a hook without blocks": ({"sample_frontier": print}, "sample_frontier", "blocks"),
    "a hook, disjoint": ({"sample_frontier": print, "mode": "blocks", "disjoint": True}, "sample_frontier", "disjoint"),
    "a hook and labor": ({"sample_frontier": print, "mode": "blocks", "labor": True}, "labor=True", "no effect"),
    "a hook that cannot be called": ({"sample_frontier": 5, "mode": "blocks"}, "sample_frontier", "int"),
    "a transform that cannot be called": ({"transform": 5}, "transform", "int"),
    "device meta": ({"device": "meta"}, "device", "meta"),
    "unknown device": ({"device": "nonsense"}, "device", "nonsense"),
}


@both_loaders
@table(BAD_ARGUMENTS)
def test_wrong_arguments_are_refused(given: dict[str, Any], said: tuple[str, ...], loader: Callable[..., Any]) -> None:
    assert_refused(lambda: loader(**given), *said)


BAD_WITH_COLUMNS: dict[str, tuple[Any, ...]] = {
    "labor and time": ({"time_attr": "node_time", "labor": True}, "labor", "time"),
    "a hook and weights": (
        {"sample_frontier": print, "mode": "blocks", "weight_attr": "weight"},
        "weight_attr",
        "weighted=True",
    ),
    "labor and weights": ({"weight_attr": "weight", "labor": True}, "labor", "weights"),
}


@table(BAD_WITH_COLUMNS)
def test_wrong_combinations_with_columns_are_refused(given: dict[str, Any], said: tuple[str, ...]) -> None:
    assert_refused(lambda: nodes(events(), **given), *said)


@both_loaders
@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda")], ids=repr)
def test_a_missing_gpu_is_refused(device: Any, loader: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_refused(lambda: loader(device=device), "device", "CUDA", "leave device out")


def test_pinned_memory_without_cuda_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (batch,) = nodes(pin_memory=True, batch_size=8)
    assert batch.num_nodes == 8


@both_loaders
@pytest.mark.parametrize("name", inputs.UNSUPPORTED)
def test_what_pyg_has_and_we_have_not_is_named(name: str, loader: Callable[..., Any]) -> None:
    cls = "NeighborLoader" if loader is nodes else "LinkNeighborLoader"
    assert_refused(lambda: loader(**{name: object()}), f"{cls} does not support {name}=;")
    assert len(loader(**{name: None}, batch_size=16)) == 1


@pytest.mark.parametrize("cls", [NeighborLoader, LinkNeighborLoader, HGTLoader])
def test_every_argument_of_torchs_dataloader_and_of_pygs_loader_is_known(cls: type) -> None:
    known = {*inspect.signature(cls).parameters, *inputs.UNSUPPORTED, "kwargs"}
    for theirs in (torch.utils.data.DataLoader, getattr(torch_geometric.loader, cls.__name__)):
        assert set(inspect.signature(theirs).parameters) <= known


@both_loaders
@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_has_no_meaning_here_passes_at_torchs_default(num_workers: int, loader: Callable[..., Any]) -> None:
    """Lightning and others hand DataLoader's defaults on."""
    defaults = {"pin_memory_device": "", "in_order": True, "persistent_workers": False, "collate_fn": None}
    defaults["use_ddp"] = False  # of DGL
    assert len(loader(batch_size=16, num_workers=num_workers, **defaults)) == 1


@both_loaders
@pytest.mark.parametrize(
    ("name", "meant"),
    [("batchsize", "batch_size"), ("num_neighbours", "num_neighbors"), ("nworker", "num_workers"), ("q", "")],
)
def test_an_unknown_argument_is_a_type_error_that_names_it(name: str, meant: str, loader: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=rf"'{name}'" + (rf"; did you mean '{meant}'\?$" if meant else "$")):
        loader(**{name: 1})


def test_an_unknown_split_or_type_names_the_types_and_their_splits() -> None:
    for given, near in (("trian", "train"), ("papers", "paper")):
        assert_refused(
            lambda given=given: hoploom.NeighborLoader(library(), [2], given),
            f"{given!r}",
            "'venue': []",
            f"did you mean {near!r}?",
        )


def test_arguments_of_links_are_unknown_to_nodes() -> None:
    with pytest.raises(TypeError, match="neg_sampling"):
        nodes(neg_sampling="binary")
    with pytest.raises(TypeError, match="input_nodes"):
        links(input_nodes=[0])


def timed_twice() -> HeteroData:
    data = library()
    data["paper"].when, data["paper", "cites", "paper"].when = torch.arange(10), torch.arange(36)
    return data


# Of these, no table has a row. Each value of the others that PyG refuses is refused there, with its message.
PYG_MISTAKES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "data of another type": (lambda: 5, {}),
    "time twice": (timed_twice, {"time_attr": "when", "input_nodes": "paper"}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("make", "given"), PYG_MISTAKES.values(), ids=PYG_MISTAKES.keys())
def test_a_value_error_of_pygs_loader_is_one_here(make: Callable[[], Any], given: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 the words are PyG's own
        torch_geometric.loader.NeighborLoader(make(), [2], **given)
    with pytest.raises((ConfigError, DataError)):
        NeighborLoader(make(), [2], **given)


def test_every_error_is_a_hoploom_error_and_what_python_would_raise() -> None:
    assert issubclass(ConfigError, hoploom.HoploomError)
    assert issubclass(ConfigError, ValueError)
    assert issubclass(DataError, hoploom.HoploomError)
    assert issubclass(DataError, ValueError)
    assert issubclass(StoreError, hoploom.HoploomError)
    assert issubclass(StoreError, OSError)
