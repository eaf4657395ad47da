"""Training an EAGLE-3 head from recordings."""

from __future__ import annotations

import msgspec
import torch

from draft.eagle3_head import Eagle3Architecture
from draft.training.course import WINDOW, Course
from draft.training.eagle3_module import Eagle3Module
from draft.training.head_export import write_eagle3
from draft.training.initialise import initialise


def paper_layers(num_layers: int) -> tuple[int, ...]:
    """The target layers that EAGLE-3 reads; fewer where the target has so few that some would be the same."""
    return tuple(sorted({min(2, num_layers), num_layers // 2, max(num_layers - 3, 1)}))


def train_eagle3(course: Course) -> None:
    """Train until done and write the head; if time runs out before, a later call goes on."""
    plan, tables = course.plan, course.tables
    samples = course.samples(plan.feature_layers)
    embed = tables.embed.float()
    architecture = Eagle3Architecture(
        layer=msgspec.structs.replace(tables.config, num_layers=1, qkv_bias=False, qk_norm=False, sliding_window=None),
        feature_layers=plan.feature_layers,
        draft_vocab_size=min(plan.vocabulary, tables.config.vocab_size),
        feature_norm="each",
    )
    torch.manual_seed(course.settings.seed)
    module = Eagle3Module(architecture, embed, tables.lm_head.float(), WINDOW)
    gain = tables.norm.float()
    ranking = course.begin(module, samples, lambda batches: initialise(module, batches, embed, gain))
    trainer = course.learn(module, samples, ranking)
    if trainer.is_done:
        target_ids = ranking[: architecture.draft_vocab_size].sort().values
        write_eagle3(
            course.out,
            architecture,
            module.checkpoint(),
            target_ids,
            tables.lm_head[target_ids] if plan.keep_rows else None,
            target_name=course.target_name,
            storage=plan.storage,
        )
        course.write_record(trainer.curve)
