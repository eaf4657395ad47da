"""What a decoder computes between its matrix products and attention: the seam, and plain torch, which specifies it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional


class Operations(Protocol):
    """Operations on rows, none of which depends on another row."""

    def normed(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm of [n, E]."""

    def add_normed(self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Add [n, E] `delta` to `x` in place; RMSNorm of the sum."""

    def gated(self, negated: torch.Tensor) -> torch.Tensor:
        """SwiGLU: silu(gate) * up, of [n, 2F] -gate and -up; [n, F]."""


class TorchOperations:
    """See `Operations`."""

    def normed(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)

    def add_normed(self, x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self.normed(x.add_(delta), weight, eps)

    def gated(self, negated: torch.Tensor) -> torch.Tensor:
        """See `Operations.gated`.

        `torch.nn.functional.silu` rounds differently in the remainder of its vector loop, so that an element's result
        depends on its place in the tensor; `exp` does not. The signs of the two cancel in gate * up.
        """
        gate, up = negated.chunk(2, dim=-1)
        return (gate * up).div_(gate.exp().add_(1.0))
