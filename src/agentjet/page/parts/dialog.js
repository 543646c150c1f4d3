// Modal dialogs. `Confirm` asks before a change and shows the answer of the server.
import { html, useEffect, useRef, useSignal } from "../vendor/ui.js";

// A modal dialog while it is mounted. Escape calls `onClose`.
export function Dialog({ title, onClose, children }) {
  const element = useRef(null);
  useEffect(() => {
    const before = document.activeElement;
    element.current.showModal();
    return () => before?.focus?.();
  }, []);
  return html`<dialog ref=${element} aria-label=${title} onClose=${onClose} onCancel=${onClose}>
    <header><h2>${title}</h2><button type="button" aria-label="Close" onClick=${onClose}>✕</button></header>
    ${children}
  </dialog>`;
}

// Asks, then awaits `action()`. `done(result)` returns the text that reports the result.
export function Confirm({ title, verb, action, done, onClose, children, danger = false }) {
  const state = useSignal({ at: "asking", text: "" });
  const run = async () => {
    state.value = { at: "running", text: "" };
    try {
      state.value = { at: "done", text: done(await action()) };
    } catch (problem) {
      state.value = { at: "asking", text: problem.detail ?? String(problem) };
    }
  };
  const { at, text } = state.value;
  return html`<${Dialog} title=${title} onClose=${onClose}>
    ${at === "done" ? null : children}
    ${text && html`<p role=${at === "done" ? "status" : "alert"} class=${at === "done" ? "" : "bad"}>${text}</p>`}
    <footer>
      ${at !== "done" && html`<button type="button" class=${danger ? "danger" : "primary"} disabled=${at === "running"}
        onClick=${run}>${at === "running" ? "Waiting …" : verb}</button>`}
      <button type="button" onClick=${onClose}>${at === "done" ? "Close" : "Cancel"}</button>
    </footer>
  <//>`;
}
