"""Training an EAGLE-3 head from recordings: vocabulary, first weights, lessons, checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from draft.eagle3_head import Eagle3Architecture
from draft.head_checkpoint import TargetTables
from draft.training.eagle3_lesson import Eagle3Lesson, Rows
from draft.training.eagle3_module import Eagle3Module
from draft.training.feature_store import FeatureStore
from draft.training.head_export import write_eagle3, write_record
from draft.training.initialise import initialise
from draft.training.samples import Samples
from draft.training.trainer import CurvePoint, Progress, Trainer, TrainSettings
from draft.training.vocabulary import ranked_vocabulary

WINDOW = 256
"""Most tokens of a training sequence; longer ones are cut."""
COMMON_SHARE = 0.19
"""Of the draft vocabulary: the tokens that every loss looks at."""
PAIRS_FOR_VOCABULARY = 20_000
PAIRS_FOR_REGRESSION = 120_000


@dataclass(frozen=True, slots=True)
class Eagle3Plan:
    """What kind of head to train."""

    feature_layers: tuple[int, ...]
    vocabulary: int = 16384
    """Tokens it may guess."""
    num_steps: int = 3
    """Steps it is unrolled over its own outputs."""
    storage: str = "float16"
    keep_rows: bool = True
    """Whether the written head repeats the target's output rows, as other readers of the format need."""


def paper_layers(num_layers: int) -> tuple[int, ...]:
    """The target layers that EAGLE-3 reads; fewer where the target has so few that some would be the same."""
    return tuple(sorted({min(2, num_layers), num_layers // 2, max(num_layers - 3, 1)}))


def train_eagle3(
    store: FeatureStore,
    tables: TargetTables,
    plan: Eagle3Plan,
    settings: TrainSettings,
    *,
    work: Path,
    out: Path,
    record: dict[str, Any],
    target_name: str,
    progress: Callable[[int], Progress],
    note: Callable[[str], None],
) -> list[CurvePoint]:
    """Train until done and write the head to `out`; if time runs out before, a later call goes on from `work`."""
    samples = Samples(store, feature_layers=plan.feature_layers, window=WINDOW)
    embed, lm_head = tables.embed.float(), tables.lm_head.float()
    architecture = Eagle3Architecture(
        layer=msgspec.structs.replace(tables.config, num_layers=1, qkv_bias=False, qk_norm=False, sliding_window=None),
        feature_layers=plan.feature_layers,
        draft_vocab_size=min(plan.vocabulary, tables.config.vocab_size),
        feature_norm="each",
    )
    torch.manual_seed(settings.seed)
    module = Eagle3Module(architecture, embed, WINDOW)
    ranking = _begin(module, samples, store, tables, work / "beginning.pt", note)
    target_ids = ranking[: architecture.draft_vocab_size].sort().values
    common_ids = ranking[: max(int(COMMON_SHARE * len(target_ids)), 1)]
    rows = Rows(lm_head, target_ids, common_ids)
    lesson = Eagle3Lesson(module, rows, num_steps=plan.num_steps, seed=settings.seed)
    trainer = Trainer(lesson, samples, settings, work)
    curve = trainer.run(progress)
    if trainer.is_done:
        own_rows = lm_head[target_ids] if plan.keep_rows else None
        write_eagle3(
            out,
            architecture,
            module.checkpoint(),
            target_ids,
            own_rows,
            target_name=target_name,
            storage=plan.storage,
        )
        curve_record = [asdict(point) for point in curve]
        write_record(out, {**record, "plan": asdict(plan), "settings": asdict(settings), "curve": curve_record})
        note(f"wrote {out}")
    return curve


def _begin(
    module: Eagle3Module,
    samples: Samples,
    store: FeatureStore,
    tables: TargetTables,
    path: Path,
    note: Callable[[str], None],
) -> torch.Tensor:
    """The vocabulary's ranking, and the module at its first weights: computed once, then read from `path`."""
    if path.exists():
        begun = torch.load(path, weights_only=True)
        module.load_state_dict(begun["module"])
        return torch.as_tensor(begun["ranking"])
    note("ranking the vocabulary")
    groups = list(samples.groups(samples.training, 2048, 0))
    ranking = ranked_vocabulary(
        store.tokens(), map(samples.batch, groups), tables.lm_head.float(), PAIRS_FOR_VOCABULARY
    )
    note("regressing the target's next hidden state on its features")
    few = groups[: max(PAIRS_FOR_REGRESSION // 2048, 1)]
    initialise(module, map(samples.batch, few), tables.embed.float(), tables.norm.float())
    torch.save({"module": module.state_dict(), "ranking": ranking}, path)
    return ranking
