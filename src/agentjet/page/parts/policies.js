// The policies of a run with their newest figures and processes, and the roles of its episodes.

import { html, useMemo } from "../vendor/ui.js";
import { pulse, status, steps } from "../store.js";
import { newest } from "./curve.js";
import { Fact, number, plural, Text } from "./format.js";
import { Panel, useLoad } from "./panel.js";

const FIGURES = [
  ["reward/mean", "mean reward", "num"], ["policy/entropy", "entropy", "num wide-only"],
  ["optim/grad_norm", "gradient norm", "num wide-only"], ["optim/lr", "learning rate", "num wide-only"],
];
const EPISODES = 200;

export function Policies() {
  const load = useLoad("/cluster", {}, pulse.value.step);
  const names = status.value.policies.length ? status.value.policies : [""];
  return html`<${Panel} title="Policies" load=${load}>
    ${({ processes, samplers }) => html`<div class="wide" tabindex="0" role="region" aria-label="Policies"><table>
      <thead><tr>
        <th scope="col">policy</th>${FIGURES.map(([, title, kind]) => html`<th scope="col" class=${kind}>${title}</th>`)}
        <th scope="col">processes</th>
      </tr></thead>
      <tbody>${names.map((name) => html`<tr key=${name}>
        <th scope="row"><${Text} value=${name || status.value.model || "the policy"} /></th>
        ${FIGURES.map(([metric, , kind]) => html`<td class=${kind}><${Newest} metric=${name ? `${name}/${metric}` : metric} /></td>`)}
        <td class="prose"><${Processes} found=${processes.filter((one) => !name || one.policy === name)} samplers=${samplers[name]} /></td>
      </tr>`)}</tbody>
    </table></div>
    <${Roles} />`}
  <//>`;
}

function Newest({ metric }) {
  const values = steps.value?.metrics[metric] ?? [];
  const index = newest(values);
  return index < 0 ? "–" : html`<${Fact} path=${`/steps#metrics[${JSON.stringify(metric)}][${index}]`} value=${values[index]} />`;
}

function Processes({ found, samplers }) {
  if (!found.length) return html`<span class="muted">none</span>`;
  return html`<ul class="plain">${found.map((one) => html`<li key=${one.name}>
    <${Text} value=${one.name} />${one.kind !== one.name && html` <span class="muted">${one.kind}</span>`} <${Text} value=${one.state} />
    ${one.version !== null && html`, version ${number(one.version)}`}
    ${one.completions > 0 && html`, ${plural(one.completions, "completion")}`}
    ${one.place && html`<span class="muted"> on <${Text} value=${one.place} /></span>`}
  </li>`)}${samplers && html`<li class="muted">${plural(samplers.wanted, "replica")} wanted, ${plural(samplers.waiting, "completion")} waiting</li>`}</ul>`;
}

// Mean reward of each role over the newest finished episodes, if episodes have rewards by role.
function Roles() {
  const load = useLoad("/episodes", { status: "finished", mode: "train", limit: EPISODES }, pulse.value.step);
  const roles = useMemo(() => meanByRole(load.data?.episodes ?? []), [load.data]);
  if (!roles.length) return null;
  return html`<h3>Roles</h3>
    <p class="muted">Mean rewards of the newest ${plural(load.data.episodes.length, "finished episode")}.</p>
    <table>
      <thead><tr><th scope="col">role</th><th scope="col" class="num">mean reward</th><th scope="col" class="num">episodes</th></tr></thead>
      <tbody>${roles.map(([role, mean, count]) => html`<tr key=${role}>
        <th scope="row"><${Text} value=${role} limit=${80} /></th><td class="num">${number(mean)}</td><td class="num">${number(count)}</td>
      </tr>`)}</tbody>
    </table>`;
}

// Returns [[role, mean reward, number of episodes], ...] in the order of the names.
export function meanByRole(episodes) {
  const found = new Map();
  for (const { by_role: rewards } of episodes) {
    for (const [role, reward] of Object.entries(rewards)) {
      if (reward !== null) found.set(role, [...(found.get(role) ?? []), reward]);
    }
  }
  return [...found]
    .map(([role, rewards]) => [role, rewards.reduce((sum, one) => sum + one, 0) / rewards.length, rewards.length])
    .sort(([a], [b]) => (a < b ? -1 : 1));
}
