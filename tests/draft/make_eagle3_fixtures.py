"""Makes tests/draft/fixtures: small random EAGLE-3 heads with the logits that the `speculators` package computes.

Run once, where that package is installed (0.9.0 with transformers 5.19.0 and torch 2.13 made what is there):
`python tests/draft/make_eagle3_fixtures.py`. Checkpoints are written by the package itself.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

VOCAB_SIZE, DRAFT_VOCAB_SIZE, HIDDEN_SIZE, LENGTH, STEPS = 32, 20, 16, 7, 3
SHAPE: dict[str, int | float] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
VARIANTS = {
    "llama": (LlamaConfig, {}),
    "llama_normed": (LlamaConfig, {"norm_before_residual": True, "norm_before_fc": True}),
    "qwen3_normed": (Qwen3Config, {"norm_before_residual": True, "fc_norm": True, "norm_output": True}),
}


def make(folder: Path, layer_class: type, settings: dict[str, bool]) -> None:
    """One head, its inputs and what the package says behind them."""
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer_class(**SHAPE, attn_implementation="eager"),
        draft_vocab_size=DRAFT_VOCAB_SIZE,
        eagle_aux_hidden_state_layer_ids=[1, 2, 4],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
        **settings,
    )
    config.transformer_layer_config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = Eagle3DraftModel(config).eval()
    for name, parameter in model.named_parameters():
        spread = 0.1 if "norm" in name else parameter.shape[-1] ** -0.5
        parameter.data = torch.randn_like(parameter) * spread + ("norm" in name)
    kept = torch.randperm(VOCAB_SIZE)[:DRAFT_VOCAB_SIZE].sort().values
    known = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    known[kept] = True
    model.load_vocab_mappings(known, kept - torch.arange(DRAFT_VOCAB_SIZE))
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: logits.append(output[0].detach().clone()))
    states = torch.randn(1, LENGTH, 3 * HIDDEN_SIZE)
    token_ids = torch.randint(VOCAB_SIZE, (1, LENGTH))
    with torch.no_grad():
        model(states, token_ids, torch.zeros(1, LENGTH, dtype=torch.long), ttt_steps=STEPS)
    model.save_pretrained(folder)
    (folder / "config.py").unlink(missing_ok=True)  # the package's own source, which it puts beside
    expected = {"states": states[0], "token_ids": token_ids[0], "logits": torch.stack(logits)}
    save_file({name: tensor.contiguous() for name, tensor in expected.items()}, folder / "expected.safetensors")


if __name__ == "__main__":
    root = Path(__file__).parent / "fixtures"
    for name, (layer_class, settings) in VARIANTS.items():
        make(root / f"eagle3_{name}", layer_class, settings)
        sys.stdout.write(f"{root / f'eagle3_{name}'}\n")
