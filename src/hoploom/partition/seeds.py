"""The seeds that partitioning starts from, where nobody names them."""

from typing import Any, Final

from hoploom.schema import Schema

USUAL_SPLIT = "train"


class Usual:
    """The default of `seeds`."""

    def __repr__(self) -> str:
        return f"<{USUAL_SPLIT!r}, where exactly one node type has members of it; else none>"


USUAL: Final = Usual()


def named_seeds(schema: Schema, seeds: Any) -> Any:
    """What `seeds` stands for: the same, but for USUAL; without the type where there is but one."""
    if isinstance(seeds, Usual):
        having = [node_type.name for node_type in schema.node_types if node_type.splits.get(USUAL_SPLIT)]
        if len(having) != 1:
            return None
        return USUAL_SPLIT if schema.homogeneous else (having[0], USUAL_SPLIT)
    is_pair = isinstance(seeds, tuple | list) and len(seeds) == 2 and isinstance(seeds[0], str)
    if schema.homogeneous and is_pair:
        schema.node_type(seeds[0])
        return seeds[1]
    return seeds
