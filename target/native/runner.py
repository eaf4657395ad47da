"""The CPU runner whose forward is one native call."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from target.batch import ForwardBatch, ForwardOutput, IntArray
from target.config import ModelConfig
from target.native.attention_tiles import TILE, mix_kernel, mix_width, queries_at_once, score_kernel, tiles_at_once
from target.native.isa import ISAS
from target.native.kv_pool import NativeKVPool
from target.native.memory import Arena, address_of, aligned_size
from target.native.packed_model import KIND_NAMES, PackedModel
from target.native.records import BatchRecord, LayerRecord, ModelRecord, as_array
from target.native.step import run
from target.native.threads import control_bytes
from target.native.tiles import product_kernel, tile_rows
from target.native.workers import Workers
from target.native.workspace import Workspace
from target.rope import RotaryTable

SPIN_TICKS = 60_000
"""How long a thread spins before it sleeps, in ticks of the time stamp counter: about 20 microseconds."""


class NativeRunner:
    """See `target.runner.Runner`. Owns `num_threads - 1` threads, which sleep between steps; `close` ends them.

    `isa`: a number of `target.native.isa.ISAS`; results do not depend on it, nor on the number of threads.
    """

    def __init__(
        self,
        config: ModelConfig,
        packed: PackedModel,
        *,
        num_blocks: int,
        block_size: int,
        num_threads: int,
        max_model_len: int,
        isa: int,
    ) -> None:
        self.config = config
        self.device = torch.device("cpu")
        self.kv_pool = NativeKVPool(config, num_blocks=num_blocks, block_size=block_size)
        name = next(name for name, number in ISAS.items() if number == isa)
        self.description = (
            f"native step on {num_threads} threads ({name}), layers {KIND_NAMES[packed.body_kind]}, "
            f"head {KIND_NAMES[packed.head_kind]}, KV cache float16; rows are bitwise independent"
        )
        self._kinds = packed.body_kind, packed.head_kind
        self._isa = isa
        self._num_threads = num_threads
        self._vocab_panels = -(-config.vocab_size // 16)
        self._weights = _Weights(config, packed, max_model_len)
        self._kernels = [product_kernel(kind, isa) for kind in self._kinds] + [
            score_kernel(isa),
            mix_kernel(isa, mix_width(isa, config.head_size)),
        ]
        self._control = Arena(control_bytes(num_threads)).empty((control_bytes(num_threads) // 4,), np.int32)
        self._model = as_array(self._record(isa))
        self._layers = as_array(*self._layer_records())
        self._workspace = self._make_workspace(max_rows=16, max_logits=16, max_context=512)
        empty = BatchRecord(**(dict.fromkeys(BatchRecord._fields, 0) | self._workspace.fields))
        self._batch = as_array(empty)
        self._start_threads()

    def _record(self, isa: int) -> ModelRecord:
        config, weights = self.config, self._weights
        return ModelRecord(
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            vocab_panels=self._vocab_panels,
            body_kind=self._kinds[0],
            head_kind=self._kinds[1],
            body_product=self._kernels[0].address,
            head_product=self._kernels[1].address,
            score_kernel=self._kernels[2].address,
            mix_kernel=self._kernels[3].address,
            tile_rows=tile_rows(isa),
            unit_rows=max(1, queries_at_once(isa) * config.num_kv_heads // config.num_heads),
            max_queries=queries_at_once(isa),
            max_tiles=tiles_at_once(isa),
            mix_width=mix_width(isa, config.head_size),
            embed=address_of(weights.embed),
            head=address_of(weights.head),
            norm=address_of(weights.norm),
            cos=address_of(weights.cos),
            sin=address_of(weights.sin),
            tile_stride=config.num_kv_heads * config.head_size * TILE * 2,
            control=address_of(self._control),
            num_threads=1,
            spin_ticks=SPIN_TICKS,
            eps=config.rms_norm_eps,
            score_scale=1.0 / math.sqrt(config.head_size),
        )

    def _layer_records(self) -> list[LayerRecord]:
        keys, values = self.kv_pool.keys, self.kv_pool.values
        return [
            LayerRecord(
                *(0 if part is None else address_of(part) for part in layer), address_of(keys[i]), address_of(values[i])
            )
            for i, layer in enumerate(self._weights.layers)
        ]

    def _make_workspace(self, *, max_rows: int, max_logits: int, max_context: int) -> Workspace:
        return Workspace(
            self.config,
            *self._kinds,
            self._isa,
            num_threads=self._num_threads,
            max_rows=max_rows,
            max_logits=max_logits,
            max_context=max_context,
        )

    def _start_threads(self) -> None:
        """Compile with an empty step of one thread, then let the others wait for the next."""
        self._run()
        self._model["num_threads"] = self._num_threads
        self._workers = Workers(run, self._control, (self._model, self._layers, self._batch), self._num_threads)

    @property
    def weight_kinds(self) -> str:
        """How the layers' weights and the head's are stored."""
        return " ".join(KIND_NAMES[kind] for kind in self._kinds)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads: the layers and the head."""
        return self._weights.num_bytes

    def close(self) -> None:
        """End the threads. The runner cannot be used afterwards."""
        self._workers.close()

    def _run(self) -> None:
        run(self._model, self._layers, self._batch, 0)

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """See `target.runner.Runner.forward`."""
        if self._workers.are_closed:
            raise RuntimeError("this runner is closed")
        self._check(batch)
        num_rows, num_logits = len(batch.token_ids), len(batch.logit_rows)
        self._ensure_room(batch)
        staged = StagedBatch(batch, self.kv_pool.block_size)
        logits = torch.empty((num_logits, 16 * self._vocab_panels), dtype=torch.float32)
        features, columns = self._features(batch)
        self._batch[0] = BatchRecord(
            num_rows=num_rows,
            num_logits=num_logits,
            num_sequences=len(batch.num_computed),
            **staged.fields,
            logits=logits.data_ptr(),
            logits_stride=64 * self._vocab_panels,
            features=0 if features is None else features.data_ptr(),
            features_stride=0 if features is None else features.shape[1],
            feature_columns=address_of(columns),
            **self._workspace.fields,
        )
        self._run()
        return ForwardOutput(logits[:, : self.config.vocab_size], features)

    def _check(self, batch: ForwardBatch) -> None:
        """Raises `ValueError` for what would be read outside the tables: machine code does not look."""
        limits = {"token_ids": self.config.vocab_size, "positions": len(self._weights.cos)}
        for name, limit in limits.items():
            values = getattr(batch, name)
            if values.min() < 0 or values.max() >= limit:
                raise ValueError(f"{name} are {values.min()} to {values.max()}; they must be 0 to {limit - 1}")

    def _ensure_room(self, batch: ForwardBatch) -> None:
        """Replace the workspace by a larger one where the step would not fit."""
        room = self._workspace
        needs = len(batch.token_ids), len(batch.logit_rows), batch.block_tables.shape[1] * self.kv_pool.block_size
        if not room.fits(*needs):
            has = room.max_rows, room.max_logits, room.max_context
            rows, wanted, context = (
                have if need <= have else 1 << (need - 1).bit_length() for need, have in zip(needs, has, strict=True)
            )
            self._workspace = self._make_workspace(max_rows=rows, max_logits=wanted, max_context=context)

    def _features(self, batch: ForwardBatch) -> tuple[torch.Tensor | None, IntArray]:
        """Room for the asked hidden states, and the column of each layer's."""
        columns = np.full(self.config.num_layers + 2, -1, np.int64)
        if not batch.feature_layers:
            return None, columns
        size = self.config.hidden_size
        for i, layer in enumerate(batch.feature_layers):
            columns[layer] = i * size
        return torch.empty((len(batch.token_ids), len(batch.feature_layers) * size), dtype=torch.float32), columns


