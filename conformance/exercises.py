"""Every client and what it is asked to do. A client is green when all of its exercises are."""

from __future__ import annotations

from dataclasses import replace

from conformance.conversation import (
    ANSWERS,
    FIRST,
    FORGETTING,
    OPENING,
    SECOND,
    STRICT_ADD,
    STRICT_TWO_QUESTIONS,
    THINKING,
    TWO_QUESTIONS,
    Turn,
    asked,
    calling,
    told,
)
from conformance.episode import Exercise
from conformance.product_exercises import PACKAGES as PRODUCT_PACKAGES
from conformance.product_exercises import PRODUCTS

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "chat", "completions", "responses", "messages"
GENERATE = "token ids"
OPENAI, ANTHROPIC, AGENTS = "openai", "anthropic", "openai-agents"
LANGCHAIN, PYDANTIC_AI, SMOLAGENTS = "langchain", "pydantic-ai", "smolagents"
LITELLM, AGENTSCOPE, AUTOGEN, DSPY = "litellm", "agentscope", "autogen", "dspy"
CREWAI, HTTP, VERIFIERS = "crewai", "plain HTTP", "verifiers"
NODE_OPENAI, NODE_AI = "npm openai", "npm ai"

PACKAGES = {
    LANGCHAIN: ("langchain-openai", "langgraph"),
    PYDANTIC_AI: ("pydantic-ai-slim",),
    AUTOGEN: ("autogen-agentchat", "autogen-ext"),
    NODE_AI: ("npm ai", "npm @ai-sdk/openai"),
    HTTP: (),
    **PRODUCT_PACKAGES,
}
"""Package names that differ from the client's name."""

ASKS_TO_ADD, ASKS_STRICTLY = TWO_QUESTIONS[0], STRICT_TWO_QUESTIONS[0]
JSON_ANSWER = '{"total":42,"currency":"€"}'


def faithful(client: str, name: str, dialect: str, *command: str) -> Exercise:
    """The conversation of two questions by a client that keeps its history: one timeline."""
    return Exercise(client, name, dialect, command, TWO_QUESTIONS, ANSWERS[1])


def strict(exercise: Exercise) -> Exercise:
    """The same with strict tools: calls must follow the tool's schema."""
    return replace(exercise, turns=STRICT_TWO_QUESTIONS, is_constrained=True)


def thinks(exercise: Exercise, remark: str, *, history: str = "as_sampled") -> Exercise:
    """The same conversation with a model that thinks."""
    turns = THINKING if history == "as_sampled" else FORGETTING
    name = f'a model that thinks, `history = "{history}"`'
    return replace(exercise, name=name, turns=turns, remark=remark, template="qwen3", history=history)


def speaking(exercise: Exercise) -> Exercise:
    """The same by a client whose model name selects an agent role, and that is rewarded as this role."""
    return replace(exercise, name="as `policy@reckoner`, rewarded by role", role="reckoner")


def on_the_page(client: str, heading: str, *turns: Turn, answer: str = "1.0", strict: bool = False) -> Exercise:
    """The agent below a heading of `docs/frameworks.md`, which prints its reward."""
    command = ("page_agent.mjs",) if heading == "JavaScript" else ("page_agent.py", heading)
    return Exercise(client, "the agent of `docs/frameworks.md`", CHAT, command, turns, answer, is_constrained=strict)


