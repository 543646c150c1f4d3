"""The conversation tree of one episode and role: the tokens that the policy saw, and how a new prompt continues them.

A call adds one segment below a position of an earlier call. The segment has the new tokens of its prompt, then its
completion. Invariants:

* calls are only appended; the tokens of a call never change;
* `match` keeps the longest known path whose bytes begin the new prompt. Sampled tokens on that path are kept as they
  were sampled, to the last one;
* a path that ends within *prompt* text is kept up to its last control token, or to the segment's start. From there
  the tokenizer decides alone, so the tokens of a prompt do not depend on similar earlier prompts;
* one thread adds calls while others read: a call is in `_nodes` before anything refers to it.

`match` compares bytes. If the bytes of a call differ from the prompt, bisection finds where.

`Identity` is the equality of conversations *by meaning*. Agents send their history through SDKs that rewrite it without
changing its meaning: other spacing or key order in JSON arguments, null for "", arguments that a tool's schema declares
as defaults. Tool-call ids, names and the tools are part of the meaning. The exception is the name that a framework adds
to answers to distinguish its agents: the policy never sampled it. Equality by meaning does not change tokens: the
policy is given the recorded ones.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate, chain, compress, count
from operator import ne
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeVar

from agentjet.types import ESCAPE, ESCAPED_BYTE, Call, Conversation, Fork, Message, NewContext, ToolCall

Schemas = Mapping[str, Any]
"""JSON schemas of arguments by function."""
REMEMBERED = 4
"""Number of earlier conversations that `Identities` compares with: an agent and sub-agents may take turns."""
SequenceT = TypeVar("SequenceT", bytes, tuple[int, ...])
OrphanReason = Literal["retry", "undelivered", "side"]


class Linked(Protocol):
    """The part of a `Call` that decides if it is an orphan."""

    @property
    def id(self) -> str: ...
    @property
    def after(self) -> str | None: ...
    @property
    def retry_of(self) -> str | None: ...
    @property
    def untrained(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Match:
    """A continuation of the tree: the first `kept` tokens of `parent`'s prompt + completion, then `suffix`.

    `suffix` is encoded text that is not tokenised yet. Without a parent, `kept` is 0.
    """

    parent: str | None
    kept: int
    suffix: bytes


@dataclass(slots=True, eq=False)
class _Node:
    """A call and its tokens. Positions count tokens of the segment, which begins at token `start` of the path."""

    call: Call
    order: int
    parent: _Node | None
    start: int
    tokens: tuple[int, ...]
    encoded: bytes
    ends: array[int]
    """Offset in `encoded` after each token, with a leading 0: `ends[p]` bytes precede position p."""
    stops: array[int]
    """Ascending positions in the prompt part at which a match may end: 0 and after each control token."""
    children: list[_Node] = field(default_factory=list)
    schemas: Schemas = field(default_factory=dict)
    """Schemas of the tools that the call was offered."""

    @property
    def prompt_end(self) -> int:
        return len(self.call.suffix)

    @property
    def length(self) -> int:
        """Number of tokens of the whole path."""
        return self.start + len(self.tokens)

    @property
    def is_continued(self) -> bool:
        return any(child.start == self.length for child in self.children)

    def reach(self, encoded: bytes, offset: int, limit: int) -> int:
        """Returns the position up to which the segment agrees with `encoded[offset:limit]`."""
        if offset + len(self.encoded) <= limit and encoded.startswith(self.encoded, offset):
            return len(self.tokens)
        return self.position(_agreement(self.encoded, encoded, offset, limit))

    def position(self, num_bytes: int) -> int:
        """Returns the last position that `num_bytes` bytes of the segment cover."""
        return bisect_right(self.ends, num_bytes) - 1

    def stop(self, reach: int, encoded: bytes, offset: int) -> int:
        """Returns where a match that agrees up to `reach` may end: at any sampled token, but not within a character."""
        while reach > self.prompt_end and _continues_character(encoded, offset + self.ends[reach]):
            reach -= 1
        if reach > self.prompt_end:
            return reach
        return self.stops[bisect_right(self.stops, reach) - 1]


class ConversationTree:
    """Calls of one (episode, role). `match` runs before sampling, `add` after it. Recovery repeats the `add`s."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._roots: list[_Node] = []
        self._answers: dict[tuple[str, str], list[Call]] = {}
        self._tools: set[str] = set()
        identities = Identities()
        self.identify, self.keep = identities.of, identities.keep

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(node.call for node in list(self._nodes.values()))  # The copy is atomic if another thread adds.

    def knows(self, call_id: str) -> bool:
        return call_id in self._nodes

    def call(self, call_id: str) -> Call:
        return self._nodes[call_id].call

    def exchange(self, call_id: str) -> tuple[Conversation, Message]:
        """Returns the whole conversation of a call and its answer.

        The tools are those of the first call of the conversation.
        """
        call = first = self._nodes[call_id].call
        messages = call.ask.messages
        while first.ask.after is not None:
            first = self._nodes[first.ask.after].call
            messages = (*first.ask.messages, first.response, *messages)
        return Conversation(messages, first.ask.tools, instructed=first.ask.instructed), call.response

    def offers_tools(self, call_id: str) -> bool:
        """True if the conversation of a call offers tools."""
        return bool(self._nodes[call_id].schemas)

    def leaves(self) -> tuple[Call, ...]:
        """Returns the calls that no later call continues at their end. Each ends a timeline."""
        return tuple(node.call for node in self._nodes.values() if not node.is_continued)

    def num_tokens(self, call_id: str) -> int:
        """Returns the length of a call's prompt + completion."""
        return self._nodes[call_id].length

    def recognise(self, asked: Identity) -> dict[int, Call]:
        """Returns the assistant messages that the policy sampled in answer to the messages before them: index to call.

        Reasoning may be missing from a message, because agents drop it. If several calls fit, the one that the next
        recognised turn continues is returned, else the newest.
        """
        candidates: dict[int, list[Call]] = {}
        for i, message in enumerate(asked.messages):
            if message.role != "assistant":
                continue
            fitting = self._answers.get((asked.prefixes[i], asked.answers[i]), ())
            same = [call for call in fitting if message.reasoning in ("", call.response.reasoning)]
            if same:
                exact = [call for call in same if call.response.reasoning == message.reasoning]
                candidates[i] = exact or same
        found: dict[int, Call] = {}
        after: str | None = None
        for i in reversed(candidates):
            found[i] = next((call for call in candidates[i] if call.id == after), candidates[i][-1])
            after = found[i].ask.after
        return dict(sorted(found.items()))

    def fork_cause(self, asked: Identity, known: Mapping[int, Call], match: Match) -> Fork:
        """Returns why a request with this match begins a timeline. Empty if it continues one or is the tree's first.

        `known` is what `recognise` found. The caller detects the causes `retry` and `role`. Most branches are
        legitimate, and all are trained.
        """
        parent = None if match.parent is None else self._nodes[match.parent]
        if not self._nodes or (parent is not None and match.kept == parent.length and not parent.is_continued):
            return ""
        if asked.tools not in self._tools:
            return "tools"
        if any(message.role == "assistant" and i not in known for i, message in enumerate(asked.messages)):
            return "edit"
        if not known:
            return "branch"
        end = self.num_tokens(newest := known[max(known)].id)
        is_kept = parent is not None and match.kept >= end and _path(parent, end) == self.tokens(newest)
        return "branch" if is_kept else "template"

    def match(self, encoded: bytes, *, to_the_end: bool = False) -> Match:
        """Returns how a prompt, as encoded text, continues the tree. Among equally long paths the newest wins.

        The match may cover the whole prompt only with `to_the_end`: a raw prompt may end with a completion.
        """
        assert encoded, "a prompt has at least one token"
        limit = len(encoded) - (0 if to_the_end else 1)
        best: tuple[int, int, _Node | None, int] = (0, -1, None, 0)
        todo = [(node, 0) for node in self._roots]
        while todo:
            node, offset = todo.pop()
            reach = node.reach(encoded, offset, limit)
            stop = node.stop(reach, encoded, offset)
            num_bytes = offset + node.ends[stop]
            if stop and (num_bytes, node.order) > best[:2]:
                best = (num_bytes, node.order, node, stop)
            for child in node.children:
                at = child.start - node.start
                if at <= reach:
                    todo.append((child, offset + node.ends[at]))
        num_bytes, _, found, stop = best
        if found is None:
            return Match(None, 0, encoded)
        return Match(found.call.id, found.start + stop, encoded[num_bytes:])

    def match_tokens(self, tokens: tuple[int, ...]) -> tuple[Match, str | None]:
        """Returns how a prompt, as tokens, continues the tree, and the newest call that it contains with its answer.

        The longest path of equal tokens is kept, to the last one, and nothing is left to tokenise. Among equally long
        paths the newest wins.
        """
        best: tuple[int, int, _Node | None] = (0, -1, None)
        answered: tuple[int, int, str | None] = (0, -1, None)
        todo = list(self._roots)
        while todo:
            node = todo.pop()
            reach = _agreement(node.tokens, tokens, node.start, len(tokens))
            if reach and (node.start + reach, node.order) > best[:2]:
                best = (node.start + reach, node.order, node)
            if reach == len(node.tokens) and (node.length, node.order) > answered[:2]:
                answered = (node.length, node.order, node.call.id)
            todo += [child for child in node.children if child.start - node.start <= reach]
        kept, _, found = best
        return Match(None if found is None else found.call.id, kept, b""), answered[2]

    def add(self, call: Call, encoded_suffix: Sequence[bytes], encoded_completion: Sequence[bytes]) -> None:
        """Appends a call whose parent, if any, is in the tree. The encoded pieces are one per token."""
        assert call.id not in self._nodes, f"call {call.id} is already in the tree"
        assert len(encoded_suffix) == len(call.suffix) and len(encoded_completion) == len(call.completion)
        parent = self._attachment(call)
        pieces = [*encoded_suffix, *encoded_completion]
        stops = [0, *(i + 1 for i, piece in enumerate(encoded_suffix) if _is_control(piece))]
        node = _Node(
            call=call,
            order=len(self._nodes),
            parent=parent,
            start=call.kept,
            tokens=call.suffix + call.completion,
            encoded=b"".join(pieces),
            ends=array("I", accumulate(map(len, pieces), initial=0)),
            stops=array("I", stops),
        )
        if call.ask.after is None:
            node.schemas = schemas_of(call.ask.tools)
            self._tools.add(tools_key(call.ask.tools))
        elif call.ask.after in self._nodes:
            node.schemas = self._nodes[call.ask.after].schemas
        self._nodes[call.id] = node
        (parent.children if parent else self._roots).append(node)
        self._answers.setdefault((call.prompt_key, answer_key(call.response, node.schemas)), []).append(call)

    def tokens(self, call_id: str) -> tuple[int, ...]:
        """Returns the prompt + completion of a call, exactly as the policy saw them."""
        node = self._nodes[call_id]
        return _path(node, node.length)

    def segments(self, call_id: str) -> list[tuple[str, int]]:
        """Returns the calls on the path of a call, root first, each with the end of its part of the path."""
        node = self._nodes[call_id]
        return [(at.call.id, at.start + count) for at, count in _pieces(node, node.length)]

    def timelines(self, call_ids: Iterable[str]) -> dict[str, str]:
        """Maps each of these calls to the newest of them whose tokens begin with all of its tokens, perhaps itself."""
        wanted = set(call_ids)
        found: dict[str, str] = {}
        for newest, start in reversed(self._nodes.items()):
            if newest not in wanted or newest in found:
                continue
            found[newest] = newest
            node = start
            while (parent := node.parent) is not None and parent.call.id not in found:
                if node.start == parent.length and parent.call.id in wanted:
                    found[parent.call.id] = newest
                node = parent
        return found

    def context_digests(self) -> dict[str, bytes]:
        """Digest of each call's prompt + completion, in time linear in the tokens of all calls."""
        hashes: dict[str, blake2b] = {}
        for call_id, node in self._nodes.items():
            parent = node.parent
            if parent is None or node.start != parent.length:
                before = context_hash(() if parent is None else _path(parent, node.start))
            else:
                before = hashes[parent.call.id]
            hashes[call_id] = context_hash(node.tokens, before=before)
        return {call_id: found.digest() for call_id, found in hashes.items()}

    def clear(self) -> None:
        """Remove all calls, so that their memory is freed without the garbage collector."""
        for node in self._nodes.values():
            node.parent = None
            node.children.clear()
        self._nodes.clear()
        self._roots.clear()

    def encoded_completion(self, call_id: str) -> bytes:
        """Returns the encoded text of a completion: the body that `Renderer.render` takes."""
        node = self._nodes[call_id]
        return node.encoded[node.ends[node.prompt_end] :]

    def encoded_prompt(self, call_id: str) -> bytes:
        """Returns the encoded text of the whole prompt of a call."""
        node = self._nodes[call_id]
        pieces = _pieces(node, node.start + node.prompt_end)
        return b"".join(at.encoded[: at.ends[count]] for at, count in pieces)

    def prompt_tokens(self, match: Match, suffix_tokens: Sequence[int]) -> tuple[int, ...]:
        """Returns the whole prompt of a new call: the tokens that `match` keeps, then the tokenised suffix."""
        kept = _path(self._nodes[match.parent], match.kept) if match.parent else ()
        return kept + tuple(suffix_tokens)

    def _attachment(self, call: Call) -> _Node | None:
        """Returns the node in whose segment the kept tokens end. It may be an ancestor of the call's parent."""
        if call.parent is None:
            assert call.kept == 0, "a call without a parent keeps nothing"
            return None
        node: _Node | None = self._nodes[call.parent]
        assert node is not None and call.kept <= node.length, "a call keeps more tokens than its parent has"
        while node is not None and call.kept <= node.start:
            node = node.parent
        return node


