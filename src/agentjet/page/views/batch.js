// One batch, by the number of the step that learns it: its rewards, its groups, what was dropped meanwhile, and the settings that changed.

import { html, useMemo } from "../vendor/ui.js";
import { useKeys } from "../keys.js";
import { go, href } from "../route.js";
import { pulse, status } from "../store.js";
import { families } from "../parts/families.js";
import { Fact, number, plural, stepOf, Text, visible } from "../parts/format.js";
import { Histogram, binsOf } from "../parts/histogram.js";
import { Panel, useLoad } from "../parts/panel.js";

// Why a group was dropped, in words. A reason that is not here is one of a recipe.
const DROPPED = {
  zero_variance: "all rewards of the group were equal, so there was nothing to compare",
  too_few: "fewer episodes finished than job.min_group_size, or than the recipe needs",
  no_tokens: "its episodes sampled nothing",
  no_members: "all its episodes ended without a reward",
  stalled: "its task set finished nothing while others waited for it",
  surplus: "the batch was full without it",
  stale: "its tokens were older than job.max_staleness",
  poisoned: "workers crashed on it",
  rolled_back: "the run went back to an earlier version",
};
const SHOWN_CAUSES = 20;
const SHOWN_EPISODES = 20;
const SIGNED = new Intl.NumberFormat("en", { signDisplay: "exceptZero", maximumSignificantDigits: 3 });

export function BatchView({ params }) {
  const step = /^[1-9]\d{0,14}$/.test(params.id) ? Number(params.id) : null;
  const load = useLoad(`/batches/${step === null ? encodeURIComponent(params.id) : step - 1}`, {}, pulse.value.step);
  const newest = status.value?.policy_version ?? 0;
  const to = (other) => other >= 1 && other <= newest && go(`/batches/${other}`);
  useKeys({
    "[": ["the step before", () => step !== null && to(step - 1)],
    "]": ["the step after", () => step !== null && to(step + 1)],
  });
  return html`<p class="neighbours">
      <a href=${href("/batches")}>All steps</a>
      ${step > 1 && html`<a href=${href(`/batches/${step - 1}`)}>‹ step ${step - 1}</a>`}
      ${step !== null && step < newest && html`<a href=${href(`/batches/${step + 1}`)}>step ${step + 1} ›</a>`}
    </p>
    <h1>Step <${Text} value=${params.id} limit=${20} /></h1>
    <${Panel} load=${load} gone=${html`There is no such step. The newest is on top of <a href=${href("/batches")}>the list</a>.`}>
      ${(batch) => html`<${Batch} batch=${batch} path=${`/batches/${batch.id}`} />`}
    <//>`;
}

function Batch({ batch, path }) {
  const members = batch.groups.flatMap((group) => group.members);
  const uniform = batch.groups.filter((group) => group.zero_variance).length;
  return html`
    <p>
      ${plural(members.length, "episode")} in ${plural(batch.groups.length, "group")}; mean reward${" "}
      <b>${number(mean(members.map((one) => one.reward)))}</b>.${" "}
      ${uniform > 0 && html`<b class="warn">${plural(uniform, "group")}</b> taught nothing: all rewards were equal. `}
      ${batch.state === "learned" ? `It made policy version ${stepOf(batch.id)}.` : "It is being learned."}
    </p>
    <${Rewards} batch=${batch} />
    <${Groups} batch=${batch} path=${path} />
    <${Dropped} dropped=${batch.dropped} />
    <${JobChanges} changes=${batch.job_changes} path=${path} />
    <${Metrics} metrics=${batch.metrics ?? {}} path=${path} />`;
}

