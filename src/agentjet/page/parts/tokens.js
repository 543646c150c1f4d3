// The tokens of a call as one text. CSS highlights colour it, so an overlay changes no element and no layout.
import { html, useEffect, useLayoutEffect, useMemo, useRef } from "../vendor/ui.js";
import { Fact, number } from "./format.js";
import { tokenAt, tokenText, tonedRuns } from "./call.js";
import { OVERLAYS, untrainedToken } from "./overlays.js";

// False in browsers before Chrome 105, Safari 17.2 and Firefox 140: they show the text without overlays.
export const canPaint = typeof Highlight === "function" && CSS.highlights !== undefined;

const HERE = "token-here";

// The highlight of a tone. All elements share it, because a style sheet names it.
function highlightOf(tone) {
  if (!CSS.highlights.has(tone)) {
    const made = new Highlight();
    made.priority = tone === HERE ? 1 : 0;
    CSS.highlights.set(tone, made);
  }
  return CSS.highlights.get(tone);
}

// Number of tokens in a chunk. A chunk is one text node, and only chunks near the window are coloured.
const CHUNK = 400;
const NEAR = { rootMargin: "600px 0px" };

function chunksOf(call) {
  const starts = [];
  for (let i = 0; i < call.count; i += CHUNK) starts.push(i);
  return starts.map((first) => call.shown.slice(call.at[first], call.at[Math.min(call.count, first + CHUNK)]));
}

// Returns the text node of token `i` and the offsets of the token in it.
function placeOf(box, call, i, stop = i + 1) {
  const chunk = Math.floor(i / CHUNK);
  const before = call.at[chunk * CHUNK];
  return { node: box.children[chunk].firstChild, start: call.at[i] - before, end: call.at[stop] - before };
}

// Colours runs of tokens, each in one chunk. Returns a function that removes the colours.
function paint(box, call, runs) {
  const made = [];
  for (const [first, stop, tone] of runs) {
    const { node, start, end } = placeOf(box, call, first, stop);
    if (!node) continue;
    const highlight = highlightOf(tone);
    const range = new StaticRange({ startContainer: node, startOffset: start, endContainer: node, endOffset: end });
    highlight.add(range);
    made.push([highlight, range]);
  }
  return () => made.forEach(([highlight, range]) => highlight.delete(range));
}

// Colours the chunks near the window, and others when they come near. `near`: a set of chunks, kept between overlays.
function paintNear(box, call, toneOf, near) {
  const erasers = new Map();
  const colour = (chunk) => {
    const first = chunk * CHUNK;
    erasers.set(chunk, paint(box, call, tonedRuns(toneOf, first, Math.min(call.count, first + CHUNK))));
  };
  near.forEach(colour);
  const numbers = new Map([...box.children].map((element, i) => [element, i]));
  const observer = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      const chunk = numbers.get(target);
      if (isIntersecting === near.has(chunk)) continue;
      if (isIntersecting) {
        near.add(chunk);
        colour(chunk);
      } else {
        near.delete(chunk);
        erasers.get(chunk)();
        erasers.delete(chunk);
      }
    }
  }, NEAR);
  for (const element of box.children) observer.observe(element);
  return () => {
    observer.disconnect();
    erasers.forEach((erase) => erase());
  };
}

function rangeOf(box, call, index) {
  const { node, start, end } = placeOf(box, call, index);
  const range = document.createRange();
  if (!node) return range;
  range.setStart(node, start);
  range.setEnd(node, Math.max(end, Math.min(start + 1, node.length)));
  return range;
}

// Scrolls the page so that a token is visible.
function reveal(box, call, index) {
  const seen = rangeOf(box, call, index).getBoundingClientRect();
  if (seen.top < 120 || seen.bottom > innerHeight - 80) scrollBy({ top: seen.top - innerHeight / 3 });
}

// Returns the token at a point of the window, or null.
function tokenUnder(x, y, box, call) {
  const caret = document.caretPositionFromPoint?.(x, y) ?? document.caretRangeFromPoint?.(x, y);
  const node = caret?.offsetNode ?? caret?.startContainer;
  const chunk = [...box.children].indexOf(node?.parentElement);
  return chunk < 0 ? null : tokenAt(call, call.at[chunk * CHUNK] + (caret.offset ?? caret.startOffset));
}

// Returns the token in the line above (-1) or below (1) token `index`, or null.
function tokenBeside(box, call, index, direction) {
  const seen = rangeOf(box, call, index).getClientRects()[0];
  return seen ? tokenUnder(seen.left + 1, seen.top + seen.height * (0.5 + 1.2 * direction), box, call) : null;
}

