"""What follows from what was seen. One front at a time evaluates, for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import numpy as np
import structlog

from cache_store.metadata import StoreUnavailable
from service.errors import ApiError
from service.experiments import book as books
from service.experiments.book import Book, Changes
from service.experiments.evaluation import levels_of
from service.experiments.model import Adaptive, Experiment, Promote
from service.experiments.report import Report
from service.experiments.sheet import Sheet
from service.experiments.statistics.allocation import thompson_weights
from service.experiments.store import ExperimentStore, StoredValueError
from service.experiments.tally import Tally
from service.experiments.trace import Trace
from service.experiments.verdict import report_on

LEAD_SECONDS = 6.0
"""A leader that has not evaluated for so long is replaced."""
REWEIGH_SECONDS = 10.0

Edit = Callable[[Book], Changes]

_log = structlog.get_logger(__name__)


class Evaluator:
    """Draws conclusions on time: keeps the trace, moves adaptive weights, ends, promotes, rolls back."""

    def __init__(
        self,
        store: ExperimentStore,
        change: Callable[[Edit], Awaitable[object]],
        clock: Callable[[], float],
        *,
        reweigh_seconds: float = REWEIGH_SECONDS,
    ) -> None:
        self._store = store
        self._change = change
        self._clock = clock
        self._reweigh_seconds = reweigh_seconds
        self._reweighed: dict[str, float] = {}
        self._failures: dict[str, str] = {}
        """What kept an experiment from being evaluated, by its salt."""

    async def evaluate(self, book: Book, front: str) -> None:
        """One look at every live experiment, if this front leads. Raises `StoreUnavailable`."""
        if not book.live or not await self._store.lead(front, LEAD_SECONDS):
            return
        for experiment in book.live:
            try:
                await self._look_at(experiment)
            except ApiError as error:
                # Somebody changed what was to be concluded from; the next look sees it as it is then.
                _log.info("experiment conclusion postponed", experiment=experiment.name, reason=str(error))
            except StoreUnavailable as error:
                if not isinstance(error, StoredValueError):
                    raise
                self._note(experiment, error)
            except Exception as error:  # noqa: BLE001 - the other experiments are looked at, too
                self._note(experiment, error)
            else:
                self._failures.pop(experiment.salt, None)

    async def _look_at(self, experiment: Experiment) -> None:
        tally = await self._store.tally(experiment.tally_key)
        report = await asyncio.to_thread(report_on, experiment, tally)
        try:
            await self._trace(experiment, report)
        except StoredValueError as error:  # it stays as it is: conclusions do not need it
            self._note(experiment, error)
        edit = self._consequence(experiment, tally, report)
        if edit is not None:
            await self._change(edit)

    def _note(self, experiment: Experiment, error: Exception) -> None:
        """Log what keeps an experiment from being evaluated, once for as long as it is the same."""
        if self._failures.get(experiment.salt) != repr(error):
            self._failures[experiment.salt] = repr(error)
            _log.error("experiment not evaluated", experiment=experiment.name, reason=str(error), exc_info=error)

    async def _trace(self, experiment: Experiment, report: Report) -> None:
        trace = Trace.decode(await self._store.trace(experiment.tally_key))
        if trace.add(report, self._clock()):
            await self._store.save_trace(experiment.tally_key, msgspec.msgpack.encode(trace))

    def _consequence(self, experiment: Experiment, tally: Tally, report: Report) -> Edit | None:
        """What to do now, if anything. It is worked out on the newest book, and may turn out to be done already."""
        if experiment.is_cooling_down:
            return self._after_promotion(experiment, report)
        if report.is_conclusive:
            return self._ending(experiment, report)
        if isinstance(experiment.definition.allocation, Adaptive):
            return self._reweighing(experiment, experiment.definition.allocation, tally, report)
        return None

    def _ending(self, experiment: Experiment, report: Report) -> Edit:
        name, now, words = experiment.name, self._clock(), report.verdict
        is_promotion = report.is_safe_to_promote and isinstance(experiment.definition.at_end, Promote)

        def end(book: Book) -> Changes:
            present = book.experiments.get(name)
            if present is None or present.status != "running":
                return {}
            if is_promotion and report.best is not None:
                arm = present.definition.arm_names.index(report.best)
                return books.promote(book, name, arm, now, words, by_hand=False)
            return books.stop(book, name, now, words)

        return end

    def _after_promotion(self, experiment: Experiment, report: Report) -> Edit | None:
        name, now, words = experiment.name, self._clock(), report.verdict
        if report.decision in {"broken", "keep"}:
            return lambda book: books.roll_back(book, name, now, words)
        if experiment.promotion is None or now < experiment.promotion.until:
            return None

        def settle(book: Book) -> Changes:
            present = book.experiments.get(name)
            return books.stop(book, name, now, "") if present is not None and present.is_cooling_down else {}

        return settle

    def _reweighing(self, experiment: Experiment, allocation: Adaptive, tally: Tally, report: Report) -> Edit | None:
        """Weights by Thompson sampling, once there is enough to sample from."""
        now = self._clock()
        last = self._reweighed.get(experiment.salt, experiment.started_at or now)
        levels = levels_of(Sheet(tally, experiment.definition), list(range(len(experiment.weights))))
        if levels is None or report.decision == "collecting" or now - last < self._reweigh_seconds:
            return None
        self._reweighed = {experiment.salt: now} | {
            salt: at for salt, at in self._reweighed.items() if salt != experiment.salt and now - at < 3600.0
        }
        own = levels.unadjusted
        errors = np.sqrt(np.maximum(np.diagonal(own.covariance), 0.0))
        weights = thompson_weights(own.log_ratio, errors, floor=allocation.floor)
        return lambda book: books.reweigh(book, experiment.name, weights)
