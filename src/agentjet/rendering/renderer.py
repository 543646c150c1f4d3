"""Messages to tokens and back, for one model.

`render` is cheap and done for every call in full; `tokenize` is dear and done for the new suffix only (see
`timeline.ConversationTree.match`). Two rules keep both exact:

* `tokenize` then `encode_tokens` gives back the bytes that were tokenised;
* text from clients never becomes a control token.

How history is fed. `render(conversation, sampled={i: encoded bytes of a completion})` writes assistant message i as it
was sampled, so that other JSON spacing or a half character never forks the tree. With `history = "template"` the
gateway does so for recognised turns without reasoning and lets the template write (or strip) the others; with
`history = "as_sampled"` it does so for every recognised turn, and puts `generation_tail` in front of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentjet.errors import ConfigError, InvalidRequest
from agentjet.rendering.parsing import MARKERS, TOOL_FORMATS, parse_answer
from agentjet.rendering.template import ChatTemplate, Control, Part, Slot
from agentjet.rendering.vocabulary import TextStream, Vocabulary, escape
from agentjet.types import Conversation, Message, ModelCard


class Renderer:
    """Everything that depends on a model's tokenizer and chat template. Build once; keeps no state of conversations."""

    def __init__(self, card: ModelCard) -> None:
        """Raises `ConfigError` when the tokenizer or the template cannot be used."""
        if card.tool_format and card.tool_format not in TOOL_FORMATS:
            raise ConfigError(f"tool_format = {card.tool_format!r} is unknown; known: {', '.join(TOOL_FORMATS)}")
        self._card = card
        self._vocabulary = Vocabulary(card.tokenizer_path, visible=MARKERS)
        self._control = {token.literal: token for token in self._vocabulary.control.values()}
        self._template = ChatTemplate(
            card.chat_template, control=self._control, bos_token=card.bos_token, eos_token=card.eos_token
        )
        self._reasons = "</think>" in card.chat_template
        self.generation_tail = self._find_generation_tail()
        """Encoded text that the generation prompt adds to the head of an assistant turn (an opening `<think>`, say)."""
        _, opened, rest = self.generation_tail.rpartition(self._literal("<think>"))
        self._in_reasoning = self._reasons and bool(opened) and self._literal("</think>") not in rest

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
        bodies = {i: self._without_end(body) for i, body in (sampled or {}).items()}
        try:
            parts = self._template.render(conversation, slots=bodies)
        except InvalidRequest:
            if not bodies:
                raise
            parts = self._template.render(conversation)
        return self._encode(parts, bodies)

    def tokenize(self, encoded: bytes) -> tuple[int, ...]:
        """Token ids of a piece of encoded text: control tokens where it has escapes, ordinary text elsewhere."""
        return self._vocabulary.tokenize(encoded)

    def encode_tokens(self, token_ids: Sequence[int]) -> bytes:
        """The exact encoded text of tokens."""
        return b"".join(map(self._vocabulary.piece, token_ids))

    def pieces(self, token_ids: Sequence[int]) -> list[bytes]:
        """`encode_tokens` token by token: what `ConversationTree.add` takes."""
        return [self._vocabulary.piece(token_id) for token_id in token_ids]

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
        """
        return parse_answer(
            text,
            reasons=self._reasons,
            in_reasoning=self._in_reasoning,
            tool_format=self._card.tool_format if conversation.tools else "",
            id_prefix=id_prefix,
        )

    def _encode(self, parts: Sequence[Part], bodies: Mapping[int, bytes]) -> bytes:
        encoded: list[bytes] = []
        for before, part, after in zip((None, *parts), parts, (*parts[1:], None), strict=False):
            if isinstance(part, Slot):
                encoded.append(bodies[part.index])
            elif isinstance(part, Control):
                encoded.append(escape(self._control[part.literal].id))
            else:
                encoded.append(self._encode_text(self._strip(part.text, before, after)))
        return b"".join(encoded)

    def _strip(self, text: str, before: Part | None, after: Part | None) -> str:
        """White space that a neighbouring control token eats is gone before it is tokenised."""
        if isinstance(before, Control) and self._control[before.literal].strips_right:
            text = text.lstrip()
        if isinstance(after, Control) and self._control[after.literal].strips_left:
            text = text.rstrip()
        return text

    def _encode_text(self, text: str) -> bytes:
        try:
            return self._vocabulary.encode_text(text)
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"a message holds half a surrogate pair, which is no text: {error.object[error.start : error.end]!a}",
                code="invalid_text",
                param="messages",
            ) from error

    def _without_end(self, body: bytes) -> bytes:
        for token_id in self._card.end_tokens:
            if body.endswith(escape(token_id)):
                return body[: -len(escape(token_id))]
        return body

    def _literal(self, literal: str) -> bytes:
        """A literal in encoded text: a control token where the vocabulary has one."""
        return escape(self._control[literal].id) if literal in self._control else literal.encode()

    def _find_generation_tail(self) -> bytes:
        """Compare the generation prompt with how the template writes an assistant turn that was."""
        question = Message("user", "x")
        try:
            asked = self._encode(self._template.render(Conversation((question,))), {})
            answered = self._template.render(
                Conversation((question, Message("assistant"), question)), slots=(1,), generation_prompt=False
            )
        except InvalidRequest:
            return b""
        at = next((i for i, part in enumerate(answered) if isinstance(part, Slot)), 0)
        head = self._encode(answered[:at], {})
        return asked[len(head) :] if head and asked.startswith(head) else b""
