"""Every error a user can meet.

HoploomError
├── ConfigError    an argument is wrong; raised when the object is made (also a ValueError)
├── DataError      the graph or features given are unusable (also a ValueError)
├── StoreError     a store on disk is missing, damaged, newer, or cannot be written (also an OSError)
├── BatchError     a batch could not be made; names the step, and the cause is chained
├── TrainError     training cannot go on, e.g. the loss is not finite; names the step and the rank
└── PeerError      another rank has ended or does not answer
"""


class HoploomError(Exception):
    """Base of every error Hoploom raises."""


class ConfigError(HoploomError, ValueError):
    """An argument is wrong."""


class DataError(HoploomError, ValueError):
    """The graph or features given are unusable."""


class StoreError(HoploomError, OSError):
    """A store on disk is missing, damaged, of a newer version, or cannot be written."""


class BatchError(HoploomError, RuntimeError):
    """A batch could not be made."""


class TrainError(HoploomError, RuntimeError):
    """Training cannot go on."""


class PeerError(HoploomError, RuntimeError):
    """Another rank has ended or does not answer."""
