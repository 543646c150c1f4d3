// The swarm: clients, leases, task sets, code versions, policies, and what a person may change.

import { html, useMemo, useState } from "../vendor/ui.js";
import { href } from "../route.js";
import { may, pulse, session, status } from "../store.js";
import { CheckpointButton, ExportButton } from "../parts/actions.js";
import { clock, duration, Fact, percent, Text, visible } from "../parts/format.js";
import { Leases } from "../parts/leases.js";
import { Empty, Panel, Unread, useLoad } from "../parts/panel.js";
import { Policies } from "../parts/policies.js";
import { SetName, WeightsButton, askedShares } from "../parts/weights.js";

export function SwarmView() {
  const job = useLoad("/job", {}, pulse.value.state);
  if (!status.value) return html`<h1>Swarm</h1><${Unread} />`;
  return html`<h1>Swarm</h1>
    <${Clients} status=${status.value} />
    <${Leases} />
    <${TaskSets} sets=${status.value.task_sets} job=${job} />
    <${CodeVersions} versions=${status.value.code_versions} />
    <${Policies} />
    <${Checkpoints} />
    <${Job} load=${job} />`;
}

function Section({ title, actions, children }) {
  return html`<section class="panel"><header><h2>${title}</h2>${actions}</header>${children}</section>`;
}

function noClient(episodes) {
  if (session.value.live === false) return "Stored runs do not have their clients.";
  if (Object.values(episodes).some(Boolean)) return "No client was seen since the server began.";
  return html`No client has begun an episode. <a href=${href("/")}>The Overview</a> shows the lines that start one.`;
}

