"""Texts of tokens for people, from the encoded bytes in the journal (see `types.ESCAPE`). Needs no tokenizer.

A character can span tokens: an emoji is often two tokens of two bytes each. It is shown once, at its first token.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import TypeVar

from agentjet.types import ESCAPE, ESCAPED_BYTE, SOLE_POLICY

Value = TypeVar("Value")
_UTF8 = codecs.getincrementaldecoder("utf-8")


def token_texts(pieces: Sequence[bytes], control: Mapping[int, str]) -> list[str]:
    """Returns the text of each token. The tokens that only continue a character of an earlier one have none.

    `pieces` is the encoded text of each token. `control` has the names of control tokens; others are shown as `<id>`.
    Bytes that are not UTF-8 become U+FFFD.
    """
    decoder = _UTF8("replace")
    texts: list[str] = []
    start = 0  # The token that began the incomplete character.
    for token, piece in enumerate(pieces):
        was_incomplete = bool(decoder.getstate()[0])
        text = decoder.decode(_displayed(piece, control))
        began = token if decoder.getstate()[0] and (text or not was_incomplete) else start
        if was_incomplete and text:
            texts[start] += text[0]
            text = text[1:]
        start = began
        texts.append(text)
    if texts:
        texts[start] += decoder.decode(b"", final=True)
    return texts


def control_names(names: Mapping[str, Mapping[int, str]], role: str) -> Mapping[int, str]:
    """Returns the control tokens of the policy of a role. `names` are those of the run, by policy."""
    return names.get(role.partition("/")[0]) or names.get(SOLE_POLICY, {})


def utf16_length(text: str) -> int:
    """Returns the number of UTF-16 code units, by which JavaScript counts."""
    return len(text) if text.isascii() else len(text.encode("utf-16-le", "surrogatepass")) // 2


def runs(values: Iterable[Value]) -> list[tuple[Value, int]]:
    """Returns equal neighbours as one value with their number."""
    return [(value, sum(1 for _ in same)) for value, same in groupby(values)]


def _displayed(piece: bytes, control: Mapping[int, str]) -> bytes:
    if not piece.startswith(ESCAPE) or len(piece) != len(ESCAPED_BYTE) or piece == ESCAPED_BYTE:
        return piece.replace(ESCAPED_BYTE, ESCAPE)
    token_id = int.from_bytes(piece[1:], "big")
    return control.get(token_id, f"<{token_id}>").encode()
