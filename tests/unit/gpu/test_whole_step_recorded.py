"""What is recorded of a whole step must ask the device nothing and make nothing anew; what cannot be is refused."""

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from support.device_loaders import placed
from support.graphs import ring
from support.shards import spread
from support.waiting import FROM_NUMBERS, NoWaiting
from support.whole_steps import BATCH, NUM_CLASSES, homogeneous_learner, library_learner, link_learner, taken
from torch.utils._python_dispatch import _disable_current_modes
from torch_geometric.nn import GraphSAGE, HeteroBatchNorm
from torch_geometric.sampler import NegativeSampling
from triton.runtime.interpreter import GridExecutor

import hoploom
from hoploom import NeighborLoader
from hoploom.gpu.batch_memory import Pool
from hoploom.gpu.capacity import Capacity, HopPlan, fixed_capacity, plan_hops
from hoploom.gpu.cuda_graph import (
    WARM_UP,
    LearningRates,
    Recording,
    WorkStream,
    check_optimizer,
    prepare_optimizer,
    without_gc,
)
from hoploom.gpu.loading import DeviceSampling
from hoploom.gpu.whole_steps import WholeStep
from hoploom.load.loader import Loader
from hoploom.ranks.context import init
from hoploom.store import Wanted
from hoploom.store.base import NO_IDS
from hoploom.train.link_prediction import LinkPrediction
from hoploom.train.step import Learner, Training
from hoploom.train.tasks import NodeTask

