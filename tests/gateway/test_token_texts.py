"""Texts of tokens.

1. Tokens of any cut, also inside characters, join to the text that the bytes have, with each character once.
2. A character is at its first token; the lengths in UTF-16 find each token's text again.
3. Control tokens have names, unknown ones their id; escaped bytes are bytes.
"""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from agentjet.gateway.records import control_names, runs, token_texts, utf16_length
from agentjet.types import ESCAPE, ESCAPED_BYTE

ANY_TEXT = st.one_of(st.text(), st.text(alphabet="aé€한😀👩‍👩‍👧ࠀ"))


def cut(raw: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(raw) + 1) for place in places), len(raw)]
    return [raw[start:end] for start, end in pairwise(edges)]


@given(ANY_TEXT, st.lists(st.integers(0, 200), max_size=40))
def test_tokens_join_to_the_text(text: str, places: list[int]) -> None:
    pieces = cut(text.encode(), places)
    texts = token_texts(pieces, {})
    assert "".join(texts) == text and len(texts) == len(pieces)
    encoded, at = "".join(texts).encode("utf-16-le"), 0
    for piece, found in zip(pieces, texts, strict=True):
        length = 2 * utf16_length(found)
        assert encoded[at : at + length].decode("utf-16-le") == found
        at += length
        # A token that begins no character has no text; one that begins some has just these.
        assert len(found) == sum(byte & 0xC0 != 0x80 for byte in piece)


@given(st.lists(st.binary(max_size=5), max_size=30))
def test_any_bytes_join_as_their_decoding(pieces: list[bytes]) -> None:
    escaped = [piece.replace(ESCAPE, ESCAPED_BYTE) for piece in pieces]
    assert "".join(token_texts(escaped, {})) == b"".join(pieces).decode(errors="replace")


def test_an_emoji_of_two_tokens_is_shown_once() -> None:
    face = "😀".encode()
    assert token_texts([b"a", face[:2], face[2:], b"b"], {}) == ["a", "😀", "", "b"]
    assert token_texts([face[:1], face[1:2], face[2:], face[:3]], {}) == ["😀", "", "", "�"]
    assert token_texts([face[:2], face[2:] + face[:2], face[2:]], {}) == ["😀", "😀", ""]


def test_control_tokens_have_names() -> None:
    end, other = ESCAPE + (2).to_bytes(3, "big"), ESCAPE + (7).to_bytes(3, "big")
    assert token_texts([b"hi", end, other, ESCAPED_BYTE, b"\xe4", end], {2: "<|end|>"}) == [
        "hi", "<|end|>", "<7>", "�", "�", "<|end|>",
    ]  # fmt: skip
    names = {"planner": {1: "<a>"}, "coder": {1: "<b>"}}
    assert control_names(names, "coder/critic") == {1: "<b>"}
    assert control_names({"policy": {1: "<c>"}}, "any") == {1: "<c>"} and control_names({}, "") == {}


def test_runs() -> None:
    assert runs([3, 3, None, 3]) == [(3, 2), (None, 1), (3, 1)] and runs([]) == []
