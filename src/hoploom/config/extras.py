"""Optional libraries: a missing one raises a ConfigError with the command that installs it."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from hoploom.errors import ConfigError


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Wrap imports of an extra's libraries; raise ConfigError if one is not installed.

    >>> with needs("tables"):
    ...     import duckdb
    """
    try:
        yield
    except ImportError as error:
        if (error.name or "").startswith("hoploom"):
            raise
        raise ConfigError(f"{error.name} is not installed; type: pip install 'hoploom[{extra}]'") from error


def check_installed(package: str, what: str) -> None:
    """Raise ConfigError if a package of another project is not installed; import nothing."""
    if find_spec(package) is None:
        raise ConfigError(f"{what} needs {package}, which is not installed; type: pip install {package}")
