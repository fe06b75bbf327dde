"""Models cut over ranks: the slicer, the collectives, and the engine of one rank."""
