"""Converts the messages of one model to tokens and back.

`render` is cheap and runs on the whole conversation of every call. `tokenize` is expensive and runs on the new suffix
only (see `timeline.ConversationTree.match`). Two rules keep tokens exact:

* `encode_tokens` of `tokenize` returns the same bytes;
* text from clients never becomes a control token.

History. `render(conversation, sampled={i: encoded text of a completion})` writes assistant message i as it was sampled,
directly after the generation prompt. Differences such as JSON spacing, half a character or a space that the template
adds then do not fork the tree. Before each completion, the gateway adds `generation_tail`.

* With `history = "as_sampled"`, the gateway does this for every recognised turn.
* With `history = "template"`, it does this for recognised turns without reasoning, or whose reasoning the template
  keeps. The template writes the other turns, and can remove their reasoning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentjet.errors import ConfigError, InvalidRequest
from agentjet.rendering.chat_template import MARK, OWN_VARIABLES, BodySlot, ChatTemplate, Rendered
from agentjet.rendering.grammar import MARKERS, TOOL_FORMATS, OutputStyle, parse_completion
from agentjet.rendering.vocabulary import TextStream, Vocabulary, escape
from agentjet.types import Conversation, Message, ModelInfo, ToolCall


class Renderer:
    """The tokenizer and the chat template of a model. Stateless: build it once for all conversations."""

    def __init__(self, model_info: ModelInfo) -> None:
        """Raises `ConfigError` if the tokenizer or the template cannot be used."""
        if model_info.tool_format and model_info.tool_format not in TOOL_FORMATS:
            raise ConfigError(f"tool_format = {model_info.tool_format!r} is unknown; known: {', '.join(TOOL_FORMATS)}")
        self.model = model_info
        vocabulary = self._vocabulary = Vocabulary(model_info.tokenizer_path, visible=MARKERS)
        self.pieces, self.show = vocabulary.pieces, vocabulary.show
        self.tokenize, self.counted_lower_bound = vocabulary.tokenize, vocabulary.counted_lower_bound
        self._control = {token.literal: token for token in self._vocabulary.control.values()}
        self._escapes = {literal: escape(token.id) for literal, token in self._control.items()}
        self._strips_left = {literal for literal, token in self._control.items() if token.strips_left}
        self._strips_right = {literal for literal, token in self._control.items() if token.strips_right}
        self._template = ChatTemplate(
            model_info.chat_template,
            control=self._control,
            bos_token=model_info.bos_token,
            eos_token=model_info.eos_token,
        )
        self.context_length = model_info.context_length
        self.reasons = "</think>" in model_info.chat_template
        """True if the model can write a reasoning block before its answer."""
        self.generation_tail = self._find_generation_tail()
        """Encoded text that the generation prompt has after the head of an assistant turn, such as `<think>`."""
        self._answer_head = self._find_head(Message("assistant"), Message("user", "x")) or b""
        """Encoded text that the template writes before an answer, unlike the generation prompt: Mistral's space."""
        call = ToolCall("call00000", "x", "{}")
        self._call_head = self._find_head(
            Message("assistant", tool_calls=(call,)), Message("tool", "x", tool_call_id=call.id)
        )
        """The same before the name of the first tool call; None if it is unknown."""
        _, opened, rest = self.generation_tail.rpartition(self._literal("<think>"))
        in_reasoning = self.reasons and bool(opened) and self._literal("</think>") not in rest
        ids = {literal: token.id for literal, token in self._control.items()}
        self.style = OutputStyle(model_info.tool_format, self.reasons, in_reasoning, ids)

    def render(self, conversation: Conversation, *, sampled: Mapping[int, bytes] | None = None) -> bytes:
        """Returns the conversation with the generation prompt as encoded text (see `types.ESCAPE`).

        `sampled[i]` is the whole body of assistant message i as encoded text; the template writes the end token. If the
        template does not accept slots, it renders the messages instead.

        Raises `InvalidRequest`: `template_error` if the template refuses the conversation, `tools_not_supported` if it
        ignores tools, `invalid_text` if a message is not Unicode.
        """
        if conversation.tools and not self.model.tool_format:
            raise InvalidRequest(
                f"model {self.model.name} has no tools: its template ignores them, or has an unknown tool format",
                code="tools_not_supported",
                param="tools",
            )
        bodies = {i: self._split_end(encoded) for i, encoded in (sampled or {}).items()}
        # Some templates treat messages with tool calls differently from answers: these get call slots.
        calling = {i for i in bodies if conversation.messages[i].tool_calls and self._call_head is not None}
        attempts = [set[int](), calling] if calling else [set[int]()]
        for call_slots in attempts if bodies else ():
            try:
                rendered = self._template.render(conversation, slots=bodies.keys() - call_slots, call_slots=call_slots)
                return self._encode(rendered, bodies)
            except InvalidRequest:
                continue
        return self._encode(self._template.render(conversation), {})

    def ignores(self, conversation: Conversation, variables: Mapping[str, Any]) -> bool:
        """True if the template variables `variables` do not change the prompt of `conversation`."""
        if conversation.prompt is not None or OWN_VARIABLES & set(variables):
            return conversation.prompt is not None
        return self._template.render(conversation) == self._template.render(conversation, variables=variables)

    def tokenize_answer(self, conversation: Conversation, answer: Message) -> tuple[int, ...]:
        """Returns the tokens of a given answer to `conversation`: what the template writes after the generation prompt,
        up to the end token.

        Raises `InvalidRequest` (`template_error`) if the template writes an answer in another place or without an end.
        """
        prompt = self.render(conversation)
        answered = replace(conversation, messages=(*conversation.messages, answer))
        whole = self._encode(self._template.render(answered, generation_prompt=False), {})
        if not whole.startswith(prompt):
            hint = " (it opens a reasoning block: give reasoning_content)" if self.generation_tail else ""
            raise InvalidRequest(
                f"the model's chat template does not write this answer after its generation prompt{hint}",
                code="template_error",
                param="messages",
            )
        tokens = self.tokenize(whole[len(prompt) :])
        end = next((i for i, token in enumerate(tokens) if token in self.model.end_tokens), None)
        if end is None:
            raise InvalidRequest(
                "the model's chat template ends this answer without an end token",
                code="template_error",
                param="messages",
            )
        return tokens[: end + 1]

    def encode_raw_prompt(self, prompt: str | Sequence[int]) -> bytes:
        """Returns a raw prompt as encoded text: text after the tokens with which the tokenizer opens it, ids unchanged.

        Only ids give control tokens; their literals in text stay text. Raises `InvalidRequest`.
        """
        if isinstance(prompt, str):
            encoded = self._vocabulary.opening + self.encode_prompt_text(
                self._vocabulary.add_prefix(prompt, first=True)
            )
        else:
            unknown = next((token_id for token_id in prompt if not self._vocabulary.knows(token_id)), None)
            if unknown is not None:
                raise InvalidRequest(
                    f"prompt contains {unknown}, which is not a token id of this model.", param="prompt"
                )
            encoded = self.encode_tokens(prompt)
        if not encoded:
            raise InvalidRequest("prompt is empty.", param="prompt")
        return encoded

    def encode_prompt_text(self, text: str) -> bytes:
        """Returns the text of a raw prompt as encoded text. Raises `InvalidRequest`."""
        return self._encode_text(text, param="prompt")

    def strip_end_token(self, encoded: bytes) -> bytes:
        """Returns the encoded text of a completion without its end token, if it has one."""
        return self._split_end(encoded)[0]

    def closes_reasoning(self, encoded: bytes) -> bool:
        """True if the encoded text of a completion contains the end of a reasoning block, even of an empty one."""
        return b"</think>" in encoded or self._literal("</think>") in encoded

    def encoded_prefix(self, token_ids: Sequence[int], text: str) -> bytes | None:
        """Returns the encoded text of the start of a completion that is shown as `text`, or None."""
        left, parts = text.encode(), []
        for token_id, piece in zip(token_ids, self._vocabulary.pieces(token_ids), strict=True):
            if not left:
                break
            raw = self._vocabulary.displayed_bytes(token_id)
            if not left.startswith(raw) and not raw.startswith(left):
                return None
            parts.append(piece if left.startswith(raw) else left)
            left = left[len(raw) :]
        return None if left else b"".join(parts)

    def keeps_reasoning(self, conversation: Conversation) -> frozenset[int]:
        """Returns the assistant messages whose reasoning the template keeps.

        Renders the conversation if it has reasoning. Empty if the template refuses the conversation.
        """
        marks = {i: f"{MARK}{i}{MARK}" for i, message in enumerate(conversation.messages) if message.reasoning}
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

    def encode_tokens(self, token_ids: Sequence[int]) -> bytes:
        """Returns the exact encoded text of tokens."""
        return b"".join(self._vocabulary.pieces(token_ids))

    def text(self, token_ids: Sequence[int]) -> str:
        """Returns text without special tokens, except those in `grammar.MARKERS`; replaces incomplete characters."""
        return b"".join(map(self._vocabulary.displayed_bytes, token_ids)).decode(errors="replace")

    @property
    def control_tokens(self) -> dict[int, str]:
        """The names of the control tokens by id."""
        return {id_: self.token_bytes(id_).decode() for id_ in self._vocabulary.control}

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the displayed bytes of a token; a special token has its name."""
        return self._vocabulary.displayed_bytes(token_id, literals=True)

    def stream(self) -> TextStream:
        """Returns an incremental `text` for streaming."""
        return TextStream(self._vocabulary)

    def parse(self, token_ids: Sequence[int], conversation: Conversation) -> Message:
        """Returns a completion of `conversation` as an assistant message."""
        return self.parse_text(self.text(token_ids), conversation)

    def parse_text(self, text: str, conversation: Conversation, *, id_prefix: str = "call") -> Message:
        """As `parse`, for the text of a completion, such as one cut by a stop string.

        Parses tool calls if the conversation has tools, and reasoning if the template has it. Malformed text stays
        content. The ids of tool calls are `<id_prefix>_0`, `<id_prefix>_1`, ... The completion of a raw prompt is
        content without parsing.
        """
        if conversation.prompt is not None:
            return Message("assistant", text)
        return parse_completion(
            text,
            reasons=self.reasons,
            in_reasoning=self.style.in_reasoning,
            tool_format=self.model.tool_format if conversation.tools else "",
            id_prefix=id_prefix,
        )

    def _encode(self, rendered: Rendered, bodies: Mapping[int, tuple[bytes, bytes]]) -> bytes:
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

    def _fill(
        self, pieces: list[bytes], at: int, slot: BodySlot, body: tuple[bytes, bytes], then: str | BodySlot
    ) -> None:
        """Replaces a slot by its body, and removes the template's text that the body already contains.

        Such text is what follows the generation prompt, the rest of a tool call after a call slot, and white space
        before the end token.
        """
        self._cut_head(pieces, at, slot)
        pieces[at], own_end = body
        end = "" if isinstance(then, BodySlot) else then
        if slot.in_call and not (end and self._control[end].id in self.model.end_tokens):
            # Without an end token after it, the end of a tool call is unknown.
            raise InvalidRequest("the model's chat template does not end tool calls", code="template_error")
        if slot.in_call or (end and self._escapes[end] == own_end and not pieces[at + 1].strip()):
            pieces[at + 1] = b""

    def _cut_head(self, pieces: list[bytes], at: int, slot: BodySlot) -> None:
        head = self._call_head if slot.in_call else self._answer_head
        assert head is not None, "call slots need a known head"
        start, before = at, b""
        while start and len(before) < len(head):
            start -= 1
            before = pieces[start] + before
        if before.endswith(head):
            pieces[start:at] = [before.removesuffix(head), *[b""] * (at - start - 1)][: at - start]
        elif slot.in_call:
            raise InvalidRequest("the model's chat template writes this tool call differently", code="template_error")

    def _stripped(self, rendered: Rendered) -> list[str]:
        """Returns the texts as they are tokenised.

        White space that a neighbouring control token strips is removed; the tokenizer's dummy prefix is added.
        """
        texts = rendered.texts
        if self._strips_right:
            befores: list[str | BodySlot] = ["", *rendered.marks]
            texts = [t.lstrip() if m in self._strips_right else t for m, t in zip(befores, texts, strict=True)]
        if self._strips_left:
            afters: list[str | BodySlot] = [*rendered.marks, ""]
            texts = [t.rstrip() if m in self._strips_left else t for t, m in zip(texts, afters, strict=True)]
        return [
            text
            if at and isinstance(rendered.marks[at - 1], BodySlot)
            else self._vocabulary.add_prefix(text, first=not at)
            for at, text in enumerate(texts)
        ]

    def _encode_text(self, text: str, *, param: str = "messages") -> bytes:
        try:
            return self._vocabulary.encode_text(text)
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"{param} contains an unpaired surrogate, which is not text: {error.object[error.start : error.end]!a}",
                code="invalid_text",
                param=param,
            ) from error

    def _split_end(self, encoded: bytes) -> tuple[bytes, bytes]:
        """Returns a completion without its end token, and the end token or b"". Templates write that themselves."""
        ends = (escape(token_id) for token_id in self.model.end_tokens)
        end = next((end for end in ends if encoded.endswith(end)), b"")
        return encoded.removesuffix(end), end

    def _literal(self, literal: str) -> bytes:
        """Returns a literal as encoded text: as a control token if the vocabulary has it."""
        return self._escapes.get(literal) or literal.encode()

    def _find_generation_tail(self) -> bytes:
        prompt, head = self._heads(Message("assistant"), Message("user", "x"))
        return prompt[len(head) :] if head and prompt.startswith(head) else b""

    def _find_head(self, answer: Message, then: Message) -> bytes | None:
        prompt, head = self._heads(answer, then)
        return head[len(prompt) :] if prompt and head.startswith(prompt) else None

    def _heads(self, answer: Message, then: Message) -> tuple[bytes, bytes]:
        """Returns a question with the generation prompt, and the template's text of it up to the slot of the answer."""
        question = Message("user", "x")
        slots, call_slots = ((), (1,)) if answer.tool_calls else ((1,), ())
        try:
            prompt = self._encode(self._template.render(Conversation((question,))), {})
            answered = self._template.render(
                Conversation((question, answer, then)), slots=slots, call_slots=call_slots, generation_prompt=False
            )
        except InvalidRequest:
            return b"", b""
        at = next((i for i, mark in enumerate(answered.marks) if isinstance(mark, BodySlot)), None)
        if at is None:
            return prompt, b""
        return prompt, self._encode(Rendered(answered.texts[: at + 1], answered.marks[:at]), {})
