// A study: its claims with their intervals at each look, its arms with the outcome of each seed, its budget and trials.

import { html } from "../vendor/ui.js";
import { Fact, percent, Text } from "./format.js";

const WIDTH = 240;
const HEIGHT = 20;
const TONES = { supported: "ok", refuted: "bad", practically_equivalent: "warn", inconclusive: "muted", open: "muted" };
const NARROW = ["trial", "arm", "end", "score"]; // Columns of the trials on a phone.
const SIGNS = { completed: "✓", diverged: "✗", "infra failed": "lost", unfinished: "running" };

// `path` is the place of the study in the API.
export function Study({ study, path }) {
  const { ledger } = study;
  return html`
    <p>Stage: <strong>${study.stage}</strong>. Scores are the <${Text} value=${study.study.metric} />.
      Differences below <${Number} of=${study.study} name="sesoi" path=${`${path}.study`} /> do not matter.
      Looks at ${study.study.looks.join(", ")} seeds per arm.</p>
    <p><label>Spent <${Number} of=${ledger} name="total" path=${`${path}.ledger`} /> of
      ${" "}<${Number} of=${ledger} name="budget" path=${`${path}.ledger`} /> full runs
      ${" "}<progress max=${ledger.budget} value=${Math.min(ledger.total, ledger.budget)} /></label></p>
    <h2>Claims</h2>
    <p class="muted">Each row is a look at the first seeds of both arms. The band marks differences that do not matter.</p>
    ${study.findings.map((one, index) => html`<${Claim} one=${one} study=${study} path=${`${path}.findings[${index}]`} />`)}
    <h2>Arms</h2>
    <${Arms} study=${study} path=${path} />
    ${study.diagnoses.length > 0 && html`<h2>Diagnoses</h2>${study.diagnoses.map((one) => html`<${Facts} of=${one} />`)}`}
    <details><summary>Trials: ${study.trials.length}</summary>
      <${Trials} trials=${study.trials} path=${path} /></details>`;
}

// A number of an object; "–" if it is unknown.
function Number({ of, name, path }) {
  return of[name] === null ? "–" : html`<${Fact} path=${`${path}.${name}`} value=${of[name]} />`;
}

function Claim({ one, study, path }) {
  const scale = scaleOf(study);
  const tone = TONES[one.verdict];
  return html`<section class="panel claim">
    <header><h3><${Text} value=${one.claim} /></h3>
      <span class=${`badge ${tone}`}>${one.verdict.replaceAll("_", " ")}</span>
      ${!one.confirmatory && html`<span class="badge muted">exploratory</span>`}</header>
    ${one.reason && html`<p>Reason: <${Text} value=${one.reason} />.</p>`}
    ${one.expected && html`<p class="muted">Expected before the data: <${Text} value=${one.expected} />.</p>`}
    ${one.looks.length === 0 ? html`<p class="muted">No look yet: fewer than ${study.study.looks[0]} seeds of both arms have ended.</p>` : html`
      <div class="wide" tabindex="0" role="region" aria-label="Looks"><table>
        <thead><tr><th scope="col" class="num">seeds</th><th scope="col" class="num">difference</th><th scope="col">interval</th>
          <th scope="col" class="num wide-only">confidence</th><th scope="col">verdict</th><td><${Axis} scale=${scale} /></td></tr></thead>
        <tbody>${one.looks.map((look, index) => html`<tr>
          <td class="num"><${Fact} path=${`${path}.looks[${index}].seeds`} value=${look.seeds} /></td>
          <td class="num"><${Number} of=${look} name="estimate" path=${`${path}.looks[${index}]`} /></td>
          <td><${Number} of=${look} name="low" path=${`${path}.looks[${index}]`} /> to ${" "}
            <${Number} of=${look} name="high" path=${`${path}.looks[${index}]`} /></td>
          <td class="num wide-only">${percent(look.confidence)}</td>
          <td>${look.verdict.replaceAll("_", " ")}</td>
          <td><${Interval} look=${look} scale=${scale} sesoi=${study.study.sesoi} tone=${tone} /></td>
        </tr>`)}</tbody>
      </table></div>`}
  </section>`;
}

// The greatest distance from 0 that an interval of the study reaches: all intervals have one scale.
function scaleOf({ findings, study: { sesoi } }) {
  const ends = findings.flatMap((one) => one.looks.flatMap(({ low, high }) => [low, high])).filter((end) => end !== null);
  return 1.05 * Math.max(2 * sesoi, ...ends.map(Math.abs));
}

