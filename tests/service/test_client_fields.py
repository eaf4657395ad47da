"""Fields that vLLM and other servers have beside OpenAI's, as far as they are served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from service.chat_template import ChatTemplate
from tests.service.conftest import CHATML, Service, StartService, byte_level_tokenizer, write_folder

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = {"role": "user", "content": "hi"}
TOOL_CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
WITH_TOOLS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITHOUT_TOOLS = (
    "{% for message in messages %}{% if message.role in ['user', 'assistant'] %}{{ message.content }}{% endif %}"
    "{% endfor %}"
)


async def prompt_of(service: Service, path: str = CHAT, **body: Any) -> str:
    """The prompt's text without control tokens, which is what the scripted engine answers."""
    status, answer = await service.post(path, {"seed": 0, "n": 1, **body})
    assert status == 200, answer
    choice = answer["choices"][0]
    return str(choice["text"] if path == TEXT else choice["message"]["content"])


async def test_the_prompt_opens_a_turn_unless_asked_not_to(service: Service) -> None:
    """`add_generation_prompt` false leaves the assistant's turn closed."""
    assert await prompt_of(service, messages=[USER]) == "user\nhi\nassistant\n"
    assert await prompt_of(service, messages=[USER], add_generation_prompt=False) == "user\nhi\n"


async def test_the_last_message_can_be_continued(service: Service) -> None:
    """With `continue_final_message` the prompt ends with the message's own text, trailing space included."""
    messages = [USER, {"role": "assistant", "content": "The quick "}]
    assert await prompt_of(service, messages=messages, continue_final_message=True) == "user\nhi\nassistant\nThe quick "
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
    status, answer = await service.post(CHAT, body)
    assert (status, answer["error"]["param"]) == (400, "continue_final_message")


async def test_a_prompt_can_be_truncated(service: Service) -> None:
    """`truncate_prompt_tokens` keeps the last tokens, -1 as many as fit; a longer prompt is no error then."""
    ids = list(range(10, 20))
    assert len(ids) == 10
    for kept in (1, 4, 10, 50):
        body = {"prompt": ids, "max_tokens": 1, "echo": True, "return_token_ids": True, "truncate_prompt_tokens": kept}
        _, answer = await service.post(TEXT, body)
        assert answer["choices"][0]["token_ids"][:-1] == ids[-kept:]
    long = {"prompt": [5] * 1000, "max_tokens": 6, "truncate_prompt_tokens": -1, "ignore_eos": True}
    status, answer = await service.post(TEXT, long)
    assert status == 200, answer
    assert answer["usage"] | {"prompt_tokens": 250, "completion_tokens": 6} == answer["usage"]
    status, answer = await service.post(
        CHAT, {"messages": [{**USER, "content": "a b " * 200}], "truncate_prompt_tokens": 9}
    )
    assert answer["usage"]["prompt_tokens"] == 9
    status, answer = await service.post(TEXT, {"prompt": "hi", "truncate_prompt_tokens": 0})
    assert (status, answer["error"]["param"]) == (400, "truncate_prompt_tokens")


async def test_minus_one_asks_for_what_fits(service: Service) -> None:
    """`max_tokens` -1 fills the context on both routes, for each prompt by its own length."""
    body = {"messages": [USER], "max_tokens": -1, "ignore_eos": True}
    _, answer = await service.post(CHAT, body)
    assert answer["usage"]["total_tokens"] == 256
    _, answer = await service.post(TEXT, {"prompt": [[5] * 200, [5] * 250], "n_predict": -1, "ignore_eos": True})
    assert answer["usage"]["completion_tokens"] == 56 + 6
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]


async def test_a_default_or_a_truncating_request_takes_what_fits(service: Service) -> None:
    """Where `max_tokens` was not given, or `truncate` is true, less room shortens the answer; else it is an error."""
    prompt = [5] * 251
    status, answer = await service.post(TEXT, {"prompt": prompt, "ignore_eos": True})
    assert (status, answer["usage"]["completion_tokens"]) == (200, 5)
    body = {"prompt": prompt, "ignore_eos": True, "max_tokens": 100, "min_tokens": 50}
    status, answer = await service.post(TEXT, {**body, "truncate": True})
    assert (status, answer["usage"]["completion_tokens"]) == (200, 5)
    status, answer = await service.post(TEXT, body)
    assert (status, answer["error"]["param"]) == (400, "max_tokens")
    assert (
        answer["error"]["message"]
        == "max_tokens 100 + 251 prompt tokens exceed the context of 256; at most 5 are available"
    )


