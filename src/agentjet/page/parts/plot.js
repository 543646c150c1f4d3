// Draws curves with uPlot. The parts of `Chart` that are text or react to keys are in chart.js.
import { uPlot } from "../vendor/ui.js";
import { number } from "./format.js";

const DRAG = 6; // A pointer that moves less far between down and up is a click.
const FONT = "12px system-ui, sans-serif";
const WHOLE = [1, 2, 5].flatMap((factor) => Array.from({ length: 9 }, (_, power) => factor * 10 ** power)).sort((a, b) => a - b);

// `colour(name)` resolves a property of base.css. onCursor(index or null), onOpen(index), onZoom(true or false).
export class Plot {
  constructor(place, events) {
    Object.assign(this, { place, ...events });
  }

  // Draws curves anew. The range that the reader chose stays.
  show(x, curves, markers) {
    const range = this.chosen;
    this.remove();
    Object.assign(this, { x, curves, markers });
    if (!x.length || !this.place.clientWidth) return;
    this.drawn = new uPlot(this.options(curves, markers), [x, ...curves.flatMap(lines).map((line) => line.values)], this.place);
    this.drawn.over.addEventListener("click", () => this.drawn.cursor.idx !== null && this.onOpen(this.drawn.cursor.idx));
    if (range) this.zoom(range);
  }

  remove() {
    this.drawn?.destroy();
    this.drawn = null;
  }

  resize() {
    if (this.drawn) this.drawn.setSize({ width: this.place.clientWidth, height: this.place.clientHeight });
    else if (this.x) this.show(this.x, this.curves, this.markers);
  }

  // Shows the x values from low to high, or all of them.
  zoom(range) {
    const [min, max] = range ?? [this.x[0], this.x.at(-1)];
    this.drawn?.setScale("x", { min, max });
  }

  // Moves the cursor to an index, or hides it. A pointer over this plot has its cursor there already.
  point(index) {
    if (!this.drawn || this.drawn.cursor.idx === index) return;
    const left = index === null || index >= this.x.length ? -10 : this.drawn.valToPos(this.x[index], "x");
    this.drawn.setCursor({ left, top: 0 }, false);
  }

  // A drag chooses a range, a double click shows all.
  scaled(plot) {
    const { min, max } = plot.scales.x;
    this.chosen = min > this.x[0] || max < this.x.at(-1) ? [min, max] : null;
    this.onZoom(!!this.chosen);
  }

  options(curves, markers) {
    const [muted, line] = [this.colour("--muted"), this.colour("--line")];
    const drawn = curves.flatMap(lines);
    const axis = { stroke: muted, font: FONT, ticks: { show: false }, values: (_, splits) => splits.map(number) };
    return {
      width: this.place.clientWidth,
      height: this.place.clientHeight,
      padding: [8, 8, 0, 0],
      legend: { show: false },
      cursor: { y: false, points: { show: false }, drag: { x: true, y: false, dist: DRAG } },
      scales: { x: { time: false, range: (_, low, high) => wide(low, high, 0) }, y: { range: (_, low, high) => wide(low, high, 0.04) } },
      axes: [
        { ...axis, size: 22, gap: 2, space: 80, grid: { show: false }, ...(this.whole && { incrs: WHOLE }) },
        { ...axis, size: widest, gap: 4, space: 30, grid: { stroke: line, width: 1 } },
      ],
      series: [{}, ...drawn.map((one) => this.series(one))],
      bands: drawn.flatMap(({ part, tone }, index) =>
        part === "high" ? [{ series: [index + 1, index + 2], fill: this.tone(tone, 0.2) }] : []),
      hooks: {
        setCursor: [(plot) => this.onCursor(plot.cursor.idx)],
        setScale: [(plot, key) => key === "x" && this.scaled(plot)],
        drawAxes: [(plot) => mark(plot, markers, muted)],
      },
    };
  }

  series({ part, tone, dash, isAveraged }) {
    const style = {
      values: { stroke: this.tone(tone, isAveraged ? 0.7 : 1), width: isAveraged ? 1 : 1.5 },
      average: { stroke: this.tone(tone, 0.45), width: 5 },
    }[part] ?? { stroke: null, width: 0 };
    return { ...style, dash: dash && part === "values" ? [5, 4] : [], points: { show: false, size: 7, filter: alone, fill: style.stroke } };
  }

  tone(tone, alpha) {
    return `color-mix(in srgb, ${this.colour(`--c${tone + 1}`)} ${100 * alpha}%, transparent)`;
  }
}

// Returns the lines of a curve from the lowest layer to the highest. uPlot fills a band between two neighbours.
function lines({ values, average, low, high, tone, dash }) {
  const parts = { ...(low && { high, low }), ...(average && { average }), values };
  return Object.entries(parts).map(([part, values]) => ({ part, values, tone, dash, isAveraged: !!average }));
}

// Returns the indices of values between two gaps: a line would not be seen.
function alone(plot, series) {
  const values = plot.data[series];
  return [...values.keys()].filter((index) => values[index] !== null && (values[index - 1] ?? values[index + 1] ?? null) === null);
}

// Returns the range with a margin; a range of one value with room around it.
function wide(low, high, margin) {
  if (low === null) return [0, 1];
  const isOne = high - low <= Math.abs(high) * 1e-9; // Equal but for rounding.
  const room = isOne ? Math.abs(low) * 0.1 || 1 : (high - low) * margin;
  return [low - room, high + room];
}

// Returns the width of the longest label.
function widest(plot, labels) {
  plot.ctx.font = FONT;
  return 8 + Math.ceil(Math.max(0, ...(labels ?? []).map((label) => plot.ctx.measureText(label).width)));
}

function mark({ ctx, bbox, valToPos }, markers, colour) {
  ctx.save();
  ctx.strokeStyle = colour;
  ctx.setLineDash([2, 3]);
  ctx.beginPath();
  for (const marker of markers) {
    const left = valToPos(marker.x, "x", true);
    if (left < bbox.left || left > bbox.left + bbox.width) continue;
    ctx.moveTo(left, bbox.top);
    ctx.lineTo(left, bbox.top + bbox.height);
  }
  ctx.stroke();
  ctx.restore();
}
