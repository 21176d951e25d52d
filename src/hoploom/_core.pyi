"""Types of the native core. Only hoploom.ops may import it."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

class Buffer:
    def __init__(self, size: int) -> None: ...
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int) -> memoryview: ...

class MappedFile:
    def __init__(self, descriptor: int, size: int, path: str = "a mapped file") -> None: ...
    def __buffer__(self, flags: int) -> memoryview: ...
    def read_scattered(self) -> None: ...

class DiskFile:
    def __init__(self, path: str) -> None: ...
    @property
    def path(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def is_direct(self) -> bool: ...

class SparseArray:
    def __init__(self, size: int) -> None: ...
    def __buffer__(self, flags: int) -> memoryview: ...
    def forget(self) -> None: ...

class DiskError(RuntimeError): ...

def has_read_queue() -> bool: ...
def read_rows(
    wants: Sequence[tuple[DiskFile, int, int, int, NDArray[Any], NDArray[Any], NDArray[Any]]],
    gap: int,
    depth: int,
    by_threads: bool,
) -> tuple[int, int, float]: ...
def read_lists(
    columns: Sequence[tuple[DiskFile, int, int, SparseArray]],
    indptr: NDArray[Any],
    first_node: int,
    nodes: NDArray[Any],
    gap: int,
    depth: int,
    by_threads: bool,
) -> tuple[int, int, float]: ...
def read_soon(begin: int, bytes: int) -> None: ...
def wait_readable(descriptor: int, microseconds: int) -> bool: ...
def any_damaged() -> bool: ...
def require_whole(address: int) -> None: ...
def pool_use() -> tuple[int, int]: ...
def pool_trim() -> None: ...
def pool_keep_at_most(bytes: int) -> None: ...
def keep_freed_memory() -> bool: ...
def give_back_freed_memory() -> None: ...

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
    window: int = -1,
    excluded: NDArray[Any] | None = None,
    positions_only: bool = False,
) -> tuple[Buffer, Buffer, Buffer]: ...

class NodeMap:
    def __init__(self, num_nodes: int, budget: int) -> None: ...
    def add_seeds(self, nodes: NDArray[Any], trees: NDArray[Any] | None) -> None: ...
    def add(self, sources: NDArray[Any], counts: NDArray[Any], trees: NDArray[Any] | None) -> Buffer: ...
    def find(self, sources: NDArray[Any], trees: NDArray[Any] | None) -> Buffer: ...
    def nodes(self, begin: int) -> Buffer: ...
    def trees(self, begin: int) -> Buffer: ...
    def take(self) -> Buffer: ...
    def clear(self) -> None: ...
    def __len__(self) -> int: ...

class NodeBudget:
    def __init__(self) -> None: ...
    def add(self, sources: NDArray[Any], local: NDArray[Any], counts: NDArray[Any]) -> None: ...
    def draw(self, key: int, stream: int, count: int) -> Buffer: ...

class IdMap:
    def __init__(self) -> None: ...
    def reserve(self, count: int) -> None: ...
    def add(self, ids: NDArray[Any], places: NDArray[Any] | None) -> None: ...
    def find(self, ids: NDArray[Any], places: NDArray[Any] | None) -> tuple[Buffer, Buffer, Buffer]: ...
    def ids(self) -> Buffer: ...
    def bytes(self) -> int: ...
    def __len__(self) -> int: ...

class IdRanks:
    def __init__(self, ids: NDArray[Any]) -> None: ...
    def find(self, ids: NDArray[Any], places: NDArray[Any] | None) -> tuple[Buffer, Buffer, Buffer]: ...
    def ids(self) -> Buffer: ...
    def bytes(self) -> int: ...
    @staticmethod
    def bytes_of(first: int, last: int) -> int: ...
    def __len__(self) -> int: ...

class SlotMap:
    def __init__(self, num_ids: int) -> None: ...
    def begin(self) -> None: ...
    def find(self, ids: NDArray[Any], places: NDArray[Any]) -> tuple[Buffer, Buffer]: ...
    def add(self, ids: NDArray[Any], places: NDArray[Any], slots: NDArray[Any]) -> Buffer: ...
    def ids(self) -> Buffer: ...
    def __len__(self) -> int: ...

def gather(
    table: NDArray[Any], ids: NDArray[Any], places: NDArray[Any] | None, first: int, out: NDArray[Any]
) -> None: ...
def route(ids: NDArray[Any], bounds: NDArray[Any], places: NDArray[Any] | None) -> tuple[Buffer, Buffer]: ...
def scatter(rows: NDArray[Any], places: NDArray[Any], out: NDArray[Any]) -> None: ...
def select(ids: NDArray[Any], places: NDArray[Any]) -> Buffer: ...
def narrow(ids: NDArray[Any], places: NDArray[Any] | None, first: int) -> Buffer: ...
def owned(ids: NDArray[Any], first: int, size: int) -> Buffer: ...
def widen_picks(
    counts: NDArray[Any], sources: NDArray[Any], edges: NDArray[Any], first_edge: int
) -> tuple[Buffer, Buffer, Buffer]: ...
def is_counting(places: NDArray[Any]) -> bool: ...
def stitch(
    parts: Sequence[tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]], frontier_size: int
) -> tuple[Buffer, Buffer, Buffer]: ...
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
    indptr: NDArray[Any],
    rows: NDArray[Any],
    x: NDArray[Any],
    weights: NDArray[Any] | None,
    threads: int,
    out: NDArray[Any],
    winners: NDArray[Any],
) -> None: ...
def max_rows_backward(
    out_indptr: NDArray[Any],
    rows: NDArray[Any],
    places: NDArray[Any] | None,
    indptr: NDArray[Any],
    grad: NDArray[Any],
    weights: NDArray[Any] | None,
    winners: NDArray[Any],
    threads: int,
    out: NDArray[Any],
) -> None: ...
def message_rows(
    indptr: NDArray[Any],
    rows: NDArray[Any],
    x: NDArray[Any],
    term_rows: NDArray[Any],
    weight: NDArray[Any] | None,
    message: int,
    mean: bool,
    threads: int,
    out: NDArray[Any],
    winners: NDArray[Any] | None,
) -> None: ...
def message_rows_backward(
    out_indptr: NDArray[Any],
    rows: NDArray[Any],
    places: NDArray[Any] | None,
    x: NDArray[Any],
    term_rows: NDArray[Any],
    weight: NDArray[Any] | None,
    message: int,
    grad: NDArray[Any],
    threads: int,
    out: NDArray[Any],
) -> None: ...
def message_terms_backward(
    indptr: NDArray[Any],
    rows: NDArray[Any],
    x: NDArray[Any],
    term_rows: NDArray[Any],
    weight: NDArray[Any] | None,
    message: int,
    grad: NDArray[Any],
    winners: NDArray[Any] | None,
    threads: int,
    grad_rows: NDArray[Any] | None,
    grad_weight: NDArray[Any] | None,
) -> None: ...
def pair_scores(
    indptr: NDArray[Any],
    rows: NDArray[Any],
    left: NDArray[Any],
    right: NDArray[Any],
    term_rows: NDArray[Any] | None,
    weight: NDArray[Any] | None,
    att: NDArray[Any],
    slope: float,
    threads: int,
    out: NDArray[Any],
) -> None: ...
def pair_scores_backward_left(
    out_indptr: NDArray[Any],
    rows: NDArray[Any],
    places: NDArray[Any] | None,
    left: NDArray[Any],
    right: NDArray[Any],
    term_rows: NDArray[Any] | None,
    weight: NDArray[Any] | None,
    att: NDArray[Any],
    slope: float,
    grad: NDArray[Any],
    threads: int,
    out: NDArray[Any],
) -> None: ...
def pair_scores_backward_right(
    indptr: NDArray[Any],
    rows: NDArray[Any],
    left: NDArray[Any],
    right: NDArray[Any],
    term_rows: NDArray[Any] | None,
    weight: NDArray[Any] | None,
    att: NDArray[Any],
    slope: float,
    grad: NDArray[Any],
    threads: int,
    out: NDArray[Any],
    grad_att: NDArray[Any],
    grad_rows: NDArray[Any] | None,
    grad_weight: NDArray[Any] | None,
) -> None: ...
def dot_rows(
    indptr: NDArray[Any],
    rows: NDArray[Any],
    x: NDArray[Any],
    y: NDArray[Any],
    winners: NDArray[Any] | None,
    threads: int,
    out: NDArray[Any],
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
def keep_best(
    scores: NDArray[Any],
    first: int,
    indptr: NDArray[Any] | None,
    known: NDArray[Any] | None,
    threads: int,
    best: NDArray[Any],
    ids: NDArray[Any],
) -> None: ...
def has_fast_products() -> bool: ...
def multiply_rows(
    x: NDArray[Any], by: NDArray[Any], turned: bool, bias: NDArray[Any] | None, threads: int, out: NDArray[Any]
) -> None: ...
def multiply_columns(
    a: NDArray[Any], b: NDArray[Any], threads: int, out: NDArray[Any], sums: NDArray[Any] | None
) -> None: ...
def shared_softmax(
    queries: NDArray[Any],
    truths: NDArray[Any],
    candidates: NDArray[Any],
    temperature: float,
    weights: NDArray[Any] | None,
    threads: int,
    losses: NDArray[Any],
    to_queries: NDArray[Any],
    to_truths: NDArray[Any],
    to_candidates: NDArray[Any],
) -> None: ...
def draw_rows(rows: NDArray[Any], ids: NDArray[Any], key: int, normal: bool, spread: float, threads: int) -> None: ...
def look_up_rows(rows: NDArray[Any], file: int, ids: NDArray[Any], threads: int, out: NDArray[Any]) -> None: ...
def update_rows(
    rows: NDArray[Any],
    file: int,
    first: int,
    state: NDArray[Any],
    ids: NDArray[Any],
    gradients: NDArray[Any],
    rule: int,
    rate: float,
    scale: float,
    eps: float,
    beta1: float,
    beta2: float,
    key: int,
    threads: int,
) -> int: ...
def state_width(rule: int, width: int) -> int: ...
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

PartLists = tuple[NDArray[Any] | None, NDArray[Any] | None, int, int, int, int, str, int, int, bool]

def assign_parts(
    lists: list[PartLists],
    bounds: NDArray[Any],
    read: Callable[[int, int, memoryview], None] | None,
    seed_bits: NDArray[Any] | None,
    num_parts: int,
    passes: int,
    imbalance: float,
    threads: int,
    key: int,
    wide_ids: bool,
    out: NDArray[Any],
) -> None: ...
def count_cut(
    lists: list[PartLists],
    bounds: NDArray[Any],
    read: Callable[[int, int, memoryview], None] | None,
    parts: NDArray[Any],
    threads: int,
    out: NDArray[Any],
) -> None: ...
def spread_visits(
    lists: list[PartLists],
    bounds: NDArray[Any],
    read: Callable[[int, int, memoryview], None] | None,
    new_visits: NDArray[Any],
    fanouts: NDArray[Any],
    threads: int,
    visits: NDArray[Any],
) -> None: ...
def drop_pages(mapped: NDArray[Any]) -> None: ...
