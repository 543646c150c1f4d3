// The view Group: the attempts at one task as one forest, and side by side from the token at which they differ.
import { html, useEffect, useMemo, useSignal } from "../vendor/ui.js";
import { get } from "../api.js";
import { useKeys } from "../keys.js";
import { go, href } from "../route.js";
import { lastCalls, partOf, readCall, sharedCount, timelineOf } from "../parts/call.js";
import { Forest, rowsOfTimelines, sharing } from "../parts/forest.js";
import { Fact, groupName, number, percent, plural, shortId, stepOf, stepPath, Text, toneOf, visible } from "../parts/format.js";
import { advantageTone, OVERLAYS, overlayNamed } from "../parts/overlays.js";
import { Failed, Loading, useLoad } from "../parts/panel.js";
import { OverlayBar, TokenPanel, Tokens } from "../parts/tokens.js";

const MOST_MEMBERS = 32;
const MOST_COLUMNS = 4;
const OFFERED = ["author", "probability", "advantage", "version", "forced", "tokens"];

const episodePath = (id) => `/episodes/${encodeURIComponent(id)}`;

// Loads the transcripts of the members, four at a time. Returns { episodes: Map of id to tree, problem, left }.
function useTranscripts(ids) {
  const state = useSignal({ trees: new Map(), problem: null });
  const key = ids.join(" ");
  useEffect(() => {
    const stopped = new AbortController();
    const waiting = [...ids];
    const trees = new Map();
    const work = async () => {
      for (let id = waiting.shift(); id; id = waiting.shift()) {
        trees.set(id, await get(episodePath(id), { form: "runs" }, { signal: stopped.signal }));
      }
    };
    Promise.all([work(), work(), work(), work()]).then(
      () => { state.value = { trees, problem: null }; },
      (problem) => { if (problem.name !== "AbortError") state.value = { trees, problem }; },
    );
    return () => stopped.abort();
  }, [key]);
  return state.value;
}

// The timelines of the members that have transcripts: the highest reward first, untrained ones last.
function timelinesOf(group, trees) {
  const found = [];
  for (const member of group.episodes) {
    const tree = trees.get(member.episode_id);
    if (!tree?.calls.length) continue;
    const calls = tree.calls.map(readCall);
    const facts = { episode: tree, calls, advantage: member.advantage, advantages: member.advantages };
    const last = lastCalls(calls);
    last.forEach((call, i) => found.push({
      id: `${member.episode_id}/${call.id}`, member, facts, timeline: timelineOf(calls, call),
      name: shortId(member.episode_id) + (last.length > 1 ? ` (${i + 1} of ${last.length})` : ""),
      isCut: call.finish_reason === "length", isTrained: !call.orphan,
    }));
  }
  const rank = ({ member, isTrained }) => (isTrained ? member.reward ?? -1e300 : -Infinity);
  return found.sort((a, b) => rank(b) - rank(a));
}

const rewardText = (member) => (member.reward === null ? visible(member.reason || member.status) : number(member.reward));

function described(one) {
  const { advantage } = one.member;
  return {
    ...one,
    label: `${rewardText(one.member).slice(0, 24)}${advantage === null ? "" : ` (${advantage > 0 ? "+" : ""}${number(advantage)})`} ${one.name}`,
    tone: advantage === null ? "" : advantageTone(advantage),
  };
}

function note(row) {
  const length = plural(row.timeline.count, "token");
  const cut = (row.isCut ? ", cut off at max_tokens" : "") + (row.isTrained ? "" : ", not trained");
  if (!row.shared || !row.differs) return `${length}${cut}`;
  return `${length}${cut}, differs at token ${number(row.shared + 1)}: “${row.differs.slice(0, 24)}”`;
}

function Members({ group }) {
  const fact = (i, name) => html`<${Fact} path=${`/groups/${group.id}#episodes[${i}].${name}`} value=${group.episodes[i][name]} />`;
  return html`<div class="wide" tabindex="0" role="region" aria-label="Episodes of the group"><table>
    <thead><tr><th scope="col">Episode</th><th scope="col">Status</th><th scope="col" class="num">Reward</th>
      <th scope="col" class="num">Advantage</th><th scope="col" class="num">Calls</th><th scope="col" class="num">Tokens</th>
      <th scope="col">Reason</th></tr></thead>
    <tbody>${group.episodes.map((one, i) => html`<tr key=${one.episode_id}>
      <td><a href=${href(episodePath(one.episode_id))} title=${one.episode_id}><${Text} value=${shortId(one.episode_id)} /></a></td><td class=${toneOf(one)}>${one.status}</td>
      <td class="num">${fact(i, "reward")}</td><td class="num">${fact(i, "advantage")}</td>
      <td class="num">${fact(i, "num_calls")}</td><td class="num">${fact(i, "num_tokens")}</td>
      <td class="prose"><${Text} value=${one.reason || one.dropped} limit=${200} /></td></tr>`)}</tbody></table></div>`;
}

