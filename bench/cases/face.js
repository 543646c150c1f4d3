// What `bench.face` waits for in the page; the tests of tests/page have the same selectors.
// Resolves one frame after the first frame in which `test()` is true, to milliseconds since the page was requested.
window.after = (test) => new Promise((done) => {
  const look = () => requestAnimationFrame(test() ? () => done(performance.now()) : look);
  requestAnimationFrame(look);
});
window.has = (...selectors) => selectors.every((one) => document.querySelector(one));
window.face = {
  overview: () => after(() =>
    has(".learning .answer", ".learning canvas", ".health .rules li", ".waiting .cell", ".newest li")),
  empty: () => after(() => has("p")),
  rows: () => after(() => has(".table-row:nth-child(20)")),
  tokens: () => after(() => has(".tokens", ".legend li") && [...CSS.highlights.values()].some((one) => one.size)
    && [...document.querySelectorAll(".tokens")].reduce((sum, one) => sum + one.textContent.length, 0) > 30000),
  change: async ([hash, shown]) => {
    const began = performance.now();
    location.hash = hash;
    return await face[shown]() - began;
  },
  filter: async (hash) => {
    const [began, old] = [performance.now(), document.querySelector(".table")];
    location.hash = hash;
    return await after(() => has(".table-row") && document.querySelector(".table") !== old) - began;
  },
  deeper: async () => {
    const loaded = () => parseInt(document.querySelector(".view-head [role=status]").textContent.replaceAll(",", ""));
    const [began, table, before] = [performance.now(), document.querySelector(".table"), loaded()];
    table.scrollTop = table.scrollHeight;
    return [await after(() => loaded() > before) - began, loaded()];
  },
  onKey: (key) => {
    addEventListener("keydown", (event) => { window.pressed = event.timeStamp; }, { capture: true, once: true });
    window.switched = after(() => has(`.overlay-bar [aria-keyshortcuts="${key}"][aria-pressed=true]`))
      .then((now) => now - window.pressed);
  },
  record: () => {
    const shown = () =>
      Number(document.querySelector('[data-fact="/status#episodes.finished"]').getAttribute("value"));
    window.recorded = [[0, shown()]];
    const note = () => requestAnimationFrame(() => {
      if (recorded.at(-1)[1] !== shown()) recorded.push([performance.timeOrigin + performance.now(), shown()]);
    });
    new MutationObserver(note).observe(document.querySelector("main"),
      { subtree: true, childList: true, attributes: true, characterData: true });
  },
};
