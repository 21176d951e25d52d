"""Build a store from tables (Parquet, CSV and Arrow files) that a graph.toml describes."""

from hoploom.system import needs

with needs("tables"):
    import duckdb  # noqa: F401
    import ibis  # noqa: F401
    import pyarrow  # noqa: F401
