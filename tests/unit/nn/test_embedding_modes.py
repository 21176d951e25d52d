"""Learned rows wherever the graph is, and in every way to train: as they are now, in batches that are as ever."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.batch_servers import without_graph
from support.learned_workers import SEEDS, USERS, alone, differs, embedding_of, learner_of, shop
from support.shards import spread
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.sampler import NegativeSampling

import hoploom
from hoploom.errors import ConfigError
from hoploom.nn.decoders import DECODERS
from hoploom.nn.embedding import Embedding
from hoploom.train.link_prediction import LinkPrediction
from hoploom.train.loop import fit
from hoploom.train.step import Learner, Stepper, Training

PLACES = ["here", "servers make batches", "remote parts", "look-ahead", "memory budget", "packed on disk"]


def store_in(place: str, folder: Path) -> hoploom.Store:
    if place == "servers make batches":
        return without_graph(shop())[0]
    if place in ("remote parts", "look-ahead"):
        return spread(shop(), 3, [0], whole_topology=place == "look-ahead")
    if place in ("memory budget", "packed on disk"):
        shop().save(folder / "shop.store")
        scratch = folder if place == "packed on disk" else None
        return hoploom.open(folder / "shop.store", memory="70KB", scratch=scratch)
    return shop()


def loader_of(store: hoploom.Store, place: str, *, drawn: bool = True) -> hoploom.NeighborLoader:
    options: dict[str, Any] = {"look_ahead": 3} if place == "look-ahead" else {}
    options |= {"batch_size": SEEDS, "shuffle": drawn, "num_workers": 2, "prefetch_factor": 4}
    return hoploom.NeighborLoader(store, [4, 3] if drawn else [-1, -1], input_nodes="item", **options)


@pytest.mark.parametrize("place", PLACES)
def test_batches_are_those_without_learned_rows_and_have_them_as_they_are_now(place: str, tmp_path: Path) -> None:
    """A loop by hand takes three lines more: the embedding, its store, its step."""
    learned = Embedding(store_in(place, tmp_path), "user", dim=8, lr=0.5)
    assert (learned.store.reads is not None) == (place in ("memory budget", "packed on disk"))
    changed = 0
    for plain, batch in zip(loader_of(shop(), "here"), loader_of(learned.store, place), strict=True):
        for name in ("user", "item"):
            ours = {key: value for key, value in batch[name].items() if (name, key) != ("user", "x")}
            theirs = dict(plain[name].items())
            assert ours.keys() == theirs.keys()
            for key, value in theirs.items():
                assert value.equal(ours[key]) if isinstance(value, Tensor) else value == ours[key], key
        for key in plain.edge_types:
            assert torch.equal(plain[key].edge_index, batch[key].edge_index)
        now = learned.rows[batch["user"].n_id]
        assert torch.equal(batch["user"].x, now)
        changed += not torch.equal(now, first_rows()[batch["user"].n_id])
        batch["user"].x.sin().sum().backward()
        learned.step()
    assert changed == len(loader_of(shop(), "here")) - 1
    expected, _ = trained_here()
    assert torch.equal(learned.rows, expected)


def first_rows() -> Tensor:
    return Embedding(shop(), "user", dim=8).rows


def trained_here(*, drawn: bool = True) -> tuple[Tensor, int]:
    """Return the rows of the same steps with rows that are looked up by hand, for batches of any loader."""
    learned, steps = Embedding(shop(), "user", dim=8, lr=0.5), 0
    for batch in loader_of(shop(), "here", drawn=drawn):
        learned(batch["user"].n_id).sin().sum().backward()
        learned.step()
        steps += 1
    return learned.rows, steps


def fitted(batch: int = SEEDS, fanouts: Sequence[int] = (4, 3), **training: Any) -> Any:
    torch.set_num_threads(1)
    learner = learner_of(alone(), batch=batch, fanouts=fanouts, optimizer="sgd")
    fit(learner, Training(**({"epochs": 1, "progress": False} | training)), alone())
    return learner


def moved(learner: Any) -> Tensor:
    return embedding_of(learner).rows - first_rows()


@pytest.mark.usefixtures("one_thread")
def test_accumulated_batches_make_one_step_of_rows() -> None:
    """Gradients are those of the rows at the first batch. 250 items in steps of 60 are three steps of two batches.

    Two halves of a batch make its step: with all neighbours, and by SGD, which is linear in the gradient.
    """
    learner = fitted(accumulate=2)
    assert embedding_of(learner).num_steps == learner.progress.steps == 3
    every: dict[str, Any] = {"fanouts": [-1, -1], "max_steps": 1}
    whole, halves = fitted(**every), fitted(batch=SEEDS // 2, accumulate=2, **every)
    assert differs(moved(whole), moved(halves)) < 1e-5


@pytest.mark.usefixtures("one_thread")
def test_clipping_is_of_the_models_weights() -> None:
    """A step with a tiny norm leaves the weights, and moves the rows as ever."""
    before, free, clipped = learner_of(alone()), fitted(max_steps=1), fitted(max_steps=1, clip_norm=1e-12)
    assert torch.equal(moved(free), moved(clipped))
    assert float(moved(free).abs().max()) > 0
    for first, weight, small in zip(*(each.model.parameters() for each in (before, free, clipped)), strict=True):
        assert not torch.equal(weight, first)
        assert torch.allclose(small, first, atol=1e-5)


@pytest.mark.usefixtures("one_thread")
def test_bf16_moves_rows_nearly_as_fp32() -> None:
    fp32, bf16 = (moved(fitted(max_steps=1, precision=precision)) for precision in ("fp32", "bf16"))
    assert 0 < float((fp32 - bf16).norm() / fp32.norm()) < 0.05


def test_fit_refuses_rows_that_it_would_not_update() -> None:
    """Those of a model, if the loader is of another store."""
    learner = learner_of(alone())
    learner.model.users = embedding_of(learner)  # type: ignore[assignment]
    Stepper(learner, Training(1), alone(), None)
    learner.model.users = Embedding(shop(), "user", dim=8, optimizer=None)  # type: ignore[assignment]
    Stepper(learner, Training(1), alone(), None)
    learner.model.users = Embedding(shop(), "user", dim=8)  # type: ignore[assignment]
    with pytest.raises(
        ConfigError, match="the model has learned rows of 'user', as 'users', which fit would not update"
    ):
        fit(learner, Training(1, progress=False), alone())


@pytest.mark.usefixtures("one_thread")
def test_rows_follow_a_gradient_scaler() -> None:
    """By the lines of the documentation. Steps that overflow change nothing, the others are those of fp32."""
    learned, plain = (Embedding(shop(), "user", dim=8, optimizer="sgd", lr=0.1) for _ in range(2))
    torch.manual_seed(0)
    model, same = torch.nn.Linear(8, 1), torch.nn.Linear(8, 1)
    same.load_state_dict(model.state_dict())
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, same))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
    taken = 0
    for number in range(16):
        ids = torch.arange(number, number + 5)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(learned(ids)).sum()
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if overflowed := scaler.get_scale() < scale:
            learned.zero_grad()
        learned.step(1 / scale)
        taken += not overflowed
        if not overflowed:
            other.zero_grad()
            same(plain(ids)).sum().backward()
            other.step()
            plain.step()
    assert 4 < taken < 12
    assert float((plain.rows - first_rows()).abs().max()) > 0.05
    assert torch.allclose(learned.rows, plain.rows, atol=2e-3)


def test_fp16_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'precision is "fp16", .*; take "bf16"'):
        fitted(precision="fp16")


GROUPS, PEOPLE, TRAITS = 20, 600, 8  # each person of a group has the same trait of each kind


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("decoder", ["distmult", "complex", "transe", "rotate"])
def test_shallow_models_find_planted_relations(decoder: str) -> None:
    """A tenth of the links is held out: a person's other links tell the group. Without relations, traits are alike."""
    person, kinds = torch.arange(PEOPLE * TRAITS) // TRAITS, torch.arange(PEOPLE * TRAITS) % TRAITS
    links = torch.stack([person, PEOPLE + kinds * GROUPS + person % GROUPS])
    test, train = torch.randperm(PEOPLE * TRAITS, generator=torch.Generator().manual_seed(0)).tensor_split([480])
    graph = Data(edge_index=links[:, train], num_nodes=PEOPLE + TRAITS * GROUPS)
    learned = Embedding(hoploom.from_pyg(graph), dim=16, optimizer="adagrad", lr=0.3)
    torch.manual_seed(0)

    class Shallow(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = DECODERS[decoder](16, TRAITS)

        def forward(self, batch: Any) -> Tensor:
            return batch.x  # type: ignore[no-any-return]

    def mrr() -> float:
        given: dict[str, Any] = {"relations": kinds[test], "decoder": model.decoder}
        ranks = hoploom.rank_links(learned.rows, links[:, test], known=(links, kinds), **given)
        return float(ranks.metrics(["mrr"])["mrr"])

    model = Shallow()
    loader = hoploom.LinkNeighborLoader(
        learned.store, [], edge_label_index=links[:, train], edge_label=kinds[train], candidates="joint",
        neg_sampling=NegativeSampling("triplet", 64), exclude="none", batch_size=256, shuffle=True, num_workers=1,
    )  # fmt: skip
    learner = Learner(
        model, torch.optim.Adam(model.parameters(), 0.02), LinkPrediction(loss="softmax", num_relations=TRAITS), loader
    )
    assert mrr() < 0.05
    fit(learner, Training(20, progress=False), alone())
    assert mrr() > 0.9


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_lightning_trains_rows(tmp_path: Path) -> None:
    """Their step belongs into on_train_batch_end, where the gradients are complete."""
    lightning: Any = pytest.importorskip("lightning")
    learned = Embedding(shop(), "user", dim=8, lr=0.5)

    class Model(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))

        def train_dataloader(self) -> Any:
            return loader_of(learned.store, "here", drawn=False)  # Lightning sets epochs as it likes

        def training_step(self, batch: Any, number: int) -> Tensor:
            return batch["user"].x.sin().sum() + 0 * self.weight

        def on_train_batch_end(self, *given: Any) -> None:
            learned.step()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Model())
    expected, steps = trained_here(drawn=False)
    assert learned.num_steps == steps
    assert torch.equal(learned.rows, expected)
    assert learned.rows.shape == (USERS, 8)
