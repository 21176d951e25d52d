"""A checkpoint puts a run's parts back to the last bit or says why it cannot, and is written when one is due."""

import copy
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.fit_workers import alone, assert_same_state, given, learner_of, run
from support.refusals import assert_raises
from torch import Tensor, nn
from torch.optim import lr_scheduler

from hoploom import ConfigError, HoploomError, StoreError
from hoploom.train import checkpoint as checkpoints
from hoploom.train.checkpoint import DTYPES, Checkpoint, SaveClock, _checksum, last_good, read_state, write_state
from hoploom.train.step import Training

pytestmark = pytest.mark.usefixtures("no_sync")

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.1), capturable=False, foreach=False),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, centered=True),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters),
    "groups": lambda parameters: torch.optim.Adam([{"params": [p], "lr": 0.01 * i} for i, p in enumerate(parameters)]),
}
SCHEDULERS = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "milestones": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4, 4]),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=20),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)], [3]
    ),
}


class Net(nn.Module):
    """Parameters of two dtypes, a 0-d buffer, an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.scale = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("nothing", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)) * self.scale


def steps(net: Net, optimizer: torch.optim.Optimizer, scheduler: Any, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        net(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def made(optimizer: str, scheduler: str | None = None) -> dict[str, Any]:
    torch.manual_seed(0)
    net = Net()
    parts: dict[str, Any] = {"model": net, "optimizer": OPTIMIZERS[optimizer](net.parameters())}
    return parts | ({"scheduler": SCHEDULERS[scheduler](parts["optimizer"])} if scheduler else {})


CASES = [(name, None) for name in OPTIMIZERS] + [("sgd", name) for name in SCHEDULERS]


@pytest.mark.parametrize(("optimizer", "scheduler"), CASES)
def test_restored_parts_and_randomness_continue_with_the_same_numbers(
    optimizer: str, scheduler: str | None, tmp_path: Path
) -> None:
    parts, checkpoint = made(optimizer, scheduler), Checkpoint(tmp_path, alone())
    steps(parts["model"], parts["optimizer"], parts.get("scheduler"), 3)
    checkpoint.save("last", parts, note="three steps")
    steps(parts["model"], parts["optimizer"], parts.get("scheduler"), 3)
    restored = made(optimizer, scheduler)
    torch.manual_seed(99)
    assert checkpoint.restore("last", restored) == {"note": "three steps"}
    steps(restored["model"], restored["optimizer"], restored.get("scheduler"), 3)
    assert_same_state(parts, restored)


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert Checkpoint(tmp_path / "nowhere", alone()).restore("last", {"model": nn.Linear(1, 1)}) is None


class Other(nn.Module):
    """Net with one thing changed."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in ({"linear": nn.Linear(3, 2)} | modules).items():
            self.add_module(name, module)


def test_a_checkpoint_whose_parameters_have_another_order_is_refused(tmp_path: Path) -> None:
    first, second = nn.Linear(2, 3), nn.Linear(2, 3)
    checkpoint = Checkpoint(tmp_path, alone())
    checkpoint.save("last", {"model": nn.ModuleDict({"a": first, "b": second})})
    said = r"lists 'a.weight' where this model has 'b.weight'; build its parts in the same order"
    with pytest.raises(ConfigError, match=said):
        checkpoint.restore("last", {"model": nn.ModuleDict({"b": second, "a": first})})


@pytest.mark.parametrize(
    ("saved", "given", "said"),
    [
        (Other(), Other(linear=nn.Linear(4, 2)), r"its 'linear.weight' has shape \(2, 3\), this one \(2, 4\)"),
        (Other(), Other(head=nn.Linear(2, 2)), "it has no 'head.weight'"),
        (Other(head=nn.Linear(2, 2)), Other(), "this one has no 'head.weight'"),
    ],
)
def test_a_checkpoint_of_another_model_names_the_first_difference(
    saved: nn.Module, given: nn.Module, said: str, tmp_path: Path
) -> None:
    checkpoint = Checkpoint(tmp_path, alone())
    checkpoint.save("last", {"model": saved})
    before = {name: value.clone() for name, value in given.state_dict().items()}
    with pytest.raises(ConfigError, match=f"is of another model: {said}; build the model as it was"):
        checkpoint.restore("last", {"model": given})
    assert all(value.equal(before[name]) for name, value in given.state_dict().items())


