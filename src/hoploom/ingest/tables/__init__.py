"""Stores from tables of nodes and edges in Parquet, CSV and Arrow files, as graph.toml describes them."""

from hoploom.config.extras import needs

needs("tables")