pytestmark = pytest.mark.usefixtures("one_thread")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def unwaiting(monkeypatch: pytest.MonkeyPatch, by_kernels: Callable[[], None]) -> Callable[[], NoWaiting]:
    """What runs on the CPU goes the way that it goes on a GPU. The interpreter itself may look at values."""
    interpret = GridExecutor.__call__

    def call(self: GridExecutor, *arguments: Any, **options: Any) -> Any:
        with _disable_current_modes():
            return interpret(self, *arguments, **options)

    monkeypatch.setattr(GridExecutor, "__call__", call)
    by_kernels()
    return partial(NoWaiting, FROM_NUMBERS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a recording itself refuses to wait")
@pytest.mark.parametrize("kind", ["sage", "gcn", "rgat", "binary links", "joint links", "of PyG"])
def test_nothing_of_a_step_waits_for_the_device(
    kind: str, unwaiting: Callable[[], NoWaiting], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "rgat":
        learner = library_learner(CPU, kind)
    elif kind == "binary links":
        learner = link_learner(CPU, task=LinkPrediction(), neg_sampling="binary", exclude="both")
    elif kind == "joint links":
        task, negatives = LinkPrediction(loss="bpr", metrics=["mrr"]), NegativeSampling("triplet", 6)
        learner = link_learner(CPU, task=task, neg_sampling=negatives, candidates="joint")
    else:
        learner = homogeneous_learner(CPU, "sage" if kind == "of PyG" else kind)
    if kind == "of PyG":
        learner.model = GraphSAGE(8, 8, 2, NUM_CLASSES)
    learner.optimizer = torch.optim.SGD(learner.model.parameters(), lr=0.1)
    whole = WholeStep(learner, Training(1, clip_norm=1.0), init(device="cpu"))
    place, slot = learner.loader.rehearsal().step, whole._slots[0]
    slot.fill(place(0))
    assert slot.fits(60)
    monkeypatch.setattr(NodeTask, "read", lambda task, labels, nodes: task.judge(labels)[0])  # as on a GPU
    monkeypatch.setattr(LinkPrediction, "check", lambda *arguments: None)
    with unwaiting():  # type: ignore[no-untyped-call]
        slot._make()
        slot._learn()
        whole._apply()
    assert float(slot.loss) > 0


@pytest.mark.parametrize(
    "waits",
    [
        lambda values: float(values.sum()),
        lambda values: values[values > 0],
        lambda values: torch.repeat_interleave(torch.arange(3), torch.ones(3, dtype=torch.int64)),
        lambda values: values + torch.tensor([1.0]),
        lambda values: bool((values > 0).any()),
    ],
)
def test_the_check_for_what_waits_finds_it(waits: Any) -> None:
    values = torch.ones(3)
    with pytest.raises(AssertionError, match="waits for the device"), NoWaiting(FROM_NUMBERS):  # type: ignore[no-untyped-call]
        waits(values)


def addresses(whole: WholeStep) -> list[int]:
    found = []
    for slot in whole._slots:
        layers = [tensor for layer in slot.on.layers for edges in layer for tensor in (edges.edge_index, edges.indptr)]
        own = (slot._given, slot.loss, slot.on.totals, slot.batch.x, slot.batch.y, slot.batch.n_id)
        found += [tensor.data_ptr() for tensor in (*own, *slot.on.nodes, *layers)]
    return sorted(found)


def test_a_replay_fills_the_same_memory(device: torch.device) -> None:
    whole = WholeStep(homogeneous_learner(device), Training(2), init(device=device))
    place, seen = whole.learner.loader.rehearsal().step, []
    for step in (0, 1, 2, 0, 1, 2):
        slot = whole._slots[step % 2]
        slot.fill(place(step))
        assert slot.fits(60)
        whole._learn(slot)
        seen += [addresses(whole)] if step else []
    assert all(found == seen[0] for found in seen)


def test_rows_that_no_batch_reaches_are_those_of_the_first_node(device: torch.device) -> None:
    learner = homogeneous_learner(device)
    whole = WholeStep(learner, Training(1, margin=1.0), init(device=device))
    slot = whole._slots[0]
    slot.fill(learner.loader.rehearsal().step(0))
    count = int(slot.on.total(whole.plan.nodes[0][-1]))
    assert count < len(slot.batch.x)
    assert (
        slot.batch.x[count:]
        == learner.loader.store.features.gather([Wanted("node", "x", NO_IDS.new_zeros(1))])[0].to(device)
    ).all()


def test_a_recording_is_made_after_some_calls(device: torch.device) -> None:
    counter = torch.zeros((), dtype=torch.int64, device=device)
    stream = WorkStream(device, own_stream=False)

    def work() -> None:
        counter.add_(1)

    recording, seen = Recording(work, stream), []
    for _ in range(WARM_UP + 3):
        seen.append(recording.is_warm)
        recording()
    assert (seen, int(counter)) == ([False] * WARM_UP + [True] * 3, WARM_UP + 3)


class Capture:
    """torch.cuda.graph: what fails within is followed by an error when the capture should end, and the stream stays."""

    stream = "the consumer's"

    def __init__(self, graph: Any, *, stream: str, **options: Any) -> None:
        self._own = stream

    def __enter__(self) -> None:
        self._before, Capture.stream = Capture.stream, self._own

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, RuntimeError):
            raise RuntimeError("operation failed due to a previous error during capture")
        Capture.stream = self._before


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> WorkStream:
    stream = WorkStream(CPU, own_stream=False)
    stream.is_cuda, stream.stream = True, "the stream's"
    monkeypatch.setattr(Capture, "stream", "the consumer's")
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Capture.stream)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(Capture, "stream", stream))
    return stream


