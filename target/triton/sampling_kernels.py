"""Triton kernels of coupled sampling: `target.sampling` without filters, the noise hashed in registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def maxima_kernel(logits, stride, temperatures, maxima, vocab_size, num_parts, PART: tl.constexpr):
    """The largest tempered logit of a part of one row."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    token_id = part * PART + tl.arange(0, PART)
    tempered = _tempered(logits, stride, temperatures, row, token_id, vocab_size)
    tl.store(maxima + row * num_parts + part, tl.max(tempered, axis=0))


@triton.jit
def choose_kernel(
    logits,  # [R, V]
    stride,
    temperatures,  # float32 [R], 0 for greedy rows
    floors,  # float32 [R], below the row's largest
    keys,  # int64 [R], see `target.noise`
    maxima,  # float32 [R, parts]
    scores,  # float64 [R, parts]
    token_ids,  # int64 [R, parts]
    vocab_size,
    num_parts,
    PART: tl.constexpr,
    PARTS_PAD: tl.constexpr,
):
    """The largest score of a part of one row, and the least token id that has it."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    others = tl.arange(0, PARTS_PAD)
    largest = tl.max(tl.load(maxima + row * num_parts + others, mask=others < num_parts, other=float("-inf")), axis=0)
    token_id = part * PART + tl.arange(0, PART)
    below = _tempered(logits, stride, temperatures, row, token_id, vocab_size) - largest
    below = tl.where(below >= tl.load(floors + row), below, float("-inf"))
    score = below.to(tl.float64)
    if tl.load(temperatures + row) > 0.0:
        score += _gumbel(tl.load(keys + row), token_id)
    best = tl.max(score, axis=0)
    first = tl.min(tl.where(score == best, token_id, vocab_size), axis=0)
    tl.store(scores + row * num_parts + part, best)
    tl.store(token_ids + row * num_parts + part, first.to(tl.int64))


@triton.jit
def _tempered(logits, stride, temperatures, row, token_id, vocab_size):
    value = tl.load(logits + row.to(tl.int64) * stride + token_id, mask=token_id < vocab_size, other=float("-inf"))
    temperature = tl.load(temperatures + row)
    return tl.div_rn(value.to(tl.float32), tl.where(temperature > 0.0, temperature, 1.0))


@triton.jit
def _gumbel(key, token_id):
    """See `target.noise.gumbel`."""
    z = _mixed(key + (token_id.to(tl.int64) + 1) * -7046029254386353131)
    uniform = (_shifted(z, 11).to(tl.float64) + 0.5) * 1.1102230246251565e-16
    return -tl.log(-tl.log(uniform))


@triton.jit
def _mixed(z):
    z = (z ^ _shifted(z, 30)) * -4658895280553007687
    z = (z ^ _shifted(z, 27)) * -7723592293110705685
    return z ^ _shifted(z, 31)


@triton.jit
def _shifted(z, BITS: tl.constexpr):
    """The mask makes an arithmetic shift a logical one."""
    return (z >> BITS) & ((1 << (64 - BITS)) - 1)
