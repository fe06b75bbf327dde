"""Models prepared once and mapped by every process that runs them: the cache, and what it is keyed by."""
