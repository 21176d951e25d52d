"""Reports on runs and partitioned stores: one HTML page each, which needs no network."""
