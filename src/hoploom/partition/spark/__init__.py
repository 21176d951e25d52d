"""Cut a store into parts on Spark: nodes in buckets, bucket by bucket in executors; the driver holds sums alone."""
