// What several views show. `stream.js` writes these signals; views read them.
import { computed, signal } from "./vendor/ui.js";
import { route } from "./route.js";

// { key, role: "viewer"|"client"|"admin", run, expires (Unix s), live } or null. `live` is false for `agentjet look`.
export const session = signal(null);
// Why there is no session: a text for the sign-in view.
export const signedOut = signal("");
// Name of the run that the page shows.
export const run = computed(() => route.value.run);

export const status = signal(null);  // GET /status
export const steps = signal(null);   // GET /steps, all of them
export const health = signal(null);  // GET /health
export const waiting = signal(null); // GET /waiting
// state: "connecting" | "live" | "reconnecting" | "refused" | "paused" | "stored"; seconds until the next attempt; problem.
export const connection = signal({ state: "connecting", seconds: 0, problem: null });

// Number of events of each kind since the page began, which changes with each tick. Read one in an effect to reload.
// `at` is the newest event: a read with it may share its answer with other viewers.
export const pulse = signal({});

const ORDER = ["viewer", "client", "admin"];
// True if the session may do what needs `role`.
export const may = (role) => ORDER.indexOf(session.value?.role) >= ORDER.indexOf(role);

export function forget() {
  for (const one of [status, steps, health, waiting]) one.value = null;
}
