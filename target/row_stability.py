"""Measuring, at load, for which shapes an operation treats every row alike, bit for bit.

Libraries choose a kernel by the number of rows, and kernels differ in the order of their sums. Which row counts
agree differs by library, precision and processor, so it is tried out; callers pad to counts that agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

REFERENCE_ROWS = 16
"""The count others are compared with, and the only one used where none agrees."""
CANDIDATE_TILES = (1, 4, 8, 12, 16, 32, 64)
CANDIDATE_MULTIPLES = (1, 4, 8, 16)
NUM_TRIED = 5
"""Products in a batch when batched ones are tried."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Attention's tile sizes in rows, and the multiple that their number of queries is padded to.

    A tile's queries are those of its rows that share a key head: rows * query heads / key heads.
    """

    rows: tuple[int, ...]
    query_multiple: int
    stable: bool


def scaled_product(queries: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """[b, m, n] `scale` times the products of `queries`, [b, m, k], and `keys`, [b, n, k]."""
    out = queries.new_empty(queries.shape[0], queries.shape[1], keys.shape[1])
    return torch.baddbmm(out, queries, keys.transpose(1, 2), beta=0, alpha=scale, out=out)


def stable_row_counts(
    compute: Callable[[torch.Tensor], torch.Tensor],
    width: int,
    candidates: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[int, ...]:
    """Those of `candidates` at which each row comes out as in tiles of `REFERENCE_ROWS`, wherever it stands.

    `compute`: [n, width] to [n, outputs].
    """
    if not candidates:
        return ()
    total = -(-candidates[-1] // REFERENCE_ROWS) * REFERENCE_ROWS
    x = _numbers((total, width), dtype, device)
    reference = torch.cat([compute(tile) for tile in x.split(REFERENCE_ROWS)])
    shifted, shifted_reference = x.roll(3, 0), reference.roll(3, 0)

    def agrees(count: int) -> bool:
        return torch.equal(compute(x[:count]), reference[:count]) and torch.equal(
            compute(shifted[:count]), shifted_reference[:count]
        )

    return tuple(count for count in candidates if agrees(count))


def stable_tiles(
    queries_per_kv: int, head_size: int, key_block: int, dtype: torch.dtype, device: torch.device
) -> Tiles:
    """Tile sizes whose products with key blocks come out as in tiles of `REFERENCE_ROWS` rows, and their padding.

    The smallest multiple at which the tile of one row agrees, because that one is decoding's; without any, one size.
    """
    keys = _numbers((NUM_TRIED, key_block, head_size), dtype, device)
    for multiple in CANDIDATE_MULTIPLES:
        queries = {rows: -(-rows * queries_per_kv // multiple) * multiple for rows in CANDIDATE_TILES}
        scores = _agreeing(queries, lambda x: scaled_product(x, keys[: len(x)], head_size**-0.5), head_size, keys)
        values = _agreeing(queries, lambda x: torch.bmm(x, keys[: len(x)]), key_block, keys)
        rows = tuple(size for size in CANDIDATE_TILES if size in scores and size in values)
        if 1 in rows and REFERENCE_ROWS in rows:
            return Tiles(rows, multiple, stable=True)
    return Tiles((REFERENCE_ROWS,), CANDIDATE_MULTIPLES[-1], stable=False)


def _agreeing(
    queries: dict[int, int], product: Callable[[torch.Tensor], torch.Tensor], width: int, like: torch.Tensor
) -> set[int]:
    """The tile sizes, keys of `queries`, at whose number of queries batched products agree with the reference's.

    `product`: [b, n, width] to [b, n, outputs], b up to `NUM_TRIED`.
    """
    num_reference, largest = queries[REFERENCE_ROWS], max(queries.values())
    total = -(-largest // num_reference) * num_reference
    x = _numbers((NUM_TRIED, total, width), like.dtype, like.device)
    reference = torch.cat([product(part.contiguous()) for part in x.split(num_reference, dim=1)], dim=1)
    shifted, shifted_reference = x.roll(3, 1), reference.roll(3, 1)

    def agrees(num: int, batch: int) -> bool:
        plain = torch.equal(product(x[:batch, :num].contiguous()), reference[:batch, :num])
        moved = product(shifted[:batch, :num].contiguous())
        return plain and torch.equal(moved, shifted_reference[:batch, :num])

    return {size for size, num in queries.items() if agrees(num, 1) and agrees(num, NUM_TRIED)}


def stable_operations(width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the decoder's norms, of `width`, and its elementwise operations do not depend on an element's place."""
    x = _numbers((4096,), dtype, device)
    whole = _elementwise(x)
    spans = [(start, length) for start in (0, 1, 5, 16) for length in (*range(1, 40), 1031)]
    if not all(torch.equal(_elementwise(x[a : a + n].clone()), whole[a : a + n]) for a, n in spans):
        return False
    counts = (1, 4, 12, 64, 256)
    return stable_row_counts(lambda x: functional.rms_norm(x, (width,)), width, counts, dtype, device) == counts


def _elementwise(x: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(x * 0.7, x, x + 1.0) / (x.exp() + 1.0)


def _numbers(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(device, dtype)
