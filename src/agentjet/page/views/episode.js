// The view Episode: what was said, the tree of calls with the causes of its forks, and the tokens under an overlay.
import { html, useCallback, useEffect, useMemo, useRef, useSignal } from "../vendor/ui.js";
import { useKeys } from "../keys.js";
import { go, href } from "../route.js";
import { connection } from "../store.js";
import { AbortButton } from "../parts/actions.js";
import { continuation, difference, leastLikely, readCall } from "../parts/call.js";
import { Forest, rowsOfCalls } from "../parts/forest.js";
import { clock, duration, Fact, groupName, number, plural, stepOf, stepPath, Text, toneOf, visible } from "../parts/format.js";
import { Conversation } from "../parts/messages.js";
import { callTone, OVERLAYS, overlayNamed, untrainedEpisode } from "../parts/overlays.js";
import { Failed, Gone, Loading, useLoad } from "../parts/panel.js";
import { OverlayBar, TokenPanel, Tokens } from "../parts/tokens.js";

const REFRESH_MS = 5000;
const UNTRAINED_CALL = {
  retry: "the same request came again, and another answer to it is trained",
  undelivered: "its answer did not reach the agent",
  side: "a rule of job.side_calls excludes it",
};

const pathOf = (id) => `/episodes/${encodeURIComponent(id)}`;

// Returns a number that grows while a live episode may have changed.
function useTicks(isLive) {
  const ticks = useSignal(0);
  useEffect(() => {
    if (!isLive) return undefined;
    const timer = setInterval(() => {
      if (connection.peek().state === "live") ticks.value += 1;
    }, REFRESH_MS);
    return () => clearInterval(timer);
  }, [isLive]);
  return ticks.value;
}

