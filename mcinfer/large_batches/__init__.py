"""Batches from a file, which may be far larger than memory, through a pool into another file."""
