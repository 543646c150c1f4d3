// Shown without a session: how to get one.
import { html, useSignal } from "../vendor/ui.js";
import { run } from "../store.js";
import { signIn } from "../api.js";

const ROLES = [
  ["viewer", "Read only"],
  ["client", "Read, save checkpoints, export, abort episodes"],
  ["admin", "All that, and change the job"],
];

const WRONG = "This is not a token of this server: use a file of its data dir.";

export function SignInView({ reason }) {
  const problem = useSignal("");
  const busy = useSignal(false);
  const submit = async (event) => {
    event.preventDefault();
    const given = new FormData(event.target);
    busy.value = true;
    try {
      await signIn(given.get("token"), given.get("role"), run.peek());
    } catch (error) {
      problem.value = error.status === 401 ? WRONG : error.detail ?? String(error);
    }
    busy.value = false;
  };
  return html`<section class="panel sign-in">
    <h1>AgentJet</h1>
    ${reason && html`<p role="alert" class="bad">${reason}</p>`}
    <p>This page shows prompts, answers and rewards of a run, so it needs a session. In a terminal on the machine of the
      server:</p>
    <pre><code>agentjet open</code></pre>
    <p>The command opens this page with a session that reads. It ends after 12 hours.</p>
    <details>
      <summary>Use a token instead</summary>
      <form onSubmit=${submit}>
        <label><span>Token: the content of the file <code>viewer-token</code>, <code>token</code> or <code>admin-token</code></span>
          <input name="token" type="password" autocomplete="off" required /></label>
        <label>The session may
          <select name="role">${ROLES.map(([role, text]) => html`<option value=${role}>${text}</option>`)}</select></label>
        <button type="submit" class="primary" disabled=${busy.value}>Open a session</button>
        ${problem.value && html`<p role="alert" class="bad">${problem.value}</p>`}
      </form>
    </details>
  </section>`;
}
