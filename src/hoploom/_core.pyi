"""Types of the native core. Only hoploom.ops may import it."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

class Buffer:
    def __init__(self, size: int) -> None: ...
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int) -> memoryview: ...

class MappedFile:
    def __init__(self, descriptor: int, size: int) -> None: ...
    def __buffer__(self, flags: int) -> memoryview: ...

def pool_use() -> tuple[int, int]: ...
def pool_trim() -> None: ...
def keep_freed_memory() -> bool: ...

class Lists:
    def __init__(
        self,
        indptr: Ints,
        indices: NDArray[Any],
        first_node: int,
        first_edge: int,
        weight: NDArray[Any] | None,
        edge_time: NDArray[Any] | None,
        source_time: NDArray[Any] | None,
    ) -> None: ...

def sample(
    lists: Lists,
    nodes: NDArray[Any],
    trees: NDArray[Any] | None,
    times: NDArray[Any] | None,
    key: int,
    stream: int,
    fanout: int,
    replace: bool,
    last: bool,
    labor: bool,
    weighted: bool,
) -> tuple[Buffer, Buffer, Buffer]: ...

class NodeMap:
    def __init__(self, num_nodes: int, budget: int) -> None: ...
    def add_seeds(self, nodes: NDArray[Any], trees: NDArray[Any] | None) -> None: ...
    def add(self, sources: NDArray[Any], counts: NDArray[Any], trees: NDArray[Any] | None) -> Buffer: ...
    def find(self, sources: NDArray[Any]) -> Buffer: ...
    def nodes(self, begin: int) -> Buffer: ...
    def trees(self, begin: int) -> Buffer: ...
    def take(self) -> Buffer: ...
    def clear(self) -> None: ...
    def __len__(self) -> int: ...

def gather(table: NDArray[Any], ids: NDArray[Any], first: int, out: NDArray[Any]) -> None: ...
def scatter(rows: NDArray[Any], places: NDArray[Any], out: NDArray[Any]) -> None: ...
def scatter_lists(
    values: NDArray[Any], counts: NDArray[Any], places: NDArray[Any], begins: NDArray[Any], out: NDArray[Any]
) -> None: ...
def fill_edges(local: NDArray[Any], counts: NDArray[Any], first: int, offset: int, out: NDArray[Any]) -> None: ...
def build_csc(
    sources: NDArray[Any],
    destinations: NDArray[Any],
    num_sources: int,
    num_destinations: int,
    threads: int,
    edge_time: NDArray[Any] | None,
    source_time: NDArray[Any] | None,
) -> tuple[Buffer, Buffer, Buffer | None, bool]: ...
def sum_rows(
    indptr: NDArray[Any],
    rows: NDArray[Any],
    places: NDArray[Any] | None,
    x: NDArray[Any],
    weights: NDArray[Any] | None,
    mean: bool,
    threads: int,
    out: NDArray[Any],
) -> None: ...
def max_rows(
    indptr: NDArray[Any], rows: NDArray[Any], x: NDArray[Any], threads: int, out: NDArray[Any], winners: NDArray[Any]
) -> None: ...
def max_rows_backward(
    out_indptr: NDArray[Any],
    rows: NDArray[Any],
    places: NDArray[Any] | None,
    indptr: NDArray[Any],
    grad: NDArray[Any],
    winners: NDArray[Any],
    threads: int,
    out: NDArray[Any],
) -> None: ...
def dot_rows(
    indptr: NDArray[Any], rows: NDArray[Any], x: NDArray[Any], y: NDArray[Any], threads: int, out: NDArray[Any]
) -> None: ...
def softmax_lists(
    indptr: NDArray[Any], scores: NDArray[Any], grad: NDArray[Any] | None, threads: int, out: NDArray[Any]
) -> None: ...
def sum_tables(
    tables: list[tuple[NDArray[Any], int]],
    element: int,
    ids: NDArray[Any],
    indptr: NDArray[Any],
    mean: bool,
    out: NDArray[Any],
) -> None: ...
def mix(state: int, value: int) -> int: ...
def permute(key: int, size: int, begin: int, end: int) -> Buffer: ...
def draw_bounded(key: int, ids: NDArray[Any], stream: int, draw: int, bound: int) -> Buffer: ...
def draw_words(key: int, ids: NDArray[Any], stream: int, block: int) -> Buffer: ...
def pack_records(
    keys: NDArray[Any], columns: list[NDArray[Any]], bounds: NDArray[Any], records: NDArray[Any], counts: NDArray[Any]
) -> None: ...
def place_column(records: NDArray[Any], offset: int, out: NDArray[Any]) -> None: ...
def take_column(records: NDArray[Any], order: NDArray[Any], offset: int, out: NDArray[Any]) -> None: ...
def order_records(
    records: NDArray[Any],
    source_bytes: int,
    time_offset: int,
    canonical: bool,
    deduplicate: bool,
    threads: int,
    indptr: NDArray[Any],
    order: NDArray[Any],
) -> int: ...
def assign_parts(
    lists: list[tuple[NDArray[Any], NDArray[Any], int, int, int, int, str, bool]],
    bounds: NDArray[Any],
    is_seed: NDArray[Any] | None,
    num_parts: int,
    passes: int,
    imbalance: float,
    threads: int,
    key: int,
    out: NDArray[Any],
) -> None: ...
def count_cut(
    lists: list[tuple[NDArray[Any], NDArray[Any], int, int, int, int, str, bool]],
    bounds: NDArray[Any],
    parts: NDArray[Any],
    threads: int,
    out: NDArray[Any],
) -> None: ...
def drop_pages(mapped: NDArray[Any]) -> None: ...
