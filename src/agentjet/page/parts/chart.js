// A line chart: a figure with a sentence, a legend with the values at the cursor, and the same values as a table.

import { html, signal, useEffect, useLayoutEffect, useMemo, useRef, useSignal, useSignalEffect, useState } from "../vendor/ui.js";
import { newest, sentence, smoothed } from "./curve.js";
import { Fact, number, Text, visible } from "./format.js";
import { Plot } from "./plot.js";

const TONES = 6;
const TABLE_ROWS = 200;
const NO_MARKERS = [];
const KEYS = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1, PageDown: -10, PageUp: 10, Home: -1e9, End: 1e9 };

// As colours, the properties of base.css are read as the canvas needs them: without var() and light-dark().
for (const name of ["--muted", "--line", ...Array.from({ length: TONES }, (_, tone) => `--c${tone + 1}`)]) {
  CSS.registerProperty({ name, syntax: "<color>", inherits: true, initialValue: "gray" });
}

// Changes whenever the colours of the page may have changed.
const theme = signal(0);
const repaint = () => theme.value++;
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
new MutationObserver(repaint).observe(document.documentElement, { attributes: true });

// The index under the cursor, of each group of charts.
const cursors = new Map();

// Draws curves over common x values.
//
// series: [{name, values, tone, dash, low, high, fact, before}]; null is a gap. `low` and `high` are a band around the
// values, `fact` is the path of the values in the API: see `Fact`; it lacks the first `before` values. markers: [{x, name}]. smooth: weight of a moving average that
// is drawn below each curve. whole: x values are whole numbers. group: charts of one group share the cursor. onOpen(index):
// a click or Enter at an x value. eager: draw at once, also out of view.
export function Chart({
  title, x, xName = "step", series, markers = NO_MARKERS, smooth = 0, whole = true, group, tall = false, eager = false, onOpen,
}) {
  const box = useRef(null);
  const plot = useRef(null);
  const own = useSignal(null);
  const zoomed = useSignal(false);
  if (group && !cursors.has(group)) cursors.set(group, signal(null));
  const at = group ? cursors.get(group) : own;
  const inView = useInView(box, eager);
  const curves = useMemo(() => series.map((one) => withAverage(one, smooth)), [series, smooth]);
  const open = useRef(onOpen);
  open.current = onOpen;

  useLayoutEffect(() => { // The first frame has the curves.
    if (!inView) return undefined;
    plot.current = new Plot(box.current, {
      whole, colour, onCursor: (index) => { at.value = index; }, onOpen: (index) => open.current?.(index),
      onZoom: (on) => { zoomed.value = on; },
    });
    const resized = new ResizeObserver(() => plot.current.resize());
    resized.observe(box.current);
    return () => {
      resized.disconnect();
      plot.current.remove();
    };
  }, [inView]);
  useLayoutEffect(() => plot.current?.show(x, curves, markers), [inView, x, curves, markers, theme.value]);
  useSignalEffect(() => {
    const index = at.value;
    plot.current?.point(index);
  });

  const empty = !curves.some((one) => newest(one.values) >= 0);
  return html`<figure class="chart">
    <figcaption>
      <h3><${Text} value=${title} /></h3>
      <p class="visually-hidden">${curves.map((one) => html`<${Text} value=${sentence(one.name, one.values)} /> `)}</p>
    </figcaption>
    ${empty && html`<p class="muted">No value yet.</p>`}
    <${Slider} box=${box} at=${at} onOpen=${onOpen} title=${title} x=${x} xName=${xName} curves=${curves} empty=${empty} tall=${tall} />
    ${!empty && html`<${Legend} at=${at} x=${x} xName=${xName} curves=${curves} named=${curves.length > 1 || curves[0].name !== title} />`}
    ${zoomed.value && html`<button type="button" onClick=${() => plot.current.zoom(null)}>Show all</button>`}
    ${!empty && html`<${Table} title=${title} x=${x} xName=${xName} curves=${curves} />`}
  </figure>`;
}

// The names of markers, for one place beside the charts that draw them.
export function Markers({ markers, xName = "step" }) {
  if (!markers.length) return null;
  return html`<ul class="chart-legend muted">${markers.map((one) => html`<li key=${one.name}>
    ┆ ${xName} ${number(one.x)}: <${Text} value=${one.name} limit=${80} />
  </li>`)}</ul>`;
}

function pathOf({ fact, before = 0 }, index) {
  return fact && index >= before ? `${fact}[${index - before}]` : null;
}

