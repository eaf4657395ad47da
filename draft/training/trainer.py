"""The training loop: resumable, with averaged weights and a validation curve. Knows no head, only a `Lesson`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch

from draft.training.lesson import HeadModule
from draft.training.samples import Batch, Samples


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """How long and how fast to learn."""

    num_epochs: int = 4
    batch_pairs: int = 1024
    learning_rate: float = 3e-4
    """At its peak: it rises over `warmup` updates and falls to a tenth, linearly, until the end."""
    warmup: int = 40
    weight_decay: float = 0.01
    average_over: int = 400
    """Validated and written is the mean of the weights over about so many last updates."""
    validate_every: int = 200
    """Updates."""
    save_seconds: float = 120.0
    is_bfloat16: bool = False
    """Whether matrices are multiplied in bfloat16; weights and sums stay float32."""
    max_seconds: float | None = None
    """Of training in this run; then it stops as if killed, and a later run goes on."""
    seed: int = 0


class Lesson(Protocol):
    """What a head learns."""

    @property
    def module(self) -> HeadModule:
        """Whose parameters are trained."""

    def loss(self, batch: Batch) -> torch.Tensor:
        """A scalar to be made small."""

    def accuracies(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """How many guesses are right, and how many there are, by position: both [positions]."""


class Progress(Protocol):
    """A progress bar (tqdm's)."""

    def update(self, n: int) -> object:
        """So many more are done."""

    def set_postfix_str(self, s: str) -> None:
        """Shown beside it."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One validation: how often the guess at each position is what the target would say greedily."""

    update: int
    seconds: float
    loss: float
    accuracies: list[float]


class Trainer:
    """Trains a lesson's module on samples; everything needed to go on after a kill is in `folder`."""

    def __init__(self, lesson: Lesson, samples: Samples, settings: TrainSettings, folder: Path) -> None:
        self._lesson = lesson
        self._samples = samples
        self._settings = settings
        self._folder = folder
        self._parameters = [p for p in lesson.module.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=settings.weight_decay
        )
        self._averaged = [p.detach().clone() for p in self._parameters]
        self._update = 0
        self._seconds = 0.0
        self._loss = 0.0
        self.curve: list[CurvePoint] = []

    @property
    def num_updates(self) -> int:
        """Of the whole training."""
        settings = self._settings
        return settings.num_epochs * sum(
            1 for _ in self._samples.groups(self._samples.training, settings.batch_pairs, 0)
        )

    @property
    def is_done(self) -> bool:
        return self._update >= self.num_updates

    def run(self, progress: Callable[[int], Progress]) -> list[CurvePoint]:
        """Train until the end, or for `max_seconds`; `progress` makes a bar for the updates. Returns the whole curve.

        Afterwards the module has the averaged weights, if the end was reached.
        """
        self._restore()
        total = self.num_updates
        bar = progress(total)
        bar.update(self._update)
        began = saved = time.monotonic()
        before = self._seconds
        if not self.curve:
            self._validate()
        while self._update < total:
            for batch in self._rest_of_epoch(total):
                self._learn(batch, total)
                now = time.monotonic()
                self._seconds = before + now - began
                bar.update(1)
                bar.set_postfix_str(f"loss {self._loss:.3f}, right {self._shown()}")
                if self._update % self._settings.validate_every == 0 or self._update == total:
                    self._validate()
                if now - saved > self._settings.save_seconds:
                    saved = now
                    self._save()
                if self._is_time_up(now - began) and self._update < total:
                    self._save()
                    return self.curve
        self._save()
        self._swap_averaged()
        return self.curve

    def _is_time_up(self, seconds: float) -> bool:
        return self._settings.max_seconds is not None and seconds > self._settings.max_seconds

    def _rest_of_epoch(self, total: int) -> Iterator[Batch]:
        """The batches of the current epoch that are still to come."""
        settings = self._settings
        per_epoch = total // settings.num_epochs
        epoch, done = divmod(self._update, per_epoch)
        groups = list(self._samples.groups(self._samples.training, settings.batch_pairs, settings.seed + epoch))
        return (self._samples.batch(group) for group in groups[done:per_epoch])

    def _learn(self, batch: Batch, total: int) -> None:
        settings = self._settings
        rise = min((self._update + 1) / settings.warmup, 1.0)
        fall = 1.0 - 0.9 * self._update / total
        for group in self._optimizer.param_groups:
            group["lr"] = settings.learning_rate * rise * fall
        self._optimizer.zero_grad(set_to_none=True)
        with torch.autocast(batch.features.device.type, torch.bfloat16, enabled=settings.is_bfloat16):
            loss = self._lesson.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._update += 1
        value = float(loss.detach())
        self._loss = value if self._update == 1 else 0.98 * self._loss + 0.02 * value
        # Young averages forget faster, so that they do not keep the beginning.
        weight = 1.0 / min(self._update + 1, settings.average_over)
        with torch.no_grad():
            torch._foreach_lerp_(self._averaged, [p.detach() for p in self._parameters], weight)

    def _swap_averaged(self) -> None:
        with torch.no_grad():
            for parameter, averaged in zip(self._parameters, self._averaged, strict=True):
                kept = parameter.detach().clone()
                parameter.copy_(averaged)
                averaged.copy_(kept)

    @torch.no_grad()
    def _validate(self) -> None:
        """Append a point to the curve, of the averaged weights."""
        self._swap_averaged()
        right, count = torch.zeros(1), torch.zeros(1)
        for group in self._samples.groups(self._samples.validation, self._settings.batch_pairs, 0):
            found = self._lesson.accuracies(self._samples.batch(group))
            right, count = right + found[0], count + found[1]
        self._swap_averaged()
        accuracies = [round(value, 4) for value in (right / count.clamp(min=1)).tolist()]
        point = CurvePoint(self._update, round(self._seconds, 1), round(self._loss, 4), accuracies)
        self.curve.append(point)
        with (self._folder / "curve.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(point)) + "\n")

    def _shown(self) -> str:
        return " ".join(f"{value:.3f}" for value in self.curve[-1].accuracies) if self.curve else "-"

    def _save(self) -> None:
        """Replace the saved state at once, so that a kill leaves the old or the new one."""
        state = {
            "parameters": [p.detach() for p in self._parameters],
            "averaged": self._averaged,
            "optimizer": self._optimizer.state_dict(),
            "update": self._update,
            "seconds": self._seconds,
            "loss": self._loss,
            "curve": [asdict(point) for point in self.curve],
        }
        temporary = self._folder / "state.tmp"
        torch.save(state, temporary)
        temporary.replace(self._folder / "state.pt")

    def _restore(self) -> None:
        """Go on where a former run was saved; what it validated since then is forgotten."""
        path = self._folder / "state.pt"
        if path.exists():
            state = torch.load(path, weights_only=True)
            with torch.no_grad():
                for parameter, saved in zip(self._parameters, state["parameters"], strict=True):
                    parameter.copy_(saved)
            self._averaged = [saved.clone() for saved in state["averaged"]]
            self._optimizer.load_state_dict(state["optimizer"])
            self._update, self._seconds, self._loss = state["update"], state["seconds"], state["loss"]
            self.curve = [CurvePoint(**point) for point in state["curve"]]
        else:
            self._averaged = [p.detach().clone() for p in self._parameters]
        lines = "".join(json.dumps(asdict(point)) + "\n" for point in self.curve)
        (self._folder / "curve.jsonl").write_text(lines, encoding="utf-8")
