// The view Episodes: a table of any length. Its filters are the query of the URL, with the names of the API.
import { html, useEffect, useMemo, useRef, useSignal } from "../vendor/ui.js";
import { EPISODE_FILTERS } from "../filters.js";
import { get } from "../api.js";
import { useKeys } from "../keys.js";
import { go, href } from "../route.js";
import { pulse, run, session } from "../store.js";
import { clock, duration, Fact, number, shortId, stepOf, stepPath, Text, toneOf, visible } from "../parts/format.js";
import { Failed, Loading } from "../parts/panel.js";
import { Table } from "../parts/table.js";

const PAGE = 200;
const REFRESH = 50;
const REFRESH_MS = 1000;
// The page counts steps from 1, the API counts their batches from 0.
const FILTERS = EPISODE_FILTERS.map((one) => (one.name === "batch" ? { ...one, name: "step" } : one));
const NAMES = FILTERS.map(({ name }) => name);
const OPTIONAL = ["task_set", "code_version"];
const MARKS = { live: "▒", finished: "●", aborted: "✕", expired: "◌" };

// What the list had when one left it, so that "back" shows the same rows.
let left = null;

const toApi = ({ step, ...query }) => (step ? { ...query, batch: Number(step) - 1 } : query);

const filterLink = (query, name, value) => href("/episodes", { ...query, [name]: value });

const outcome = (row) => html`${row.mode === "eval" && "evaluation, "}${ended(row)}`;

function ended(row) {
  if (row.status === "live") return row.expires_at ? `live, lease until ${clock(row.expires_at)}` : "live";
  if (row.trained_in !== null) return html`<a tabindex="-1" href=${href(stepPath(row.trained_in))}>${`step ${stepOf(row.trained_in)}`}</a>`;
  if (row.reason || row.dropped) return html`<span title=${visible(row.reason || row.dropped)}><${Text} value=${row.reason || row.dropped} limit=${200} /></span>`;
  return row.status === "finished" && row.mode !== "eval" ? "waits for its batch" : row.status;
}

// `given`: the row's names that some row has; a column that all rows leave empty is not drawn.
function columnsOf(query, given) {
  const fact = (row, name) => html`<${Fact} path=${`/episodes/${encodeURIComponent(row.episode_id)}#${name}`} value=${row[name]} />`;
  const cell = (row, name, value) => value && html`<a tabindex="-1" href=${filterLink(query, name, value)}
    title=${`Only this: ${visible(value)}`}><${Text} value=${value} limit=${60} /></a>`;
  const columns = [
    {
      name: "episode", title: "Episode", width: "minmax(7rem, 1.2fr)", narrow: true,
      cell: (row) => html`<span class=${`mark ${row.status} ${toneOf(row)}`} aria-hidden="true">${MARKS[row.status]}</span>
        <a tabindex="-1" href=${href(`/episodes/${encodeURIComponent(row.episode_id)}`)} title=${row.episode_id}><${Text} value=${shortId(row.episode_id)} /></a>`,
    },
    { name: "status", title: "Status", width: "5rem", cell: (row) => row.status },
    { name: "task", title: "Task", narrow: true, width: "minmax(6rem, 1.5fr)", cell: (row) => cell(row, "task", row.task_id) },
    { name: "task_set", title: "Set", cell: (row) => cell(row, "task_set", row.task_set) },
    { name: "version", title: "Version", number: true, width: "4.5rem", cell: (row) => fact(row, "policy_version") },
    { name: "code_version", title: "Code", cell: (row) => cell(row, "code_version", row.code_version) },
    { name: "client", title: "Client", cell: (row) => cell(row, "client", row.client_id) },
    {
      name: "reward", title: "Reward", number: true, narrow: true, width: "5rem", cell: (row) => fact(row, "reward"),
      sorts: [["", "none"], ["reward", "ascending"], ["-reward", "descending"]],
    },
    { name: "calls", title: "Calls", number: true, width: "4rem", cell: (row) => fact(row, "num_calls") },
    { name: "tokens", title: "Tokens", number: true, width: "5rem", cell: (row) => fact(row, "num_tokens") },
    { name: "took", title: "Took", number: true, width: "6rem", cell: (row) => (row.ended ? duration(row.ended - row.begun) : "") },
    { name: "outcome", title: "Outcome", narrow: true, width: "minmax(14rem, 3fr)", cell: outcome },
  ];
  return columns.filter(({ name }) => !OPTIONAL.includes(name) || given.includes(name));
}