def failing(error: BaseException) -> Any:
    def work() -> None:
        try:
            raise error
        finally:
            assert not gc.isenabled()
            assert Capture.stream == "the stream's"

    return work


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (
            RuntimeError("operation not permitted when stream is capturing\nlong advice"),
            hoploom.ConfigError,
            "recorded as a CUDA graph: operation not permitted when stream is capturing; .*leave whole steps off, in a "
            "new process",
        ),
        (RuntimeError(), hoploom.ConfigError, "recorded as a CUDA graph: RuntimeError; "),
        (hoploom.DataError("a label is out of range"), hoploom.DataError, "a label is out of range"),
        (ZeroDivisionError("by zero"), ZeroDivisionError, "by zero"),
        (KeyboardInterrupt("Ctrl-C"), KeyboardInterrupt, "Ctrl-C"),
    ],
)
def test_a_recording_that_fails_names_the_first_error_and_leaves_the_stream(
    error: BaseException, kind: type[BaseException], said: str, capturing: WorkStream
) -> None:
    work = failing(error)
    with pytest.raises(kind, match=said):
        Recording(work, capturing)._capture(work)
    assert Capture.stream == "the consumer's"
    assert gc.isenabled()


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_while_something_is_recorded(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    try:
        cycle: list[Any] = [torch.ones(1)]
        cycle.append(cycle)
        freed = weakref.ref(cycle[0])
        del cycle
        with without_gc():
            assert freed() is None  # what can be given back was, before
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def seen(num_nodes: int, seeds: torch.Tensor, device: torch.device, **options: Any) -> tuple[HopPlan, Capacity]:
    """Return the plan of all hops from four seeds on a ring, and the capacity of the first batch."""
    store = placed(hoploom.from_pyg(ring(num_nodes)), device)
    loader = NeighborLoader(store, input_nodes=seeds, batch_size=4, **options)
    sampling = DeviceSampling(loader.maker, store.placed, Pool(device))
    plan = plan_hops(store.schema, loader.maker.sampler.sampling, [0], with_indptr=True)
    return plan, sampling.capacity_of(loader.rehearsal().step(0))


@pytest.mark.parametrize("mode", ["subgraph", "blocks"])
def test_sizes_are_what_batches_took_and_a_margin(mode: str, device: torch.device) -> None:
    """All neighbours on a ring of 40, four seeds far apart: each has two in-edges into nodes that no other one has."""
    plan, took = seen(40, torch.arange(0, 40, 10), device, num_neighbors=[-1, -1], mode=mode)
    found = fixed_capacity(plan, took, [4], margin=0.5, rounded=1)
    assert found.nodes == ((4, 18, 30),)  # 12 and 20 and a half more: from v to v + 1, v + 2, and on to v + 3, v + 4
    assert found.edges == ((12, 36),)  # 8, and 16 more; a block of 12 nodes has 24 by itself
    narrow = fixed_capacity(plan, took, [4], margin=0.0, rounded=1)
    assert narrow.nodes == ((4, 12, 20),)
    assert found.holds(narrow)
    assert not narrow.holds(narrow._replace(nodes=((4, 12, 21),)))


def test_sizes_are_never_more_than_there_is(device: torch.device) -> None:
    plan, took = seen(12, torch.arange(12), device, num_neighbors=[2, 2])
    found = fixed_capacity(plan, took, [4], margin=1e308, rounded=64)
    assert found.edges[0][-1] == 24
    assert found.nodes[0][-1] <= 12 + 4


def fused() -> torch.optim.Optimizer:
    return torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], lr=0.5, fused=True)


def test_rates_are_on_the_device_within_a_step_only() -> None:
    optimizer = fused()
    rates, group = LearningRates(optimizer), optimizer.param_groups[0]
    with rates.as_tensors():
        inside = group["lr"]
    assert group["lr"] == 0.5
    assert isinstance(inside, torch.Tensor)
    group["lr"] = 0.25
    assert float(inside) == 0.5
    rates.send()
    assert float(inside) == 0.25


@pytest.mark.parametrize(("name", "value"), [("lr", 0.1), ("momentum", 0.5)])
def test_an_option_that_a_recording_would_not_see_is_refused(name: str, value: float) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5)
    rates = LearningRates(optimizer)
    rates.check()
    optimizer.param_groups[0][name] = value
    with pytest.raises(hoploom.ConfigError, match=rf"{name} of SGD went from .* to {value}.*leave whole steps off"):
        rates.check()


@pytest.mark.parametrize(
    ("make", "scheduled", "said"),
    [
        (lambda p: torch.optim.Adam(p), False, "give it capturable=True"),
        (lambda p: torch.optim.Adam(p, fused=True), False, "give it capturable=True"),
        (lambda p: torch.optim.Adagrad(p), False, "take Adam or AdamW with capturable=True, SGD"),
        (lambda p: torch.optim.SGD(p, lr=0.1), True, "give it fused=True"),
        (lambda p: torch.optim.AdamW(p, capturable=True), True, None),
        (lambda p: torch.optim.SGD(p, lr=0.1), False, None),
        (lambda p: torch.optim.SGD(p, lr=0.1, fused=True), True, None),
    ],
)
def test_an_optimizer_that_cannot_be_recorded_is_refused(make: Any, scheduled: bool, said: str | None) -> None:
    optimizer = make([torch.nn.Parameter(torch.ones(2))])
    check_optimizer(optimizer, CPU, scheduled=scheduled)
    with pytest.raises(hoploom.ConfigError, match=said) if said else nullcontext():
        check_optimizer(optimizer, CUDA, scheduled=scheduled)


