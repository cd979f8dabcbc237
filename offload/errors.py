"""Every error a user can meet; the tree is described in `offload.tiers.errors`."""

from offload.tiers import errors
from offload.tiers.errors import *  # noqa: F403

__all__ = []
__all__ += errors.__all__