function Rewards({ batch }) {
  const sets = useMemo(() => {
    const found = new Map();
    for (const { task_set: name, members } of batch.groups) {
      const rewards = members.map((one) => one.reward).filter((reward) => reward !== null);
      found.set(name, [...(found.get(name) ?? []), ...rewards]);
    }
    return [...found].sort((a, b) => b[1].length - a[1].length);
  }, [batch]);
  const bins = useMemo(() => binsOf(sets.flatMap(([, rewards]) => rewards)), [sets]);
  const to = (name) => (low, high) =>
    href("/episodes", { step: stepOf(batch.id), task_set: sets.length > 1 ? name : "", min_reward: low, max_reward: high });
  return html`<section class="panel" aria-labelledby="rewards-title">
    <header><h2 id="rewards-title">Rewards</h2></header>
    <p class="muted">Episodes by reward. A bar opens its episodes.</p>
    <div class="histograms">
      ${sets.map(([name, rewards]) => html`<div key=${name}>
        ${sets.length > 1 && html`<h3><${Text} value=${name || "no task set"} /> <small>mean ${number(mean(rewards))}</small></h3>`}
        <${Histogram} label=${`Rewards ${name}`} values=${rewards} bins=${bins} href=${to(name)} />
      </div>`)}
    </div>
  </section>`;
}

