"""RelBench's example scripts over a small database of its own classes, with nothing changed but an import."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.batches import Replayed, assert_same_batches
from support.graphs import library, ring
from support.refusals import assert_refused
from torch.nn.functional import binary_cross_entropy_with_logits
from torch_geometric.data import HeteroData
from torch_geometric.loader import NodeLoader
from torch_geometric.nn import MLP

import hoploom

# was: from torch_geometric.loader import NeighborLoader
from hoploom import NeighborLoader

torch_frame = pytest.importorskip("torch_frame")
base = pytest.importorskip("relbench.base")
graph = pytest.importorskip("relbench.modeling.graph")
nn = pytest.importorskip("relbench.modeling.nn")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")]
START = pd.Timestamp("2024-01-01")
USERS, ITEMS, ORDERS = 40, 20, 400


def days(count: Any) -> Any:
    return START + pd.to_timedelta(count, "D")


@pytest.fixture(scope="module")
def shop() -> tuple[HeteroData, Any]:
    """Users and orders have times, items have none; some orders name no item."""
    rng = np.random.default_rng(0)
    users = {"user_id": range(USERS), "age": rng.integers(18, 80, USERS), "joined": days(rng.integers(9, size=USERS))}
    products = {"item_id": range(ITEMS), "price": rng.random(ITEMS), "color": rng.choice(["red", "blue"], ITEMS)}
    item = pd.Series(rng.integers(ITEMS, size=ORDERS)).astype("Int64").mask(pd.Series(rng.random(ORDERS) < 0.1))
    orders = {"user_id": rng.integers(USERS, size=ORDERS), "item_id": item, "amount": rng.random(ORDERS)}
    orders["date"] = days(np.sort(rng.integers(10, 100, ORDERS)))
    tables = {
        "users": base.Table(pd.DataFrame(users), {}, "user_id", "joined"),
        "products": base.Table(pd.DataFrame(products), {}, "item_id"),
        "orders": base.Table(pd.DataFrame(orders), {"user_id": "users", "item_id": "products"}, None, "date"),
    }
    stypes = {
        "users": {"age": torch_frame.numerical, "joined": torch_frame.timestamp},
        "products": {"price": torch_frame.numerical, "color": torch_frame.categorical},
        "orders": {"amount": torch_frame.numerical},
    }
    data, col_stats_dict = graph.make_pkey_fkey_graph(base.Database(tables), stypes)
    return data, col_stats_dict


class Model(torch.nn.Module):
    """RelBench's own modules, put together as its examples do."""

    def __init__(self, data: HeteroData, col_stats_dict: Any, channels: int, out_channels: int) -> None:
        super().__init__()
        columns = {node_type: data[node_type].tf.col_names_dict for node_type in data.node_types}
        dated = [node_type for node_type in data.node_types if "time" in data[node_type]]
        kwargs = {"channels": channels, "num_layers": 1}
        self.encoder = nn.HeteroEncoder(channels, columns, col_stats_dict, torch_frame_model_kwargs=kwargs)
        self.temporal_encoder = nn.HeteroTemporalEncoder(dated, channels)
        self.gnn = nn.HeteroGraphSAGE(data.node_types, data.edge_types, channels)
        self.head = MLP([channels, out_channels], norm="layer_norm")

    def forward(self, batch: HeteroData, entity_table: str) -> torch.Tensor:
        seed_time = batch[entity_table].seed_time
        x_dict = self.encoder(batch.tf_dict)
        for node_type, rel_time in self.temporal_encoder(seed_time, batch.time_dict, batch.batch_dict).items():
            x_dict[node_type] = x_dict[node_type] + rel_time
        out: torch.Tensor = self.gnn(x_dict, batch.edge_index_dict)[entity_table]
        return self.head(out[: seed_time.size(0)])


def assert_rows_are_the_datas(batch: HeteroData, data: HeteroData, seed_time: torch.Tensor) -> None:
    """Every table's rows are those of the ids, and none is later than its seed."""
    for node_type in data.node_types:
        part = batch[node_type]
        assert part.tf == data[node_type].tf[part.n_id]
        if "time" in part:
            assert (part.time <= seed_time[part.batch]).all()


