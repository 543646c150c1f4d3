// Overview: is it learning, is it healthy, what does it wait for; and the newest episodes.
import { html, useEffect, useMemo, useSignal } from "../vendor/ui.js";
import { get } from "../api.js";
import { useKeys } from "../keys.js";
import { DEFAULT_RUN, go, href } from "../route.js";
import { connection, health, pulse, run, session, status, steps, waiting } from "../store.js";
import { Chart } from "../parts/chart.js";
import { codeMarkers, newest, placed, running, scoreCurves } from "../parts/curve.js";
import { clock, duration, Fact, number, percent, plural, Text, toneOf } from "../parts/format.js";
import { Loading, Panel, Unread, useLoad } from "../parts/panel.js";
import { Waiting } from "../parts/waiting.js";

const REWARD = "reward/mean";
const TIMES = { sample: "time/sample", wait: "time/wait", learn: "time/learn" };
const TIMED_STEPS = 10;
const MACHINE_MS = 10_000;
const ANSWERS = { yes: "ok", learned: "ok", no: "warn", falls: "bad", too_early: "muted" };
const NO_VARIANCE = "/status#zero_variance";
const MARKS = { ok: ["✓", "fine"], warn: ["!", "look"], bad: ["✗", "bad"] };

function Learning() {
  const { versions, metrics } = steps.value;
  const scores = useLoad("/evaluations", {}, pulse.value.evaluation ?? 0).data;
  const answer = health.value?.learning;
  const rewards = metrics[REWARD];
  const x = useMemo(() => { // A score may belong to the version before the first step.
    const scored = (scores ?? []).map((one) => one.policy_version);
    if (!versions.length) return [...new Set(scored)].sort((a, b) => a - b);
    return scored.includes(versions[0] - 1) ? [versions[0] - 1, ...versions] : versions;
  }, [steps.value, scores]);
  const series = useMemo(() => {
    const reward = { name: "training reward", values: placed(x, versions, rewards), fact: `/steps#metrics["${REWARD}"]`, before: x.length - versions.length };
    const curves = scoreCurves(x, scores ?? []).filter(({ values }) => newest(values) >= 0);
    return [...(rewards ? [reward] : []), ...curves].map((one, tone) => ({ ...one, tone }));
  }, [steps.value, scores]);
  const markers = useMemo(() => codeMarkers(steps.value), [steps.value]);
  return html`<section class="panel learning"><header><h2>Is it learning?</h2></header>
    ${answer ? html`<p class=${`answer ${ANSWERS[answer.answer]}`}><${Text} value=${answer.text} /></p>` : html`<${Loading} />`}
    ${series.length > 0 && html`<${Chart} title="Reward of each step" x=${x} series=${series} markers=${markers} eager />`}
    ${versions.length > 0 && html`<button type="button" aria-keyshortcuts="w" onClick=${openWorst}>
      <kbd>w</kbd> Worst episode of step ${versions.at(-1)}</button>`}
  </section>`;
}

function Rule({ rule }) {
  const fallen = rule.name === "reward" && status.value?.zero_variance?.rewards_fell && status.value.zero_variance;
  const [mark, spoken] = MARKS[rule.level];
  return html`<li class=${rule.level}>
    <span class="mark" aria-hidden="true">${mark}</span><span class="visually-hidden">${spoken}: </span>
    <b>${rule.name}</b> <${Text} value=${rule.text} limit=${400} />
    ${fallen && html`<${Example} found=${fallen} />`}
    ${rule.remedy && html`<details><summary>What to do<span class="visually-hidden">: ${rule.name}</span></summary>
      ${rule.remedy.split("`").map((part, i) => (i % 2 ? html`<code>${part}</code>` : part))}</details>`}
  </li>`;
}

function Health() {
  const rules = health.value?.rules;
  if (!rules) return html`<section class="panel"><header><h2>Is it healthy?</h2></header><${Loading} /></section>`;
  const counts = Object.fromEntries(Object.keys(MARKS).map((level) => [level, rules.filter((one) => one.level === level)]));
  const trouble = [...counts.bad, ...counts.warn];
  const said = trouble.length
    ? `${counts.bad.length ? "No" : "Mostly"}: ${trouble.length} of ${rules.length} checks need a look`
    : `Yes: ${rules.length} checks are fine`;
  const level = counts.bad.length ? "bad" : counts.warn.length ? "warn" : "ok";
  return html`<section class="panel health"><header><h2>Is it healthy?</h2></header>
    <p class=${`answer ${level}`}>${rules.length ? said : "Nothing to judge yet."}</p>
    <ul class="rules">${trouble.map((rule) => html`<${Rule} key=${rule.name} rule=${rule} />`)}</ul>
    ${counts.ok.length > 0 && html`<details open=${!trouble.length}><summary>${counts.ok.length} fine</summary>
      <ul class="rules">${counts.ok.map((rule) => html`<${Rule} key=${rule.name} rule=${rule} />`)}</ul></details>`}
  </section>`;
}

