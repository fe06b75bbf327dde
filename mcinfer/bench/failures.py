"""What can go wrong with a way of running a model."""

from mcinfer.errors import McinferError


class WayFailedError(McinferError):
    """A way of running the model could not be started, or failed in its turn; says why."""
