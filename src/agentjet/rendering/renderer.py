"""Messages to tokens and back, for one model.

`render` is cheap and done for every call in full; `tokenize` is dear and done for the new suffix only (see
`timeline.ConversationTree.match`). Two rules keep both exact:

* `tokenize` then `encode_tokens` gives back the bytes that were tokenised;
* text from clients never becomes a control token.

How history is fed. `render(conversation, sampled={i: encoded bytes of a completion})` writes assistant message i as it
was sampled, right behind the generation prompt, so that other JSON spacing, a half character or a space that the
template puts around answers never forks the tree. With `history = "template"` the gateway does so for recognised turns
whose reasoning the template keeps, or that have none, and lets the template write (and strip) the others; with
`history = "as_sampled"` it does so for every recognised turn. It puts `generation_tail` in front of each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentjet.errors import ConfigError, InvalidRequest
from agentjet.rendering.chat_template import OWN_VARIABLES, BodySlot, ChatTemplate, Rendered
from agentjet.rendering.grammar import Style, write_grammar
from agentjet.rendering.parser import MARKERS, TOOL_FORMATS, parse_completion
from agentjet.rendering.vocabulary import TextStream, Vocabulary, escape
from agentjet.types import Constraint, Conversation, Message, ModelInfo, ToolCall

_MARK = "\U000f1fff"
"""Stands around what is looked for in a rendered conversation; private use, so nobody writes it."""


@dataclass(frozen=True, slots=True)
class _Body:
    """What a call sampled, and the end token (or nothing) that it was sampled with; templates write their own."""

    encoded: bytes
    end: bytes


class Renderer:
    """Everything that depends on a model's tokenizer and chat template. Build once; keeps no state of conversations."""

    def __init__(self, card: ModelInfo) -> None:
        """Raises `ConfigError` when the tokenizer or the template cannot be used."""
        if card.tool_format and card.tool_format not in TOOL_FORMATS:
            raise ConfigError(f"tool_format = {card.tool_format!r} is unknown; known: {', '.join(TOOL_FORMATS)}")
        self._card = card
        self._vocabulary = Vocabulary(card.tokenizer_path, visible=MARKERS)
        self._control = {token.literal: token for token in self._vocabulary.control.values()}
        self._escapes = {literal: escape(token.id) for literal, token in self._control.items()}
        self._strips_left = {literal for literal, token in self._control.items() if token.strips_left}
        self._strips_right = {literal for literal, token in self._control.items() if token.strips_right}
        self._template = ChatTemplate(
            card.chat_template, control=self._control, bos_token=card.bos_token, eos_token=card.eos_token
        )
        self.context_length = card.context_length
        self.reasons = "</think>" in card.chat_template
        """The model may think in a block of its own before it answers."""
        self.generation_tail = self._find_generation_tail()
        """Encoded text that the generation prompt adds to the head of an assistant turn (an opening `<think>`, say)."""
        self._answer_head = self._find_head(Message("assistant"), Message("user", "x")) or b""
        """The reverse: what the template puts before an answer that the generation prompt has not (Mistral's space)."""
        call = ToolCall("call00000", "x", "{}")
        self._call_head = self._find_head(
            Message("assistant", tool_calls=(call,)), Message("tool", "x", tool_call_id=call.id)
        )
        """The same before the name of a first tool call; None where that cannot be told."""
        _, opened, rest = self.generation_tail.rpartition(self._literal("<think>"))
        self._in_reasoning = self.reasons and bool(opened) and self._literal("</think>") not in rest

    def render(self, conversation: Conversation, *, sampled: Mapping[int, bytes] | None = None) -> bytes:
        """The conversation with the generation prompt, as encoded text (see `types.ESCAPE`).

        `sampled[i]` is the whole body of assistant message i as encoded text; an end token at its end is left to the
        template. A template that cannot do with open slots is given the plain messages.

        Raises `InvalidRequest`: `template_error` when the template refuses the conversation, `tools_not_supported`
        when it would ignore tools, `invalid_text` when a message is not Unicode.
        """
        if conversation.tools and not self._card.tool_format:
            raise InvalidRequest(
                f"model {self._card.name} takes no tools: its template ignores them, or writes calls in an unknown way",
                code="tools_not_supported",
                param="tools",
            )
        bodies = {i: self._body(encoded) for i, encoded in (sampled or {}).items()}
        if bodies:
            for slots, call_slots in self._placements(conversation, bodies):
                try:
                    return self._encode(self._template.render(conversation, slots=slots, call_slots=call_slots), bodies)
                except InvalidRequest:
                    continue
        return self._encode(self._template.render(conversation), {})

    def ignores(self, conversation: Conversation, variables: Mapping[str, Any]) -> bool:
        """True if `variables` for the chat template change nothing in the prompt of `conversation`."""
        if conversation.prompt is not None or OWN_VARIABLES & set(variables):
            return conversation.prompt is not None
        plain = self._template.render(conversation)
        return plain == self._template.render(conversation, variables=variables)

    def raw(self, prompt: str | Sequence[int]) -> bytes:
        """A raw prompt as encoded text: text with what the tokenizer puts before a text, token ids as they are.

        Control tokens come from ids only; written in text they stay text. Raises `InvalidRequest`.
        """
        if isinstance(prompt, str):
            encoded = self._vocabulary.opening + self.encode_prompt_text(self._vocabulary.begin(prompt, first=True))
        else:
            unknown = next((token_id for token_id in prompt if not self._vocabulary.knows(token_id)), None)
            if unknown is not None:
                raise InvalidRequest(f"prompt holds {unknown}, which is no token of this model.", param="prompt")
            encoded = self.encode_tokens(prompt)
        if not encoded:
            raise InvalidRequest("prompt is empty: there is nothing to continue.", param="prompt")
        return encoded

    def encode_prompt_text(self, text: str) -> bytes:
        """Text of a raw prompt as encoded text. Raises `InvalidRequest`."""
        return self._encode_text(text, param="prompt")

    def strip_end_token(self, encoded: bytes) -> bytes:
        """A completion's encoded text without the end token that may be its last."""
        return self._body(encoded).encoded

    def closes_reasoning(self, encoded: bytes) -> bool:
        """True if a completion's encoded text has an end of reasoning, with or without reasoning before it."""
        return b"</think>" in encoded or self._literal("</think>") in encoded

    def encoded_prefix(self, token_ids: Sequence[int], text: str) -> bytes | None:
        """Encoded text of the beginning of a completion that people read as `text`; None if it begins otherwise."""
        left, parts = text.encode(), []
        for token_id, piece in zip(token_ids, self._vocabulary.pieces(token_ids), strict=True):
            if not left:
                break
            raw = self._vocabulary.raw(token_id)
            if not left.startswith(raw) and not raw.startswith(left):
                return None
            parts.append(piece if left.startswith(raw) else left)
            left = left[len(raw) :]
        return None if left else b"".join(parts)

    def show(self, encoded: bytes) -> str:
        """Encoded text for people: control tokens by name, broken characters replaced."""
        return self._vocabulary.show(encoded)

    def _placements(self, conversation: Conversation, bodies: Collection[int]) -> Iterator[tuple[set[int], set[int]]]:
        """Where the slots may go: in place of each whole message, or, for templates that count tool-call messages
        apart from answers, inside those.
        """
        yield set(bodies), set()
        calling = {i for i in bodies if conversation.messages[i].tool_calls}
        if calling and self._call_head is not None:
            yield set(bodies) - calling, calling

    def keeps_reasoning(self, conversation: Conversation) -> frozenset[int]:
        """The assistant messages whose reasoning the template writes; of others it may strip it.

        Costs a rendering when there is reasoning at all. Empty when the template refuses the conversation.
        """
        marks = {i: f"{_MARK}{i}{_MARK}" for i, message in enumerate(conversation.messages) if message.reasoning}
        if not marks:
            return frozenset()
        messages = tuple(
            replace(message, reasoning=marks.get(i, "")) for i, message in enumerate(conversation.messages)
        )
        try:
            rendered = self._template.render(replace(conversation, messages=messages))
        except InvalidRequest:
            return frozenset()
        text = "".join(rendered.texts)
        return frozenset(i for i, mark in marks.items() if mark in text)

    def tokens_lower_bound(self, num_bytes: int) -> int:
        """How many tokens encoded text of this length is at least."""
        return -(-num_bytes // self._vocabulary.longest_piece)

    def counted_lower_bound(self, encoded: bytes, enough: int) -> int:
        """The same of a text, closer, in time rather than in memory; stops counting beyond `enough`."""
        return self._vocabulary.tokens_lower_bound(encoded, enough)

    def tokenize(self, encoded: bytes) -> tuple[int, ...]:
        """Token ids of a piece of encoded text: control tokens where it has escapes, ordinary text elsewhere."""
        return self._vocabulary.tokenize(encoded)

    def encode_tokens(self, token_ids: Sequence[int]) -> bytes:
        """The exact encoded text of tokens."""
        return b"".join(self._vocabulary.pieces(token_ids))

    def pieces(self, token_ids: Sequence[int]) -> list[bytes]:
        """`encode_tokens` token by token: what `ConversationTree.add` takes."""
        return self._vocabulary.pieces(token_ids)

    def text(self, token_ids: Sequence[int]) -> str:
        """Text for people: special tokens are left out (but what parsers look for), broken characters replaced."""
        return b"".join(map(self._vocabulary.raw, token_ids)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token as people would see it, special tokens by name."""
        return self._vocabulary.raw(token_id, literals=True)

    def stream(self) -> TextStream:
        """The `text` of tokens that come in pieces."""
        return TextStream(self._vocabulary)

    def parse(self, token_ids: Sequence[int], conversation: Conversation, *, id_prefix: str = "call") -> Message:
        """The assistant message that a completion of `conversation` is."""
        return self.parse_text(self.text(token_ids), conversation, id_prefix=id_prefix)

    def parse_text(self, text: str, conversation: Conversation, *, id_prefix: str = "call") -> Message:
        """`parse` of a completion's text, for one that a stop string cut short.

        Tool calls are looked for when the conversation offers tools, reasoning when the template knows it; text that
        is not well-formed stays content. The calls' ids are `<id_prefix>_0`, `<id_prefix>_1`, ...
        What continues a raw prompt is content as it stands.
        """
        if conversation.prompt is not None:
            return Message("assistant", text)
        return parse_completion(
            text,
            reasons=self.reasons,
            in_reasoning=self._in_reasoning,
            tool_format=self._card.tool_format if conversation.tools else "",
            id_prefix=id_prefix,
        )

    def grammar(self, conversation: Conversation, constraint: Constraint) -> str:
        """The grammar of a completion of `conversation`; empty when it may be anything.

        Raises `InvalidRequest`, naming the parameter, for a schema that cannot be followed.
        """
        style = Style(self._card.tool_format, self.reasons, self._in_reasoning, self._control_id)
        return write_grammar(constraint, conversation.tools, style)

    def _control_id(self, literal: str) -> int | None:
        return self._control[literal].id if literal in self._control else None

    def _encode(self, rendered: Rendered, bodies: Mapping[int, _Body]) -> bytes:
        texts, marks = self._stripped(rendered), rendered.marks
        pieces = [b""] * (len(texts) + len(marks))
        encode = str.encode if self._vocabulary.is_plain("".join(texts)) else self._encode_text
        pieces[::2] = map(encode, texts)
        for i, mark in enumerate(marks):
            if isinstance(mark, BodySlot):
                self._fill(pieces, 2 * i + 1, mark, bodies[mark.index], marks[i + 1] if i + 1 < len(marks) else "")
            else:
                pieces[2 * i + 1] = self._escapes[mark]
        return b"".join(pieces)

    def _fill(self, pieces: list[bytes], at: int, slot: BodySlot, body: _Body, then: str | BodySlot) -> None:
        """Put a body into its place, instead of what the template wrote of the turn beyond the generation prompt: the
        body has its own. It replaces the text behind it, too, when that is the rest of a tool call, or white space
        before the end token that it was sampled without.
        """
        self._cut_head(pieces, at, slot)
        pieces[at] = body.encoded
        end = "" if isinstance(then, BodySlot) else then
        if slot.in_call and not (end and self._control[end].id in self._card.end_tokens):
            # Where a tool call ends that the template does not end with an end token is not guessed.
            raise InvalidRequest("the model's chat template does not end tool calls", code="template_error")
        if slot.in_call or (end and self._escapes[end] == body.end and not pieces[at + 1].strip()):
            pieces[at + 1] = b""

    def _cut_head(self, pieces: list[bytes], at: int, slot: BodySlot) -> None:
        head = self._call_head if slot.in_call else self._answer_head
        assert head is not None, "slots are put inside calls only where the head is known"
        start, before = at, b""
        while start and len(before) < len(head):
            start -= 1
            before = pieces[start] + before
        if before.endswith(head):
            pieces[start:at] = [before.removesuffix(head), *[b""] * (at - start - 1)][: at - start]
        elif slot.in_call:
            raise InvalidRequest("the model's chat template writes this call in another way", code="template_error")

    def _stripped(self, rendered: Rendered) -> list[str]:
        """The texts as they are tokenised: without the white space that a neighbouring control token eats, with the
        tokenizer's dummy prefix.
        """
        texts = rendered.texts
        if self._strips_right:
            befores: list[str | BodySlot] = ["", *rendered.marks]
            texts = [t.lstrip() if m in self._strips_right else t for m, t in zip(befores, texts, strict=True)]
        if self._strips_left:
            afters: list[str | BodySlot] = [*rendered.marks, ""]
            texts = [t.rstrip() if m in self._strips_left else t for t, m in zip(texts, afters, strict=True)]
        return [
            text if at and isinstance(rendered.marks[at - 1], BodySlot) else self._vocabulary.begin(text, first=not at)
            for at, text in enumerate(texts)
        ]

    def _encode_text(self, text: str, *, param: str = "messages") -> bytes:
        try:
            return self._vocabulary.encode_text(text)
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"{param} hold half a surrogate pair, which is no text: {error.object[error.start : error.end]!a}",
                code="invalid_text",
                param=param,
            ) from error

    def _body(self, encoded: bytes) -> _Body:
        for token_id in self._card.end_tokens:
            end = escape(token_id)
            if encoded.endswith(end):
                return _Body(encoded[: -len(end)], end)
        return _Body(encoded, b"")

    def _literal(self, literal: str) -> bytes:
        """A literal in encoded text: a control token where the vocabulary has one."""
        return self._escapes.get(literal) or literal.encode()

    def _find_generation_tail(self) -> bytes:
        asked, head = self._heads(Message("assistant"), Message("user", "x"))
        return asked[len(head) :] if head and asked.startswith(head) else b""

    def _find_head(self, answer: Message, then: Message) -> bytes | None:
        asked, head = self._heads(answer, then)
        return head[len(asked) :] if asked and head.startswith(asked) else None

    def _heads(self, answer: Message, then: Message) -> tuple[bytes, bytes]:
        """A question with the generation prompt, and what the template writes of it before the slot of its answer."""
        question = Message("user", "x")
        slots, call_slots = ((), (1,)) if answer.tool_calls else ((1,), ())
        try:
            asked = self._encode(self._template.render(Conversation((question,))), {})
            answered = self._template.render(
                Conversation((question, answer, then)), slots=slots, call_slots=call_slots, generation_prompt=False
            )
        except InvalidRequest:
            return b"", b""
        at = next((i for i, mark in enumerate(answered.marks) if isinstance(mark, BodySlot)), None)
        if at is None:
            return asked, b""
        return asked, self._encode(Rendered(answered.texts[: at + 1], answered.marks[:at]), {})
