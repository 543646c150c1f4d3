"""`CompletionParser`: turns the sampled tokens of one choice into text, reasoning and tool calls while they arrive.

Invariant: the streamed pieces, joined, equal the content and the reasoning of the final message. So an answer does not
depend on streaming, and a streamed turn is recognised when the agent sends it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentjet.gateway.requests import TokenLogprob
from agentjet.rendering import Renderer
from agentjet.rendering.parser import MARKERS
from agentjet.timeline.support import EVERYTHING
from agentjet.types import Conversation, FinishReason, Message, Sampled


class CompletionParser:
    """Parses one choice. Call `push` until the completion ends or `stopped` is True, then `message`."""

    def __init__(self, renderer: Renderer, conversation: Conversation, *, stop: Sequence[str], id_prefix: str) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.support: list[bytes] = []
        """The support set of each token (see `timeline.support`)."""
        self.stopped_by = ""
        """The stop string that ended the completion. Later tokens are ignored."""
        self._renderer = renderer
        self._conversation = conversation
        self._stop = tuple(stop)
        self._tool_format = renderer.model.tool_format if conversation.tools else ""
        self._id_prefix = id_prefix
        self._stream = renderer.stream()
        self._text = ""
        self._ending = (*MARKERS, *self._stop)
        """Strings that change the message once they are complete. A partial one at the end is held back."""
        self._sent_reasoning = 0
        self._sent_content = 0
        self._reasoning_at = 0
        """Offset of the reasoning in the text. Valid once some of it was sent."""
        self._content_at = 0
        """Offset of the content in the text. Valid once some of it was sent."""
        self._holds_rest = False
        """True if the rest of the text may belong to a tool call. It is then sent with the final message only."""
        self._shown_tokens = 0
        self._worker_reason: FinishReason | None = None

    @property
    def stopped(self) -> bool:
        return bool(self.stopped_by)

    def push(self, sampled: Sampled) -> None:
        """Adds sampled tokens, up to the one that completes a stop string."""
        self._worker_reason = sampled.finish_reason
        sets = sampled.support or (EVERYTHING,) * len(sampled.tokens)
        for token, logprob, support in zip(sampled.tokens, sampled.logprobs, sets, strict=True):
            self.tokens.append(token)
            self.logprobs.append(logprob)
            self.support.append(support)
            self.versions.append(sampled.policy_version)
            if self._grow(self._stream.push([token])):
                return

    def stable_delta(self) -> tuple[str, str]:
        """Returns new reasoning and new content that no later token can change.

        The work is linear in the new text: text that was sent is not parsed again.
        """
        if self._holds_rest:
            return "", ""
        end = len(self._text) - max(_partial_length(self._text, literal) for literal in self._ending)
        if self._sent_content:
            fresh = self._before_calls(self._text[self._content_at + self._sent_content : end])
            self._sent_content += len(fresh)
            return "", fresh
        if self._sent_reasoning:
            fresh = self._text[self._reasoning_at + self._sent_reasoning : end]
            if "</think>" not in fresh:
                fresh = fresh.rstrip("\n")
                self._sent_reasoning += len(fresh)
                return fresh, ""
        return self._first_delta(self._text[:end])

    def _first_delta(self, text: str) -> tuple[str, str]:
        """Returns the stable text before any content was sent. Finds where reasoning ends and content begins."""
        if not text.strip():
            return "", ""
        # Parsed without tools: later text may show that a complete tool call is plain text.
        message = self._renderer.parse_text(text, replace(self._conversation, tools=()))
        self._content_at = len(text) - len(message.content)
        if not self._sent_reasoning:
            self._reasoning_at = 0 if "</think>" in text else len(text.rstrip("\n")) - len(message.reasoning)
        return self._unsent(message.reasoning, self._stable_content(message.content))

    def message(self) -> tuple[Message, str, str]:
        """Returns the final assistant message, and its reasoning and content that were not returned before."""
        if not self.stopped:
            self._grow(self._stream.flush())
        message = self._renderer.parse_text(self._text, self._conversation, id_prefix=self._id_prefix)
        return message, *self._unsent(message.reasoning, message.content)

    def finish_reason(self, message: Message) -> FinishReason:
        """Returns the reason why the completion ended."""
        reason = "stop" if self.stopped else self._worker_reason or "length"
        return "tool_calls" if message.tool_calls and reason == "stop" else reason

    def new_tokens(self) -> tuple[TokenLogprob, ...]:
        """Returns the tokens since the last call of this method, for display."""
        start, self._shown_tokens = self._shown_tokens, len(self.tokens)
        shown = []
        for token, logprob in zip(self.tokens[start:], self.logprobs[start:], strict=True):
            raw = self._renderer.token_bytes(token)
            shown.append(TokenLogprob(raw.decode(errors="replace"), raw, logprob))
        return tuple(shown)

    def _grow(self, text: str) -> bool:
        """Appends text and cuts it before the first stop string. Returns True if there is one."""
        if not text:
            return False
        longest = max(map(len, self._stop), default=1)
        start = max(0, len(self._text) - longest + 1)
        self._text += text
        found = [(at, stop) for stop in self._stop if (at := self._text.find(stop, start)) >= 0]
        if found:
            at, self.stopped_by = min(found, key=lambda place: place[0])
            self._text = self._text[:at]
        return self.stopped

    def _stable_content(self, content: str) -> str:
        """Returns the stable part of the content's beginning, or '' if a tool call may begin there."""
        if self._tool_format and (
            content[:1].isspace() or (self._tool_format == "llama3" and content.startswith(("{", "[")))
        ):
            self._holds_rest = True
            return ""
        return self._before_calls(content)

    def _before_calls(self, content: str) -> str:
        """Returns the content before a possible tool call, without the white space that the call would strip."""
        if not self._tool_format:
            return content
        starts = [at for at in map(content.find, MARKERS) if at >= 0]
        self._holds_rest = bool(starts)
        return content[: min(starts, default=len(content))].rstrip()

    def _unsent(self, reasoning: str, content: str) -> tuple[str, str]:
        fresh = reasoning[self._sent_reasoning :], content[self._sent_content :]
        self._sent_reasoning = max(self._sent_reasoning, len(reasoning))
        self._sent_content = max(self._sent_content, len(content))
        return fresh


def _partial_length(text: str, literal: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `literal`."""
    at = max(0, len(text) - len(literal) + 1)
    while (at := text.find(literal[0], at)) >= 0:
        if literal.startswith(text[at:]):
            return len(text) - at
        at += 1
    return 0
