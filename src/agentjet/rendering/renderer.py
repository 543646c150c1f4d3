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
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentjet.errors import ConfigError, InvalidRequest
from agentjet.rendering.chat_template import (
    GUARD,
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
    write_completion,
)
from agentjet.rendering.parser import MessageReader, split_calls
from agentjet.rendering.vocabulary import TextStream, Vocabulary, escape
from agentjet.types import ESCAPE, Conversation, Message, ModelInfo, ToolCall


@dataclass(frozen=True, slots=True)
class _Layout:
    """Encoded text around a turn of the model."""

    tail: bytes
    """The end of the generation prompt that the template does not write in history."""
    heads: list[bytes]
    """Text that the template writes before an answer in history, unlike the generation prompt: Mistral's space."""
    call_head: re.Pattern[bytes] | None
    """The same before the name of the first tool call; None if it, or the end of the calls, is unknown."""
    longest: int
    """A bound of the length of a head."""
    is_known: bool

    @classmethod
    def of(cls, tail: bytes, heads: Sequence[bytes], call_head: bytes | None, *, is_known: bool) -> _Layout:
        # The number of a call in its conversation may stand before its name.
        pattern = None if call_head is None else re.compile(re.sub(rb"\d+", rb"\\d+", re.escape(call_head)) + rb"\Z")
        ordered = sorted({head for head in heads if head}, key=len, reverse=True)
        longest = max([*map(len, ordered), len(call_head or b"") + len("1000000")])
        return cls(tail, ordered, pattern, longest if ordered or call_head else 0, is_known)


