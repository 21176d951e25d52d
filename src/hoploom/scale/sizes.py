"""Bytes of a store, file by file as docs/format.md has them, and what of it a host wants in memory.

`store.json` is left out: it is some kilobytes.
"""

from dataclasses import dataclass

from hoploom.ops.relabel import MAP_BUDGET
from hoploom.scale.spec import Question
from hoploom.store.format import ID_LIMIT

HEADER = 128  # bytes of a .npy file before its values
SLOT = 4  # bytes of a node in a direct map of a batch's nodes


@dataclass(frozen=True)
class Item:
    """Some files of a host, or all of one kind."""

    name: str
    disk: float
    memory: float  # of these bytes, what batches touch


def id_bytes(question: Question) -> int:
    """Of one entry of `indices`."""
    return 4 if (question.largest_type or question.nodes) < ID_LIMIT else 8


def is_hashed(question: Question) -> bool:
    """Whether a batch's nodes are found by hashing, beyond the budget of a direct map."""
    return (question.largest_type or question.nodes) * SLOT > MAP_BUDGET


def lists_bytes(num_nodes: float, num_edges: float, per_edge: int = 4) -> float:
    """`indptr` and `indices`."""
    return num_nodes * 8 + num_edges * per_edge


def topology_bytes(question: Question, share: float) -> float:
    """The adjacency lists of a share of the nodes, with the weights and times that the sampler reads."""
    per_edge = id_bytes(question) + 4 * question.weights + 8 * question.times
    parts = question.parts * share
    headers = parts * ((2 + question.weights + question.times) * HEADER + 8)  # and one more entry of indptr
    return lists_bytes(question.nodes * share, question.edges * share, per_edge) + headers


def node_bytes(question: Question) -> int:
    """What a batch holds of one node besides its ids: every field."""
    return question.row_bytes + 8 * question.labels + question.original_id_bytes


def edge_field_bytes(question: Question) -> int:
    """What a batch of mode "subgraph" holds of one edge besides its ends."""
    own = 0 if question.edge_features is None else question.edge_features.row_bytes
    return own + 4 * question.weights + 8 * question.times


def host_items(question: Question, *, everywhere: bool) -> list[Item]:
    """What one host holds of the store, on disk and in memory; `everywhere`: the whole topology."""
    share = 1 / question.hosts
    nodes, edges = question.nodes * share, question.edges * share
    topology = topology_bytes(question, 1.0 if everywhere else share)
    items = [Item("topology", topology, topology)]
    for name, row in (
        ("features", question.row_bytes),
        ("labels", 8 * question.labels),
        ("original ids", question.original_id_bytes),
    ):
        if row:
            size = nodes * row + HEADER * question.parts_per_host
            items.append(Item(name, size, size))
    if edge_field_bytes(question):
        count = question.weights + question.times + (question.edge_features is not None)
        size = edges * edge_field_bytes(question) + count * HEADER * question.parts_per_host
        items.append(Item("edge fields", size, size if question.mode == "subgraph" else 0.0))
    if question.train_share:
        items.append(Item("training seeds", nodes * question.train_share * 8 + HEADER * question.parts_per_host, 0.0))
    if question.cache and question.hosts > 1:
        items.append(Item("cache of remote rows", 0.0, cache_bytes(question)))
    return items


def cache_bytes(question: Question) -> float:
    """The rows of other hosts that a host keeps; its ranks share them."""
    return question.cache * question.nodes * (1 - 1 / question.hosts) * node_bytes(question)


def num_files(question: Question) -> int:
    """Of the whole store, besides store.json."""
    edge_files = 2 + 2 * question.weights + 2 * question.times + (question.edge_features is not None)
    node_files = (question.features is not None) + question.labels + (question.original_id_bytes > 0)
    return question.parts * (edge_files + node_files + (question.train_share > 0))
