"""How the tests of wrong input speak: both loaders in one line, and what an error must say."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from torch_geometric.data import Data

from hoploom import ConfigError, DataError, LinkNeighborLoader, NeighborLoader
from support.graphs import random_graph, ring

Call = Callable[[], Any]

# A way out is an imperative, what is needed, or what there is to choose from.
WAY_OUT = re.compile(
    r"\b(give|drop|use|set|build|make|choose|name|leave|rename|cast|move|convert|delete|sort|check|detach|needs?)\b"
    r"|\[|batches (go|always come)|workers are threads"
)


def assert_refused(call: Call, *said: str, also: type[Exception] = ValueError) -> None:
    """The call raises ConfigError or DataError; its message holds all that is given, and a way out."""
    with pytest.raises((ConfigError, DataError)) as caught:
        call()
    message = str(caught.value)
    assert isinstance(caught.value, also)
    assert [part for part in said if part not in message] == [], message
    assert WAY_OUT.search(message), f"no way out in: {message}"
    assert "\n" not in message
    assert len(message) < 600


def assert_raises(kind: type[Exception], match: str, call: Callable[..., Any], *given: Any, **options: Any) -> None:
    """The call, with what it is given, raises such an error, whose message matches."""
    with pytest.raises(kind, match=match):
        call(*given, **options)


def table(cases: dict[str, tuple[Any, ...]]) -> Any:
    """A test's rows: its name -> (call or arguments, what the message holds...)."""
    return pytest.mark.parametrize(("given", "said"), [(row[0], row[1:]) for row in cases.values()], ids=cases.keys())


def nodes(data: Any = None, num_neighbors: Any = (2, 2), **arguments: Any) -> NeighborLoader:
    return NeighborLoader(ring(8) if data is None else data, _listed(num_neighbors), **arguments)


def links(data: Any = None, num_neighbors: Any = (2, 2), **arguments: Any) -> LinkNeighborLoader:
    return LinkNeighborLoader(ring(8) if data is None else data, _listed(num_neighbors), **arguments)


def _listed(num_neighbors: Any) -> Any:
    return list(num_neighbors) if isinstance(num_neighbors, tuple) else num_neighbors


both_loaders = pytest.mark.parametrize("loader", [nodes, links], ids=["nodes", "links"])


def events() -> Data:
    return random_graph(20, 60, 1)
