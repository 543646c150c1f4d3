// Keyboard shortcuts. `useKeys({ j: ["next row", fn], "g e": ["Episodes", fn] })` in a view; `?` lists them.
import { signal, useLayoutEffect, useRef } from "./vendor/ui.js";

const OFF = "agentjet.keys";
const SEQUENCE_MS = 1000;
const layers = [];
let pending = "";
let timer;

// Single-key shortcuts can be switched off: they disturb speech input (WCAG 2.1.4).
export const keysOn = signal(localStorage.getItem(OFF) !== "off");
export function setKeys(on) {
  keysOn.value = on;
  localStorage.setItem(OFF, on ? "on" : "off");
}

// The shortcuts that act now: [[keys, meaning], ...].
export const shortcuts = () => layers.flatMap((layer) => Object.entries(layer.current).map(([keys, [what]]) => [keys, what]));

const typing = (target) => target.closest?.("input, textarea, select, [contenteditable=true]");

function onKey(event) {
  if (!keysOn.peek() || event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  if (typing(event.target) || document.querySelector("dialog[open]")) return;
  clearTimeout(timer);
  for (const keys of pending ? [`${pending} ${event.key}`, event.key] : [event.key]) {
    for (const layer of layers.toReversed()) {
      const found = layer.current[keys];
      if (!found) continue;
      if (event.key === "Enter" && event.target.closest?.("a, button, summary")) return;
      pending = "";
      event.preventDefault();
      found[1](event);
      return;
    }
  }
  const starts = layers.some((layer) => Object.keys(layer.current).some((keys) => keys.startsWith(`${event.key} `)));
  pending = starts ? event.key : "";
  timer = setTimeout(() => { pending = ""; }, SEQUENCE_MS);
}
addEventListener("keydown", onKey);

// Adds shortcuts while the component is mounted. They act as soon as it is drawn: a key may come before an effect.
// The newest come first, those of the whole page (`last`) at the end.
export function useKeys(bindings, { last = false } = {}) {
  const layer = useRef({});
  layer.current = bindings;
  useLayoutEffect(() => {
    if (last) layers.unshift(layer);
    else layers.push(layer);
    return () => layers.splice(layers.indexOf(layer), 1);
  }, []);
}
