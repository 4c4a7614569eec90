"""Run the head of a network several times over one pass of the layers below it.

Logits of a whole prompt are large (8,192 rows of 49,152 in float32: 1.6 GB), so the head has to
look at some rows at a time. It is not called by itself: what a network does to its logits beside
the product (caps, scales) is in transformers' own ``forward``, which is called for each part of the
rows, and whose layers answer from memory after the first time.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

__all__ = ["KeptBody"]


class KeptBody:
    """The layers of a network below its head.

    Args:
        network: Its body's ``forward`` is replaced.

    Attributes:
        separable: The network has a body apart from its head. If not, nothing can be kept.
    """

    def __init__(self, network: Any) -> None:
        body: torch.nn.Module = network.base_model
        self.separable = body is not network
        self._keeping = False
        self._kept: Any = None
        self._compute: Any = body.forward
        if self.separable:
            body.forward = self._forward

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._keeping:
            return self._compute(*args, **kwargs)
        if self._kept is None:
            self._kept = self._compute(*args, **kwargs)
        return self._kept

    def release(self) -> None:
        """Let go of the network, which cannot be computed afterwards. Idempotent."""
        self._kept = self._compute = None

    @contextlib.contextmanager
    def keep(self) -> Iterator[None]:
        """Compute once within this block, whatever the arguments are after the first time."""
        self._keeping = True
        try:
            yield
        finally:
            self._keeping, self._kept = False, None
