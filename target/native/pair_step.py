"""A forward of a head: a single layer that reads pairs of a feature and a token's embedding (EAGLE-3).

Before the layer, features of several of the target's layers may be fused to its hidden size; behind it, the head may
go on with its own guesses, level by level. The layer itself and the output rows are the phases of
`target.native.phases`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from target.native.attention import attend_rows, lay_units
from target.native.calls import call_kernel_at
from target.native.compiling import native
from target.native.pair_guesses import go_on, rank_rows
from target.native.phases import norm_final, project_down, project_gate_up, project_head, project_heads, project_output
from target.native.rows import copy, encode, normalise, panel_bytes, row_bytes
from target.native.threads import IDLE, STARTED, STOPPED, atomic_load, change, meet, take_task, wait_while
from target.native.vectors import load_bf16, load_integer, store

Record = Any


class PairRecord(NamedTuple):
    """What a head has beside a model's records; addresses and strides in bytes."""

    fc: int
    """The fusing product's panels."""
    feature_norm: int
    """0 where features are not normalised."""
    hidden_norm: int
    num_parts: int
    """Features a row has, each of the hidden size."""
    norms_each: int
    """Whether each is normalised by itself (1), or all as one (0)."""
    norm_before_residual: int
    num_fused: int
    """Rows to fuse."""
    features: int
    """[num_fused, num_parts * hidden size] floats; normalised in place."""
    fused: int
    """[num_fused, hidden size] floats."""
    fused_rows: int
    """Room for the encoded features; so is `joined` for the encoded pairs."""
    fused_stride: int
    sources: int
    """[num_rows] int64: the fused row that is a pair's feature, -1 where `BatchRecord.hidden` has it; 0 if all do."""
    embed: int
    """[vocabulary, hidden size], of as many bits: bfloat16 or float32."""
    embed_bits: int
    joined: int
    joined_stride: int


@native
def run_pairs(models: Record, layers: Record, batches: Record, pairs: Record, guesses: Record, thread: int) -> None:
    """As `target.native.step.run`, of a head."""
    model = models[0]
    control = model.control
    if thread <= 0:
        change(control + STARTED, control + IDLE)
        if thread == 0:
            _run(model, layers[0], batches[0], pairs[0], guesses[0], thread)
        return
    seen = np.int32(1)
    while True:
        wait_while(control + STARTED, seen, control + IDLE, model.spin_ticks)
        if atomic_load(control + STOPPED) != 0:
            return
        seen = atomic_load(control + STARTED)
        _run(model, layers[0], batches[0], pairs[0], guesses[0], thread)


@native
def _run(model: Record, layer: Record, batch: Record, pair: Record, guess: Record, thread: int) -> None:
    control, num_threads, spin = model.control, model.num_threads, model.spin_ticks
    # Read before a barrier that may be the last: behind it, the next step's records may be there already.
    num_rows, num_logits, sources, num_levels = batch.num_rows, batch.num_logits, pair.sources, guess.num_levels
    _encode_features(model, pair, thread)
    meet(control, num_threads, spin)
    _fuse(model, pair, thread)
    meet(control, num_threads, spin)
    _forward(model, layer, batch, pair, sources, num_rows, num_logits, thread)
    level = 0
    while num_rows > 0 and level < num_levels:
        rank_rows(model, batch, guess, level, thread)
        meet(control, num_threads, spin)
        if thread == 0:
            go_on(model, batch, guess, level)
        meet(control, num_threads, spin)
        num_rows = batch.num_rows
        meet(control, num_threads, spin)
        _forward(model, layer, batch, pair, 0, num_rows, num_rows, thread)
        level += 1


