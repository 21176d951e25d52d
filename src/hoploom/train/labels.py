"""Labels that cannot be learned: the first seed that has one, by store id and user's id, and their number."""

from collections.abc import Callable

import torch
from torch import Tensor

from hoploom.errors import DataError
from hoploom.schema import ORIGINAL_ID, holds_text
from hoploom.store import Store, Wanted

CHECKED_AT_ONCE = 1 << 20  # labels
Judge = Callable[[Tensor], tuple[Tensor, Tensor, str]]  # labels -> targets, where they cannot be one, what can be one


def targets_of(judge: Judge, name: str, labels: Tensor, nodes: Tensor) -> Tensor:
    """The labels of a batch as targets. On a device nobody looks at them, as every step would wait."""
    targets, bad, wanted = judge(labels)
    if not bad.is_cuda and bad.any():
        row = int(_rows_of(bad)[0])
        raise _refused(str(int(nodes[row])), name, labels[row], wanted)
    return targets


def check_all(judge: Judge, store: Store, node_type: str, name: str, nodes: Tensor) -> None:
    """Raise DataError if one of these nodes has a label that cannot be a target."""
    found, count = None, 0
    for some in torch.split(nodes, CHECKED_AT_ONCE):
        labels = store.features.gather([Wanted(node_type, name, some)])[0]
        _, bad, wanted = judge(labels)
        rows = _rows_of(bad)
        count += len(rows)
        if found is None and len(rows):
            found = some[rows[0]], labels[rows[0]], wanted
    if found is not None:
        node, label, wanted = found
        more = f", the first of {count:,} such labels" if count > 1 else ""
        raise _refused(f"{int(node)}{_original(store, node_type, node)}", name, label, wanted, more)


def _rows_of(bad: Tensor) -> Tensor:
    """The rows with a label that cannot be a target."""
    return (bad if bad.dim() == 1 else bad.flatten(1).any(1)).nonzero()[:, 0]


def _original(store: Store, node_type: str, node: Tensor) -> str:
    """The user's own id of a node, where the store has another."""
    field = store.schema.node_type(node_type).fields.get(ORIGINAL_ID)
    if field is None:
        return ""
    row = store.features.gather([Wanted(node_type, ORIGINAL_ID, node.view(1))])[0][0]
    own = bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") if holds_text(field) else int(row)
    return f" (your id {own!r})"


def _refused(node: str, name: str, label: Tensor, wanted: str, more: str = "") -> DataError:
    what = f"node {node} is a seed with the label {name}={label.squeeze().tolist()!r:.80}{more}"
    is_null = bool((label.eq(-1) | label.isnan()).all())
    null = f" (a null label in a table becomes {label.flatten()[0].item()})" if is_null else ""
    return DataError(f"{what}; {wanted}{null}, or leave it out of the split")
