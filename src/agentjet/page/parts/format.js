// Numbers, times and texts as people read them. `Fact` is a number with its place in the API.
// Without Intl: its first use takes as long as drawing a view.
import { html } from "../vendor/ui.js";

const MISSING = "–";
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

// A number with four significant digits at most; "–" for null, NaN and infinity.
export function number(value) {
  if (!isNumber(value)) return MISSING;
  if (Number.isInteger(value)) return Math.abs(value) < 1e15 ? String(value).replace(/\B(?=(\d{3})+$)/g, ",") : value.toExponential(3);
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e6) return value.toExponential(2);
  return String(Number(value.toPrecision(size >= 1000 ? 5 : 4)));
}

export const percent = (share) => (isNumber(share) ? `${number(Math.round(share * 1000) / 10)} %` : MISSING);

// A duration: "0.4 s", "38 s", "4 min 5 s", "2 h 11 min", "3 d 4 h".
export function duration(seconds) {
  if (!isNumber(seconds)) return MISSING;
  if (seconds < 10) return `${Math.round(seconds * 10) / 10} s`;
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const first = units.findIndex(([, size]) => seconds >= size);
  const parts = [];
  let rest = Math.round(seconds);
  for (const [unit, size] of units.slice(first, first + 2)) {
    const count = Math.floor(rest / size);
    rest -= count * size;
    if (count) parts.push(`${count} ${unit}`);
  }
  return parts.join(" ");
}

// The local time of Unix seconds; with the date unless it is today.
export function clock(unix) {
  if (!isNumber(unix)) return MISSING;
  const time = new Date(unix * 1000);
  const today = time.toDateString() === new Date().toDateString();
  const two = (part) => String(part).padStart(2, "0");
  const shown = [time.getHours(), time.getMinutes(), time.getSeconds()].map(two).join(":");
  return today ? shown : `${time.getFullYear()}-${two(time.getMonth() + 1)}-${two(time.getDate())} ${shown}`;
}

// The end of a long episode id: episodes that began together have the same beginning.
export const shortId = (id) => (id.length > 14 ? `…${id.slice(-8)}` : id);

// The number of the step that learns a batch: the policy version that it makes. The page shows this number only.
export const stepOf = (batch) => batch + 1;
export const stepPath = (batch) => `/batches/${stepOf(batch)}`;

// The client's name for a group without the id of its run: "3+4/1b2c3d4e/1" is the second visit of task 3+4.
export function groupName(name) {
  const found = String(name ?? "").match(/^(.*)\/[0-9a-f]{8}\/(\d+)$/s);
  return found ? `${found[1]}, visit ${Number(found[2]) + 1}` : name;
}

export const plural = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;

// A number of the API. `path` is "ROUTE#PLACE", such as "/status#episodes.live", "/batches/3#groups[0].id" or
// `/steps#metrics["reward/mean"][41]`: the tests read the same place and compare `value` and the shown text.
export function Fact({ path, value, format = number }) {
  return html`<data data-fact=${path} value=${String(value)}>${format(value)}</data>`;
}

// An episode that ended without a reward because its work was no longer wanted: not a failure.
const UNWANTED = ["surplus", "stale", "not needed", "replaced"];
const isUnwanted = ({ reason }) => UNWANTED.some((start) => reason?.startsWith(`${start}:`));

// The colour of an episode's status.
export function toneOf(episode) {
  if (!["aborted", "expired"].includes(episode.status)) return "";
  return isUnwanted(episode) ? "muted" : "bad";
}

// ---- text that a model, an agent or a user wrote: control, bidi and other invisible characters are shown, not obeyed

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
