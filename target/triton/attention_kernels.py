"""Triton kernels of attention over the paged pool.

A row's visible keys, in logical order, are cut into *splits* of a fixed number of keys, counted from the sequence's
first token. Each split is reduced on its own, block of keys by block, and a row's splits are then merged first to last.
How many of them one program reduces, and whose rows share its tile, is the plan's choice and changes no bit: keys that
a row does not see, and splits it sees nothing of, change its sums by exact zeros. (Flash-decoding with a fixed split.)
"""

from __future__ import annotations

import triton
import triton.language as tl

ITEM_FIELDS = tl.constexpr(8)
ROW_FIELDS = tl.constexpr(4)


@triton.jit
def attend_kernel(
    qkv,  # [num_rows, H + 2K, D], rotated
    pool,  # [2K, slots, D], one layer
    work,  # int32, see `target.triton.attention_work`
    out,  # [num_rows, H, D]
    maxima,  # float32 [pieces, H]
    sums,  # float32 [pieces, H]
    values,  # float32 [pieces, H, D]
    scale,  # of the scores, times log2(e)
    head_stride,  # of the pool
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    GROUP: tl.constexpr,  # query heads a key head
    TILE: tl.constexpr,  # queries a tile
    KEYS: tl.constexpr,  # a block of the reduction
    SPLIT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Items of the plan, K programs' worth each; rows of one split come out as pieces, others finished."""
    num_items = tl.load(work)
    items_at = tl.load(work + 1)
    rows_at = tl.load(work + 2)
    tables_at = tl.load(work + 3)
    table_width = tl.load(work + 4)
    place = tl.arange(0, TILE)
    dim = tl.arange(0, D_PAD)
    stride = tl.cast(head_stride, tl.int64)
    for task in range(tl.program_id(0), num_items * K, tl.num_programs(0)):
        item = work + items_at + (task // K) * ITEM_FIELDS
        kv_head = task % K
        first_row = tl.load(item)
        num_rows = tl.load(item + 1)
        first_split = tl.load(item + 2)
        end_split = tl.load(item + 3)
        table = work + tables_at + tl.load(item + 4) * table_width
        path_from = tl.load(item + 5)
        path = work + tl.load(item + 6)

        row = first_row + place // GROUP
        head = kv_head * GROUP + place % GROUP
        real = place // GROUP < num_rows
        fields = work + rows_at + row * ROW_FIELDS
        first_key = tl.load(fields, mask=real, other=0x7FFFFFFF)
        visible = tl.load(fields + 1, mask=real, other=0)
        first_piece = tl.load(fields + 2, mask=real, other=0)
        num_pieces = tl.load(fields + 3, mask=real, other=0)
        inside = real[:, None] & (dim < D)[None, :]
        query = tl.load(qkv + (row * (H + 2 * K) + head)[:, None] * D + dim[None, :], mask=inside, other=0.0)

        tile_first = tl.min(first_key, axis=0)
        tile_end = tl.max(visible, axis=0)
        maximum = tl.full([TILE], float("-inf"), tl.float32)
        total = tl.zeros([TILE], tl.float32)
        mean = tl.zeros([TILE, D_PAD], tl.float32)
        for split in range(first_split, end_split):
            split_maximum, split_total, split_mean = _split(
                query,
                pool + kv_head * stride,
                K * stride,
                table,
                path,
                path_from,
                first_key,
                visible,
                tl.maximum(split * SPLIT, tile_first // KEYS * KEYS),
                tl.minimum(split * SPLIT + SPLIT, tile_end),
                scale,
                D,
                D_PAD,
                TILE,
                KEYS,
                BLOCK_SIZE,
                INTERPRETED,
            )
            maximum, total, mean = _merged(maximum, total, mean, split_maximum, split_total, split_mean)

        done = real & (num_pieces < 0)
        at = (row * H + head)[:, None] * D + dim[None, :]
        result = _normalised(total, mean).to(out.dtype.element_ty)
        tl.store(out + at, result, mask=done[:, None] & (dim < D)[None, :])
        own = first_split - first_key // SPLIT
        piece = first_piece + own
        partial = real & (own >= 0) & (own < num_pieces)
        piece_at = piece.to(tl.int64) * H + head
        tl.store(maxima + piece_at, maximum, mask=partial)
        tl.store(sums + piece_at, total, mask=partial)
        tl.store(values + piece_at[:, None] * D + dim[None, :], mean, mask=partial[:, None] & (dim < D)[None, :])


@triton.jit
def _split(
    query,  # [TILE, D]
    keys,  # one head of the pool
    values_from,  # where its values begin behind its keys
    table,
    path,
    path_from,
    first_key,
    visible,
    start,
    end,
    scale,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Keys [start, end) of one split: each query's largest score, sum of exponentials, and values weighted by these."""
    dim = tl.arange(0, D_PAD)
    maximum = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    mean = tl.zeros([TILE, D_PAD], tl.float32)
    for block in range(start, end, KEYS):
        key = block + tl.arange(0, KEYS)
        there = key < end
        on_path = there & (key >= path_from)
        slot = tl.load(table + key // BLOCK_SIZE, mask=there & (key < path_from), other=0) * BLOCK_SIZE
        slot = tl.where(on_path, tl.load(path + key - path_from, mask=on_path, other=0), slot + key % BLOCK_SIZE)
        entry = slot.to(tl.int64)[:, None] * D + dim[None, :]
        inside = there[:, None] & (dim < D)[None, :]
        k = tl.load(keys + entry, mask=inside, other=0.0)
        v = tl.load(keys + values_from + entry, mask=inside, other=0.0)
        scores = _product(query, tl.trans(k), INTERPRETED) * scale
        seen = (key[None, :] >= first_key[:, None]) & (key[None, :] < visible[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        origin = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - origin[:, None])
        fading = tl.exp2(maximum - origin)
        total = total * fading + tl.sum(weights, axis=1)
        mean = mean * fading[:, None] + _product(weights.to(v.dtype), v, INTERPRETED)
        maximum = new_maximum
    return maximum, total, mean


@triton.jit
def _product(a, b, INTERPRETED: tl.constexpr):
    """Of matrices, summed in float32, every row alike: so do tensor cores, but not what the interpreter's dot calls."""
    if INTERPRETED:
        return tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], axis=1)
    else:  # noqa: RET505  a branch that is not taken is not compiled
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _merged(maximum, total, mean, other_maximum, other_total, other_mean):
    """The reduction of two stretches of keys, the earlier one first."""
    new_maximum = tl.maximum(maximum, other_maximum)
    origin = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weight = tl.exp2(maximum - origin)
    other_weight = tl.exp2(other_maximum - origin)
    total = total * weight + other_total * other_weight
    mean = mean * weight[:, None] + other_mean * other_weight[:, None]
    return new_maximum, total, mean


@triton.jit
def _normalised(total, mean):
    """Zeros where nothing was seen."""
    return mean / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def merge_kernel(
    work,
    maxima,
    sums,
    values,
    out,
    H: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
):
    """One row's pieces of the query heads of one key head, merged first to last; zeros for a row that has none."""
    row = tl.program_id(0)
    member = tl.arange(0, GROUP_PAD)
    head = tl.program_id(1) * GROUP + member
    dim = tl.arange(0, D_PAD)
    fields = work + tl.load(work + 2) + row * ROW_FIELDS
    first_piece = tl.load(fields + 2).to(tl.int64)
    num_pieces = tl.load(fields + 3)
    real = member < GROUP
    inside = real[:, None] & (dim < D)[None, :]
    maximum = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    mean = tl.zeros([GROUP_PAD, D_PAD], tl.float32)
    for piece in range(num_pieces):
        at = (first_piece + piece) * H + head
        maximum, total, mean = _merged(
            maximum,
            total,
            mean,
            tl.load(maxima + at, mask=real, other=float("-inf")),
            tl.load(sums + at, mask=real, other=0.0),
            tl.load(values + at[:, None] * D + dim[None, :], mask=inside, other=0.0),
        )
    result = _normalised(total, mean).to(out.dtype.element_ty)
    tl.store(out + (row * H + head)[:, None] * D + dim[None, :], result, mask=inside & (num_pieces >= 0))


@triton.jit
def rotate_and_write_kernel(
    qkv,  # [num_rows, H + 2K, D]; query heads are rotated in place
    pool,  # [2K, slots, D], one layer
    work,
    cos,  # [num_rows, D]
    sin,  # [num_rows, D], its first half negated
    q_norm,  # [D], read where NORM
    k_norm,
    eps,
    head_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    HALF_PAD: tl.constexpr,
    ROTATE: tl.constexpr,
    NORM: tl.constexpr,
):
    """One head of one row: normalised where the model does, rotated unless it is a value, and put where it belongs."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    half = tl.arange(0, HALF_PAD)
    there = half < D // 2
    at = qkv + (row * (H + 2 * K) + head) * D + half
    kind = qkv.dtype.element_ty
    low = tl.load(at, mask=there, other=0.0)
    high = tl.load(at + D // 2, mask=there, other=0.0)
    if ROTATE:
        if head < H + K:
            a = low.to(tl.float32)
            b = high.to(tl.float32)
            if NORM:
                weight = q_norm
                if head >= H:
                    weight = k_norm
                scale = 1.0 / tl.sqrt((tl.sum(a * a, axis=0) + tl.sum(b * b, axis=0)) / D + eps)
                a = a * scale * tl.load(weight + half, mask=there, other=0.0).to(tl.float32)
                b = b * scale * tl.load(weight + D // 2 + half, mask=there, other=0.0).to(tl.float32)
            c = tl.load(cos + row * D + half, mask=there, other=0.0).to(tl.float32)
            s = tl.load(sin + row * D + D // 2 + half, mask=there, other=0.0).to(tl.float32)
            low = (a * c - b * s).to(kind)
            high = (b * c + a * s).to(kind)
    if head < H:
        tl.store(at, low, mask=there)
        tl.store(at + D // 2, high, mask=there)
    else:
        slot = tl.load(work + tl.load(work + 5) + row).to(tl.int64)
        entry = pool + (head - H) * tl.cast(head_stride, tl.int64) + slot * D + half
        tl.store(entry, low.to(pool.dtype.element_ty), mask=there)
        tl.store(entry + D // 2, high.to(pool.dtype.element_ty), mask=there)
