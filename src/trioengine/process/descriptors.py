"""How many files the process may have open: each client is one."""

from __future__ import annotations

import logging
import resource
from typing import Final

__all__ = ["OWN_DESCRIPTORS", "allow_descriptors"]

OWN_DESCRIPTORS: Final = 64  # sockets, pipes and pages of the server itself, generously

logger = logging.getLogger(__name__)


def allow_descriptors(num_clients: int) -> int:
    """Raise the limit as far as the system lets us; warn where ``num_clients`` do not fit.

    With fewer, connections beyond the limit wait in the kernel until others close.

    Returns:
        The limit.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError) as error:
        logger.warning("the limit of open files could not be raised: %s", error)
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed not in (-1, resource.RLIM_INFINITY) and allowed < num_clients + OWN_DESCRIPTORS:
        logger.warning(
            "only %d files may be open at once, too few for a queue of %d clients: raise the hard "
            "limit (ulimit -Hn, LimitNOFILE=) or lower --max-queue",
            *(allowed, num_clients),
        )
    return allowed
