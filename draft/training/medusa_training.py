"""Training Medusa heads from recordings."""

from __future__ import annotations

import torch

from draft.training.course import Course
from draft.training.head_export import write_medusa
from draft.training.medusa_module import MedusaModule, initialise_medusa


def train_medusa(course: Course) -> None:
    """Train until done and write the heads; if time runs out before, a later call goes on."""
    samples = course.samples((-1,))
    torch.manual_seed(course.settings.seed)
    module = MedusaModule(course.plan.num_steps, course.tables.lm_head.float())
    ranking = course.begin(module, samples, lambda batches: initialise_medusa(module, batches))
    trainer = course.learn(module, samples, ranking)
    if trainer.is_done:
        num_heads, storage = course.plan.num_steps, course.plan.storage
        write_medusa(course.out, module.checkpoint(), num_heads, target_name=course.target_name, storage=storage)
        course.write_record(trainer.curve)
