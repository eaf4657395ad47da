"""Matrix products by different libraries, for row counts at which rows do not depend on one another."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from target.row_stability import REFERENCE_ROWS, stable_row_counts

Linear = Callable[[torch.Tensor], torch.Tensor]
"""[n, inputs] to [n, outputs]."""
WeightAndBias = tuple[torch.Tensor, torch.Tensor | None]
MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], Linear]
"""From a weight, [outputs, inputs], and perhaps a bias, [outputs]."""
Library = tuple[str, MakeLinear]
"""Who computes, by name."""

CANDIDATE_ROWS = (*range(4, 17), 20, 24, 28, 32, 40, 48, 64, 96, 128, 192, 256)
TILE_ROWS = (16, 32, 64, 128, 256)
"""Candidates for matrix units that compute sixteen rows at a time: so many cost what one costs where weights dominate,
and plain decoding and verifying run the same kernels."""


@dataclass(frozen=True, slots=True)
class RowCounts:
    """The row counts a product may be computed for, ascending."""

    counts: tuple[int, ...]

    def padded(self, num_rows: int) -> int:
        """The least number of at least `num_rows` rows that tiles of these counts make up."""
        full, rest = divmod(num_rows, self.counts[-1])
        return full * self.counts[-1] + (self.counts[bisect_left(self.counts, rest)] if rest else 0)


@dataclass(frozen=True, slots=True)
class Products:
    """How to compute linears: by which library, for which row counts, and whether rows were found independent there."""

    library: str
    make: MakeLinear
    row_counts: RowCounts
    stable: bool


def choose_products(
    linears: Sequence[WeightAndBias],
    device: torch.device,
    max_rows: int,
    candidates: tuple[int, ...] = CANDIDATE_ROWS,
    libraries: Sequence[Library] = (),
) -> Products:
    """The first library whose rows are independent for such linears, with those of `candidates` up to `max_rows`.

    `libraries`: fastest first; by default those that compute in the weights' own precision. Where none is found stable,
    the last with one fixed count: rows then run through the same kernel always, which is not verified to treat all rows
    of a tile alike.
    """
    libraries = libraries or unquantised_libraries(linears[0][0].dtype, device)
    for library, make in libraries:
        counts = tuple(count for count in candidates if count <= max_rows)
        for weight, bias in linears:
            compute = make(weight.to(device), None if bias is None else bias.to(device))
            counts = stable_row_counts(compute, weight.shape[1], counts, weight.dtype, device)
        if REFERENCE_ROWS in counts:
            return Products(library, _tiled(make, counts[-1]), RowCounts(counts), stable=True)
    library, make = libraries[-1]
    return Products(library, _tiled(make, REFERENCE_ROWS), RowCounts((REFERENCE_ROWS,)), stable=False)


def unquantised_libraries(dtype: torch.dtype, device: torch.device) -> list[Library]:
    """Those that compute in `dtype` on `device`, fastest first."""
    packed: list[Library] = [("oneDNN", packed_linear)] if can_pack(dtype, device) else []
    return [*packed, ("torch", plain_linear)]


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `packed_linear` exists here."""
    operators = torch.ops.mkldnn
    return (
        dtype == torch.float32
        and device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and hasattr(operators, "_reorder_linear_weight")
        and hasattr(operators, "_linear_pointwise")
    )


def packed_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """The product through oneDNN, the weight laid out for it once: two to three times as fast for a few rows."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, REFERENCE_ROWS)  # noqa: SLF001  the operator's name
    linear = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001  the operator's name
    return lambda x: linear(x, packed, bias, "none", [], "")


def plain_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """The product through `torch.nn.functional.linear`."""
    return lambda x: functional.linear(x, weight, bias)


def _tiled(make: MakeLinear, tile_rows: int) -> MakeLinear:
    """Linears that take any padded number of rows, in tiles of `tile_rows`."""

    def make_tiled(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        compute = make(weight, bias)

        def linear(x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] <= tile_rows:
                return compute(x)
            return torch.cat([compute(tile) for tile in x.split(tile_rows)])

        return linear

    return make_tiled
