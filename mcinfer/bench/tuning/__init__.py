"""Finding the pool that answers a load best."""
