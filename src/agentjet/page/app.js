// The frame of the page: session, header, navigation, the present view, shortcuts.
import { html, render, useEffect, useErrorBoundary, useRef, useSignal } from "./vendor/ui.js";
import { href, go, route } from "./route.js";
import { connection, session, signedOut, status } from "./store.js";
import { open, signOut } from "./api.js";
import { start, togglePause } from "./stream.js";
import { keysOn, setKeys, shortcuts, useKeys } from "./keys.js";
import { Dialog } from "./parts/dialog.js";
import { Failed, Loading } from "./parts/panel.js";
import { Fact, Text } from "./parts/format.js";
import { SignInView } from "./views/sign_in.js";
import { OverviewView } from "./views/overview.js";

const TABS = [
  ["overview", "/", "Overview", "o"],
  ["episodes", "/episodes", "Episodes", "e"],
  ["batches", "/batches", "Batches", "b"],
  ["swarm", "/swarm", "Swarm", "s"],
];
// Of `agentjet look` only: they need files, or several runs.
const STORED_TABS = [
  ["studies", "/studies", "Studies", "t"],
  ["compare", "/compare", "Compare", "c"],
  ["runs", "/runs", "Runs", "r"],
];
const THEME = "agentjet.theme";
const THEMES = ["auto", "light", "dark"];
const loaded = { overview: OverviewView };
const attempts = {}; // By view, the imports so far.

const tabs = () => (session.value?.live === false ? [...TABS, ...STORED_TABS] : TABS);

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  localStorage.setItem(THEME, theme);
}

function Connection() {
  const { state, seconds, problem } = connection.value;
  const text = {
    connecting: "Connecting …",
    live: "● Live",
    paused: "‖ Paused",
    stored: "Stored run",
    reconnecting: `↻ Reconnecting every ${seconds} s`,
    refused: "✕ Not shown",
  }[state];
  const label = state === "paused" ? "Resume live updates" : "Pause live updates";
  return html`<span class=${`connection ${state}`} role="status" title=${problem ?? ""}>${text}</span>
    ${state !== "stored" && html`<button type="button" class="icon" aria-label=${label} title=${`${label} (.)`}
      onClick=${togglePause}>${state === "paused" ? "▶" : "‖"}</button>`}`;
}

function Header({ onHelp }) {
  const theme = useSignal(document.documentElement.dataset.theme);
  const next = THEMES[(THEMES.indexOf(theme.value) + 1) % THEMES.length];
  const change = () => {
    setTheme(next);
    theme.value = next;
  };
  const now = status.value;
  return html`<header class="top">
    <a class="brand" href=${href("/")}>AgentJet</a>
    ${now && html`<span class="model"><${Text} value=${now.model} limit=${80} /></span>
      ${now.run !== "default" && html`<span class="run">run <${Text} value=${now.run} /></span>`}
      <span class="engine">${now.state}</span>
      <span>version <${Fact} path="/status#policy_version" value=${now.policy_version} />
      ${now.ends_at_version > 0 && html` of <${Fact} path="/status#ends_at_version" value=${now.ends_at_version} />`}</span>`}
    <span class="spring"></span>
    <${Connection} />
    <button type="button" class="icon" aria-label=${`Colours: ${theme.value}. Change to ${next}`} onClick=${change}>◐</button>
    <button type="button" class="icon" aria-label="Keyboard shortcuts" onClick=${onHelp}>?</button>
    <button type="button" onClick=${signOut}>Sign out</button>
  </header>`;
}

// Says why the view is not up to date.
function Banner() {
  const { state, problem } = connection.value;
  if (!problem || state === "live") return null;
  return html`<p class="banner" role="alert">${["refused", "stored"].includes(state) && html`Run <${Text} value=${route.value.run} limit=${80} />: `}
    ${problem}${status.value && " The numbers below are older."}</p>`;
}

