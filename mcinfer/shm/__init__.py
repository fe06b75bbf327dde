"""Memory that master and workers share, and the sockets that pass its descriptors.

The public names are `WeightOwner`, `open_weights` and `SharedWeights`. They are imported when first used: a
worker imports this package at its start and needs none of them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcinfer.weight_sharing import SharedWeights, WeightOwner, open_weights

__all__ = ["SharedWeights", "WeightOwner", "open_weights"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mcinfer import weight_sharing

    return getattr(weight_sharing, name)