def test_parts_that_do_not_fit_are_named(tmp_path: Path) -> None:
    checkpoint, net = Checkpoint(tmp_path, alone()), Net()
    adam, sgd = torch.optim.Adam(net.parameters()), torch.optim.SGD(net.parameters())
    fewer = torch.optim.Adam([net.scale])
    checkpoint.save("last", {"model": net, "optimizer": adam})
    for parts, said in (
        ({"optimizer": sgd}, "holds a Adam as 'optimizer', this run has a SGD"),
        ({"optimizer": fewer}, "does not fit this run's optimizer: .*parameter group"),
        ({"scheduler": lr_scheduler.StepLR(sgd, 1)}, r"no 'scheduler', only \['model', 'optimizer'\]"),
    ):
        assert_raises(ConfigError, said, checkpoint.restore, "last", parts)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ([], "holds what no checkpoint does"),
        ({"format": 2}, "has format 2, this Hoploom reads up to 1"),
        ({"format": 1, "parts": {}}, "holds what no checkpoint does"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_refused(state: Any, said: str, tmp_path: Path) -> None:
    write_state(tmp_path / "last.safetensors", state)
    assert_raises(StoreError, said, lambda: Checkpoint(tmp_path, alone()).restore("last", {}))


@pytest.mark.parametrize("name", ["", "a/b", "..", "/etc/x"])
def test_a_name_that_leads_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    assert_raises(ConfigError, "give a plain name", lambda: Checkpoint(tmp_path, alone()).path(name))


WRONG: list[Any] = [None, -1, 2**70, float("nan"), "x", [], {"x": 1}, torch.zeros(2)]


def places_in(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(state, dict | list) and len(path) < 3:
        for key in state if isinstance(state, dict) else range(len(state)):
            yield from places_in(state[key], (*path, key))


def changed(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    made = copy.copy(state)
    made[path[0]] = changed(made[path[0]], path[1:], value)
    return made


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: str(wrong)[:12])
def test_no_value_in_a_checkpoint_raises_anything_but_our_errors(wrong: Any, tmp_path: Path) -> None:
    """With a checksum that is right: it may come from anybody."""
    checkpoint = Checkpoint(tmp_path, alone())
    learner = learner_of()
    checkpoint.save("last", learner.parts())
    state = read_state(checkpoint.path("last"))
    refused = 0
    for path in places_in(state):
        write_state(checkpoint.path("wrong"), changed(state, path, wrong))
        try:
            checkpoint.restore("wrong", learner.parts())
        except HoploomError as error:
            refused += str(checkpoint.path("wrong")) in str(error)
        last_good(checkpoint.path("wrong"))
    assert refused > 15


STATE = {"a": torch.arange(6.0).view(2, 3), "b": [torch.tensor(7), "text"]}


def there_and_back(state: Any, folder: Path) -> Any:
    write_state(folder / "state.safetensors", state)
    return read_state(folder / "state.safetensors")


def bits(tensor: Tensor) -> list[int]:
    return tensor.reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


def raw_tensor(kind: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    size = math.prod(shape) * kind.itemsize
    raw = torch.randint(2 if kind == torch.bool else 256, (size,), dtype=torch.uint8)
    return raw.view(kind).reshape(shape)


@pytest.mark.parametrize("shape", [(2, 3), (), (0, 4), (1,)])
def test_tensors_of_every_dtype_and_shape_survive_bit_by_bit(shape: tuple[int, ...], tmp_path: Path) -> None:
    tensors = {name: raw_tensor(kind, shape) for name, kind in DTYPES.items()}
    found = there_and_back({"odd": torch.ones(3, dtype=torch.uint8)} | tensors, tmp_path)
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape, bits(found[name])) == (tensor.dtype, shape, bits(tensor))


def test_structure_survives_with_its_types_and_keys(tmp_path: Path) -> None:
    state = {
        0: {1: [None, True, 2, -0.1, "three"], 2.5: (), False: (1, (2, [3]))},
        "0": Counter({3: 2, 5: 1}),
        "empty": {},
        "numbers": [1 << 100, 1e-320, math.inf, -math.inf, -0.0],
        "a/b": 1,
        "a": {"b": 2},
    }
    found = there_and_back(state, tmp_path)
    assert found == state
    assert [type(key) for key in found[0]] == [int, float, bool]
    assert (type(found["0"]), type(found[0][2.5]), str(found["numbers"][4])) == (Counter, tuple, "-0.0")
    assert math.isnan(there_and_back([math.nan], tmp_path)[0])


def test_tensors_whose_paths_look_alike_stay_apart(tmp_path: Path) -> None:
    state = {"a": {"b": torch.tensor(1)}, "a/b": torch.tensor(2), "__metadata__": torch.tensor(3)}
    assert there_and_back(state, tmp_path) == state


def test_a_transposed_tensor_comes_back_as_it_reads(tmp_path: Path) -> None:
    tensor = torch.arange(6).view(2, 3).t()
    assert there_and_back(tensor, tmp_path).tolist() == tensor.tolist()


def test_the_file_has_the_layout_of_safetensors(tmp_path: Path) -> None:
    write_state(tmp_path / "f", STATE)
    raw = (tmp_path / "f").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    assert (size % 8, raw[8:9]) == (0, b"{")
    assert all(isinstance(value, str) for value in header["__metadata__"].values())
    assert header["a"] == {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    assert header["b/0"] == {"dtype": "I64", "shape": [], "data_offsets": [24, 32]}
    assert len(raw) == 8 + size + 32


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"a": [1, {2}]}, "a set at 'a/1'"),
        ({"f": print}, "a builtin_function_or_method at 'f'"),
        ({(1, 2): 3}, r"the key \(1, 2\)"),
        (torch.eye(2).to_sparse(), "torch.sparse_coo"),
        ({"c": torch.zeros(2, dtype=torch.complex128)}, "torch.complex128 at 'c'"),
    ],
)
def test_what_cannot_be_saved_is_named_and_nothing_is_written(state: Any, said: str, tmp_path: Path) -> None:
    assert_raises(ConfigError, said, write_state, tmp_path / "f", state)
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_holds_itself_is_refused(tmp_path: Path) -> None:
    state: list[Any] = []
    state.append(state)
    assert_raises(ConfigError, "nested more than 64 deep", write_state, tmp_path / "f", state)


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_state(path, STATE)
    raw = path.read_bytes()
    for size in (*range(0, len(raw), 7), len(raw) - 1):
        path.write_bytes(raw[:size])
        assert_raises(StoreError, r"/f is damaged: .*; take another", read_state, path)


