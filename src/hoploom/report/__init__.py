"""Reports: the folder of a run, a partitioned store or a plan becomes one page that needs no network."""
