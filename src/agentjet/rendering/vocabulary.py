"""The tokens of a model and the exact bytes of each, from the `tokenizer.json` of its folder.

In encoded text (see `types.ESCAPE`), every token is a fixed byte string. Tokens join to bytes without decoding, and a
token that ends inside a character loses nothing. A control token is an added token that is more than white space. Chat
templates write control tokens and the policy samples them; they are never found in text.

Byte-level BPE (as GPT-2) and BPE with byte fallback (SentencePiece: Gemma, Llama 2, Mistral) are supported. A tokenizer
that does not map text to tokens and back without loss is refused when the model loads.

SentencePiece tokenizers put a space, the *dummy prefix*, before a text. Encoded text contains this space.
`add_prefix` adds it where the tokenizer would. Tokenisation adds nothing.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers

from agentjet.errors import ConfigError
from agentjet.types import ESCAPE, ESCAPED_BYTE

_MAX_ID = 0xFFFFFE
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_ESCAPES = re.compile(rb"(\xff[\x00-\xff]{3})")
_SPACE = "▁"
"""SentencePiece's character for a space."""
_UNICODE_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
SLICE = 64 * 2**10
"""Bytes tokenised at once when tokens are only counted."""
SHORT = 32
"""Maximum number of bytes of a text whose tokens are remembered."""
_PROBES = (
    " ",
    "a",
    "  two  spaces\n\n\tand\r\n tabs ",
    'JSON {"a": [1, 2.50], "b": null} 0123456789',
    "naïve – ∑ 日本語 한국어 العربية 🙂👩‍👩‍👧",
    "e\u0301 \u1112\u1161\u11ab ﬁ½ Å \u00a0\u3000▁",
    "<s>[INST] <|im_end|></s>",
)


@dataclass(frozen=True, slots=True)
class ControlToken:
    """`hidden` tokens are not displayed. `strips_*`: the token removes white space beside it, as in Phi-3."""

    id: int
    literal: str
    hidden: bool
    strips_left: bool
    strips_right: bool


