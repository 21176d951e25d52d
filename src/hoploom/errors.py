"""The errors that Hoploom raises."""


class HoploomError(Exception):
    """Base of every error Hoploom raises."""


class ConfigError(HoploomError, ValueError):
    """An argument or a setting is wrong."""


class DataError(HoploomError, ValueError):
    """The graph or features given are unusable."""


class StoreError(HoploomError, OSError):
    """A store on disk is missing, damaged, of a newer version, or cannot be written."""


class BatchError(HoploomError, RuntimeError):
    """A batch could not be made. The message names the step; the cause is chained."""


class TrainError(HoploomError, RuntimeError):
    """Training cannot go on, for example because the loss is not finite. The message names the step and the rank."""


class PeerError(HoploomError, RuntimeError):
    """Another rank has ended or does not answer."""
