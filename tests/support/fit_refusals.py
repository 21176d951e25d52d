"""What ranks of their own processes give to fit, for it to refuse."""

from typing import Any

import pytest

from hoploom import ConfigError
from hoploom.ranks.context import Context
from hoploom.train.loop import fit
from hoploom.train.step import Training
from support import fit_workers
from support.fit_workers import QUIET, learner_of, train_loader


def two_ranks(context: Context, folder: str) -> None:
    a_model_that_nobody_wrapped(context)
    fit_workers.two_ranks(context, folder)


def a_model_that_nobody_wrapped(context: Context) -> None:
    learner = learner_of(loader=train_loader(context=context))
    with pytest.raises(
        ConfigError, match=r"the model is not wrapped in DistributedDataParallel.* the 2 ranks.*context.wrap\(model\)"
    ):
        fit(learner, Training(1, **QUIET), context)
    convs: Any = learner.model.convs
    convs[0] = context.wrap(convs[0])
    with pytest.raises(ConfigError, match=r"parameter 'convs.1.*' of the model is not wrapped in DistributedDataParal"):
        fit(learner, Training(1, **QUIET), context)
    context.barrier()  # both are here
