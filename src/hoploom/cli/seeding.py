"""What training will start from, as `partition` is told it: a split, of a type where several have it, or nothing."""

from hoploom.config.values import nearest, parse_fanouts
from hoploom.errors import ConfigError
from hoploom.schema import Schema

USUAL = "train"
NONE = "none"
Seeds = str | tuple[str, str] | None  # as loaders take them; None: nothing is known of training


def fanouts_of(flag: str, text: str) -> list[int] | None:
    """Picks per hop; None: nothing is sampled."""
    return None if text == NONE else list(parse_fanouts(flag, text))


def seeds_of(schema: Schema, text: str | None) -> Seeds:
    """The seeds asked for; if none were, the usual split where just one type has members of it."""
    if text == NONE:
        return None
    if text is None:
        having = _having(schema, USUAL)
        return _as_loaders_take(schema, having[0], USUAL) if len(having) == 1 else None
    node_type, colon, split = text.rpartition(":")
    known = {name for t in schema.node_types for name in t.splits}
    if colon and text not in known:
        return _of_type(schema, text, node_type, split)
    having = _having(schema, text)
    if len(having) == 1:
        return _as_loaders_take(schema, having[0], text)
    if having:
        raise ConfigError(f"--seeds is {text!r}, a split of {' and '.join(having)}; give one, e.g. {having[0]}:{text}")
    raise ConfigError(f"--seeds is {text!r}, {_unknown(text, known)}")


def _of_type(schema: Schema, text: str, node_type: str, split: str) -> Seeds:
    names = [t.name for t in schema.node_types]
    if node_type not in names:
        close = nearest(node_type, names)
        hint = f"did you mean {close}?" if close else f"the node types are {', '.join(names)}"
        raise ConfigError(f"--seeds is {text!r}, but there is no node type {node_type!r}; {hint}")
    splits = schema.node_type(node_type).splits
    if not splits.get(split):
        raise ConfigError(f"--seeds is {text!r}, {_unknown(split, set(splits))}")
    return _as_loaders_take(schema, node_type, split)


def _unknown(split: str, known: set[str]) -> str:
    if split in known:
        return "a split without members; give another, or none"
    close = nearest(split, sorted(known))
    listed = f"the splits are {', '.join(sorted(known))}" if known else "there are no splits"
    return f"but there is no split {split!r}; {f'did you mean {close}?' if close else f'{listed}; give one, or none'}"


def _having(schema: Schema, split: str) -> list[str]:
    """The node types with members of a split."""
    return [t.name for t in schema.node_types if t.splits.get(split)]


def _as_loaders_take(schema: Schema, node_type: str, split: str) -> Seeds:
    return split if schema.homogeneous else (node_type, split)