function Facts({ episode, member, group }) {
  const path = pathOf(episode.episode_id);
  const fact = (name, value = episode[name]) => html`<${Fact} path=${`${path}#${name}`} value=${value} />`;
  const place = `/groups/${group?.id}#episodes[${group?.episodes.indexOf(member)}]`;
  const link = (name, value) => html`<a href=${href("/episodes", { [name]: value })}><${Text} value=${value} limit=${80} /></a>`;
  const rows = [
    ["Status", episode.mode === "eval" ? `${episode.status}, evaluation` : episode.status],
    ["Reward", fact("reward")],
    ["Advantage", member?.advantage != null && html`<${Fact} path=${`${place}.advantage`} value=${member.advantage} />`],
    ...Object.entries(member?.advantages ?? {}).map(([role, value]) => [html`Advantage of <${Text} value=${role} limit=${40} />`,
      html`<${Fact} path=${`${place}.advantages[${JSON.stringify(role)}]`} value=${value} />`]),
    ["Task", link("task", episode.task_id)],
    ["Task set", episode.task_set && link("task_set", episode.task_set)],
    ["Group", episode.group_id != null && html`<a href=${href(`/groups/${episode.group_id}`)}><${Text} value=${groupName(episode.group)} limit=${80} /></a>`],
    ["Step", episode.trained_in !== null && html`<a href=${href(stepPath(episode.trained_in))}>${stepOf(episode.trained_in)}</a>`],
    ["Version", fact("policy_version")],
    ["Calls", fact("num_calls")],
    ["Sampled tokens", fact("num_tokens")],
    ["Began", clock(episode.begun)],
    ["Took", episode.ended ? duration(episode.ended - episode.begun) : null],
    ["Lease until", episode.status === "live" ? clock(episode.expires_at) : null],
    ["Client", link("client", episode.client_id)],
    ["Code version", episode.code_version && link("code_version", episode.code_version)],
    ...Object.keys(episode.by_role).map((role) => [html`Reward of <${Text} value=${role} limit=${40} />`, fact(`by_role[${JSON.stringify(role)}]`, episode.by_role[role])]),
    ...Object.keys(episode.metrics).map((name) => [html`<${Text} value=${name} limit=${40} />`, fact(`metrics[${JSON.stringify(name)}]`, episode.metrics[name])]),
  ].filter(([, value]) => value !== null && value !== false && value !== "");
  return html`<dl class="facts wrap">${rows.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

const counts = (found) => Object.entries(found).map(([name, count]) => `${name} (${count})`).join(", ");

function Remarks({ episode, advantage }) {
  const why = untrainedEpisode(episode, advantage);
  return html`
    ${episode.reward_text && html`<p><strong>Reward text:</strong> <${Text} value=${episode.reward_text} limit=${10_000} lines /></p>`}
    ${episode.reason && html`<p class=${toneOf(episode)}><strong>Reason:</strong> <${Text} value=${episode.reason} limit=${2000} lines /></p>`}
    ${why && html`<p class="warn">Not trained: <${Text} value=${why[1]} />.</p>`}
    ${episode.unscorable && html`<p class="warn">A refused request ended a call of the agent, so the reward may judge the refusal.</p>`}
    ${counts(episode.refused) && html`<p class="warn">Refused: <${Text} value=${counts(episode.refused)} /></p>`}
    ${counts(episode.noted) && html`<p class="muted">Noted: <${Text} value=${counts(episode.noted)} /></p>`}`;
}

function CallSection({ call, position, parent, numbers, overlay, facts, here, onPick }) {
  const title = `Call ${position + 1}`;
  const versions = [...new Set(call.versions)].filter((version) => version !== null);
  const sampled = call.count - call.num_context;
  const details = [
    `${plural(call.num_context, "new context token")}, ${number(sampled)} sampled`,
    versions.length ? `version ${versions.join(", ")}` : "nothing sampled",
    `ended: ${call.finish_reason}`, `temperature ${number(call.temperature)}`,
    call.seconds === null ? clock(call.created) : `${clock(call.created)}, took ${duration(call.seconds)}`,
  ];
  const way = continuation(call, parent, numbers);
  const changed = difference(call, parent);
  const tone = overlay.name === "advantage" ? callTone(call, facts) : "";
  return html`<section class=${`call ${tone}`} id=${`call-${position}`} tabindex="-1" aria-label=${title}>
    <header><h2>${title}${call.role && html` as <${Text} value=${call.role} limit=${80} />`}</h2>
      <span class="muted">${details.join(" · ")}</span></header>
    ${way && html`<p class=${call.fork ? "fork" : "muted"}>${way}</p>`}
    ${changed && html`<p class="fork">Before: <code class="token-text">${changed.before}</code> Here: <code class="token-text">${changed.after}</code></p>`}
    ${call.orphan && html`<p class="warn">Not trained: ${UNTRAINED_CALL[call.orphan] ?? call.orphan}.</p>`}
    ${call.finish_reason === "length" && html`<p class="warn">The answer was cut off at max_tokens.</p>`}
    ${overlay.name === "words" ? html`<${Conversation} call=${call} />` : html`<${Tokens} call=${call} overlay=${overlay}
      facts=${facts} here=${here} onPick=${(index) => onPick(call, index)} label=${`Tokens of call ${position + 1}`} />`}
  </section>`;
}

// The calls with what can be done with them: overlays, tree, tokens.
function Calls({ facts, overlayName }) {
  const { episode, calls } = facts;
  const here = useSignal(null);
  const overlay = overlayNamed(overlayName);
  const numbers = useMemo(() => new Map(calls.map((call, i) => [call.id, i + 1])), [calls]);
  const parents = useMemo(() => new Map(calls.map((call) => [call.id, call])), [calls]);
  const rows = useMemo(() => rowsOfCalls(calls, (call) => ({
    label: [numbers.get(call.id), visible(call.role), call.fork && `↳ ${call.fork}`, call.orphan && `✕ ${call.orphan}`]
      .filter(Boolean).join(" "),
    tone: call.orphan ? "struck" : "",
  })), [calls]);
  const choose = (name) => go(pathOf(episode.episode_id), { overlay: name === "words" ? "" : name }, { replace: true });
  const pick = (call, index) => { here.value = { call, index }; };
  const showLeastLikely = () => {
    const present = here.value;
    const after = overlay.name === "probability" && present ? present.call.logprobs[present.index] ?? -Infinity : -Infinity;
    const found = leastLikely(calls, after) ?? leastLikely(calls);
    if (!found) return;
    here.value = found;
    if (overlay.name !== "probability") choose("probability");
  };
  useKeys({
    ...Object.fromEntries(OVERLAYS.map(({ key, name, title }) => [key, [`Overlay: ${title}`, () => choose(name)]])),
    l: ["The least likely token; again: the next", showLeastLikely],
  });
  const showCall = useCallback((id) => {
    const section = document.getElementById(`call-${numbers.get(id) - 1}`);
    section?.scrollIntoView({ block: "start" });
    section?.focus({ preventScroll: true });
  }, [numbers]);
  const chosen = here.value && parents.get(here.value.call.id);
  const tree = useMemo(() => html`<${Forest} rows=${rows} label="Calls" chosen=${chosen?.id} onPick=${showCall} />`, [rows, chosen]);
  return html`<div class="overlay-head">
      <${OverlayBar} present=${overlay} onChoose=${choose} facts=${facts} />
      <button type="button" aria-keyshortcuts="l" onClick=${showLeastLikely}><kbd>l</kbd> Least likely token</button>
    </div>
    <div class="episode-columns">
      <section class="tree" aria-label="Tree of calls">${tree}</section>
      <div class="calls">${calls.map((call, i) => html`<${CallSection} key=${call.id} call=${call} position=${i}
        parent=${parents.get(call.parent)} numbers=${numbers} overlay=${overlay} facts=${facts}
        here=${chosen === call ? here.value.index : null} onPick=${pick} />`)}</div>
      <aside id="token-panel" tabindex="0" aria-live="polite" aria-label="Token">${chosen && overlay.name !== "words"
        ? html`<${TokenPanel} call=${chosen} index=${here.value.index} facts=${facts} title=${`Call ${numbers.get(chosen.id)}`}
            fact=${(index) => `${pathOf(episode.episode_id)}?form=runs#calls.${numbers.get(chosen.id) - 1}.logprobs.${index - chosen.num_context}`} />`
        : html`<p class="muted">${overlay.name === "words" ? "Choose an overlay, keys 2 to 8, to see tokens." : "Click a token, or move with the arrow keys."}</p>`}
      </aside>
    </div>`;
}

function noCalls(episode) {
  if (episode.kept === "gone") {
    return html`<${Gone}><p>The calls of this episode are not kept: a checkpoint covers its batch, and only some episodes of
      a batch stay readable. server.keep_transcripts sets how many.</p><//>`;
  }
  return html`<p class="state empty">The agent has made no call${episode.status === "live" ? " yet" : ""}.</p>`;
}

