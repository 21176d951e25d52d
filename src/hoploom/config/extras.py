"""Libraries that only some uses need: who calls for one that is not installed reads the line to type."""

from importlib.util import find_spec

from hoploom.errors import ConfigError

EXTRAS = {  # of pyproject.toml, and the modules that they bring
    "tables": ("pyarrow", "duckdb", "ibis"),
    "cluster": ("pyarrow", "cryptography", "yaml", "prometheus_client"),
    "spark": ("pyspark",),
    "metis": ("pymetis",),
}


def needs(extra: str) -> None:
    """Raise ConfigError with the line to type unless an extra is installed. Call it before its libraries are imported.

    >>> needs("tables")
    """
    missing = [name for name in EXTRAS[extra] if find_spec(name) is None]
    if missing:
        raise ConfigError(f"{', '.join(missing)} not installed; type: pip install 'hoploom[{extra}]'")
