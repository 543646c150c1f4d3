// A part of a view that shows the answer of a request, and its four other states: loading, empty, gone, failed.
import { html, useLayoutEffect, useRef, useSignal } from "../vendor/ui.js";
import { get } from "../api.js";
import { href } from "../route.js";
import { connection, session } from "../store.js";

// Requests `path` and returns { data, problem, loading, reload }. Data of the same `path` stays while it is requested
// anew: when `query` or `again` (any value, such as a count of `pulse`) changes. A null path requests nothing.
export function useLoad(path, query = {}, again = 0) {
  const state = useSignal({ path, data: null, problem: null, loading: true });
  const turn = useSignal(0);
  const asked = JSON.stringify(query);
  const shown = useRef(path);
  if (shown.current !== path) {
    shown.current = path;
    state.value = { path, data: null, problem: null, loading: true };
  }
  useLayoutEffect(() => { // Requests before the browser paints.
    if (path === null) return undefined;
    const stopped = new AbortController();
    state.value = { ...state.peek(), loading: true };
    get(path, JSON.parse(asked), { signal: stopped.signal }).then(
      (data) => { state.value = { path, data, problem: null, loading: false }; },
      (problem) => {
        if (problem.name !== "AbortError") state.value = { ...state.peek(), problem, loading: false };
      },
    );
    return () => stopped.abort();
  }, [path, asked, again, turn.value, session.value?.key]);
  return { ...state.value, reload: () => { turn.value += 1; } };
}

export const Loading = () => html`<p class="state loading" role="status">Loading …</p>`;

// Shown while the run is not read. The banner has the reason if the page does not show it.
export function Unread() {
  const { state, problem } = connection.value;
  if (!problem || !["refused", "stored"].includes(state)) return html`<${Loading} />`;
  const { live, run } = session.value;
  return html`<p class="state empty"><a href=${live === false ? href("/runs") : href("/", {}, run)}>${live === false ? "All runs" : `Run ${run}`}</a></p>`;
}

// Nothing is there yet: `children` say what to do next.
export const Empty = ({ children }) => html`<div class="state empty">${children}</div>`;

// It was there and is not any more: `children` say why.
export const Gone = ({ children }) => html`<div class="state gone">${children}</div>`;

export function Failed({ problem, retry }) {
  return html`<div class="state failed" role="alert">
    <p>${problem.detail ?? String(problem)}</p>
    ${retry && html`<button type="button" onClick=${retry}>Try again</button>`}
  </div>`;
}

// `load` is what `useLoad` returned. `children` is a function of the data. `empty(data)` returns what to show instead
// of nothing, or null; `gone` is shown for 404 and 410.
export function Panel({ title, load, empty = () => null, gone, actions, children, level = 2 }) {
  return html`<section class="panel" aria-busy=${load.loading}>
    ${title && html`<header><${`h${level}`}>${title}<//>${actions}</header>`}
    ${content(load, empty, gone, children)}
  </section>`;
}

function content({ data, problem, reload }, empty, gone, children) {
  if (problem && [404, 410].includes(problem.status) && gone) return html`<${Gone}>${gone}<//>`;
  if (problem && !data) return html`<${Failed} problem=${problem} retry=${reload} />`;
  if (!data) return html`<${Loading} />`;
  const nothing = empty(data);
  if (nothing) return html`<${Empty}>${nothing}<//>`;
  return html`${problem && html`<${Failed} problem=${problem} retry=${reload} />`}${children(data)}`;
}
