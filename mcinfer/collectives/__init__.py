"""Collective operations between ranks: processes that run one model together, each a slice of it."""
