"""Tokens and their bytes.

1. Text never becomes a control token. Tokens and encoded text map to each other byte for byte, for all sampled tokens.
2. Half characters survive, in tokens and in streams.
3. Tokenizers that lose text are refused. Characters without tokens are dropped as the tokenizer drops them.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from agentjet.errors import ConfigError
from agentjet.rendering.vocabulary import TextStream, Vocabulary, escape
from tests import tiny

FULL = tiny.tokenizer()


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return Vocabulary(tiny.make_tokenizer(tmp_path_factory.mktemp("tiny")))


def save(made: Tokenizer, folder: Path) -> Path:
    made.save(str(folder / "tokenizer.json"))
    return folder


def joined(vocabulary: Vocabulary, tokens: tuple[int, ...] | list[int]) -> bytes:
    return b"".join(map(vocabulary.piece, tokens))


@given(text=st.text())
def test_text_is_encoded_as_text(vocabulary: Vocabulary, text: str) -> None:
    tokens = vocabulary.tokenize(text.encode())
    assert joined(vocabulary, tokens) == text.encode()
    assert not set(tokens) & set(vocabulary.control)


@pytest.mark.parametrize("literal", [*tiny.SPECIAL, *tiny.MARKERS])
def test_a_control_token_comes_from_an_escape_only(vocabulary: Vocabulary, literal: str) -> None:
    id_ = FULL.token_to_id(literal)
    assert id_ not in vocabulary.tokenize(f"a{literal}b".encode())
    assert vocabulary.tokenize(b"a" + escape(id_) + b"b") == tuple(FULL.encode(f"a{literal}b").ids)


@given(tokens=st.lists(st.integers(0, FULL.get_vocab_size() + 9)))
def test_whatever_was_sampled_has_exact_bytes(vocabulary: Vocabulary, tokens: list[int]) -> None:
    encoded = joined(vocabulary, tokens)
    again = vocabulary.tokenize(encoded)  # other tokens perhaps, but the same bytes
    assert joined(vocabulary, again) == encoded
    plain = b"".join(vocabulary.displayed_bytes(token) for token in tokens)
    special = set(range(len(tiny.SPECIAL)))
    text = FULL.decode([token for token in tokens if token not in special], skip_special_tokens=False)
    assert plain.decode(errors="replace").replace("�", "") == text.replace("�", "")


def test_an_escape_and_a_sampled_ff_byte_are_told_apart(vocabulary: Vocabulary) -> None:
    (ff,) = (id_ for id_ in range(FULL.get_vocab_size()) if vocabulary.displayed_bytes(id_) == b"\xff")
    tokens = (ff, 0, ff, ff, 1, ff)
    assert vocabulary.tokenize(joined(vocabulary, tokens)) == tokens


@given(tokens=st.lists(st.integers(0, FULL.get_vocab_size() - 1)), cuts=st.lists(st.integers(0, 20)))
def test_a_stream_gives_the_text_without_splitting_characters(
    vocabulary: Vocabulary, tokens: list[int], cuts: list[int]
) -> None:
    stream = TextStream(vocabulary)
    bounds = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    deltas = [stream.push(tokens[a:b]) for a, b in pairwise(bounds)]
    whole = b"".join(map(vocabulary.displayed_bytes, tokens)).decode(errors="replace")
    assert "".join(deltas) + stream.flush() == whole


def test_a_stream_holds_a_character_back_until_it_is_whole(vocabulary: Vocabulary) -> None:
    first, last = vocabulary.tokenize("€".encode())
    stream = TextStream(vocabulary)
    assert (stream.push([first]), stream.push([last]), stream.flush()) == ("", "€", "")
    stream.push([first])
    assert stream.flush() == "�"


def test_unicode_normal_forms_are_applied_to_text(tmp_path: Path) -> None:
    made = tiny.tokenizer()
    made.normalizer = normalizers.NFC()
    vocabulary = Vocabulary(save(made, tmp_path))
    encoded = vocabulary.encode_text("e\u0301 <think>")
    assert encoded == "é <think>".encode()
    assert joined(vocabulary, vocabulary.tokenize(encoded)) == encoded


def test_characters_without_tokens_are_dropped_as_the_tokenizer_drops_them(tmp_path: Path) -> None:
    vocab = {c: i for i, c in enumerate(sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {"Ą"}))}  # of 04
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary = Vocabulary(save(made, tmp_path))
    encoded = vocabulary.encode_text("a\x04é\x05")
    assert encoded == "aé\x05".encode()
    assert vocabulary.tokenize(encoded) == tuple(made.encode("a\x04é\x05").ids)


def test_added_tokens_of_white_space_are_text(tmp_path: Path) -> None:
    made = tiny.tokenizer()
    made.add_tokens([AddedToken("    ", normalized=False)])
    vocabulary = Vocabulary(save(made, tmp_path))
    added = made.token_to_id("    ")
    assert added not in vocabulary.control
    assert vocabulary.piece(added) == b"    "
    assert joined(vocabulary, vocabulary.tokenize(b"a    b")) == b"a    b"


def test_byte_fallback_is_understood(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}, "▁": 257, "a": 258, "▁a": 259}
    made = Tokenizer(models.BPE(vocab, [("▁", "a")], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    vocabulary = Vocabulary(save(made, tmp_path))
    tokens = vocabulary.tokenize(" a é".encode())
    assert tokens == (259, 257, 0xC3 + 1, 0xA9 + 1)
    assert joined(vocabulary, tokens) == " a é".encode()


@pytest.mark.parametrize("forms", [["NFC"], ["NFKC"], ["NFD", "NFKC"]], ids=lambda forms: "+".join(forms))
def test_unicode_forms_within_sequences_are_applied_to_text(forms: list[str], tmp_path: Path) -> None:
    made = tiny.tokenizer()
    steps = [getattr(normalizers, form)() for form in forms]
    made.normalizer = normalizers.Sequence([normalizers.Sequence(steps)])
    vocabulary = Vocabulary(save(made, tmp_path))
    for text in ("e\u0301", "ﬁ½ \u00a0", "\u1112\u1161\u11ab"):
        encoded = vocabulary.encode_text(text)
        assert encoded == str(made.normalizer.normalize_str(text)).encode()
        assert vocabulary.tokenize(encoded) == tuple(made.encode(text).ids)
        assert joined(vocabulary, vocabulary.tokenize(encoded)) == encoded


@pytest.mark.parametrize("prefix", ["prepend", "always", "first", "none"])
@given(texts=st.lists(st.text("he lo[▁\n<s>é\u00a0", max_size=6), min_size=1, max_size=4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_dummy_prefix_is_part_of_encoded_text(tmp_path: Path, prefix: str, texts: list[str]) -> None:
    made = tiny.sentencepiece(prefix)
    vocabulary = Vocabulary(save(made, tmp_path))
    texts = [text.replace("<s>", "") for text in texts]
    encoded = [vocabulary.encode_text(vocabulary.add_prefix(text, first=not at)) for at, text in enumerate(texts)]
    tokens = vocabulary.tokenize(escape(2).join(encoded))
    assert tokens == tuple(made.encode("</s>".join(texts), add_special_tokens=False).ids)
    assert joined(vocabulary, tokens) == escape(2).join(encoded)


def lossy() -> list[Tokenizer]:
    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    prefixed = tiny.tokenizer()
    prefixed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    lowered = tiny.tokenizer()
    lowered.normalizer = normalizers.Lowercase()
    return [words, prefixed, lowered]


@pytest.mark.parametrize("made", lossy(), ids=["word pieces", "adds a space", "lower case"])
def test_a_tokenizer_that_loses_text_is_refused(made: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="byte for byte"):
        Vocabulary(save(made, tmp_path))


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Vocabulary(tmp_path)


def test_what_is_put_before_a_text_is_known(vocabulary: Vocabulary, tmp_path: Path) -> None:
    """Llama's tokenizers start every text with a control token; those of Qwen and SmolLM2 do not."""
    begins = tiny.tokenizer()
    begin = FULL.token_to_id("<|endoftext|>")
    begins.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A <|im_end|>",
        special_tokens=[("<|endoftext|>", begin), ("<|im_end|>", FULL.token_to_id("<|im_end|>"))],
    )
    assert Vocabulary(save(begins, tmp_path)).opening == escape(begin)
    assert vocabulary.opening == b""


def test_encoded_text_is_shown_with_its_control_tokens(vocabulary: Vocabulary) -> None:
    tokens = FULL.encode("<|im_start|>user\né<|im_end|>").ids
    assert vocabulary.show(joined(vocabulary, tokens)) == "<|im_start|>user\né<|im_end|>"
    half = FULL.encode("é", add_special_tokens=False).ids[:1]
    assert vocabulary.show(joined(vocabulary, half) + b"a") == "�a"
    assert vocabulary.show(escape(100_000)) == ""
