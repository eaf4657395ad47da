"""The module that is trained is the head that drafts."""

from __future__ import annotations

import pytest
import torch

from draft.eagle3_head import Eagle3Architecture, Eagle3Head, Eagle3Weights
from draft.training.eagle3_module import Eagle3Module
from target.layout import BatchEntry, lay_out
from tests.tiny_head import tiny_architecture
from tests.tiny_model import tiny_weights


def module_of(architecture: Eagle3Architecture) -> Eagle3Module:
    torch.manual_seed(4)
    weights = tiny_weights(dtype=torch.float32)
    module = Eagle3Module(architecture, weights.embed, weights.lm_head, 16)
    for parameter in module.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    return module


def head_of(module: Eagle3Module) -> Eagle3Head:
    architecture = module.architecture
    tensors = {name.removesuffix(".weight").removeprefix("layers.0."): t for name, t in module.checkpoint().items()}
    embed = tiny_weights(dtype=torch.float32).embed
    weights = Eagle3Weights(
        fc=tensors["fc"],
        feature_norm=torch.cat([tensors[f"fc_norm.{i}"] for i in range(3)]),
        input_norm=tensors["input_layernorm"],
        hidden_norm=tensors["hidden_norm"],
        qkv=torch.cat([tensors[f"self_attn.{name}_proj"] for name in "qkv"]),
        q_norm=None,
        k_norm=None,
        output=tensors["self_attn.o_proj"],
        post_norm=tensors["post_attention_layernorm"],
        gate_up=torch.cat([tensors["mlp.gate_proj"], tensors["mlp.up_proj"]]),
        down=tensors["mlp.down_proj"],
        norm=tensors["norm"],
        lm_head=embed,
        target_ids=torch.arange(len(embed)),
        embed=embed,
    )
    return Eagle3Head(architecture, weights, num_blocks=16, block_size=4)


@pytest.mark.parametrize("norm_before_residual", [False, True])
@torch.no_grad()
def test_it_computes_what_the_head_computes(norm_before_residual: bool) -> None:
    """Behind features and, unrolled, behind its own outputs, for a window beside a shorter, padded one."""
    architecture = tiny_architecture(feature_norm="each", norm_before_residual=norm_before_residual)
    module = module_of(architecture)
    head = head_of(module)
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(2, 9, 48, generator=generator)
    token_ids = torch.randint(61, (2, 9), generator=generator)
    is_pair = torch.ones(2, 9, dtype=torch.bool)
    is_pair[1, 5:] = False
    outputs = list(module(features, token_ids, is_pair, 3))
    embed = tiny_weights(dtype=torch.float32).embed
    blocks = range(1, 8)
    for row, length in ((0, 9), (1, 5)):
        tokens = token_ids[row, :length].tolist()
        hidden = head.fuse(features[row, :length])
        logits, states = head.forward(lay_out([BatchEntry(0, tokens, blocks, logits_from=0)], 4), hidden)
        torch.testing.assert_close(outputs[0][row, :length] @ embed.T, logits, atol=2e-5, rtol=1e-4)
        for pair in range(length - 2):
            state = states[pair : pair + 1]
            for step in (1, 2):
                entry = BatchEntry(pair + step, [tokens[pair + step]], blocks, logits_from=0)
                found, state = head.forward(lay_out([entry], 4), state)
                torch.testing.assert_close(outputs[step][row, pair] @ embed.T, found[0], atol=2e-5, rtol=1e-4)
            head.forward(lay_out([BatchEntry(0, tokens, blocks)], 4), hidden)
