// Draws curves on a canvas. The parts of `Chart` that are text or react to keys are in chart.js.
import { extent, roundUp, tidy } from "./curve.js";
import { number } from "./format.js";

const BELOW = 20;   // Height of the labels of x, in pixels.
const MARGIN = 8;
const DOT = 3.5;    // Radius of a value without neighbours.
const DRAG = 6;     // A pointer that moves less far between down and up is a click.

// Returns about `most` round numbers from low to high.
export function ticks(low, high, most, whole = false) {
  const span = high - low;
  if (!(span > 0 && Number.isFinite(span))) return [];
  const step = Math.max(roundUp(span / most), whole ? 1 : 0);
  const first = Math.ceil(low / step - 1e-9);
  const count = Math.floor(high / step + 1e-9) - first + 1;
  return Array.from({ length: count }, (_, index) => tidy((first + index) * step));
}

// The labels of y: at least two, or a curve has no scale.
function ladder(low, high, most) {
  const found = ticks(low, high, most);
  return found.length < 2 && most < 40 && high > low ? ladder(low, high, most * 1.5) : found;
}

// `colour(name)` resolves a property of base.css. onCursor(index or null), onOpen(index), onZoom(true or false).
export class Plot {
  constructor(place, { whole, colour, onCursor, onOpen, onZoom }) {
    Object.assign(this, { place, whole, colour, onCursor, onOpen, onZoom, x: [], curves: [], markers: [], chosen: null });
    [this.canvas, this.line, this.selection] = ["canvas", "i", "i"].map((name) => place.appendChild(document.createElement(name)));
    this.selection.hidden = this.line.hidden = true;
    this.selection.className = "selection";
    for (const kind of ["down", "move", "up", "leave"]) place.addEventListener(`pointer${kind}`, (event) => this[kind](event));
  }

  show(x, curves, markers) {
    Object.assign(this, { x, curves, markers });
    this.draw();
  }

  // Shows the x values from low to high, or all of them.
  zoom(range) {
    this.chosen = range;
    this.onZoom(!!range);
    this.draw();
  }

  // Moves the cursor to an index, or hides it.
  point(index) {
    const left = index === null || index >= this.x.length || !this.toX ? NaN : this.toX(this.x[index]);
    this.line.hidden = !(left >= this.left && left <= this.right);
    if (!this.line.hidden) Object.assign(this.line.style, { left: `${left}px`, height: `${this.bottom}px` });
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.place;
    if (!width || !height || !this.x.length) return;
    const context = this.canvas.getContext("2d");
    Object.assign(this.canvas, { width: width * devicePixelRatio, height: height * devicePixelRatio });
    context.scale(devicePixelRatio, devicePixelRatio);
    context.font = "12px system-ui, sans-serif";
    const [start, end] = wide(this.chosen ?? [this.x[0], this.x.at(-1)], 0);
    const inside = (value, index) => (this.x[index] >= start && this.x[index] <= end ? value : null);
    const drawn = this.curves.flatMap((one) => [one.values, one.average, one.low, one.high]).filter(Boolean);
    const [low, high] = wide(extent(drawn.map((values) => extent(values.map(inside)) ?? []).flat()) ?? [0, 0], 0.04);
    const marks = ladder(low, high, height / 40);
    this.left = MARGIN + Math.max(0, ...marks.map((mark) => context.measureText(number(mark)).width));
    Object.assign(this, { right: width - MARGIN, bottom: height - BELOW });
    this.toX = (value) => this.left + ((value - start) / (end - start)) * (this.right - this.left);
    const toY = (value) => this.bottom - ((value - low) / (high - low)) * (this.bottom - MARGIN);
    this.frame(context, marks, toY, ticks(start, end, width / 80, this.whole));
    context.rect(this.left, 0, this.right - this.left, this.bottom);
    context.clip();
    for (const one of this.curves) this.curve(context, one, toY);
  }

