"""From the wire's words to what the engine can do: tokens, limits, profiles; everything the schema cannot check."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from service.conversation import message_texts, rendered_conversation
from service.errors import ApiError, cut, shorten
from service.generation import SEED_SPAN, Generation, Prompt
from service.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationBody,
    GenerationRequest,
    Prediction,
    Received,
    TextPart,
)
from service.served_model import ServedModel
from service.settings import LimitSettings
from service.speculation_names import missing_method, named_config
from service.tokenizer import TooManyTokensError
from speculation.messages import SamplingParams, SpeculationConfig, resolve

OPENAI_COMPLETION_TOKENS = 16
"""What /v1/completions generates where the request does not say, as OpenAI's does."""

MAX_CHARACTER_BYTES = 4
"""Most bytes of a character in UTF-8."""

DRAWN_SEED_BITS = 53
"""A drawn seed is short enough that a JavaScript client can send it back."""

_TOKEN_ID = re.compile(r"[0-9]{1,10}")
"""A token id as a key of `logit_bias`: ASCII digits, leading zeros among them, no more than any vocabulary needs."""


class Interpreter:
    """Turns requests into generations. Raises `ApiError` for everything the schema cannot see is wrong."""

    def __init__(self, model: ServedModel, limits: LimitSettings, profiles: Mapping[str, SpeculationConfig]) -> None:
        self._model = model
        self._limits = limits
        self._profiles = profiles

    def generation(self, request_id: str, received: Received) -> Generation:
        """What a request asks for. Runs the tokenizer: call it in a thread."""
        request = received.request
        self._check_size(request)
        if isinstance(request, ChatCompletionRequest):
            found = self._chat(request_id, request)
        else:
            found = self._completion(request_id, request)
        return replace(found, ignored_fields=received.ignored_fields)

    def _check_size(self, request: GenerationBody) -> None:
        """Refuse by counts and lengths what is too much to be tokenized."""
        if isinstance(request, ChatCompletionRequest):
            self._check_messages(request)
            num_prompts = 1
        else:
            self._check_prompts(request)
            num_prompts = _num_prompts(request)
        num_choices = num_prompts * (request.n or 1)
        if num_choices > self._limits.max_choices:
            param = "n" if num_prompts == 1 else "prompt"
            raise ApiError.invalid(
                param, f"{num_choices} choices are asked for; at most {self._limits.max_choices} are served"
            )
        if request.prediction is not None:
            self._check_text("prediction.content", _texts_of(request.prediction.content))

    def _check_messages(self, request: ChatCompletionRequest) -> None:
        context = self._model.context_length
        if len(request.messages) > context:
            raise ApiError.invalid(
                "messages",
                f"messages has {len(request.messages)} entries; the context is {context} tokens, of which each takes "
                "at least one",
                code="context_length_exceeded",
            )
        given = request.chat_template_kwargs or {}
        self._check_text("chat_template_kwargs", [value for value in given.values() if isinstance(value, str)])
        self._check_text("messages", [message.name for message in request.messages if message.name is not None])
        self._check_text("messages", [text for message in request.messages for text in message_texts(message)])

    def _check_prompts(self, request: CompletionRequest) -> None:
        prompt = request.prompt
        prompts = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
        if len(prompts) > self._limits.max_choices:
            return
        for item in prompts:
            if isinstance(item, str):
                self._check_text("prompt", [item])
            elif request.truncate_prompt_tokens is None and _is_too_long(item, self._model.context_length):
                raise self._too_many_tokens("prompt", str(len(item)))

    def _check_text(self, name: str, texts: Sequence[str]) -> None:
        """Raises `ApiError` if texts that are one field together cannot fit in the context."""
        most = self._model.max_text_bytes
        if most is None or sum(map(len, texts)) * MAX_CHARACTER_BYTES <= most:
            return
        num_bytes = sum(len(text) if text.isascii() else len(text.encode()) for text in texts)
        if num_bytes > most:
            raise ApiError.invalid(
                name,
                f"{name} has {num_bytes} bytes of text; the context is {self._model.context_length} tokens, which can "
                f"be {most} bytes at most",
                code="context_length_exceeded",
            )

    def _chat(self, request_id: str, request: ChatCompletionRequest) -> Generation:
        self._model.check_name(request.model)
        if request.top_logprobs and not request.logprobs:
            raise ApiError.invalid("top_logprobs", "top_logprobs is given without logprobs; set logprobs to true")
        if None not in (given := {request.max_tokens, request.max_completion_tokens}) and len(given) > 1:
            raise ApiError.invalid("max_tokens", "max_tokens and max_completion_tokens are both given; give one")
        name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        self._check_logprobs("top_logprobs", logprobs)
        may_reduce = bool(request.truncate) or max_tokens is None
        max_tokens = self._model.sampling.max_tokens if max_tokens is None else max_tokens
        if max_tokens == 0:
            raise ApiError.invalid(name, f"{name} is 0; it must be at least 1, or -1 for what the context has room for")
        prompt = Prompt(self._truncated(self._render(request), request, max_tokens), None)
        max_tokens = self._max_tokens("messages", prompt, name, max_tokens, may_reduce=may_reduce)
        found = self._generation(request_id, request, (prompt,), max_tokens, logprobs, request.prediction)
        is_continuation = bool(request.continue_final_message)
        return replace(found, is_continuation=is_continuation, end_of_turn=self._model.end_of_turn)

    def _completion(self, request_id: str, request: CompletionRequest) -> Generation:
        self._model.check_name(request.model)
        if request.best_of not in {None, request.n or 1}:
            raise ApiError.invalid(
                "best_of", f"best_of is {request.best_of}; only the value of n, {request.n or 1}, is served"
            )
        self._check_logprobs("logprobs", request.logprobs)
        default = self._model.sampling.max_tokens or OPENAI_COMPLETION_TOKENS
        max_tokens = default if request.max_tokens is None else request.max_tokens
        is_scoring = max_tokens == 0
        if is_scoring and not request.echo:
            raise ApiError.invalid(
                "max_tokens", "max_tokens is 0 without echo: there would be no answer; give at least 1"
            )
        may_reduce = bool(request.truncate) or request.max_tokens is None
        prompts = []
        for prompt in self._prompts(request):
            token_ids = self._truncated(prompt.token_ids, request, max_tokens)
            text = prompt.text if len(token_ids) == len(prompt.token_ids) else None
            most = self._max_tokens("prompt", Prompt(token_ids, text), "max_tokens", max_tokens, may_reduce=may_reduce)
            prompts.append(Prompt(token_ids, text, max(most, 1)))
        max_tokens = max(prompt.max_tokens or 1 for prompt in prompts)
        found = self._generation(request_id, request, tuple(prompts), max_tokens, request.logprobs, request.prediction)
        return replace(found, echo=bool(request.echo), is_scoring=is_scoring, is_continuation=True)

    def _generation(
        self,
        request_id: str,
        request: GenerationRequest,
        prompts: tuple[Prompt, ...],
        max_tokens: int,
        logprobs: int | None,
        prediction: Prediction | None,
    ) -> Generation:
        predicted = () if prediction is None else tuple(self._encode_text("prediction.content", prediction.content))
        return Generation(
            id=request_id,
            prompts=prompts,
            n=request.n or 1,
            sampling=self._sampling(request, max_tokens, logprobs),
            stop=self._stop_strings(request),
            speculation=self._speculation(request.speculation),
            prediction_token_ids=predicted,
            priority=request.priority or 0,
            cache_salt=request.cache_salt or "",
            prompt_logprobs=self._prompt_logprobs(request),
            shows_special_tokens=request.skip_special_tokens is False,
            shows_stop=bool(request.include_stop_str_in_output),
        )

    def _sampling(self, request: GenerationRequest, max_tokens: int, logprobs: int | None) -> SamplingParams:
        seed = secrets.randbits(DRAWN_SEED_BITS) if request.seed is None else request.seed
        if not -SEED_SPAN // 2 <= seed < SEED_SPAN:
            raise ApiError.invalid("seed", f"seed is {cut(str(seed))}; it must fit in 64 bits")
        min_tokens = request.min_tokens or 0
        if min_tokens > max_tokens and not request.truncate:
            raise ApiError.invalid("min_tokens", f"min_tokens is {min_tokens}, above max_tokens, {max_tokens}")
        defaults = self._model.sampling
        top_p = _first(request.top_p, defaults.top_p, 1.0)
        top_k = defaults.top_k if request.top_k is None else request.top_k
        top_k = min(max(top_k or 0, 0), self._model.ready.vocab_size)
        return SamplingParams(
            temperature=_first(request.temperature, defaults.temperature, 1.0),
            top_p=top_p or 1.0,
            top_k=top_k if top_p else 1,
            min_p=_first(request.min_p, defaults.min_p, 0.0),
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty, 1.0),
            logit_bias=self._logit_bias(request.logit_bias or {}),
            seed=seed % SEED_SPAN,
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            ignore_eos=bool(request.ignore_eos),
            stop_token_ids=self._stop_token_ids(request),
            logprobs=logprobs,
        )

    def _render(self, request: ChatCompletionRequest) -> list[int]:
        """The prompt of a conversation, in which nothing a client wrote is a control token."""
        if self._model.template is None:
            raise ApiError.invalid(
                "messages", "the model has no chat template; use /v1/completions", code="no_chat_template"
            )
        text = rendered_conversation(request, self._model.template, self._model.tokenizer.protect)
        self._check_text("messages", [text])
        with self._counted("messages"):
            return self._model.tokenizer.encode_rendered(text, most=self._most_tokens(request))

    def _most_tokens(self, request: GenerationRequest) -> int | None:
        """Number of tokens above which a prompt is refused before it is tokenized to its end."""
        return self._model.context_length if request.truncate_prompt_tokens is None else None

    def _truncated(self, token_ids: list[int], request: GenerationRequest, max_tokens: int | None) -> list[int]:
        """The last tokens of a prompt, where the request says how many are kept."""
        kept = request.truncate_prompt_tokens
        if kept is None:
            return token_ids
        if kept == 0:
            raise ApiError.invalid(
                "truncate_prompt_tokens",
                "truncate_prompt_tokens is 0; it must be at least 1, or -1 for what the context has room for",
            )
        if kept == -1:
            kept = max(self._model.context_length - max(max_tokens or 1, 1), 1)
        return token_ids[-kept:]

    def _prompt_logprobs(self, request: GenerationRequest) -> int | None:
        wanted = request.prompt_logprobs
        if wanted is not None and request.stream:
            raise ApiError.invalid("prompt_logprobs", "prompt_logprobs is given with stream; set stream to false")
        self._check_logprobs("prompt_logprobs", wanted)
        return wanted

    def _prompts(self, request: CompletionRequest) -> tuple[Prompt, ...]:
        match request.prompt:
            case str(text):
                return (self._text_prompt(text, request),)
            case [int(), *_] as token_ids:
                return (Prompt(self._token_ids("prompt", token_ids), None),)
            case [str() | list(), *_] as several:
                return tuple(self._one_of_several(i, item, request) for i, item in enumerate(several))
        what = "is empty" if request.prompt == [] else "holds something else"
        raise ApiError.invalid(
            "prompt", f"prompt {what}; it must be a text, token ids, or a list of either", code="invalid_type"
        )

    def _one_of_several(self, index: int, item: object, request: CompletionRequest) -> Prompt:
        match item:
            case str(text):
                return self._text_prompt(text, request)
            case [int(), *_] as token_ids:
                return Prompt(self._token_ids(f"prompt[{index}]", token_ids), None)
        name = f"prompt[{index}]"
        raise ApiError.invalid(name, f"{name} must be a text or a list of at least one token id", code="invalid_type")

    def _text_prompt(self, text: str, request: CompletionRequest) -> Prompt:
        with self._counted("prompt"):
            token_ids = self._model.tokenizer.encode(
                text, parse_special=bool(request.parse_special), most=self._most_tokens(request)
            )
        return Prompt(token_ids, text)

    @contextmanager
    def _counted(self, field: str) -> Iterator[None]:
        """Turns the tokenizer's refusal of a text that is too long into the error that names the field."""
        try:
            yield
        except TooManyTokensError as error:
            raise self._too_many_tokens(field, str(error)) from None

    def _too_many_tokens(self, field: str, num_tokens: str) -> ApiError:
        context = self._model.context_length
        text = f"{field} has {num_tokens} tokens; the context is {context}, of which one must be left for the answer"
        return ApiError.invalid(field, text, code="context_length_exceeded")

    def _token_ids(self, name: str, token_ids: Sequence[object]) -> list[int]:
        most = self._model.ready.vocab_size - 1
        checked = []
        for index, token_id in enumerate(token_ids):
            if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id <= most:
                where = f"{name}[{index}]"
                raise ApiError.invalid(
                    where, f"{where} is {shorten(token_id)}; token ids are integers from 0 to {most}"
                )
            checked.append(token_id)
        return checked

    def _max_tokens(
        self, field: str, prompt: Prompt, max_tokens_field: str, max_tokens: int | None, *, may_reduce: bool
    ) -> int:
        """Number of tokens that may be generated for a prompt: `max_tokens`, or for None and -1 what fits.

        Raises `ApiError` if prompt and answer exceed the context, unless `max_tokens` may be reduced.
        """
        num_prompt, context = len(prompt.token_ids), self._model.context_length
        if num_prompt == 0:
            raise ApiError.invalid(field, f"{field} has no tokens; at least one is needed")
        if num_prompt >= context:
            raise self._too_many_tokens(field, str(num_prompt))
        room = context - num_prompt
        if max_tokens is None or max_tokens == -1:
            return room
        if max_tokens > room and not may_reduce:
            text = (
                f"{max_tokens_field} {max_tokens} + {num_prompt} prompt tokens exceed the context of {context}; "
                f"at most {room} are available"
            )
            raise ApiError.invalid(max_tokens_field, text, code="context_length_exceeded")
        return min(max_tokens, room)

    def _check_logprobs(self, name: str, logprobs: int | None) -> None:
        most = min(self._limits.max_logprobs, self._model.ready.vocab_size)
        if logprobs is not None and logprobs > most:
            raise ApiError.invalid(name, f"{name} is {logprobs}; at most {most} are served")

    def _stop_strings(self, request: GenerationRequest) -> tuple[str, ...]:
        stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
        if len(stop) > self._limits.max_stop_strings:
            raise ApiError.invalid(
                "stop", f"stop has {len(stop)} strings; at most {self._limits.max_stop_strings} are served"
            )
        for text in stop:
            if not 0 < len(text) <= self._limits.max_stop_length:
                most = self._limits.max_stop_length
                raise ApiError.invalid("stop", f"stop has a string of {len(text)} characters; it must have 1 to {most}")
        return tuple(dict.fromkeys(stop))

    def _stop_token_ids(self, request: GenerationRequest) -> tuple[int, ...]:
        given = request.stop_token_ids or []
        if len(given) > self._limits.max_stop_strings:
            most = self._limits.max_stop_strings
            raise ApiError.invalid("stop_token_ids", f"stop_token_ids has {len(given)} ids; at most {most} are served")
        return tuple(self._token_ids("stop_token_ids", given))

    def _logit_bias(self, given: Mapping[str, float]) -> dict[int, float]:
        if len(given) > self._limits.max_logit_bias:
            most = self._limits.max_logit_bias
            raise ApiError.invalid("logit_bias", f"logit_bias has {len(given)} entries; at most {most} are served")
        most = self._model.ready.vocab_size - 1
        bias = {}
        for name, value in given.items():
            token_id = int(name) if _TOKEN_ID.fullmatch(name) else most + 1
            if token_id > most:
                text = f"logit_bias has the key {shorten(name)}; keys are token ids from 0 to {most}, in decimal digits"
                raise ApiError.invalid("logit_bias", text)
            if token_id in bias:
                raise ApiError.invalid("logit_bias", f"logit_bias names token id {token_id} twice; once is enough")
            bias[token_id] = value
        return bias

    def _speculation(self, wanted: SpeculationConfig | str | None) -> SpeculationConfig | None:
        """The config a request means. Raises `ApiError` for an unknown name or a method this engine does not have."""
        if isinstance(wanted, str):
            wanted = named_config(wanted, self._profiles, ())
        if wanted is None:
            return None
        try:
            resolve(wanted, set(self._model.ready.methods))
        except ValueError as error:
            raise missing_method(error, wanted, self._model.ready.methods) from error
        return wanted

    def _encode_text(self, name: str, content: str | list[TextPart]) -> list[int]:
        try:
            return self._model.tokenizer.encode(
                "".join(_texts_of(content)), add_special=False, most=self._model.context_length
            )
        except TooManyTokensError as error:
            raise ApiError.invalid(
                name, f"{name} has {error} tokens; the context is {self._model.context_length}"
            ) from None


def _texts_of(content: str | list[TextPart]) -> list[str]:
    return [content] if isinstance(content, str) else [part.text for part in content]


def _is_too_long(prompt: object, context_length: int) -> bool:
    """Whether a prompt of token ids leaves no room in the context."""
    return isinstance(prompt, list) and len(prompt) >= context_length


def _num_prompts(request: CompletionRequest) -> int:
    match request.prompt:
        case [str() | list(), *_] as several:
            return len(several)
    return 1


def _first(requested: float | None, recommended: float | None, default: float) -> float:
    """The first of the values that is given: a request's, the model's, and what holds without either."""
    if requested is not None:
        return requested
    return default if recommended is None else recommended