def test_any_changed_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_state(path, STATE)
    raw = path.read_bytes()
    for position in range(len(raw)):
        changed = bytearray(raw)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        with pytest.raises(StoreError):
            read_state(path)


def described(**changes: Any) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} | changes


def write_raw(path: Path, header: bytes, raw: bytes = b"\0" * 4) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"__metadata__": {}}, "not from Hoploom"),
        ({"__metadata__": {"tree": "null"}, "a": described()}, "not from Hoploom"),
        ({"a": described(dtype="F8_E8M0")}, "a dtype that Hoploom does not write"),
        ({"a": described(dtype="F32", shape=[1 << 61, 0], data_offsets=[0, 0])}, ""),
        ({"a": described(data_offsets=[1, 5])}, ""),
        ({"a": described(), "b": described(data_offsets=[2, 6])}, ""),
        ({"a": described(shape=[8], data_offsets=[0, 8])}, ""),
        ({"a": described()}, "its checksum does not match"),
        ({"a": 3}, ""),
    ],
)
def test_a_header_that_lies_is_refused(entries: Any, said: str, tmp_path: Path) -> None:
    header = {"__metadata__": {"tree": "null", "crc32": "0"}} | entries
    write_raw(tmp_path / "f", json.dumps(header).encode(), b"\0" * 4 if "a" in entries else b"")
    assert_raises(StoreError, rf"/f is damaged: .*{said}.*; take another", read_state, tmp_path / "f")


@pytest.mark.parametrize(
    "tree",
    [
        *('{"tensor": "none"}', '{"tuple": 1}', '{"dict": [[1]]}', '{"dict": [[[1], 2]]}', "{}"),
        *('{"list": [], "dict": []}', "NaN,", "[" * 100000),
    ],
)
def test_a_structure_that_nobody_wrote_is_refused(tree: str, tmp_path: Path) -> None:
    metadata = {"tree": tree, "crc32": _checksum(tree, {}, ())}
    write_raw(tmp_path / "f", json.dumps({"__metadata__": metadata}).encode(), b"")
    assert_raises(StoreError, r"is damaged: .*; take another", read_state, tmp_path / "f")


def test_a_missing_file_is_a_store_error(tmp_path: Path) -> None:
    assert_raises(StoreError, r"cannot read .*/f: .*No such file", read_state, tmp_path / "f")