class Vocabulary:
    """Encodes text without control tokens, and maps every token to its bytes."""

    def __init__(self, folder: Path | str) -> None:
        """Special tokens are hidden, until `display` shows some.

        Raises `ConfigError` if `tokenizer.json` is missing or does not map text to tokens and back without loss.
        """
        path = Path(folder) / "tokenizer.json"
        try:
            full = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exceptions
            raise ConfigError(f"cannot read the tokenizer {path}: {error}") from error
        added = full.get_added_tokens_decoder()
        self.control = {
            id_: ControlToken(id_, token.content, token.special, token.lstrip, token.rstrip)
            for id_, token in added.items()
            if token.content.strip()
        }
        pipeline = _Pipeline(full)
        self._prefix, self._normalise, self._plain = pipeline.prefix, pipeline.normalise, pipeline.plain
        self._bytes = _token_bytes(self._plain)
        spaces = {id_: token for id_, token in added.items() if id_ not in self.control}
        self._plain.add_tokens([t for id_, t in spaces.items() if self._plain.token_to_id(t.content) == id_])
        self._bytes.update({id_: token.content.encode() for id_, token in spaces.items()})
        for id_ in self.control:
            self._bytes.pop(id_, None)
        self.opening = b"".join(map(escape, _opening(full)))
        """Encoded text that the tokenizer puts before a text: a begin-of-text token or nothing."""
        self._encode_short = lru_cache(1024)(self._encode_whole)  # Shared lists: nobody may change them.
        self._refuse_lossy(path)

    def display(self, texts: Collection[str], *, but: Collection[int]) -> None:
        """Shows the special tokens in `texts`, except the tokens `but`."""
        for id_, token in self.control.items():
            if token.hidden and id_ not in but and any(token.literal in text for text in texts):
                self.control[id_] = replace(token, hidden=False)

    @cached_property
    def _byte_ids(self) -> dict[int, int]:
        return {text[0]: id_ for id_, text in self._bytes.items() if len(text) == 1}

    @cached_property
    def _escaped(self) -> frozenset[int]:
        """Tokens whose bytes need an escape in encoded text; very few."""
        return frozenset(id_ for id_, raw in self._bytes.items() if ESCAPE in raw)

    @cached_property
    def longest_piece(self) -> int:
        """Maximum number of bytes of a token in encoded text."""
        escaped = (len(self.piece(token_id)) for token_id in self._escaped)
        return max(len(escape(0)), *map(len, self._bytes.values()), *escaped)

    @cached_property
    def _missing(self) -> bytes:
        """Bytes without a token, such as a few ASCII control characters of SmolLM2."""
        return bytes(byte for byte in range(256) if byte not in self._byte_ids)

    def is_plain(self, text: str) -> bool:
        """True if `encode_text` of this text and of all its parts is its UTF-8, as for most texts."""
        return text.isascii() and len(text.encode().translate(None, self._missing)) == len(text)

    def add_prefix(self, text: str, *, first: bool) -> str:
        """Returns text with the tokenizer's dummy prefix. `first` is False after a control token."""
        scheme = self._prefix
        if not text or not scheme or (scheme == "first" and not first):
            return text
        return text if scheme != "every" and text[0] in " ▁" else f" {text}"

    def encode_text(self, text: str) -> bytes:
        """Returns text as UTF-8 in the tokenizer's Unicode normal form, without characters that it has no bytes for.

        Raises `UnicodeEncodeError` for an unpaired surrogate.
        """
        if not text.isascii():
            text = self._normalise(text)
        raw = text.encode()
        if len(raw.translate(None, self._missing)) == len(raw):
            return raw
        kept = (char.encode() for char in text)
        return b"".join(char for char in kept if char.translate(None, self._missing) == char)

    @property
    def ids(self) -> list[int]:
        """All token ids, ascending."""
        return sorted({*self._bytes, *self.control})

    def knows(self, token_id: int) -> bool:
        return token_id in self._bytes or token_id in self.control

    def pieces(self, token_ids: Sequence[int]) -> list[bytes]:
        """Returns the `piece` of each token."""
        known, escaped = self._bytes.get, self._escaped
        return [self.piece(i) if i in escaped else known(i) or self.piece(i) for i in token_ids]

    def piece(self, token_id: int) -> bytes:
        """Returns the encoded text of a token. Ids unknown to the tokenizer (padding of the embedding) are escapes."""
        raw = self._bytes.get(token_id)
        if raw is None:
            return escape(token_id)
        return raw.replace(ESCAPE, ESCAPED_BYTE) if ESCAPE in raw else raw

    def displayed_bytes(self, token_id: int, *, literals: bool = False) -> bytes:
        """Returns the displayed bytes of a token. Hidden tokens have none, unless `literals` is true."""
        raw = self._bytes.get(token_id)
        if raw is not None:
            return raw
        control = self.control.get(token_id)
        return control.literal.encode() if control and (literals or not control.hidden) else b""

    def displayed(self, token_ids: Sequence[int]) -> bytes:
        """Returns the displayed bytes of tokens."""
        known = self._bytes.get
        return b"".join([known(i) or self.displayed_bytes(i) for i in token_ids])

    def show(self, encoded: bytes) -> str:
        """Returns encoded text for display: control tokens by name, incomplete characters replaced."""
        parts = _ESCAPES.split(encoded)
        parts[1::2] = [
            ESCAPE if part == ESCAPED_BYTE else self.displayed_bytes(int.from_bytes(part[1:], "big"), literals=True)
            for part in parts[1::2]
        ]
        return b"".join(parts).decode(errors="replace")

    def tokenize(self, encoded: bytes) -> tuple[int, ...]:
        """Returns the token ids of encoded text. Text between two control tokens is tokenised separately."""
        tokens: list[int] = []
        text = b""
        for part in _ESCAPES.split(encoded):
            if not part.startswith(ESCAPE):
                text += part
            elif part == ESCAPED_BYTE:
                text += ESCAPE
            else:
                tokens += self._encode(text)
                tokens.append(int.from_bytes(part[1:], "big"))
                text = b""
        return tuple(tokens + self._encode(text))

    def counted_lower_bound(self, encoded: bytes, enough: int) -> int:
        """Returns a lower bound of the number of tokens of encoded text. Stops when it exceeds `enough`.

        Tokenises one slice at a time, because the tokens of a long text take a hundred times its memory. Each cut can
        change the tokens next to it, so the bound is lower than the sum.
        """
        count = 0
        for part in _ESCAPES.split(encoded):
            slices = [part[start : start + SLICE] for start in range(0, len(part), SLICE)]
            for piece in slices:
                if count > enough:
                    return count
                text = piece.decode(errors="ignore")
                found = len(self._plain.encode(text, add_special_tokens=False).ids)
                count += found if len(slices) == 1 else max(0, found - 2 * self.longest_piece)
        return count

    def _encode(self, raw: bytes) -> list[int]:
        """Returns the ids of bytes. Short texts, such as those between two control tokens, are remembered."""
        return self._encode_short(raw) if len(raw) <= SHORT else self._encode_whole(raw)

    def _encode_whole(self, raw: bytes) -> list[int]:
        """Invalid UTF-8, such as half a character that was sampled, becomes byte tokens."""
        tokens: list[int] = []
        while raw:
            text, stray, raw = _valid_head(raw)
            if text:
                tokens += self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids
            tokens += [self._byte_ids[byte] for byte in stray]
        return tokens

    def _refuse_lossy(self, path: Path) -> None:
        for probe in _PROBES:
            encoded = self.encode_text(probe)
            if (
                encoded != self._normalise(probe).encode()
                or b"".join(map(self.piece, self.tokenize(encoded))) != encoded
            ):
                raise ConfigError(
                    f"the tokenizer {path} does not keep text byte for byte (tried {probe[:20]!r}); "
                    "byte-level BPE and BPE with byte fallback are supported"
                )


