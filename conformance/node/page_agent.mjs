// The agent of docs/frameworks.md in JavaScript, as a module of this folder, where its imports are installed.
import { readFileSync, rmSync, writeFileSync } from "node:fs";

const page = readFileSync(new URL("../../docs/frameworks.md", import.meta.url), "utf8");
const [, block] = page.match(/^```javascript\n([^]*?)^```$/m);
const file = new URL(`page-agent-${process.pid}.mjs`, import.meta.url);
process.env.AGENTJET_TASK = JSON.stringify({ id: "17+25", a: 17, b: 25 });
writeFileSync(file, block);
try {
  await import(file);
} finally {
  rmSync(file);
}