function Navigation() {
  const present = route.value.tab;
  return html`<nav aria-label="Views">${tabs().map(([tab, path, name]) => html`
    <a key=${tab} href=${href(path)} aria-current=${tab === present ? "page" : null}>${name}</a>`)}</nav>`;
}

function Help({ onClose }) {
  return html`<${Dialog} title="Keyboard shortcuts" onClose=${onClose}>
    <dl class="keys">${shortcuts().map(([keys, what]) => html`<div><dt><kbd>${keys}</kbd></dt><dd>${what}</dd></div>`)}</dl>
    <label><input type="checkbox" checked=${keysOn.value} onChange=${(event) => setKeys(event.target.checked)} />
      Shortcuts of a single key</label>
  <//>`;
}

// Imports a view at its first use. A browser may remember that an address failed, so each try has another one.
async function importView(name) {
  if (!name || loaded[name]) return;
  const attempt = (attempts[name] = (attempts[name] ?? 0) + 1);
  const module = await import(`./views/${name}.js${attempt > 1 ? `?attempt=${attempt}` : ""}`);
  loaded[name] = module[`${name[0].toUpperCase()}${name.slice(1)}View`];
}

function View() {
  const { name, params, query, path, run } = route.value;
  const failed = useSignal({}); // Of the last import: { name, detail }.
  const [broken, reset] = useErrorBoundary((error) => console.error(error));
  const isLive = connection.value.state === "live";
  const load = () => {
    failed.value = {};
    importView(name).then(
      () => { failed.value = {}; }, // Draws the view.
      ({ message }) => { failed.value = { name, detail: `The view was not loaded: ${message}. If this stays, reload the page.` }; },
    );
  };
  useEffect(() => {
    reset();
    if (name && !loaded[name]) load();
  }, [name, path, isLive]); // A server that is back gives the view.
  if (!name) return html`<${Failed} problem=${{ detail: "This page has no such view. Use the navigation above." }} />`;
  if (broken) return html`<${Failed} problem=${{ detail: `The view failed: ${broken.message}` }} retry=${reset} />`;
  if (!tabs().some(([tab]) => tab === route.value.tab)) {
    return html`<p class="state empty">This view compares stored runs: <code>agentjet look DATA_DIR</code> shows it.</p>`;
  }
  const Shown = loaded[name];
  if (Shown) return html`<${Shown} key=${run} params=${params} query=${query} />`;
  return failed.value.name === name ? html`<${Failed} problem=${failed.value} retry=${load} />` : html`<${Loading} />`;
}

function App() {
  const help = useSignal(false);
  const main = useRef(null);
  const { hash: shown, path, name } = route.value;
  const first = useRef(true);
  useKeys({
    ...Object.fromEntries(tabs().map(([, to, title, key]) => [`g ${key}`, [title, () => go(to)]])),
    ".": ["pause or resume live updates", togglePause],
    y: ["copy the link of this view", () => navigator.clipboard?.writeText(location.href)],
    "?": ["show this list", () => { help.value = true; }],
  }, { last: true });
  useEffect(() => {
    document.title = `${name ? name[0].toUpperCase() + name.slice(1) : "Not found"} · AgentJet`;
    if (!first.current) main.current?.focus({ preventScroll: true }); // A screen reader goes on in the new view.
    first.current = false;
  }, [path]);
  if (!session.value) return html`<main><${SignInView} reason=${signedOut.value} /></main>`;
  return html`
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); main.current.focus(); }}>Skip to the view</a>
    <${Header} onHelp=${() => { help.value = true; }} />
    <${Navigation} />
    <${Banner} />
    <main id="main" tabindex="-1" ref=${main} data-hash=${shown}><${View} /></main>
    ${help.value && html`<${Help} onClose=${() => { help.value = false; }} />`}`;
}

setTheme(localStorage.getItem(THEME) ?? "auto");
const imported = importView(route.peek().name).catch(() => {}); // The view reports it.
await open();
start();
await imported;
render(html`<${App} />`, document.getElementById("page"));
