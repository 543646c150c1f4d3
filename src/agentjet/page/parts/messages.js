// Messages of a conversation as text: no Markdown, no links, no images from what a model or an agent wrote.
import { html, useSignal } from "../vendor/ui.js";
import { plural, Text } from "./format.js";

const SHOWN_LINES = 40;
const SHOWN_CHARACTERS = 4000;

// Returns the first lines of a text, and the number of lines left out.
function cut(text) {
  const lines = text.split("\n");
  const kept = lines.slice(0, SHOWN_LINES).join("\n").slice(0, SHOWN_CHARACTERS);
  return { kept, isWhole: kept.length === text.length, lines: lines.length };
}

// A text that is folded if it is long.
export function Long({ value }) {
  const open = useSignal(false);
  const text = String(value ?? "");
  const { kept, isWhole, lines } = cut(text);
  if (isWhole) return html`<p class="said"><${Text} value=${text} lines /></p>`;
  return html`<p class="said"><${Text} value=${open.value ? text : kept} lines /></p>
    <button type="button" aria-expanded=${open.value} onClick=${() => { open.value = !open.value; }}>
      ${open.value ? "Show less" : `Show all: ${plural(lines, "line")}, ${plural(text.length, "character")}`}</button>`;
}

export function Message({ message }) {
  const { role, content, reasoning, tool_calls: calls = [], tool_call_id: answered, name } = message;
  return html`<div class=${`message ${role === "assistant" ? "by-model" : ""}`}>
    <h3><${Text} value=${role} limit=${40} />
      ${name && html` <${Text} value=${name} limit=${80} />`}
      ${answered && html` <span class="muted">answers <${Text} value=${answered} limit=${80} /></span>`}</h3>
    ${reasoning && html`<details open><summary>Reasoning</summary><${Long} value=${reasoning} /></details>`}
    ${content && html`<${Long} value=${content} />`}
    ${calls.map((call) => html`<div class="tool-call"><strong><${Text} value=${call.name} limit=${200} /></strong>
      <${Long} value=${call.arguments} /></div>`)}
    ${!content && !reasoning && !calls.length && html`<p class="muted">(empty)</p>`}
  </div>`;
}

// What was new in the request of a call, and its answer.
export function Conversation({ call }) {
  return html`${call.tools.length > 0 && html`<details><summary>${plural(call.tools.length, "tool")}</summary>
      <${Long} value=${JSON.stringify(call.tools, null, 2)} /></details>`}
    ${call.messages.map((message, i) => html`<${Message} key=${i} message=${message} />`)}
    <${Message} message=${call.response} />`;
}
