"""Experiments as the front uses them: which config a request gets, what became of it, and what follows."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet

import msgspec
import structlog

from cache_store.metadata import StoreUnavailable
from service.background import logged_failures, run_forever, start_task
from service.errors import ApiError, did_you_mean, shorten
from service.experiments import book as books
from service.experiments.assignment import RequestFacts, matches, place, traffic_weights
from service.experiments.book import Book
from service.experiments.clock import SteadyClock
from service.experiments.evaluator import Evaluator
from service.experiments.keeper import BookKeeper, answered
from service.experiments.ledger import Ledger
from service.experiments.model import Definition, Experiment, Profile
from service.experiments.report import Report
from service.experiments.store import ExperimentStore
from service.experiments.tally import Outcome, Request, record
from service.experiments.trace import Trace
from service.experiments.validation import check_profile_name, filter_warnings
from service.experiments.verdict import report_on
from speculation.messages import SpeculationConfig, resolve

FLUSH_SECONDS = 0.5
"""How often this front hands over what it has seen and looks for changes: others know within a second."""
EVALUATION_SECONDS = 2.0
GRACE_SECONDS = 300.0
"""How long after an experiment's end its last requests may end and still count. They are the long and the slow ones:
without them the numbers would flatter. But a report must stand still at last."""

_log = structlog.get_logger(__name__)


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What this service can do. Empty, or 0, while it is not known yet."""

    methods: AbstractSet[str] = frozenset()
    models: Collection[str] = ()
    routes: Collection[str] = ()
    max_prompt_tokens: int = 0


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """The arm a request was given. Keep it until the request ends, and give it back to `observe`."""

    experiment: str
    arm: str
    speculation: SpeculationConfig
    key: str
    """Of the tally it is counted in."""
    definition: Definition
    request: Request

    @property
    def headers(self) -> dict[str, str]:
        """What the response says of it."""
        return {"X-Forerun-Experiment": self.experiment, "X-Forerun-Arm": self.arm}


