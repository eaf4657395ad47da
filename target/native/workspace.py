"""The room a step needs between its phases."""

from __future__ import annotations

from target.config import ModelConfig
from target.native.attention import UNIT_BYTES
from target.native.attention_tiles import queries_at_once
from target.native.memory import ALIGNMENT, Arena, address_of
from target.native.phases import ROWS_NORMED_BY_ALL
from target.native.tiles import GROUP, MAX_TILE_ROWS, ROW_BYTES


class Workspace:
    """Buffers for up to `max_rows` new tokens, `max_logits` wanted rows and sequences of up to `max_context` tokens.

    `fields` holds the addresses and strides, under the names of `target.native.records.BatchRecord`.
    """

    def __init__(
        self,
        config: ModelConfig,
        body_kind: int,
        head_kind: int,
        isa: int,
        *,
        num_threads: int,
        max_rows: int,
        max_logits: int,
        max_context: int,
    ) -> None:
        self.max_rows, self.max_logits, self.max_context = max_rows, max_logits, max_context
        body, head = ROW_BYTES[body_kind], ROW_BYTES[head_kind]
        heads_size = config.num_heads * config.head_size
        strides = {
            "hidden": 4 * config.hidden_size,
            "queries": 4 * heads_size,
            "attended": heads_size // GROUP * body,
            "activated": config.intermediate_size // GROUP * body,
            "normed": config.hidden_size // GROUP * body,
        }
        headed_stride = config.hidden_size // GROUP * head
        group = config.num_heads // config.num_kv_heads
        unit_queries = max(group, queries_at_once(isa))
        score_stride = 4 * (_rounded(max_context, 16) + 16 + 16)
        own = {
            "own_floats": 4 * max(config.hidden_size, unit_queries * config.head_size),
            "own_queries": 4 * unit_queries * config.head_size,
            "own_tile": MAX_TILE_ROWS * 4 * max(config.head_size, 2 * GROUP),
            "own_rows": ROWS_NORMED_BY_ALL * strides["normed"],
            "own_scores": unit_queries * score_stride,
        }
        scratch_stride = sum(_rounded(size, ALIGNMENT) for size in own.values())
        sizes = {name: _rounded(stride * max_rows, ALIGNMENT) for name, stride in strides.items()}
        sizes["headed"] = _rounded(headed_stride * max_logits, ALIGNMENT)
        sizes["units"] = _rounded(8 + UNIT_BYTES * max_rows, ALIGNMENT)
        sizes["scratch"] = scratch_stride * num_threads
        buffer = Arena(sum(sizes.values())).empty((sum(sizes.values()),), "u1")
        self._buffer = buffer
        places = dict(zip(sizes, _starts(list(sizes.values()), address_of(buffer)), strict=True))
        offsets = dict(zip(own, _starts([_rounded(size, ALIGNMENT) for size in own.values()], 0), strict=True))
        self.fields: dict[str, int] = {
            **places,
            **{f"{name}_stride": stride for name, stride in strides.items() if name != "hidden"},
            **offsets,
            "headed_stride": headed_stride,
            "scratch_stride": scratch_stride,
            "score_stride": score_stride,
        }

    def fits(self, num_rows: int, num_logits: int, context: int) -> bool:
        """Whether a step of this size finds room."""
        return num_rows <= self.max_rows and num_logits <= self.max_logits and context <= self.max_context


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _starts(sizes: list[int], first: int) -> list[int]:
    starts = [first]
    for size in sizes[:-1]:
        starts.append(starts[-1] + size)
    return starts
