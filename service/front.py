"""The front: everything a handler needs to have a request answered, whatever protocol it came by."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import structlog

from service.admission import Admission
from service.answer import Answer
from service.audit import Auditor, Sample
from service.body_budget import BodyBudget
from service.engine_client import EngineRejectedError, EngineUnavailableError
from service.errors import ApiError
from service.experiments.assignment import RequestFacts
from service.experiments.manager import Assignment, Experiments, Served
from service.experiments.opening import open_experiment_store
from service.experiments.participation import Participation, taking_part
from service.generation import Generation
from service.interpreter import Interpreter
from service.large_request_messages import FromWorker, Kind, Load, Parse, Parsed, fields_of
from service.large_requests import LargeRequests
from service.metrics import ServiceMetrics
from service.origin import Origin
from service.pool.cache_statistics import CacheStatistics
from service.pool.engine_pool import EnginePool
from service.pool.metrics import PoolCollector
from service.pool.popularity import Popularity
from service.pool.prefixes import Prefixes
from service.pool.routing import ROUTINGS
from service.pool.store import open_store
from service.recent_requests import RecentRequests
from service.request_log import RequestLog, Transcript
from service.schema import GenerationRequest, Received
from service.served_model import ServedModel, default_name
from service.settings import Settings
from service.speculation_names import method_profiles
from service.tenants import Tenant, Tenants
from speculation.messages import Ready, SamplingDefaults, SpeculationConfig, Stats, method_of, resolve

_log = structlog.get_logger("forerun.generation")

UNREADY_BODY_BYTES = 1024 * 1024
"""Largest body while no engine has told what the context is."""

ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/stream")
"""Where requests for generation come in."""


class Front:
    """Owns no connection and no process: requests come in by `generate`, engines come and go by `load` and `lose`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.admission = Admission()
        self.metrics = ServiceMetrics()
        self.store = open_store(settings.pool)
        self.prefixes = Prefixes(self.store.guarded)
        self.popularity = Popularity(self.store)
        self.tenants = Tenants.load(settings.tenants)
        self.recent = RecentRequests()
        self.cache = CacheStatistics()
        self.client = EnginePool(
            ROUTINGS[settings.pool.routing](),
            self.prefixes,
            on_stats=self._note_stats,
            on_gap=self.metrics.inter_token.observe,
            on_prompt=self.popularity.note,
            failover_seconds=settings.pool.failover_seconds,
            failover_attempts=settings.pool.failover_attempts,
        )
        self.metrics.registry.register(PoolCollector(self.client, self.store.health))
        self.request_log: RequestLog | None = None
        """Where finished requests are recorded, if that was asked for and while the service runs."""
        self.bodies = BodyBudget(settings.limits.max_pending_bytes)
        self.large_requests = LargeRequests()
        self.metrics.large_requests.set_function(lambda: self.large_requests.num_waiting)
        self._model: ServedModel | None = None
        self._loading = asyncio.Lock()
        self.experiments = Experiments(
            open_experiment_store(settings.pool), served=self._served, initial_profiles=settings.profiles
        )
        self.auditor = Auditor(
            self.client,
            self.experiments,
            share=settings.audit.audit_share,
            is_quiet=self._is_quiet,
            on_audit=self.metrics.note_audit,
        )

    @property
    def became_ready(self) -> asyncio.Event:
        """Set when the first engine serves."""
        return self.client.opened

    @property
    def is_ready(self) -> bool:
        """Whether a request that comes now would be served."""
        return self.client.ready is not None and not self.admission.is_draining

    @property
    def model(self) -> ServedModel:
        """What is served. Raises `ApiError` (503) until the first engine has loaded it."""
        if self._model is None:
            raise ApiError.unavailable("the model is being loaded; try again shortly", "engine_not_ready")
        return self._model

    @property
    def max_body_bytes(self) -> int:
        """Largest body of a request: as set, else what the model's context can hold, once that is known."""
        given = self.settings.limits.max_body_bytes
        if given is not None:
            return given
        return UNREADY_BODY_BYTES if self._model is None else self._model.max_body_bytes

    @property
    def fingerprint(self) -> str | None:
        """Of the model that is served; None until the first engine has loaded it."""
        return self._model.ready.model_fingerprint if self._model is not None else None

    @property
    def profiles(self) -> dict[str, SpeculationConfig]:
        """What a request's `speculation` may name: profiles, and each method with its defaults."""
        return {**method_profiles(self.model.ready.methods), **self.experiments.configs}

    async def load(self, ready: Ready) -> None:
        """A new engine is about to serve. Raises ValueError if its model cannot be used, or is not what is served."""
        async with self._loading:
            if self._model is None:
                self._model = await asyncio.to_thread(self._load_model, ready)
            elif self._model.ready.model_fingerprint != ready.model_fingerprint:
                served = self._model.ready.model_fingerprint
                raise ValueError(f"its model is {ready.model_fingerprint}, what is served here is {served}")
        self.metrics.engine.model_name = self._model.name
        self.metrics.engine.is_up = True

    def _load_model(self, ready: Ready) -> ServedModel:
        server = self.settings.server
        folder = Path(server.tokenizer or ready.model_folder).expanduser()
        name = server.model_name or default_name(self.settings.engine.model)
        recommended = ready.sampling_defaults if server.generation_config == "auto" else SamplingDefaults()
        sampling = self.settings.sampling.over(recommended)
        if sampling.source:
            _log.info("sampling defaults", model=name, **msgspec.to_builtins(sampling))
        return ServedModel.load(name, folder, ready, sampling)

    def lose(self) -> None:
        """An engine has died and will be replaced."""
        self.metrics.engine.is_up = self.client.ready is not None
        self.metrics.restarts.inc()

    @asynccontextmanager
    async def generate(self, generation_id: str, body: Received | Parsed, origin: Origin) -> AsyncIterator[Answer]:
        """The answer to a request; leaving the context early ends it.

        Raises `ApiError` for what cannot be served, on entering or while the answer is read.
        """
        with self.admission.enter(), _engine_errors():
            model, tenant, fields = self.model, self.tenants.author(origin.headers), fields_of(body)
            self._check_room(fields.n or 1)
            if isinstance(body, Parsed):
                generation = replace(body.generation, id=generation_id)
            else:
                interpreter = Interpreter(model, self.settings.limits, self.profiles)
                generation = await asyncio.to_thread(interpreter.generation, generation_id, body)
            self._check_room(generation.num_choices)
            if generation.ignored_fields:
                _log.info("fields ignored", generation=generation_id, fields=generation.ignored_fields)
            assignment = self._assign(generation, fields, origin)
            generation = replace(
                generation,
                speculation=self._speculation(generation, assignment),
                cache_salt=self.tenants.salt(tenant, generation.cache_salt),
            )
            method = method_of(generation.speculation or self.settings.engine.speculation)
            submits = generation.submits()
            sample = self.auditor.sample(submits, method, assignment)
            transcript = None if self.request_log is None or generation.is_scoring else Transcript(submits)
            witnesses = [witness for witness in (sample, transcript) if witness is not None]
            with taking_part(self.experiments, assignment) as part:
                async with self.client.submit(submits) as stream:
                    answer = Answer(generation, model.tokenizer, stream, origin.arrived_at, assignment, witnesses)
                    yield answer
                    if stream.is_finished:
                        self._note_answer(answer, method, part, tenant)
                        if not answer.is_aborted:
                            self._keep(sample, transcript)

    async def parse_large(self, kind: Kind, pieces: Sequence[bytes]) -> FromWorker:
        """A large request, given in pieces, as the process for them answers it.

        Raises `ApiError` while nothing can be served.
        """
        with self.admission.enter():
            model = self.model
            self._check_room(1)
            load = Load(
                model_name=",".join(model.names),
                folder=str(model.folder),
                ready=model.ready,
                sampling=model.sampling,
                limits=self.settings.limits,
            )
            message = Parse(
                kind=kind,
                num_bytes=sum(map(len, pieces)),
                profiles=self.profiles,
                unknown_fields=self.settings.server.unknown_fields,
            )
            return await self.large_requests.parse(message, pieces, load)

    def _check_room(self, num_choices: int) -> None:
        """Raises `ApiError`: 503 if no engine is ready, 429 if the engines have no room for `num_choices` sequences."""
        if self.client.ready is None:
            raise ApiError.unavailable("no engine is ready; try again shortly", "engine_not_ready")
        self.admission.check_room(self.client.num_live, num_choices, self.client.capacity)

    def _keep(self, sample: Sample | None, transcript: Transcript | None) -> None:
        """What is to be kept of a request that was answered to its end."""
        if sample is not None:
            self.auditor.keep(sample)
        if transcript is not None and self.request_log is not None:
            self.request_log.keep(transcript)

    def _assign(self, generation: Generation, fields: GenerationRequest, origin: Origin) -> Assignment | None:
        """The arm of a request, if it takes part in an experiment that this engine can serve."""
        facts = RequestFacts(
            request_id=generation.id,
            model=self.model.name,
            route=origin.route,
            num_prompt_tokens=sum(len(prompt.token_ids) for prompt in generation.prompts),
            arrived_at=self.experiments.clock() - origin.age,
            queue_depth=float(self.client.num_live),
            headers=origin.headers,
            user=fields.user,
            has_own_speculation=fields.speculation is not None,
        )
        assignment = self.experiments.assign(facts)
        return assignment if assignment is not None and self._can_serve(assignment.speculation) else None

    def _speculation(self, generation: Generation, assignment: Assignment | None) -> SpeculationConfig | None:
        """The arm's, else the request's own, else the default profile's; None is the engine's default."""
        if assignment is not None:
            return assignment.speculation
        default = self.experiments.default
        if generation.speculation is None and default is not None and self._can_serve(default):
            return default
        return generation.speculation

    def _can_serve(self, config: SpeculationConfig) -> bool:
        """Profiles and experiments may have been made for a service that had more methods."""
        try:
            resolve(config, set(self.model.ready.methods))
        except ValueError:
            return False
        return True

    def _served(self) -> Served:
        """What experiments can be made for; as long as no engine has told, anything."""
        model = self._model
        if model is None:
            return Served(routes=ROUTES)
        return Served(
            methods=frozenset(model.ready.methods),
            models=model.names,
            routes=ROUTES,
            max_prompt_tokens=model.context_length,
        )

    def _is_quiet(self, num_own: int) -> bool:
        """Whether the service serves, and no other sequence is live than `num_own` that the caller knows of."""
        stats = self.metrics.engine.stats
        foreign = 0 if stats is None or num_own else stats.num_waiting + stats.num_running
        return self.is_ready and self.client.num_live <= num_own and not foreign

    def _note_answer(self, answer: Answer, method: str, part: Participation, tenant: Tenant) -> None:
        closing = answer.closing
        self.cache.note(tenant.name, prompt_tokens=closing.num_prompt_tokens, cached_tokens=closing.num_cached_tokens)
        self.metrics.observe(closing, method)
        self.recent.note(answer, method, tenant.name)
        if not answer.is_aborted:
            part.finish(closing.metrics.timing)
        timing, guessed = closing.metrics.timing, closing.metrics.speculative_decoding
        _log.info(
            "generation",
            generation=answer.generation.id,
            method=method,
            prompt_tokens=closing.num_prompt_tokens,
            completion_tokens=closing.num_completion_tokens,
            ttft=round(timing.ttft, 6),
            tpot=round(timing.tpot, 6),
            mean_acceptance_length=round(guessed.mean_acceptance_length, 3),
        )

    def _note_stats(self, stats: Stats) -> None:
        self.metrics.engine.stats = stats


@contextmanager
def _engine_errors() -> Iterator[None]:
    """What the engine says is wrong, in the words of HTTP."""
    try:
        yield
    except EngineUnavailableError as error:
        raise ApiError.unavailable(str(error), error.code) from error
    except EngineRejectedError as error:
        rejected = error.rejected
        if rejected.code == "overloaded":
            raise ApiError.overloaded(rejected.message) from error
        if rejected.code == "draining":
            raise ApiError.unavailable(rejected.message, "shutting_down") from error
        raise ApiError.invalid(rejected.param, rejected.message) from error