@native
def _forward(
    model: Record, layer: Record, batch: Record, pair: Record, sources: int, num_rows: int, num_logits: int, thread: int
) -> None:
    """Keys and values of the batch's pairs, and logits and outputs of the rows of which they are wanted."""
    control, num_threads, spin = model.control, model.num_threads, model.spin_ticks
    if num_rows == 0:
        return
    if thread == 0:
        lay_units(model, batch)
    _join(model, layer, batch, pair, sources, thread)
    meet(control, num_threads, spin)
    project_heads(model, layer, batch, thread, pair.joined, pair.joined_stride, 2 * model.hidden_size // 32)
    meet(control, num_threads, spin)
    if num_logits == 0:
        # Only keys and values were wanted.
        return
    attend_rows(model, layer, batch, thread)
    meet(control, num_threads, spin)
    project_output(model, layer, batch, thread)
    meet(control, num_threads, spin)
    project_gate_up(model, layer, batch, thread)
    meet(control, num_threads, spin)
    project_down(model, layer, batch, thread)
    meet(control, num_threads, spin)
    norm_final(model, batch, thread)
    meet(control, num_threads, spin)
    project_head(model, batch, thread)
    meet(control, num_threads, spin)


@native
def _encode_features(model: Record, pair: Record, thread: int) -> None:
    """Features, normalised and encoded for the fusing product; a task is a row."""
    width = pair.num_parts * model.hidden_size
    while True:
        row = take_task(model.control, thread, model.num_threads, pair.num_fused)
        if row < 0:
            return
        x = pair.features + 4 * width * row
        if pair.feature_norm != 0:
            count = pair.num_parts if pair.norms_each != 0 else 1
            size = width // count
            for part in range(count):
                place = x + 4 * size * part
                normalise(place, pair.feature_norm + 4 * size * part, size, model.eps, place)
        encode(model.body_kind, x, width // 32, pair.fused_rows + pair.fused_stride * row)


@native
def _fuse(model: Record, pair: Record, thread: int) -> None:
    """fused = features @ fc; a task is a panel."""
    num_panels, groups = model.hidden_size // 16, pair.num_parts * model.hidden_size // 32
    size = groups * panel_bytes(model.body_kind)
    num_tasks = num_panels if pair.num_fused > 0 else 0
    while True:
        panel = take_task(model.control, thread, model.num_threads, num_tasks)
        if panel < 0:
            return
        for first in range(0, pair.num_fused, model.tile_rows):
            rows = min(model.tile_rows, pair.num_fused - first)
            x, out = pair.fused_rows + pair.fused_stride * first, pair.fused + 4 * model.hidden_size * first
            call_kernel_at(
                model.body_product,
                (rows, pair.fc + size * panel, groups, x, pair.fused_stride, out + 64 * panel, 4 * model.hidden_size),
            )


@native
def _join(model: Record, layer: Record, batch: Record, pair: Record, sources: int, thread: int) -> None:
    """Pairs, normalised and encoded for the query, key and value products; a task is a row."""
    size = model.hidden_size
    floats = batch.scratch + thread * batch.scratch_stride + batch.own_floats
    half = size // 32 * row_bytes(model.body_kind)
    while True:
        row = take_task(model.control, thread, model.num_threads, batch.num_rows)
        if row < 0:
            return
        out, hidden = pair.joined + pair.joined_stride * row, batch.hidden + 4 * size * row
        source = load_integer(64, sources + 8 * row) if sources != 0 else -1
        if source >= 0:
            copy(pair.fused + 4 * size * source, size, hidden)
        _embed(pair, load_integer(64, batch.token_ids + 8 * row), size, floats)
        normalise(floats, layer.input_norm, size, model.eps, floats)
        encode(model.body_kind, floats, size // 32, out)
        normalise(hidden, pair.hidden_norm, size, model.eps, floats)
        encode(model.body_kind, floats, size // 32, out + half)
        if pair.norm_before_residual != 0:
            copy(floats, size, hidden)


@native
def _embed(pair: Record, token_id: int, size: int, out: int) -> None:
    row = pair.embed + token_id * size * pair.embed_bits // 8
    if pair.embed_bits == 32:
        copy(row, size, out)
        return
    for i in range(0, size, 16):
        store(out + 4 * i, load_bf16(row + 2 * i))
