"""Ids and picks travel as int32 where they fit, and arrive as they were."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.batch_servers import listening
from support.graphs import cut, ring, save_in_parts
from torch import Tensor

import hoploom
from hoploom import ConfigError
from hoploom.ops import Frontier, Picks
from hoploom.serve.connect import RemotePart
from hoploom.serve.requests import read_owned
from hoploom.serve.service import Service
from hoploom.serve.wire import Message, TensorSpec
from hoploom.store import Store, Wanted
from hoploom.store.base import Draw, range_of
from hoploom.store.sharded import IdEncoding, IdRange, Sharded

SPAN = 1 << 31


@pytest.mark.parametrize("first", [0, 1, SPAN - 1, SPAN, 1 << 47])
@pytest.mark.parametrize(("size", "dtype"), [(1, torch.int32), (SPAN, torch.int32), (SPAN + 1, torch.int64)])
def test_the_first_and_the_last_id_of_a_part_arrive_as_they_were(first: int, size: int, dtype: torch.dtype) -> None:
    own, ids = IdRange(first, size), torch.tensor([first, first + size - 1, 0])
    for places in (torch.tensor([1, 0]), torch.tensor([0, 0, 1])):
        sent = own.encode(ids, places)
        assert sent.dtype is dtype
        assert torch.equal(read_owned("node", sent, first, size), ids[places])
    assert torch.equal(own.decode(own.encode(ids[:2])), ids[:2])


def test_a_server_takes_ids_of_either_width_and_names_one_that_is_not_its_own() -> None:
    assert read_owned("node", torch.tensor([30, 39]), 30, 10).tolist() == [30, 39]
    assert read_owned("node", torch.tensor([0, 9], dtype=torch.int32), 30, 10).tolist() == [30, 39]
    for wrong in (torch.tensor([29]), torch.tensor([-1], dtype=torch.int32)):
        with pytest.raises(ConfigError, match=r"ids of node: id 29 is out of range \[30, 40\)"):
            read_owned("node", wrong, 30, 10)
    with pytest.raises(ConfigError, match="needs int32 or int64"):
        read_owned("node", torch.tensor([30.0]), 30, 10)


class _Served:
    """Peers that answer at once, in this process; what was sent either way is kept."""

    def __init__(self, store: Store) -> None:
        parts = cut(store, 3)
        self.identity, self.manifest = store.identity, SimpleNamespace(parts=tuple(map(range_of, parts)))
        whole = Store(store.schema, store.graph, store.features, tuple(parts), ranges=self.manifest.parts, shards=parts)  # type: ignore[arg-type]
        self._service = Service(whole, dict(enumerate(parts)), 1 << 20)
        self.sent: list[Tensor] = []
        self.answered: list[Tensor] = []

    def begin(self, request: Message, part: int, reading: Any) -> Any:
        self.sent += request.tensors  # type: ignore[arg-type]
        answer = self._service.answer(request)
        tensors: list[Any] = list(answer.tensors)
        self.answered += tensors
        come = SimpleNamespace(
            header=answer.header,
            described=[TensorSpec(one.dtype, tuple(one.shape)) for one in tensors if isinstance(one, Tensor)],
            into=lambda *given: answer,
        )
        return lambda: reading(come)


def test_frontiers_and_picks_of_remote_parts_travel_as_int32() -> None:
    store = hoploom.from_pyg(ring(40))
    served = _Served(store)
    parts = [RemotePart(store.schema, number, served) for number in range(3)]  # type: ignore[arg-type]
    there = Sharded(store.schema, parts, served.manifest.parts)
    for nodes in (torch.tensor([39, 0, 14, 13, 26]), torch.tensor([30, 31]), torch.arange(13)):
        for draw in (Draw(3, 0, [-1]), Draw(3, 1, [1]), Draw(3, 0, [-1], counts_only=True)):
            (ours,), (theirs,) = (graph.sample([Frontier(nodes)], draw) for graph in (there, store.graph))
            assert isinstance(ours, Picks)
            assert isinstance(theirs, Picks)
            assert all(map(torch.equal, ours, theirs))
    assert {one.dtype for one in [*served.sent, *served.answered]} == {torch.int32}


def test_answers_with_no_picks_are_told_apart() -> None:
    store = hoploom.from_pyg(ring(40))
    encoding = IdEncoding(store.schema, range_of(cut(store, 3)[1]))
    column = torch.zeros(2, dtype=torch.int32)
    assert encoding.decode_picks(0, [column, column, column]) is not None
    for wrong in (column.float(), column.view(1, 2), column.short()):
        assert encoding.decode_picks(0, [column, wrong, column]) is None


def test_rows_arrive_as_the_store_holds_them(tmp_path: Path) -> None:
    """Whatever type a field has, its bytes are what travels."""
    data, dtypes = ring(40), {"half": torch.float16, "brain": torch.bfloat16, "byte": torch.int8, "word": torch.int64}
    for name, dtype in dtypes.items():
        data[name] = (data.x * 3).to(dtype)
    local = save_in_parts(hoploom.from_pyg(data), tmp_path / "store", 3)
    ids = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    with listening(tmp_path / "store") as served, hoploom.connect(served.address, made="here") as there:
        for name, dtype in dtypes.items():
            before = there.traffic()["bytes_received"]
            (rows,) = there.features.gather([Wanted("node", name, ids)])
            assert rows.dtype is dtype
            assert torch.equal(rows, local.features.gather([Wanted("node", name, ids)])[0])
            assert there.traffic()["bytes_received"] - before == rows.nbytes