function Value({ path, value }) {
  return path ? html`<${Fact} path=${path} value=${value} />` : number(value);
}

// A line in the style of a curve, for legends.
export function Swatch({ tone = 0, dash = false }) {
  return html`<svg class=${`tone-${(tone % TONES) + 1}`} viewBox="0 0 20 8" width="20" height="8" aria-hidden="true">
    <line x1="0" y1="4" x2="20" y2="4" stroke="currentColor" stroke-width="2.5" stroke-dasharray=${dash ? "4 3" : null} />
  </svg>`;
}

// The place of the drawing: a slider over the x values for keyboards and screen readers.
function Slider({ box, at, onOpen, title, x, xName, curves, empty, tall }) {
  const last = x.length - 1;
  const index = Math.min(at.value ?? last, last);
  const onKey = (event) => {
    if (event.key === "Enter" && onOpen && last >= 0) onOpen(index);
    if (!(event.key in KEYS) || event.altKey || event.ctrlKey || event.metaKey || last < 0) return;
    event.preventDefault();
    at.value = Math.max(0, Math.min(last, index + KEYS[event.key]));
  };
  return html`<div
    class=${`chart-plot ${tall ? "tall" : ""}`} ref=${box} hidden=${empty} role="slider" tabindex="0" onKeyDown=${onKey}
    aria-label=${`${visible(title)}, by ${xName}`} aria-valuemin=${x[0] ?? 0} aria-valuemax=${x[last] ?? 0}
    aria-valuenow=${x[index] ?? 0} aria-valuetext=${spoken(xName, x, curves, index)}
  ></div>`;
}

function Legend({ at, x, xName, curves, named }) {
  const index = at.value;
  const place = index === null || index >= x.length ? null : index;
  return html`<ul class="chart-legend">
    ${curves.map((one) => {
      const shownAt = place ?? newest(one.values);
      const fact = place === null ? pathOf(one, shownAt) : null;
      return html`<li>
        <${Swatch} tone=${one.tone} dash=${one.dash} /> ${named && html`<${Text} value=${one.name} /> `}
        <b><${Value} path=${fact} value=${one.values[shownAt]} /></b>
        ${one.average && html`<span class="muted"> smooth ${number(one.average[shownAt])}</span>`}
        ${one.low && html`<span class="muted"> ${number(one.low[shownAt])} to ${number(one.high[shownAt])}</span>`}
      </li>`;
    })}
    <li class="muted">${place === null ? "newest" : `${xName} ${number(x[place])}`}</li>
  </ul>`;
}

function Table({ title, x, xName, curves }) {
  const [open, setOpen] = useState(false);
  const first = Math.max(0, x.length - TABLE_ROWS);
  const rows = open ? x.slice(first).map((_, index) => first + index).reverse() : [];
  return html`<details class="chart-table" onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary>as table<span class="visually-hidden">: <${Text} value=${title} /></span></summary>
    ${open && html`<div class="wide" tabindex="0" role="region" aria-label=${`Values of ${visible(title)}`}>
      <table>
        <thead><tr><th scope="col">${xName}</th>${curves.map((one) => html`<th scope="col"><${Text} value=${one.name} /></th>`)}</tr></thead>
        <tbody>
          ${rows.map((row) => html`<tr>
            <th scope="row">${number(x[row])}</th>
            ${curves.map((one) => html`<td><${Value} path=${pathOf(one, row)} value=${one.values[row]} /></td>`)}
          </tr>`)}
        </tbody>
      </table>
      ${first > 0 && html`<p class="muted">The newest ${TABLE_ROWS} of ${number(x.length)}.</p>`}
    </div>`}
  </details>`;
}

function withAverage(one, weight) {
  return { dash: false, ...one, tone: (one.tone ?? 0) % TONES, average: weight > 0 ? smoothed(one.values, weight) : null };
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function spoken(xName, x, curves, index) {
  if (!x.length) return "";
  return `${xName} ${number(x[index])}: ${curves.map((one) => `${visible(one.name)} ${number(one.values[index])}`).join(", ")}`;
}

// True once the element was near the visible part of the page, or from the beginning.
function useInView(box, eager) {
  const [seen, setSeen] = useState(eager);
  useEffect(() => {
    if (eager) return undefined;
    const watch = new IntersectionObserver(
      (entries) => entries.some((entry) => entry.isIntersecting) && setSeen(true),
      { rootMargin: "300px" },
    );
    watch.observe(box.current);
    return () => watch.disconnect();
  }, []);
  return seen;
}