async def test_a_top_p_of_zero_takes_the_most_likely_token(service: Service) -> None:
    """`top_p` 0 is served, as OpenAI serves it."""
    assert (await service.post(CHAT, {"messages": [USER], "top_p": 0}))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_the_stop_string_can_be_part_of_the_text(service: Service, stream: bool) -> None:
    """With `include_stop_str_in_output` the text ends behind the stop string, or with the stop token."""
    body: dict[str, Any] = {"prompt": "The quick brown fox", "seed": 0, "stop": "brown", "max_tokens": 50}
    assert await text_of(service, body, stream=stream) == "The quick "
    assert await text_of(service, {**body, "include_stop_str_in_output": True}, stream=stream) == "The quick brown"
    ids = (await service.post(TEXT, {"prompt": "The quick", "seed": 0, "return_token_ids": True}))[1]["choices"][0]
    by_token = {"prompt": "The quick", "seed": 0, "stop_token_ids": [ids["token_ids"][1]], "max_tokens": 50}
    without = await text_of(service, by_token, stream=stream)
    with_stop = await text_of(service, {**by_token, "include_stop_str_in_output": True}, stream=stream)
    assert with_stop.startswith(without)
    assert len(with_stop) > len(without)


async def text_of(service: Service, body: dict[str, Any], *, stream: bool) -> str:
    if not stream:
        return str((await service.post(TEXT, body))[1]["choices"][0]["text"])
    events = await service.events(TEXT, {**body, "stream": True})
    return "".join(choice["text"] for event in events if event != "[DONE]" for choice in event["choices"])


async def test_control_tokens_can_be_shown(service: Service) -> None:
    """With `skip_special_tokens` false, control tokens are part of the text."""
    body = {"prompt": "a<|im_start|>b", "parse_special": True, "echo": True, "max_tokens": 1}
    _, hidden = await service.post(TEXT, {**body, "truncate_prompt_tokens": 2})
    _, shown = await service.post(TEXT, {**body, "truncate_prompt_tokens": 2, "skip_special_tokens": False})
    assert "<|im_start|>" not in hidden["choices"][0]["text"]
    assert shown["choices"][0]["text"].startswith("<|im_start|>b")


