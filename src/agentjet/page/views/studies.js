// Studies: the list of studies, or one of them.

import { html } from "../vendor/ui.js";
import { href } from "../route.js";
import { Fact, Text } from "../parts/format.js";
import { Panel, useLoad } from "../parts/panel.js";
import { Study } from "../parts/study.js";

export function StudiesView({ params }) {
  return params.id === undefined ? html`<${StudyList} />` : html`<${OneStudy} key=${params.id} name=${params.id} />`;
}

function StudyList() {
  const load = useLoad("/look");
  return html`<h1>Studies</h1><${Panel} load=${load} empty=${({ studies }) => !studies.length && html`
    No study was given. <code>agentjet look FOLDER</code> shows a study, <code>agentjet research new</code> plans one.`}>
    ${({ studies }) => html`<div class="wide" tabindex="0" role="region" aria-label="Studies"><table>
      <thead><tr>
        <th scope="col">question</th><th scope="col" class="wide-only">stage</th><th scope="col">verdicts</th><th scope="col" class="num wide-only">claims</th>
        <th scope="col" class="num wide-only">arms</th><th scope="col" class="num wide-only">trials</th><th scope="col" class="num">full runs spent</th>
        <th scope="col" class="num wide-only">budget</th><th scope="col" class="wide-only">folder</th>
      </tr></thead>
      <tbody>${studies.map((one, index) => html`<${Row} key=${one.name} one=${one} path=${`/look#studies[${index}].summary`} />`)}</tbody>
    </table></div>`}
  <//>`;
}

function Row({ one: { name, title, error, summary }, path }) {
  const link = (text) => html`<a href=${href(`/studies/${encodeURIComponent(name)}`)}><${Text} value=${text} limit=${300} /></a>`;
  if (!summary) return html`<tr><th scope="row" colspan="9">${link(title)}<div class="bad prose"><${Text} value=${error} /></div></th></tr>`;
  const number = (place, only = "wide-only") => html`<td class=${`num ${only}`}><${Fact} path=${`${path}.${place}`} value=${summary[place]} /></td>`;
  const verdicts = Object.entries(summary.verdicts).map(([verdict, count]) => `${count} ${verdict.replaceAll("_", " ")}`);
  return html`<tr>
    <th scope="row" class="prose">${link(summary.topic)}</th><td class="wide-only">${summary.stage}</td><td>${verdicts.join(", ") || "–"}</td>
    ${number("claims")}${number("arms")}${number("trials")}${number("spent", "")}${number("budget")}
    <td class="wide-only"><${Text} value=${title} limit=${200} /></td>
  </tr>`;
}

function OneStudy({ name }) {
  const path = `/studies/${encodeURIComponent(name)}`;
  const load = useLoad(path);
  const topic = load.data?.study.study.topic ?? name;
  return html`<p><a href=${href("/studies")}>Studies</a></p>
    <h1><${Text} value=${topic} /></h1>
    <${Panel} load=${load} gone="No such study is in the folders that were given.">
      ${({ title, study }) => html`<p class="muted">Folder <${Text} value=${title} /></p>
        <${Study} study=${study} path=${`${path}#study`} />`}
    <//>`;
}
