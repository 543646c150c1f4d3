// The settings of the job in force, one row for each key.

import { html, useMemo, useState } from "../vendor/ui.js";
import { Panel } from "./panel.js";
import { Text } from "./format.js";

// Returns [[key, value], ...] with the keys of nested sections joined by dots. An empty section is a value.
export function flattened(section, prefix = "") {
  return Object.entries(section).flatMap(([key, value]) =>
    value !== null && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length
      ? flattened(value, `${prefix}${key}.`)
      : [[`${prefix}${key}`, value]],
  );
}

export function Job({ load }) {
  const [find, setFind] = useState("");
  const all = useMemo(() => flattened(load.data?.job ?? {}), [load.data]);
  const rows = all.filter(([key]) => key.includes(find.trim()));
  return html`<${Panel} title="Settings in force" load=${load}>
    ${({ revision }) => html`<details>
      <summary>${all.length} settings, revision ${revision}</summary>
      <p class="filters"><label>Find a setting <input type="search" value=${find} onInput=${(event) => setFind(event.currentTarget.value)} /></label></p>
      <div class="wide" tabindex="0" role="region" aria-label="Settings"><table>
        <thead><tr><th scope="col">job.</th><th scope="col">value</th></tr></thead>
        <tbody>${rows.map(([key, value]) => html`<tr key=${key}>
          <th scope="row"><code><${Text} value=${key} /></code></th>
          <td><${Text} value=${typeof value === "string" ? value : JSON.stringify(value)} limit=${400} lines /></td>
        </tr>`)}</tbody>
      </table></div>
    </details>`}
  <//>`;
}
