// The live episodes, by the end of their leases.

import { html, useEffect, useState } from "../vendor/ui.js";
import { href } from "../route.js";
import { pulse, waiting } from "../store.js";
import { AbortButton } from "./actions.js";
import { duration, number, plural, shortId, Text } from "./format.js";
import { Panel, useLoad } from "./panel.js";

const LIMIT = 200;

export function Leases() {
  const load = useLoad("/episodes", { status: "live", limit: LIMIT }, pulse.value.episode);
  return html`<${Panel} title="Live episodes" load=${load} empty=${({ episodes }) => !episodes.length && "No episode is live: no client works now."}>
    ${({ episodes }) => html`<${Table} episodes=${episodes} onDone=${load.reload} />`}
  <//>`;
}

function Table({ episodes, onDone }) {
  const now = useNow();
  const silent = silences(waiting.value);
  const rows = [...episodes].sort((a, b) => (a.expires_at ?? Infinity) - (b.expires_at ?? Infinity));
  return html`<p class="muted">
      ${rows.length < LIMIT ? plural(rows.length, "episode") : `The newest ${number(LIMIT)}`}; the next lease to end first. An episode without a
      call or a heartbeat until then ends unscored.</p>
    <div class="wide" tabindex="0" role="region" aria-label="Live episodes"><table>
      <thead><tr>
        <th scope="col">episode</th><th scope="col">task</th><th scope="col" class="wide-only">client</th><th scope="col" class="num wide-only">age</th>
        <th scope="col" class="num">silent</th><th scope="col" class="num">lease ends in</th><th scope="col"><span class="visually-hidden">action</span></th>
      </tr></thead>
      <tbody>${rows.map((one) => html`<tr key=${one.episode_id}>
        <th scope="row"><a href=${href(`/episodes/${encodeURIComponent(one.episode_id)}`)} title=${one.episode_id}><${Text} value=${shortId(one.episode_id)} /></a></th>
        <td><${Text} value=${one.task_set ? `${one.task_set} / ${one.task_id}` : one.task_id} limit=${80} />${one.mode === "eval" && html`<span class="badge">eval</span>`}</td>
        <td class="wide-only"><${Text} value=${one.client_id} limit=${40} /></td>
        <td class="num wide-only">${duration(since(one.begun, now))}</td>
        <td class="num">${duration(silent.get(one.episode_id))}</td>
        <td class="num">${duration(since(now, one.expires_at))}</td>
        <td><${AbortButton} id=${one.episode_id} status=${one.status} onDone=${onDone} /></td>
      </tr>`)}</tbody>
    </table></div>`;
}

// Returns the seconds since the last sign of each live episode of the present batch: Map of episode id.
function silences(picture) {
  const cells = (picture?.groups ?? []).flatMap((group) => group.cells);
  return new Map(cells.map((cell) => [cell.episode_id, cell.silent_seconds]));
}

function since(start, end) {
  return start == null || end == null ? null : Math.max(0, Math.round(end - start));
}

// The present Unix time, each second.
function useNow() {
  const [now, setNow] = useState(Date.now() / 1000);
  useEffect(() => {
    const timer = setInterval(() => setNow(Date.now() / 1000), 1000);
    return () => clearInterval(timer);
  }, []);
  return now;
}
