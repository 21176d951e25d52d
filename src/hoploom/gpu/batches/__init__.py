"""Batches made on the device where their store is placed."""