class _Weights:
    """Every array of a model in one arena, in the order a step reads them."""

    def __init__(self, config: ModelConfig, packed: PackedModel, max_model_len: int) -> None:
        rotary = RotaryTable(config, max_model_len, torch.float32, torch.device("cpu"))
        half = config.head_size // 2
        self.cos = np.ascontiguousarray(rotary.cos[:, :half].numpy())
        self.sin = np.ascontiguousarray(rotary.sin[:, half:].numpy())
        self.norm = packed.norm.copy()  # a view would keep a whole GGUF file mapped
        self.embed = _placed(packed.embed)
        self.head = self.embed if packed.head is packed.embed else _placed(packed.head)
        self.layers: list[list[npt.NDArray[Any] | None]] = []
        for layer in packed.layers:
            parts = [getattr(layer, name) for name in LayerRecord._fields[:-2]]
            arena = Arena(sum(aligned_size(part) for part in parts if part is not None))
            self.layers.append([None if part is None else arena.place(part) for part in parts])

    @property
    def num_bytes(self) -> int:
        """Of what every step reads: not the embedding, of which it reads a row."""
        return self.head.nbytes + sum(part.nbytes for layer in self.layers for part in layer if part is not None)


def _placed(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return Arena(aligned_size(array)).place(array)


class StagedBatch:
    """A batch's integers side by side in one buffer, and where each array begins."""

    def __init__(self, batch: ForwardBatch, block_size: int) -> None:
        arrays = {
            "token_ids": batch.token_ids,
            "positions": batch.positions,
            "slots": batch.slot_mapping,
            "row_starts": batch.row_starts,
            "num_computed": batch.num_computed,
            "chain_lens": batch.chain_lens,
            "tree_masks": batch.tree_masks,
            "tables": _tile_tables(batch.block_tables, block_size).ravel(),
            "logit_rows": batch.logit_rows,
        }
        self._buffer = np.concatenate(list(arrays.values()), dtype=np.int64)
        address = address_of(self._buffer)
        self.fields: dict[str, int] = {"table_width": batch.block_tables.shape[1] * (block_size // TILE)}
        for name, array in arrays.items():
            self.fields[name] = address
            address += 8 * array.size


def _tile_tables(block_tables: IntArray, block_size: int) -> IntArray:
    """[S, B * block_size / 16] the tiles of the blocks."""
    ratio = block_size // TILE
    if ratio == 1:
        return block_tables
    tiles = block_tables[:, :, None] * ratio + np.arange(ratio)
    return tiles.reshape(len(block_tables), -1)
