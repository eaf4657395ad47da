"""The front: everything a handler needs to have a request answered, whatever protocol it came by."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress

import msgspec
import structlog

from service.admission import Admission
from service.answer import Answer
from service.engine_client import EngineClient, EngineRejectedError, EngineUnavailableError
from service.errors import ApiError
from service.interpreter import Interpreter
from service.metrics import ServiceMetrics
from service.schema import ChatCompletionRequest, CompletionRequest
from service.served_model import ServedModel
from service.settings import Settings
from speculation.messages import Ready, SpeculationConfig, Stats, method_of

_log = structlog.get_logger("forerun.generation")

GenerationBody = ChatCompletionRequest | CompletionRequest


class Front:
    """Owns no connection and no process: requests come in by `generate`, engines come and go by `load` and `lose`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.admission = Admission()
        self.metrics = ServiceMetrics()
        self.client = EngineClient(self._note_stats, self.metrics.inter_token.observe)
        self.became_ready = asyncio.Event()
        """Set when the first engine serves."""
        self._model: ServedModel | None = None

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
    def profiles(self) -> dict[str, SpeculationConfig]:
        """What a request's `speculation` may name: the operator's profiles, and each method with its defaults."""
        return {**method_profiles(self.model.ready.methods), **self.settings.profiles}

    async def load(self, ready: Ready) -> None:
        """A new engine is about to serve. Raises ValueError if its model's folder cannot be used."""
        if self._model is None or self._model.ready != ready:
            self._model = await asyncio.to_thread(ServedModel.load, self.settings, ready)
        self.metrics.engine.is_up = True
        self.became_ready.set()

    def lose(self) -> None:
        """The engine has died and will be replaced."""
        self.metrics.engine.is_up = False
        self.metrics.restarts.inc()

    @asynccontextmanager
    async def generate(self, generation_id: str, body: GenerationBody, arrived_at: float) -> AsyncIterator[Answer]:
        """The answer to a request; leaving the context early ends it. `arrived_at` is by `time.perf_counter`.

        Raises `ApiError` for what cannot be served, on entering or while the answer is read.
        """
        with self.admission.enter(), _engine_errors():
            model = self.model
            capacity = model.ready.max_waiting + self.settings.engine.max_num_seqs
            self.admission.check_room(self.client.num_live, body.n or 1, capacity)
            interpreter = Interpreter(model, self.settings.limits, self.profiles)
            if isinstance(body, ChatCompletionRequest):
                generation = await asyncio.to_thread(interpreter.chat, generation_id, body)
            else:
                generation = await asyncio.to_thread(interpreter.completion, generation_id, body)
            self.admission.check_room(self.client.num_live, generation.num_choices, capacity)
            async with self.client.submit(generation.submits()) as stream:
                answer = Answer(generation, model.tokenizer, stream, arrived_at)
                yield answer
                if stream.is_finished:
                    self._note_answer(answer, method_of(generation.speculation or self.settings.engine.speculation))

    def _note_answer(self, answer: Answer, method: str) -> None:
        closing = answer.closing
        self.metrics.observe(closing, method)
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


def method_profiles(methods: Sequence[str]) -> dict[str, SpeculationConfig]:
    """Each method under its own name, where it has defaults for everything."""
    profiles: dict[str, SpeculationConfig] = {}
    for method in methods:
        with suppress(msgspec.ValidationError):
            profiles[method] = msgspec.convert({"method": method}, SpeculationConfig)
    return profiles


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