// A group whose rewards are all equal.
function Example({ found }) {
  return html`<p>For example task <${Text} value=${found.task_id} limit=${120} />${found.prompt && html`: <q><${Text} value=${found.prompt} limit=${400} lines /></q>`}</p>
    <ul>${found.answers.map((one, i) => html`<li>reward <${Fact} path=${`${NO_VARIANCE}.answers[${i}].reward`} value=${one.reward} />,
      ${` ${plural(one.count, "time")}`}${one.answer && html`: <q><${Text} value=${one.answer} limit=${400} lines /></q>`}</li>`)}</ul>`;
}

// The newest batches could teach nothing: an example, and what to change. After a fall of the rewards the rule has both.
function NoVariance({ found }) {
  return html`<section class="panel bad-edge" role="status"><header><h2>Nothing to learn from</h2></header>
    <p class="answer bad"><${Fact} path=${`${NO_VARIANCE}.batches`} value=${found.batches} />
      ${` ${found.batches === 1 ? "batch" : "batches"} in a row could teach nothing: in every group all rewards were equal.`}</p>
    <${Example} found=${found} />
    <p>Look at:</p>
    <ul>${found.advice.map((one) => html`<li><${Text} value=${one} /></li>`)}</ul>
  </section>`;
}

function Times() {
  const { metrics } = steps.value;
  const sums = Object.entries(TIMES).map(([name, metric]) => {
    const values = (metrics[metric] ?? []).slice(-TIMED_STEPS);
    return [name, values.reduce((sum, value) => sum + (value ?? 0), 0)];
  });
  const all = sums.reduce((sum, [, seconds]) => sum + seconds, 0);
  if (!all) return null;
  return html`<figure class="times">
    <figcaption>Time of the newest ${plural(Math.min(TIMED_STEPS, steps.value.versions.length), "step")}</figcaption>
    <div class="bar" aria-hidden="true">${sums.map(([name, seconds]) => html`
      <span class=${name} style=${{ width: `${(100 * seconds) / all}%` }}></span>`)}</div>
    <ul class="key">${sums.map(([name, seconds]) => html`<li><span class=${`patch ${name}`}></span>
      ${name} ${percent(seconds / all)} (${duration(seconds)})</li>`)}</ul>
  </figure>`;
}

function Newest() {
  const at = useMemo(() => pulse.peek().at, [pulse.value.episode]);
  const load = useLoad("/episodes", { limit: 10, at });
  return html`<${Panel} title="Newest episodes" load=${load}>${({ episodes }) => html`<ul class="newest">
    ${episodes.map((one, i) => html`<li key=${one.episode_id}>
      <time title="begun">${clock(one.begun)}</time>
      <a href=${href(`/episodes/${encodeURIComponent(one.episode_id)}`)}><${Text} value=${one.episode_id} /></a>
      <span><${Text} value=${one.task_id} limit=${60} /></span>
      <span class=${toneOf(one)}>${one.status}${one.mode === "eval" && html`<span class="badge">eval</span>`}</span>
      ${one.reward != null && html`<span>reward <${Fact} path=${`/episodes?limit=10#episodes[${i}].reward`} value=${one.reward} /></span>`}
      ${one.reason && html`<span class="muted"><${Text} value=${one.reason} limit=${120} /></span>`}
    </li>`)}</ul>`}<//>`;
}

// The five lines that start a run: nothing has begun yet.
function FirstRun() {
  if (session.value.live === false) {
    return html`<section class="panel first-run"><header><h2>Nothing has run</h2></header>
      <p>No episode of this stored run has begun.</p></section>`;
  }
  const path = run.value === DEFAULT_RUN ? "" : `/runs/${run.value}`;
  const server = new URL(".", document.baseURI).href.replace(/\/$/, "") + path;
  const lines = [
    "from agentjet import Swarm, Task",
    "",
    `def agent(task, episode):  # call the model at episode.base_url with episode.api_key; return the reward`,
    "    ...",
    "",
    `with Swarm("${server}") as swarm:  # AGENTJET_TOKEN is the token${path && " of this run"}`,
    `    swarm.train(agent, [Task("task-1"), Task("task-2")], steps=20)`,
  ];
  return html`<section class="panel first-run"><header><h2>Nothing has run yet</h2></header>
    <p>The server is ready for its first episode. These lines start training. README.md has a whole agent:
      "Train your own agent".</p>
    <pre tabindex="0"><code>${lines.join("\n")}</code></pre>
  </section>`;
}

