"""Everything of the device above the ops: placements, batches that are made there, whole steps as graphs."""
