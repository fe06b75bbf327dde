"""Metrics and traces for other systems: one module for each, imported when it is used."""
