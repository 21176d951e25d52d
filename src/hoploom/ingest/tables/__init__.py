"""A store from tables: Parquet, CSV and Arrow files, as graph.toml says."""

from hoploom.system import needs

with needs("tables"):
    import duckdb  # noqa: F401
    import ibis  # noqa: F401
    import pyarrow  # noqa: F401
