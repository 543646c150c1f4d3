"""The parser of completions: `MessageReader` reads a text while it grows, or all of it at once.

So a streamed answer equals the whole one. A reader returns only what no later text can change.
The rest waits: the beginning of a marker, white space that a call would strip, a call that is not complete, and text of
a section of calls until a call or other text follows.

A broken call stays in the content. The calls beside it are returned, and none is taken back. With calls, white space at
the end of the content is dropped, and at its beginning if a call is first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import regex

from agentjet.rendering.formats import (
    HARMONY,
    TOOL_FORMATS,
    CallItem,
    IncompleteCall,
    ParsedCall,
    ReasoningFormat,
    RegexMatch,
    ToolFormat,
    Tools,
    checked_call,
    schemas_of,
    syntax_of,
)
from agentjet.types import Message, ToolCall

MAX_BROKEN = 64
"""Broken calls after which the rest of a completion is content. It bounds the work on hostile text."""
CALL_ENDS = frozenset("})>")
"""The characters with which a call ends, in every format."""
SHORT_CALL = 4096
"""Characters of a call that may be read again whenever it may be complete. A longer call is read when it has grown by
a part of its length, so that the work stays linear.
"""


class Thought(NamedTuple):
    """A piece of reasoning."""

    text: str


Part = str | Thought | ParsedCall
"""A piece of a completion: text, reasoning, or a call."""


def split_calls(text: str, tool_format: str, tools: Tools = ()) -> tuple[str, list[ParsedCall]]:
    """Returns the text without its good calls, and these. Without any, the text is unchanged."""
    if tool_format == HARMONY:
        return _split(_Channels(with_calls=True).read(text, is_whole=True))[1:]
    return _split(_Calls(TOOL_FORMATS[tool_format], tools).read(text, is_whole=True))[1:]


def _split(parts: Sequence[Part]) -> tuple[str, str, list[ParsedCall]]:
    """Returns reasoning, content and calls."""
    thought = "".join(part.text for part in parts if isinstance(part, Thought))
    content = "".join(part for part in parts if isinstance(part, str))
    return thought, content, [part for part in parts if isinstance(part, ParsedCall)]


class MessageReader:
    """Reads one completion while it grows."""

    def __init__(
        self,
        *,
        reasoning: ReasoningFormat | None = None,
        in_reasoning: bool = False,
        tool_format: str = "",
        tools: Tools = (),
    ) -> None:
        """With `reasoning`, a leading block of it is parsed; with `in_reasoning`, the prompt has already opened the
        block. Without a `tool_format`, tool calls are not parsed. `tools` give types to arguments that are written as
        text.
        """
        form = TOOL_FORMATS[tool_format] if tool_format else None
        has_channels = tool_format == HARMONY or (reasoning is not None and reasoning.channels)
        self._channels = _Channels(with_calls=bool(form)) if has_channels else None
        self._block = _Block(reasoning, in_reasoning, form.marker if form else "") if reasoning else None
        self._calls = _Calls(form, tools) if form else None

    def read(self, text: str, *, is_whole: bool = False) -> list[Part]:
        """Takes the next text. Returns new parts. `is_whole`: it is the last text."""
        if self._channels:
            return [part for part in self._channels.read(text, is_whole=is_whole) if _has_text(part)]
        thought, answer = self._block.read(text, is_whole=is_whole) if self._block else ("", text)
        parts = self._calls.read(answer, is_whole=is_whole) if self._calls else [answer]
        return [part for part in (Thought(thought), *parts) if _has_text(part)]

    def message(self, text: str, *, id_prefix: str = "call") -> Message:
        """Returns the assistant message of a whole completion.

        The ids of tool calls are `<id_prefix>_0`, `<id_prefix>_1`, ...
        """
        thought, content, found = _split(self.read(text, is_whole=True))
        calls = tuple(ToolCall(f"{id_prefix}_{i}", call.name, call.arguments) for i, call in enumerate(found))
        return Message("assistant", content, thought, calls)


def _has_text(part: Part) -> bool:
    return bool(part[0]) if isinstance(part, Thought) else bool(part)


class _Trimmed:
    """A growing text without some characters at its ends."""

    def __init__(self, chars: str | None) -> None:
        self._chars = chars
        self._waiting: list[str] = []
        self.has_begun = False

    def push(self, text: str, *, strip: bool = True) -> str:
        """Returns the text that is followed by other characters. Without `strip`, the beginning is kept."""
        if strip and not self.has_begun:
            self._waiting.clear()
            text = text.lstrip(self._chars)
        kept = text.rstrip(self._chars)
        rest = text[len(kept) :]
        if kept:
            kept = self.rest() + kept
            self.has_begun = True
        if rest:
            self._waiting.append(rest)
        return kept

    def rest(self) -> str:
        """Returns the characters at the end."""
        rest = "".join(self._waiting)
        self._waiting.clear()
        return rest


class _Block:
    """Splits a text into its leading block of reasoning and the answer. A cut block has no answer."""

    def __init__(self, reasoning: ReasoningFormat, in_reasoning: bool, marker: str) -> None:
        self._opening, self._closing = reasoning.opening.rstrip("\n"), reasoning.closing
        self._before, self._after = reasoning.answer
        self._in_reasoning = in_reasoning or not self._opening
        self._marker = "" if self._opening else marker
        """Begins the answer of a block that is not closed: nothing else announces an answer that is only a call."""
        self._thought = _Trimmed("\n")
        self._text = ""
        self._searched = 0
        self._is_closed = False
        self._step = self._find_opening

    def read(self, text: str, *, is_whole: bool) -> tuple[str, str]:
        self._text += text
        thought = ""
        while (step := self._step) != self._find_end:
            thought += step(is_whole)
            if self._step == step:
                return thought, ""
        return thought, self._find_end(is_whole)

    def _find_opening(self, is_whole: bool) -> str:
        text = self._text.lstrip()
        if not is_whole and (not text or _is_head(text, self._opening)):
            return ""
        self._step = self._find_closing
        if self._opening and text.startswith(self._opening):
            self._text = text.removeprefix(self._opening)
        elif self._in_reasoning:
            self._text = text
        else:
            self._step = self._find_answer
        return ""

    def _find_closing(self, is_whole: bool) -> str:
        text = self._text
        at = text.find(self._closing, max(0, self._searched - len(self._closing)))
        self._searched = len(text)
        if at >= 0:
            self._text, self._is_closed, self._step = text[at + len(self._closing) :], True, self._find_answer
            return self._thought.push(text[:at])
        marked = text.find(self._marker) if self._marker else -1
        if is_whole:
            end = marked if marked >= 0 else len(text)
            self._step = self._find_answer
        else:
            end = (
                marked
                if marked >= 0
                else len(text) - max(partial_length(text, self._closing), partial_length(text, self._marker))
            )
            self._searched -= end
        self._text = text[end:]
        return self._thought.push(text[:end])

    def _find_answer(self, is_whole: bool) -> str:
        if self._is_closed:
            self._text = self._text.lstrip("\n")
        text = self._text.lstrip() if self._before else self._text
        if not is_whole and (not text or _is_head(text, self._before)):
            return ""
        if self._before and text.startswith(self._before):
            self._text = text.removeprefix(self._before)
        self._step = self._find_end
        return ""

    def _find_end(self, is_whole: bool) -> str:
        """Returns the text that does not close the answer."""
        text, after = self._text, self._after
        if after and text.rstrip().endswith(after):
            at = text.rindex(after)
        else:
            at = len(text) - (0 if is_whole or not after else partial_length(text, after))
        self._text = text[at:]
        return text[:at]


def _is_head(text: str, literal: str) -> bool:
    return text != literal and literal.startswith(text)


def partial_length(text: str, literal: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of `literal`."""
    at = max(0, len(text) - len(literal) + 1)
    while literal and (at := text.find(literal[0], at)) >= 0:
        if literal.startswith(text[at:]):
            return len(text) - at
        at += 1
    return 0