export function EpisodeView({ params, query }) {
  const path = pathOf(params.id);
  const isLive = useRef(false);
  const load = useLoad(path, { form: "runs" }, useTicks(isLive.current));
  const episode = load.data;
  isLive.current = episode?.status === "live";
  const group = useLoad(episode?.group_id != null ? `/groups/${episode.group_id}` : null, {}, episode?.status).data;
  const member = group?.episodes.find((one) => one.episode_id === params.id);
  const advantage = member?.advantage ?? null;
  const calls = useMemo(() => episode?.calls.map(readCall), [episode]);
  const facts = useMemo(() => ({ episode, calls, advantage, advantages: member?.advantages }), [calls, member]);
  const head = useMemo(() => episode && html`<section class="panel">
    <${Facts} episode=${episode} member=${member} group=${group} />
    <${Remarks} episode=${episode} advantage=${advantage} />
    ${group?.advantages_note && html`<p class="muted">No advantages: <${Text} value=${group.advantages_note} />.</p>`}
    <${AbortButton} id=${episode.episode_id} status=${episode.status} onDone=${load.reload} /></section>`, [episode, advantage, group]);
  const siblings = group?.episodes.map((one) => one.episode_id) ?? [];
  const step = (by) => {
    const next = siblings[siblings.indexOf(params.id) + by];
    if (next) go(pathOf(next), query);
  };
  useKeys({
    "[": ["Episode before in the group", () => step(-1)],
    "]": ["Next episode of the group", () => step(1)],
    u: ["The group", () => episode?.group_id != null && go(`/groups/${episode.group_id}`)],
  });
  return html`<div class="view-episode">
    <header class="view-head"><h1>Episode <${Text} value=${params.id} limit=${80} /></h1>
      ${siblings.length > 1 && html`<span class="steps">
        <button type="button" aria-keyshortcuts="[" disabled=${siblings[0] === params.id} onClick=${() => step(-1)}>‹ before</button>
        <a href=${href(`/groups/${group.id}`)}>${`group of ${number(siblings.length)}`}</a>
        <button type="button" aria-keyshortcuts="]" disabled=${siblings.at(-1) === params.id} onClick=${() => step(1)}>next ›</button></span>`}
    </header>
    ${load.problem && html`<${Failed} problem=${load.problem} retry=${load.reload} />`}
    ${!episode && !load.problem && html`<${Loading} />`}
    ${episode && html`${head}
      ${calls.length ? html`<${Calls} key=${params.id} facts=${facts} overlayName=${query.overlay} />` : noCalls(episode)}`}
  </div>`;
}
