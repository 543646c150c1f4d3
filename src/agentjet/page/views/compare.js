// Compare: runs of `agentjet look` side by side, and only the settings that differ.

import { html, useEffect, useMemo, useSignal } from "../vendor/ui.js";
import { get } from "../api.js";
import { go, href } from "../route.js";
import { Chart, Swatch } from "../parts/chart.js";
import { placed, scoreCurves } from "../parts/curve.js";
import { Fact, Text } from "../parts/format.js";
import { Failed, Loading, Panel, useLoad } from "../parts/panel.js";

const MOST = 8;
const REWARD = "reward/mean";

export function CompareView({ query }) {
  const look = useLoad("/look");
  return html`<h1>Compare</h1>
    <${Panel} load=${look} empty=${({ runs }) => runs.length < 2 && html`
      There are fewer than two runs. <code>agentjet look DATA_DIR DATA_DIR</code> shows several.`}>
      ${({ runs }) => {
        const readable = runs.filter((one) => !one.error).map((one) => one.name);
        const names = (query.runs ? query.runs.split(",") : readable).filter((one) => readable.includes(one));
        return html`<${Choice} runs=${runs} names=${names} query=${query} />
          ${names.length > 0 && names.length <= MOST && html`<${Compared} key=${names.join()} names=${names} query=${query} />`}
          ${names.length > MOST && html`<p role="status">Choose at most ${MOST} runs.</p>`}`;
      }}
    <//>`;
}

function Choice({ runs, names, query }) {
  const choose = (name, on) => {
    const chosen = runs.map((one) => one.name).filter((one) => (one === name ? on : names.includes(one)));
    go("/compare", { ...query, runs: chosen.join(",") || "-" }, { replace: true });
  };
  return html`<fieldset class="choice"><legend>Runs</legend>${runs.map((one) => html`<label key=${one.name}>
    <input type="checkbox" checked=${names.includes(one.name)} disabled=${!!one.error}
      onChange=${(event) => choose(one.name, event.currentTarget.checked)} />
    ${names.includes(one.name) && html`<${Swatch} ...${line(names.indexOf(one.name))} />`}
    <${Text} value=${one.title} limit=${200} />${one.error && html` <span class="bad">cannot be read</span>`}
  </label>`)}</fieldset>`;
}

// Beyond the colours, lines are dashed.
const line = (index) => ({ tone: index, dash: index >= 6 });

function Compared({ names, query }) {
  const path = `/compare?runs=${names.map(encodeURIComponent).join(",")}`;
  const load = useLoad("/compare", { runs: names.join(",") });
  return html`<${Panel} load=${load}>${(found) => html`
    <${Verdict} settings=${Object.keys(found.settings)} count=${names.length} />
    ${found.notes.map((note) => html`<p role="status" key=${note}><${Text} value=${note} limit=${2000} /></p>`)}
    <${Curves} runs=${found.runs} query=${query} />
    <${Scores} runs=${found.runs} path=${path} />
    <${Figures} runs=${found.runs} path=${path} />
    <${Settings} found=${found} />`}<//>`;
}

function Verdict({ settings, count }) {
  if (count < 2) return null;
  const text = {
    0: "These runs have the same settings: a difference between them is chance, or comes from code and tasks.",
    1: "These runs differ in one setting. One run of each is not evidence: a study repeats them with several seeds.",
  }[settings.length] ?? `These runs differ in ${settings.length} settings, so no single one explains a difference.`;
  return html`<p role="status">${text}</p>`;
}