// Two to four timelines side by side, from the first token at which they differ.
function Columns({ group, shown, overlay, here, onPick }) {
  const shared = useMemo(() => sharedCount(shown.map(({ timeline }) => timeline)), [shown]);
  const parts = useMemo(() => shown.map(({ timeline }) => partOf(timeline, shared, timeline.count)), [shown, shared]);
  const prefix = useMemo(() => partOf(shown[0].timeline, 0, shared), [shown, shared]);
  return html`<details><summary>Equal at the beginning: ${plural(shared, "token")}</summary>
      <p class="said muted">${prefix.shown}</p></details>
    <div class="siblings">${shown.map((one, i) => html`<section key=${one.id} aria-label=${one.name}>
      <h3><a href=${href(episodePath(one.member.episode_id))}><${Text} value=${one.name} /></a>
        <span class="muted"> reward ${one.member.reward === null ? rewardText(one.member)
          : html`<${Fact} path=${`/groups/${group.id}#episodes[${group.episodes.indexOf(one.member)}].reward`} value=${one.member.reward} />`}</span></h3>
      ${parts[i].count ? html`<${Tokens} call=${parts[i]} overlay=${overlay} facts=${one.facts} label=${`Tokens of ${one.name}`}
          here=${here?.id === one.id ? here.index : null} onPick=${(index) => onPick({ id: one.id, index })} />`
        : html`<p class="muted">It ends here.</p>`}
      ${here?.id === one.id && html`<${TokenPanel} call=${parts[i]} index=${here.index} facts=${one.facts}
        title=${`Token ${number(shared + here.index + 1)} of the timeline`} />`}
    </section>`)}</div>`;
}

function Siblings({ group, trees, overlayName }) {
  const members = useMemo(() => timelinesOf(group, trees).map(described), [group, trees]);
  const rows = useMemo(() => rowsOfTimelines(members).map((row) => ({ ...row, note: note(row) })), [members]);
  const chosen = useSignal(null);
  const here = useSignal(null);
  const ids = chosen.value ?? [members[0]?.id, members.findLast(({ isTrained }) => isTrained)?.id];
  const shown = useMemo(() => members.filter(({ id }) => ids.includes(id)), [members, ids.join(" ")]);
  const overlay = overlayNamed(overlayName);
  const choose = (name) => go(`/groups/${group.id}`, { overlay: name }, { replace: true });
  useKeys(Object.fromEntries(OVERLAYS.filter(({ name }) => OFFERED.includes(name))
    .map(({ key, name, title }) => [key, [`Overlay: ${title}`, () => choose(name)]])));
  if (!members.length) return html`<p class="state gone">No transcript of this group is kept.</p>`;
  const pick = (id) => {
    here.value = null;
    chosen.value = ids.includes(id) ? ids.filter((one) => one !== id) : [...ids, id].slice(-MOST_COLUMNS);
  };
  const { total, merged } = sharing(members, rows);
  return html`<section class="panel"><header><h2>One forest</h2></header>
      <p>${`${plural(total, "token")} in ${plural(members.length, "timeline")}. Computed once where they are shared: ${plural(merged, "token")}, ${percent(merged / total)}. Choose up to ${MOST_COLUMNS} to compare.`}</p>
      <${Forest} rows=${rows} label="Timelines of the group" chosen=${ids} onPick=${pick} /></section>
    ${shown.length > 0 && html`<section class="panel"><header><h2>Side by side</h2></header>
      <${OverlayBar} present=${overlay} onChoose=${choose} facts=${shown[0].facts} names=${OFFERED} />
      <${Columns} group=${group} shown=${shown} overlay=${overlay} here=${here.value} onPick=${(found) => { here.value = found; }} /></section>`}`;
}

export function GroupView({ params, query }) {
  const load = useLoad(`/groups/${encodeURIComponent(params.id)}`);
  const group = load.data;
  const ids = useMemo(() => group?.episodes.slice(0, MOST_MEMBERS).map((one) => one.episode_id) ?? [], [group]);
  const { trees, problem } = useTranscripts(ids);
  const rewards = group?.episodes.map((one) => one.reward).filter((reward) => reward !== null) ?? [];
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  return html`<div class="view-group">
    <header class="view-head"><h1>Group ${group && html`<${Text} value=${groupName(group.name)} limit=${80} />`}</h1></header>
    ${load.problem && html`<${Failed} problem=${load.problem} retry=${load.reload} />`}
    ${!group && !load.problem && html`<${Loading} />`}
    ${group && html`<section class="panel">
      <p>${group.state}${group.reason && html`: <${Text} value=${group.reason} lines />`}
        ${group.task_set && html` · task set <${Text} value=${group.task_set} />`} · task <${Text} value=${group.task_id} />
        ${group.code_version && html` · code <${Text} value=${group.code_version} />`}
        ${group.batch !== null && html` · <a href=${href(stepPath(group.batch))}>${`step ${stepOf(group.batch)}`}</a>`}
        ${rewards.length > 0 && html` · mean reward ${number(mean)}`}</p>
      ${rewards.length > 1 && new Set(rewards).size === 1 && html`<p class="warn">All rewards are equal, so the group teaches nothing.</p>`}
      ${group.advantages_note && html`<p class="muted">No advantages: <${Text} value=${group.advantages_note} />.</p>`}
      <${Members} group=${group} />
      ${group.episodes.length > MOST_MEMBERS && html`<p class="muted">The forest shows the first ${MOST_MEMBERS}.</p>`}
    </section>
    ${problem && html`<${Failed} problem=${problem} />`}
    ${!problem && trees.size < ids.length && html`<${Loading} />`}
    ${trees.size > 0 && html`<${Siblings} key=${params.id} group=${group} trees=${trees} overlayName=${query.overlay ?? "author"} />`}`}
  </div>`;
}
