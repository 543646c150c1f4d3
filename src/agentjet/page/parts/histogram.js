// A histogram whose bins are links to what they count.

import { html } from "../vendor/ui.js";
import { extent } from "./curve.js";
import { number, visible } from "./format.js";

const MAX_BINS = 12;

// Returns common bins for values: one for each value if these are few, else of equal width. A bin is [low, high]; it
// holds the values from its low to below the next bin's low.
export function binsOf(values) {
  const distinct = [...new Set(values)].sort((a, b) => a - b);
  if (distinct.length <= MAX_BINS) return distinct.map((value) => [value, value]);
  const [low, high] = extent(values);
  const width = roundUp((high - low) / MAX_BINS);
  const first = Math.floor(low / width);
  const count = Math.floor(high / width) - first + 1;
  return Array.from({ length: count }, (_, index) => [tidy((first + index) * width), tidy((first + index + 1) * width)]);
}

// Returns for each bin its values' number, least and greatest value: the exact bounds of a filter that finds them.
export function counted(bins, values) {
  const found = bins.map(() => ({ count: 0, low: Infinity, high: -Infinity }));
  for (const value of values) {
    let index = bins.findLastIndex(([low]) => low <= value);
    if (index < 0) index = 0;
    const bin = found[index];
    bin.count += 1;
    bin.low = Math.min(bin.low, value);
    bin.high = Math.max(bin.high, value);
  }
  return found;
}

// Draws `values` in `bins`. `href(low, high)` is the page of the values from low to high, both included.
export function Histogram({ label, values, bins = binsOf(values), href, noun = "episodes" }) {
  const found = counted(bins, values);
  const most = Math.max(1, ...found.map((bin) => bin.count));
  return html`<ul class="histogram" aria-label=${visible(label)}>
    ${bins.map((bounds, index) => {
      const { count, low, high } = found[index];
      const bar = html`<span class="histogram-count">${count || ""}</span>
        <svg viewBox="0 0 10 100" preserveAspectRatio="none" aria-hidden="true">
          <rect x="0" y=${100 - (100 * count) / most} width="10" height=${(100 * count) / most} />
          <rect x="0" y="99" width="10" height="1" />
        </svg>
        <span class="histogram-bin">${number(bounds[0])}</span>`;
      const words = `${count} ${noun}, reward ${named(bounds)}`;
      return html`<li>
        ${count ? html`<a href=${href(low, high)} aria-label=${words} title=${words}>${bar}</a>` : html`<span title=${words}>${bar}</span>`}
      </li>`;
    })}
  </ul>`;
}

function named([low, high]) {
  return low === high ? number(low) : `${number(low)} to ${number(high)}`;
}

// Returns the least of 1, 2 or 5 times a power of ten that is at least `width`.
function roundUp(width) {
  const power = 10 ** Math.floor(Math.log10(width));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= width * (1 - 1e-9));
}

function tidy(value) {
  return Number(value.toPrecision(12));
}
