"""The cache of models that are prepared once and mapped by every process that runs them, and its keys."""
