"""Numbers on their way between host and device, for which neither waits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch


def to_device(
    numbers: Sequence[float] | npt.NDArray[np.generic], device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """`numbers` there, for what is launched from now on; they may change when this returns.

    `torch.tensor(…, device=…)` would wait for what was launched before.
    """
    return torch.as_tensor(numbers, dtype=dtype).to(device, non_blocking=True)


class ToHost:
    """A copy of a tensor that arrives behind what has been launched."""

    __slots__ = ("_copied", "_numbers")

    def __init__(self, numbers: torch.Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if numbers.device.type == "cuda":
            host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            numbers = host.copy_(numbers, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        self._numbers = numbers

    def wait(self) -> torch.Tensor:
        """The copy. Everything that was launched before it is done when this returns."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._numbers
