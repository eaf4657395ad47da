"""What the compiled step reads: plain records of numbers and addresses, filled by Python.

An `int` is an int64, a `float` a float32; addresses and strides are in bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple, get_type_hints

import numpy as np
import numpy.typing as npt


class ModelRecord(NamedTuple):
    """A loaded model: the same for every step."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_panels: int
    body_kind: int
    """Kinds of weights: see `target.native.tiles`."""
    head_kind: int
    body_product: int
    """Addresses of kernels: products with weights of the body and of the head, scores, and weighted sums of values."""
    head_product: int
    score_kernel: int
    mix_kernel: int
    tile_rows: int
    """Rows of one product tile."""
    unit_rows: int
    """Rows of one sequence whose attention is computed together; query vectors and tiles of keys in one kernel call,
    and dimensions of a value."""
    max_queries: int
    max_tiles: int
    mix_width: int
    embed: int
    head: int
    norm: int
    cos: int
    """Of the table [positions, head_size / 2]."""
    sin: int
    tile_stride: int
    """Of one tile's keys, all key heads; its values take as much."""
    control: int
    """The threads' common words: see `target.native.threads`."""
    num_threads: int
    spin_ticks: int
    eps: float
    score_scale: float
    """What scores are multiplied by: 1 / sqrt(head_size)."""


class LayerRecord(NamedTuple):
    """Addresses of one layer's weights, 0 where the model has none, and of its cache."""

    input_norm: int
    qkv: int
    qkv_bias: int
    q_norm: int
    k_norm: int
    output: int
    post_norm: int
    gate_up: int
    down: int
    keys: int
    values: int


class BatchRecord(NamedTuple):
    """One step. What is not explained here is an array of `ForwardBatch`, in int64."""

    num_rows: int
    num_logits: int
    num_sequences: int
    token_ids: int
    positions: int
    slots: int
    row_starts: int
    num_computed: int
    chain_lens: int
    tree_masks: int
    tables: int
    """Tiles, not blocks, of each sequence, in logical order."""
    table_width: int
    """Entries."""
    logit_rows: int
    logits: int
    logits_stride: int
    features: int
    features_stride: int
    """Floats."""
    feature_columns: int
    """Per layer, and last for the final norm: the float its features begin at, or -1."""
    hidden: int
    queries: int
    queries_stride: int
    attended: int
    """Encoded for the output product, as `activated`, `normed` and `headed` are for the products they enter."""
    attended_stride: int
    activated: int
    activated_stride: int
    normed: int
    normed_stride: int
    headed: int
    headed_stride: int
    units: int
    """See `target.native.attention`."""
    scratch: int
    """Each thread's own room."""
    scratch_stride: int
    own_floats: int
    """Offsets in it: floats of a row or of a unit's attention, its queries, a product tile, encoded rows, scores."""
    own_queries: int
    own_tile: int
    own_rows: int
    own_scores: int
    score_stride: int


def as_array(*records: NamedTuple) -> npt.NDArray[np.void]:
    """The records, all of one class, as a structured array."""
    kind: Any = type(records[0])
    types = get_type_hints(kind)
    dtype = np.dtype([(name, "i8" if types[name] is int else "f4") for name in kind._fields], align=True)
    return np.array([tuple(record) for record in records], dtype)
