"""NumPy and SciPy archives as stores: the layouts that graphs are commonly shared in.

What an archive holds is told from the names of its arrays; nothing is unpickled. An array of numbers that fits no
name and has a row neither per node nor per edge is an error, so that nothing is left behind unseen.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hoploom.errors import DataError
from hoploom.ingest.formats.npz import (
    Matrix,
    NpzArray,
    dense_rows,
    matrix_ends,
    npz_pairs,
    npz_table,
    npz_whole,
    read_arrays,
    take_adjacency,
    take_matrix,
)
from hoploom.ingest.formats.row_source import (
    CHUNK_BYTES,
    Count,
    EdgeSource,
    GraphStreams,
    RowSource,
    edge_stream,
    flat,
    labels,
    masked,
    members,
    node_field,
    write_graph,
)
from hoploom.ingest.stream import EdgeRule, NodeStream, Progress, StoreOptions
from hoploom.schema import HOMOGENEOUS_RELATION, HOMOGENEOUS_TYPE
from hoploom.store import Store

Members = Callable[[], Iterator[Tensor]]

FEATURES = ("x", "features", "node_features", "feat", "attr_matrix")
SPARSE_FEATURES = ("attr", "x", "features")  # with _data (or _values), _indices, _indptr and _shape
LABELS = ("y", "labels", "node_labels", "label")
ENDS = (("row", "col"), ("src", "dst"), ("edge_src", "edge_dst"))
EDGE_FIELDS = {"edge_attr": "edge_attr", "edge_weight": "weight", "weight": "weight"}
SPLITS = {"train": "train", "val": "val", "valid": "val", "test": "test"}
SIZES = ("num_nodes", "num_edges", "num_classes")  # single numbers that may stand beside


def import_archive(
    path: str | Path,
    out: str | Path,
    *,
    rule: EdgeRule | None = None,
    ignore: Sequence[str] = (),
    memory: int = StoreOptions.memory,
    progress: Progress | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Store:
    """Write a store from an .npz and open it: arrays saved by `numpy.savez`, or a matrix by `scipy.save_npz`.

    `rule` says what becomes of the edges (undirected, without loops or repeats), `ignore` names arrays to leave out.

    >>> import_archive("graph.npz", "graph.store", rule=EdgeRule(undirected=True, deduplicate=True))
    """
    arrays = read_arrays(Path(path), chunk_bytes)
    graph = _read(path, arrays, EdgeRule(in_order=True) if rule is None else rule, ignore)
    return write_graph(out, graph, memory, progress)


def _read(path: str | Path, arrays: Mapping[str, NpzArray], rule: EdgeRule, ignore: Sequence[str]) -> GraphStreams:
    """The streams of an archive."""
    left = dict(arrays)
    absent = sorted(set(ignore) - set(left))
    if absent:
        raise DataError(f"{path} has no array {absent[0]!r} to ignore; it has {sorted(left)}")
    for name in ignore:
        del left[name]
    told = {name: _size(left.pop(name)) for name in SIZES if name in left and left[name].shape in ((), (1,))}
    adjacency = take_adjacency(left)
    fields = _take_nodes(left)
    nodes = _count_nodes(path, fields, adjacency, told, left)
    splits = _take_splits(left, nodes)
    ends = matrix_ends(adjacency, nodes) if adjacency is not None else _take_ends(path, left)
    _check_told(path, told, (nodes, ends.count))
    edge_fields = _take_edge_fields(left, ends.count)
    fields |= _take_rest(left, nodes, ends.count, edge_fields)
    ends = EdgeSource(ends.tables, ends.count, {**ends.fields, **edge_fields})
    for name, table in fields.items():
        if table.num_rows != nodes.rows:
            raise DataError(f"{table.name} ({name}) has {table.num_rows} rows for {nodes.rows} nodes ({nodes.told_by})")
    node = NodeStream(
        HOMOGENEOUS_TYPE, [0, nodes.rows], [node_field(name, table, nodes) for name, table in fields.items()], splits
    )
    edges = edge_stream(HOMOGENEOUS_RELATION, ends, (nodes.rows, nodes.rows), rule)
    weight = "weight" if "weight" in ends.fields else None
    return GraphStreams([node], [edges], homogeneous=True, weight=weight)


# --- nodes ----------------------------------------------------------------------------------


def _take_nodes(left: dict[str, NpzArray]) -> dict[str, RowSource]:
    """Features and labels."""
    fields = {}
    for prefix in SPARSE_FEATURES:
        matrix = take_matrix(left, prefix)
        if matrix is not None and "x" not in fields:
            fields["x"] = dense_rows(matrix)
    for name in FEATURES:
        if name in left and "x" not in fields:
            fields["x"] = npz_table(left.pop(name))
    for name in LABELS:
        if name in left and "y" not in fields:
            fields["y"] = _labels(left.pop(name))
    return fields


def _labels(array: NpzArray) -> RowSource:
    """Classes are integers, -1 where not known; numbers, and several labels a node, are kept as they are."""
    table = npz_table(array)
    classes = array.dtype.kind in "iu" and table.field.shape in ((), (1,))
    return labels(table, None) if classes else table


def _size(array: NpzArray) -> int:
    """A single number."""
    if array.dtype.kind not in "iu":
        raise DataError(f"{array.label} has dtype {array.dtype}; save it as an integer, or leave it out with ignore")
    return int(npz_whole(array).reshape(()))


def _check_told(path: str | Path, told: Mapping[str, int], counts: Sequence[Count]) -> None:
    """Raise where a size that stands beside the arrays is not theirs."""
    for count in counts:
        size = told.get(f"num_{count.of}", count.rows)
        if size != count.rows:
            found = f"num_{count.of} is {size}, but there are {count.rows} {count.of} ({count.told_by})"
            raise DataError(f"{path}: {found}; correct one, or leave num_{count.of} out with ignore")


def _count_nodes(
    path: str | Path,
    fields: Mapping[str, RowSource],
    adjacency: Matrix | None,
    told: Mapping[str, int],
    left: Mapping[str, NpzArray],
) -> Count:
    for name, table in fields.items():
        if table.num_rows is not None:
            return Count("nodes", table.num_rows, f"as many as {name} has")
    if adjacency is not None:
        return Count("nodes", adjacency.shape[0], "the shape of the matrix")
    if "num_nodes" in told:
        return Count("nodes", told["num_nodes"], "num_nodes")
    masks = [array for name, array in left.items() if name.endswith("_mask") and len(array.shape) == 1]
    if masks:
        return Count("nodes", masks[0].shape[0], f"as many as {masks[0].name} has")
    raise DataError(f"{path} does not tell how many nodes there are; save an array num_nodes with it")


def _take_splits(left: dict[str, NpzArray], nodes: Count) -> dict[str, Members]:
    """Masks and lists of ids; several masks under one name, a row each, become train0, train1, ..."""
    found: dict[str, Members] = {}
    for theirs, ours in SPLITS.items():
        for name in (f"{theirs}_mask", f"{theirs}_masks", f"{theirs}_idx"):
            if name not in left:
                continue
            array = left.pop(name)
            if name.endswith("_idx"):
                found[ours] = members(npz_table(array), nodes.rows)
            elif len(array.shape) == 1 or array.shape == (nodes.rows, 1):
                found[ours] = masked(npz_table(array), nodes)
            else:
                found |= {f"{ours}{number}": row for number, row in enumerate(_mask_rows(array, nodes))}
    return found


def _mask_rows(array: NpzArray, nodes: Count) -> list[Members]:
    """Masks of shape [several, nodes], or [nodes, several]."""
    if len(array.shape) != 2 or nodes.rows not in array.shape:
        raise DataError(f"{array.label} has shape {array.shape}; give masks of one entry per node ({nodes.rows})")
    by_row = array.shape[1] == nodes.rows
    return [partial(_mask_row, array, number, by_row) for number in range(array.shape[0 if by_row else 1])]


def _mask_row(array: NpzArray, number: int, by_row: bool) -> Iterator[Tensor]:
    first = 0
    for index, chunk in _indexed(npz_table(array)):
        if by_row and index <= number < index + len(chunk):
            yield torch.nonzero(chunk[number - index]).view(-1)
        elif not by_row:
            yield torch.nonzero(chunk[:, number]).view(-1) + first
            first += len(chunk)


def _indexed(table: RowSource) -> Iterator[tuple[int, Tensor]]:
    first = 0
    for chunk in table.chunks():
        yield first, chunk
        first += len(chunk)


# --- edges ----------------------------------------------------------------------------------


def _take_ends(path: str | Path, left: dict[str, NpzArray]) -> EdgeSource:
    """Edges as edge_index [2, e], as edges [e, 2], or as two arrays."""
    if "edge_index" in left:
        array = left.pop("edge_index")
        return EdgeSource(npz_pairs(array), Count("edges", array.shape[1], array.name))
    if "edges" in left:
        array = left.pop("edges")
        if len(array.shape) != 2 or array.shape[1] != 2:
            raise DataError(f"{array.label} has shape {array.shape}; give [number of edges, 2]")
        return EdgeSource([npz_table(array)], Count("edges", array.shape[0], array.name))
    for pair in ENDS:
        if all(name in left for name in pair):
            tables = [flat(npz_table(left.pop(name))) for name in pair]
            return EdgeSource(tables, Count("edges", tables[0].num_rows or 0, pair[0]))
    raise DataError(f"{path} has no edges; save them as edge_index [2, e], or as row and col; it has {sorted(left)}")


def _take_edge_fields(left: dict[str, NpzArray], edges: Count) -> dict[str, RowSource]:
    found = {ours: npz_table(left.pop(name)) for name, ours in EDGE_FIELDS.items() if name in left}
    return {ours: flat(table) if ours == "weight" else table for ours, table in found.items()}


def _take_rest(
    left: dict[str, NpzArray], nodes: Count, edges: Count, edge_fields: dict[str, RowSource]
) -> dict[str, RowSource]:
    """What else has a row per node is a field of nodes, or a row per edge a field of edges; text is left out.

    Where there are as many nodes as edges, the name must begin with node_ or edge_.
    """
    fields: dict[str, RowSource] = {}
    owners = {"node": (nodes, fields), "edge": (edges, edge_fields)}
    for name, array in left.items():
        if not array.is_numeric:
            continue
        fitting = [owner for owner, (count, _) in owners.items() if array.shape[:1] == (count.rows,)]
        if len(fitting) > 1:
            fitting = [owner for owner in fitting if name.startswith(f"{owner}_")]
            if not fitting:
                raise DataError(
                    f"{array.label} has {nodes.rows} rows, as many as there are nodes and edges; call it node_{name} "
                    f"or edge_{name}, or leave it out with ignore"
                )
        if not fitting:
            raise DataError(
                f"{array.label} has shape {array.shape}, a row neither per node ({nodes.rows}) nor per edge "
                f"({edges.rows}); leave it out with ignore"
            )
        owners[fitting[0]][1][name] = npz_table(array)
    return fields