def escape(token_id: int) -> bytes:
    """Returns a control token as encoded text."""
    assert 0 <= token_id <= _MAX_ID
    return ESCAPE + token_id.to_bytes(3, "big")


def _valid_head(raw: bytes) -> tuple[str, bytes, bytes]:
    """Splits bytes into a valid UTF-8 head, the invalid bytes after it, and the rest."""
    try:
        return raw.decode(), b"", b""
    except UnicodeDecodeError as error:
        return raw[: error.start].decode(), raw[error.start : error.end], raw[error.end :]


def _opening(full: Tokenizer) -> list[int]:
    """Returns the special tokens that the tokenizer puts before a text."""
    ids, bare = full.encode("a").ids, full.encode("a", add_special_tokens=False).ids
    return next((ids[:i] for i in range(len(ids)) if ids[i : i + len(bare)] == bare), [])


class _Pipeline:
    """The parts of a tokenizer: Unicode normal forms, dummy prefix, and `plain`, a tokenizer for the rest."""

    def __init__(self, full: Tokenizer) -> None:
        steps = _steps(full.normalizer)
        self._forms = [getattr(normalizers, step["type"])() for step in steps if step["type"] in _UNICODE_FORMS]
        self.prefix = "every" if any(_is_prefix(step) for step in steps) else ""
        """Texts that get the dummy prefix: `every` one, `each` one that does not start with a space, the `first` one,
        or none ("").
        """
        rest = [step for step in steps if step["type"] not in _UNICODE_FORMS and not _is_prefix(step)]
        self._marks_spaces = any(step["type"] == "Replace" and step["content"] == _SPACE for step in rest)
        splits = _steps(full.pre_tokenizer)
        for step in splits:
            if step["type"] == "Metaspace":
                self._marks_spaces = True
                self.prefix = {"always": "each", "first": "first"}.get(step["prepend_scheme"], self.prefix)
                step["prepend_scheme"] = "never"
        parts = Tokenizer.from_str(
            json.dumps(
                {
                    "version": "1.0",
                    "added_tokens": [],
                    "normalizer": {"type": "Sequence", "normalizers": rest} if rest else None,
                    "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits} if splits else None,
                    "model": {"type": "BPE", "vocab": {}, "merges": []},
                }
            )
        )
        self.plain = Tokenizer(full.model)
        if rest:
            self.plain.normalizer = parts.normalizer
        if splits:
            self.plain.pre_tokenizer = parts.pre_tokenizer

    def normalise(self, text: str) -> str:
        """Returns text in the tokenizer's Unicode normal form."""
        for form in self._forms:
            text = str(form.normalize_str(text))
        return text.replace(_SPACE, " ") if self._marks_spaces else text  # The tokenizer treats its mark as a space.


def _steps(part: Any) -> list[dict[str, Any]]:
    """Returns the steps of a normalizer or pre-tokenizer as JSON, with nested sequences flattened."""

    def flat(step: dict[str, Any]) -> list[dict[str, Any]]:
        inner = step.get("normalizers", step.get("pretokenizers"))
        return [step] if inner is None else [one for item in inner for one in flat(item)]

    return [] if part is None else flat(json.loads(part.__getstate__()))


def _is_prefix(step: dict[str, Any]) -> bool:
    return bool(step["type"] == "Prepend" and step["prepend"] == _SPACE)


def _token_bytes(plain: Tokenizer) -> dict[int, bytes]:
    vocab: dict[str, int] = plain.get_vocab(with_added_tokens=False)
    if "ByteLevel" in repr(plain.pre_tokenizer):
        table = _byte_level_table()
        return {id_: token.translate(table).encode("latin-1", "replace") for token, id_ in vocab.items()}
    return {id_: _byte_fallback(token) for token, id_ in vocab.items()}


def _byte_fallback(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()


def _byte_level_table() -> dict[int, int]:
    """Returns the map from GPT-2's printable characters to the bytes they represent."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {0x100 + i: byte for i, byte in enumerate(others)}


class TextStream:
    """Incremental text of tokens. A character is returned when its last byte has arrived."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text that these tokens complete."""
        return self._decoder.decode(self._vocabulary.displayed(token_ids))

    def flush(self) -> str:
        """Returns a replacement character if the last character is incomplete, else ""."""
        return self._decoder.decode(b"", final=True)