// The values of one metric of every run, over the union of their versions.
function Curves({ runs, query }) {
  const name = query.metric || REWARD;
  const state = useSignal({ all: null, problem: null });
  useEffect(() => {
    const stopped = new AbortController();
    const read = ({ name: run }) => get("/steps", { after: 0, limit: 10_000 }, { run, signal: stopped.signal });
    Promise.all(runs.map(read)).then(
      (all) => { state.value = { all, problem: null }; },
      (problem) => { if (problem.name !== "AbortError") state.value = { all: null, problem }; },
    );
    return () => stopped.abort();
  }, [runs]);
  const { all, problem } = state.value;
  const metrics = useMemo(() => [...new Set((all ?? []).flatMap((one) => Object.keys(one.metrics)))].sort(), [all]);
  const x = useMemo(() => [...new Set((all ?? []).flatMap((one) => one.versions))].sort((a, b) => a - b), [all]);
  const series = useMemo(() => (all ?? []).map((one, index) => ({
    name: runs[index].title, values: placed(x, one.versions, one.metrics[name]), ...line(index),
  })), [all, x, name]);
  if (problem) return html`<${Failed} problem=${problem} />`;
  if (!all) return html`<${Loading} />`;
  const change = (changes) => go("/compare", { ...query, ...changes }, { replace: true });
  return html`<div class="filters">
      <label>Metric <select value=${name} onChange=${(event) => change({ metric: event.currentTarget.value })}>
        ${[...new Set([name, ...metrics])].map((one) => html`<option key=${one} value=${one}>${one}</option>`)}
      </select></label>
      <label>Smooth <input type="range" min="0" max="0.95" step="0.05" value=${query.smooth ?? 0}
        onInput=${(event) => change({ smooth: event.currentTarget.value })} /></label>
    </div>
    <${Chart} title=${name} x=${x} series=${series} smooth=${Number(query.smooth ?? 0)} tall />`;
}

// A chart for each name of a score, with the runs that have it.
function Scores({ runs }) {
  const charts = useMemo(() => {
    const x = [...new Set(runs.flatMap((one) => one.evaluations.map((each) => each.policy_version)))].sort((a, b) => a - b);
    const among = runs.flatMap(({ evaluations }) => evaluations);
    const curves = runs.flatMap(({ title, evaluations }, index) => scoreCurves(x, evaluations, among).map(({ name, values }) => ({
      title: name, curve: { name: title, values, ...line(index) },
    })));
    return [...new Set(curves.map(({ title }) => title))].map((title) => ({
      title, x, series: curves.filter((one) => one.title === title).map(({ curve }) => curve),
    }));
  }, [runs]);
  return charts.map((one) => html`<${Chart} key=${one.title} ...${one} />`);
}

function Figures({ runs, path }) {
  return html`<h2>Figures</h2><div class="wide" tabindex="0" role="region" aria-label="Figures"><table>
    <thead><${Titles} runs=${runs} /></thead>
    <tbody>${Object.keys(runs[0].figures).map((name) => html`<tr key=${name}>
      <th scope="row">${name.replaceAll("_", " ")}</th>
      ${runs.map((one, index) => html`<td class="num">
        <${Fact} path=${`${path}#runs[${index}].figures.${name}`} value=${one.figures[name]} /></td>`)}
    </tr>`)}</tbody>
  </table></div>`;
}

const Titles = ({ runs }) => html`<tr><td></td>${runs.map((one) => html`<th scope="col">
  <a href=${href("/", {}, one.name)}><${Text} value=${one.title} limit=${200} /></a></th>`)}</tr>`;

function Settings({ found: { runs, settings } }) {
  const names = Object.keys(settings);
  if (!names.length) return null;
  return html`<h2>Settings that differ</h2><div class="wide" tabindex="0" role="region" aria-label="Settings that differ"><table>
    <thead><${Titles} runs=${runs} /></thead>
    <tbody>${names.map((name) => html`<tr key=${name}>
      <th scope="row"><code><${Text} value=${name} /></code></th>
      ${settings[name].map((value) => html`<td><${Text} value=${setting(value)} limit=${400} /></td>`)}
    </tr>`)}</tbody>
  </table></div>`;
}

const setting = (value) =>
  value === null ? "–" : typeof value === "string" ? value : JSON.stringify(value);
