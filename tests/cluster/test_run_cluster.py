"""`hoploom train` where the graph is elsewhere: what [cluster] says is done, and the result is that of one machine."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.servers import OneProcess

from hoploom import ConfigError
from hoploom.ingest.synthetic import generate
from hoploom.train import init
from hoploom.train.runs.run import Result, run, summary
from hoploom.train.runs.run_file import RunFile, parse_run_file

pytestmark = pytest.mark.usefixtures("one_thread", "no_sync")

RUN = """
store = "graph.store"
seed = 3

[model]
hidden = 16

[loader]
fanouts = [4, 3]
batch_size = 256
threads = 1

[train]
epochs = 2

[output]
loggers = []
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    generate(folder / "graph.store", num_nodes=2000, avg_degree=8, num_features=8, num_classes=4, num_parts=2)
    return folder


@pytest.fixture(scope="module")
def servers(here: Path, server_process: OneProcess) -> list[str]:
    return server_process.serve(here / "graph.store", [[0], [1], []])


@pytest.fixture(scope="module")
def alone(here: Path, one_thread: None) -> Result:
    return _run(_run_file(here, "alone"))


def _run_file(here: Path, name: str, *overrides: str, text: str = RUN) -> RunFile:
    return parse_run_file(text, [*overrides, f"output.folder={here / name}"], folder=here)


def _run(run_file: RunFile) -> Result:
    with init(device="cpu") as context:
        return run(run_file, context, progress=False)


def _numbers(result: Result) -> tuple[Any, ...]:
    return result.outcome, result.test, result.num_parameters


def test_without_a_store_servers_make_the_batches(here: Path, alone: Result, servers: list[str]) -> None:
    text = RUN.replace('store = "graph.store"\n', "")
    run_file = _run_file(here, "apart", f"cluster.servers={servers[2]}", "model.name=sage", text=text)
    assert _numbers(_run(run_file)) == _numbers(alone)
    left = (here / "apart" / "run.toml").read_text()
    again = _run(parse_run_file(left, [f"output.folder={here / 'apart' / 'again'}"]))
    assert again.outcome.epochs == 2


def test_with_a_store_parts_are_mapped_and_the_rest_is_asked_for(here: Path, alone: Result, servers: list[str]) -> None:
    cluster = [f"cluster.servers={servers[1]}", "cluster.parts=[0]", "cluster.topology=parted"]
    result = _run(_run_file(here, "worker", *cluster, "cluster.look_ahead=2"))
    kept = _run(_run_file(here, "cached", *cluster, "cluster.look_ahead=1", "cluster.cache=50%"))
    assert _numbers(result) == _numbers(kept) == _numbers(alone)
    assert (result.cache, alone.cache) == (None, None)
    told = json.loads((here / "cached" / "result.json").read_text())["cache"]
    assert kept.cache is not None
    assert told["rows"] == kept.cache.num_rows == 500  # half of part 1
    assert told["hit_rate"] == pytest.approx(told["hits"] / (told["hits"] + told["misses"]), abs=1e-6)
    assert 0.5 < told["hit_rate"] < 1  # the rows most visited are found more often than others
    assert re.search(r"\ncache: 500 rows held in .*; [0-9.]+ ?% of .* found\n", summary(kept))


def test_a_model_that_needs_in_degrees_needs_all_edges_in_reach(here: Path, servers: list[str]) -> None:
    gcn = ["model.name=gcn", "train.epochs=1"]
    cluster = [*gcn, f"cluster.servers={servers[1]}", "cluster.parts=[0]"]
    local = _run(_run_file(here, "gcn-local", *cluster, "cluster.topology=local"))
    with pytest.raises(ConfigError, match=r'^--set cluster.topology=parted: model.name = "gcn" needs in-degrees'):
        _run(_run_file(here, "gcn-parted", *cluster, "cluster.topology=parted"))
    assert _numbers(local) == _numbers(_run(_run_file(here, "gcn-alone", *gcn)))


def test_links_count_both_of_their_ends(here: Path, servers: list[str]) -> None:
    ends = torch.arange(600).view(2, 300) * 3
    (here / "links").mkdir()
    np.save(here / "links" / "train.npy", ends.numpy())
    links = ["task.kind=link-prediction", f"task.links={here / 'links'}", "train.epochs=1", "cluster.cache=64kB"]
    cluster = [f"cluster.servers={servers[0]}", "cluster.parts=[1]", "cluster.look_ahead=1"]
    kept = _run(_run_file(here, "links-cached", *links, *cluster))
    plain = _run(_run_file(here, "links-alone", *links))
    assert _numbers(kept) == _numbers(plain)
    assert kept.cache is not None
    assert 0 < kept.cache.num_bytes <= 64_000


def test_what_has_no_say_where_servers_make_the_batches_is_named(
    here: Path, alone: Result, servers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOPLOOM_SERVERS", servers[2])  # as hoploom launch does: run.toml names a store
    message = "cluster.cache has no effect where servers make the batches; .* start them with --cache"
    with pytest.raises(ConfigError, match=f"^--set cluster.cache=20%: {message}"):
        _run(_run_file(here, "refused", "cluster.cache=20%"))
    with pytest.warns(UserWarning, match="locality=True changes nothing"):  # one run.toml for both modes
        assert _numbers(_run(_run_file(here, "both", "cluster.locality=true"))) == _numbers(alone)
    with pytest.raises(ConfigError, match=r"task.links is missing, and edges can be held out only where a process"):
        _run(_run_file(here, "refused", "task.kind=link-prediction"))


def test_on_one_machine_the_section_changes_nothing(here: Path, alone: Result) -> None:
    result = _run(_run_file(here, "single", "cluster.locality=true", "cluster.topology=parted"))
    assert _numbers(result) == _numbers(alone)
    told = json.loads((here / "single" / "result.json").read_text())
    assert "cache" not in told
    assert "cache" not in summary(result)