const Axis = ({ scale }) => html`<div class="interval-axis" style=${{ width: `${WIDTH}px` }} aria-hidden="true">
  <span>−${scale.toPrecision(2)}</span><span>0</span><span>+${scale.toPrecision(2)}</span></div>`;

function Interval({ look, scale, sesoi, tone }) {
  if (look.low === null) return null;
  const at = (value) => (WIDTH / 2) * (1 + value / scale);
  const middle = HEIGHT / 2;
  return html`<svg class=${`interval ${tone}`} viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} width=${WIDTH} height=${HEIGHT} aria-hidden="true">
    <rect class="band" x=${at(-sesoi)} y="0" width=${at(sesoi) - at(-sesoi)} height=${HEIGHT} />
    <line class="zero" x1=${at(0)} x2=${at(0)} y1="0" y2=${HEIGHT} />
    <line class="reach" x1=${at(look.low)} x2=${at(look.high)} y1=${middle} y2=${middle} />
    <circle cx=${at(look.estimate)} cy=${middle} r="4" />
  </svg>`;
}

function Arms({ study, path }) {
  const trials = new Map(study.trials.map((one, index) => [one.name, { ...one, place: `${path}.trials[${index}]` }]));
  const scores = [...trials.values()].map((one) => one.score).filter((score) => score !== null);
  const range = [Math.min(...scores), Math.max(...scores)];
  const names = ["scored", "diverged", "lost", "mean", "deviation", "worst", "best"];
  const kind = (name) => `num ${name === "mean" ? "" : "wide-only"}`;
  return html`<div class="wide" tabindex="0" role="region" aria-label="Arms"><table>
    <thead><tr><th scope="col">arm</th><th scope="col">changes</th><th scope="col" class="wide-only">chosen setting</th>
      ${names.map((name) => html`<th scope="col" class=${kind(name)}>${name}</th>`)}</tr></thead>
    <tbody>${study.arms.map((arm, index) => html`<tr class="arm">
      <th scope="row" rowspan="2"><${Text} value=${arm.name} /></th>
      <td class="prose"><${Text} value=${arm.changes} limit=${400} /></td><td class="prose wide-only"><${Text} value=${arm.setting || "–"} limit=${400} /></td>
      ${names.map((name) => html`<td class=${kind(name)}><${Number} of=${arm} name=${name} path=${`${path}.arms[${index}]`} /></td>`)}
    </tr><tr>
      <td colspan=${names.length + 2}>${arm.runs.length === 0 ? html`<span class="muted">No seed of the test yet.</span>` : html`
        <ul class="seeds" aria-label="Score of each seed">${arm.runs.map((name) => html`<${Seed} trial=${trials.get(name)} range=${range} />`)}</ul>`}</td>
    </tr>`)}</tbody>
  </table></div>`;
}

function Seed({ trial, range: [low, high] }) {
  const value = trial.score;
  const share = value === null || high === low ? 0 : (value - low) / (high - low);
  const { end } = trial;
  return html`<li class=${end.replace(" ", "-")} style=${{ "--share": `${Math.round(55 * share)}%` }} title=${`${trial.name}, seed ${trial.seed}: ${end}`}>
    ${value === null ? SIGNS[end] : html`<${Number} of=${trial} name="score" path=${trial.place} />`}${end === "diverged" && " ✗"}
  </li>`;
}

function Trials({ trials, path }) {
  return html`<div class="wide" tabindex="0" role="region" aria-label="Trials"><table>
    <thead><tr>${["trial", "arm", "setting", "phase", "seed", "length", "end", "score", "note"].map((title) => html`
      <th scope="col" class=${NARROW.includes(title) ? "" : "wide-only"}>${title}</th>`)}</tr></thead>
    <tbody>${trials.map((one, index) => html`<tr>
      <th scope="row">${one.name}</th>
      ${["arm", "setting", "phase", "seed"].map((name) => html`<td class=${NARROW.includes(name) ? "" : "wide-only"}><${Text} value=${String(one[name])} limit=${400} /></td>`)}
      <td class="wide-only">${percent(one.fidelity)}</td>
      <td>${SIGNS[one.end]} ${one.end}</td>
      <td class="num"><${Number} of=${one} name="score" path=${`${path}.trials[${index}]`} /></td>
      <td class="prose wide-only"><${Text} value=${one.note} limit=${400} /></td>
    </tr>`)}</tbody>
  </table></div>`;
}

function Facts({ of }) {
  return html`<dl class="panel study-facts">${Object.entries(of).map(([name, fact]) => String(fact) && html`<div>
    <dt>${name.replaceAll("_", " ")}</dt><dd><${Text} value=${Array.isArray(fact) ? fact.join(", ") : String(fact)} /></dd></div>`)}</dl>`;
}
