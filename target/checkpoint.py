"""Reading and writing the weights of a Hugging Face folder (safetensors, sharded or not)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from target.config import ModelConfig
from target.digests import MANIFEST
from target.errors import CheckpointError, unreadable
from target.file_mode import apply_umask
from target.hf_config import read_config, read_json
from target.weights import LayerWeights, ModelWeights

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
"""Types that weights are stored in."""
OUTER_NAMES = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
"""Where the head is tied, some checkpoints hold it all the same, and it is not read: the embedding is what counts."""
UNUSED_ENDINGS = (".rotary_emb.inv_freq",)
"""Tensors that old versions of transformers wrote, and that are computed from the config."""


class Checkpoint:
    """The tensors of a folder by name, memory-mapped. A context manager: the files are open inside it alone."""

    def __init__(self, model_dir: Path) -> None:
        self._dir = model_dir
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._where: dict[str, str] = {}

    def __enter__(self) -> Self:
        try:
            for name in weight_files(self._dir):
                self._open(name)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _open(self, name: str) -> None:
        path = self._dir / name
        try:
            file = self._stack.enter_context(safe_open(path, framework="pt"))
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing, though {self._dir / INDEX} names it") from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(unreadable(path, "a safetensors file", error)) from error
        self._files[name] = file
        self._where.update(dict.fromkeys(file.keys(), name))

    def names(self) -> Iterator[str]:
        """Every tensor's name."""
        return iter(self._where)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor `name`, a view of the mapped file. Raises `CheckpointError` when it is absent."""
        file = self._where.get(name)
        if file is None:
            raise CheckpointError(f"{self._dir}: no file holds the tensor {name}, which config.json asks for")
        tensor: torch.Tensor = self._files[file].get_tensor(name)
        return tensor

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """As `tensor`, and of this shape. Raises `CheckpointError` where it has another."""
        tensor = self.tensor(name)
        if tuple(tensor.shape) != shape:
            place = self._dir / self._where[name]
            raise CheckpointError(f"{place}: {name} has shape {list(tensor.shape)}; config.json asks for {list(shape)}")
        require_numbers(self._dir / self._where[name], name, tensor, FLOATS)
        return tensor


def require_numbers(place: Path, name: str, tensor: torch.Tensor, kinds: frozenset[torch.dtype]) -> None:
    """Raises `CheckpointError` for a tensor of another type than `kinds`: quantised numbers are not the weights."""
    if tensor.dtype not in kinds:
        found, fitting = (sorted(str(kind).removeprefix("torch.") for kind in some) for some in ({tensor.dtype}, kinds))
        raise CheckpointError(f"{place}: {name} is of type {found[0]}; it must be {' or '.join(fitting)}")


def require_none_left(place: Path, left: Collection[str]) -> None:
    """Raises `CheckpointError` naming tensors that nobody reads: without them the model would be another one."""
    if left:
        names = ", ".join(sorted(left)[:6]) + (", …" if len(left) > 6 else "")
        raise CheckpointError(
            f"{place}: {len(left)} tensors have no place in the architecture of config.json: {names}; the model would "
            "not compute what its weights were trained for"
        )


def require_known_tensors(place: Path, config: ModelConfig, names: Iterable[str]) -> None:
    """Raises `CheckpointError` naming tensors that `config` has no place for, and that are not known to be unused."""
    known = set(OUTER_NAMES)
    known.update(f"model.layers.{i}.{name}" for i in range(config.num_layers) for name in _layer_names(config))
    require_none_left(place, [name for name in names if name not in known and not name.endswith(UNUSED_ENDINGS)])


def _layer_names(config: ModelConfig) -> Iterator[str]:
    """Names of a layer's tensors behind its prefix."""
    projections = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    matrices = (*projections, "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    norms = ("input_layernorm", "post_attention_layernorm")
    heads = ("self_attn.q_norm", "self_attn.k_norm") if config.qk_norm else ()
    yield from (f"{name}.weight" for name in (*matrices, *norms, *heads))
    if config.qkv_bias:
        yield from (f"{name}.bias" for name in projections)


def weight_files(model_dir: Path) -> list[str]:
    """The safetensors files of a folder, in order. Raises `CheckpointError` when there are none."""
    if (model_dir / SINGLE).exists():
        return [SINGLE]
    if (model_dir / INDEX).exists():
        places = read_json(model_dir / INDEX).get("weight_map")
        if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
            shown = str(places)[:80]
            raise CheckpointError(f"{model_dir / INDEX}: weight_map is {shown}; it must map tensors to files")
        return sorted(set(places.values()))
    if not model_dir.is_dir():
        raise CheckpointError(f"{model_dir} is not a folder; a model is a Hugging Face folder or a .gguf file")
    found = ", ".join(sorted(path.name for path in model_dir.iterdir())[:8]) or "nothing"
    raise CheckpointError(
        f"{model_dir} holds no {SINGLE} and no {INDEX} (found: {found}); convert the weights to safetensors"
    )


def load_weights(model_dir: Path, config: ModelConfig, dtype: torch.dtype) -> ModelWeights:
    """The weights of the model in `model_dir` as `dtype`, on the CPU, q/k/v and gate/up each laid into one matrix.

    Its layers are read when they are gone through; `CheckpointError` for one of them is raised there.
    """
    with Checkpoint(model_dir) as checkpoint:
        require_known_tensors(model_dir, config, checkpoint.names())
        hidden, vocab = config.hidden_size, config.vocab_size
        embed = checkpoint.read("model.embed_tokens.weight", (vocab, hidden)).to(dtype, copy=True)
        head = embed
        if not config.tie_word_embeddings:
            head = checkpoint.read("lm_head.weight", (vocab, hidden)).to(dtype, copy=True)
        norm = checkpoint.read("model.norm.weight", (hidden,)).to(dtype, copy=True)
    return ModelWeights(embed=embed, layers=_LayersOnDisk(model_dir, config, dtype), norm=norm, lm_head=head)


class _LayersOnDisk:
    """A folder's layers, read anew by whoever goes through them: a model need never be whole beside its packed form."""

    def __init__(self, model_dir: Path, config: ModelConfig, dtype: torch.dtype) -> None:
        self._dir, self._config, self._dtype = model_dir, config, dtype

    def __iter__(self) -> Iterator[LayerWeights]:
        with Checkpoint(self._dir) as checkpoint:
            for i in range(self._config.num_layers):
                yield _load_layer(checkpoint, self._config, f"model.layers.{i}.", self._dtype)


def _load_layer(checkpoint: Checkpoint, config: ModelConfig, prefix: str, dtype: torch.dtype) -> LayerWeights:
    hidden, width = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    attention = prefix + "self_attn."

    def one(name: str, *shape: int) -> torch.Tensor:
        return checkpoint.read(name, shape).to(dtype, copy=True)

    def stacked(parts: list[tuple[str, int]], *rest: int) -> torch.Tensor:
        whole = torch.empty((sum(rows for _, rows in parts), *rest), dtype=dtype)
        for (name, rows), place in zip(parts, whole.split([rows for _, rows in parts]), strict=True):
            place.copy_(checkpoint.read(name, (rows, *rest)))
        return whole

    projections = [("q_proj", queries), ("k_proj", keys), ("v_proj", keys)]
    return LayerWeights(
        input_norm=one(prefix + "input_layernorm.weight", hidden),
        qkv=stacked([(f"{attention}{name}.weight", rows) for name, rows in projections], hidden),
        qkv_bias=stacked([(f"{attention}{name}.bias", rows) for name, rows in projections])
        if config.qkv_bias
        else None,
        q_norm=one(attention + "q_norm.weight", config.head_size) if config.qk_norm else None,
        k_norm=one(attention + "k_norm.weight", config.head_size) if config.qk_norm else None,
        output=one(attention + "o_proj.weight", hidden, queries),
        post_norm=one(prefix + "post_attention_layernorm.weight", hidden),
        gate_up=stacked([(prefix + "mlp.gate_proj.weight", width), (prefix + "mlp.up_proj.weight", width)], hidden),
        down=one(prefix + "mlp.down_proj.weight", hidden, width),
    )


COPIED_SUFFIXES = frozenset({".json", ".jinja", ".txt", ".model"})
"""Files beside the weights: configs, templates and tokenizers."""


def truncate_checkpoint(source_dir: Path, out_dir: Path, num_layers: int) -> None:
    """Write a folder whose model is the first `num_layers` layers of another: a poor but cheap draft model.

    Embeddings, final norm, head and tokenizer files are the source's own.
    """
    total = read_config(source_dir).num_layers
    if not 1 <= num_layers <= total:
        raise ValueError(f"num_layers is {num_layers}; {source_dir} has layers to keep 1 to {total}")
    out_dir.mkdir(parents=True, exist_ok=True)
    for path in source_dir.iterdir():
        if path.is_file() and path.suffix in COPIED_SUFFIXES and path.name not in {INDEX, MANIFEST}:
            shutil.copyfile(path, out_dir / path.name)
    fields = read_json(source_dir / "config.json") | {"num_hidden_layers": num_layers}
    if isinstance(fields.get("layer_types"), list):
        fields["layer_types"] = fields["layer_types"][:num_layers]
    (out_dir / "config.json").write_text(json.dumps(fields, indent=2), encoding="utf-8")
    with Checkpoint(source_dir) as checkpoint:
        kept = [name for name in checkpoint.names() if _layer_of(name) < num_layers]
        save_file({name: checkpoint.tensor(name) for name in kept}, out_dir / SINGLE, metadata={"format": "pt"})
    apply_umask(out_dir / SINGLE)


def _layer_of(name: str) -> int:
    """The layer a tensor belongs to; -1 for those outside the layers."""
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] else -1
