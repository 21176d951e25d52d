"""Import NumPy and SciPy archives in the layouts in which graphs are commonly shared.

Arrays are recognized by their names; nothing is unpickled. An unknown array of numbers with a row neither per node nor
per edge is an error, so that nothing is left out silently.
"""

from collections.abc import Iterator, Mapping, Sequence
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
    npz_values,
    read_arrays,
    take_adjacency,
    take_matrix,
)
from hoploom.ingest.formats.row_source import (
    CHUNK_BYTES,
    Count,
    EdgeSource,
    Members,
    RowSource,
    edge_stream,
    flat,
    labels,
    members,
    node_stream,
    write_graph,
)
from hoploom.ingest.stream import EdgeRule, Progress, StoreOptions
from hoploom.schema import HOMOGENEOUS_RELATION, HOMOGENEOUS_TYPE
from hoploom.store import Store

FEATURES = ("x", "features", "node_features", "feat", "attr_matrix")
SPARSE_FEATURES = ("attr", "x", "features")  # with _data (or _values), _indices, _indptr and _shape
LABELS = ("y", "labels", "node_labels", "label")
ENDS = (("row", "col"), ("src", "dst"), ("edge_src", "edge_dst"))
EDGE_FIELDS = {"edge_attr": "edge_attr", "edge_weight": "weight", "weight": "weight"}
SPLITS = {"train": "train", "val": "val", "valid": "val", "test": "test"}
SIZES = ("num_nodes", "num_edges", "num_classes")  # single numbers that may be there


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

    `rule` changes the edges (undirected, without loops or repeats); `ignore` names arrays to leave out.

    >>> import_archive("graph.npz", "graph.store", rule=EdgeRule(undirected=True, deduplicate=True))
    """
    left = dict(read_arrays(Path(path), chunk_bytes))
    for name in ignore:
        if left.pop(name, None) is None:
            raise DataError(f"{path} has no array {name!r} to ignore; it has {sorted(left)}")
    sizes = {name: _size(left.pop(name)) for name in SIZES if name in left and left[name].shape in ((), (1,))}
    adjacency, fields = take_adjacency(left), _take_nodes(left)
    nodes = _count_nodes(path, fields, adjacency, sizes, left)
    splits = _take_splits(left, nodes)
    ends = matrix_ends(adjacency, nodes) if adjacency is not None else _take_ends(path, left)
    for count in (nodes, ends.count):
        if (size := sizes.get(f"num_{count.of}", count.rows)) != count.rows:
            found = f"num_{count.of} is {size}, but there are {count.rows} {count.of} ({count.given_by})"
            raise DataError(f"{path}: {found}; correct one, or leave num_{count.of} out with ignore")
    edge_fields = dict(ends.fields)
    for name, ours in EDGE_FIELDS.items():
        if name in left:
            table = npz_table(left.pop(name))
            edge_fields[ours] = flat(table) if ours == "weight" else table
    fields |= _take_rest(left, nodes, ends.count, edge_fields)
    node = node_stream(HOMOGENEOUS_TYPE, fields, nodes, splits)
    ends = EdgeSource(ends.tables, ends.count, edge_fields)
    rule = EdgeRule(in_order=True) if rule is None else rule
    edges = edge_stream(HOMOGENEOUS_RELATION, ends, (nodes.rows, nodes.rows), rule)
    options = StoreOptions(weight="weight" if "weight" in edge_fields else None, homogeneous=True, memory=memory)
    return write_graph(out, [node], [edges], options, progress)


# --- nodes ----------------------------------------------------------------------------------


def _take_nodes(left: dict[str, NpzArray]) -> dict[str, RowSource]:
    """Remove and return features and labels."""
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
    """Return integers as classes, -1 if unknown; fractions, and several labels a node, unchanged."""
    table = npz_table(array)
    classes = array.dtype.kind in "iu" and table.field.shape in ((), (1,))
    return labels(table, None) if classes else table


def _size(array: NpzArray) -> int:
    """Return a single number."""
    if array.dtype.kind not in "iu":
        raise DataError(f"{array.label} has dtype {array.dtype}; save it as an integer, or leave it out with ignore")
    return int(npz_values(array).item())


def _count_nodes(
    path: str | Path,
    fields: Mapping[str, RowSource],
    adjacency: Matrix | None,
    sizes: Mapping[str, int],
    left: Mapping[str, NpzArray],
) -> Count:
    for name, table in fields.items():
        if table.num_rows is not None:
            return Count("nodes", table.num_rows, f"as many as {name} has")
    if adjacency is not None:
        return Count("nodes", adjacency.shape[0], "the shape of the matrix")
    if "num_nodes" in sizes:
        return Count("nodes", sizes["num_nodes"], "num_nodes")
    masks = [array for name, array in left.items() if name.endswith("_mask") and len(array.shape) == 1]
    if masks:
        return Count("nodes", masks[0].shape[0], f"as many as {masks[0].name} has")
    raise DataError(f"{path} does not say how many nodes there are; save an array num_nodes with it")


def _take_splits(left: dict[str, NpzArray], nodes: Count) -> dict[str, Members]:
    """Remove and return splits, from masks or lists of ids; several masks under one name become train0, train1, ..."""
    found: dict[str, Members] = {}
    for theirs, ours in SPLITS.items():
        for array in (left.pop(f"{theirs}_{name}", None) for name in ("mask", "masks")):
            if array is not None:
                found |= _masks(array, ours, nodes)
        if f"{theirs}_idx" in left:
            found[ours] = members(npz_table(left.pop(f"{theirs}_idx")), nodes.rows)
    return found


def _masks(array: NpzArray, name: str, nodes: Count) -> dict[str, Members]:
    """Return the splits of an array of one mask, or of several: [number of masks, num_nodes], or transposed."""
    if nodes.rows not in array.shape or len(array.shape) > 2 or not array.is_numeric:
        hint = f"give masks of one entry per node ({nodes.rows})"
        raise DataError(f"{array.label} has shape {array.shape} and dtype {array.dtype}; {hint}")
    if array.shape in ((nodes.rows,), (nodes.rows, 1)):
        return {name: partial(_marked, array, 0, by_row=False)}
    by_row = array.shape[1] == nodes.rows
    numbers = range(array.shape[0 if by_row else 1])
    return {f"{name}{number}": partial(_marked, array, number, by_row=by_row) for number in numbers}


def _marked(array: NpzArray, number: int, *, by_row: bool) -> Iterator[Tensor]:
    """Yield the nodes of a mask, which is a row or a column."""
    first = 0
    for rows in npz_table(array).chunks():
        if not by_row:
            column = rows[:, number] if rows.dim() == 2 else rows
            yield torch.nonzero(column).view(-1) + first
        elif first <= number < first + len(rows):
            yield torch.nonzero(rows[number - first]).view(-1)
        first += len(rows)


# --- edges ----------------------------------------------------------------------------------


def _take_ends(path: str | Path, left: dict[str, NpzArray]) -> EdgeSource:
    """Remove and return the edges: edge_index [2, e], edges [e, 2], or two arrays."""
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


def _take_rest(
    left: dict[str, NpzArray], nodes: Count, edges: Count, edge_fields: dict[str, RowSource]
) -> dict[str, RowSource]:
    """Return other arrays with a row per node as fields; add those with a row per edge to the fields of edges.

    Text is left out. If there are as many nodes as edges, the name must begin with node_ or edge_.
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
            counts = f"{nodes.rows} nodes and {edges.rows} edges"
            hint = f"leave it out with ignore, or call it node_{name} or edge_{name} where both numbers are the same"
            raise DataError(f"{array.label} has shape {array.shape} for {counts}; give a row for each of one; {hint}")
        owners[fitting[0]][1][name] = npz_table(array)
    return fields