// Loads pages of the list. Returns { state: { key, rows, next, total, problem }, first, loadMore, refresh }.
function useEpisodes(query, key, active) {
  const state = useSignal(left?.key === key ? left : { key, rows: null, next: null, total: null, problem: null });
  const busy = useRef(null);
  const load = async (asked, merge) => {
    busy.current?.stopped.abort();
    const stopped = new AbortController();
    const mine = { stopped, before: asked.before };
    busy.current = mine;
    try {
      const page = await get("/episodes", { ...toApi(query), ...asked }, { signal: stopped.signal });
      if (!stopped.signal.aborted) state.value = { ...state.peek(), key, problem: null, ...merge(page) };
    } catch (problem) {
      const { rows } = state.peek().key === key ? state.peek() : { rows: null }; // Not those of other filters.
      if (problem.name !== "AbortError") state.value = { ...state.peek(), key, rows, problem };
    } finally {
      if (busy.current === mine) busy.current = null;
    }
  };
  const whole = (page) => ({ rows: page.episodes, next: page.next, total: page.total });
  const first = () => load({ limit: PAGE, count: true }, whole);
  const loadMore = () => {
    const { rows, next } = state.peek();
    if (!next || busy.current?.before === next) return;
    load({ limit: PAGE, before: next }, (page) => ({ rows: [...rows, ...page.episodes], next: page.next }));
  };
  // Updates the newest rows in place, and adds new ones above them.
  const refresh = () => {
    const { rows } = state.peek();
    if (busy.current || !rows) return;
    load({ limit: REFRESH, count: true }, (page) => {
      const newer = new Set(page.episodes.map((row) => row.episode_id));
      const from = rows.findIndex((row) => row.episode_id === page.episodes.at(-1)?.episode_id);
      if (from < 0) return whole(page);
      const older = rows.slice(from + 1).filter((row) => !newer.has(row.episode_id));
      return { rows: [...page.episodes, ...older], total: page.total };
    });
  };
  useEffect(() => {
    if (left?.key === key) state.value = left;
    else first();
    return () => {
      busy.current?.stopped.abort();
      left = state.peek().rows && { ...state.peek(), active: active.current.index };
    };
  }, [key, session.value?.key]);
  return { state: state.value, first, loadMore, refresh };
}

