"""The phases of a step: each shares its tasks out among the threads and ends before a barrier.

`model`, `layer` and `batch` are records of `target.native.records`. Activations that the next phase multiplies are
written already encoded for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from target.native.calls import call_kernel_at
from target.native.compiling import native
from target.native.rows import (
    add_to,
    copy,
    decode_channel,
    encode,
    gate,
    normalise,
    panel_bytes,
    rotate,
    row_bytes,
)
from target.native.threads import meet, take_task
from target.native.vectors import load, load_integer, scatter_f16, store_f16

Record = Any

ROWS_NORMED_BY_ALL = 4
"""Steps of up to so many rows are normalised by every thread for itself."""
CHUNK = 64
"""Rows of one task."""
HEAD_PANELS = 8
"""Panels of the output head in one task."""
GATED = 32
"""Channels of the MLP in one task: a group of the down product's inputs."""


@native
def embed_rows(model: Record, batch: Record, thread: int) -> None:
    """hidden[row] = the embedding of its token."""
    while True:
        row = take_task(model.control, thread, model.num_threads, batch.num_rows)
        if row < 0:
            return
        token = load_integer(64, batch.token_ids + 8 * row)
        out = batch.hidden + 4 * model.hidden_size * row
        decode_channel(model.head_kind, model.embed, model.hidden_size // 32, token, out)


@native
def save_features(model: Record, batch: Record, thread: int, layer: int) -> None:
    """Keep the hidden states before `layer` where they were asked for."""
    if batch.features == 0:
        return
    column = load_integer(64, batch.feature_columns + 8 * layer)
    if column < 0:
        return
    size = model.hidden_size
    for row in range(thread, batch.num_rows, model.num_threads):
        copy(batch.hidden + 4 * size * row, size, batch.features + 4 * (batch.features_stride * row + column))


@native
def _normed(model: Record, batch: Record, thread: int, weight: int) -> int:
    """The address of all rows, normalised and encoded for the body's products."""
    kind, size, num_rows = model.body_kind, model.hidden_size, batch.num_rows
    own = batch.scratch + thread * batch.scratch_stride
    floats, stride = own + batch.own_floats, batch.normed_stride
    if num_rows <= ROWS_NORMED_BY_ALL:
        for row in range(num_rows):
            normalise(batch.hidden + 4 * size * row, weight, size, model.eps, floats)
            encode(kind, floats, size // 32, own + batch.own_rows + stride * row)
        return own + batch.own_rows
    while True:
        row = take_task(model.control, thread, model.num_threads, num_rows)
        if row < 0:
            break
        normalise(batch.hidden + 4 * size * row, weight, size, model.eps, floats)
        encode(kind, floats, size // 32, batch.normed + stride * row)
    meet(model.control, model.num_threads, model.spin_ticks)
    return batch.normed


@native
def multiply(
    model: Record, panels: int, num_panels: int, groups: int, x: int, x_stride: int, rows: int, out: int, stride: int
) -> None:
    """out[r, :16 num_panels] = x[r] @ panels, for rows of one tile."""
    size = groups * panel_bytes(model.body_kind)
    for p in range(num_panels):
        call_kernel_at(model.body_product, (rows, panels + p * size, groups, x, x_stride, out + 64 * p, stride))


@native
def project_qkv(model: Record, layer: Record, batch: Record, thread: int) -> None:
    """Queries, rotated, into their room; keys, rotated, and values into the cache."""
    x = _normed(model, batch, thread, layer.input_norm)
    project_heads(model, layer, batch, thread, x, batch.normed_stride, model.hidden_size // 32)


@native
def project_heads(model: Record, layer: Record, batch: Record, thread: int, x: int, stride: int, groups: int) -> None:
    """As `project_qkv`, of rows encoded at `x`; a task is one head and a chunk of rows."""
    heads, size = model.num_heads + 2 * model.num_kv_heads, model.head_size
    panels = size // 16
    weight_stride = panels * groups * panel_bytes(model.body_kind)
    tile = batch.scratch + thread * batch.scratch_stride + batch.own_tile
    while True:
        task = take_task(model.control, thread, model.num_threads, heads * ((batch.num_rows + CHUNK - 1) // CHUNK))
        if task < 0:
            return
        head, start = task % heads, task // heads * CHUNK
        end = min(start + CHUNK, batch.num_rows)
        for first in range(start, end, model.tile_rows):
            rows = min(model.tile_rows, end - first)
            source = x + stride * first
            multiply(model, layer.qkv + head * weight_stride, panels, groups, source, stride, rows, tile, 4 * size)
            for r in range(rows):
                _finish_head(model, layer, batch, head, first + r, tile + 4 * size * r)


@native
def _finish_head(model: Record, layer: Record, batch: Record, head: int, row: int, x: int) -> None:
    """Bias, norm and rotation of one head's floats at `x`, and their way to the queries or into the cache."""
    size = model.head_size
    if layer.qkv_bias != 0:
        add_to(x, layer.qkv_bias + 4 * size * head, size)
    half = 2 * size
    position = load_integer(64, batch.positions + 8 * row)
    cos, sin = model.cos + half * position, model.sin + half * position
    if head < model.num_heads:
        if layer.q_norm != 0:
            normalise(x, layer.q_norm, size, model.eps, x)
        rotate(x, cos, sin, size, model.score_scale, batch.queries + batch.queries_stride * row + 4 * size * head)
        return
    slot = load_integer(64, batch.slots + 8 * row)
    head -= model.num_heads
    if head < model.num_kv_heads:
        if layer.k_norm != 0:
            normalise(x, layer.k_norm, size, model.eps, x)
        rotate(x, cos, sin, size, np.float32(1), x)
        place = layer.keys + slot // 16 * model.tile_stride + 32 * size * head + 2 * (slot % 16)
        for i in range(0, size, 16):
            scatter_f16(place + 32 * i, 32, load(x + 4 * i))
    else:
        head -= model.num_kv_heads
        place = layer.values + slot // 16 * model.tile_stride + 32 * size * head + 2 * size * (slot % 16)
        for i in range(0, size, 16):
            store_f16(place + 2 * i, load(x + 4 * i))


@native
def project_output(model: Record, layer: Record, batch: Record, thread: int) -> None:
    """hidden += attention @ output."""
    groups = model.num_heads * model.head_size // 32
    _add_product(model, batch, thread, layer.output, groups, batch.attended, batch.attended_stride)


@native
def project_down(model: Record, layer: Record, batch: Record, thread: int) -> None:
    """hidden += activated @ down."""
    groups = model.intermediate_size // 32
    _add_product(model, batch, thread, layer.down, groups, batch.activated, batch.activated_stride)


@native
def _add_product(model: Record, batch: Record, thread: int, panels: int, groups: int, x: int, x_stride: int) -> None:
    """hidden += x @ panels; a task is one panel and a chunk of rows."""
    num_panels = model.hidden_size // 16
    weight_stride = groups * panel_bytes(model.body_kind)
    tile = batch.scratch + thread * batch.scratch_stride + batch.own_tile
    while True:
        task = take_task(model.control, thread, model.num_threads, num_panels * ((batch.num_rows + CHUNK - 1) // CHUNK))
        if task < 0:
            return
        panel, start = task % num_panels, task // num_panels * CHUNK
        end = min(start + CHUNK, batch.num_rows)
        for first in range(start, end, model.tile_rows):
            rows = min(model.tile_rows, end - first)
            multiply(model, panels + panel * weight_stride, 1, groups, x + x_stride * first, x_stride, rows, tile, 64)
            for r in range(rows):
                add_to(batch.hidden + 4 * (model.hidden_size * (first + r) + 16 * panel), tile + 64 * r, 16)


@native
def project_gate_up(model: Record, layer: Record, batch: Record, thread: int) -> None:
    """activated = silu(gate) * up, encoded; a task is `GATED` channels and a chunk of rows.

    The weights of a task lie together: two panels of the gate, then two of the up projection.
    """
    x = _normed(model, batch, thread, layer.post_norm)
    num_tasks, groups, stride = model.intermediate_size // GATED, model.hidden_size // 32, batch.normed_stride
    weight_stride = 4 * groups * panel_bytes(model.body_kind)
    out_bytes = row_bytes(model.body_kind)
    tile = batch.scratch + thread * batch.scratch_stride + batch.own_tile
    while True:
        task = take_task(model.control, thread, model.num_threads, num_tasks * ((batch.num_rows + CHUNK - 1) // CHUNK))
        if task < 0:
            return
        part, start = task % num_tasks, task // num_tasks * CHUNK
        end = min(start + CHUNK, batch.num_rows)
        for first in range(start, end, model.tile_rows):
            rows = min(model.tile_rows, end - first)
            multiply(
                model, layer.gate_up + part * weight_stride, 4, groups, x + stride * first, stride, rows, tile, 256
            )
            for r in range(rows):
                gate(tile + 256 * r, tile + 256 * r + 128, GATED, tile + 256 * r)
                out = batch.activated + batch.activated_stride * (first + r) + out_bytes * part
                encode(model.body_kind, tile + 256 * r, 1, out)


@native
def norm_final(model: Record, batch: Record, thread: int) -> None:
    """The final norm: of every row where that is an asked feature, and encoded for the head of the wanted rows."""
    size = model.hidden_size
    floats = batch.scratch + thread * batch.scratch_stride + batch.own_floats
    if batch.features != 0:
        column = load_integer(64, batch.feature_columns + 8 * (model.num_layers + 1))
        for row in range(thread, batch.num_rows if column >= 0 else 0, model.num_threads):
            out = batch.features + 4 * (batch.features_stride * row + column)
            normalise(batch.hidden + 4 * size * row, model.norm, size, model.eps, out)
    for i in range(thread, batch.num_logits, model.num_threads):
        row = load_integer(64, batch.logit_rows + 8 * i)
        normalise(batch.hidden + 4 * size * row, model.norm, size, model.eps, floats)
        encode(model.head_kind, floats, size // 32, batch.headed + batch.headed_stride * i)


@native
def project_head(model: Record, batch: Record, thread: int) -> None:
    """logits = normed @ head; a task is `HEAD_PANELS` panels."""
    groups = model.hidden_size // 32
    size = groups * panel_bytes(model.head_kind)
    num_tasks = (model.vocab_panels + HEAD_PANELS - 1) // HEAD_PANELS if batch.num_logits > 0 else 0
    while True:
        task = take_task(model.control, thread, model.num_threads, num_tasks)
        if task < 0:
            return
        end = min((task + 1) * HEAD_PANELS, model.vocab_panels)
        for first in range(0, batch.num_logits, model.tile_rows):
            rows = min(model.tile_rows, batch.num_logits - first)
            x, out = batch.headed + batch.headed_stride * first, batch.logits + batch.logits_stride * first
            for panel in range(task * HEAD_PANELS, end):
                weights, place = model.head + panel * size, out + 64 * panel
                call_kernel_at(
                    model.head_product, (rows, weights, groups, x, batch.headed_stride, place, batch.logits_stride)
                )
