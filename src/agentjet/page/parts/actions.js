// Changes that a person may ask for. Each asks first, and is drawn only for a session of the role that it needs.

import { html, useRef, useState } from "../vendor/ui.js";
import { send } from "../api.js";
import { may, session, status } from "../store.js";
import { Confirm } from "./dialog.js";
import { visible } from "./format.js";

// A button that opens a question. `action` sends the change, `done(answer)` returns the text about the answer.
export function Action({ role, label, title = label, verb = label, action, done, danger = false, children }) {
  const [asking, setAsking] = useState(false);
  if (!may(role) || session.value.live === false) return null;
  return html`<button type="button" onClick=${() => setAsking(true)}>${label}</button>
    ${asking && html`<${Confirm}
      title=${title} verb=${verb} action=${action} done=${done} danger=${danger} onClose=${() => setAsking(false)}
    >${children}<//>`}`;
}

export function CheckpointButton() {
  return html`<${Action}
    role="client" label="Save a checkpoint" verb="Save" action=${() => send("POST", "/checkpoints", {})}
    done=${(made) => `Policy version ${made.policy_version} is saved in ${visible(made.path)}.`}
  >
    <p>Saves the weights and the optimiser of policy version ${status.value?.policy_version} to the disk of the server,
      as soon as no batch is being learned. The newest <code>job.keep_checkpoints</code> stay; older ones without a tag
      are removed.</p>
  <//>`;
}

export function ExportButton() {
  const form = useRef(null);
  const policies = status.value?.policies ?? [];
  const chosen = () => ({ policy: form.current.elements.policy?.value ?? "", adapter: form.current.elements.adapter.checked });
  return html`<${Action}
    role="client" label="Export a policy" verb="Export" action=${() => send("POST", "/exports", chosen())}
    done=${(made) => `Policy version ${made.policy_version} is exported to ${visible(made.path)}.`}
  >
    <form ref=${form} onSubmit=${(event) => event.preventDefault()}>
      <p>Writes policy version ${status.value?.policy_version} to the disk of the server, as a folder that
        <code>transformers</code> and vLLM load, as soon as no batch is being learned.</p>
      ${policies.length > 0 && html`<p><label>Policy <select name="policy">
        ${policies.map((name) => html`<option value=${name}>${name}</option>`)}
      </select></label></p>`}
      <p><label><input type="checkbox" name="adapter" /> Only the adapter, as a PEFT folder</label></p>
    </form>
  <//>`;
}

// Ends a live episode without a score. `status` is that of the episode.
export function AbortButton({ id, status: ofEpisode, onDone = () => {} }) {
  const form = useRef(null);
  if (ofEpisode !== "live") return null;
  const abort = async () => {
    const reason = form.current.elements.reason.value.trim() || "aborted by a person on the page";
    const ended = await send("POST", `/episodes/${encodeURIComponent(id)}/abort`, { reason });
    onDone(ended);
    return ended;
  };
  return html`<${Action}
    role="client" label="Abort" title="Abort the episode" verb="Abort the episode" danger action=${abort}
    done=${(ended) => `Episode ${visible(ended.episode_id)} is ${ended.status}.`}
  >
    <form ref=${form} onSubmit=${(event) => event.preventDefault()}>
      <p>Ends episode <code>${visible(id)}</code> without a score. Its agent gets an error at its next request, and its
        client may begin another episode in its place.</p>
      <p><label>Reason <input name="reason" maxlength="2000" autocomplete="off" /></label></p>
    </form>
  <//>`;
}
