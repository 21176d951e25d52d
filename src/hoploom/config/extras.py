"""Libraries that only some uses need: who calls for one that is not installed reads the line to type."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from hoploom.errors import ConfigError


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Around imports of the libraries of an extra in pyproject.toml; ConfigError where one is not installed.

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
    """Raise ConfigError for a package of another project that is called for and not installed; nothing is imported."""
    if find_spec(package) is None:
        raise ConfigError(f"{what} needs {package}, which is not installed; type: pip install {package}")