function Clients({ status: { clients, holding, episodes } }) {
  const names = [...new Set([...Object.keys(clients), ...Object.keys(holding)])];
  const silence = (name) => (Object.hasOwn(clients, name) ? clients[name] : Infinity);
  names.sort((a, b) => silence(a) - silence(b));
  if (!names.length) {
    return html`<${Section} title="Clients"><${Empty}>${noClient(episodes)}<//><//>`;
  }
  return html`<${Section} title="Clients"><div class="wide" tabindex="0" role="region" aria-label="Clients"><table>
    <thead><tr><th scope="col">client</th><th scope="col" class="num">last seen</th><th scope="col" class="num">holds</th><th scope="col">work</th></tr></thead>
    <tbody>${names.map((name) => html`<tr key=${name}>
      <th scope="row"><${Text} value=${name} limit=${80} /></th>
      <td class="num">${Object.hasOwn(clients, name) ? html`<${Fact} path=${`/status#clients[${JSON.stringify(name)}]`} value=${clients[name]} format=${duration} /> ago` : "–"}</td>
      <td class="num">${Object.hasOwn(holding, name) ? html`<${Fact} path=${`/status#holding[${JSON.stringify(name)}]`} value=${holding[name]} />` : "0"}</td>
      <td><a href=${href("/episodes", { client: name })} aria-label=${`Episodes of ${visible(name)}`}>episodes</a></td>
    </tr>`)}</tbody>
  </table></div><//>`;
}

function TaskSets({ sets, job }) {
  const names = Object.keys(sets);
  const asked = askedShares(job.data?.job.task_weights ?? {}, names);
  const known = [...new Set([...names, ...Object.keys(job.data?.job.task_weights ?? {})])].filter((name) => name !== "*");
  return html`<${Section} title="Task sets" actions=${job.data && html`<${WeightsButton} sets=${known} onDone=${job.reload} />`}>
    ${!names.length && html`<${Empty}>No group of the newest batches names a task set.<//>`}
    ${names.length > 0 && html`
      <p class="muted">${asked ? "Asked: by job.task_weights, among these sets. " : "Without job.task_weights, groups are taken as they come. "}Given: in the newest 50 batches.</p>
      <div class="wide" tabindex="0" role="region" aria-label="Task sets"><table>
        <thead><tr>
          <th scope="col">task set</th><th scope="col">given share</th><th scope="col" class="num">asked</th><th scope="col" class="num">weight</th>
          <th scope="col" class="num">mean reward</th><th scope="col" class="num">open groups</th><th scope="col" class="num">complete</th>
        </tr></thead>
        <tbody>${names.map((name) => html`<${TaskSet} key=${name} name=${name} one=${sets[name]} asked=${asked?.get(name)} />`)}</tbody>
      </table></div>`}
  <//>`;
}

function TaskSet({ name, one, asked }) {
  const path = `/status#task_sets[${JSON.stringify(name)}]`;
  return html`<tr>
    <th scope="row"><a href=${href("/episodes", { task_set: name })}><${SetName} set=${name} /></a></th>
    <td><${ShareBar} given=${one.share} asked=${asked} /> <${Fact} path=${`${path}.share`} value=${one.share} format=${percent} /></td>
    <td class="num">${percent(asked)}</td>
    ${["weight", "reward_mean", "groups_open", "groups_complete"].map((key) => html`<td class="num"><${Fact} path=${`${path}.${key}`} value=${one[key]} /></td>`)}
  </tr>`;
}

// The given share as a bar, the asked one as a line.
function ShareBar({ given, asked }) {
  return html`<svg class="share" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">
    <rect class="given" x="0" y="1" width=${100 * given} height="8" />
    ${typeof asked === "number" && html`<rect class="asked" x=${Math.min(98.5, 100 * asked)} y="0" width="1.5" height="10" />`}
  </svg>`;
}

function CodeVersions({ versions }) {
  const rows = Object.entries(versions).reverse();
  const counted = ["episodes", "finished", "aborted", "not_needed"].filter((name) => rows.some(([, one]) => name in one));
  if (!rows.length) return null;
  return html`<${Section} title="Code versions of the agent">
    <p class="muted">The newest 20 by last use, with the outcomes of their training episodes.</p>
    <div class="wide" tabindex="0" role="region" aria-label="Code versions"><table>
      <thead><tr>
        <th scope="col">version</th>${counted.map((name) => html`<th scope="col" class="num">${name.replace("_", " ")}</th>`)}
        <th scope="col" class="num">mean reward</th>
      </tr></thead>
      <tbody>${rows.map(([name, one]) => html`<tr key=${name}>
        <th scope="row"><a href=${href("/episodes", { code_version: name })}><${Text} value=${name || "not named"} limit=${80} /></a></th>
        ${[...counted, "reward_mean"].map((key) => html`<td class="num">
          <${Fact} path=${`/status#code_versions[${JSON.stringify(name)}].${key}`} value=${one[key]} />
          ${key === "aborted" && one.episodes > 0 && html`<span class="muted"> (${percent(one.aborted / one.episodes)})</span>`}
        </td>`)}
      </tr>`)}</tbody>
    </table></div>
  <//>`;
}

function Checkpoints() {
  const load = useLoad("/checkpoints", {}, pulse.value.checkpoint);
  const actions = may("client") && session.value.live !== false && html`<span class="actions"><${CheckpointButton} /><${ExportButton} /></span>`;
  return html`<${Panel} title="Checkpoints" load=${load} actions=${actions} empty=${(rows) => !rows.length && "No checkpoint is saved yet. One is saved every job.checkpoint_every batches."}>
    ${(rows) => html`<div class="wide" tabindex="0" role="region" aria-label="Checkpoints"><table>
      <thead><tr><th scope="col" class="num">version</th><th scope="col">tags</th><th scope="col" class="num">score</th><th scope="col">saved</th><th scope="col">folder</th></tr></thead>
      <tbody>${rows.map((one, index) => ({ one, index })).reverse().map(({ one, index }) => html`<tr key=${one.path}>
        <th scope="row" class="num"><${Fact} path=${`/checkpoints#[${index}].policy_version`} value=${one.policy_version} /></th>
        <td>${one.tags.map((tag) => html`<span class="badge"><${Text} value=${tag} /></span> `)}</td>
        <td class="num"><${Fact} path=${`/checkpoints#[${index}].score`} value=${one.score} /></td>
        <td>${clock(one.created)}</td><td><code><${Text} value=${one.path} limit=${120} /></code></td>
      </tr>`)}</tbody>
    </table></div>`}
  <//>`;
}

// ---- the settings of the job in force, one row for each key

// Returns [[key, value], ...] with the keys of nested sections joined by dots. An empty section is a value.
function flattened(section, prefix = "") {
  return Object.entries(section).flatMap(([key, value]) =>
    value !== null && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length
      ? flattened(value, `${prefix}${key}.`)
      : [[`${prefix}${key}`, value]],
  );
}

function Job({ load }) {
  const [find, setFind] = useState("");
  const all = useMemo(() => flattened(load.data?.job ?? {}), [load.data]);
  const rows = all.filter(([key]) => key.includes(find.trim()));
  return html`<${Panel} title="Settings in force" load=${load}>
    ${({ revision }) => html`<details>
      <summary>${all.length} settings, revision ${revision}</summary>
      <p class="filters"><label>Find a setting <input type="search" value=${find} onInput=${(event) => setFind(event.currentTarget.value)} /></label></p>
      <div class="wide" tabindex="0" role="region" aria-label="Settings"><table>
        <thead><tr><th scope="col">job.</th><th scope="col">value</th></tr></thead>
        <tbody>${rows.map(([key, value]) => html`<tr key=${key}>
          <th scope="row"><code><${Text} value=${key} /></code></th>
          <td><${Text} value=${typeof value === "string" ? value : JSON.stringify(value)} limit=${400} lines /></td>
        </tr>`)}</tbody>
      </table></div>
    </details>`}
  <//>`;
}
