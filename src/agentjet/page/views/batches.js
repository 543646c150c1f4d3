// Batches: the list of batches, and every metric over the steps.

import { html, useMemo, useState } from "../vendor/ui.js";
import { get } from "../api.js";
import { go, href } from "../route.js";
import { pulse, steps } from "../store.js";
import { Chart, Markers } from "../parts/chart.js";
import { codeMarkers, running } from "../parts/curve.js";
import { families, matching } from "../parts/families.js";
import { clock, Fact, number, stepOf, stepPath, Text } from "../parts/format.js";
import { Empty, Panel, Unread, useLoad } from "../parts/panel.js";

const NEWEST = 5;
const AT_A_GLANCE = ["reward/mean", "groups/zero_variance", "policy/entropy", "optim/grad_norm", "perf/tokens_per_second"];
const PAGE = 50;
const SMOOTHING = [["", "none"], ["0.6", "little"], ["0.8", "medium"], ["0.93", "much"]];
const AXES = { step: "step", hours: "hours", tokens: "sampled tokens" };

export function BatchesView({ query }) {
  return html`<h1>Batches</h1>
    <${BatchList} />
    <${Metrics} query=${query} />`;
}

function Metrics({ query }) {
  const all = steps.value;
  const names = useMemo(() => (all ? Object.keys(all.metrics) : []), [all]);
  const { names: chosen, problem } = useMemo(() => matching(names, query.metrics ?? ""), [names, query.metrics]);
  const x = useMemo(() => (all ? axis(all, query.x) : []), [all, query.x]);
  const markers = useMemo(() => (all ? codeMarkers(all).map((one) => ({ ...one, x: placed(all, x, one.x) })) : []), [all, x]);
  const change = (changes) => go("/batches", { ...query, ...changes }, { replace: true });
  if (!all) return html`<${Unread} />`;
  if (!all.versions.length) {
    return html`<${Empty}>No batch was learned yet. <a href=${href("/")}>The Overview</a> shows the groups that the first one waits for.<//>`;
  }
  return html`<section aria-labelledby="metrics-title">
    <h2 id="metrics-title">Metrics</h2>
    <form class="filters" onSubmit=${(event) => event.preventDefault()}>
      <label>Find, as a regular expression
        <input type="search" value=${query.metrics ?? ""} placeholder="reward|entropy" spellcheck=${false}
          aria-invalid=${problem ? "true" : null} aria-describedby="metrics-found"
          onInput=${(event) => change({ metrics: event.currentTarget.value })} />
      </label>
      <label>Smooth
        <select value=${query.smooth ?? ""} onChange=${(event) => change({ smooth: event.currentTarget.value })}>
          ${SMOOTHING.map(([weight, name]) => html`<option value=${weight}>${name}</option>`)}
        </select>
      </label>
      <label>Over
        <select value=${query.x ?? "step"} onChange=${(event) => change({ x: event.currentTarget.value })}>
          ${Object.entries(AXES).map(([value, name]) => html`<option value=${value}>${name}</option>`)}
        </select>
      </label>
      <p id="metrics-found" role="status" class=${problem ? "bad" : "muted"}>
        ${problem ? `This is not a regular expression: ${problem}` : `${number(chosen.length)} of ${number(names.length)} metrics`}
      </p>
    </form>
    <p class="muted">A click on a curve, or Enter at a place that the arrow keys chose, opens that step.</p>
    <${Markers} markers=${markers} xName=${AXES[query.x] ?? "step"} />
    ${boards(chosen, query.metrics).map(([title, those, open]) => html`<details key=${title} class="family" open=${open}>
      <summary><h2><${Text} value=${title} /> <small class="muted">${number(those.length)}</small></h2></summary>
      <div class="charts">
        ${those.map((name) => html`<${Metric} key=${`${query.x} ${name}`} name=${name} all=${all} x=${x} query=${query} markers=${markers} />`)}
      </div>
    </details>`)}
  </section>`;
}

// Returns [[title, names, open], ...]: the board of five metrics to look at first, then a closed board for each family.
// A search has open boards of families only.
function boards(chosen, search) {
  if (search) return families(chosen).map(([title, those]) => [title, those, true]);
  const first = AT_A_GLANCE.filter((name) => chosen.includes(name));
  const rest = families(chosen.filter((name) => !first.includes(name)));
  return [["At a glance", first, true], ...rest.map(([title, those]) => [title, those, false])];
}

function Metric({ name, all, x, query, markers }) {
  const values = all.metrics[name];
  const series = useMemo(() => [{ name, values, tone: 0, fact: `/steps#metrics[${JSON.stringify(name)}]` }], [values]);
  const axisName = AXES[query.x] ?? "step";
  return html`<${Chart} title=${name} x=${x} xName=${axisName} whole=${axisName === "step"} series=${series}
    smooth=${Number(query.smooth ?? 0)} markers=${markers} group="metrics"
    onOpen=${(index) => go(`/batches/${all.versions[index]}`)} />`;
}

// Returns the x values of the steps: policy versions, hours since the first step, or tokens sampled until then.
function axis(all, kind) {
  if (kind === "hours") return all.times.map((time) => (time - all.times[0]) / 3600);
  if (kind === "tokens") return running(all.metrics["batch/sampled_tokens"] ?? all.versions.map(() => 0));
  return all.versions;
}

function placed(all, x, version) {
  return x[all.versions.indexOf(version)];
}

function BatchList() {
  const load = useLoad("/batches", { limit: NEWEST }, pulse.value.step);
  const [older, setOlder] = useState({ rows: [], next: null, problem: "" });
  const more = async (before) => {
    try {
      const page = await get("/batches", { limit: PAGE, before });
      setOlder({ rows: [...older.rows, ...page.batches], next: page.next, problem: "" });
    } catch (problem) {
      setOlder({ ...older, problem: problem.detail ?? String(problem) });
    }
  };
  return html`<${Panel} title="Newest batches" load=${load} empty=${({ batches }) => !batches.length && "No batch was composed yet."}>
    ${({ batches, next }) => {
      const oldest = batches.at(-1).id;
      const rows = [...batches, ...older.rows.filter((one) => one.id < oldest)];
      const before = older.rows.length ? older.next : next;
      return html`<div class="wide" tabindex="0" role="region" aria-label="Newest batches"><table>
        <thead><tr>
          <th scope="col">step</th><th scope="col" class="num">mean reward</th><th scope="col" class="num">groups</th>
          <th scope="col" class="num">episodes</th><th scope="col">state</th><th scope="col">composed</th>
        </tr></thead>
        <tbody>${rows.map((one, index) => html`<${Row} key=${one.id} one=${one} path=${index < batches.length && `/batches#batches[${index}]`} />`)}</tbody>
      </table></div>
      ${older.problem && html`<p role="alert" class="bad">${older.problem}</p>`}
      ${before !== null && html`<button type="button" onClick=${() => more(before)}>Older batches</button>`}`;
    }}
  <//>`;
}

function Row({ one, path }) {
  const value = (name) => (path ? html`<${Fact} path=${`${path}.${name}`} value=${one[name]} />` : number(one[name]));
  return html`<tr>
    <th scope="row"><a href=${href(stepPath(one.id))}>step ${stepOf(one.id)}</a></th>
    <td class="num">${value("reward_mean")}</td><td class="num">${value("groups")}</td><td class="num">${value("episodes")}</td>
    <td>${one.state === "learned" ? "learned" : "being learned"}</td><td>${clock(one.composed)}</td>
  </tr>`;
}