// Returns the seconds until the last step at the pace of the newest steps; null without a last one or a pace.
function secondsLeft({ ends_at_version: last, policy_version: version }, { times }) {
  const newest = times.slice(-TIMED_STEPS - 1);
  if (!last || version >= last || newest.length < 2) return null;
  return ((last - version) * (newest.at(-1) - newest[0])) / (newest.length - 1);
}

const gigabytes = (bytes) => `${number(Math.round(bytes / 1e8) / 10)} GB`;

// The processors and the memory of the server's machine.
function Machine() {
  const ticks = useSignal(0);
  useEffect(() => {
    const timer = setInterval(() => { if (connection.peek().state === "live") ticks.value += 1; }, MACHINE_MS);
    return () => clearInterval(timer);
  }, []);
  const load = useLoad(session.value.live === false ? null : "/machine", {}, ticks.value);
  const machine = load.data;
  if (!machine) return null;
  return html`<span>CPU ${percent(machine.cpu)} of ${number(machine.cores)}</span>
    <span>memory ${gigabytes(machine.memory_used)} of ${gigabytes(machine.memory_total)}</span>
    ${machine.gpus.map((gpu, i) => html`<span title=${gpu.name}>GPU ${i} ${percent(gpu.load)}, ${gigabytes(gpu.memory_used)} of ${gigabytes(gpu.memory_total)}</span>`)}`;
}

// The processes that answer model calls, if the server does not.
function Front({ front: one, path }) {
  const restarts = one.starts > 1 && `, ${plural(one.starts - 1, "restart")}`;
  if (one.problem) return html`<span class=${one.ready && "bad"}>front ${one.front}: ${one.problem}${restarts}</span>`;
  return html`<span>front ${one.front}: <${Fact} path=${`${path}.calls`} value=${one.calls} /> calls, ${percent(one.load)} of a core, lag ${number(one.lag)} s${restarts}</span>`;
}

function Facts() {
  const now = status.value;
  const left = secondsLeft(now, steps.value);
  const sampled = running(steps.value.metrics["batch/sampled_tokens"] ?? []).at(-1);
  const { live = 0, finished = 0, trained = 0 } = now.episodes;
  const ended = ["aborted", "expired", "not_needed"].filter((name) => now.episodes[name]);
  return html`<p class="counts-line muted">
    <span><${Fact} path="/status#episodes.live" value=${live} /> live ${live === 1 ? "episode" : "episodes"}</span>
    <span><${Fact} path="/status#episodes.finished" value=${finished} /> finished</span>
    <span><${Fact} path="/status#episodes.trained" value=${trained} /> trained</span>
    ${ended.map((name) => html`<span><${Fact} path=${`/status#episodes.${name}`} value=${now.episodes[name]} /> ${name.replace("_", " ")}</span>`)}
    <span><${Fact} path="/status#calls_active" value=${now.calls_active} /> active ${now.calls_active === 1 ? "call" : "calls"}</span>
    ${(now.fronts ?? []).map((front, i) => html`<${Front} front=${front} path=${`/status#fronts[${i}]`} />`)}
    ${sampled > 0 && html`<span>${number(sampled)} tokens sampled and trained</span>`}
    ${session.value.live !== false && html`<span>up for ${duration(now.uptime)}</span>`}
    ${left !== null && html`<span><b>about ${duration(left)} left</b></span>`}
    <${Machine} />
  </p>`;
}

// Opens the episode with the lowest reward of the newest batch.
async function openWorst() {
  const step = steps.peek()?.versions.at(-1) ?? 0;
  if (step < 1) return;
  const sort = "reward";
  const { episodes: [worst] } = await get("/episodes", { batch: step - 1, sort, limit: 1 }).catch(() => ({ episodes: [] }));
  if (worst) go(`/episodes/${encodeURIComponent(worst.episode_id)}`);
  else go("/episodes", { step, sort }); // The list has the reason.
}

export function OverviewView() {
  const now = status.value;
  useKeys({ w: ["the worst episode of the newest batch", openWorst] });
  if (!now || !steps.value) return html`<h1>Overview</h1><${Unread} />`;
  const begun = Object.values(now.episodes).some(Boolean) || steps.value.versions.length > 0;
  return html`<h1>Overview</h1>
    ${begun && html`<${Facts} />`}
    ${now.zero_variance && !now.zero_variance.rewards_fell && html`<${NoVariance} found=${now.zero_variance} />`}
    ${begun ? html`<div class="two"><${Learning} /><${Health} /></div>` : html`<${FirstRun} />`}
    <section class="panel"><header><h2>What is it waiting for?</h2></header>
      ${waiting.value ? html`<${Waiting} waiting=${waiting.value} />` : html`<p class="answer"><${Text} value=${now.waiting_for} /></p>`}
      <${Times} />
    </section>
    ${begun && html`<${Newest} />`}`;
}