class Experiments:
    """One front's view. `running` keeps it up to date; `assign` and `observe` never wait for anything."""

    def __init__(
        self,
        store: ExperimentStore,
        *,
        served: Callable[[], Served] = Served,
        initial_profiles: Mapping[str, SpeculationConfig] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`initial_profiles` are put into the store where it has none of that name."""
        self._store = store
        self._served = served
        self.clock = clock = clock or SteadyClock()
        """Seconds since the epoch; all times of experiments are by it."""
        self._keeper = BookKeeper(store, initial_profiles or {}, clock())
        self._ledger = Ledger(store)
        self._evaluator = Evaluator(store, self._keeper.change, clock)
        self._broken: set[str] = set()
        """Experiments whose requests could not be assigned or counted."""
        self._failing: set[str] = set()
        """Which exchanges with the store failed last: one that reads may go well where one that writes does not."""

    # What the front calls for each request.

    def assign(self, facts: RequestFacts) -> Assignment | None:
        """The arm of a request, or None if it takes part in no experiment."""
        if facts.has_own_speculation:
            return None
        for experiment in self.book.live:
            try:
                if not self._matches(experiment, facts):
                    continue
                return self._assigned(experiment, facts)
            except Exception as error:  # noqa: BLE001 - the request is answered without this experiment
                self._note_broken(experiment.name, error)
        return None

    def observe(self, assignment: Assignment, outcome: Outcome) -> None:
        """Count a request that has ended, unless its experiment, or the cool-down, did so long before."""
        experiment = self.book.experiments.get(assignment.experiment)
        closed_at = None if experiment is None else experiment.closed_at(assignment.key)
        if closed_at is not None and self.clock() > closed_at + GRACE_SECONDS:
            return
        try:
            record(self._ledger.tally(assignment.key), assignment.definition, assignment.request, outcome)
        except Exception as error:  # noqa: BLE001 - the request was answered, counted or not
            self._note_broken(assignment.experiment, error)

    def observe_audit(self, assignment: Assignment, *, diverged: bool) -> None:
        """Count a request that was run again without speculation, and whether its tokens differed, however late."""
        tally = self._ledger.tally(assignment.key)
        arm = assignment.request.place.arm
        tally.add(f"n.{arm}.audited", 1.0)
        tally.add(f"n.{arm}.diverged", float(diverged))

    @property
    def book(self) -> Book:
        """All profiles and experiments, as this front knows them."""
        return self._keeper.book

    @property
    def served(self) -> Served:
        """What this service can do."""
        return self._served()

    @property
    def default(self) -> SpeculationConfig | None:
        """The config of requests that ask for none and take part in no experiment; None is the engine's own."""
        profile = self.book.profiles.get(self.book.default or "")
        return None if profile is None else profile.speculation

    @property
    def configs(self) -> Mapping[str, SpeculationConfig]:
        """Every profile's config by name. It is a live view: keep it."""
        return _Configs(self._keeper)

    # What users change and ask. Each raises `ApiError`.

    async def put_profile(self, name: str, config: SpeculationConfig, *, is_default: bool | None = None) -> Profile:
        """A new profile, or a new version of one, used from the next request on.

        `is_default` makes it the default or ends that; None leaves the default as it is.
        """
        check_profile_name(name)
        try:
            self._check(config)
        except ValueError as error:
            raise ApiError.invalid("speculation", f"speculation: {error}") from None
        now = self.clock()
        book = await self._keeper.change(lambda book: books.put_profile(book, name, config, now, is_default=is_default))
        return book.profile(name)

    async def refresh(self) -> Book:
        """All profiles and experiments as they are in the store now."""
        return await self._keeper.refresh()

    async def delete_profile(self, name: str) -> None:
        await self._keeper.change(lambda book: books.delete_profile(book, name))

    async def create(self, definition: Definition, *, is_draft: bool = False) -> Experiment:
        warnings, now = self._warnings(definition), self.clock()
        book = await self._keeper.change(
            lambda book: books.create(book, definition, self._check, warnings, now, is_draft=is_draft)
        )
        return book.experiment(definition.name)

    async def replace(self, definition: Definition) -> Experiment:
        """Another definition for a draft."""
        warnings, now = self._warnings(definition), self.clock()
        book = await self._keeper.change(lambda book: books.replace(book, definition, self._check, warnings, now))
        return book.experiment(definition.name)

    async def start(self, name: str) -> Experiment:
        now = self.clock()
        return (await self._keeper.change(lambda book: books.start(book, name, now))).experiment(name)

    async def stop(self, name: str) -> Experiment:
        """End an experiment where it stands, or a cool-down early."""
        now = self.clock()
        book = await self._keeper.change(lambda book: books.stop(book, name, now, "stopped by hand"))
        return book.experiment(name)

    async def promote(self, name: str, arm: str | None = None) -> Experiment:
        """Make an arm the default: the one named, or the one that the data support."""
        now = self.clock()
        report = await self.report(name)
        if arm is None and not report.is_safe_to_promote:
            raise books.conflict(f"{report.verdict}. To promote an arm nevertheless, name it", "arm")
        names = self.book.experiment(name).definition.arm_names
        chosen = arm or report.best
        if chosen is None or chosen not in names:
            raise ApiError.invalid("arm", f"arm is {shorten(chosen)}; {did_you_mean(str(chosen), names)}")
        index, because = names.index(chosen), "promoted by hand" if arm else report.verdict
        book = await self._keeper.change(
            lambda book: books.promote(book, name, index, now, because, by_hand=arm is not None)
        )
        return book.experiment(name)

    async def delete(self, name: str) -> None:
        """Drop an experiment that takes no traffic, and all it has seen."""
        experiment = (await self._keeper.refresh()).experiments.get(name)
        keys = () if experiment is None else experiment.keys  # of one that cannot be read they are not known
        await self._keeper.change(lambda book: books.delete(book, name))
        for key in keys:
            await answered(self._store.forget(key))

    async def report(self, name: str) -> Report:
        """What there is to say now, over all fronts."""
        experiment = (await self._keeper.refresh()).experiment(name)
        await answered(self._flush())
        tally = await answered(self._store.tally(experiment.tally_key))
        return await asyncio.to_thread(report_on, experiment, tally)

    async def trace(self, name: str) -> Trace:
        """How the intervals went."""
        experiment = (await self._keeper.refresh()).experiment(name)
        return await answered(self._trace(experiment.tally_key))

    # How it keeps up to date.

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Share what is seen and what changes, and act on it, until left; then hand over the rest, close the store."""
        with logged_failures("first exchange of experiments"):
            await self._share()
        tasks = [
            start_task("exchange of experiments", run_forever("exchange of experiments", self._share, FLUSH_SECONDS)),
            start_task(
                "evaluation of experiments",
                run_forever("evaluation of experiments", self._evaluate, EVALUATION_SECONDS),
            ),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with logged_failures("last exchange of experiments"):
                await self._share()
            await self._store.close()

    async def _share(self) -> None:
        """One exchange with the store. Its absence costs nothing but freshness."""
        try:
            await self._keeper.keep_up()
            await self._flush()
        except StoreUnavailable as error:
            self._note("share", str(error))
        else:
            self._note("share")

    async def _evaluate(self) -> None:
        """A look at what all fronts have seen, if this one leads."""
        try:
            await self._evaluator.evaluate(self.book, self._ledger.front)
        except StoreUnavailable as error:
            self._note("evaluate", str(error))
        else:
            self._note("evaluate")

    async def _flush(self) -> None:
        await self._ledger.flush({key for experiment in self.book.experiments.values() for key in experiment.keys})

    def _matches(self, experiment: Experiment, facts: RequestFacts) -> bool:
        tally = self._ledger.tally(experiment.tally_key)
        tally.add("c.considered", 1.0)
        if not matches(experiment.definition.filter, facts):
            return False
        tally.add("c.matched", 1.0)
        return True

    def _assigned(self, experiment: Experiment, facts: RequestFacts) -> Assignment | None:
        """The arm of a request that matches; None if it has no unit."""
        found = place(experiment, facts)
        if found is None:
            return None
        self._ledger.tally(experiment.tally_key).add("c.assigned", 1.0)
        return Assignment(
            experiment=experiment.name,
            arm=experiment.definition.arms[found.arm].name,
            speculation=experiment.configs[found.arm],
            key=experiment.tally_key,
            definition=experiment.definition,
            request=Request(found, traffic_weights(experiment), facts.num_prompt_tokens, facts.queue_depth),
        )

    async def _trace(self, key: str) -> Trace:
        return Trace.decode(await self._store.trace(key))

    def _note_broken(self, name: str, error: Exception) -> None:
        """Log once that an experiment cannot be served as it is in the store."""
        if name not in self._broken:
            self._broken.add(name)
            _log.error("experiment broken", experiment=name, reason=str(error), exc_info=error)

    def _note(self, exchange: str, failure: str = "") -> None:
        """Say once that the store went, and once that it came back."""
        was_away = bool(self._failing)
        (self._failing.add if failure else self._failing.discard)(exchange)
        if bool(self._failing) != was_away:
            _log.warning("experiment store back" if was_away else "experiment store away", reason=failure)

    def _warnings(self, definition: Definition) -> list[str]:
        served = self.served
        return filter_warnings(definition.filter, served.models, served.routes, served.max_prompt_tokens)

    def _check(self, config: SpeculationConfig) -> None:
        """Raises ValueError for a method that this service does not have."""
        methods = self.served.methods
        if methods:
            resolve(config, methods)


class _Configs(Mapping[str, SpeculationConfig]):
    """Reads through to the newest book."""

    def __init__(self, keeper: BookKeeper) -> None:
        self._keeper = keeper

    def __getitem__(self, name: str) -> SpeculationConfig:
        return self._keeper.book.profiles[name].speculation

    def __iter__(self) -> Iterator[str]:
        return iter(self._keeper.book.profiles)

    def __len__(self) -> int:
        return len(self._keeper.book.profiles)
