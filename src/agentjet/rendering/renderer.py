"""Messages to tokens and back: `Renderer`, with the chat template of a model and the parser of its completions.

`render` is cheap and runs on the whole conversation of every call. `tokenize` is expensive and runs on the new suffix
only (see `timeline.ConversationTree.match`). Two rules keep tokens exact:

* `encode_tokens` of `tokenize` returns the same bytes;
* text from clients never becomes a control token.

The template is Jinja source from the folder of the model. It runs in a sandbox with the filters and globals of
`transformers.apply_chat_template`. Before rendering, every string from a client is guarded: the noncharacter `GUARD` is
inserted into each control-token literal, and at ends that could complete one. A literal that is whole after rendering
is a control token; the guard is removed from the rest.

History. `render(conversation, sampled={i: encoded text of a completion})` writes assistant message i as it was sampled,
directly after the generation prompt. Differences such as JSON spacing, half a character or a space that the template
adds then do not fork the tree. Before each completion, `front.prompts` adds `generation_tail`.

* With `history = "as_sampled"`, `front.prompts` does this for every recognised turn.
* With `history = "template"`, it does this for recognised turns without reasoning, or whose reasoning the template
  keeps. The template writes the other turns, and can remove their reasoning.

A tool format has the name of its first users: `hermes` is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`
(Qwen, SmolLM2 with our template), `mistral` is `[TOOL_CALLS][{...}, ...]`, `llama3` is a bare
`{"name": ..., "parameters": {...}}`. The parser leaves malformed text as content.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentjet.errors import ConfigError, InvalidRequest
from agentjet.rendering.vocabulary import TextStream, Vocabulary, escape
from agentjet.types import Conversation, Message, ModelInfo, ToolCall

# ---- the chat template -----------------------------------------------------------------------------------------------

TEMPLATES = Path(__file__).parent / "templates"
SMOLLM2 = "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788"
"""SHA-256 of the chat template that all SmolLM2-Instruct models have."""


def template_for(model_name: str, own_template: str | Mapping[str, str]) -> tuple[str, str]:
    """Returns the chat template (Jinja source) and the tool format of a model. `own_template` is that of its folder.

    A model may have named templates. Then `tool_use` renders conversations with tools, and `default` the others: the
    rule of `transformers`. SmolLM2's exact template ignores tools, so one of this package replaces it. The rest is
    identical. Raises `ConfigError` for a model without a template.
    """
    own = own_template if isinstance(own_template, str) else _of_names(model_name, own_template)
    is_bundled = not own.strip() and Path(model_name).name.lower() == "smollm2-135m"
    if is_bundled or hashlib.sha256(own.strip().encode()).hexdigest() == SMOLLM2:
        return (TEMPLATES / "smollm2.jinja").read_text(encoding="utf-8"), "hermes"
    if not own.strip():
        raise ConfigError(
            f"model {model_name!r} has no chat template: train a chat model, or add chat_template.jinja to it"
        )
    return own, _tool_format(own)


def _of_names(model_name: str, templates: Mapping[str, str]) -> str:
    """Returns one template that renders as a model's named templates. Raises `ConfigError` without a default."""
    if "default" not in templates:
        names = ", ".join(map(repr, sorted(templates)))
        raise ConfigError(
            f"model {model_name!r} has chat templates named {names} and none named 'default': add the one to use as "
            "chat_template.jinja to its folder"
        )
    if "tool_use" not in templates:
        return templates["default"]
    # Jinja drops the last newline of a source. The plus signs keep the other white space at the ends of the two.
    with_tools, without = (templates[name].removesuffix("\n") for name in ("tool_use", "default"))
    return f"{{% if tools +%}}{with_tools}{{%+ else +%}}{without}{{%+ endif %}}"


def _tool_format(template: str) -> str:
    """Returns the tool format of a template (see `TOOL_FORMATS`), or "" if it has no tools or an unknown format."""
    if "tools" not in template:
        return ""
    if "<tool_call>" in template and "<function=" not in template:
        return "hermes"
    if "[TOOL_CALLS]" in template and "[ARGS]" not in template:
        return "mistral"
    return "llama3" if '"parameters": ' in template else ""


