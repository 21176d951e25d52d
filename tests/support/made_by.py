"""What made the batches of a placement: a placement that is silently not used gives the same batches as any other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast
from unittest.mock import Mock

from hoploom.deploy.device_server import PlacedShard, ServingDevice
from hoploom.gpu.loading import DeviceAhead, DeviceLoading, DeviceSampling
from hoploom.load.loader import Loader
from hoploom.load.look_ahead import LookAhead
from hoploom.load.maker import LocalMaker, Maker
from hoploom.serve.connect import ServedBatches
from hoploom.store import Store
from hoploom.store.row_cache import report
from support.batch_servers import LISTENING
from support.cases import HOOKS, Case
from support.shards import elsewhere_of

NOT_ON_DEVICE = ("induced", "induced, node times", "bidirectional", *HOOKS, "no layers")
NOT_ON_DEVICE += (
    "links of the graph, induced",
    "heterogeneous induced",
    "heterogeneous induced, times",
    "heterogeneous HGT",
)


@dataclass(frozen=True)
class Made:
    case: Case
    store: Store
    loaders: Sequence[Loader]

    @property
    def producers(self) -> list[Maker]:
        return [loader._producer for loader in self.loaders]


MadeBy = Callable[[Made], None]  # asserts


def this_process(made: Made) -> None:
    for producer in made.producers:
        assert isinstance(producer, LocalMaker)


def servers(made: Made) -> None:
    for producer in made.producers:
        assert isinstance(producer, ServedBatches)


def the_device_of_a_server(made: Made) -> None:
    """Sampled there, as far as a device samples, and assembled there."""
    servers(made)
    (served,) = LISTENING
    assert isinstance(served.deployment, ServingDevice)
    (loading,) = served.deployment.loadings.values()
    assert loading.samples_on_device is (made.case.name not in NOT_ON_DEVICE)


def hops_and_rows_of_a_device(made: Made) -> None:
    look_ahead(made)
    hops, rows = (cast("Mock", method) for method in (PlacedShard._begin_hop, PlacedShard.begin_gather))
    assert rows.called
    assert hops.called is ("times" not in made.case.name)


def look_ahead(made: Made) -> None:
    ahead = [producer for producer in made.producers if isinstance(producer, LookAhead)]
    assert len(ahead) == len(made.loaders)
    assert all(producer.num_steps > 1 for producer in ahead)
    assert sum(sum(producer.fetched) for producer in ahead) > 0


def the_disk(made: Made) -> None:
    assert made.store.reads is not None
    assert made.store.reads.requests > 0


def scratch_space(made: Made) -> None:
    the_disk(made)
    ahead = [producer for producer in made.producers if isinstance(producer, LookAhead)]
    assert len(ahead) == len(made.producers)
    assert any(sum(producer.packed) for producer in ahead)


def a_cache(made: Made) -> None:
    this_process(made)
    assert _hits(made.store) > 0


def look_ahead_over_a_cache(made: Made) -> None:
    look_ahead(made)
    assert _hits(made.store) > 0


def look_ahead_over_a_disk(made: Made) -> None:
    look_ahead(made)
    the_disk(made)


def remote_shards(made: Made) -> None:
    this_process(made)
    assert sum(len(shard.gathers) for shard in elsewhere_of(made.store)) > 0


def the_device(made: Made) -> None:
    """With room for every batch."""
    _assembled_on_the_device(made, sampled_there=made.case.name not in NOT_ON_DEVICE)
    assert _num_redone(made) == 0


def the_device_from_host_samples(made: Made) -> None:
    _assembled_on_the_device(made, sampled_there=False)


def the_device_again(made: Made) -> None:
    _assembled_on_the_device(made, sampled_there=True)
    assert _num_redone(made) > 0


def the_device_and_servers(made: Made) -> None:
    _rows_fetched_for_the_device(made, sampled_there=made.case.name not in NOT_ON_DEVICE)


def the_device_with_rows_of_servers(made: Made) -> None:
    _rows_fetched_for_the_device(made, sampled_there=False)


def the_device_over_a_cache(made: Made) -> None:
    the_device_and_servers(made)
    assert _hits(made.store) > 0


def _rows_fetched_for_the_device(made: Made, *, sampled_there: bool) -> None:
    for producer in made.producers:
        assert isinstance(producer, DeviceAhead)
        assert producer.loading.samples_on_device is sampled_there
    assert sum(sum(producer.fetched) for producer in made.producers if isinstance(producer, DeviceAhead)) > 0


def _assembled_on_the_device(made: Made, *, sampled_there: bool) -> None:
    for producer in made.producers:
        assert isinstance(producer, DeviceLoading)
        assert producer.samples_on_device is sampled_there


def _num_redone(made: Made) -> int:
    samplings = [one._sampling for one in made.producers if isinstance(one, DeviceLoading)]
    return sum(one.num_redone for one in samplings if isinstance(one, DeviceSampling))


def _hits(store: Store) -> int:
    found = report(store)
    assert found is not None
    return found.hits
