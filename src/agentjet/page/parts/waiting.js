// The groups that training waits for, as a picture: one row a group, one cell a place.
import { html, useEffect, useRef, useSignal } from "../vendor/ui.js";
import { href } from "../route.js";
import { duration, Fact, groupName, number, Text, visible } from "./format.js";

const MAX_ROWS = 40;
const MAX_CELLS = 64;
const TICK_MS = 1000;
const KINDS = { finished: "finished", live: "live", failed: "ended without a reward", empty: "not begun" };

// Seconds since `value` was received, renewed each second: the server tells durations, not times.
function useAge(value) {
  const age = useSignal(0);
  const since = useRef([null, 0]);
  if (since.current[0] !== value) since.current = [value, performance.now()];
  useEffect(() => {
    const update = () => { age.value = (performance.now() - since.current[1]) / 1000; };
    update();
    const timer = setInterval(update, TICK_MS);
    return () => clearInterval(timer);
  }, [value]);
  return age.value;
}

// Returns the live episode without a call for longest, not one in a call: { group, place, cell }, or null.
export function mostSilent(groups) {
  let found = null;
  for (const [group, { cells }] of groups.entries()) {
    for (const [place, cell] of cells.entries()) {
      if (cell.state === "live" && cell.silent_seconds > (found?.cell.silent_seconds ?? 0)) found = { group, place, cell };
    }
  }
  return found;
}

// Returns the least and the greatest reward of the cells, at least 0 and 1: the ends of the colour scale.
function scaleOf(groups) {
  const rewards = groups.flatMap(({ cells }) => cells.map((one) => one.reward).filter((reward) => reward != null));
  return [Math.min(0, ...rewards), Math.max(1, ...rewards)];
}

function Cell({ cell, path, scale: [low, high] }) {
  const { episode_id: id, state, reward } = cell;
  const label = `${KINDS[state]}${reward == null ? "" : `, reward ${number(reward)}`}: ${visible(id)}`;
  const shown = state === "finished" && reward != null ? html`<${Fact} path=${`${path}.reward`} value=${reward} />`
    : { finished: "✓", live: "▒", failed: "✕" }[state];
  const style = reward == null ? {} : { "--share": `${(100 * (reward - low)) / (high - low)}%` };
  return html`<a class=${`cell ${state}`} style=${style} href=${href(`/episodes/${encodeURIComponent(id)}`)} title=${label} aria-label=${label}>
    ${shown}</a>`;
}

function Row({ group, index, scale }) {
  const { cells, size } = group;
  const shown = cells.slice(0, MAX_CELLS);
  const closing = group.state === "closing"; // It begins no further episode.
  const free = closing ? 0 : Math.max(0, Math.min(size, MAX_CELLS) - shown.length);
  const counts = Object.entries(KINDS).map(([state, text]) => {
    const count = state === "empty" ? !closing && Math.max(0, size - cells.length) : cells.filter((one) => one.state === state).length;
    return count ? `${count} ${text}` : "";
  }).concat(closing ? "closing: `accept` of the recipe decides" : "").filter(Boolean).join(", ");
  return html`<li class=${`group ${group.state}`}>
    <a class="name" href=${href(`/groups/${group.id}`)}><${Text} value=${groupName(group.name) || group.task_id || `group ${group.id}`} limit=${60} /></a>
    <span class="cells">
      ${shown.map((cell, place) => html`<${Cell} key=${cell.episode_id} cell=${cell} scale=${scale}
        path=${`/waiting#groups[${index}].cells[${place}]`} />`)}
      ${Array.from({ length: free }, () => html`<span class="cell empty" aria-hidden="true">·</span>`)}
    </span>
    <span class="muted set"><${Text} value=${group.task_set} limit=${40} /></span>
    <span class="counts muted">${counts}</span>
  </li>`;
}

function Silent({ groups, age }) {
  const found = mostSilent(groups);
  if (!found) return null;
  const { cell } = found;
  const group = groups[found.group];
  const left = (seconds) => html`<b>${duration(Math.max(0, seconds - age))}</b>`;
  return html`<p class=${cell.expires_in != null && cell.expires_in - age < 15 ? "warn" : ""}>
    Longest without a call: <a href=${href(`/episodes/${encodeURIComponent(cell.episode_id)}`)}><${Text} value=${cell.episode_id} /></a>
    ${" "}of task <${Text} value=${group.task_id} limit=${60} />,
    ${" "}${duration(cell.silent_seconds + age)}${cell.expires_in != null && html`; its lease ends in ${left(cell.expires_in)}`}${
      cell.ends_in != null && html`, the episode in ${left(cell.ends_in)}`}.
  </p>`;
}

// `waiting` is the answer of GET /waiting.
export function Waiting({ waiting }) {
  const age = useAge(waiting);
  const { groups } = waiting;
  // Open groups first: those are what training waits for.
  const order = groups.map((group, index) => ({ group, index }))
    .sort((a, b) => (a.group.state === "complete") - (b.group.state === "complete"));
  const absent = Math.max(0, (waiting.needed ?? 0) - (waiting.num_groups ?? groups.length));
  const more = groups.length - MAX_ROWS;
  const scale = scaleOf(groups);
  return html`<div class="waiting">
    <p class="answer"><${Text} value=${waiting.text} limit=${400} /></p>
    <${Silent} groups=${groups} age=${age} />
    <ul class="groups">${order.slice(0, MAX_ROWS).map((one) => html`<${Row} key=${one.group.id} ...${one} scale=${scale} />`)}</ul>
    ${more > 0 && html`<p class="muted">… and ${number(more)} more groups.</p>`}
    ${absent > 0 && html`<p class="muted">${absent === 1 ? "1 group is" : `${number(absent)} groups are`} not begun.</p>`}
    <p class="muted legend" aria-hidden="true">
      <span class="cell finished" style=${{ "--share": "0%" }}>${number(scale[0])}</span> to
      <span class="cell finished" style=${{ "--share": "100%" }}>${number(scale[1])}</span> finished, with its reward <span class="cell live">▒</span> live
      <span class="cell failed">✕</span> ended without a reward <span class="cell empty">·</span> not begun</p>
  </div>`;
}
