"""A completion as it grows: its text, where a stop string ends it, and how much of it is certain enough to be sent
already.

Invariant: the text sent in pieces, joined, is the content of the message that the whole completion is parsed into;
the same for its reasoning. So an answer does not depend on whether it was streamed, and a streamed turn that comes
back is recognised.
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
    """One choice of a call.

    `push` what the worker samples until it ends or `stopped` is set, then take the `message`.
    """

    def __init__(
        self, renderer: Renderer, conversation: Conversation, *, stop: Sequence[str], tool_format: str, id_prefix: str
    ) -> None:
        """`tool_format` is the model's; it matters when the conversation offers tools."""
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.support: list[bytes] = []
        """The set that each token was chosen among (see `timeline.support`)."""
        self.stopped_by = ""
        """The stop string that is complete: what the worker may still send is not wanted."""
        self._renderer = renderer
        self._conversation = conversation
        self._stop = tuple(stop)
        self._tool_format = tool_format if conversation.tools else ""
        self._id_prefix = id_prefix
        self._stream = renderer.stream()
        self._text = ""
        self._ending = (*MARKERS, *self._stop)
        """What may change the answer once it is complete, so that its beginning is not certain."""
        self._sent_reasoning = 0
        self._sent_content = 0
        self._reasoning_at = 0
        """Where the reasoning begins in the text, or before that, once some of it was sent."""
        self._content_at = 0
        """Where the content begins, once some of it was sent."""
        self._nothing_more = False
        """All that follows may belong to a tool call: the message tells, when it is whole."""
        self._shown_tokens = 0
        self._worker_reason: FinishReason | None = None

    @property
    def stopped(self) -> bool:
        return bool(self.stopped_by)

    def push(self, sampled: Sampled) -> None:
        """Take a piece in, up to the token that completes a stop string."""
        self._worker_reason = sampled.finish_reason
        sets = sampled.support or (EVERYTHING,) * len(sampled.tokens)
        for token, logprob, support in zip(sampled.tokens, sampled.logprobs, sets, strict=True):
            self.tokens.append(token)
            self.logprobs.append(logprob)
            self.support.append(support)
            self.versions.append(sampled.policy_version)
            if self._grow(self._stream.push([token])):
                return

    def certain(self) -> tuple[str, str]:
        """Reasoning and content that no later token can change, beyond what was returned before.

        The work goes by what is new: what was sent is settled.
        """
        if self._nothing_more:
            return "", ""
        end = len(self._text) - max(_begun(self._text, literal) for literal in self._ending)
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
        return self._begin(self._text[:end])

    def _begin(self, text: str) -> tuple[str, str]:
        """What is certain while nothing of the content was sent: whether there is reasoning, and where it ends, is
        found out here.
        """
        if not text.strip():
            return "", ""
        # Without tools: a call that looks whole now may turn out to be text, white space around it and all.
        message = self._renderer.parse_text(text, replace(self._conversation, tools=()))
        self._content_at = len(text) - len(message.content)
        if not self._sent_reasoning:
            self._reasoning_at = 0 if "</think>" in text else len(text.rstrip("\n")) - len(message.reasoning)
        return self._unsent(message.reasoning, self._certain_content(message.content))

    def message(self) -> tuple[Message, str, str]:
        """The assistant message that the completion is, and what of its reasoning and content was not returned yet."""
        if not self.stopped:
            self._grow(self._stream.flush())
        message = self._renderer.parse_text(self._text, self._conversation, id_prefix=self._id_prefix)
        return message, *self._unsent(message.reasoning, message.content)

    def finish_reason(self, message: Message) -> FinishReason:
        """Why the completion ended."""
        reason = "stop" if self.stopped else self._worker_reason or "length"
        return "tool_calls" if message.tool_calls and reason == "stop" else reason

    def new_tokens(self) -> tuple[TokenLogprob, ...]:
        """The tokens that came since this was last asked, for people."""
        start, self._shown_tokens = self._shown_tokens, len(self.tokens)
        shown = []
        for token, logprob in zip(self.tokens[start:], self.logprobs[start:], strict=True):
            raw = self._renderer.token_bytes(token)
            shown.append(TokenLogprob(raw.decode(errors="replace"), raw, logprob))
        return tuple(shown)

    def _grow(self, text: str) -> bool:
        """Append text, cutting it before a stop string; returns whether there was one."""
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

    def _certain_content(self, content: str) -> str:
        """The beginning of the content, unless it may turn out to belong to a tool call."""
        if self._tool_format and (
            content[:1].isspace() or (self._tool_format == "llama3" and content.startswith(("{", "[")))
        ):
            self._nothing_more = True
            return ""
        return self._before_calls(content)

    def _before_calls(self, content: str) -> str:
        """Content before anything that may turn out to be a tool call, which would also strip the white space
        around it.
        """
        if not self._tool_format:
            return content
        starts = [at for at in map(content.find, MARKERS) if at >= 0]
        self._nothing_more = bool(starts)
        return content[: min(starts, default=len(content))].rstrip()

    def _unsent(self, reasoning: str, content: str) -> tuple[str, str]:
        fresh = reasoning[self._sent_reasoning :], content[self._sent_content :]
        self._sent_reasoning = max(self._sent_reasoning, len(reasoning))
        self._sent_content = max(self._sent_content, len(content))
        return fresh


def _begun(text: str, literal: str) -> int:
    """Length of the longest end of `text` that begins `literal` and is not the whole of it."""
    at = max(0, len(text) - len(literal) + 1)
    while (at := text.find(literal[0], at)) >= 0:
        if literal.startswith(text[at:]):
            return len(text) - at
        at += 1
    return 0