class _Calls:
    """Splits an answer into text and calls."""

    def __init__(self, form: ToolFormat, tools: Tools) -> None:
        self._syntax, self._schemas = syntax_of(form), schemas_of(tools)
        self._text = ""
        self._parts: list[Part] = []
        self._content = _Trimmed(None)
        self._num_found = self._num_broken = 0
        self._section: tuple[int, int] | None = None if self._syntax.opening else (0, 0)
        """The place of the opening of the present section."""
        self._done = 0
        """Text before it is read: it is content, or in a call."""
        self._kept = 0
        """Text before it is in the parts, or in a call."""
        self._at = 0
        """The search continues here."""
        self._tried: int | None = None
        """Length of the text when an unfinished call was last read."""
        self._has_end = False
        """True if a call may have ended since then."""

    def read(self, text: str, *, is_whole: bool) -> list[Part]:
        self._text += text
        self._has_end = self._has_end or not CALL_ENDS.isdisjoint(text)
        self._parts = []
        while self._num_broken < MAX_BROKEN and self._step(is_whole):
            pass
        if is_whole or self._num_broken >= MAX_BROKEN:
            if not (self._num_found and self._section and self._syntax.is_junk(self._text[self._done :])):
                self._keep(len(self._text))
            if is_whole and not self._num_found:
                self._parts.append(self._content.rest())
        return self._parts

    def _step(self, is_whole: bool) -> bool:
        """Reads up to the next mark. Returns False if more text is needed."""
        if not is_whole and not self._may_be_complete():
            return False
        text, syntax = self._text, self._syntax
        if self._section is None:
            opened = syntax.opening.search(text, self._at, partial=not is_whole)
            self._at = opened.start() if opened else len(text)
            self._keep(self._at)
            if opened is None or opened.partial:
                return False
            self._section, self._at = opened.span(), opened.end()
        head = syntax.head.search(text, self._at, partial=not is_whole)
        is_complete = head is not None and not head.partial
        until, is_cut = head.start() if is_complete else len(text), not is_whole and not is_complete
        closed = syntax.closing.search(text, self._at, until, partial=is_cut) if syntax.closing else None
        if closed and not closed.partial:
            if self._done > self._section[0] and syntax.is_junk(text[self._done : closed.start()]):
                self._done = self._kept = closed.end()
            self._keep(closed.end())
            self._section, self._at = None, closed.end()
            return True
        self._at = min([found.start() for found in (head, closed) if found], default=len(text))
        start = max(self._done, self._section[1])
        if self._kept > start or not syntax.is_junk(text[start : self._at]):
            self._keep(self._at)
        return is_complete and self._read_call(head, is_whole)

    def _read_call(self, head: RegexMatch, is_whole: bool) -> bool:
        try:
            item: CallItem | None = self._syntax.read(self._text, head, self._schemas, is_whole=is_whole)
        except IncompleteCall:
            self._tried, self._has_end = len(self._text), False
            return False
        assert self._section is not None
        only_junk = self._syntax.is_junk(self._text[max(self._done, self._section[1]) : head.start()])
        # An object in a broken call, or in prose, may look like a call. Behind a call, it is one.
        is_call = (self._num_found and only_junk) or (
            item and self._syntax.is_meant(self._text[head.start() : item[0]])
        )
        in_prose = self._syntax.is_unmarked and not is_call
        known_only = self._schemas and (self._num_broken or in_prose)
        if item is None or (known_only and any(call.name not in self._schemas for call in item[1])):
            self._num_broken += 1
            self._at = head.start() + 1
            return True
        self._num_found += len(item[1])
        self._parts += item[1]
        self._done = self._kept = self._at = item[0]
        return True

    def _may_be_complete(self) -> bool:
        """False while an unfinished call has not grown enough to be read again."""
        if self._tried is None:
            return True
        grown, length = len(self._text) - self._tried, len(self._text) - self._at
        if not self._has_end or 16 * grown < length - SHORT_CALL:
            return False
        self._tried = None
        return True

    def _keep(self, end: int) -> None:
        """Adds the text up to `end` to the content."""
        if end > self._kept:
            self._parts.append(self._content.push(self._text[self._kept : end], strip=self._num_found > 0))
            self._kept = end


