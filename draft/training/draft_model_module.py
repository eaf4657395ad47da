"""A small Llama as a module in training: its embedding begins as the target's, seen in fewer dimensions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from target.config import ModelConfig

HEAD_SIZE = 32


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Size of a draft model. Nearly all of its bytes are its embedding, which is its output head as well."""

    hidden_size: int = 160
    num_layers: int = 3
    num_kv_heads: int = 1

    def __post_init__(self) -> None:
        if self.hidden_size <= 0 or self.hidden_size % HEAD_SIZE:
            raise ValueError(f"--hidden-size is {self.hidden_size}; it must be a multiple of {HEAD_SIZE}")
        if self.num_layers < 1:
            raise ValueError(f"--layers is {self.num_layers}; it must be at least 1")


def draft_config(target: ModelConfig, shape: DraftShape) -> LlamaConfig:
    """A Llama with the target's vocabulary and positions."""
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=shape.hidden_size,
        # Nearest to 8/3, as Llamas have it, that the native step can take.
        intermediate_size=round(shape.hidden_size * 8 / 3 / 32) * 32,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.hidden_size // HEAD_SIZE,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=target.max_model_len,
        rope_parameters={"rope_type": "default", "rope_theta": target.rope_theta},
        rms_norm_eps=target.rms_norm_eps,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=list(target.eos_token_ids),
    )


class DraftModelModule(nn.Module):
    """See `lesson.HeadModule`; it reads no features and guesses one position, from the tokens alone."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(config)

    @torch.no_grad()
    def initialise(self, embed: torch.Tensor, token_counts: torch.Tensor) -> None:
        """The embedding becomes `embed` [V, E] along the directions in which frequent tokens differ most.

        `token_counts` [V] is how often each stands in the recordings.
        """
        weights = (token_counts + 1.0).sqrt()
        covariance = (embed * weights[:, None]).T @ (embed * weights[:, None])
        size = min(self.model.config.hidden_size, embed.shape[1])
        directions = torch.linalg.eigh(covariance).eigenvectors[:, -size:]
        rows = self.model.get_input_embeddings().weight
        rows[:, :size] = embed @ directions
        # The target's rows are long; with logits that differ by about 1, training begins without certainties.
        self.model.model.norm.weight.fill_(1.0 / float(rows.norm(dim=1).mean()))

    def output_rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[K, E] the rows that make logits of the tokens [K]."""
        rows: torch.Tensor = self.model.get_input_embeddings().weight[token_ids]
        return rows

    def forward(
        self, features: torch.Tensor, token_ids: torch.Tensor, is_pair: torch.Tensor, num_steps: int
    ) -> Iterator[torch.Tensor]:
        """[B, P, E] once: the hidden state behind each token, after the final norm. Nothing else of it is read."""
        found = self.model.model(input_ids=token_ids, attention_mask=is_pair.long(), use_cache=False)
        yield found.last_hidden_state
