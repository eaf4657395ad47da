"""The next token of each row, as `target.sampling` defines it: the same noise, the same filters, one pass each.

Scores are those of the definition, in double precision, but only where they can matter. Of a whole vocabulary's noise
the hash is computed, not the two logarithms: token i can beat the best score so far only if its uniform number u has
1 - u <= e^(logit - best), because -log(-log u) > x implies 1 - u < e^-x.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from target.native.choice_lanes import first_lane, lanes_at_least, lanes_at_most, masked_to_zero, noise_tails
from target.native.compiling import kept_in, native
from target.native.vectors import (
    broadcast,
    exponential,
    larger,
    load,
    load_float,
    max_lanes,
    sum_lanes,
)

GOLDEN, FIRST, SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
"""The constants of `target.noise`."""
_SLACK = np.float32(1.001)
"""Covers the rounding of bounds that are computed in float32."""
_HELD = 1024
"""Candidates held before the weakest are dropped, at least."""
_BUCKETS = 512
_INFINITE = np.uint64(0x7F800000 << 32)
"""Held tokens from here on have logit -inf."""
Parameters = npt.NDArray[np.void]
PARAMETERS = np.dtype(
    [("temperature", "f4"), ("floor", "f4"), ("top_p", "f8"), ("top_k", "i8"), ("has_min_p", "i8"), ("key", "u8")],
    align=True,
)
"""One row: temperature (0: greedy), the least tempered logit below the largest that can survive (`floor_of`), top_p,
top_k (0: all), whether min_p is set, and the key of its noise."""


@native
def choose_rows(
    logits: int,
    row_bytes: int,
    size: int,
    parameters: Parameters,
    held: npt.NDArray[np.uint64],
    chosen: npt.NDArray[np.int64],
) -> None:
    """chosen[r] = the next token of row r of the logits [len(parameters), size] float32.

    `logits` is their address, `row_bytes` the distance of rows, `held` [size + 16] scratch.
    """
    for r in range(len(parameters)):
        p, row = parameters[r], logits + row_bytes * r
        best = _first_largest(row, size)
        if p.temperature > 0 and (p.top_k > 0 or p.top_p < 1.0 or p.floor > -np.inf):
            chosen[r] = _choose_filtered(row, size, best, p, held)
        elif p.temperature > 0:
            chosen[r] = _choose_any(row, size, best, p.temperature, p.key)
        else:
            chosen[r] = best


@native
def _first_largest(row: int, size: int) -> int:
    """The lowest index of the largest of `size` floats."""
    whole = size // 16 * 16
    peaks = broadcast(np.float32(-np.inf))
    for i in range(0, whole, 16):
        peaks = larger(peaks, load(row + 4 * i))
    peak = max_lanes(peaks)
    for i in range(whole, size):
        peak = max(peak, load_float(row + 4 * i))
    target = broadcast(peak)
    for i in range(0, whole, 16):
        lanes = lanes_at_least(load(row + 4 * i), target)
        if lanes:
            return i + first_lane(lanes)
    for i in range(whole, size):
        if load_float(row + 4 * i) == peak:
            return i
    return 0


@native
def _hash(z: int) -> int:
    z = (z ^ (z >> np.uint64(30))) * FIRST
    z = (z ^ (z >> np.uint64(27))) * SECOND
    return z ^ (z >> np.uint64(31))


@native
def noise_of(key: int, token_id: int) -> float:
    """The noise of a token: see `target.noise.gumbel`."""
    bits = _hash(key + np.uint64(token_id + 1) * GOLDEN) >> np.uint64(11)
    return -math.log(-math.log((np.float64(bits) + 0.5) * 2.0**-53))


@native
def _relative(row: int, token_id: int, temperature: float, peak: float) -> float:
    """A token's tempered logit below the largest one, rounded as the definition rounds it."""
    return load_float(row + 4 * token_id) / temperature - peak


@native
def _choose_any(row: int, size: int, best: int, temperature: float, key: int) -> int:
    """The choice where every token is a candidate; `best` is the likeliest."""
    peak = load_float(row + 4 * best) / temperature
    best_score = 0.0 + noise_of(key, best)
    whole = size // 16 * 16
    divisor, peaks = broadcast(temperature), broadcast(peak)
    for i in range(0, whole, 16):
        chances = exponential(load(row + 4 * i) / divisor - peaks - broadcast(np.float32(best_score)))
        lanes = lanes_at_most(noise_tails(key, i), chances * broadcast(_SLACK))
        while lanes:
            token_id = i + first_lane(lanes)
            lanes &= lanes - 1
            score = np.float64(_relative(row, token_id, temperature, peak)) + noise_of(key, token_id)
            if score > best_score or (score == best_score and token_id < best):
                best, best_score = token_id, score
    for token_id in range(whole, size):
        score = np.float64(_relative(row, token_id, temperature, peak)) + noise_of(key, token_id)
        if score > best_score:
            best, best_score = token_id, score
    return best


