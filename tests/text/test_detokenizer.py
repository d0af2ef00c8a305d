"""Streams of text: whole characters only, nothing twice, no stop string let through."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_infer.text.detokenizer import IncrementalDetokenizer, StopChecker
from tpu_infer.text.tokenizer import Tokenizer

IDS = st.lists(st.integers(0, 270), max_size=40)
CUTS = st.lists(st.integers(1, 5), max_size=40)


def _stream(tokenizer: Tokenizer, ids: list[int], cuts: list[int], *, skip: bool, at_start: bool) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special=skip, at_start=at_start)
    parts: list[str] = []
    rest = list(ids)
    for cut in [*cuts, *[1] * len(ids)]:
        parts.append(detokenizer.push(rest[:cut]))
        rest = rest[cut:]
    return [*parts, detokenizer.finish()]


@given(ids=IDS, cuts=CUTS, skip=st.booleans(), at_start=st.booleans())
def test_any_byte_level_ids(byte_level: Tokenizer, ids: list[int], cuts: list[int], skip: bool, at_start: bool) -> None:
    parts = _stream(byte_level, ids, cuts, skip=skip, at_start=at_start)
    assert "".join(parts) == byte_level.decode(ids, skip_special=skip, at_start=at_start)


@given(ids=IDS, cuts=CUTS, skip=st.booleans(), at_start=st.booleans())
def test_any_sentencepiece_ids(
    sentencepiece: Tokenizer, ids: list[int], cuts: list[int], skip: bool, at_start: bool
) -> None:
    parts = _stream(sentencepiece, ids, cuts, skip=skip, at_start=at_start)
    assert "".join(parts) == sentencepiece.decode(ids, skip_special=skip, at_start=at_start)


@pytest.mark.parametrize("text", ["안녕하세요, 세계!", "A中ab", "日本の首都は東京", "👩‍🚀 and 🇰🇷", "naïve café"])
def test_characters_split_over_tokens_come_whole(smollm2: Tokenizer, text: str) -> None:
    ids = smollm2.encode(text)
    parts = _stream(smollm2, ids, [], skip=True, at_start=True)
    assert "".join(parts) == text
    assert "\ufffd" not in "".join(parts)


@given(text=st.text(st.sampled_from("A中ab한é😀"), max_size=20))
def test_each_push_is_the_longest_whole_text_so_far(byte_level: Tokenizer, text: str) -> None:
    detokenizer = IncrementalDetokenizer(byte_level)
    seen, data = "", b""
    for token in byte_level.encode(text):
        seen += detokenizer.push([token])
        data += byte_level.token_bytes(token)
        assert seen == data.decode("utf-8", "ignore")
    assert detokenizer.finish() == ""


def test_an_unfinished_character_is_flushed_once(byte_level: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_level)
    assert detokenizer.push(byte_level.encode("한")[:2]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_a_skipped_token_between_the_bytes_of_a_character(byte_level: Tokenizer) -> None:
    first, *rest = byte_level.encode("한")
    assert IncrementalDetokenizer(byte_level).push([first, 2, *rest]) == "한"
    assert IncrementalDetokenizer(byte_level, skip_special=False).push([first, 2]) == "\ufffd<|im_end|>"


def _check(stops: list[str], chunks: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    checker = StopChecker(stops, include=include)
    parts = [checker.push(chunk) for chunk in chunks]
    return [*parts, checker.finish()], checker.matched


def test_a_stop_string_that_arrives_in_pieces() -> None:
    assert _check(["DEFGHIJ"], ["ABC", "DEF", "G", "HI", "J", "K"]) == (["ABC", "", "", "", "", "", ""], "DEFGHIJ")
    assert _check(["DEFGHIJ"], ["ABC", "DEF", "G", "HI", "JK"], include=True) == (
        ["ABC", "", "", "", "DEFGHIJ", ""],
        "DEFGHIJ",
    )


def test_held_text_comes_out_when_it_is_no_stop_string() -> None:
    assert _check(["DEFGHIJ"], ["ABC", "DEF", "G", "X"]) == (["ABC", "", "", "DEFGX", ""], None)
    assert _check(["DEFGHIJ"], ["ABC", "DEF", "G"]) == (["ABC", "", "", "DEFG"], None)


def test_a_beginning_within_a_beginning() -> None:
    assert _check(["aab"], ["aa", "ab"]) == (["", "a", ""], "aab")
    assert _check(["abcd", "bc"], ["ab", "c", "d"]) == (["", "a", "", ""], "bc")
    assert _check(["b", "ab"], ["ab"]) == (["", ""], "ab")


def test_no_stop_strings_hold_nothing() -> None:
    assert _check([], ["a", "b"]) == (["a", "b", ""], None)


def _oracle(stops: list[str], text: str, include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


STOPS = st.lists(st.text(st.sampled_from("ab한"), min_size=1, max_size=5), min_size=1, max_size=5)
CHUNKS = st.lists(st.text(st.sampled_from("ab한"), max_size=6), max_size=10)


@given(stops=STOPS, chunks=CHUNKS, include=st.booleans())
def test_stop_strings_against_the_whole_text(stops: list[str], chunks: list[str], include: bool) -> None:
    expected, matched = _oracle(stops, "".join(chunks), include)
    checker = StopChecker(stops, include=include)
    seen, given_text = "", ""
    for chunk in chunks:
        seen += checker.push(chunk)
        given_text += chunk
        assert expected.startswith(seen)
        if checker.matched is None:
            held = given_text[len(seen) :]
            assert held == "" or any(stop.startswith(held) for stop in stops)
    assert (seen + checker.finish(), checker.matched) == (expected, matched)
