"""The quantised blocks of a GGUF file (llama.cpp's format, version 3), as they are on disk.

Reading through the `gguf` package takes seconds, most of them on the tokenizer; here the header is walked once, and
what is not asked for is skipped.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from target.checkpoint import require_none_left
from target.errors import CheckpointError

Bytes = npt.NDArray[np.uint8]

FLOAT32, Q4_1, Q8_0 = 0, 3, 8
"""GGML's numbers of the types read here."""
TYPE_NAMES = {FLOAT32: "F32", Q4_1: "Q4_1", Q8_0: "Q8_0"}
_BLOCK_BYTES = {FLOAT32: 4, Q4_1: 20, Q8_0: 34}
_BLOCK_SIZE = {FLOAT32: 1, Q4_1: 32, Q8_0: 32}
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
UNUSED = {"rope_freqs.weight"}
"""Tensors that are part of the config."""
_STRING, _ARRAY, _UINT32 = 8, 9, 4


@dataclass(frozen=True, slots=True)
class _Tensor:
    shape: tuple[int, ...]
    """Outputs first."""
    kind: int
    offset: int


class GGUFBlocks:
    """The tensors of a file by GGUF name. Raises `CheckpointError` for a file that is not one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, KeyError, IndexError) as error:
            raise CheckpointError(f"{path} is truncated or not a GGUF file ({error}); fetch it again") from error

    def _read_header(self) -> None:
        cursor = _Cursor(self._data)
        magic, version, num_tensors, num_fields = cursor.take("4sIQQ")
        if magic != b"GGUF" or version < 2:
            raise CheckpointError(f"{self.path} is not a GGUF file of version 2 or later")
        self.architecture, alignment = "", 32
        for _ in range(num_fields):
            key, kind = cursor.string(), cursor.take("I")[0]
            if key == "general.architecture" and kind == _STRING:
                self.architecture = cursor.string()
            elif key == "general.alignment" and kind == _UINT32:
                alignment = cursor.take("I")[0]
            else:
                cursor.skip_value(kind)
        self._tensors: dict[str, _Tensor] = {}
        for _ in range(num_tensors):
            name, num_dims = cursor.string(), cursor.take("I")[0]
            shape = cursor.take(f"{num_dims}Q")[::-1]
            self._tensors[name] = _Tensor(shape, *cursor.take("IQ"))
        self._left = set(self._tensors) - UNUSED
        self._start = -(-cursor.position // alignment) * alignment

    def kind(self, name: str) -> int | None:
        """GGML's number of a tensor's type; None if there is no such tensor."""
        tensor = self._tensors.get(name)
        return None if tensor is None else tensor.kind

    def blocks(self, name: str, kind: int, shape: tuple[int, ...]) -> Bytes:
        """The tensor `name` as bytes [..., blocks, bytes of a block]. Raises `CheckpointError` if it is another."""
        tensor = self._tensors.get(name)
        if tensor is None or tensor.shape != shape or tensor.kind != kind:
            found = "absent" if tensor is None else f"{list(tensor.shape)} of type {tensor.kind}"
            raise CheckpointError(
                f"{self.path}: {name} is {found}; it must be {list(shape)} of type {TYPE_NAMES[kind]}"
            )
        self._left.discard(name)
        size, length = _BLOCK_SIZE[kind], _BLOCK_BYTES[kind]
        if shape[-1] % size:
            raise CheckpointError(f"{self.path}: {name} has rows of {shape[-1]} weights, not a multiple of {size}")
        start, count = self._start + tensor.offset, int(np.prod(shape)) // size * length
        if start + count > len(self._data):
            raise CheckpointError(f"{self.path} is truncated within {name}; fetch it again")
        return np.frombuffer(self._data, np.uint8, count, start).reshape(*shape[:-1], shape[-1] // size, length)

    def require_all_read(self) -> None:
        """Raises `CheckpointError` naming tensors that were not read: without them the model would be another one."""
        require_none_left(self.path, self._left)

    def floats(self, name: str, size: int) -> npt.NDArray[np.float32]:
        """The float32 vector `name`."""
        return self.blocks(name, FLOAT32, (size,)).reshape(-1).view(np.float32)


class _Cursor:
    """A place in the header."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self._data, self.position)
        self.position += struct.calcsize("<" + layout)
        return values

    def string(self) -> str:
        length = self.take("Q")[0]
        self.position += length
        return self._data[self.position - length : self.position].decode()

    def skip_value(self, kind: int) -> None:
        if kind == _STRING:
            length = self.take("Q")[0]
            self.position += length
        elif kind == _ARRAY:
            element, count = self.take("IQ")
            if element in _SCALAR_BYTES:
                self.position += count * _SCALAR_BYTES[element]
            else:
                for _ in range(count):
                    self.skip_value(element)
        else:
            self.position += _SCALAR_BYTES[kind]
