"""Messages to tokens and back: `Renderer`, with the chat template of a model and the parser of its completions.

`render` is cheap and runs on the whole conversation of every call. `tokenize` is expensive and runs on the new suffix
only (see `timeline.ConversationTree.match`). Two rules keep tokens exact:

* `encode_tokens` of `tokenize` returns the same bytes;
* text from clients never becomes a control token.

History. `render(conversation, sampled={i: encoded text of a completion})` writes assistant message i as it was sampled,
directly after the generation prompt. Differences such as JSON spacing, half a character or a space that the template
adds then do not fork the tree. Before each completion, `front.prompts` adds `generation_tail`.

* With `history = "as_sampled"`, `front.prompts` does this for every recognised turn.
* With `history = "template"`, it does this for recognised turns without reasoning, or whose reasoning the template
  keeps. The template writes the other turns, and can remove their reasoning.

`chat_template` has the template and the trial that finds its tool format, `formats` the formats and the parser.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentjet.errors import ConfigError, InvalidRequest
from agentjet.rendering.chat_template import (
    MARK,
    OWN_VARIABLES,
    QUESTION,
    RESULT,
    BodySlot,
    ChatTemplate,
    Rendered,
    find_reasoning,
    try_tools,
)
from agentjet.rendering.formats import (
    MARKERS,
    TOOL_FORMATS,
    OutputStyle,
    ReasoningFormat,
    literals_of,
)
from agentjet.rendering.parser import MessageReader, split_calls
from agentjet.rendering.vocabulary import TextStream, Vocabulary, escape
from agentjet.types import ESCAPE, Conversation, Message, ModelInfo, ToolCall


class Renderer:
    """The tokenizer and the chat template of a model. Stateless: build it once for all conversations."""

    def __init__(self, model_info: ModelInfo) -> None:
        """Raises `ConfigError` if the tokenizer or the template cannot be used."""
        if model_info.tool_format and model_info.tool_format not in TOOL_FORMATS:
            raise ConfigError(f"tool_format = {model_info.tool_format!r} is unknown; known: {', '.join(TOOL_FORMATS)}")
        self.model = model_info
        tool_format, source = model_info.tool_format, model_info.chat_template
        vocabulary = self._vocabulary = Vocabulary(model_info.tokenizer_path)
        self._control = {token.literal: token for token in self._vocabulary.control.values()}
        reasoning = find_reasoning(source, self._control)
        vocabulary.display([*MARKERS, literals_of(tool_format, reasoning)], but=model_info.end_tokens)
        self.pieces, self.show = vocabulary.pieces, vocabulary.show
        self.tokenize, self.counted_lower_bound = vocabulary.tokenize, vocabulary.counted_lower_bound
        self._escapes = {literal: escape(token.id) for literal, token in self._control.items()}
        self._strips_left = {literal for literal, token in self._control.items() if token.strips_left}
        self._strips_right = {literal for literal, token in self._control.items() if token.strips_right}
        self._template = ChatTemplate(
            source,
            control=self._control,
            bos_token=model_info.bos_token,
            eos_token=model_info.eos_token,
            tool_format=tool_format,
            trial=try_tools(source, tool_format) if tool_format else None,
        )
        self.context_length = model_info.context_length
        self._form = TOOL_FORMATS[tool_format] if tool_format else None
        self._call_ends = {
            self._escapes[end] for end in (self._form.ends if self._form else ()) if end in self._escapes
        }
        self._find_layout()
        ids = {literal: token.id for literal, token in self._control.items()}
        in_reasoning = reasoning is not None and self._opens(reasoning)
        self.style = OutputStyle(tool_format, reasoning, in_reasoning, ids)

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
        own_ids = self._own_ids(conversation, bodies)
        # Some templates treat messages with tool calls differently from answers: these get call slots.
        calling = {i for i in bodies if conversation.messages[i].tool_calls and self._call_head is not None}
        attempts = [calling, set[int]()] if self._needs_calls else [set[int](), calling]
        for call_slots in attempts if bodies else ():
            try:
                rendered = self._template.render(
                    conversation, slots=bodies.keys() - call_slots, call_slots=call_slots, own_ids=own_ids
                )
                return self._encode(rendered, bodies)
            except InvalidRequest:
                continue
        return self._encode(self._template.render(conversation, own_ids=own_ids), {})

    def _own_ids(self, conversation: Conversation, bodies: Mapping[int, tuple[bytes, bytes]]) -> dict[str, str]:
        """Returns the ids of calls as the model wrote them, by the id that the agent got."""
        ids = dict[str, str]()
        if self._form is None or not (self._form.id or "{id}" in self._form.call):
            return ids
        for i, (body, _) in bodies.items():
            calls = conversation.messages[i].tool_calls
            found = split_calls(self.show(body), self.model.tool_format, conversation.tools)[1] if calls else []
            if len(found) == len(calls):
                ids.update({call.id: own.id for call, own in zip(calls, found, strict=True) if own.id})
        return ids

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
        reasoning = self.style.reasoning
        return reasoning is not None and any(
            closing in encoded for closing in (reasoning.closing.encode(), self._literal(reasoning.closing))
        )

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
        """Returns text without special tokens, except those in `MARKERS`; replaces incomplete characters."""
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
        return self.reader(conversation).message(text, id_prefix=id_prefix)

    def reader(self, conversation: Conversation) -> MessageReader:
        """Returns a reader of one completion of `conversation`, for `parse_text` while the text grows."""
        if conversation.prompt is not None:
            return MessageReader()
        return MessageReader(
            reasoning=self.style.reasoning,
            in_reasoning=self.style.in_reasoning,
            tool_format=self.model.tool_format if conversation.tools else "",
            tools=conversation.tools,
        )

    def _encode(self, rendered: Rendered, bodies: Mapping[int, tuple[bytes, bytes]]) -> bytes:
        texts, marks = self._stripped(rendered), rendered.marks
        pieces = [b""] * (len(texts) + len(marks))
        encode = str.encode if self._vocabulary.is_plain("".join(texts)) else self._encode_text
        pieces[::2] = map(encode, texts)
        pieces[1::2] = [b"" if isinstance(mark, BodySlot) else self._escapes[mark] for mark in marks]
        for i, mark in enumerate(marks):
            if isinstance(mark, BodySlot):
                self._fill(pieces, marks, i, bodies[mark.index])
        return b"".join(pieces)

    def _fill(self, pieces: list[bytes], marks: Sequence[str | BodySlot], i: int, body: tuple[bytes, bytes]) -> None:
        """Replaces the slot `marks[i]` by its body, and removes the template's text that the body already contains.

        Such text is what follows the generation prompt, the rest of the tool calls after a call slot, and what stands
        before the end token: white space, or the end of the body.
        """
        slot, at = marks[i], 2 * i + 1
        assert isinstance(slot, BodySlot)
        self._cut_head(pieces, at, slot)
        pieces[at], own_end = body
        end = self._next_end(marks, i)
        after = 2 * end + 1
        between = b"".join(pieces[at + 1 : after]) if end else b""
        if slot.in_call:
            if not end:  # The end of a tool call is unknown.
                raise InvalidRequest("the model's chat template does not end tool calls", code="template_error")
        elif not end or (between.strip() and not pieces[at].endswith(between)):
            pieces[at] += own_end if own_end in self._call_ends else b""
            return
        elif own_end != pieces[after] and own_end not in self._call_ends:
            return
        pieces[at + 1 : after] = [b""] * (after - at - 1)
        if own_end in self._call_ends:
            pieces[after] = own_end

    def _next_end(self, marks: Sequence[str | BodySlot], i: int) -> int:
        """Returns the index of the end token after a slot, or 0 if there is none before the next slot."""
        for at in range(i + 1, len(marks)):
            mark = marks[at]
            if isinstance(mark, BodySlot):
                break
            if self._control[mark].id in self.model.end_tokens:
                return at
        return 0

    def _cut_head(self, pieces: list[bytes], at: int, slot: BodySlot) -> None:
        heads = self._answer_heads if not slot.in_call else [self._call_head or b""]
        longest = max(map(len, heads), default=0)
        start, before = at, b""
        while start and len(before) < longest:
            start -= 1
            before = pieces[start] + before
        head = next((head for head in heads if before.endswith(head)), None)
        if head is not None:
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
        """Returns a literal as encoded text, with the control tokens that the vocabulary has."""
        parts = self._template.split(literal)
        return b"".join(self._escapes[part] if i % 2 else part.encode() for i, part in enumerate(parts))

    def _find_layout(self) -> None:
        """Compares the generation prompt with the text that the template writes before an answer, and before a call."""
        question, then = Message("user", QUESTION), Message("user", "x")
        call = ToolCall("call00000", "x", "{}")
        result, calling = Message("tool", RESULT, tool_call_id=call.id), Message("assistant", tool_calls=(call,))
        answers = [(Message("assistant"), then), (Message("assistant"), result)]
        prompt, heads = self._prompt(question), [self._head(question, *turn) for turn in answers]
        call_head = self._head(question, calling, result)
        known = [head for head in heads if head is not None]
        start = len(_common([prompt, *known])) if known else len(prompt)
        self.generation_tail = prompt[start:]
        """Encoded text that the generation prompt has after the head of an assistant turn, such as `<think>`."""
        self._answer_heads = sorted({head[start:] for head in known if head[start:]}, key=len, reverse=True)
        """Encoded text that the template writes before an answer, unlike the generation prompt: Mistral's space."""
        has_head = call_head is not None and call_head.startswith(prompt[:start])
        self._call_head = call_head[start:] if call_head is not None and has_head else None
        """The same before the name of the first tool call; None if it is unknown."""
        self._needs_calls = self._call_head is not None and self._rest(
            question, calling, result, slots=True
        ) != self._rest(question, calling, result, slots=False)
        """True if the template writes the result of a call differently if it does not see the call."""

    def _opens(self, reasoning: ReasoningFormat) -> bool:
        """True if the generation prompt ends inside a block of reasoning."""
        prompt = self._prompt(Message("user", QUESTION)).rpartition(QUESTION.encode())[2]
        if not reasoning.opening:
            return True
        opening, closing = (self._literal(text.rstrip("\n")) for text in (reasoning.opening, reasoning.closing))
        return prompt.rfind(opening) > prompt.rfind(closing)

    def _prompt(self, question: Message) -> bytes:
        try:
            return self._encode(self._template.render(Conversation((question,))), {})
        except InvalidRequest:
            return b""

    def _head(self, question: Message, answer: Message, then: Message) -> bytes | None:
        """Returns the text up to the slot of an answer, or None if there is none."""
        rendered = self._slotted(question, answer, then, call_slot=bool(answer.tool_calls))
        if rendered is None:
            return None
        at = next(i for i, mark in enumerate(rendered.marks) if isinstance(mark, BodySlot))
        return self._encode(Rendered(rendered.texts[: at + 1], rendered.marks[:at]), {})

    def _rest(self, question: Message, calling: Message, result: Message, *, slots: bool) -> bytes | None:
        """Returns the text after the end token of a call, written as a slot or as a call."""
        rendered = self._slotted(question, calling, result, call_slot=not slots)
        if rendered is None:
            return None
        at = next(i for i, mark in enumerate(rendered.marks) if isinstance(mark, BodySlot))
        at = self._next_end(rendered.marks, at) or at
        return self._encode(Rendered(rendered.texts[at + 1 :], rendered.marks[at + 1 :]), {})

    def _slotted(self, question: Message, answer: Message, then: Message, *, call_slot: bool) -> Rendered | None:
        slots, call_slots = ((), (1,)) if call_slot else ((1,), ())
        try:
            rendered = self._template.render(
                Conversation((question, answer, then)), slots=slots, call_slots=call_slots, generation_prompt=False
            )
        except InvalidRequest:
            return None
        return rendered if any(isinstance(mark, BodySlot) for mark in rendered.marks) else None


def _common(texts: Sequence[bytes]) -> bytes:
    """Returns the common prefix of encoded texts, without a part of a control token."""
    same = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*texts, strict=False))
    prefix = bytes(column[0] for column in same)
    at = prefix.rfind(ESCAPE)
    return prefix[:at] if at >= 0 and at > len(prefix) - len(escape(0)) else prefix