CHURN = SimpleNamespace(  # what the scripts read of a task
    entity_col="user", entity_table="users", target_col="churn", task_type=base.TaskType.BINARY_CLASSIFICATION
)


@pytest.mark.parametrize("subgraph_type", ["directional", "bidirectional", "induced"])
@pytest.mark.parametrize("temporal_strategy", ["uniform", "last"])
def test_the_script_for_entities_trains(shop: Any, temporal_strategy: str, subgraph_type: str) -> None:
    """As gnn_entity.py (gnn_node.py in earlier releases)."""
    data, col_stats_dict = shop
    rows = {"user": np.arange(USERS).repeat(3), "date": days(np.tile([40, 60, 80], USERS))}
    rows["churn"] = rows["user"] % 2
    table = base.Table(pd.DataFrame(rows), {"user": "users"}, None, "date")
    table_input = graph.get_node_train_table_input(table=table, task=CHURN)
    loader = NeighborLoader(
        data,
        num_neighbors=[8, 4],
        time_attr="time",
        input_nodes=table_input.nodes,
        input_time=table_input.time,
        transform=table_input.transform,
        batch_size=32,
        temporal_strategy=temporal_strategy,
        subgraph_type=subgraph_type,
        shuffle=True,
        num_workers=1,
        persistent_workers=True,
    )
    model = Model(data, col_stats_dict, channels=16, out_channels=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for batch in loader:
        assert_rows_are_the_datas(batch, data, batch["users"].seed_time)
        assert torch.equal(batch["users"].y, batch["users"].n_id[: batch["users"].batch_size] % 2)
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(model(batch, "users").view(-1), batch["users"].y.float())
        loss.backward()
        optimizer.step()
    assert float(loss) < 2


def frame(num_rows: int) -> Any:
    """A table with a column of each kind that pytorch-frame keeps in a way of its own."""
    rows = torch.arange(num_rows)
    words = torch_frame.data.MultiNestedTensor.from_tensor_mat([[rows[: row % 3]] for row in rows])
    vectors = torch_frame.data.MultiEmbeddingTensor.from_tensor_list([rows.view(-1, 1).repeat(1, 4).float()])
    kinds = {
        torch_frame.numerical: rows.view(-1, 1).float(),
        torch_frame.categorical: rows.view(-1, 1),
        torch_frame.multicategorical: words,
        torch_frame.embedding: vectors,
    }
    return torch_frame.TensorFrame(kinds, {kind: [str(kind)] for kind in kinds}, y=rows)


@pytest.mark.filterwarnings("ignore:relation")
@pytest.mark.parametrize("options", [{}, {"disjoint": True}, {"subgraph_type": "bidirectional"}], ids=str)
def test_tables_of_nodes_and_edges_are_those_of_pygs_own_loader(options: dict[str, Any]) -> None:
    one_type, types = ring(12), library()
    one_type.tf, one_type.edge_tf = frame(12), frame(24)
    types["paper"].tf, types["author", "writes", "paper"].tf = frame(10), frame(27)
    for data, seeds in ((one_type, None), (types, "paper")):
        ours = list(NeighborLoader(data, [2, 2], seeds, batch_size=4, **options))
        assert_same_batches(ours, NodeLoader(data, Replayed(ours), seeds, batch_size=4))


def test_tables_are_chosen_by_name_and_watched() -> None:
    data = ring(12)
    data.tf = frame(12)
    loader = NeighborLoader(data, [2], batch_size=12)
    assert "tf" not in next(iter(NeighborLoader(data, [2], fields=["x"])))
    assert next(iter(NeighborLoader(data, [2], fields=["tf"]))).tf.num_rows == 3
    assert "x" not in next(iter(NeighborLoader(data, [2], fields=["tf"])))
    (batch,) = loader
    assert batch.tf.y.tolist() == list(range(12))
    assert_refused(lambda: hoploom.from_pyg(data), "node.tf is a TensorFrame", "a loader")
    data.tf = frame(6)
    assert_refused(lambda: list(loader), "tf of the data was replaced")
