// The weights of task sets in the job, and the dialog that changes them.

import { html, useEffect, useState } from "../vendor/ui.js";
import { Problem, get, send } from "../api.js";
import { Action } from "./actions.js";
import { number, percent, Text, visible } from "./format.js";
import { Failed, Loading, useLoad } from "./panel.js";

const OTHERS = "*"; // The weight of every set that has none.

// Returns the part of the batch that each of `sets` should get: Map of set to share, null for a set that is refused.
// Without weights all sets are served as they come: null.
export function askedShares(weights, sets) {
  if (!Object.keys(weights).length) return null;
  const weight = (set) => (Object.hasOwn(weights, set) ? weights[set] : Object.hasOwn(weights, OTHERS) ? weights[OTHERS] : null);
  const total = sets.reduce((sum, set) => sum + (weight(set) ?? 0), 0);
  return new Map(sets.map((set) => [set, weight(set) === null ? null : weight(set) / total]));
}

// Returns the weights of what was typed: { set: text }. An empty text removes the set. Throws `Problem`.
export function typedWeights(typed) {
  const given = Object.entries(typed).filter(([, text]) => text.trim());
  const weights = given.map(([set, text]) => [set, Number(text)]);
  const wrong = weights.findIndex(([, weight]) => !(weight > 0 && Number.isFinite(weight)));
  if (wrong >= 0) {
    const [set, text] = given[wrong].map(visible);
    throw new Problem(0, "invalid", `${set}: ${text} is not a weight. Give a number above 0, or nothing to remove it.`);
  }
  return Object.fromEntries(weights);
}

// Returns the lines that say what changes: [{ set, before, after }], texts.
export function weightDiff(before, after, sets) {
  const [old, now] = [askedShares(before, sets), askedShares(after, sets)];
  const said = (weights, shares, set) => {
    if (!shares) return "as it comes";
    const share = shares.get(set);
    const part = share === undefined ? "" : share === null ? "refused" : `${percent(share)} of the groups`;
    return Object.hasOwn(weights, set) ? `${number(weights[set])}${part && ` (${part})`}` : part || "none";
  };
  return [...new Set([...sets, ...Object.keys(before), ...Object.keys(after)])]
    .map((set) => ({ set, before: said(before, old, set), after: said(after, now, set) }))
    .filter((line) => line.before !== line.after);
}

// Returns the key of a whole number that JavaScript cannot hold exactly, or "".
export function inexactKey(value, key = "job") {
  if (typeof value === "number") return Number.isInteger(value) && !Number.isSafeInteger(value) ? key : "";
  if (value === null || typeof value !== "object") return "";
  return Object.entries(value).map(([name, one]) => inexactKey(one, `${key}.${name}`)).find(Boolean) ?? "";
}

// The button. `sets` are the names of the known task sets.
export function WeightsButton({ sets, onDone }) {
  const [form, setForm] = useState(null);
  const save = async () => {
    if (!form) throw new Problem(0, "loading", "The settings are not loaded yet.");
    const weights = typedWeights(form.typed);
    const unsafe = inexactKey(form.job);
    if (unsafe) {
      throw new Problem(0, "inexact", `${unsafe} is too large for a browser to send back exactly. Change the weights with PUT /swarm/v1/job.`);
    }
    try {
      return await send("PUT", "/job", { revision: form.revision, job: { ...form.job, task_weights: weights } });
    } catch (problem) {
      if (problem.status === 409) setForm({ ...opened(await get("/job"), sets), typed: form.typed });
      throw problem;
    }
  };
  return html`<${Action}
    role="admin" label="Change weights" title="Change the weights of task sets" verb="Change the weights" action=${save}
    done=${(job) => { onDone(job); return `The weights are changed, from the next group on. The job has revision ${job.revision}.`; }}
  ><${Form} sets=${sets} form=${form} setForm=${setForm} /><//>`;
}

function opened({ revision, job }, sets) {
  const names = [...new Set([...sets.filter(Boolean), ...Object.keys(job.task_weights), OTHERS])];
  const typed = Object.fromEntries(names.map((set) => [set, Object.hasOwn(job.task_weights, set) ? String(job.task_weights[set]) : ""]));
  return { revision, job, typed };
}

function Form({ sets, form, setForm }) {
  const load = useLoad("/job");
  useEffect(() => load.data && setForm(opened(load.data, sets)), [load.data]);
  useEffect(() => () => setForm(null), []);
  if (load.problem) return html`<${Failed} problem=${load.problem} retry=${load.reload} />`;
  if (!form) return html`<${Loading} />`;
  const lines = diffOf(form, sets);
  const type = (set) => (event) => setForm({ ...form, typed: { ...form.typed, [set]: event.currentTarget.value } });
  return html`
    <p>Each batch has groups in proportion to the weights. A set without a weight is refused, unless "every other set" has
      one. Without any weight, groups are taken as they come.</p>
    <div class="weights">${Object.entries(form.typed).map(([set, text]) => html`<label key=${set}>
      <span><${SetName} set=${set} /></span>
      <input inputmode="decimal" value=${text} autocomplete="off" onInput=${type(set)} />
    </label>`)}</div>
    <div aria-live="polite">${typeof lines === "string" ? html`<p class="bad">${lines}</p>` : html`<${Diff} lines=${lines} />`}</div>`;
}

export function SetName({ set }) {
  if (set === OTHERS) return "every other set";
  return set ? html`<${Text} value=${set} limit=${80} />` : "tasks without a set";
}

function diffOf(form, sets) {
  try {
    return weightDiff(form.job.task_weights, typedWeights(form.typed), sets);
  } catch (problem) {
    return problem.detail;
  }
}

function Diff({ lines }) {
  if (!lines.length) return html`<p class="muted">Nothing changes.</p>`;
  return html`<ul>${lines.map(({ set, before, after }) => html`<li key=${set}>
    <b><${SetName} set=${set} /></b>: <del>${before}</del> → <ins>${after}</ins>
  </li>`)}</ul>`;
}
