"""NVIDIA cards: their driver, memory, tensors of callers, staging in a worker, weights in one slab."""
