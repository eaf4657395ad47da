"""Sampling by coupling: what the target itself says next at each row, a function of its logits and the seed alone.

The next token of a row is `argmax(logits' + gumbel(seed, position, token id))`, the Gumbel-max form of sampling from
softmax(logits'), where logits' is what is left after bias, bans, penalties, temperature and filters. At temperature 0
it is the same rule without noise. Because the noise belongs to the position and not to the draw, a draft can be
checked by comparing ids, and speculation cannot change an answer (Daliri, Musco, Suresh, arXiv 2408.07978).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from target.embedded import default_cache_dir
from target.noise import gumbel, noise_keys
from target.sampling_params import SamplingParams
from target.transfers import ToHost, to_device


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """How often tokens occurred in a sequence so far; kept only where penalties need it."""

    prompt: frozenset[int]
    output: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One row whose next token is wanted."""

    params: SamplingParams
    position: int
    """Absolute position of the token to be chosen."""
    banned_token_ids: Sequence[int] = ()
    """Tokens that may not be chosen here (stop tokens below `min_tokens`)."""
    counts: TokenCounts | None = None
    """Of the committed tokens; needed where `params` has penalties."""
    path: Sequence[int] = ()
    """Draft tokens between the committed tokens and this row, in order."""

    @classmethod
    def after(
        cls,
        path: Sequence[int],
        *,
        params: SamplingParams,
        num_tokens: int,
        num_prompt_tokens: int,
        stop_token_ids: AbstractSet[int],
        counts: TokenCounts | None,
    ) -> SamplingRow:
        """The row that follows `num_tokens` committed tokens and the draft tokens of `path`."""
        num_output = num_tokens - num_prompt_tokens + len(path)
        banned = sorted(stop_token_ids) if num_output < params.min_tokens else ()
        return cls(params, num_tokens + len(path), banned, counts, path)


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The target's choice at each row, on the host."""

    token_ids: list[int]
    """[R]"""
    logprobs: list[RowLogprobs | None]
    """[R] None where the row did not ask."""


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Logprobs under the target's own distribution, before bias, penalties, temperature and filters."""

    logprob: float
    rank: int
    top_token_ids: list[int]
    top_logprobs: list[float]


class PendingRows:
    """Choices that a device is making: a copy of them to the host is on its way, and nothing waits for it yet."""

    def __init__(
        self,
        rows: Sequence[SamplingRow],
        chosen: torch.Tensor,
        asked: Sequence[int] = (),
        scored: torch.Tensor | None = None,
    ) -> None:
        """`chosen`: [R] token ids; `scored`: what `_scored` says of the rows `asked`, which ask for logprobs."""
        self._rows, self._asked = rows, asked
        # Whole numbers below 2^53 are float64 numbers too, so that one copy carries everything.
        self._numbers = ToHost(chosen if scored is None else torch.cat((chosen.double(), scored.flatten())))

    def wait(self) -> SampledRows:
        """The choices. Everything that was launched before them is done when this returns."""
        numbers, count = self._numbers.wait().tolist(), len(self._rows)
        logprobs: list[RowLogprobs | None] = [None] * count
        if not self._asked:
            return SampledRows(numbers, logprobs)
        width = (len(numbers) - count) // len(self._asked)
        for i, start in zip(self._asked, range(count, len(numbers), width), strict=True):
            logprobs[i] = _row_logprobs(numbers[start : start + width], self._rows[i].params.logprobs or 0)
        return SampledRows([int(token_id) for token_id in numbers[:count]], logprobs)


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> SampledRows:
    """Choose the next token of each row. `logits` [R, V], of a floating dtype, is left as it is."""
    return start_sampling(logits, rows).wait()


