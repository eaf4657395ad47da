"""The EAGLE-3 head on a CPU as one native call: quantised products and the attention of the target's native step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from draft.eagle3_head import ChainWish, Eagle3Architecture, Eagle3Weights, Level
from target.batch import ForwardBatch
from target.embedded import default_cache_dir
from target.native.attention_tiles import TILE, mix_kernel, mix_width, queries_at_once, score_kernel, tiles_at_once
from target.native.compiling import kept_in
from target.native.isa import native_supported, supported_isas
from target.native.kv_pool import NativeKVPool
from target.native.memory import ALIGNMENT, Arena, address_of, aligned_size
from target.native.packing import interleave_gate_up, pack
from target.native.pair_guesses import GuessRecord
from target.native.pair_step import PairRecord, run_pairs
from target.native.records import BatchRecord, LayerRecord, ModelRecord, as_array
from target.native.runner import SPIN_TICKS, StagedBatch
from target.native.threads import control_bytes
from target.native.tiles import GROUP, Q4, Q8, ROW_BYTES, product_kernel, tile_rows
from target.native.workers import Workers
from target.native.workspace import Workspace
from target.rope import RotaryTable

Floats = npt.NDArray[np.float32]


def native_head_obstacle(config: Eagle3Architecture, block_size: int) -> str | None:
    """Why a head cannot be computed natively here; None if it can."""
    possible, reason = native_supported()
    if not possible:
        return reason
    if block_size % TILE:
        return f"block_size is {block_size}; the native head needs a multiple of {TILE}"
    for name in ("hidden_size", "intermediate_size", "head_size"):
        if getattr(config.layer, name) % GROUP:
            return f"{name} is {getattr(config.layer, name)}; the native head needs a multiple of {GROUP}"
    return None


class NativeEagle3Head:
    """A `draft.eagle3_head.ChainHead` whose weights are groups of 32: of 4 bits in the layer, of 8 in the output head.

    A guess has to be read from memory like a step of the target, so that bits are time. Measured on the shipped head,
    4 bits in the layer lose 0.2 to 1 % of the tokens a step, and in the output head another 1 %.
    Owns `num_threads - 1` threads, which sleep between calls.
    """

    def __init__(
        self,
        config: Eagle3Architecture,
        weights: Eagle3Weights,
        *,
        num_blocks: int,
        block_size: int,
        num_threads: int,
        body_kind: int = Q4,
        cache_dir: Path | None = None,
        progress: Callable[[str], None] = lambda _message: None,
    ) -> None:
        """`body_kind`: of the layer's weights, see `target.native.tiles`. `cache_dir`: where machine code is kept;
        `progress` is told when it has to be made, which takes seconds.
        """
        layer = config.layer
        self.config = config
        self.device = torch.device("cpu")
        self.target_ids = weights.target_ids.contiguous()
        self.kv_pool = NativeKVPool(layer, num_blocks=num_blocks, block_size=block_size)
        self._embed = weights.embed.contiguous()
        if weights.embed.dtype not in {torch.float32, torch.bfloat16}:
            self._embed = self._embed.float()
        self._norm = weights.norm.float()
        self._isa = supported_isas()[-1]
        self._num_threads = num_threads
        self._num_draft = len(weights.lm_head)
        self._body_kind = body_kind
        self._packed = _Packed(config, weights, body_kind)
        code_dir = cache_dir or default_cache_dir()
        with kept_in(code_dir, run_pairs):
            self._kernels = (
                product_kernel(body_kind, self._isa),
                product_kernel(Q8, self._isa),
                score_kernel(self._isa),
                mix_kernel(self._isa, mix_width(self._isa, layer.head_size)),
            )
        self._control = Arena(control_bytes(num_threads)).empty((control_bytes(num_threads) // 4,), np.int32)
        self._model = as_array(self._model_record())
        self._layer = as_array(self._layer_record())
        self._workspace = self._make_workspace(max_rows=16, max_logits=16, max_context=512)
        self._batch = as_array(BatchRecord(**(dict.fromkeys(BatchRecord._fields, 0) | self._workspace.fields)))
        self._fusing_room, self._joining_room = _Room(), _Room()
        self._pair = as_array(self._pair_record())
        self._guess = as_array(self._guess_record())
        with kept_in(code_dir, run_pairs) as compiled_before:
            if not compiled_before:
                progress("compiling the native head for this processor; this happens once")
            self._run()
        self._model["num_threads"] = num_threads
        arguments = (self._model, self._layer, self._batch, self._pair, self._guess)
        self._workers = Workers(run_pairs, self._control, arguments, num_threads)

    def close(self) -> None:
        """End the threads. The head cannot be used afterwards."""
        self._workers.close()

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """See `PairHead.fuse`."""
        self._batch["num_rows"] = 0
        # A copy: features are normalised in place.
        features = states.detach().to("cpu", torch.float32, copy=True).contiguous()
        fused = self._stage_features(features)
        self._run()
        return fused

    def forward(self, batch: ForwardBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PairHead.forward`."""
        outputs = hidden.detach().to(torch.float32, copy=True).contiguous()
        logits, _staged = self._stage(batch, outputs)
        self._pair["num_fused"] = self._pair["sources"] = 0
        self._run()
        wanted = outputs[torch.from_numpy(batch.logit_rows)]
        if self.config.norm_output:
            layer = self.config.layer
            wanted = functional.rms_norm(wanted, (layer.hidden_size,), self._norm, layer.rms_norm_eps)
        return logits[:, : self._num_draft], wanted

    def guess(
        self,
        batch: ForwardBatch,
        hidden: torch.Tensor,
        features: torch.Tensor,
        sources: npt.NDArray[np.int64],
        wishes: Sequence[ChainWish],
        width: int,
    ) -> tuple[torch.Tensor, list[list[Level]]]:
        """See `ChainHead.guess`."""
        features = features.float()
        fused = self._stage_features(features)
        _logits, _staged = self._stage(batch, hidden)
        guessing = _Guessing(wishes, min(width, self._num_draft))
        self._pair["sources"] = address_of(sources)
        _set(self._guess, guessing.fields)
        self._run()
        self._guess["num_levels"] = 0
        return fused, guessing.levels()

    def _stage_features(self, features: torch.Tensor) -> torch.Tensor:
        """Fill in what is to be fused, which must live until then; it comes out in the tensor that is returned."""
        num_rows, width = features.shape
        fused = torch.empty(num_rows, self.config.layer.hidden_size)
        stride = width // GROUP * ROW_BYTES[self._body_kind]
        room = self._fusing_room.of(num_rows * stride)
        pair = self._pair
        pair["num_fused"], pair["features"], pair["fused"] = num_rows, features.data_ptr(), fused.data_ptr()
        pair["fused_rows"], pair["fused_stride"], pair["sources"] = room, stride, 0
        return fused

    def _stage(self, batch: ForwardBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, StagedBatch]:
        """Fill in the batch, whose numbers live as long as what is returned. Outputs come into `hidden`."""
        num_rows, num_logits = len(batch.token_ids), len(batch.logit_rows)
        self._ensure_room(batch)
        staged = StagedBatch(batch, self.kv_pool.block_size)
        logits = torch.empty(num_logits, self._num_panels * 16)
        numbers = {
            "num_rows": num_rows,
            "num_logits": num_logits,
            "num_sequences": len(batch.num_computed),
            "logits": logits.data_ptr(),
            "logits_stride": 64 * self._num_panels,
            "hidden": hidden.data_ptr(),
        }
        _set(self._batch, staged.fields)
        _set(self._batch, numbers)
        stride = 2 * self.config.layer.hidden_size // GROUP * ROW_BYTES[self._body_kind]
        self._pair["joined"], self._pair["joined_stride"] = self._joining_room.of(num_rows * stride), stride
        return logits, staged

    @property
    def _num_panels(self) -> int:
        return -(-self._num_draft // 16)

    def _run(self) -> None:
        run_pairs(self._model, self._layer, self._batch, self._pair, self._guess, 0)

    def _ensure_room(self, batch: ForwardBatch) -> None:
        """Replace the workspace by a larger one where the call would not fit."""
        room = self._workspace
        needs = len(batch.token_ids), len(batch.logit_rows), batch.block_tables.shape[1] * self.kv_pool.block_size
        if not room.fits(*needs):
            has = room.max_rows, room.max_logits, room.max_context
            rows, wanted, context = (
                have if need <= have else 1 << (need - 1).bit_length() for need, have in zip(needs, has, strict=True)
            )
            self._workspace = self._make_workspace(max_rows=rows, max_logits=wanted, max_context=context)
            _set(self._batch, self._workspace.fields)

    def _make_workspace(self, *, max_rows: int, max_logits: int, max_context: int) -> Workspace:
        return Workspace(
            self.config.layer,
            self._body_kind,
            Q8,
            self._isa,
            num_threads=self._num_threads,
            max_rows=max_rows,
            max_logits=max_logits,
            max_context=max_context,
        )

    def _model_record(self) -> ModelRecord:
        layer, isa, packed = self.config.layer, self._isa, self._packed
        return ModelRecord(
            num_layers=1,
            hidden_size=layer.hidden_size,
            intermediate_size=layer.intermediate_size,
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_size=layer.head_size,
            vocab_panels=self._num_panels,
            body_kind=self._body_kind,
            head_kind=Q8,
            body_product=self._kernels[0].address,
            head_product=self._kernels[1].address,
            score_kernel=self._kernels[2].address,
            mix_kernel=self._kernels[3].address,
            tile_rows=tile_rows(isa),
            unit_rows=max(1, queries_at_once(isa) * layer.num_kv_heads // layer.num_heads),
            max_queries=queries_at_once(isa),
            max_tiles=tiles_at_once(isa),
            mix_width=mix_width(isa, layer.head_size),
            embed=0,
            head=packed.address("lm_head"),
            norm=packed.address("norm"),
            cos=packed.address("cos"),
            sin=packed.address("sin"),
            tile_stride=layer.num_kv_heads * layer.head_size * TILE * 2,
            control=address_of(self._control),
            num_threads=1,
            spin_ticks=SPIN_TICKS,
            eps=layer.rms_norm_eps,
            score_scale=1.0 / math.sqrt(layer.head_size),
        )

    def _layer_record(self) -> LayerRecord:
        return LayerRecord(
            **{name: self._packed.address(name) for name in LayerRecord._fields[:-2]},
            keys=address_of(self.kv_pool.keys[0]),
            values=address_of(self.kv_pool.values[0]),
        )

    def _pair_record(self) -> PairRecord:
        """What is the same for every call; the rest is filled in by it."""
        fixed = {
            "fc": self._packed.address("fc"),
            "feature_norm": self._packed.address("feature_norm"),
            "hidden_norm": self._packed.address("hidden_norm"),
            "num_parts": len(self.config.feature_layers),
            "norms_each": int(self.config.feature_norm == "each"),
            "norm_before_residual": int(self.config.norm_before_residual),
            "embed": self._embed.data_ptr(),
            "embed_bits": 8 * self._embed.itemsize,
        }
        return PairRecord(**(dict.fromkeys(PairRecord._fields, 0) | fixed))

    def _guess_record(self) -> GuessRecord:
        fixed = {
            "num_columns": self._num_draft,
            "target_ids": self.target_ids.data_ptr(),
            "norms_output": int(self.config.norm_output),
        }
        return GuessRecord(**(dict.fromkeys(GuessRecord._fields, 0) | fixed))


class _Room:
    """Memory that grows with what is asked of it."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.uint8)

    def of(self, num_bytes: int) -> int:
        """The address of so many bytes, aligned, until more are asked for."""
        if self._buffer.size < num_bytes + ALIGNMENT:
            self._buffer = np.empty(2 * num_bytes + ALIGNMENT, np.uint8)
        return -(-address_of(self._buffer) // ALIGNMENT) * ALIGNMENT


class _Guessing:
    """What is wished of each sequence's guesses, and room for them."""

    def __init__(self, wishes: Sequence[ChainWish], width: int) -> None:
        count, num_levels = len(wishes), max(wish.depth for wish in wishes)
        stops = [token_id for wish in wishes for token_id in wish.stops]
        stop_starts = [0, *accumulate(len(wish.stops) for wish in wishes)]
        keys = (
            [wish.keys[level] if level < len(wish.keys) else 0 for level in range(num_levels) for wish in wishes]
            if any(wish.keys for wish in wishes)
            else []
        )
        self._integers = np.array(
            [*(wish.depth for wish in wishes), *stop_starts, *stops, *keys, *range(count), *([0] * count)], np.int64
        )
        floats = [*(wish.min_chance for wish in wishes), *(wish.temperature for wish in wishes), *([1.0] * count)]
        self._floats = np.array(floats, np.float32)
        self._token_ids = np.empty((num_levels, count, width), np.int64)
        self._chances = np.empty((num_levels, count, width), np.float32)
        integers, singles = address_of(self._integers), address_of(self._floats)
        behind = integers + 8 * (2 * count + 1 + len(stops) + len(keys))
        self.fields = {
            "num_levels": num_levels,
            "num_sequences": count,
            "width": width,
            "depths": integers,
            "stop_starts": integers + 8 * count,
            "stops": integers + 8 * (2 * count + 1),
            "keys": behind - 8 * len(keys),
            "rows": behind,
            "counts": behind + 8 * count,
            "min_chances": singles,
            "temperatures": singles + 4 * count,
            "reached": singles + 8 * count,
            "token_ids": address_of(self._token_ids),
            "chances": address_of(self._chances),
        }

    def levels(self) -> list[list[Level]]:
        """Those of each sequence."""
        counts = self._integers[len(self._integers) - self._token_ids.shape[1] :].tolist()
        deepest = max(counts)
        token_ids, chances = self._token_ids[:deepest].tolist(), self._chances[:deepest].tolist()
        return [[(token_ids[level][i], chances[level][i]) for level in range(count)] for i, count in enumerate(counts)]


class _Packed:
    """Every array of a head in one arena, by name."""

    def __init__(self, config: Eagle3Architecture, weights: Eagle3Weights, body_kind: int) -> None:
        layer = config.layer
        rotary = RotaryTable(layer, layer.max_model_len, torch.float32, torch.device("cpu"))
        half = layer.head_size // 2
        names = ("input_norm", "hidden_norm", "q_norm", "k_norm", "post_norm", "norm", "feature_norm")
        vectors = {name: vector for name in names if (vector := getattr(weights, name)) is not None}
        arrays: dict[str, npt.NDArray[np.generic]] = {
            "fc": pack(_floats(weights.fc), body_kind),
            "qkv": pack(_floats(weights.qkv), body_kind),
            "output": pack(_floats(weights.output), body_kind),
            "gate_up": pack(interleave_gate_up(_floats(weights.gate_up)), body_kind),
            "down": pack(_floats(weights.down), body_kind),
            "lm_head": pack(_floats(weights.lm_head), Q8),
            "cos": np.ascontiguousarray(rotary.cos[:, :half].numpy()),
            "sin": np.ascontiguousarray(rotary.sin[:, half:].numpy()),
            **{name: _floats(vector) for name, vector in vectors.items()},
        }
        arena = Arena(sum(map(aligned_size, arrays.values())))
        self._arrays = {name: arena.place(array) for name, array in arrays.items()}

    def address(self, name: str) -> int:
        """0 for what the head does not have."""
        return address_of(self._arrays[name]) if name in self._arrays else 0


def _floats(tensor: torch.Tensor) -> Floats:
    return tensor.detach().to("cpu", torch.float32).contiguous().numpy()


def _set(record: npt.NDArray[np.void], fields: Mapping[str, int]) -> None:
    for name, value in fields.items():
        record[name] = value