function Groups({ batch, path }) {
  const rows = useMemo(
    () => batch.groups.map((group, index) => ({ group, index })).sort((a, b) => b.group.zero_variance - a.group.zero_variance),
    [batch],
  );
  return html`<section class="panel" aria-labelledby="groups-title">
    <header><h2 id="groups-title">Groups</h2></header>
    <p class="muted">Those without variance first. Each member: its reward, and the advantage that it was trained with.
      ${batch.advantages_note && html` Advantages are missing: <${Text} value=${batch.advantages_note} />.`}</p>
    <div class="wide" tabindex="0" role="region" aria-label="Groups of the batch"><table class="rows">
      <thead><tr>
        <th scope="col">group</th><th scope="col" class="wide-only">task set</th><th scope="col" class="num">mean</th><th scope="col">members</th>
      </tr></thead>
      <tbody>${rows.map(({ group, index }) => html`<tr key=${group.id}>
        <th scope="row"><a href=${href(`/groups/${encodeURIComponent(group.id)}`)}><${Text} value=${group.task_id || group.id} limit=${80} /></a></th>
        <td class="wide-only"><${Text} value=${group.task_set} limit=${80} /></td>
        <td class="num">${number(mean(group.members.map((one) => one.reward)))}${group.zero_variance && html`<span class="badge warn">all equal</span>`}</td>
        <td><ul class="members">
          ${group.members.map((member, place) => html`<${Member} key=${member.episode_id} member=${member} path=${`${path}#groups[${index}].members[${place}]`} />`)}
        </ul></td>
      </tr>`)}</tbody>
    </table></div>
  </section>`;
}

function Member({ member, path }) {
  const byRole = Object.entries(member.advantages ?? {});
  const advantages = byRole.length
    ? byRole.map(([role, value]) => ({ role: `${role} `, value, place: `advantages[${JSON.stringify(role)}]` }))
    : [{ role: "", value: member.advantage, place: "advantage" }].filter((one) => one.value !== null);
  const words = advantages.map(({ role, value }) => `, ${visible(role)}advantage ${number(value)}`).join("");
  const label = `episode ${visible(member.episode_id)}, reward ${number(member.reward)}${words}`;
  return html`<li><a href=${href(`/episodes/${encodeURIComponent(member.episode_id)}`)} aria-label=${label}>
    <${Fact} path=${`${path}.reward`} value=${member.reward} />
    ${advantages.map(({ role, value, place }) => html`<small><${Text} value=${role} /><${Fact} path=${`${path}.${place}`} value=${value} format=${signed} /></small>`)}
  </a></li>`;
}

// The episodes that were not trained, by what ended them.
function Dropped({ dropped }) {
  const causes = Object.entries(Object.groupBy(dropped, causeOf)).sort((a, b) => b[1].length - a[1].length);
  return html`<section class="panel" aria-labelledby="dropped-title">
    <header><h2 id="dropped-title">Not trained</h2></header>
    <p class="muted">${causes.length ? "Episodes that ended between the batch before and this one, and why they are in neither." : "Every episode that ended between the batch before and this one is in it."}</p>
    <ul class="plain">
      ${causes.slice(0, SHOWN_CAUSES).map(([cause, those]) => html`<li key=${cause}>
        <b>${plural(those.length, "episode")}</b> <${Text} value=${cause} limit=${200} />
        ${those[0].status === "finished" && html`<span class="muted">: ${droppedBecause(those[0].reason)}</span>`}
        <ul class="members">
          ${those.slice(0, SHOWN_EPISODES).map((one) => html`<li key=${one.episode_id}>
            <a href=${href(`/episodes/${encodeURIComponent(one.episode_id)}`)} title=${visible(one.reason)}><${Text} value=${one.task_id || one.episode_id} limit=${40} /></a>
          </li>`)}
          ${those.length > SHOWN_EPISODES && html`<li class="muted">and ${number(those.length - SHOWN_EPISODES)} more</li>`}
        </ul>
      </li>`)}
    </ul>
    ${causes.length > SHOWN_CAUSES && html`<p class="muted">And ${plural(causes.length - SHOWN_CAUSES, "rarer cause")}.</p>`}
  </section>`;
}

// Returns the status, and the reason without its details, which differ from episode to episode.
function causeOf({ status, reason }) {
  return status === "finished" ? `dropped: ${reason}` : [status, reason.split(":", 1)[0].trim()].filter(Boolean).join(": ");
}

function JobChanges({ changes, path }) {
  if (!changes.length) return null;
  return html`<section class="panel" aria-labelledby="job-title">
    <header><h2 id="job-title">Settings that changed before this batch</h2></header>
    <div class="wide" tabindex="0" role="region" aria-label="Settings that changed"><table class="rows">
      <thead><tr><th scope="col">setting</th><th scope="col">before</th><th scope="col">now</th></tr></thead>
      <tbody>${changes.map((one) => html`<tr key=${one.key}>
        <th scope="row"><code><${Text} value=${one.key} /></code></th>
        <td><del><${Text} value=${written(one.before)} limit=${400} lines /></del></td>
        <td><ins><${Text} value=${written(one.after)} limit=${400} lines /></ins></td>
      </tr>`)}</tbody>
    </table></div>
  </section>`;
}

function Metrics({ metrics, path }) {
  const names = Object.keys(metrics);
  if (!names.length) return html`<p class="muted">The metrics of this batch come when it is learned.</p>`;
  return html`<section class="panel" aria-labelledby="metrics-title">
    <header><h2 id="metrics-title">Metrics</h2></header>
    <div class="metric-lists">
      ${families(names).map(([title, those]) => html`<div key=${title}>
        <h3><${Text} value=${title} /></h3>
        <dl>${those.map((name) => html`<div key=${name}>
          <dt><a href=${href("/batches", { metrics: `^${escaped(name)}$` })}><${Text} value=${name} limit=${120} /></a></dt>
          <dd><${Fact} path=${`${path}#metrics[${JSON.stringify(name)}]`} value=${metrics[name]} /></dd>
        </div>`)}</dl>
      </div>`)}
    </div>
  </section>`;
}

function mean(values) {
  const found = values.filter((value) => value !== null);
  return found.length ? found.reduce((sum, value) => sum + value, 0) / found.length : null;
}

function signed(value) {
  return value === null ? "–" : SIGNED.format(value);
}

function written(value) {
  return value === null || value === undefined ? "not set" : typeof value === "string" ? value : JSON.stringify(value);
}

function escaped(name) {
  return name.replace(/[.*+?^${}()|[\]\\/]/g, "\\$&");
}

function droppedBecause(reason) {
  return Object.hasOwn(DROPPED, reason) ? DROPPED[reason] : "the recipe refused it";
}