_DICT_NAMES = frozenset(dir(dict))
"""Attributes of a dict. For these names, Jinja decides between key and method, and if the method may be called."""
_LOOP_NAMES = frozenset({"index", "index0", "revindex", "revindex0", "first", "last", "length", "previtem", "nextitem"})


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a fast path for plain dicts and loop variables. Build with `make_sandbox`.

    Templates read these thousands of times in a call. Jinja's safety check of each access raises and catches
    exceptions; for plain dicts and loops its result is known.
    """

    def getitem(self, obj: Any, argument: Any) -> Any:
        if type(obj) is dict and type(argument) is str and argument not in _DICT_NAMES:
            return obj[argument] if argument in obj else self.undefined(obj=obj, name=argument)
        return super().getitem(obj, argument)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _DICT_NAMES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) is LoopContext and attribute in _LOOP_NAMES:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


def make_sandbox() -> Sandbox:
    """Returns a sandbox with the filters and globals of `transformers.apply_chat_template`."""
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


class _Generation(jinja2.ext.Extension):
    """Ignores the tag `{% generation %}`, which marks assistant text for training on transcripts."""

    tags = {"generation"}  # noqa: RUF012  the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


GUARD, SLOT, MARK = "\ufdd0", "\ufdd1", "\ufdd2"
"""Unicode reserves these noncharacters for internal use. `MARK` is for callers of `ChatTemplate.render`."""
_RESERVED = re.compile(f"[{GUARD}{SLOT}]")
_TEMPLATE_FAULTS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip
OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"})
"""Template variables that only this module sets."""


@dataclass(frozen=True, slots=True)
class BodySlot:
    """The place of the body of assistant message `index`.

    If `in_call` is true, the slot replaces only the name of the first tool call. The body then reaches from the start
    of the turn to the control token that ends it.
    """

    index: int
    in_call: bool = False


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered conversation: n + 1 plain `texts`, separated by n `marks`.

    A mark is the literal of a control token that the template wrote, or a slot.
    """

    texts: list[str]
    marks: list[str | BodySlot]