@torch.inference_mode()
def start_sampling(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> PendingRows:
    """As `sample`, but without waiting: one copy from device to host will carry everything back."""
    if not rows:
        return PendingRows(rows, torch.empty(0, dtype=torch.int64, device=logits.device))
    adjusted = _adjust(logits, rows)
    is_plain = adjusted.device.type == "cpu" and adjusted.dtype == torch.float32 and adjusted.stride(1) == 1
    kernel = _native_kernel() if is_plain else None
    if adjusted.device.type == "cuda":
        chosen = _choose_on_device(adjusted, rows)
    else:
        chosen = choose(adjusted, rows) if kernel is None else _choose_natively(kernel, adjusted, rows)
    asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    if not asked:
        return PendingRows(rows, chosen)
    index = to_device(asked, logits.device)
    num_top = max(rows[i].params.logprobs or 0 for i in asked)
    return PendingRows(rows, chosen, asked, _scored(logits[index], chosen[index], num_top))


def choose(adjusted: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """[R] the choices of `sample`, of logits that have been adjusted, in plain torch.

    The specification of the native chooser (`target.native.choosing`), which serves on the CPU.
    """
    chosen = adjusted.argmax(dim=-1)
    sampled = [i for i, row in enumerate(rows) if not row.params.is_greedy]
    if sampled:
        index = to_device(sampled, adjusted.device)
        chosen[index] = _sample_tempered(adjusted[index], [rows[i] for i in sampled])
    return chosen


def compile_sampler(cache_dir: Path) -> None:
    """Have the native chooser compiled, or taken from `cache_dir`, before the first row is sampled.

    Without it that happens at the first row, with `target.embedded.default_cache_dir()`.
    """
    _native_kernel(cache_dir)


@functools.cache
def _native_kernel(cache_dir: Path | None = None) -> Callable[..., None] | None:
    """The compiled chooser; None where the processor cannot run it."""
    # Numba is needed where there are logits on a CPU, and nowhere else.
    from target.native.choosing import compiled_chooser
    from target.native.isa import native_supported

    return compiled_chooser(cache_dir or default_cache_dir()) if native_supported()[0] else None


def _choose_on_device(adjusted: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """What `choose` gives; rows that need no sorting without a temporary as large as the vocabulary."""
    if any(row.params.top_k or row.params.top_p < 1.0 for row in rows):
        return choose(adjusted, rows)
    # Triton is needed where there is a CUDA device, and nowhere else.
    from target.triton.sampling import choose_unfiltered

    return choose_unfiltered(adjusted, [row.params for row in rows], [row.position for row in rows])


def _choose_natively(kernel: Callable[..., None], adjusted: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """What `choose` gives, in one pass over each row: a tenth of the time."""
    num_rows, vocab_size = adjusted.shape
    params = [row.params for row in rows]
    keys = np.zeros(num_rows, np.int64)
    if not all(p.is_greedy for p in params):
        seeds = np.array([p.seed for p in params], np.uint64)
        keys = noise_keys(seeds, np.array([row.position for row in rows], np.int64))
    chosen = np.empty(num_rows, np.int64)
    fields = [
        (
            0.0 if p.is_greedy else p.temperature,
            floor_of(p, vocab_size),
            p.top_p,
            min(p.top_k, vocab_size),
            p.min_p > 0.0,
            key,
        )
        for p, key in zip(params, keys.view(np.uint64).tolist(), strict=True)
    ]
    kernel(adjusted.data_ptr(), 4 * adjusted.stride(0), vocab_size, fields, chosen)
    return torch.from_numpy(chosen)


@torch.inference_mode()
def score(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> list[RowLogprobs]:
    """The logprob and rank of `token_ids` [R] under `logits` [R, V], with the `num_top` most likely tokens."""
    return [_row_logprobs(row, num_top) for row in _scored(logits, token_ids, num_top).tolist()]


def _scored(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> torch.Tensor:
    """[R, 2 + 2 * num_top] float64: logprob, rank, the most likely tokens and their logprobs."""
    logprobs = logits.float().log_softmax(dim=-1)
    own = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > own).sum(dim=-1) + 1
    top_logprobs, top_ids = logprobs.topk(num_top, dim=-1)
    return torch.cat([own.double(), ranks[:, None].double(), top_ids.double(), top_logprobs.double()], dim=1)


def _row_logprobs(row: Sequence[float], count: int) -> RowLogprobs:
    """From a row of `_scored`, whose first `count` alternatives are wanted."""
    num_top = (len(row) - 2) // 2
    ids, logprobs = row[2 : 2 + count], row[2 + num_top : 2 + num_top + count]
    return RowLogprobs(row[0], int(row[1]), [int(token_id) for token_id in ids], list(logprobs))


@torch.inference_mode()
def rank(
    logits: torch.Tensor, rows: Sequence[SamplingRow], width: int, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, width] columns of a proposer's `logits` [R, C] that `sample` would rather choose, best first; log chances.

    `token_ids` [C], ascending: the target's tokens that the columns stand for. Noise is added to the `SHORTLIST` most
    likely of a row that samples: it could lift one from behind them, but seldom does. A chance is the softmax of that.
    """
    if any(len(ids) for ids, *_ in map(_edits, rows)):
        # Bias, bans and penalties name tokens of the whole vocabulary, and there are few such requests.
        named = [int(ids.max()) for ids, *_ in map(_edits, rows) if len(ids)]
        whole = logits.new_full((len(rows), max(int(token_ids[-1]), *named) + 1), -torch.inf)
        logits = _adjust(whole.index_copy_(1, token_ids, logits), rows).index_select(1, token_ids)
    best, columns = logits.topk(width, dim=-1)
    log_chances = (best - logits.logsumexp(dim=-1, keepdim=True)).double()
    sampled = [i for i, row in enumerate(rows) if not row.params.is_greedy]
    if sampled:
        index = to_device(sampled, logits.device)
        scores, candidates = _noisy(logits[index], [rows[i] for i in sampled], token_ids)
        best, places = scores.topk(min(width, scores.shape[1]), dim=-1)
        # Filters may leave fewer than wanted: the rest has no chance.
        log_chances[index] = -torch.inf
        columns[index, : best.shape[1]] = candidates.gather(1, places)
        log_chances[index, : best.shape[1]] = best - scores.logsumexp(dim=-1, keepdim=True)
    return columns, log_chances


SHORTLIST = 1024


def _noisy(
    logits: torch.Tensor, rows: Sequence[SamplingRow], token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tempered logits plus noise, -inf for what the filters remove, and columns, both [R, at most `SHORTLIST`]."""
    params = [row.params for row in rows]
    tempered, keys = _tempered(logits, rows)
    if _is_unfiltered(params):
        candidates, columns = tempered.topk(min(SHORTLIST, tempered.shape[1]), dim=-1)
    else:
        candidates, columns = _candidates(tempered, params)
        candidates, columns = candidates[:, :SHORTLIST], columns[:, :SHORTLIST]
    return candidates.double() + gumbel(keys, token_ids[columns]), columns


def _adjust(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Bias, bans and penalties: sparse edits of a few entries a row. Copies the logits only if there are any."""
    edits = [_edits(row) for row in rows]
    if not any(len(ids) for ids, *_ in edits):
        return logits
    counts = [len(ids) for ids, *_ in edits]
    row_index = to_device(np.repeat(np.arange(len(rows)), counts), logits.device)
    ids, add, divide = (to_device(np.concatenate([edit[part] for edit in edits]), logits.device) for part in range(3))
    adjusted = logits.clone()
    values = adjusted[row_index, ids].double()
    values = torch.where(values > 0, values / divide, values * divide) + add
    adjusted[row_index, ids] = values.to(adjusted.dtype)
    return adjusted


_Edits = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.float64]]
_NO_EDITS: _Edits = (np.empty(0, np.int64), np.empty(0), np.empty(0))


def _edits(row: SamplingRow) -> _Edits:
    """Token ids whose logits change, what is added, and by which repetition penalty they are divided before."""
    params = row.params
    if not (params.logit_bias or params.has_penalties or row.banned_token_ids):
        return _NO_EDITS
    add: dict[int, float] = dict(params.logit_bias)
    divide: dict[int, float] = {}
    if params.has_penalties and row.counts is not None:
        output = dict(row.counts.output)
        for token_id in row.path:
            output[token_id] = output.get(token_id, 0) + 1
        for token_id, count in output.items():
            penalty = params.presence_penalty + params.frequency_penalty * count
            add[token_id] = add.get(token_id, 0.0) - penalty
        divide = dict.fromkeys((*row.counts.prompt, *output), params.repetition_penalty)
    for token_id in row.banned_token_ids:
        add[token_id] = -np.inf
    ids = sorted(add.keys() | divide.keys())
    return (
        np.array(ids, np.int64),
        np.array([add.get(token_id, 0.0) for token_id in ids]),
        np.array([divide.get(token_id, 1.0) for token_id in ids]),
    )


def _sample_tempered(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """[R] choices with noise. Every reduction runs within a row in an order that other rows cannot change."""
    params = [row.params for row in rows]
    tempered, keys = _tempered(logits, rows)
    if _is_unfiltered(params):
        token_ids = torch.arange(logits.shape[1], device=logits.device)
        return (tempered.double() + gumbel(keys, token_ids)).argmax(dim=-1)
    candidates, token_ids = _candidates(tempered, params)
    scores = candidates.double() + gumbel(keys, token_ids)
    return token_ids.gather(1, scores.argmax(dim=-1, keepdim=True))[:, 0]


def _tempered(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits over temperature, below the row's largest, [R, V] float32, and the keys of each row's noise, [R, 1].

    What is added to all of a row's scores cannot change its choice, so the normaliser of softmax is left out.
    """
    params = [row.params for row in rows]
    keys = noise_keys(np.array([p.seed for p in params], np.uint64), np.array([row.position for row in rows], np.int64))
    temperature = to_device([p.temperature for p in params], logits.device, torch.float32)[:, None]
    tempered = logits.float() / temperature
    tempered -= tempered.amax(dim=-1, keepdim=True)
    return tempered, to_device(keys, logits.device)[:, None]


def _is_unfiltered(params: Sequence[SamplingParams]) -> bool:
    return all(p.top_k == 0 and p.top_p >= 1.0 and p.min_p == 0.0 for p in params)


def _candidates(tempered: torch.Tensor, params: Sequence[SamplingParams]) -> tuple[torch.Tensor, torch.Tensor]:
    """What survives min-p, then top-k, then top-p, as (tempered logits, token ids), both [R, C], most likely first.

    What does not survive has logit -inf.
    """
    device, vocab_size = tempered.device, tempered.shape[1]
    top_p = to_device([p.top_p for p in params], device, torch.float64)[:, None]
    top_k = to_device([min(p.top_k or vocab_size, vocab_size) for p in params], device)[:, None]
    whole = to_device([p.top_k == 0 and p.min_p == 0.0 for p in params], device)[:, None]
    floors = [floor_of(p, vocab_size) for p in params]
    floor = to_device(floors, device, torch.float32)[:, None]
    width = vocab_size
    if device.type == "cpu":  # elsewhere the number of survivors would have to be waited for
        survivors = (tempered >= floor).sum(dim=-1)
        width = int(torch.minimum(survivors, top_k[:, 0]).max())
    token_ids = _most_likely(tempered, width)
    ordered = tempered.gather(1, token_ids)
    kept = (ordered >= floor) & (torch.arange(width, device=device) < top_k)
    weights = torch.where(kept, ordered, -torch.inf).double().exp()
    mass = weights.cumsum(dim=-1)
    everything = (-tempered.log_softmax(dim=-1).amax(dim=-1, keepdim=True)).double().exp()
    total = torch.where(whole, everything, mass[:, -1:])
    kept &= (mass - weights < top_p * total) | (top_p >= 1.0)  # rounding must not cut a tail nobody asked to cut
    return ordered.masked_fill(~kept, -torch.inf), token_ids


def floor_of(params: SamplingParams, vocab_size: int) -> float:
    """The tempered logit, below the row's largest, under which nothing survives: min-p's bound, or one for top-p.

    Of V tokens, those less likely than (1 - top_p) / V of the likeliest weigh less than 1 - top_p together, so none of
    them can be among the survivors of top-p: sorting a whole vocabulary is avoided.
    """
    bound = params.min_p if params.min_p or params.top_k else (1.0 - params.top_p) / vocab_size
    return math.log(bound) if bound > 0.0 else -math.inf


def _most_likely(tempered: torch.Tensor, count: int) -> torch.Tensor:
    """[R, count] ids by falling logit, equal ones by rising id: a total order, which no other row can disturb.

    A float32 whose sign bit decides whether the rest is flipped sorts as an integer; the id goes into the bits below.
    """
    vocab_size = tempered.shape[1]
    bits = tempered.view(torch.int32)
    sortable = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    keys = sortable + torch.arange(vocab_size, 0, -1, device=tempered.device)
    return vocab_size - (keys.topk(count, dim=-1).values & 0xFFFFFFFF)