async def test_a_stream_can_have_the_usage_in_every_chunk(service: Service) -> None:
    """With `continuous_usage_stats` each chunk says what was used up to it, growing to the whole."""
    body = {
        "messages": [USER],
        "stream": True,
        "max_tokens": 6,
        "ignore_eos": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    events = [event for event in await service.events(CHAT, body) if event != "[DONE]"]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert len({event["usage"]["prompt_tokens"] for event in events}) == 1
    for usage in (event["usage"] for event in events):
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


async def test_the_logprobs_of_the_prompt_are_reported(service: Service) -> None:
    """`prompt_logprobs` has an entry a prompt token, None first, with its logprob, rank and text by token id."""
    ids = [10, 11, 12]
    _, answer = await service.post(TEXT, {"prompt": ids, "max_tokens": 1, "prompt_logprobs": 1})
    rows = answer["choices"][0]["prompt_logprobs"]
    assert rows[0] is None
    assert [str(token) in row for token, row in zip(ids[1:], rows[1:], strict=True)] == [True, True]
    assert all(set(entry) == {"logprob", "rank", "decoded_token"} for row in rows[1:] for entry in row.values())
    assert "prompt_logprobs" not in (await service.post(TEXT, {"prompt": ids, "max_tokens": 1}))[1]["choices"][0]
    _, answer = await service.post(CHAT, {"messages": [USER], "max_tokens": 1, "prompt_logprobs": 0})
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    for wrong in ({"prompt_logprobs": 21}, {"prompt_logprobs": 1, "stream": True}):
        status, answer = await service.post(TEXT, {"prompt": ids, **wrong})
        assert (status, answer["error"]["param"]) == (400, "prompt_logprobs")


async def test_echoed_logprobs_keep_their_number_of_alternatives(service: Service) -> None:
    """`logprobs` with `echo` and `prompt_logprobs` each report what they were asked for."""
    body = {"prompt": [10, 11, 12], "max_tokens": 1, "echo": True, "logprobs": 1, "prompt_logprobs": 3}
    _, answer = await service.post(TEXT, body)
    choice = answer["choices"][0]
    assert all(len(row) <= 2 for row in choice["logprobs"]["top_logprobs"][1:])
    assert len(choice["prompt_logprobs"]) == 3


async def test_a_request_can_name_its_answer(service: Service) -> None:
    """`request_id` is the end of the response's `id`; two at a time with the same one are both answered."""
    _, answer = await service.post(CHAT, {"messages": [USER], "request_id": "mine"})
    assert answer["id"] == "chatcmpl-mine"
    _, answer = await service.post(TEXT, {"prompt": "hi", "request_id": "mine"})
    assert answer["id"] == "cmpl-mine"


@pytest.fixture
async def with_tools(start_service: StartService, tmp_path: Path) -> Service:
    """A service whose model's chat template renders tool calls and results."""
    folder = write_folder(tmp_path / "tools", byte_level_tokenizer(), WITH_TOOLS)
    return await start_service(model=str(folder))


async def test_tool_calls_in_the_history_are_rendered(with_tools: Service) -> None:
    """A turn without content and with tool calls, and the tool's result, are part of the prompt."""
    history = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]},
        {"role": "tool", "tool_call_id": "call00001", "content": "4 <|im_end|> degrees"},
        {"role": "assistant", "content": None},
    ]
    text = await prompt_of(with_tools, messages=history, max_tokens=-1)
    assert '{"name": "weather", "arguments": {"city": "Oslo"}}' in text
    assert "tool\n4 <|im_end|> degrees" in text


async def test_what_a_template_leaves_out_is_refused(start_service: StartService, tmp_path: Path) -> None:
    """A template that would drop tool calls or results in silence makes them an error that says so."""
    folder = write_folder(tmp_path / "plain", byte_level_tokenizer(), WITHOUT_TOOLS)
    service = await start_service(model=str(folder))
    calls = [USER, {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]}]
    status, answer = await service.post(CHAT, {"messages": calls})
    assert (status, answer["error"]["param"]) == (400, "messages[1].tool_calls")
    status, answer = await service.post(CHAT, {"messages": [USER, {"role": "tool", "content": "4"}]})
    assert (status, answer["error"]["param"]) == (400, "messages[1].role")
    for role in ("user", "system", "tool"):
        status, answer = await service.post(CHAT, {"messages": [{"role": role, "content": None}]})
        assert (status, answer["error"]["param"]) == (400, "messages[0].content")


def test_the_plain_chatml_template_renders_tool_results_but_no_calls() -> None:
    """What a template renders is found by rendering, not by its names."""
    template = ChatTemplate(CHATML, {})
    assert (template.renders_tool_calls, template.renders_tool_results) == (False, True)
    assert ChatTemplate(WITH_TOOLS, {}).renders_tool_calls
    assert not ChatTemplate(WITHOUT_TOOLS, {}).renders_tool_results
    assert not ChatTemplate("{{ raise_exception('no') }}", {}).renders_tool_calls


async def test_deeply_nested_arguments_are_refused(with_tools: Service) -> None:
    """Arguments of a tool call that are nested beyond what can be rendered are a 400."""
    nested = json.dumps({"name": "f"})[:-1] + ', "arguments": ' + '{"a":' * 900 + "1" + "}" * 900 + "}"
    body = '{"messages": [%s, {"role": "assistant", "tool_calls": [{"function": %s}]}]}' % (json.dumps(USER), nested)  # noqa: UP031
    status, answer = await with_tools.post(CHAT, body.encode())
    assert status == 400, answer