class ChatTemplate:
    """Renders conversations to text, control tokens and slots."""

    def __init__(self, source: str, *, control: Collection[str], bos_token: str = "", eos_token: str = "") -> None:
        """`control` contains the literals of the control tokens. Raises `ConfigError` if the source is invalid."""
        environment = make_sandbox()
        try:
            self._template = environment.from_string(source)
            variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template does not compile: {error}") from error
        self._supports_tools = "tools" in variables
        self._supports_tool_calls = "tool_calls" in source
        self._supports_developer = "developer" in source
        self._splits_reasoning = re.search(r"""['"]</think>['"]\s+in\b""", source) is not None
        """True if the template searches for `</think>` in assistant messages. It would not find the guarded literal."""
        self._short_ids = re.search(r"length\s*!=\s*9\b", source) is not None
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._literals = _Literals(control)

    def render(
        self,
        conversation: Conversation,
        *,
        slots: Collection[int] = (),
        call_slots: Collection[int] = (),
        generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Returns the rendered conversation.

        The assistant messages in `slots` become slots, including their tool calls. In the messages in
        `call_slots`, only the name of the first tool call becomes a slot: some templates need the rest. `variables`
        are additional template variables, none of `OWN_VARIABLES`.

        Raises `InvalidRequest` if the template refuses the conversation or ignores its tools.
        """
        self._refuse_unknown(conversation, slots)
        messages: list[dict[str, Any]] = []
        for i, message in enumerate(conversation.messages):
            if i in slots:
                messages.append({"role": "assistant", "content": f"{SLOT}{i}{SLOT}"})
                continue
            messages.append(self._plain(message))
            if i in call_slots:
                messages[i]["tool_calls"][0]["function"]["name"] = f"{SLOT}{i}{SLOT}"
        tools = [self._literals.guarded(dict(tool), "tools") for tool in conversation.tools] or None
        try:
            output = self._template.render(
                **(variables or {}),
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=generation_prompt,
                **self._tokens,
            )
        except _TEMPLATE_FAULTS as error:
            raise InvalidRequest(
                f"the model's chat template refuses this conversation: {error}", code="template_error", param="messages"
            ) from error
        pieces = self._literals.split(output)
        texts = pieces[::2]
        slot_of = {f"{SLOT}{i}{SLOT}": BodySlot(i, i in call_slots) for i in (*slots, *call_slots)}
        marks = [slot_of.get(mark, mark) for mark in pieces[1::2]]
        if any(SLOT in text for text in texts):
            raise InvalidRequest("the model's chat template changes the text of a slot", code="template_error")
        return Rendered([text.replace(GUARD, "") for text in texts], marks)

    def _plain(self, message: Message) -> dict[str, Any]:
        """Returns a message as templates expect it: without empty fields, and with JSON arguments as values."""
        role = "system" if message.role == "developer" and not self._supports_developer else message.role
        if self._splits_reasoning and role == "assistant" and not message.reasoning and "</think>" in message.content:
            reasoning, _, _ = message.content.partition("</think>")
            content = message.content.rpartition("</think>")[2].lstrip("\n")
            message = replace(message, content=content, reasoning=reasoning.rpartition("<think>")[2].strip("\n"))
        guarded = self._literals.guarded
        plain: dict[str, Any] = {"role": role, "content": guarded(message.content)}
        if message.reasoning:
            plain["reasoning_content"] = plain["thinking"] = guarded(message.reasoning)
        if message.tool_calls:
            plain["tool_calls"] = [
                {
                    "id": guarded(self._call_id(call.id)),
                    "type": "function",
                    "function": {"name": guarded(call.name), "arguments": guarded(_json_object(call))},
                }
                for call in message.tool_calls
            ]
        if message.tool_call_id:
            plain["tool_call_id"] = guarded(self._call_id(message.tool_call_id))
        if message.name:
            plain["name"] = guarded(message.name)
        return plain

    def _call_id(self, id_: str) -> str:
        """Returns a valid id for Mistral's templates, which refuse ids other than nine letters or digits."""
        if not self._short_ids or (len(id_) == 9 and id_.isalnum()):
            return id_
        return hashlib.blake2b(id_.encode(errors="surrogatepass")).hexdigest()[:9]

    def _refuse_unknown(self, conversation: Conversation, slots: Collection[int]) -> None:
        if not conversation.messages:
            raise InvalidRequest("messages is empty", param="messages")
        if conversation.tools and not self._supports_tools:
            raise InvalidRequest("this model's chat template ignores tools", code="tools_not_supported", param="tools")
        rendered = (message for i, message in enumerate(conversation.messages) if i not in slots)
        if not self._supports_tool_calls and any(message.tool_calls for message in rendered):
            raise InvalidRequest(
                "this model's chat template ignores tool_calls of earlier messages",
                code="tools_not_supported",
                param="messages",
            )


class _Literals:
    """The control-token literals, prepared for searches. Longer literals come first and take precedence."""

    def __init__(self, literals: Collection[str]) -> None:
        ordered = sorted(literals, key=lambda literal: (-len(literal), literal))
        self.split = re.compile(rf"({'|'.join([*map(re.escape, ordered), rf'{SLOT}[0-9]+{SLOT}'])})").split
        """Splits rendered text into n + 1 texts and, between them, n literals or slots."""
        # The look-ahead finds overlapping literals. Grouping by the first character makes the scan of plain text fast.
        firsts = {literal[0]: [other[1:] for other in ordered if other[0] == literal[0]] for literal in ordered}
        self._first_of_literal = re.compile(
            "|".join(f"{re.escape(c)}(?={'|'.join(map(re.escape, rests))})" for c, rests in firsts.items()) or r"(?!)"
        )
        self._ordered = ordered
        self._longest = max(map(len, ordered), default=0)
        heads = {literal[:n] for literal in ordered for n in range(1, len(literal))}
        tails = {literal[n:] for literal in ordered for n in range(1, len(literal))}
        self._heads_by_end = {c: tuple(head for head in heads if head[-1] == c) for c in {head[-1] for head in heads}}
        self._tails_by_start = {c: tuple(tail for tail in tails if tail[0] == c) for c in {tail[0] for tail in tails}}

    def _may_begin_at_end_of(self, text: str) -> bool:
        return text.endswith(self._heads_by_end.get(text[-1:], ()))

    def _may_end_at_start_of(self, text: str) -> bool:
        """True also if `text` is inside a literal. Words such as "object" in a JSON schema must stay unchanged."""
        if text.isalnum():
            return False
        if text.startswith(self._tails_by_start.get(text[:1], ())):
            return True
        return 0 < len(text) < self._longest and any(text in literal for literal in self._ordered)

    def guarded(self, value: Any, param: str = "messages") -> Any:
        """Returns a copy of a value with the guard in every string of it.

        Raises `InvalidRequest` for the request parameter `param` if a string contains a reserved noncharacter.
        """
        if isinstance(value, str):
            if not value.isascii() and (found := _RESERVED.search(value)):
                name = f"U+{ord(found[0]):04X}"
                message = f"{param}: the text contains {name}, which Unicode reserves for internal use: remove it."
                raise InvalidRequest(message, code="invalid_text", param=param)
            marked = self._first_of_literal.sub(lambda found: found[0] + GUARD, value)
            before = GUARD if self._may_end_at_start_of(value) else ""
            return before + marked + (GUARD if self._may_begin_at_end_of(value) else "")
        if isinstance(value, Mapping):
            return {self.guarded(key, param): self.guarded(item, param) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.guarded(item, param) for item in value]
        return value


def _json_object(call: ToolCall) -> Any:
    """Returns the arguments as a value if they are a JSON object, else as text."""
    try:
        value = call.value()
    except ValueError:
        return call.arguments
    return value if isinstance(value, dict) else call.arguments


# ---- the parser of completions ---------------------------------------------------------------------------------------

_JSON = json.JSONDecoder()
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
"""Literals that the parser searches for. Some vocabularies have them as special tokens, which are normally hidden."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The syntax of tool calls."""

    opening: str
    """Text before a call, or before the list of calls. Empty if a call is the whole completion."""
    closing: str
    arguments: str
    """Key of the arguments in the JSON of a call."""
    listed: bool
    """True if all calls form one JSON list."""


TOOL_FORMATS = {
    "hermes": ToolFormat("<tool_call>", "</tool_call>", "arguments", listed=False),
    "mistral": ToolFormat("[TOOL_CALLS]", "", "arguments", listed=True),
    "llama3": ToolFormat("", "", "parameters", listed=False),
}

Found = tuple[str, str]
"""Name and arguments (JSON text) of a tool call."""


def parse_completion(text: str, *, reasons: bool, in_reasoning: bool, tool_format: str, id_prefix: str) -> Message:
    """Returns the assistant message of a completion.

    With `reasons`, a leading `<think>` block is parsed; with `in_reasoning`, the prompt has already opened it. With an
    empty `tool_format`, tool calls are not parsed. The ids of tool calls are `<id_prefix>_0`, `<id_prefix>_1`, ...
    """
    reasoning = ""
    if reasons:
        reasoning, text = _split_reasoning(text, in_reasoning)
    content, found = _split_calls(text, TOOL_FORMATS[tool_format]) if tool_format else (text, [])
    calls = tuple(ToolCall(f"{id_prefix}_{i}", name, arguments) for i, (name, arguments) in enumerate(found))
    return Message("assistant", content, reasoning, calls)


def _split_reasoning(text: str, in_reasoning: bool) -> tuple[str, str]:
    """Returns the reasoning and the text after it. Truncated reasoning has no text after it."""
    opened = text.lstrip()
    if opened.startswith("<think>"):
        opened = opened.removeprefix("<think>")
    elif not in_reasoning:
        return "", text
    reasoning, _, rest = opened.partition("</think>")
    return reasoning.strip("\n"), rest.lstrip("\n")


def _split_calls(text: str, tool_format: ToolFormat) -> tuple[str, list[Found]]:
    if not tool_format.opening:
        found = _calls(text.strip().removeprefix("<|python_tag|>"), tool_format.arguments)
        return ("", found) if found else (text, [])
    found = []

    def take(block: re.Match[str]) -> str:
        calls = _calls(block[1].strip(), tool_format.arguments)
        found.extend(calls)
        return "" if calls else block[0]

    end = rf"(?:{re.escape(tool_format.closing)}|\Z)" if tool_format.closing else r"\Z"
    content = re.sub(rf"{re.escape(tool_format.opening)}(.*?){end}", take, text, flags=re.DOTALL)
    return (content.strip(), found) if found else (text, [])


def _calls(block: str, key: str) -> list[Found]:
    """Returns the calls of a JSON object or of a list of objects; none if one of them is malformed."""
    try:
        value = json.loads(block)
        return [_call(item, key, "") for item in value] if isinstance(value, list) else [_call(value, key, block)]
    except (ValueError, RecursionError):
        return []


def _call(value: Any, key: str, source: str) -> Found:
    """Raises `ValueError` for a malformed call."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise ValueError("a call is an object with a name")
    arguments = value.get(key, {})
    if isinstance(arguments, dict):
        arguments = _as_written(source, key, arguments)
    elif not isinstance(arguments, str) or not isinstance(json.loads(arguments), dict):  # some write a JSON string
        raise ValueError("arguments are an object")
    (value["name"] + arguments).encode()  # Raises for an unpaired surrogate, which JSON escapes can write.
    return value["name"], arguments


def _as_written(source: str, key: str, arguments: dict[str, Any]) -> str:
    """Returns the text of the arguments in `source`. If it cannot be found, returns them as new JSON."""
    for at in re.finditer(rf'"{key}"\s*:\s*', source):
        try:
            value, end = _JSON.raw_decode(source, at.end())
        except ValueError:
            continue
        if value == arguments:
            return source[at.end() : end]
    return json.dumps(arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class OutputStyle:
    """Properties of a model that its grammars depend on. `control` has the ids of the control tokens by literal."""

    tool_format: str
    reasons: bool
    in_reasoning: bool
    control: Mapping[str, int]


# ---- the renderer ----------------------------------------------------------------------------------------------------


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
