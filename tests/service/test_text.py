"""Token ids to text, against the tokenizers library and against the simplest way to do it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from service.text import TextDelta, TextStream
from service.tokenizer import Tokenizer
from tests.service.conftest import MAKERS

LIBRARY = {name: make() for name, make in MAKERS.items()}
OURS = {name: Tokenizer(tokenizer.to_str().encode()) for name, tokenizer in LIBRARY.items()}

words = st.text(alphabet="ab é東🎉\n", min_size=1, max_size=4)


def chunks_of(items: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    """The items in pieces of the given sizes, repeated as needed."""
    pieces = []
    start = 0
    for size in [*sizes, *[max(sizes, default=1)] * len(items)]:
        pieces.append(items[start : start + size])
        start += size
    return [piece for piece in pieces if piece]


def run(stream: TextStream, pieces: Sequence[Sequence[int]]) -> list[TextDelta]:
    return [*(stream.feed(piece) for piece in pieces), stream.finish()]


def text_of(deltas: Sequence[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


@pytest.mark.parametrize("kind", LIBRARY)
@given(data=st.data(), sizes=st.lists(st.integers(1, 7), min_size=1, max_size=5))
def test_deltas_add_up_to_what_the_library_decodes(kind: str, data: st.DataObject, sizes: list[int]) -> None:
    """For texts in any script, whatever the deltas, their sum is the library's decoding of all tokens at once."""
    text = data.draw(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30))
    token_ids = LIBRARY[kind].encode(text, add_special_tokens=False).ids
    tokenizer = OURS[kind]
    stream = TextStream(tokenizer.token_bytes, strip_leading_space=tokenizer.strips_leading_space)
    deltas = run(stream, chunks_of(token_ids, sizes))
    assert text_of(deltas) == LIBRARY[kind].decode(token_ids) == tokenizer.decode(token_ids)
    assert stream.num_tokens == len(token_ids)


@given(token_ids=st.lists(st.integers(0, 399), max_size=40), sizes=st.lists(st.integers(1, 7), min_size=1, max_size=5))
def test_any_token_ids_decode_as_in_the_library(token_ids: list[int], sizes: list[int]) -> None:
    """Byte-level tokens in any order, broken characters and control tokens included, give the library's text."""
    stream = TextStream(OURS["byte-level"].token_bytes)
    deltas = run(stream, chunks_of(token_ids, sizes))
    assert text_of(deltas) == LIBRARY["byte-level"].decode(token_ids)


def test_random_tokens_of_the_embedded_model_decode_as_in_the_library(embedded_folder: Path) -> None:
    """The same for the vocabulary that is served."""
    library = tokenizers.Tokenizer.from_file(str(embedded_folder / "tokenizer.json"))
    ours = Tokenizer.load(embedded_folder)

    @given(st.lists(st.integers(0, library.get_vocab_size() - 1), max_size=30), st.integers(1, 5))
    def check(token_ids: list[int], size: int) -> None:
        stream = TextStream(ours.token_bytes)
        assert text_of(run(stream, chunks_of(token_ids, [size]))) == library.decode(token_ids)

    check()


@given(st.text(alphabet="é東🎉a", min_size=1, max_size=8))
def test_no_delta_holds_half_a_character(text: str) -> None:
    """Every delta is whole characters of the text, also where a token is one byte."""
    shown = ""
    stream = TextStream(lambda byte: bytes([byte]))
    for byte in text.encode():
        shown += stream.feed([byte]).text
        assert text.startswith(shown)
    assert shown == text


def test_half_a_character_at_the_end_is_shown_as_replaced() -> None:
    """A sequence that ends within a character ends with U+FFFD, and its tokens count."""
    stream = TextStream(lambda byte: bytes([byte]))
    first = stream.feed("a東".encode()[:3])
    assert (first.text, first.offsets) == ("a", (0,))
    assert stream.finish() == TextDelta("\ufffd", (1, 1))


def reference(tokens: Sequence[str], stop: Sequence[str], min_tokens: int) -> tuple[str, int]:
    """Text and number of tokens by trying every length: the first token count whose text holds a stop string."""
    free = "".join(tokens[:min_tokens])
    for count in range(min_tokens + 1, len(tokens) + 1):
        tail = "".join(tokens[min_tokens:count])
        ends = [(tail.find(word) + len(word), tail.find(word)) for word in stop if word in tail]
        if ends:
            text = free + tail[: min(ends)[1]]
            starts = [len("".join(tokens[:i])) for i in range(count)]
            return text, sum(start < len(text) for start in starts)
    return "".join(tokens), len(tokens)


@given(
    tokens=st.lists(words, max_size=12),
    stop=st.lists(words, min_size=1, max_size=3),
    min_tokens=st.integers(0, 3),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
)
def test_stop_strings_end_the_text_wherever_they_fall(
    tokens: list[str], stop: list[str], min_tokens: int, sizes: list[int]
) -> None:
    """Text and token count are those of the token by token definition, however the tokens arrive."""
    vocabulary = [token.encode() for token in tokens]
    stream = TextStream(lambda i: vocabulary[i], stop=stop, min_tokens=min_tokens)
    deltas = run(stream, chunks_of(range(len(tokens)), sizes))
    assert (text_of(deltas), stream.num_tokens) == reference(tokens, stop, min_tokens)


@given(
    tokens=st.lists(words, max_size=12),
    stop=st.lists(words, min_size=1, max_size=3),
)
def test_what_was_shown_is_never_taken_back(tokens: list[str], stop: list[str]) -> None:
    """At every moment the text shown, and the tokens shown, are a beginning of the final ones."""
    vocabulary = [token.encode() for token in tokens]
    text, count = reference(tokens, stop, 0)
    stream = TextStream(lambda i: vocabulary[i], stop=stop)
    shown = ""
    for i in range(len(tokens)):
        shown += stream.feed([i]).text
        assert text.startswith(shown)
        assert stream.num_tokens <= count


def test_only_what_could_be_a_stop_string_is_held_back() -> None:
    """A text is shown up to the longest end that a stop string begins with, and no further."""
    stream = TextStream(lambda i: [b"abc", b"STO", b"NE", b" STOP"][i], stop=["STOP", "TOAD"])
    assert stream.feed([0]).text == "abc"
    assert stream.feed([1]).text == ""
    assert stream.feed([2]).text == "STONE"
    assert stream.feed([3]).text == " "
    assert stream.stop_string == "STOP"
    assert stream.feed([0]) == TextDelta("", ())


def test_of_two_stop_strings_the_one_complete_first_wins() -> None:
    """A longer stop string that began earlier does not delay a shorter one within it."""
    stream = TextStream(lambda i: [b"xab", b"cd"][i], stop=["abcd", "bc"])
    assert text_of(run(stream, [[0], [1]])) == "xa"
    assert stream.stop_string == "bc"


def test_a_continuation_keeps_its_first_space() -> None:
    """SentencePiece's first space belongs to a text that goes on, and not to one of its own."""
    tokenizer = OURS["sentencepiece"]
    token_ids = tokenizer.encode("The fox", add_special=False)
    own = TextStream(tokenizer.token_bytes, strip_leading_space=True)
    going_on = TextStream(tokenizer.token_bytes)
    assert text_of(run(own, [token_ids])) == "The fox"
    assert text_of(run(going_on, [token_ids])) == " The fox"