VOTES = (
    ASKS_TO_ADD,
    Turn(calling(("add", '{"a": 40, "b": 3}')), sees=(FIRST,)),
    Turn("42.", adds=told("42")),
    Turn("43.", adds=told("43")),
)
STRUCTURED = (
    ASKS_STRICTLY,
    Turn(JSON_ANSWER, adds=told("42")),
    Turn('{"total": 85, "currency": "€"}', adds=asked(SECOND)),
)
ACTING_IN_TEXT = (
    Turn("Action: add(17,  25)\nObservation:", sees=(FIRST,), stopped=True),
    Turn(f"Answer: {ANSWERS[0]}", adds=" 42\n"),
)
BY_IDS = (
    Turn(ANSWERS[0], sees=("<|im_start|>user\n", "What is 17 + 25?")),
    Turn("84 €.", adds=asked("Now double it.")),
)
HANDOFF = (
    Turn(calling(("transfer_to_reckoner", "{}")), sees=("You pass questions on.", '"transfer_to_reckoner"', FIRST)),
    Turn(calling(STRICT_ADD), sees=("You reckon.", '"add"', FIRST), fork="tools"),
    Turn(ANSWERS[0], adds=told("42")),
)
TYPED = (ASKS_STRICTLY, Turn(calling(("final_result", JSON_ANSWER)), adds=told("42")))
JSON_AFTER_TOOL = (ASKS_STRICTLY, Turn(JSON_ANSWER, adds=told("42")))

MULTIPLY = ("multiply", '{"a": 42, "b":2}')
SMOL_TOOLS = (
    Turn(calling(STRICT_ADD), sees=("<tools>", '"add"', FIRST)),
    Turn(calling(("final_answer", '{"answer": "42 €"}')), sees=(FIRST, "Observation:\n42"), fork="edit"),
    Turn(calling(MULTIPLY), sees=("Observation:\n42", "42 €", "New task:\nNow double it."), fork="edit"),
    Turn(
        calling(("final_answer", '{"answer": "84 €"}')),
        sees=("New task:\nNow double it.", "Observation:\n84"),
        fork="edit",
    ),
)
SMOL_CODE = (
    Turn("Thought: I add.\n<code>\nprint(add(17,  25))\n</code>", sees=(FIRST,), stopped=True),
    Turn('<code>\nfinal_answer("42 €")\n</code>', sees=(FIRST, "I add.", "Observation:\n", "42"), stopped=True),
    Turn("<code>\nprint(multiply(42, 2))\n</code>", sees=("42 €", "New task:\nNow double it."), stopped=True),
    Turn('<code>\nfinal_answer("84 €")\n</code>', sees=("Now double it.", "multiply", "84"), stopped=True),
)


def fields(**values: str) -> str:
    """An answer as DSPy's chat adapter wants it."""
    return "\n\n".join(f"[[ ## {name} ## ]]\n{value}" for name, value in {**values, "completed": ""}.items()).strip()


DSPY_REACT = (
    Turn(
        fields(next_thought="I add.", next_tool_name="add", next_tool_args='{"a":17,  "b": 25}'),
        sees=("(1) add", FIRST),
    ),
    Turn(
        fields(next_thought="Done.", next_tool_name="finish", next_tool_args="{}"),
        sees=(FIRST, "I add.", "[[ ## observation_0 ## ]]\n42"),
        fork="branch",
    ),
    Turn(
        fields(reasoning="The tool said so.", answer=ANSWERS[0]),
        sees=(FIRST, "[[ ## observation_0 ## ]]\n42", "Done.", "Completed."),
        fork="branch",
    ),
)
DSPY_NATIVE = (
    ASKS_TO_ADD,
    Turn(
        calling(("submit", f'{{"answer": "{ANSWERS[0]}"}}')), sees=(FIRST, told("42").removesuffix(OPENING), "Respond")
    ),
)

SMOL_CODE_AGENT = Exercise(
    SMOLAGENTS,
    "`CodeAgent`, stop strings",
    CHAT,
    ("smolagents_agent.py", "code"),
    SMOL_CODE,
    "84 €",
    "rewrites its calls, but behind the sampled tokens: one timeline",
)
DSPY_NATIVE_TOOLS = Exercise(
    DSPY,
    "`ReActV2`, native tool calls",
    CHAT,
    ("dspy_agent.py", "native"),
    DSPY_NATIVE,
    ANSWERS[0],
    "asks for its fields again after every result; needs a setting that the model takes tools",
)

