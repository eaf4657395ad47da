"""Recognising the frequency scaling of Llama 3 in the divisors a GGUF file stores."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from target.config import RopeScaling

LOW_FREQ_FACTOR, HIGH_FREQ_FACTOR, ORIGINAL_POSITIONS = 1.0, 4.0, 8192
"""What every Llama 3 uses; the file does not say."""


def llama3_scaling_of(divisors: npt.NDArray[np.float32], theta: float) -> RopeScaling | None:
    """The scaling that divides frequencies by `divisors`, [head_size / 2]; None if there is none."""
    scaling = RopeScaling(
        factor=float(divisors.max()),
        low_freq_factor=LOW_FREQ_FACTOR,
        high_freq_factor=HIGH_FREQ_FACTOR,
        original_max_position_embeddings=ORIGINAL_POSITIONS,
    )
    frequencies = theta ** -(np.arange(len(divisors)) / len(divisors))
    ratio = ORIGINAL_POSITIONS * frequencies / (2 * math.pi)
    blend = np.clip((ratio - LOW_FREQ_FACTOR) / (HIGH_FREQ_FACTOR - LOW_FREQ_FACTOR), 0.0, 1.0)
    expected = 1.0 / ((1.0 - blend) / scaling.factor + blend)
    return scaling if np.allclose(divisors, expected, rtol=1e-3) else None
