// Hash routes. `#/episodes?status=aborted` shows the default run, `#/runs/NAME/episodes` another run.
import { computed, signal } from "./vendor/ui.js";

export const DEFAULT_RUN = "default";

// Path pattern, name of the view, tab of the navigation. The view NAME is `NameView` of `views/NAME.js`.
const ROUTES = [
  ["/", "overview", "overview"],
  ["/episodes", "episodes", "episodes"],
  ["/episodes/:id", "episode", "episodes"],
  ["/groups/:id", "group", "episodes"],
  ["/batches", "batches", "batches"],
  ["/batches/:id", "batch", "batches"],
  ["/swarm", "swarm", "swarm"],
  ["/studies", "studies", "studies"],
  ["/studies/:id", "studies", "studies"],
  ["/compare", "compare", "compare"],
  ["/runs", "runs", "runs"],
];

const hash = signal(location.hash);
addEventListener("hashchange", () => {
  hash.value = location.hash;
});

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function matched(pattern, path) {
  const wanted = pattern.split("/");
  const given = path.split("/");
  if (wanted.length !== given.length) return null;
  const params = {};
  for (const [i, part] of wanted.entries()) {
    if (part.startsWith(":")) params[part.slice(1)] = decoded(given[i]);
    else if (part !== given[i]) return null;
  }
  return params;
}

export function parse(text) {
  const [before, after = ""] = text.replace(/^#/, "").split(/\?(.*)/s);
  const [, named, rest] = before.match(/^\/runs\/([^/]+)(\/.*)?$/) ?? [null, null, before];
  const path = (rest || "/").replace(/(.)\/$/, "$1") || "/";
  const query = Object.fromEntries(new URLSearchParams(after));
  const run = named ? decoded(named) : DEFAULT_RUN;
  for (const [pattern, name, tab] of ROUTES) {
    const params = matched(pattern, path);
    if (params) return { hash: text, run, path, name, tab, params, query };
  }
  return { hash: text, run, path, name: "", tab: "", params: {}, query };
}

// The present route: { hash, run, path, name, tab, params, query }. All values of `params` and `query` are strings.
export const route = computed(() => parse(hash.value));

// Returns the link to a path, in the present run unless `run` names another. Empty values of `query` are left out.
export function href(path, query = {}, run = route.peek().run) {
  const kept = Object.entries(query).filter(([, value]) => value !== "" && value != null);
  const text = new URLSearchParams(kept).toString();
  const prefix = run === DEFAULT_RUN ? "" : `/runs/${encodeURIComponent(run)}`;
  return `#${prefix}${path}${text ? `?${text}` : ""}`;
}

// Goes to a path; `replace` keeps the present entry of the history, for filters that change while one types.
export function go(path, query = {}, { replace = false, run } = {}) {
  const target = href(path, query, run);
  if (replace) {
    history.replaceState(null, "", target);
    hash.value = location.hash;
  } else {
    location.hash = target;
  }
}
