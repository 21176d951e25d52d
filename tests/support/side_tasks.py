"""A learner of nodes and links for the tests of side tasks, and what spawned ranks run."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hoploom import LinkPrediction
from hoploom.nn import Bilinear
from hoploom.ranks.context import Context
from hoploom.train.checkpoint import Checkpoint, write_state
from hoploom.train.loop import fit
from hoploom.train.step import Learner, SideTask, Training
from hoploom.train.tasks import NodeClassification
from support.fit_workers import NUM_CLASSES, QUIET, Sage, link_loader, parameters_of, train_loader

ANOTHER_EPOCH = {"epoch": 2, "step": 2}  # after 8 batches, 3 an epoch


class Both(nn.Module):
    """Rows of nodes, from which a head makes classes, and a decoder scores of links."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = Sage(8)
        self.head, self.decoder = nn.Linear(8, NUM_CLASSES), Bilinear(8)

    def forward(self, batch: Any) -> Tensor:
        z = self.nodes(batch)
        return z if "edge_label_index" in batch else self.head(z)


def learner_of_both(
    context: Context | None = None, *, weight: float = 0.5, batch: int = 16, lr: float = 0.1, also: Any = None
) -> Learner:
    torch.manual_seed(2)
    model: nn.Module = Both()
    world_size = 1 if context is None else context.world_size
    if context is not None:
        model = context.wrap(model)
    links = link_loader(context, batch_size=batch // world_size)
    return Learner(
        model,
        torch.optim.SGD(model.parameters(), lr=lr),
        NodeClassification(NUM_CLASSES),
        train_loader(context=context),
        also=also or {"links": SideTask(LinkPrediction(), links, weight)},
    )


def both_curve(context: Context, folder: Path | None = None) -> tuple[list[float], list[Tensor]]:
    learner = learner_of_both(context, batch=20)
    if folder is not None:
        assert Checkpoint(folder, context).restore("last", learner.parts()) == {}
    outcome = fit(learner, Training(3, **QUIET), context)
    return [epoch["train_loss"] for epoch in outcome.history], parameters_of(learner)


def two_ranks(context: Context, folder: str) -> None:
    found = {"curve": both_curve(context), "resumed": both_curve(context, Path(folder) / "one")}
    if context.is_main:
        write_state(Path(folder) / "found", found)