EXERCISES = (
    faithful(OPENAI, "tools, parallel calls", CHAT, "openai_sdk.py", "chat"),
    faithful(OPENAI, "the same, streamed", CHAT, "openai_sdk.py", "streaming"),
    Exercise(OPENAI, "`n` = 2, both go on", CHAT, ("openai_sdk.py", "votes"), VOTES, "42. 43."),
    Exercise(
        OPENAI,
        "strict tools, `response_format`, streamed too",
        CHAT,
        ("openai_sdk.py", "structured"),
        STRUCTURED,
        "42 85",
        is_constrained=True,
    ),
    thinks(
        faithful(OPENAI, "", CHAT, "openai_sdk.py", "chat"),
        "the template strips what was thought before the last question",
        history="template",
    ),
    Exercise(
        OPENAI,
        "actions in plain text, a stop string",
        COMPLETIONS,
        ("openai_sdk.py", "completions"),
        ACTING_IN_TEXT,
        ANSWERS[0],
    ),
    faithful(OPENAI, "tools, parallel calls", RESPONSES, "openai_sdk.py", "responses"),
    faithful(OPENAI, "the same, streamed", RESPONSES, "openai_sdk.py", "responses-streaming"),
    speaking(faithful(OPENAI, "", CHAT, "openai_sdk.py", "chat")),
    speaking(faithful(OPENAI, "", RESPONSES, "openai_sdk.py", "responses")),
    faithful(ANTHROPIC, "tools, parallel calls", MESSAGES, "anthropic_sdk.py", "plain"),
    faithful(ANTHROPIC, "the same, streamed", MESSAGES, "anthropic_sdk.py", "streaming"),
    faithful(ANTHROPIC, "the SDK's tool runner", MESSAGES, "anthropic_sdk.py", "runner"),
    thinks(
        faithful(ANTHROPIC, "", MESSAGES, "anthropic_sdk.py", "streaming"), "the thoughts come back as thinking blocks"
    ),
    speaking(faithful(ANTHROPIC, "", MESSAGES, "anthropic_sdk.py", "plain")),
    strict(faithful(AGENTS, "strict tools, a session", RESPONSES, "openai_agents.py", "responses")),
    strict(faithful(AGENTS, "the same, streamed", RESPONSES, "openai_agents.py", "responses-streaming")),
    strict(faithful(AGENTS, "the same", CHAT, "openai_agents.py", "chat")),
    Exercise(
        AGENTS,
        "a handoff",
        CHAT,
        ("openai_agents.py", "handoff"),
        HANDOFF,
        ANSWERS[0],
        "the second agent has other instructions and tools",
        is_constrained=True,
    ),
    speaking(strict(faithful(AGENTS, "", RESPONSES, "openai_agents.py", "responses"))),
    faithful(LANGCHAIN, "a graph with a checkpointer", CHAT, "langgraph_agent.py", "chat"),
    faithful(LANGCHAIN, "the same, streamed", CHAT, "langgraph_agent.py", "streaming"),
    faithful(LANGCHAIN, "the same", RESPONSES, "langgraph_agent.py", "responses"),
    thinks(
        faithful(LANGCHAIN, "", CHAT, "langgraph_agent.py", "chat"),
        "the client forgets the thoughts, the policy is fed them all the same",
    ),
    speaking(faithful(LANGCHAIN, "", CHAT, "langgraph_agent.py", "chat")),
    strict(faithful(PYDANTIC_AI, "tools, a message history", CHAT, "pydantic_ai_agent.py", "chat")),
    strict(faithful(PYDANTIC_AI, "the same, streamed as events", CHAT, "pydantic_ai_agent.py", "streaming")),
    strict(faithful(PYDANTIC_AI, "the same", RESPONSES, "pydantic_ai_agent.py", "responses")),
    Exercise(
        PYDANTIC_AI,
        "typed output, `tool_choice` required",
        CHAT,
        ("pydantic_ai_agent.py", "typed"),
        TYPED,
        "42 €",
        is_constrained=True,
    ),
    speaking(strict(faithful(PYDANTIC_AI, "", CHAT, "pydantic_ai_agent.py", "chat"))),
    Exercise(
        SMOLAGENTS,
        "`ToolCallingAgent`, `tool_choice` required",
        CHAT,
        ("smolagents_agent.py", "tools"),
        SMOL_TOOLS,
        "84 €",
        'rewrites every tool call and result as text ("Calling tools: ...")',
        is_constrained=True,
    ),
    SMOL_CODE_AGENT,
    speaking(replace(SMOL_CODE_AGENT, remark="")),
    faithful(LITELLM, "tools, parallel calls", CHAT, "litellm_sdk.py", "plain"),
    faithful(LITELLM, "the same, streamed", CHAT, "litellm_sdk.py", "streaming"),
    speaking(faithful(LITELLM, "", CHAT, "litellm_sdk.py", "plain")),
    faithful(AGENTSCOPE, "an agent with a toolkit", CHAT, "agentscope_agent.py", "plain"),
    faithful(AGENTSCOPE, "the same, streamed", CHAT, "agentscope_agent.py", "streaming"),
    speaking(faithful(AGENTSCOPE, "", CHAT, "agentscope_agent.py", "plain")),
    faithful(AUTOGEN, "an `AssistantAgent` with tools", CHAT, "autogen_agent.py", "plain"),
    faithful(AUTOGEN, "the same, streamed", CHAT, "autogen_agent.py", "streaming"),
    speaking(faithful(AUTOGEN, "", CHAT, "autogen_agent.py", "plain")),
    Exercise(
        DSPY,
        "`ReAct`",
        CHAT,
        ("dspy_agent.py", "react"),
        DSPY_REACT,
        ANSWERS[0],
        "has no history: every step is a new question that quotes the steps before",
    ),
    DSPY_NATIVE_TOOLS,
    speaking(replace(DSPY_NATIVE_TOOLS, remark="")),
    Exercise(
        VERIFIERS,
        "the train client, the key in the URL",
        GENERATE,
        ("verifiers_train.py",),
        BY_IDS,
        "84 €.",
        "renders and tokenises by itself; chats go through its `EvalClient`",
    ),
    faithful(NODE_OPENAI, "tools, parallel calls", CHAT, "openai.mjs", "chat"),
    faithful(NODE_OPENAI, "the SDK's `runTools`, streamed", CHAT, "openai.mjs", "runner"),
    faithful(NODE_OPENAI, "tools, parallel calls", RESPONSES, "openai.mjs", "responses"),
    speaking(faithful(NODE_OPENAI, "", CHAT, "openai.mjs", "chat")),
    faithful(NODE_AI, "`generateText`", CHAT, "ai.mjs", "chat"),
    faithful(NODE_AI, "`streamText`", CHAT, "ai.mjs", "streaming"),
    faithful(NODE_AI, "`generateText`", RESPONSES, "ai.mjs", "responses"),
    faithful(NODE_AI, "`streamText`, items by reference", RESPONSES, "ai.mjs", "references"),
    Exercise(
        NODE_AI,
        "`Output.object` after a tool",
        CHAT,
        ("ai.mjs", "object"),
        JSON_AFTER_TOOL,
        "42 €",
        is_constrained=True,
    ),
    speaking(faithful(NODE_AI, "", CHAT, "ai.mjs", "chat")),
    on_the_page(LANGCHAIN, "LangGraph", *TWO_QUESTIONS[:2]),
    on_the_page(AGENTS, "OpenAI Agents SDK", *STRICT_TWO_QUESTIONS[:2], strict=True),
    on_the_page(CREWAI, "CrewAI", *STRICT_TWO_QUESTIONS[:2], strict=True),
    on_the_page(PYDANTIC_AI, "pydantic-ai", *STRICT_TWO_QUESTIONS[:2], strict=True),
    on_the_page(SMOLAGENTS, "smolagents", *SMOL_CODE[:2]),
    on_the_page(AUTOGEN, "AutoGen", *TWO_QUESTIONS[:2]),
    on_the_page(HTTP, "Plain HTTP", *TWO_QUESTIONS[:2]),
    on_the_page(NODE_OPENAI, "JavaScript", *TWO_QUESTIONS[:2], answer="1"),
    *PRODUCTS,
)