def new_context(conversation: Conversation, known: Mapping[int, Call], fingerprint: str = "") -> NewContext:
    """Returns the new part of a request, given the calls that `ConversationTree.recognise` found in it."""
    if not known:
        return NewContext(conversation.messages, None, conversation.tools, fingerprint, conversation.instructed)
    newest = max(known)
    return NewContext(conversation.messages[newest + 1 :], known[newest].id, (), fingerprint)


def orphans(calls: Sequence[Linked], undelivered: Collection[str]) -> dict[str, OrphanReason]:
    """Returns the calls that are counted but not trained: answers that did not arrive, and side calls.

    Among a request and its retries, the answers that the agent sent back are trained: they arrived, even if the
    transport reported a failure. If it sent none back, the last delivered answer is trained.
    """
    sent_back = {call.after for call in calls}
    first: dict[str, str] = {}
    tries: dict[str, list[Linked]] = {}
    for call in calls:
        first[call.id] = first.get(call.retry_of, call.retry_of) if call.retry_of is not None else call.id
        tries.setdefault(first[call.id], []).append(call)
    found: dict[str, OrphanReason] = {}
    found |= {call.id: "side" for call in calls if call.untrained}
    for same in tries.values():
        kept = {call.id for call in same if call.id in sent_back}
        if not kept:
            kept = {call.id for call in [call for call in same if call.id not in undelivered][-1:]}
        for call in same:
            if call.id not in kept and call.id not in found:
                found[call.id] = "undelivered" if call.id in undelivered else "retry"
    return found