const MOVES = { ArrowRight: 1, ArrowLeft: -1, PageDown: 50, PageUp: -50, Home: -Infinity, End: Infinity };

// Returns the token that a key moves to, or null for other keys.
function moved(event, box, call, here) {
  if (event.ctrlKey || event.metaKey || event.altKey) return null;
  const index = here ?? call.num_context;
  if (event.key === "ArrowDown" || event.key === "ArrowUp") {
    return tokenBeside(box, call, Math.min(index, call.count - 1), event.key === "ArrowDown" ? 1 : -1) ?? index;
  }
  if (!(event.key in MOVES)) return null;
  return Math.max(0, Math.min(call.count - 1, index + MOVES[event.key]));
}

// `here`: the chosen token of this call, or null. `onPick(index)` is called when a click or an arrow key chooses one.
export function Tokens({ call, overlay, facts, here = null, onPick, label }) {
  const box = useRef(null);
  const near = useRef(null);
  if (near.current?.call !== call) near.current = { call, chunks: new Set() };
  const chunks = useMemo(() => chunksOf(call).map((text, i) => html`<span key=${i}>${text}</span>`), [call]);

  useLayoutEffect(() => (
    canPaint ? paintNear(box.current, call, (i) => overlay.tone(call, i, facts), near.current.chunks) : undefined
  ), [call, overlay, facts]);

  useLayoutEffect(() => (
    canPaint && here !== null ? paint(box.current, call, [[here, here + 1, HERE]]) : undefined
  ), [call, here]);

  useEffect(() => {
    if (here === null) return;
    if (document.activeElement !== box.current) box.current.focus({ preventScroll: true });
    reveal(box.current, call, here);
  }, [call, here]);

  const onKeyDown = (event) => {
    const next = call.count ? moved(event, box.current, call, here) : null;
    if (next === null) return;
    event.preventDefault();
    onPick(next);
  };
  const onClick = (event) => {
    const found = tokenUnder(event.clientX, event.clientY, box.current, call);
    if (found !== null && String(getSelection()) === "") onPick(found);
  };
  return html`<div class="tokens" ref=${box} tabindex="0" role="group" aria-label=${label}
    aria-describedby="token-panel" onKeyDown=${onKeyDown} onClick=${onClick}>${chunks}</div>`;
}

function probability(logprob) {
  const p = Math.exp(logprob);
  return p >= 0.001 ? p.toFixed(3) : p.toExponential(1);
}

function allowedWords(call, index) {
  const allowed = call.allowed[index];
  return allowed === null ? "the whole vocabulary" : allowed === 1 ? "this token only" : `${allowed} tokens`;
}

// All that is known about one token. `fact(index)`: the place of its log-probability in the API, if it has one.
export function TokenPanel({ call, index, facts, fact, title }) {
  const rows = [
    ["Text", html`<code class="token-text">${tokenText(call, index) || "(a part of the character before)"}</code>`],
    ["Place", `${title}, token ${index + 1} of ${call.count}`],
  ];
  if (call.sampled[index]) {
    const logprob = call.logprobs[index];
    if (logprob !== null) {
      rows.push(["Probability", probability(logprob)]);
      rows.push(["Log-probability", fact ? html`<${Fact} path=${fact(index)} value=${logprob} />` : number(logprob)]);
    }
    rows.push(["Policy version", call.versions[index]], ["Possible", allowedWords(call, index)]);
  }
  const why = untrainedToken(call, index, facts);
  rows.push(["Trained", why ? `no: ${why[1]}` : "yes"]);
  return html`<dl class="facts" data-token=${index}>${rows.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

// Buttons that choose an overlay, and the legend of the present one. `names`: the overlays to offer, all by default.
export function OverlayBar({ present, onChoose, facts, names }) {
  const offered = OVERLAYS.filter(({ name }) => !names || names.includes(name));
  return html`<div class="overlay-bar" role="group" aria-label="Overlay">
      ${offered.map((one) => html`<button type="button" key=${one.key} aria-pressed=${one === present}
        aria-keyshortcuts=${one.key} onClick=${() => onChoose(one.name)}><kbd>${one.key}</kbd> ${one.title}</button>`)}
    </div>
    ${!canPaint && html`<p class="warn">This browser cannot colour tokens. Chrome 105, Safari 17.2 and Firefox 140 can.</p>`}
    <ul class="legend" aria-label=${`Legend: ${present.title}`}>${present.legend(facts).map(([tone, words]) => html`
      <li key=${words}>${tone && html`<span class=${`swatch ${tone}`} aria-hidden="true">ab</span>`} ${words}</li>`)}</ul>`;
}
