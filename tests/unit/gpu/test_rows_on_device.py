"""Learned rows in device memory: equal to those of the host, where the placement says so, and saved as they are."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.batches import on_host
from support.learned_workers import STEPS, USERS, alone, shop
from torch import Tensor

import hoploom
from hoploom import ConfigError, keys, ops
from hoploom.gpu import placed_store
from hoploom.nn.embedding import BETAS, EPS, Embedding
from hoploom.ops import RowRule, RowStep
from hoploom.ops.device_rows import update_device_rows
from hoploom.train.checkpoint import Checkpoint, learned_parts

ROWS, FIRST = 40, 1000


def tables(rule: RowRule, dtype: torch.dtype, width: int) -> tuple[Tensor, Tensor]:
    rows = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    return rows, torch.zeros(ROWS, rule.state_width(width))


@pytest.mark.parametrize("width", [1, 5, 16, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", RowRule)
def test_an_update_is_the_hosts_bit_by_bit(rule: RowRule, dtype: torch.dtype, width: int, device: torch.device) -> None:
    """Rows with one gradient and with several, of sizes whose sum depends on their order; rows that stay as they are.

    The powers in Adam's correction may round otherwise, which moves a row by a bit, or rounds it up instead of down.
    """
    here, there = tables(rule, dtype, width), tuple(each.to(device) for each in tables(rule, dtype, width))
    draw = torch.Generator().manual_seed(width)
    for number in range(4):
        ids = FIRST + torch.randint(0, ROWS, (60,), generator=draw)
        gradients = torch.randn(60, width, generator=draw) * 10.0 ** torch.randint(-6, 6, (60, 1), generator=draw)
        ids[:3], gradients[:3] = FIRST, torch.tensor([2.0**60, -(2.0**60), 1]).unsqueeze(1)  # 1; else 0
        if number == 2:
            gradients[7] = float("nan")
        step = RowStep(rule, 0.1, 1 / 3, EPS.get(rule, 1e-8), BETAS, keys.mix(keys.ROUNDING, number))
        broken = ops.update_rows(here[0], FIRST, here[1], ids, gradients, step)
        found = update_device_rows(there[0], FIRST, there[1], ids.to(device), gradients.to(device), step)
        assert (broken, found) == ((int(ids[7]), int(ids[7])) if number == 2 else (-1, -1))
    for ours, theirs in zip(there, here, strict=True):
        if rule is not RowRule.lazy_adam:
            assert torch.equal(ours.cpu(), theirs)
        else:
            assert torch.allclose(ours.cpu().float(), theirs.float(), rtol=1e-6 if dtype is torch.float32 else 1e-2)


def is_on_device(store: hoploom.Store, **options: Any) -> bool:
    return Embedding(store, "user", dim=8, **options)._is_on_device


def test_rows_are_on_the_device_if_all_features_are(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = str(device)
    with hoploom.place(shop(), features=there) as store:
        assert f"on {store.placed.device})" in repr(Embedding(store, "user", dim=8))
        assert not is_on_device(store, folder=tmp_path)
        monkeypatch.setattr(placed_store, "free_memory", lambda device: 100)
        said = r"rows of 'user' take 14.5 kB of .*, which has 100 B free; place the store with features='auto' or"
        with pytest.raises(ConfigError, match=said):
            Embedding(store, "user", dim=8)
        monkeypatch.undo()
    for features, is_there in (("host", False), ("50%", False), (None, False), ("auto", True)):
        with hoploom.place(shop(), there, features) as store:
            assert is_on_device(store) == is_there
            if features == "auto":  # leaves 2 GiB to training
                monkeypatch.setattr(placed_store, "free_memory", lambda device: 2 << 30)
                assert not is_on_device(store)
                monkeypatch.undo()


def trained(store: hoploom.Store, **options: Any) -> Embedding:
    """Take some steps on rows and on nothing else."""
    learned = Embedding(store, "user", dim=8, lr=0.5, **options)
    loader = hoploom.NeighborLoader(learned.store, [4, 3], input_nodes="item", batch_size=60, num_workers=0)
    for _, batch in zip(range(STEPS), loader, strict=False):
        assert torch.equal(on_host(batch)["user"].x, learned.rows.cpu()[batch["user"].n_id.cpu()])
        batch["user"].x.sin().sum().backward()
        learned(batch["user"].n_id[:3]).cos().sum().backward()
        learned.step()
    return learned


def test_rows_of_a_loop_are_the_hosts(device: torch.device) -> None:
    """So are those that the store reads, and those of ids on the host."""
    with hoploom.place(shop(), features=str(device)) as store:
        here, there, ids = trained(shop()), trained(store), torch.tensor([5, 0, USERS - 1])
        assert torch.allclose(there.rows.cpu(), here.rows, rtol=1e-6)
        assert torch.equal(there(ids), there.rows.cpu()[ids])
        assert torch.equal(there.store["user"].x[ids], there.rows.cpu()[ids])
        with pytest.raises(ConfigError, match=rf"ids of 'user' holds id {USERS}, out of range"):
            there(torch.tensor([USERS], device=device))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("to_device", [True, False])
def test_saved_rows_go_from_host_to_device_and_back(
    to_device: bool, dtype: Any, device: torch.device, tmp_path: Path
) -> None:
    """In checkpoints with their state, and as tables."""
    with hoploom.place(shop(), features=str(device)) as placed:
        source, target = (shop(), placed) if to_device else (placed, shop())
        saved, other = trained(source, dtype=dtype), Embedding(target, "user", dim=8, lr=0.5, dtype=dtype, seed=1)
        assert (saved._is_on_device, other._is_on_device) == (not to_device, to_device)
        checkpoint = Checkpoint(tmp_path, alone())
        checkpoint.save("last", learned_parts(saved.store))
        checkpoint.restore("last", learned_parts(other.store))
        assert torch.equal(saved.rows.cpu(), other.rows.cpu())
        assert torch.equal(saved.state.cpu(), other.state.cpu())
        saved.export(tmp_path / "rows.parquet")
        started = Embedding(target, "user", dim=8, dtype=dtype, warm_start=tmp_path / "rows.parquet")
        assert torch.equal(saved.rows.cpu(), started.rows.cpu())