function Filters({ query }) {
  const given = NAMES.filter((name) => query[name]);
  const open = useSignal(false);
  const submit = (event) => {
    event.preventDefault();
    const values = Object.fromEntries(new FormData(event.target));
    go("/episodes", { ...query, ...values });
  };
  useKeys({
    f: ["Filter", () => { open.value = true; setTimeout(() => document.getElementById("filter-status")?.focus()); }],
    "/": ["Search", () => document.getElementById("search")?.focus()],
  });
  const search = (event) => {
    event.preventDefault();
    go("/episodes", { ...query, search: new FormData(event.target).get("search") });
  };
  return html`<div class="filters">
    <form role="search" onSubmit=${search}><label>Search in task, group and id
      <input id="search" name="search" type="search" key=${query.search} defaultValue=${query.search ?? ""} /></label></form>
    <ul class="chips" aria-label="Filters">
      ${given.map((name) => html`<li key=${name}><span class="chip">${`${FILTERS.find((one) => one.name === name).title}: `}<${Text} value=${query[name]} limit=${60} />
        <button type="button" class="icon" aria-label=${`Remove the filter ${name}`}
          onClick=${() => go("/episodes", { ...query, [name]: "" })}>✕</button></span></li>`)}
    </ul>
    <details open=${open.value} onToggle=${(event) => { open.value = event.target.open; }}>
      <summary>Filter and sort</summary>
      <form onSubmit=${submit} key=${JSON.stringify(query)}>
        ${FILTERS.filter(({ name }) => name !== "search").map(({ name, title, options, number: isNumber }) => html`<label key=${name}>${title}
          ${options ? html`<select id=${`filter-${name}`} name=${name}>
              <option value="">any</option>
              ${options.map((one) => html`<option value=${one} selected=${query[name] === one}>${one}</option>`)}</select>`
            : html`<input name=${name} type=${isNumber ? "number" : "text"} step="any" defaultValue=${query[name] ?? ""} />`}
        </label>`)}
        <button type="submit" class="primary">Apply</button>
        <button type="button" onClick=${() => go("/episodes")}>Remove all</button>
      </form>
    </details>
  </div>`;
}

function empty(query) {
  if (NAMES.some((name) => query[name])) {
    return html`<p class="state empty">No episode has all of these filters. <a href=${href("/episodes")}>Show all</a></p>`;
  }
  return html`<p class="state empty">No episode has begun. The Overview shows the lines that begin one.</p>`;
}

// Calls `refresh` at most once in REFRESH_MS while new episodes arrive, if the newest rows are in view.
function useLive(isNewest, key, refresh) {
  const timer = useRef(0);
  useEffect(() => {
    if (!isNewest || timer.current || (document.querySelector(".view-episodes .table")?.scrollTop ?? 0) > 40) return;
    timer.current = setTimeout(() => { timer.current = 0; refresh(); }, REFRESH_MS);
  }, [pulse.value.episode]);
  useEffect(() => () => { clearTimeout(timer.current); timer.current = 0; }, [key]);
}

export function EpisodesView({ query }) {
  const known = Object.fromEntries(Object.entries(query).filter(([name]) => NAMES.includes(name) || name === "sort"));
  const key = JSON.stringify([run.value, known]);
  const active = useRef({ key: null, index: 0 });
  if (active.current.key !== key) active.current = { key, index: left?.key === key ? left.active : 0 };
  const { state, first, loadMore, refresh } = useEpisodes(known, key, active);
  const sort = (value) => {
    left = null; // A list that one sorts begins at its first row.
    go("/episodes", { ...known, sort: value });
  };
  useLive(!known.sort, key, refresh);
  useKeys({
    w: ["Lowest reward first", () => sort("reward")],
    n: ["Newest first", () => sort("")],
  });
  const { rows, next, total, problem } = state;
  const given = OPTIONAL.filter((name) => rows?.some((row) => row[name]));
  const columns = useMemo(() => columnsOf(known, given), [key, String(given)]);
  return html`<div class="view-episodes">
    <header class="view-head"><h1>Episodes</h1>
      ${rows && html`<span class="muted" role="status">${number(rows.length)} of ${number(total)}</span>`}
    </header>
    <${Filters} query=${known} />
    ${problem && html`<${Failed} problem=${problem} retry=${rows ? loadMore : first} />`}
    ${!rows && !problem && html`<${Loading} />`}
    ${rows && !rows.length && !problem && empty(known)}
    ${rows?.length > 0 && html`<${Table} key=${state.key} label="Episodes" columns=${columns} rows=${rows}
      rowKey=${(row) => row.episode_id} onOpen=${(row) => go(`/episodes/${encodeURIComponent(row.episode_id)}`)}
      more=${Boolean(next)} onEnd=${loadMore} start=${active.current.index}
      onActive=${(index) => { active.current.index = index; }} sort=${known.sort ?? ""} onSort=${sort} />`}
  </div>`;
}
