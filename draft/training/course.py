"""A head's training from recordings to checkpoint: what all kinds of heads have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from draft.head_checkpoint import TargetTables
from draft.training.feature_store import FeatureStore
from draft.training.head_export import write_record
from draft.training.lesson import HeadLesson, HeadModule, Rows
from draft.training.samples import Samples
from draft.training.trainer import CurvePoint, Progress, Trainer, TrainSettings
from draft.training.vocabulary import ranked_vocabulary

WINDOW = 1024
"""Most tokens of a training sequence; longer ones are cut. An answer learns to copy only from what is inside."""
COMMON_SHARE = 0.19
"""Of the draft vocabulary: the tokens that every loss looks at."""
PAIRS_FOR_VOCABULARY = 20_000
PAIRS_FOR_REGRESSION = 120_000


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """What kind of head to train."""

    feature_layers: tuple[int, ...]
    """Of EAGLE-3; Medusa reads -1 alone."""
    vocabulary: int = 16384
    """Tokens it may guess."""
    num_steps: int = 3
    """Positions it learns to guess: steps over its own outputs, or heads."""
    storage: str = "float16"
    keep_rows: bool = True
    """Whether the written head repeats the target's output rows, as other readers of the format need."""


@dataclass(frozen=True, slots=True)
class Course:
    """Where a training reads, works, writes and reports."""

    store: FeatureStore
    tables: TargetTables
    plan: HeadPlan
    settings: TrainSettings
    work: Path
    out: Path
    record: dict[str, Any]
    """Written beside the weights."""
    target_name: str
    progress: Callable[[int], Progress]
    note: Callable[[str], None]

    def samples(self, feature_layers: Sequence[int]) -> Samples:
        return Samples(self.store, feature_layers=feature_layers, window=WINDOW)

    def begin(self, module: nn.Module, samples: Samples, initialise: Callable[[Any], None]) -> torch.Tensor:
        """The ranked vocabulary [V], and `module` at its first weights: computed once, then read from `work`.

        Where the recordings have grown since, the vocabulary is ranked anew. `initialise` takes an iterable of batches.
        """
        path = self.work / "beginning.pt"
        begun = torch.load(path, weights_only=True) if path.exists() else {}
        if begun.get("num_tokens") == self.store.num_tokens:
            module.load_state_dict(begun["module"])
            return torch.as_tensor(begun["ranking"])
        self.note("ranking the vocabulary")
        groups = list(samples.groups(samples.training, 2048, 0))
        ranking = ranked_vocabulary(
            self.store.tokens(), map(samples.batch, groups), self.tables.lm_head.float(), PAIRS_FOR_VOCABULARY
        )
        if begun:
            module.load_state_dict(begun["module"])
        else:
            self.note("regressing the target's next hidden states")
            initialise(map(samples.batch, groups[: max(PAIRS_FOR_REGRESSION // 2048, 1)]))
        begun = {"module": module.state_dict(), "ranking": ranking, "num_tokens": self.store.num_tokens}
        torch.save(begun, path)
        return ranking

    def learn(self, module: HeadModule, samples: Samples, ranking: torch.Tensor) -> Trainer:
        """Train, as far as time allows."""
        target_ids = ranking[: self.plan.vocabulary].sort().values
        rows = Rows(self.tables.lm_head.float(), target_ids, ranking[: max(int(COMMON_SHARE * len(target_ids)), 1)])
        lesson = HeadLesson(module, rows, num_steps=self.plan.num_steps, seed=self.settings.seed)
        trainer = Trainer(lesson, samples, self.settings, self.work)
        trainer.run(self.progress)
        return trainer

    def write_record(self, curve: Sequence[CurvePoint]) -> None:
        """Say how the weights in `out` were made."""
        made = {
            "plan": asdict(self.plan),
            "settings": asdict(self.settings),
            "curve": [asdict(point) for point in curve],
        }
        write_record(self.out, {**self.record, **made})
        self.note(f"wrote {self.out}")
