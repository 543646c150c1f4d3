// Text that a model, an agent or a user wrote. Control, bidi and other invisible characters are shown, not obeyed.
import { html } from "../vendor/ui.js";

// C0 (`controls`) and C1 controls, zero-width and bidi characters, line separators, tags, lone surrogates.
const hidden = (controls) => new RegExp(
  `([${controls}` + "\\u007f-\\u009f\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f" +
  "\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\u3164\\ufeff\\uffa0\\ufff9-\\ufffb\\u{e0000}-\\u{e007f}]|\\p{Cs})", "u",
);
const HIDDEN = hidden("\\u0000-\\u0008\\u000b-\\u001f"); // Without tab and newline.
const HIDDEN_IN_NAMES = hidden("\\u0000-\\u001f");

export const codePoint = (char) => `U+${char.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;

// Returns the text with invisible characters written as ⟨U+202E⟩: for titles, labels and canvas text.
export function visible(text) {
  return String(text).split(HIDDEN).map((part, i) => (i % 2 ? `⟨${codePoint(part)}⟩` : part)).join("");
}

// `value` as text in an isolated direction. Texts above `limit` characters end with their length. Only a text with
// `lines` has tabs and newlines.
export function Text({ value, limit = Infinity, lines = false }) {
  const text = String(value ?? "");
  const parts = text.slice(0, limit).split(lines ? HIDDEN : HIDDEN_IN_NAMES);
  const shown = parts.map((part, i) => (i % 2 ? html`<span class="hidden-char">⟨${codePoint(part)}⟩</span>` : part));
  const more = text.length > limit ? html`<span class="muted"> … ${text.length} characters</span>` : null;
  return html`<bdi class="text">${shown}${more}</bdi>`;
}
