// Loaded before every Node client: only this machine can be reached. The same rule as `guard/sitecustomize.py`:
// what tries to leave fails and is written to the file CONFORMANCE_REACHED.
const fs = require("node:fs");
const net = require("node:net");

const LOCAL = new Set(["127.0.0.1", "::1", "localhost", ""]);
const connect = net.Socket.prototype.connect;

net.Socket.prototype.connect = function (...given) {
  const options = Array.isArray(given[0]) ? given[0][0] : given[0];
  const host = typeof options === "object" ? options.host ?? options.hostname ?? "" : typeof given[1] === "string" ? given[1] : "";
  if (!LOCAL.has(host)) {
    fs.appendFileSync(process.env.CONFORMANCE_REACHED, `${host}\n`);
    throw new Error(`${host} is not this machine`);
  }
  return connect.apply(this, given);
};
