// Timelines as rows of bars: where they share tokens, where they fork, and which tokens were sampled.
import { html } from "../vendor/ui.js";
import { tokenText } from "./call.js";

// Bars of [first, stop) at equal `sampled`, moved by `offset`: [{ from, to, sampled }].
function bars(call, first, stop, offset) {
  const found = [];
  for (let i = first; i < stop; i += 1) {
    const last = found.at(-1);
    if (last && last.sampled === call.sampled[i]) last.to = offset + i + 1;
    else found.push({ from: offset + i, to: offset + i + 1, sampled: call.sampled[i] });
  }
  return found;
}

// Rows of the calls of one episode, each below the call it continues. `describe(call)` gives label, note and tone.
export function rowsOfCalls(calls, describe) {
  const children = new Map();
  const known = new Set(calls.map((call) => call.id));
  for (const call of calls) {
    const parent = known.has(call.parent) ? call.parent : null;
    children.set(parent, [...(children.get(parent) ?? []), call]);
  }
  const rows = [];
  const pending = [...(children.get(null) ?? [])].reverse().map((call) => [call, null]);
  while (pending.length) {
    const [call, parentRow] = pending.pop();
    const row = rows.length;
    rows.push({
      id: call.id, ...describe(call), bars: bars(call, 0, call.count, call.start),
      joins: parentRow === null ? null : { row: parentRow, at: call.start },
    });
    for (const child of [...(children.get(call.id) ?? [])].reverse()) pending.push([child, row]);
  }
  return rows;
}

// Merges timelines into one forest: every shared token is drawn once, by the first timeline that has it.
// `members` are [{ id, timeline, label, note, tone }] in the order of drawing. A row gets `differs`: the text of its
// first own token.
export function rowsOfTimelines(members) {
  const rows = [];
  // Members of `group` agree in all tokens before `at`; the first of them draws what all share.
  const grow = (group, at, parentRow) => {
    const [first, ...others] = group;
    let stop = at;
    const agrees = ({ timeline }) => (
      stop < timeline.count && tokenText(timeline, stop) === tokenText(first.timeline, stop)
    );
    while (stop < first.timeline.count && others.every(agrees)) stop += 1;
    if (!others.length) {
      rows.push({
        ...first, bars: bars(first.timeline, at, first.timeline.count, 0), shared: at,
        differs: at < first.timeline.count ? tokenText(first.timeline, at) : "",
        joins: parentRow === null ? null : { row: parentRow, at },
      });
      return rows.length - 1;
    }
    const parts = new Map();
    for (const member of group) {
      const key = stop < member.timeline.count ? `=${tokenText(member.timeline, stop)}` : "end";
      parts.set(key, [...(parts.get(key) ?? []), member]);
    }
    const trunk = bars(first.timeline, at, stop, 0);
    const ended = parts.get("end");
    if (ended?.length === group.length) { // Equal timelines: each has a row, the first with the bars.
      const row = rows.length;
      group.forEach((member, i) => rows.push({
        ...member, bars: i ? [] : trunk, shared: i ? stop : at, differs: "",
        joins: i ? { row, at: stop } : parentRow === null ? null : { row: parentRow, at },
      }));
      return row;
    }
    const top = rows.length;
    for (const part of parts.values()) grow(part, stop, rows.length === top ? parentRow : top);
    rows[top].bars = [...trunk, ...rows[top].bars];
    if (rows[top].joins) rows[top].joins.at = at;
    return top;
  };
  const roots = new Map();
  for (const member of members) {
    const key = member.timeline.count ? tokenText(member.timeline, 0) : "";
    roots.set(key, [...(roots.get(key) ?? []), member]);
  }
  for (const group of roots.values()) grow(group, 0, null);
  return rows;
}

// Number of tokens in all timelines, and in the forest, where shared ones count once.
export function sharing(members, rows) {
  const total = members.reduce((sum, { timeline }) => sum + timeline.count, 0);
  const merged = rows.reduce((sum, row) => sum + row.bars.reduce((all, bar) => all + bar.to - bar.from, 0), 0);
  return { total, merged };
}

// Returns for each row the positions of the lines that pass it on their way to a row below.
function passing(rows) {
  const lines = rows.map(() => []);
  rows.forEach(({ joins }, row) => {
    if (joins) for (let i = joins.row + 1; i < row; i += 1) lines[i].push(joins.at);
  });
  return lines;
}

const HEIGHT = 24;

function Row({ row, through, starts, scale, chosen, onPick }) {
  const x = (position) => `${(100 * position * scale).toFixed(3)}%`;
  const line = (at, y1, y2) => html`<line x1=${x(at)} x2=${x(at)} y1=${y1} y2=${y2} />`;
  return html`<li class=${`forest-row ${chosen ? "chosen" : ""}`}>
    <button type="button" aria-pressed=${chosen} onClick=${() => onPick(row.id)}>
      <span class="forest-label">${row.label}</span>
      <svg class="forest-bars" height=${HEIGHT} width="100%" aria-hidden="true">
        ${through.map((at) => line(at, 0, HEIGHT))}
        ${row.joins && line(row.joins.at, 0, HEIGHT / 2)}
        ${starts.map((at) => line(at, HEIGHT / 2, HEIGHT))}
        ${row.bars.map(({ from, to, sampled }) => html`<rect class=${sampled ? `sampled ${row.tone ?? ""}` : "context"}
          x=${x(from)} width=${x(to - from)} y=${sampled ? 6 : 10} height=${sampled ? 12 : 4} />`)}
      </svg>
      <span class="forest-note">${row.note}</span>
    </button>
  </li>`;
}

// `rows` from `rowsOfCalls` or `rowsOfTimelines`; `chosen`: the id of a row, or a list of ids. `onPick(id)`.
export function Forest({ rows, label, chosen, onPick }) {
  const longest = Math.max(1, ...rows.map((row) => row.bars.at(-1)?.to ?? 0));
  const through = passing(rows);
  const starts = rows.map(() => []);
  rows.forEach(({ joins }) => joins && starts[joins.row].push(joins.at));
  return html`<ol class="forest" aria-label=${label}>
    ${rows.map((row, i) => html`<${Row} key=${row.id} row=${row} through=${through[i]} starts=${starts[i]}
      scale=${1 / longest} chosen=${[chosen].flat().includes(row.id)} onPick=${onPick} />`)}
  </ol>`;
}
