"""The EAGLE-3 head as a differentiable module, unrolled over its own outputs (training-time test, arXiv 2503.01840)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

from draft.eagle3_head import Eagle3Architecture
from target.rope import RotaryTable


class Eagle3Module(nn.Module):
    """The same function as `draft.eagle3_head.Eagle3Head`; parameters are named as in a `speculators` checkpoint.

    The embedding and the output rows are the target's, stay as they are and are not part of it. See `forward`.
    """

    def __init__(
        self, architecture: Eagle3Architecture, embed: torch.Tensor, lm_head: torch.Tensor, max_pairs: int
    ) -> None:
        """`embed` and `lm_head` [vocabulary, E]; windows of at most `max_pairs` pairs."""
        super().__init__()
        layer, size = architecture.layer, architecture.layer.hidden_size
        self.architecture = architecture
        self._embed = embed
        self._lm_head = lm_head
        self._rotary = RotaryTable(layer, max_pairs + 16, torch.float32, torch.device("cpu"))
        queries, keys = layer.num_heads * layer.head_size, layer.num_kv_heads * layer.head_size
        width = layer.intermediate_size
        shapes = {
            "layers.0.self_attn.q_proj": (queries, 2 * size),
            "layers.0.self_attn.k_proj": (keys, 2 * size),
            "layers.0.self_attn.v_proj": (keys, 2 * size),
            "layers.0.self_attn.o_proj": (size, queries),
            "layers.0.mlp.gate_proj": (width, size),
            "layers.0.mlp.up_proj": (width, size),
            "layers.0.mlp.down_proj": (size, width),
            "fc": (size, len(architecture.feature_layers) * size),
        }
        norms = ["layers.0.input_layernorm", "layers.0.hidden_norm", "layers.0.post_attention_layernorm", "norm"]
        norms += [f"fc_norm.{i}" for i in range(len(architecture.feature_layers))]
        self._weights = nn.ParameterDict(
            {_key(name): nn.Parameter(torch.randn(shape) * shape[1] ** -0.5) for name, shape in shapes.items()}
            | {_key(name): nn.Parameter(torch.ones(size)) for name in norms}
        )

    def weight(self, name: str) -> nn.Parameter:
        """The parameter that a checkpoint calls `name` and ".weight"."""
        parameter = self._weights[_key(name)]
        assert isinstance(parameter, nn.Parameter)
        return parameter

    def checkpoint(self) -> dict[str, torch.Tensor]:
        """Every parameter under its name in a checkpoint, without the output rows."""
        return {_name(key): parameter.detach() for key, parameter in self._weights.items()}

    def output_rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `lesson.HeadModule`."""
        return self._lm_head[token_ids]

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """[..., E] of features [..., A * E]."""
        parts = features.chunk(len(self.architecture.feature_layers), dim=-1)
        normed = [self._normed(part, f"fc_norm.{i}") for i, part in enumerate(parts)]
        return functional.linear(torch.cat(normed, dim=-1), self.weight("fc"))

    def forward(
        self, features: torch.Tensor, token_ids: torch.Tensor, is_pair: torch.Tensor, num_steps: int
    ) -> Iterator[torch.Tensor]:
        """What the head says behind every pair, then behind its own outputs, `num_steps` times: [B, P, E], normalised.

        `features` [B, P, A * E], `token_ids` [B, P]. Output p of step s stands for the token that is s + 1 places
        behind token_ids[p]; the head was given its own outputs for the last s places, and the right tokens. Outputs
        whose tokens lie outside the window mean nothing.
        """
        hidden = self.fuse(features)
        num_pairs = token_ids.shape[1]
        causal = torch.ones(num_pairs, num_pairs, dtype=torch.bool).tril()
        mask = torch.zeros(is_pair.shape[0], 1, num_pairs, num_pairs)
        mask = mask.masked_fill(~(causal & is_pair[:, None, None, :]), -torch.inf)
        # A padding row sees itself, so that its softmax is a number.
        mask = mask.masked_fill(torch.eye(num_pairs, dtype=torch.bool), 0.0)
        past: list[tuple[torch.Tensor, torch.Tensor]] = []
        for step in range(num_steps):
            shifted = functional.pad(token_ids[:, step:], (0, step))
            hidden = self._layer(hidden, functional.embedding(shifted, self._embed), past, mask)
            yield self._normed(hidden, "norm")

    def _layer(
        self,
        hidden: torch.Tensor,
        embedded: torch.Tensor,
        past: list[tuple[torch.Tensor, torch.Tensor]],
        mask: torch.Tensor,
    ) -> torch.Tensor:
        prefix = "layers.0."
        features = self._normed(hidden, prefix + "hidden_norm")
        pair = torch.cat((self._normed(embedded, prefix + "input_layernorm"), features), dim=-1)
        attended = self._attend(pair, past, mask)
        residual = features if self.architecture.norm_before_residual else hidden
        x = residual + functional.linear(attended, self.weight(prefix + "self_attn.o_proj"))
        normed = self._normed(x, prefix + "post_attention_layernorm")
        gate = functional.silu(functional.linear(normed, self.weight(prefix + "mlp.gate_proj")))
        up = functional.linear(normed, self.weight(prefix + "mlp.up_proj"))
        return x + functional.linear(gate * up, self.weight(prefix + "mlp.down_proj"))

    def _attend(
        self, pair: torch.Tensor, past: list[tuple[torch.Tensor, torch.Tensor]], mask: torch.Tensor
    ) -> torch.Tensor:
        """Row p sees the pairs up to p, and its own rows of the steps before and of this one."""
        layer, step = self.architecture.layer, len(past)
        query = self._rotated(self._heads(pair, "q_proj"), step)
        repeats = layer.num_heads // layer.num_kv_heads
        key = self._rotated(self._heads(pair, "k_proj"), step).repeat_interleave(repeats, 1)
        value = self._heads(pair, "v_proj").repeat_interleave(repeats, 1)
        past.append((key, value))
        scale = layer.head_size**-0.5
        scores = [query @ past[0][0].transpose(-1, -2) * scale + mask]
        scores += [(query * own).sum(-1, keepdim=True) * scale for own, _ in past[1:]]
        weights = torch.cat(scores, dim=-1).softmax(-1)
        num_pairs = pair.shape[1]
        mixed = weights[..., :num_pairs] @ past[0][1]
        for i, (_, own) in enumerate(past[1:]):
            mixed = mixed + weights[..., num_pairs + i : num_pairs + i + 1] * own
        return mixed.transpose(1, 2).flatten(2)

    def _heads(self, pair: torch.Tensor, name: str) -> torch.Tensor:
        """[B, heads, P, D]"""
        projected = functional.linear(pair, self.weight(f"layers.0.self_attn.{name}"))
        return projected.view(*pair.shape[:-1], -1, self.architecture.layer.head_size).transpose(1, 2)

    def _rotated(self, x: torch.Tensor, first: int) -> torch.Tensor:
        half, end = x.shape[-1] // 2, first + x.shape[-2]
        swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
        return x * self._rotary.cos[first:end] + swapped * self._rotary.sin[first:end]

    def _normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        # Under autocast the input may be bfloat16, the weight never is.
        return functional.rms_norm(x.float(), (x.shape[-1],), self.weight(name), self.architecture.layer.rms_norm_eps)


def _key(name: str) -> str:
    """A parameter's name may hold no dots."""
    return name.replace(".", "/")


def _name(key: str) -> str:
    return key.replace("/", ".") + ".weight"
