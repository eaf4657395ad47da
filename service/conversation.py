"""A conversation as the model's chat template takes it: messages to the text of a prompt."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from service.chat_template import ChatTemplate, ChatTemplateError
from service.errors import ApiError
from service.schema import ChatCompletionRequest, Message, ToolCall

Protect = Callable[[str], str]
"""Makes control tokens in a client's text plain text."""


def message_texts(message: Message) -> list[str]:
    """Every text of a message that the chat template may render."""
    calls = message.tool_calls or []
    texts = [*_content_texts(message), *(text for call in calls for text in (call.function.name, _arguments(call)))]
    return [*texts, *filter(None, (message.reasoning_content, message.tool_call_id))]


def rendered_conversation(request: ChatCompletionRequest, template: ChatTemplate, protect: Protect) -> str:
    """The prompt's text, in which nothing that a client wrote is a control token.

    Raises `ApiError` for what the template refuses, and for tool calls and results that it would leave out.
    """
    if request.continue_final_message and request.add_generation_prompt:
        raise ApiError.invalid(
            "continue_final_message",
            "continue_final_message and add_generation_prompt are both true; set one of them",
        )
    for index, message in enumerate(request.messages):
        _check(f"messages[{index}]", message, template)
    try:
        messages = [_entry(message, protect) for message in request.messages]
    except RecursionError as error:
        raise ApiError.invalid("messages", "the arguments of a tool call are nested too deeply") from error
    mark = secrets.token_hex(16)
    if request.continue_final_message:
        messages[-1]["content"] += mark
    given = request.chat_template_kwargs or {}
    variables = {name: protect(value) if isinstance(value, str) else value for name, value in given.items()}
    opens_turn = request.add_generation_prompt is not False and not request.continue_final_message
    try:
        text = template.render(messages, add_generation_prompt=opens_turn, variables=variables)
    except ChatTemplateError as error:
        raise ApiError.invalid("messages", f"the model's chat template refuses the messages: {error}") from error
    if not request.continue_final_message:
        return text
    start, found, _ = text.rpartition(mark)
    if not found:
        raise ApiError.invalid(
            "continue_final_message", "the model's chat template does not render the last message, nothing to continue"
        )
    return start


def _check(path: str, message: Message, template: ChatTemplate) -> None:
    """Raises `ApiError` for a message that lacks what its role needs, or that the template would leave out."""
    if message.content is None and message.role != "assistant":
        raise ApiError.invalid(
            f"{path}.content", f"{path}.content is null: it must be a string or an array", code="invalid_type"
        )
    if message.tool_calls and message.role != "assistant":
        raise ApiError.invalid(f"{path}.tool_calls", f"{path}.tool_calls: only the role 'assistant' has tool calls")
    if message.tool_calls and not template.renders_tool_calls:
        raise ApiError.invalid(
            f"{path}.tool_calls",
            f"{path}.tool_calls: the model's chat template leaves tool calls out; put them into the content as text",
            code="unsupported_parameter",
        )
    if message.role == "tool" and not template.renders_tool_results:
        raise ApiError.invalid(
            f"{path}.role",
            f"{path}.role is 'tool', which the model's chat template leaves out; send the result as the role 'user'",
            code="unsupported_parameter",
        )


def _entry(message: Message, protect: Protect) -> dict[str, Any]:
    """A message as templates expect it."""
    role = "system" if message.role == "developer" else message.role
    entry: dict[str, Any] = {"role": role, "content": protect("".join(_content_texts(message)))}
    named = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content,
    }
    entry |= {name: protect(text) for name, text in named.items() if text is not None}
    if message.tool_calls:
        entry["tool_calls"] = [_tool_call(call, protect) for call in message.tool_calls]
    return entry


def _tool_call(call: ToolCall, protect: Protect) -> dict[str, Any]:
    """A tool call with its arguments as an object, where they are one."""
    function = {"name": protect(call.function.name), "arguments": _protected(_parsed(call), protect)}
    entry: dict[str, Any] = {"type": call.type, "function": function}
    if call.id is not None:
        entry["id"] = protect(call.id)
    return entry


def _parsed(call: ToolCall) -> object:
    """Arguments as templates expect them, an object; arguments that are no JSON object stay text."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            tree = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            return arguments
        return tree if isinstance(tree, dict) else arguments
    return arguments


def _protected(value: object, protect: Protect) -> object:
    """A JSON value with every text in it protected."""
    if isinstance(value, str):
        return protect(value)
    if isinstance(value, dict):
        return {protect(name): _protected(item, protect) for name, item in value.items()}
    if isinstance(value, list):
        return [_protected(item, protect) for item in value]
    return value


def _arguments(call: ToolCall) -> str:
    arguments = call.function.arguments
    return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()


def _content_texts(message: Message) -> Sequence[str]:
    if message.content is None:
        return []
    return [message.content] if isinstance(message.content, str) else [part.text for part in message.content]