def _pieces(node: _Node, length: int) -> list[tuple[_Node, int]]:
    """Returns the nodes of the first `length` tokens on the path to the end of `node`, and the tokens of each."""
    pieces: list[tuple[_Node, int]] = []
    at: _Node | None = node
    while at is not None:
        if length > at.start:
            pieces.append((at, length - at.start))
            length = at.start
        at = at.parent
    return pieces[::-1]


def _path(node: _Node, length: int) -> tuple[int, ...]:
    """Returns the first `length` tokens on the path from the root to the end of `node`."""
    return tuple(chain.from_iterable(at.tokens[:count] for at, count in _pieces(node, length)))


def _agreement(segment: SequenceT, encoded: SequenceT, offset: int, limit: int) -> int:
    """Returns how many items of `segment` agree with `encoded[offset:limit]`, by bisection over comparisons."""
    low, high = 0, min(len(segment), limit - offset)
    while low < high:
        middle = (low + high + 1) // 2
        if encoded[offset + low : offset + middle] == segment[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _is_control(piece: bytes) -> bool:
    return piece.startswith(ESCAPE) and len(piece) == len(ESCAPED_BYTE) and piece != ESCAPED_BYTE


def _continues_character(encoded: bytes, offset: int) -> bool:
    return offset < len(encoded) and encoded[offset] & 0xC0 == 0x80


# ---- equality by meaning ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Identity:
    """The keys of a conversation with n messages.

    `answers[i]` is `answer_key` of message i. `prefixes[i]` is the key of the conversation before message i;
    `prefixes[n]` is the key of all of it.
    """

    messages: tuple[Message, ...]
    answers: tuple[str, ...]
    prefixes: tuple[str, ...]

    @property
    def key(self) -> str:
        """Hex digest of the conversation's meaning, including its tools."""
        return self.prefixes[-1]

    @property
    def tools(self) -> str:
        """The `tools_key` of the conversation."""
        return self.prefixes[0]

    def continues(self, other: Identity) -> bool:
        """True if this conversation begins with all of another one."""
        length = len(other.messages)
        return self.tools == other.tools and _num_common(other.messages, self.messages) == length


class Identities:
    """Computes identities of successive conversations.

    Agents send their whole history each time. So messages that a conversation shares with one of the last few that
    were kept are neither hashed nor stored again.
    """

    def __init__(self) -> None:
        self._last: list[Identity] = []

    def of(self, conversation: Conversation) -> Identity:
        """Returns the identity of a conversation. It does not depend on earlier conversations, and is not kept."""
        tools, schemas = tools_key(conversation.tools), schemas_of(conversation.tools)
        known, same = Identity((), (), (tools,)), 0
        for other in self._last:
            if other.tools == tools and (common := _num_common(other.messages, conversation.messages)) > same:
                known, same = other, common
        answers, prefixes = list(known.answers[:same]), list(known.prefixes[: same + 1])
        for message in conversation.messages[same:]:
            answers.append(answer_key(message, schemas))
            prefixes.append(_digest([prefixes[-1], answers[-1]]))
        return Identity(known.messages[:same] + conversation.messages[same:], tuple(answers), tuple(prefixes))

    def keep(self, asked: Identity) -> None:
        """Keeps a conversation for the next ones. One that only grew is stored once."""
        others = [other for other in self._last if not asked.continues(other)]
        self._last = [*others[1 - REMEMBERED :], asked]


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """Returns the schemas of the arguments in a tool list."""
    functions = (tool.get("function", {}) for tool in tools)
    return {function.get("name", ""): function.get("parameters") for function in functions}


def answer_key(message: Message, schemas: Schemas = MappingProxyType({})) -> str:
    """Returns a hex digest of a message's meaning, without the parts that agents change in an answer.

    Most agents drop the reasoning, some add a name, and some drop or add arguments that are defaults of `schemas`.
    """
    calls = [[call.id, call.name, _arguments(call, schemas.get(call.name))] for call in message.tool_calls]
    name = "" if message.role == "assistant" else message.name
    return _digest([message.role, message.content, calls, message.tool_call_id, name])


def raw_key(prompt: str | Sequence[int]) -> str:
    """Returns the hex digest of a raw prompt."""
    return _digest(["prompt", prompt])


def tools_key(tools: Sequence[Mapping[str, Any]]) -> str:
    """Returns the hex digest of a tool list."""
    return _digest(["tools", *tools])


def context_hash(*stretches: Sequence[int], before: blake2b | None = None) -> blake2b:
    """Returns a hash of 16 bytes of a sequence of tokens, which continues `before`."""
    found = blake2b(digest_size=16) if before is None else before.copy()
    for tokens in stretches:
        found.update(array("I", tokens))  # Packing signed integers takes four times as long.
    return found


def _num_common(known: Sequence[Message], messages: Sequence[Message]) -> int:
    """Returns the length of the common prefix. Messages hold text only, so equal messages are the same."""
    return next(compress(count(), map(ne, known, messages)), min(len(known), len(messages)))


def _arguments(call: ToolCall, schema: Any) -> list[Any]:
    """Returns JSON arguments by value and others as text. The first item distinguishes the two."""
    try:
        value = _plain_numbers(call.value())
    except ValueError:
        return ["text", call.arguments]
    return ["json", _without_defaults(value, schema)]


def _without_defaults(value: Any, schema: Any) -> Any:
    """Returns a JSON value without the keys whose value is the default in the schema."""
    if not isinstance(schema, Mapping):
        return value
    if isinstance(value, list):
        return [_without_defaults(item, schema.get("items")) for item in value]
    properties = schema.get("properties")
    if not isinstance(value, dict) or not isinstance(properties, Mapping):
        return value
    return {
        key: _without_defaults(item, properties.get(key))
        for key, item in value.items()
        if not _is_default(item, properties.get(key))
    }


def _is_default(value: Any, schema: Any) -> bool:
    if not isinstance(schema, Mapping) or "default" not in schema:
        return False
    return _digest(value) == _digest(_plain_numbers(schema["default"]))  # In Python False equals 0.


def _plain_numbers(value: Any) -> Any:
    """Replaces 1.0 by 1, as JavaScript writes it."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain_numbers(item) for key, item in value.items()}
    return value


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=dict)
    return blake2b(text.encode(), digest_size=16).hexdigest()
