"""What ranks of their own processes give to fit, for it to refuse."""

from hoploom import ConfigError
from hoploom.ranks.context import Context
from hoploom.train.learner import Training
from hoploom.train.loop import fit
from support.fit_workers import QUIET, learner_of, train_loader


def unwrapped(context: Context) -> None:
    """A model of this rank alone."""
    learner = learner_of(loader=train_loader(context=context))
    try:
        fit(learner, Training(1, **QUIET), context)
    except ConfigError:
        context.barrier()  # both are here
        raise