@native
def _choose_filtered(row: int, size: int, best: int, p: Any, held: npt.NDArray[np.uint64]) -> int:
    """The choice among what min-p, then top-k, then top-p leave."""
    peak = load_float(row + 4 * best) / p.temperature
    count = _collect(row, size, peak, p, held)
    if p.top_p < 1.0:
        total = _mass_below(row, size, peak, p) if p.top_k == 0 and p.has_min_p == 0 else 0.0
        for j in range(count):
            total += math.exp(_value(held[j]))
        count = _nucleus(held, count, p.top_p * total)
    best_score = -np.inf
    for j in range(count):
        token_id = np.int64(held[j] & np.uint64(0xFFFFFFFF))
        score = _value(held[j]) + noise_of(p.key, token_id)
        if score > best_score or (score == best_score and token_id < best):
            best, best_score = token_id, score
    return best


@native
def _value(packed: int) -> float:
    """The logit, 0 or below, whose magnitude stands in the upper half of `packed`."""
    return -np.float64(np.uint32(packed >> np.uint64(32)).view(np.float32))


@native
def _collect(row: int, size: int, peak: float, p: Any, held: npt.NDArray[np.uint64]) -> int:
    """Hold what min-p and top-k leave; returns how many that are.

    Held as the bits of the logit's magnitude, below the largest, over the token id: integers in the order of
    likelihood, equal ones by token id.
    """
    count, floor = 0, p.floor
    top_k = min(p.top_k, np.int64(size))  # a larger one would overflow below, and points beyond `held`
    limit = max(_HELD, 4 * top_k)
    whole = size // 16 * 16
    divisor, peaks = broadcast(p.temperature), broadcast(peak)
    for i in range(0, size, 16):
        lanes = lanes_at_least(load(row + 4 * i) / divisor - peaks, broadcast(floor)) if i < whole else 0xFFFF
        while lanes:
            token_id = i + first_lane(lanes)
            lanes &= lanes - 1
            if token_id < size:
                value = _relative(row, token_id, p.temperature, peak)
                if value >= floor:
                    held[count] = np.uint64(np.float32(abs(value)).view(np.uint32)) << np.uint64(32) | np.uint64(
                        token_id
                    )
                    count += 1
        if top_k > 0 and count > limit:
            held[:count].sort()
            count = top_k
            floor = np.float32(_value(held[count - 1]))
    if top_k > 0 and count > top_k:
        held[:count].sort()
        count = top_k
    return count


@native
def _nucleus(held: npt.NDArray[np.uint64], count: int, wanted: float) -> int:
    """Bring the likeliest tokens that together weigh `wanted` to the front; returns how many that are.

    They are dealt into buckets by magnitude; only the bucket in which the weight is reached needs an order.
    """
    deepest = 1e-30
    for j in range(count):
        if held[j] < _INFINITE:
            deepest = max(deepest, -_value(held[j]))
    scale = (_BUCKETS - 2) / deepest
    masses = np.zeros(_BUCKETS)
    for j in range(count):
        masses[_bucket(held[j], scale)] += math.exp(_value(held[j]))
    reached, mass = 0, 0.0
    while reached < _BUCKETS - 1 and mass + masses[reached] < wanted:
        mass += masses[reached]
        reached += 1
    kept = _gather(held, 0, count, 0, reached, scale)
    end = _gather(held, kept, count, reached, reached + 1, scale)
    held[kept:end].sort()
    while kept < end and mass < wanted:
        mass += math.exp(_value(held[kept]))
        kept += 1
    return kept


@native
def _bucket(packed: int, scale: float) -> int:
    return np.int64(-_value(packed) * scale) if packed < _INFINITE else _BUCKETS - 1


@native
def _gather(held: npt.NDArray[np.uint64], start: int, count: int, low: int, high: int, scale: float) -> int:
    """Bring what is in buckets [low, high) to `start` and behind; returns where that ends."""
    for j in range(start, count):
        if low <= _bucket(held[j], scale) < high:
            held[start], held[j] = held[j], held[start]
            start += 1
    return start


@native
def _mass_below(row: int, size: int, peak: float, p: Any) -> float:
    """The sum of e^logit of what is below the floor."""
    whole = size // 16 * 16
    total = 0.0
    divisor, peaks, floor = broadcast(p.temperature), broadcast(peak), broadcast(p.floor)
    for start in range(0, whole, 1024):
        part = broadcast(np.float32(0))
        for i in range(start, min(start + 1024, whole), 16):
            values = load(row + 4 * i) / divisor - peaks
            part = part + masked_to_zero(exponential(values), lanes_at_least(values, floor))
        total += np.float64(sum_lanes(part))
    for token_id in range(whole, size):
        value = _relative(row, token_id, p.temperature, peak)
        if value < p.floor:
            total += math.exp(np.float64(value))
    return total


@functools.cache
def compiled_chooser(
    cache_dir: Path,
) -> Callable[[int, int, int, list[tuple[float, ...]], npt.NDArray[np.int64]], None]:
    """`choose_rows`, compiled or taken from the folder of machine code, as a function of the logits' address, bytes
    between rows, tokens of a row, the fields of `PARAMETERS` of each row, and where the choices go.
    """

    def call(
        logits: int, row_bytes: int, size: int, fields: list[tuple[float, ...]], chosen: npt.NDArray[np.int64]
    ) -> None:
        choose_rows(logits, row_bytes, size, np.array(fields, PARAMETERS), np.empty(size + 16, np.uint64), chosen)

    with kept_in(cache_dir, choose_rows):
        call(0, 0, 0, [], np.empty(0, np.int64))
    return call
