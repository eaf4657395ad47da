"""Which row counts are used, where a library treats rows differently."""

from __future__ import annotations

import pytest
import torch

from target import linear
from target.linear import Linear, RowCounts, choose_products
from target.row_stability import REFERENCE_ROWS, stable_operations, stable_row_counts, stable_tiles

CPU = torch.device("cpu")


def another_kernel_below(limit: int) -> Linear:
    """A product whose rows come out slightly different in batches of less than `limit`, as libraries' do."""
    return lambda x: x.sum(-1, keepdim=True) * (1.0 + 1e-6 * (x.shape[0] < limit))


def by_place(x: torch.Tensor) -> torch.Tensor:
    """A product in which a row's place counts."""
    return x.sum(-1, keepdim=True) * torch.arange(1, len(x) + 1)[:, None]


def test_row_counts_that_round_differently_are_left_out() -> None:
    """Counts whose kernel differs from the reference's are not used."""
    counts = stable_row_counts(another_kernel_below(12), 8, (4, 8, 12, 16, 64), torch.float32, CPU)
    assert counts == (12, 16, 64)


def test_products_that_look_at_a_row_s_place_are_never_stable() -> None:
    """Where the same row comes out differently at another place, no count is stable."""
    assert stable_row_counts(by_place, 8, (4, 16), torch.float32, CPU) == ()


def test_rows_are_padded_to_stable_counts() -> None:
    """A number of rows is rounded up to the next count, and beyond the largest to tiles of it."""
    counts = RowCounts((4, 8, 16))
    assert [counts.padded(n) for n in (0, 1, 4, 5, 9, 16, 17, 32, 37)] == [0, 4, 4, 8, 16, 16, 20, 32, 40]


def test_an_unstable_library_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next library is taken where the first has no stable count, and one fixed count where none has."""
    weight = torch.randn(6, 8)
    monkeypatch.setattr(linear, "packed_linear", lambda weight, bias: by_place)
    assert choose_products([(weight, None)], CPU, max_rows=64).library == "torch"
    monkeypatch.setattr(linear, "plain_linear", lambda weight, bias: by_place)
    chosen = choose_products([(weight, None)], CPU, max_rows=64)
    assert (chosen.row_counts.counts, chosen.stable) == ((REFERENCE_ROWS,), False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_long_batches_are_cut_into_tiles(dtype: torch.dtype) -> None:
    """A linear of more rows than the largest count gives the rows of its tiles."""
    weight, bias, x = torch.randn(6, 8, dtype=dtype), torch.randn(6, dtype=dtype), torch.randn(144, 8, dtype=dtype)
    products = choose_products([(weight, bias)], CPU, max_rows=64)
    compute = products.make(weight, bias)
    whole = compute(x)
    assert torch.allclose(whole, x @ weight.T + bias, atol=1e-5)
    assert torch.equal(whole, torch.cat([compute(tile) for tile in x.split(16)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_this_machine_s_operations_are_stable(dtype: torch.dtype) -> None:
    """Here norms and elementwise operations ignore place, and one-row tiles of attention agree with large ones."""
    assert stable_operations(576, dtype, CPU)
    tiles = stable_tiles(3, 64, 128, dtype, CPU)
    assert tiles.stable
    assert tiles.rows[0] == 1
