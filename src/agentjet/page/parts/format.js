// Numbers and times as people read them. `Fact` is a number with its place in the API.
import { html } from "../vendor/ui.js";

const MISSING = "–";
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

// A number with four significant digits at most; "–" for null, NaN and infinity.
export function number(value) {
  if (!isNumber(value)) return MISSING;
  if (Number.isInteger(value)) return Math.abs(value) < 1e15 ? value.toLocaleString("en") : value.toExponential(3);
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
  return today ? time.toLocaleTimeString("en-GB") : `${time.toLocaleDateString("sv")} ${time.toLocaleTimeString("en-GB")}`;
}

// The end of a long episode id: episodes that began together have the same beginning.
export const shortId = (id) => (id.length > 14 ? `…${id.slice(-8)}` : id);

export const plural = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;

// A number of the API. `path` is "ROUTE#PLACE", such as "/status#episodes.live", "/batches/3#groups[0].id" or
// `/steps#metrics["reward/mean"][41]`: the tests read the same place and compare `value` and the shown text.
export function Fact({ path, value, format = number }) {
  return html`<data data-fact=${path} value=${String(value)}>${format(value)}</data>`;
}
