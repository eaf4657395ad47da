"""The coupled noise: a counter-based random number of (seed, position, token id), the same wherever it is computed.

The generator is a keyed avalanche hash in the manner of Philox (Salmon et al., SC'11): no state, so the noise of a
position does not depend on how many numbers were drawn before it. Two rounds of the 64-bit finaliser of SplitMix64
(Steele et al., OOPSLA'14) make the key of (seed, position), a third mixes in the token id.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def noise_keys(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The keys [R] of (seed, absolute position of the token to be chosen), as int64 bit patterns."""
    with np.errstate(over="ignore"):
        mixed = _mix_host(seeds + np.uint64(_GOLDEN))
        return _mix_host(mixed ^ (positions.astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(_FIRST))).view(np.int64)


def gumbel(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float64, of `keys` (int64) and `token_ids` (int64), broadcast against one another.

    53 bits make a uniform number strictly inside (0, 1); the logarithms are taken in float64, so that CPU and GPU
    agree to the last bits of a double, far below any gap between two logits in float32.
    """
    bits = _mix_device(keys + (token_ids + 1) * _signed(_GOLDEN))
    uniform = (_shift_right(bits, 11).double() + 0.5) * 2.0**-53
    return uniform.log_().neg_().log_().neg_()


def _mix_host(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND)
    return z ^ (z >> np.uint64(31))


def _mix_device(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shift_right(z, 30)) * _signed(_FIRST)
    z = (z ^ _shift_right(z, 27)) * _signed(_SECOND)
    return z ^ _shift_right(z, 31)


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Torch shifts int64 arithmetically; the mask makes the shift a logical one."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