def test_an_optimizer_that_asks_for_the_loss_again_is_refused_everywhere() -> None:
    optimizer = torch.optim.LBFGS([torch.nn.Parameter(torch.ones(2))])
    for device in (CPU, CUDA):
        with pytest.raises(hoploom.ConfigError, match="LBFGS asks for a step's loss several times, "):
            check_optimizer(optimizer, device, scheduled=False)


@pytest.mark.parametrize("recorded", [True, False])
def test_a_checkpoint_of_the_other_way_does_not_decide(recorded: bool) -> None:
    saved, optimizer = fused(), fused()
    for one, is_capturable in ((saved, not recorded), (optimizer, recorded)):
        one.param_groups[0].update(capturable=is_capturable, fused=None)
    (parameter,) = saved.param_groups[0]["params"]
    saved.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    optimizer.load_state_dict(saved.state_dict())
    prepare_optimizer(optimizer, recorded=recorded)
    (group,) = optimizer.param_groups
    assert group["capturable"] == recorded
    assert float(optimizer.state[group["params"][0]]["step"]) == 3


def with_loader(learner: Learner, **options: Any) -> Loader:
    return NeighborLoader(learner.loader.store, [3, 2], **{"input_nodes": "train", "batch_size": BATCH} | options)


class Trimmed(torch.nn.Module):
    def forward(self, x: torch.Tensor, num_sampled_nodes: list[int]) -> torch.Tensor:
        return x[: num_sampled_nodes[0]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"precision": "fp16"}, "asks the host at every step"),
        ({"accumulate": 2}, "accumulate=2"),
        (
            {"model": torch.nn.Linear(2, 2), "loader": {"mode": "blocks"}},
            "take blocks for the models of hoploom.nn only",
        ),
        ({"model": torch.nn.BatchNorm1d(2)}, "have no .'BatchNorm1d'., which reads unused rows"),
        ({"model": Trimmed()}, "have no counts per hop"),
        ({"model": HeteroBatchNorm(2, 1)}, "have no .'HeteroBatchNorm'., which reads unused rows"),
        ({"loader": {"disjoint": True}}, "disjoint or temporal"),
        ({"loader": {"subgraph_type": "induced"}}, "subgraph_type='induced'"),
        ({"loader": {"transform": lambda batch: batch}}, "do not go with transform"),
        ({"loader": {"aggregate": "mean"}}, "do not go with aggregate"),
        ({"loader": {"batch_size": 50}}, "need a step of batch_size=50"),
        ({"on_host": True}, r"need a graph that lies on cpu; give the loader hoploom.place\("),
        ({"features": None}, "and ..x of 'node'.. is not placed"),
        ({"parts": [0]}, "need all parts of the store on this host"),
        ({"rows": None}, "do not update learned rows, here of .'node'.; use features"),
    ],
)
def test_what_cannot_be_a_whole_step_is_refused_with_the_way_out(change: dict[str, Any], said: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("the learners below are on the CPU")
    learner = homogeneous_learner(CPU, on_host="on_host" in change)
    options = {name: value for name, value in change.items() if name in ("precision", "accumulate")}
    for name in ("task", "model"):
        setattr(learner, name, change.get(name, getattr(learner, name)))
    if "features" in change:
        store = hoploom.place(homogeneous_learner(CPU, on_host=True).loader.store, topology="cpu")
        learner.loader = NeighborLoader(store, [3, 2], input_nodes="train", batch_size=BATCH)
    if "parts" in change:
        whole = homogeneous_learner(CPU, on_host=True).loader.store
        store = hoploom.place(spread(whole, 3, change["parts"], whole_topology=True), "cpu", "cpu")
        learner.loader = NeighborLoader(store, [3, 2], input_nodes="train", batch_size=BATCH)
    if "rows" in change:
        store = hoploom.Embedding(learner.loader.store, dim=8, join="add").store
        learner.loader = NeighborLoader(store, [3, 2], input_nodes="train", batch_size=BATCH)
    if "loader" in change:
        learner.loader = with_loader(learner, **change["loader"])
    with pytest.raises(hoploom.ConfigError, match=rf"{said}.*leave whole steps off"):
        WholeStep(learner, Training(1, **options), init(device="cpu"))


def test_a_margin_below_zero_is_refused(device: torch.device) -> None:
    with pytest.raises(hoploom.ConfigError, match=r"margin is -0\.5"):
        taken(homogeneous_learner(device), device, margin=-0.5)
