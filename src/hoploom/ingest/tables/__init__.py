"""A store from tables: Parquet, CSV and Arrow files, as graph.toml says."""
