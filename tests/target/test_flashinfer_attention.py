"""What FlashInfer is told, read by a stand-in that computes what its documentation says."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from target.attention import HeadLayout
from target.flashinfer_attention import FlashInferAttention
from tests.target.triton.conftest import BUSHY, Case, Entry

HEADS = HeadLayout(4, 2, 32)


class StandIn:
    """A paged prefill wrapper: rows of a sequence against its pages, under a mask or causal with a window."""

    def __init__(self, workspace: torch.Tensor, layout: str) -> None:
        assert layout == "NHD"

    def plan(self, *numbers: Any, **options: Any) -> None:
        self.row_starts, self.page_starts, self.pages, self.last_lengths = (x.tolist() for x in numbers[:4])
        self.options = options

    def run(self, queries: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        out, masked = torch.empty_like(queries), 0
        for s, last in enumerate(self.last_lengths):
            pages = self.pages[self.page_starts[s] : self.page_starts[s + 1]]
            total = (len(pages) - 1) * cache[0].shape[1] + last
            keys, values = (part[pages].flatten(0, 1)[:total].repeat_interleave(2, 1) for part in cache)
            start, end = self.row_starts[s : s + 2]
            mask = self.options["custom_mask"]
            if mask is None:
                ends = torch.arange(total - (end - start), total)[:, None]
                key = torch.arange(total)
                left = self.options["window_left"]
                seen = (key <= ends) & ((key >= ends - left) if left >= 0 else True)
            else:
                seen = mask[masked : masked + (end - start) * total].view(-1, total)
                masked += seen.numel()
            scores = torch.einsum("rhd,nhd->hrn", queries[start:end], keys) * self.options["sm_scale"]
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out[start:end] = torch.einsum("hrn,nhd->rhd", weights, values)
        return out


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = StandIn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("parents", [(), BUSHY], ids=["chains", "trees"])
def test_what_it_is_told_means_what_torch_computes(
    stand_in: None, window: int | None, parents: tuple[int, ...]
) -> None:
    """Pages, masks and windows of ragged batches are those under which plain attention gives the specified result."""
    case = Case((Entry(0, 19), Entry(40), Entry(63, 1, parents), Entry(15, 2, range(-1, 3))), HEADS)
    out = case.attend(FlashInferAttention(case.pool, HEADS, window), padding=2)
    assert torch.allclose(out[:-2], case.expected(window), atol=2e-6)
    assert not out[-2:].any()


def test_where_it_is_missing_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package the error says how to get it."""
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ValueError, match=r"forerun\[flashinfer\]"):
        FlashInferAttention(Case((Entry(3),), HEADS).pool, HEADS, None)