def test_two_names_are_two_files_and_a_damage_to_one_leaves_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[str] = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: named.append(Path(new).name) or replace(old, new))
    (tmp_path / ".best.partial").write_text("of a process that was killed")
    for damaged, other in (("last", "best"), ("best", "last")):
        write_state(tmp_path / "last", STATE, first=tmp_path / "best")
        with (tmp_path / damaged).open("r+b") as file:
            file.truncate(100)
        assert_raises(StoreError, f"{damaged} is damaged", read_state, tmp_path / damaged)
        assert read_state(tmp_path / other).keys() == STATE.keys()
    assert named == ["best", "last"] * 2
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["best", "last"]


def test_a_disk_that_fills_while_a_run_saves_keeps_the_checkpoint_before(small_disk: Callable[[str], Path]) -> None:
    checkpoint = Checkpoint(small_disk("size=256k"), alone())
    checkpoint.save("last", learner_of().parts(), number=1)
    with pytest.raises(StoreError, match=r"the disk is full writing .*/disk/last.safetensors; .*free some space"):
        checkpoint.save("last", {"model": torch.nn.Linear(1000, 1000)}, number=2)
    assert [path.name for path in checkpoint.folder.iterdir()] == ["last.safetensors"]
    assert checkpoint.restore("last", learner_of().parts()) == {"number": 1}


@pytest.mark.parametrize(
    ("taken", "next_due"),
    [(0.5, 300.0), (3.0, 300.0), (12.0, 1200.0)],  # seconds that writing took; it may take 1 % of the time
)
def test_a_checkpoint_is_due_at_once_then_after_the_interval_or_a_hundred_times_its_own_cost(
    taken: float, next_due: float
) -> None:
    now = 50.0
    clock = SaveClock(5.0, clock=lambda: now)
    assert clock.is_due
    with clock.saving():
        now += taken
    began = now
    now = began + next_due - 1
    assert not clock.is_due
    now = began + next_due
    assert clock.is_due


def test_without_an_interval_epochs_alone_are_saved(tmp_path: Path) -> None:
    assert not SaveClock(0.0).is_due
    learner = learner_of()
    fuse = iter([None] * 3)
    learner.model.register_forward_pre_hook(lambda *arguments: next(fuse))
    with pytest.raises(RuntimeError, match="StopIteration"):
        run(learner, folder=tmp_path, checkpoint_minutes=0.0)
    assert not (tmp_path / "last.safetensors").exists()
    assert_raises(ConfigError, r"checkpoint_minutes is -1; give minutes, or 0", Training, 1, checkpoint_minutes=-1)


def test_where_training_stood_is_in_a_checkpoints_header(tmp_path: Path) -> None:
    path = Checkpoint(tmp_path, alone()).path("last")
    assert last_good(path) == "there is no checkpoint"
    run(learner_of(), folder=tmp_path, max_steps=3)
    assert last_good(path) == f"the last good checkpoint is {path}, of epoch 1, step 3"
    run(learner_of(), folder=tmp_path, max_steps=4)  # all of an epoch
    assert last_good(path).endswith("of epoch 1, step 4")
    path.write_bytes(path.read_bytes()[:100])
    assert last_good(path) == "there is no checkpoint"


def test_a_checkpoint_that_cannot_be_written_says_what_there_is_to_go_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, written = checkpoints.write_state, iter([True, False])

    def full_at_the_second(path: Path, state: Any, **also: Any) -> None:
        if not next(written):
            raise StoreError(f"cannot write {path}: File too large")
        whole(path, state, **also)

    monkeypatch.setattr(checkpoints, "write_state", full_at_the_second)
    said = "after step 2: cannot write .*another folder.*last good checkpoint is .*last.safetensors, of epoch 1, step 1"
    assert_raises(StoreError, said, lambda: run(learner_of(), folder=tmp_path, checkpoint_every=1))


def test_the_best_and_the_last_state_are_two_files_also_when_they_are_the_same(tmp_path: Path) -> None:
    best, last = (Checkpoint(tmp_path, alone()).path(name) for name in ("best", "last"))
    for values, is_same in (((0.1, 0.2), True), ((0.3, 0.2), False)):
        run(learner_of(), 2, folder=tmp_path, validate=given(*values))
        assert not best.samefile(last)
        assert last_good(last).endswith("of epoch 2, step 8")
        assert last_good(best).endswith("of epoch 2, step 8" if is_same else "of epoch 1, step 4")