_HEADER = regex.compile(
    r"(?:<\|start\|>[^<]{0,200}|\s*(?:to=[^\s<]{1,200}\s*)?)<\|channel\|>(?P<channel>[a-z]+)[^<]{0,200}"
    r"(?:<\|constrain\|>[^<]{0,200})?<\|message\|>"
)
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
_END = regex.compile(r"<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)")


class _Channels:
    """Splits a completion in channels into reasoning, text and calls. Text outside of a message is content."""

    def __init__(self, *, with_calls: bool) -> None:
        self._with_calls = with_calls
        self._thought = _Trimmed("\n")
        self._num_thoughts = 0
        self._text = ""
        self._searched = 0
        self._header: RegexMatch | None = None
        """The header of the present message."""

    def read(self, text: str, *, is_whole: bool) -> list[Part]:
        self._text += text
        parts = list[Part]()
        while self._read_text(is_whole, parts) if self._header else self._read_header(is_whole, parts):
            pass
        return parts

    def _read_header(self, is_whole: bool, parts: list[Part]) -> bool:
        """Reads up to the text of the next message. Returns False if more text is needed."""
        header = _HEADER.search(self._text, partial=not is_whole)
        at = header.start() if header else len(self._text)
        parts.append(self._text[:at])
        self._text = self._text[at:]
        if header is None or header.partial:
            return False
        self._header, self._text, self._searched = header, self._text[len(header[0]) :], 0
        if header["channel"] == "analysis":
            self._thought.push("\n" * (self._num_thoughts > 0))
            self._num_thoughts += 1
        return True

    def _read_text(self, is_whole: bool, parts: list[Part]) -> bool:
        """Reads the text of the present message. Returns False if more text is needed."""
        assert self._header is not None
        found = _END.search(self._text, self._searched, partial=not is_whole)
        is_ended = not found.partial if found else is_whole
        at, end = found.span() if found else (len(self._text), len(self._text))
        text, recipient = self._text[:at], _RECIPIENT.search(self._header[0])
        if recipient and self._with_calls:
            self._searched = at
            if not is_ended:
                return False
            try:
                parts.append(checked_call(recipient[1], text.strip()))
            except (ValueError, RecursionError):
                parts.append(self._header[0] + self._text[:end])
        elif self._header["channel"] == "analysis":
            parts.append(Thought(self._thought.push(text)))
        else:
            parts.append(text)
        self._text = self._text[end if is_ended else at :]
        self._header = None if is_ended else self._header
        return is_ended