  frame(context, marks, toY, steps) {
    Object.assign(context, { fillStyle: this.colour("--muted"), strokeStyle: this.colour("--line"), textBaseline: "middle" });
    context.beginPath();
    context.textAlign = "right";
    for (const mark of marks) {
      context.fillText(number(mark), this.left - 4, toY(mark));
      context.moveTo(this.left, toY(mark));
      context.lineTo(this.right, toY(mark));
    }
    context.textAlign = "center";
    for (const step of steps) {
      const half = context.measureText(number(step)).width / 2;
      context.fillText(number(step), Math.min(this.toX(step), this.right + MARGIN - half), this.bottom + BELOW / 2);
    }
    context.stroke();
    context.strokeStyle = this.colour("--muted");
    context.setLineDash([2, 3]);
    context.beginPath();
    for (const marker of this.markers) {
      const left = this.toX(marker.x);
      if (left < this.left || left > this.right) continue;
      context.moveTo(left, 0);
      context.lineTo(left, this.bottom);
    }
    context.stroke();
    context.setLineDash([]);
  }

  curve(context, { values, average, low, high, tone, dash }, toY) {
    context.strokeStyle = context.fillStyle = this.colour(`--c${tone + 1}`);
    const stroke = (of, lineWidth, globalAlpha) => {
      Object.assign(context, { lineWidth, globalAlpha });
      context.beginPath();
      this.path(context, of, toY);
      context.stroke();
    };
    if (low) {
      context.globalAlpha = 0.2;
      for (const [from, to] of parts(low)) {
        context.beginPath();
        for (let index = from; index < to; index += 1) context.lineTo(this.toX(this.x[index]), toY(low[index]));
        for (let index = to - 1; index >= from; index -= 1) context.lineTo(this.toX(this.x[index]), toY(high[index]));
        context.fill();
      }
    }
    if (average) stroke(average, 5, 0.45);
    context.setLineDash(dash ? [5, 4] : []);
    stroke(values, average ? 1 : 1.5, average ? 0.7 : 1);
    context.setLineDash([]);
    context.globalAlpha = 1;
    for (const [from, to] of parts(values)) {
      if (to - from === 1) this.dot(context, this.toX(this.x[from]), toY(values[from]));
    }
  }

  path(context, values, toY) {
    for (const [from, to] of parts(values)) {
      context.moveTo(this.toX(this.x[from]), toY(values[from]));
      for (let index = from; index < to; index += 1) context.lineTo(this.toX(this.x[index]), toY(values[index]));
    }
  }

  // A value between two gaps: a line would not be seen.
  dot(context, left, top) {
    context.beginPath();
    context.arc(left, top, DOT, 0, 2 * Math.PI);
    context.fill();
  }

  // ---- the pointer

  at(event) {
    return Math.max(this.left, Math.min(this.right, event.clientX - this.place.getBoundingClientRect().left));
  }

  nearest(left) {
    let best = 0;
    for (const [index, value] of this.x.entries()) {
      if (Math.abs(this.toX(value) - left) < Math.abs(this.toX(this.x[best]) - left)) best = index;
    }
    return best;
  }

  down(event) {
    if (event.button === 0 && this.toX) this.pressed = this.at(event);
  }

  move(event) {
    if (!this.toX) return;
    const left = this.at(event);
    this.onCursor(this.nearest(left));
    this.selection.hidden = this.pressed === undefined || Math.abs(left - this.pressed) < DRAG;
    const [from, to] = [Math.min(left, this.pressed), Math.max(left, this.pressed)];
    if (!this.selection.hidden) Object.assign(this.selection.style, { left: `${from}px`, width: `${to - from}px`, height: `${this.bottom}px` });
  }

  up(event) {
    const from = this.pressed;
    this.pressed = undefined;
    if (from === undefined) return;
    const range = [from, this.at(event)].sort((a, b) => a - b);
    if (range[1] - range[0] < DRAG) this.onOpen(this.nearest(range[0]));
    else this.zoom(range.map((left) => this.x[this.nearest(left)]));
    this.selection.hidden = true;
  }

  leave() {
    this.pressed = undefined;
    this.selection.hidden = true;
    this.onCursor(null);
  }
}

// Returns the range with a margin; a range of one value with room around it.
function wide([low, high], margin) {
  const room = low === high ? Math.abs(low) * 0.1 || 1 : (high - low) * margin;
  return [low - room, high + room];
}

// Yields [from, to) of each part of the values without a gap.
function* parts(values) {
  let from = 0;
  for (let index = 0; index <= values.length; index += 1) {
    if (index < values.length && values[index] !== null) continue;
    if (index > from) yield [from, index];
    from = index + 1;
  }
}
