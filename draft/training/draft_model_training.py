"""Training a small draft model from recordings."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch

from draft.training.course import Course
from draft.training.draft_model_module import DraftModelModule, DraftShape, draft_config
from target.load import DTYPES


def train_draft_model(course: Course, shape: DraftShape, target_dir: Path) -> None:
    """Train until done and write a Hugging Face folder; if time runs out before, a later call goes on."""
    tables = course.tables
    # It may guess every token, and one position: what it says next is drafted by saying it again.
    whole = dataclasses.replace(course.plan, vocabulary=tables.config.vocab_size, num_steps=1)
    course = dataclasses.replace(course, plan=whole)
    samples = course.samples((-1,))
    torch.manual_seed(course.settings.seed)
    module = DraftModelModule(draft_config(tables.config, shape))
    counts = torch.from_numpy(course.store.tokens().copy()).bincount(minlength=tables.config.vocab_size)
    ranking = course.begin(module, samples, lambda _: module.initialise(tables.embed.float(), counts.float()))
    trainer = course.learn(module, samples, ranking)
    if trainer.is_done:
        module.model.to(DTYPES[course.plan.storage]).save_pretrained(course.out)
        tokenizer = json.loads((target_dir / "tokenizer.json").read_text(encoding="utf-8"))
        text = json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":"))
        (course.out / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
        course.write_record(trainer.curve)
