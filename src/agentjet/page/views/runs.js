// Runs: the runs of `agentjet look`, to open and to compare.

import { html, useSignal } from "../vendor/ui.js";
import { href } from "../route.js";
import { clock, Fact, Text, visible } from "../parts/format.js";
import { Panel, useLoad } from "../parts/panel.js";

const MOST = 8;

export function RunsView() {
  const load = useLoad("/look");
  const chosen = useSignal([]);
  const choose = (name, on) => {
    chosen.value = on ? [...chosen.value, name] : chosen.value.filter((one) => one !== name);
  };
  const count = chosen.value.length;
  return html`<h1>Runs</h1>
    <${Panel} load=${load} empty=${({ runs }) => !runs.length && NO_RUN}>
      ${({ runs }) => html`
        <p>${count > 1 && count <= MOST
          ? html`<a href=${href("/compare", { runs: chosen.value.join(",") })}>Compare the ${count} chosen runs</a>`
          : html`<span class="muted">Choose 2 to ${MOST} runs to compare them.</span>`}</p>
        <div class="wide" tabindex="0" role="region" aria-label="Runs"><table>
          <thead><tr>
            <td></td><th scope="col">run</th><th scope="col" class="wide-only">model</th><th scope="col" class="num wide-only">version</th>
            <th scope="col" class="num">newest reward</th><th scope="col" class="num wide-only">trained</th>
            <th scope="col" class="num wide-only">aborted</th><th scope="col" class="wide-only">newest batch</th><th scope="col" class="wide-only">read from</th><th scope="col">waits for</th>
          </tr></thead>
          <tbody>${runs.map((one, index) => html`<${Row} key=${one.name} one=${one} path=${`/look#runs[${index}]`}
            chosen=${chosen.value.includes(one.name)} choose=${choose} />`)}</tbody>
        </table></div>`}
    <//>`;
}

const NO_RUN = html`No run was given. <code>agentjet look DATA_DIR</code> shows the runs of a data dir.`;

function Row({ one, path, chosen, choose }) {
  const name = html`<a href=${href("/", {}, one.name)}><${Text} value=${one.title} limit=${200} /></a>`;
  if (one.error) {
    return html`<tr><td></td><th scope="row" colspan="9">${name}<div class="bad prose"><${Text} value=${one.error} /></div></th></tr>`;
  }
  const number = (place, value, only = "") => html`<td class=${`num ${only}`}><${Fact} path=${`${path}.${place}`} value=${value} /></td>`;
  return html`<tr>
    <td><input type="checkbox" checked=${chosen} aria-label=${`Compare ${visible(one.title)}`}
      onChange=${(event) => choose(one.name, event.currentTarget.checked)} /></td>
    <th scope="row">${name}</th>
    <td class="wide-only"><${Text} value=${one.model} limit=${80} /></td>
    ${number("policy_version", one.policy_version, "wide-only")}
    ${number("reward", one.reward)}
    ${number("episodes.trained", one.episodes.trained, "wide-only")}
    ${number("episodes.aborted", one.episodes.aborted, "wide-only")}
    <td class="wide-only">${clock(one.newest_step)}</td>
    <td class="wide-only">${one.is_served ? "its server" : "its files"}</td>
    <td class="prose"><${Text} value=${one.waiting_for} limit=${300} /></td>
  </tr>`;
}