@dataclass(frozen=True, slots=True)
class _Body:
    """A sampled turn without its end token, and that token."""

    text: bytes
    end: bytes
    layout: _Layout


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
        self.num_tokens = len(vocabulary.ids)
        self._form = TOOL_FORMATS[tool_format] if tool_format else None
        ends = [end for end in (self._form.ends if self._form else ()) if end in self._escapes]
        texts = (self._form.call + self._form.closing) if self._form else ""
        self._call_ends = {self._escapes[end]: end in texts for end in ends}
        """Tokens that end a turn with calls. True if the token belongs to the text of a call."""
        self._encoded_ends = tuple(map(escape, model_info.end_tokens))
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
                f"model {self.model.name} has no tools: its template ignores them, or has an unknown tool format "
                "(model.tool_format forces one)",
                code="tools_not_supported",
                param="tools",
            )
        bodies = {i: self._body(conversation, i, encoded) for i, encoded in (sampled or {}).items()}
        own_ids = self._own_ids(conversation, bodies)
        # Some templates treat messages with tool calls differently from answers: these get call slots.
        messages = conversation.messages
        answered = {
            i for i in bodies if messages[i].tool_calls and i + 1 < len(messages) and messages[i + 1].role == "tool"
        }
        calling = {i for i in answered if bodies[i].layout.call_head is not None}
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

    def _body(self, conversation: Conversation, i: int, encoded: bytes) -> _Body:
        follows_result = i > 0 and conversation.messages[i - 1].role == "tool"
        layout = self._after_result if follows_result else self._after_question
        if layout.tail != self.generation_tail:
            encoded = layout.tail + encoded.removeprefix(self.generation_tail)
        return _Body(*self._split_end(encoded), layout)

    def _own_ids(self, conversation: Conversation, bodies: Mapping[int, _Body]) -> dict[str, str]:
        """Returns the ids of calls as the model wrote them, by the id that the agent got."""
        ids = dict[str, str]()
        if self._form is None or not (self._form.id or "{id}" in self._form.call):
            return ids
        for i, body in bodies.items():
            calls = conversation.messages[i].tool_calls
            found = split_calls(self.show(body.text), self.model.tool_format, conversation.tools)[1] if calls else []
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
        up to the end token. If that is not read as the answer, returns what the formats write, if it is.

        Raises `InvalidRequest` (`template_error`) if the template writes an answer in another place or without an end.
        """
        prompt = self.render(conversation)
        try:
            tokens = self._templated_answer(conversation, prompt, answer)
        except InvalidRequest:
            if (written := self._formatted_answer(conversation, prompt, answer)) is None:
                raise
            return written
        if _is_same(self.parse(tokens, conversation), answer):
            return tokens
        return self._formatted_answer(conversation, prompt, answer) or tokens

    def _formatted_answer(self, conversation: Conversation, prompt: bytes, answer: Message) -> tuple[int, ...] | None:
        """Returns the tokens of an answer as its formats write it, or None if they are not read as this answer."""
        style, tail = self.style, self.generation_tail
        reasoning, opened = style.reasoning, style.in_reasoning
        # A prompt that has closed the block, and one that goes on without its tail, take no block.
        is_closed = bool(
            reasoning and answer.reasoning and self.closes_reasoning(prompt[-len(reasoning.closing) - 8 :])
        )
        if not (reasoning or answer.tool_calls) or is_closed or (opened and not prompt.endswith(tail)):
            return None
        if (reasoning is not None and reasoning.channels) or (answer.tool_calls and not style.tool_format):
            return None
        guarded = self._template.guarded
        calls = tuple(
            replace(call, name=guarded(call.name), arguments=guarded(call.arguments)) for call in answer.tool_calls
        )
        safe = replace(answer, content=guarded(answer.content), reasoning=guarded(answer.reasoning), tool_calls=calls)
        try:
            text = write_completion(safe, reasoning, opened, style.tool_format)
        except (ValueError, AttributeError):  # The arguments are not a JSON object.
            return None
        parts = self._template.split(text)
        encoded = b"".join(
            self._escapes[part] if i % 2 else self._encode_text(part.replace(GUARD, "")) for i, part in enumerate(parts)
        )
        if not self._split_end(encoded)[1]:
            encoded += self._ends[bool(calls)] or escape(self.model.end_tokens[0])
        tokens = self.tokenize(encoded)
        is_good = self._end_in(tokens) == len(tokens) - 1 and _is_same(self.parse(tokens, conversation), answer)
        return tokens if is_good else None

    def _templated_answer(self, conversation: Conversation, prompt: bytes, answer: Message) -> tuple[int, ...]:
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
        end = self._end_in(tokens)
        if end is None:
            # GLM's turns end with the token that begins the next message.
            then = (
                Message("tool", "x", tool_call_id=answer.tool_calls[0].id)
                if answer.tool_calls
                else Message("user", "x")
            )
            followed = replace(answered, messages=(*answered.messages, then))
            longer = self._encode(self._template.render(followed, generation_prompt=False), {})
            tokens = self.tokenize(longer[len(prompt) :]) if longer.startswith(whole) else ()
            end = self._end_in(tokens)
        if end is None:
            raise InvalidRequest(
                "the model's chat template ends this answer without an end token",
                code="template_error",
                param="messages",
            )
        return tokens[: end + 1]

    def _end_in(self, tokens: Sequence[int]) -> int | None:
        return next((i for i, token in enumerate(tokens) if token in self.model.end_tokens), None)

    def encode_raw_prompt(self, prompt: str | Sequence[int]) -> bytes:
        """Returns a raw prompt as encoded text: text after the tokens with which the tokenizer opens it, ids unchanged.

        Only ids give control tokens; their literals in text stay text. Raises `InvalidRequest`.
        """
        if isinstance(prompt, str):
            encoded = self._vocabulary.opening + self.encode_prompt_text(
                self._vocabulary.add_prefix(prompt, first=True)
            )
        else:
            self.check_ids(prompt, "prompt")
            encoded = self.encode_tokens(prompt)
        if not encoded:
            raise InvalidRequest("prompt is empty.", param="prompt")
        return encoded

    def check_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Raises `InvalidRequest` for the first id that the tokenizer does not have. `param` is the key of the ids."""
        for i, token_id in enumerate(token_ids):
            if not self._vocabulary.knows(token_id):
                raise InvalidRequest(
                    f"{param}.{i} = {token_id} is not a token id of this model: tokenise with the tokenizer of "
                    f"{self.model.name}.",
                    code="invalid_value",
                    param=param,
                )

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

    def keeps_reasoning(self, conversation: Conversation, thoughtless: Collection[int] = ()) -> frozenset[int]:
        """Returns the assistant messages whose reasoning the template keeps, with those of `thoughtless`, which have
        an empty block, where the template would keep some.

        Renders the conversation if it has blocks of reasoning. Empty if the template refuses the conversation.
        """
        blocks = [i for i, message in enumerate(conversation.messages) if message.reasoning or i in thoughtless]
        marks = {i: f"{MARK}{i}{MARK}" for i in blocks}
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

    def writes_start(self, conversation: Conversation, at: int, body: bytes) -> bool:
        """True if the template begins assistant message `at` with an empty block of reasoning, as `body` does."""
        heads = self._after_question.heads
        if not heads or self._needs_calls:
            return False
        try:
            rendered = self._template.render(conversation, slots=(at,))
        except InvalidRequest:
            return False
        before = self._before_slot(rendered)
        return any(before.endswith(head) and body.startswith(head) for head in heads)

    def encode_tokens(self, token_ids: Sequence[int]) -> bytes:
        """Returns the exact encoded text of tokens."""
        return b"".join(self._vocabulary.pieces(token_ids))

    def text(self, token_ids: Sequence[int]) -> str:
        """Returns text without special tokens, except those in `MARKERS`; replaces incomplete characters."""
        return self._vocabulary.displayed(token_ids).decode(errors="replace")

    @property
    def control_tokens(self) -> dict[int, str]:
        """The names of the control tokens by id."""
        return {id_: self.token_bytes(id_).decode() for id_ in self._vocabulary.control}

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the displayed bytes of a token; a special token has its name."""
        return self._vocabulary.displayed_bytes(token_id, literals=True)

    def sample_ids(self, most: int) -> list[int]:
        """Returns at most `most` control tokens and as many other tokens, evenly distributed over the vocabulary."""
        control = self._vocabulary.control
        others = [id_ for id_ in self._vocabulary.ids if id_ not in control]
        return [id_ for ids in (sorted(control), others) for id_ in ids[:: -(-len(ids) // most) or 1]]

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

    def _encode(self, rendered: Rendered, bodies: Mapping[int, _Body]) -> bytes:
        texts, marks = self._stripped(rendered), rendered.marks
        pieces = [b""] * (len(texts) + len(marks))
        encode = str.encode if self._vocabulary.is_plain("".join(texts)) else self._encode_text
        pieces[::2] = map(encode, texts)
        pieces[1::2] = [b"" if isinstance(mark, BodySlot) else self._escapes[mark] for mark in marks]
        for i, mark in enumerate(marks):
            if isinstance(mark, BodySlot):
                self._fill(pieces, marks, i, bodies[mark.index])
        return b"".join(pieces)

    def _fill(self, pieces: list[bytes], marks: Sequence[str | BodySlot], i: int, body: _Body) -> None:
        """Replaces the slot `marks[i]` by its body, and removes the template's text that the body already contains.

        Such text is what follows the generation prompt, the rest of the tool calls after a call slot, and what stands
        before the end token: white space, or the end of the body.
        """
        slot, at = marks[i], 2 * i + 1
        assert isinstance(slot, BodySlot)
        self._cut_head(pieces, at, slot, body.layout)
        pieces[at], own_end = body.text, body.end
        replaced, written = self._replaced_end
        if replaced and own_end == replaced and not slot.in_call and b"".join(pieces[at + 1 : at + 3]) == written:
            pieces[at + 2] = own_end
            return
        end = self._next_end(marks, i)
        if slot.in_call and not end:  # The end of a tool call is unknown.
            raise InvalidRequest("the model's chat template does not end tool calls", code="template_error")
        after = 2 * end + 1
        between = b"".join(pieces[at + 1 : after]) if end else b""
        is_ended = bool(end) and (slot.in_call or not between.strip() or pieces[at].endswith(between))
        if own_end in self._call_ends and not (is_ended and pieces[after] == own_end):
            if self._call_ends[own_end]:
                pieces[at] += own_end
            elif is_ended and pieces[after] == self._turn_end:
                pieces[after] = own_end
        if is_ended and (slot.in_call or pieces[after] == own_end):
            pieces[at + 1 : after] = [b""] * (after - at - 1)

    def _next_end(self, marks: Sequence[str | BodySlot], i: int) -> int:
        """Returns the index of the end token after a slot, or 0 if there is none before the next slot."""
        for at in range(i + 1, len(marks)):
            mark = marks[at]
            if isinstance(mark, BodySlot):
                break
            if self._control[mark].id in self.model.end_tokens:
                return at
        return 0

    def _cut_head(self, pieces: list[bytes], at: int, slot: BodySlot, layout: _Layout) -> None:
        longest = layout.longest
        start, before = at, b""
        while start and len(before) < longest:
            start -= 1
            before = pieces[start] + before
        if slot.in_call:
            found = layout.call_head.search(before) if layout.call_head else None
            head = found[0] if found else None
        else:
            head = next((head for head in layout.heads if before.endswith(head)), None)
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
        if not encoded.endswith(self._encoded_ends):
            return encoded, b""
        return encoded[: -len(escape(0))], encoded[-len(escape(0)) :]

    def _literal(self, literal: str) -> bytes:
        """Returns a literal as encoded text, with the control tokens that the vocabulary has."""
        parts = self._template.split(literal)
        return b"".join(self._escapes[part] if i % 2 else part.encode() for i, part in enumerate(parts))

    def _find_layout(self) -> None:
        question = Message("user", QUESTION)
        calling, again = (Message("assistant", tool_calls=(ToolCall(f"call0000{i}", "x", "{}"),)) for i in range(2))
        result, another = (Message("tool", RESULT, tool_call_id=turn.tool_calls[0].id) for turn in (calling, again))
        self._after_question = self._layout((question,), calling, result)
        after = self._layout((question, calling, result), again, another)
        # The end of the previous message is not a part of a turn: some templates write it differently at the end.
        is_good = after.is_known and not any(escape(end) in after.tail for end in self.model.end_tokens)
        self._after_result = after if is_good else self._after_question
        self.generation_tail = self._after_question.tail
        """Encoded text that the generation prompt has after the head of an assistant turn, such as `<think>`."""
        self._ends = [self._end_after((question,), Message("assistant"), then) for then in (question, result)]
        """The tokens that end an answer and a call, or empty."""
        self._turn_end = self._ends[0] if len(set(self._ends)) == 1 else b""
        """The token that ends each answer. Empty if the end is the beginning of the next message."""
        marks = [self._mark_after((question, Message("assistant"), *then)) for then in ((), (question,), (result,))]
        ends = self._encoded_ends
        is_replaced = marks[0] in ends and marks[1] == marks[2] and marks[1] not in (b"", *ends)
        self._replaced_end = (marks[0], marks[1]) if is_replaced else (b"", b"")
        """The end token of an answer, and what the template writes for it in history: harmony's `<|end|>`."""
        rests = [self._rest((question,), calling, result, slots=slots) for slots in (True, False)]
        self._needs_calls = self._after_question.call_head is not None and rests[0] != rests[1]
        """True if the template writes the result of a call differently if it does not see the call."""

    def _layout(self, asked: tuple[Message, ...], calling: Message, result: Message) -> _Layout:
        """Compares the generation prompt with the text that the template writes before an answer, and before a call."""
        prompt = self._prompt(asked)
        answers = [self._slotted(asked, Message("assistant"), then, call_slot=False) for then in (asked[0], result)]
        heads = [self._before_slot(answer) for answer in answers if answer is not None]
        start = len(_common([prompt, *heads])) if heads else len(prompt)
        call_head = None
        called = self._slotted(asked, calling, result, call_slot=True)
        if called is not None:
            slot, end = self._slot_and_end(called)
            head = self._before_slot(called)
            # Without an end token before the result, the end of the calls is unknown.
            if head.startswith(prompt[:start]) and not any(RESULT in text for text in called.texts[slot + 1 : end + 1]):
                call_head = head[start:]
        return _Layout.of(prompt[start:], [head[start:] for head in heads], call_head, is_known=bool(prompt and heads))

    def _opens(self, reasoning: ReasoningFormat) -> bool:
        """True if the generation prompt ends inside a block of reasoning."""
        prompt = self._prompt((Message("user", QUESTION),)).rpartition(QUESTION.encode())[2]
        if not reasoning.opening:
            return True
        opening, closing = (self._literal(text.rstrip("\n")) for text in (reasoning.opening, reasoning.closing))
        return prompt.rfind(opening) > prompt.rfind(closing)

    def _prompt(self, asked: tuple[Message, ...]) -> bytes:
        try:
            return self._encode(self._template.render(Conversation(asked)), {})
        except InvalidRequest:
            return b""

    def _before_slot(self, rendered: Rendered) -> bytes:
        at, _ = self._slot_and_end(rendered)
        return self._encode(Rendered(rendered.texts[: at + 1], rendered.marks[:at]), {})

    def _rest(self, asked: tuple[Message, ...], calling: Message, result: Message, *, slots: bool) -> bytes | None:
        """Returns the text after the end token of a call, written as a slot or as a call."""
        rendered = self._slotted(asked, calling, result, call_slot=not slots)
        if rendered is None:
            return None
        slot, end = self._slot_and_end(rendered)
        at = (end or slot) + 1
        return self._encode(Rendered(rendered.texts[at:], rendered.marks[at:]), {})

    def _end_after(self, asked: tuple[Message, ...], answer: Message, then: Message) -> bytes:
        rendered = self._slotted(asked, answer, then, call_slot=False)
        end = self._slot_and_end(rendered)[1] if rendered else 0
        mark = rendered.marks[end] if rendered and end else ""
        return b"" if isinstance(mark, BodySlot) else self._escapes.get(mark, b"")

    def _mark_after(self, messages: tuple[Message, ...]) -> bytes:
        """Returns the control token that directly follows the slot of message 1, or empty."""
        try:
            rendered = self._template.render(Conversation(messages), slots=(1,), generation_prompt=False)
        except InvalidRequest:
            return b""
        slot, _ = self._slot_and_end(rendered)
        after = rendered.marks[slot + 1 : slot + 2]
        is_direct = after and not rendered.texts[slot + 1] and not isinstance(after[0], BodySlot)
        return self._escapes.get(str(after[0]), b"") if is_direct else b""

    def _slot_and_end(self, rendered: Rendered) -> tuple[int, int]:
        slot = next((i for i, mark in enumerate(rendered.marks) if isinstance(mark, BodySlot)), 0)
        return slot, self._next_end(rendered.marks, slot)

    def _slotted(
        self, asked: tuple[Message, ...], answer: Message, then: Message, *, call_slot: bool
    ) -> Rendered | None:
        at = (len(asked),)
        slots, call_slots = ((), at) if call_slot else (at, ())
        try:
            rendered = self._template.render(
                Conversation((*asked, answer, then)), slots=slots, call_slots=call_slots, generation_prompt=False
            )
        except InvalidRequest:
            return None
        return rendered if any(isinstance(mark, BodySlot) for mark in rendered.marks) else None


def _is_same(read: Message, given: Message) -> bool:
    """True if two messages are the same to agents, except for white space at the ends of texts."""
    texts = [(message.content.strip(), message.reasoning.strip()) for message in (read, given)]
    try:
        calls = [[(call.name, call.value()) for call in message.tool_calls] for message in (read, given)]
    except ValueError:
        return False
    return texts[0] == texts[1] and calls[0] == calls[1]


def _common(texts: Sequence[bytes]) -> bytes:
    """Returns the common prefix of encoded texts, without a part of a control token."""
    same = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*texts, strict=False))
    prefix = bytes(column[0] for column in same)
    at = prefix.rfind(ESCAPE)
    return prefix[:at] if at >= 0 and at > len(prefix) - len(escape(0)) else prefix
