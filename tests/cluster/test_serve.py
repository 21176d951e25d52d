"""Graph servers in other processes: the same batch wherever its parts are, and what a server says and refuses."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import store_of
from support.graphs import save_in_parts
from support.servers import OneProcess

import hoploom
from hoploom import ConfigError, PeerError, StoreError
from hoploom.serve.peers import Peers
from hoploom.serve.security import ClientSecurity
from hoploom.serve.wire import Message
from hoploom.store import Wanted

pytestmark = pytest.mark.timeout(180)
PARTS = [[0, 1], [2, 3], [1, 2]]  # of four; the last server holds replicas


class Fleet:
    """Stores in four parts and their servers, one fleet for each way a store was built, all in one other process."""

    def __init__(self, folder: Path, process: OneProcess) -> None:
        self._folder, self._process = folder, process
        self._known: dict[str, tuple[Path, list[str]]] = {}

    def of(self, heterogeneous: bool, attrs: dict[str, Any]) -> tuple[Path, list[str]]:
        key = f"{heterogeneous}-{'-'.join(map(str, attrs.values()))}"
        if key not in self._known:
            path = self._folder / key
            save_in_parts(store_of(heterogeneous, attrs), path, 4)
            self._known[key] = path, self._process.serve(path, PARTS)
        return self._known[key]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, server_process: OneProcess) -> Fleet:
    return Fleet(tmp_path_factory.mktemp("fleet"), server_process)


def test_fields_of_edges_that_lie_beside_the_topology_are_not_asked_for(fleet: Fleet) -> None:
    path, servers = fleet.of(False, {})
    local = hoploom.open(path)
    key, count = local.schema.relations[0].key, local.schema.relations[0].num_edges
    fields = [Wanted(key, name, torch.arange(count)) for name in local.schema.relations[0].fields]
    assert fields
    for topology, asked in (("local", 0), ("parted", 3)):
        with hoploom.connect(servers, path, parts=[0], topology=topology) as worker:  # type: ignore[arg-type]
            before = worker.traffic()["requests"]
            for ours, theirs in zip(worker.features.gather(fields), local.features.gather(fields), strict=True):
                assert torch.equal(ours, theirs)
            assert worker.traffic()["requests"] - before == asked


@pytest.fixture(scope="module")
def peers(fleet: Fleet) -> Iterator[Peers]:
    _, servers = fleet.of(False, {})
    with Peers(servers[:1], ClientSecurity(), timeout=10.0, own=[2, 3]) as peers:
        yield peers


IDS = torch.arange(3)
SAMPLE = {
    **{"ask": "sample", "part": 0, "frontiers": [[0, False, False]], "key": 1, "hop": 0, "fanouts": [2]},
    **dict.fromkeys(("replace", "last", "labor", "weighted"), False),
}


@pytest.mark.parametrize(
    ("header", "tensors", "said"),
    [
        ({"ask": "everything"}, [], "asks for 'everything'"),
        ({}, [], "ask of a request is None; it needs a name"),
        ({"ask": "gather", "part": 3, "wanted": []}, [], "part 3; this server holds parts \\[0, 1\\]"),
        ({"ask": "gather", "part": "0", "wanted": []}, [], "part '0'"),
        ({"ask": "gather", "part": True, "wanted": []}, [], "part True"),
        ({"ask": "gather", "part": 0}, [], "wanted of a request"),
        ({"ask": "gather", "part": 0, "wanted": [["node", "x", 0]]}, [torch.tensor([15])], "ids of 'node': id 15 is"),
        ({"ask": "gather", "part": 0, "wanted": [["node", "x", 0]]}, [torch.tensor([-1])], "ids of 'node': id -1 is"),
        ({"ask": "gather", "part": 0, "wanted": [["node", "x", 0]]}, [torch.tensor([0.5])], "torch.float32"),
        ({"ask": "gather", "part": 0, "wanted": [["node", "x", 1]]}, [IDS], "needs a whole number from 0 to below 1"),
        (
            {"ask": "gather", "part": 0, "wanted": [["node", "z", 0]]},
            [IDS],
            "'z'; it needs one that the part holds of 'node'",
        ),
        ({"ask": "gather", "part": 0, "wanted": [["nobody", "x", 0]]}, [IDS], "unknown node type 'nobody'"),
        ({"ask": "gather", "part": 0, "wanted": [[["a", "b"], "x", 0]]}, [IDS], "the three names of a relation"),
        ({"ask": "gather", "part": 0, "wanted": [["node", "x", 0]] * 5000}, [IDS], "at most"),
        ({"ask": "split", "part": 0, "type": "node", "split": "dev"}, [], "split 'dev'"),
        (SAMPLE | {"fanouts": [1 << 40]}, [IDS], "fanout of a request"),
        (SAMPLE | {"fanouts": [1 << 30], "replace": True}, [IDS], "would pick 3221225472 edges"),
        (SAMPLE | {"fanouts": []}, [IDS], "needs one per relation"),
        (SAMPLE | {"frontiers": [[1, False, False]]}, [IDS], "needs a whole number from 0 to below 1"),
        (SAMPLE | {"frontiers": [[0, True, False]]}, [IDS], "frontiers of a request"),
        (SAMPLE | {"frontiers": [[0, True, False]]}, [IDS, IDS[:2]], "one for each of 3 nodes"),
        (SAMPLE | {"frontiers": [0]}, [IDS], "frontiers of a request"),
        (SAMPLE | {"key": -1}, [IDS], "key of a request is -1"),
        (SAMPLE | {"hop": None}, [IDS], "hop of a request is None"),
        ({name: SAMPLE[name] for name in SAMPLE if name != "labor"}, [IDS], "labor of a request is None"),
        (SAMPLE, [torch.tensor([10**12])], "ids of 'node': id 1000000000000 is"),
    ],
)
def test_a_bad_request_is_refused_and_the_next_one_answered(
    header: dict[str, Any], tensors: list[torch.Tensor], said: str, peers: Peers
) -> None:
    with pytest.raises((ConfigError, StoreError), match=said):
        peers.ask(Message(header, tensors), 0)
    rows = peers.ask(Message({"ask": "gather", "part": 0, "wanted": [["node", "x", 0]]}, [IDS]), 0).tensors[0]
    assert rows.shape == (3, 5)


def test_another_stores_parts_are_refused(fleet: Fleet, server_process: OneProcess, tmp_path: Path) -> None:
    _, servers = fleet.of(False, {})
    other = tmp_path / "other"
    save_in_parts(store_of(False, {"weight_attr": "weight"}), other, 4)
    with pytest.raises(StoreError, match="is another one than the servers'"):
        hoploom.connect(servers, other, parts=[0])
    with pytest.raises(StoreError, match="serves another store"):
        hoploom.connect([servers[1], *server_process.serve(other, [[0, 1]])], made="here")


def test_a_part_that_nobody_serves_is_named(fleet: Fleet) -> None:
    path, servers = fleet.of(False, {})
    with pytest.raises(PeerError, match="no server holds part 2"):
        hoploom.connect(servers[:1], path, parts=[3])  # at once, for all of them have answered
    with pytest.raises(PeerError, match="no server makes whole batches; start them with --peers"):
        hoploom.connect(servers[:1])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"servers": ""}, "servers are ''"),
        ({"servers": ["host"]}, "the address is 'host'"),
        ({"servers": "h:99999"}, "the address is 'h:99999'"),
        ({"timeout": 0}, "timeout is 0"),
        ({"topology": "global"}, "topology is 'global'"),
        ({"made": "there"}, "made is 'there'"),
        ({"made": "servers", "path": "x"}, "needs no store here"),
        ({"servers": None}, "servers are None; give addresses"),
        ({"parts": [0]}, "path is missing; give it"),
        ({"topology": "local"}, "path is missing; give it"),
        ({"token_file": "nowhere"}, "nowhere cannot be read"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        hoploom.connect(**{"servers": "127.0.0.1:1", **options})
