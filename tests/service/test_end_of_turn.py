"""The token by which a chat template closes an assistant's turn ends the answer to a chat request."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from service.interpreter import Interpreter
from service.large_request_messages import Parsed
from service.schema import ChatCompletionRequest, CompletionRequest, GenerationBody, GenerationRequest, Received
from service.served_model import ServedModel
from service.settings import LimitSettings
from speculation.messages import Ready
from tests.service.conftest import CHATML, StartService, byte_level_tokenizer, write_folder

END_OF_TEXT, IM_START, IM_END = 0, 1, 2
READY = Ready(
    model_fingerprint="m",
    model_folder="",
    max_model_len=512,
    vocab_size=1000,
    num_blocks=100,
    block_size=16,
    methods=["none"],
    max_waiting=8,
    description="scripted",
)
TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content BODY }}CLOSE{% endfor %}"


def template_of(close: str, body: str = "") -> str:
    return TURN.replace("BODY", body).replace("CLOSE", close)


def load(folder: Path, template: str | None, ready: Ready = READY) -> ServedModel:
    return ServedModel.load("m", write_folder(folder, byte_level_tokenizer(), template), ready)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, IM_END),
        (template_of("{{ eos_token }}"), IM_END),
        (template_of(" <|endoftext|>\n"), END_OF_TEXT),
        (template_of("<|im_end|>\n", "| trim"), IM_END),
        (template_of("<|im_end|><|endoftext|>"), IM_END),
        ("{% generation %}" + template_of("<|im_end|>") + "{% endgeneration %}", IM_END),
        # A template that closes a turn only where another follows.
        (template_of("{% if not loop.last %}<|endoftext|>{% endif %}"), END_OF_TEXT),
        # Templates that write text, nothing, or another text than the answer after it.
        (template_of("\n### User:"), None),
        (template_of("</answer><|im_end|>"), None),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", None),
        (template_of("<|im_end|>", "| upper"), None),
        ("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}", None),
        ("<|im_end|>", None),
        # Templates that raise.
        ("{{ raise_exception('only one message') }}", None),
        ("{% if messages | length > 1 %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}", None),
        ("{{ messages[5].content.parts[0] }}", None),
        ("{{ messages | map(attribute=2.5) | list }}", None),
        ("{% for i in range(10 ** 9) %}{% endfor %}", None),
        (None, None),
    ],
)
def test_the_end_of_a_turn_is_the_template_s(tmp_path: Path, template: str | None, expected: int | None) -> None:
    """The control token right after an answer is found, and no template ends a start."""
    assert load(tmp_path, template).end_of_turn == expected


def test_a_token_beyond_the_model_s_vocabulary_ends_nothing(tmp_path: Path) -> None:
    """A token that the model cannot generate is not sent to the engine, which would refuse it."""
    folder = write_folder(tmp_path, byte_level_tokenizer(), CHATML)
    path = folder / "tokenizer.json"
    tree = msgspec.json.decode(path.read_bytes())
    tree["added_tokens"].append({**tree["added_tokens"][0], "id": 5000, "content": "<far>", "special": False})
    tree["model"]["vocab"]["<far>"] = 5000
    path.write_bytes(msgspec.json.encode(tree))
    (folder / "chat_template.jinja").write_text(template_of("<far>"))
    assert ServedModel.load("m", folder, READY).end_of_turn is None


def stops(folder: Path, body: GenerationBody) -> list[tuple[int, ...]]:
    """Stop tokens that the engine is sent, a sequence each."""
    generation = Interpreter(load(folder, CHATML), LimitSettings(), {}).generation("g", Received(body))
    return [submit.sampling.stop_token_ids for submit in generation.submits()]


def chat(**fields: object) -> ChatCompletionRequest:
    return msgspec.convert({"messages": [{"role": "user", "content": "hi"}], **fields}, ChatCompletionRequest)


def test_chat_requests_stop_at_the_end_of_a_turn(tmp_path: Path) -> None:
    """It joins the request's own stop tokens, once, unless the model's stop tokens are ignored."""
    assert stops(tmp_path, chat(n=2)) == [(IM_END,), (IM_END,)]
    assert stops(tmp_path, chat(stop_token_ids=[7])) == [(7, IM_END)]
    assert stops(tmp_path, chat(stop_token_ids=[IM_END])) == [(IM_END,)]
    assert stops(tmp_path, chat(ignore_eos=True)) == [()]
    assert stops(tmp_path, chat(ignore_eos=True, stop_token_ids=[7])) == [(7,)]
    assert stops(tmp_path, msgspec.convert({"prompt": "hi"}, CompletionRequest)) == [()]


def test_a_large_chat_request_stops_there_too(tmp_path: Path) -> None:
    """The end of a turn crosses from the process that parses large requests."""
    generation = Interpreter(load(tmp_path, CHATML), LimitSettings(), {}).generation("g", Received(chat()))
    message = Parsed(message_id="", request=GenerationRequest(), generation=generation)
    crossed = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Parsed)
    assert crossed.generation.submits()[0].sampling.stop_token_ids == (IM_END,)


async def test_an_answer_that_ends_its_turn_is_finished(start_service: StartService, tmp_path: Path) -> None:
    """The answer stops before the token, without a stop_reason, as at the model's own stop token."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(["<eot>"])
    folder = write_folder(tmp_path, tokenizer, template_of("<eot>"))
    service = await start_service(model=str(folder))
    # The scripted engine repeats its prompt, in which the question's turn is closed.
    body = {"messages": [{"role": "user", "content": "The fox"}], "max_tokens": 40, "seed": 0}
    status, answer = await service.post("/v1/chat/completions", body)
    assert status == 200, answer
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert choice["message"]["content"] == "user\nThe fox"
    _, answer = await service.post("/v1/chat/completions", {**body, "ignore_eos": True})
    assert answer["choices"][0]["finish_reason"] == "length"
