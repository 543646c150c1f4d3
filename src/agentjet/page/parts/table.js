// A table of any length: only the rows in view are elements. Style: style/table.css, which sets the height of rows.
import { html, useEffect, useId, useLayoutEffect, useRef, useState } from "../vendor/ui.js";
import { useKeys } from "../keys.js";

const OVERSCAN = 8;

// Returns [first, stop) of the rows to draw.
function inView(view, rowHeight, count) {
  const first = Math.max(0, Math.floor(view.top / rowHeight) - OVERSCAN);
  return [first, Math.min(count, Math.ceil((view.top + view.height) / rowHeight) + OVERSCAN)];
}

function Header({ columns, sort, onSort }) {
  return html`<div role="rowgroup" class="table-head"><div role="row" aria-rowindex="1">
    ${columns.map(({ name, title, sorts, number, narrow }) => {
      const present = sorts?.find(([value]) => value === sort);
      const next = sorts?.[(sorts.indexOf(present) + 1) % sorts.length];
      return html`<div role="columnheader" key=${name} class=${cellClass(number, narrow)} aria-sort=${present?.[1]}>
        ${sorts ? html`<button type="button" onClick=${() => onSort(next[0])}>${title}</button>` : title}
      </div>`;
    })}
  </div></div>`;
}

const cellClass = (number, narrow) => `${number ? "number" : ""} ${narrow ? "" : "wide-only"}`;

// columns: [{ name, title, width, cell: (row) => html, number, narrow, sorts: [[value, "ascending"|"descending"]] }].
//   `width` is a CSS grid track. Only columns with `narrow` are shown on a narrow screen.
// onOpen(row): Enter, or a click beside links. onEnd(): the last rows are in view and `more` is true.
// start: the row that is active at first. onActive(index): another row is active. sort, onSort(value): see `sorts`.
export function Table({ label, columns, rows, rowKey, onOpen, onEnd, more = false, start = 0, onActive, sort, onSort }) {
  const grid = useRef(null);
  const body = useRef(null);
  const id = useId();
  const [view, setView] = useState({ top: 0, height: 600 });
  const [rowHeight, setRowHeight] = useState(36);
  const [active, setActive] = useState(start);
  const [first, stop] = inView(view, rowHeight, rows.length);
  const at = Math.min(active, Math.max(0, rows.length - 1));
  const latest = useRef(at); // Several keys may come before the next drawing.
  latest.current = at;

  useLayoutEffect(() => {
    const tracks = columns.map(({ width }) => width ?? "minmax(0, 1fr)").join(" ");
    grid.current.style.setProperty("--tracks", tracks);
    const measure = () => setView({ top: grid.current.scrollTop, height: grid.current.clientHeight });
    const observer = new ResizeObserver(measure);
    observer.observe(grid.current);
    return () => observer.disconnect();
  }, [columns]);

  useLayoutEffect(() => {
    const measured = body.current.firstElementChild?.getBoundingClientRect().height;
    if (measured && Math.abs(measured - rowHeight) > 0.1) setRowHeight(measured);
    body.current.style.paddingTop = `${first * rowHeight}px`;
    body.current.style.paddingBottom = `${(rows.length - stop) * rowHeight}px`;
  });

  useLayoutEffect(() => {
    if (start) show(start);
  }, [rowHeight]);

  useEffect(() => {
    if (more && stop >= rows.length - OVERSCAN) onEnd();
  }, [stop, rows.length, more]);

  const show = (index) => {
    const head = grid.current.firstElementChild.getBoundingClientRect().height;
    const top = index * rowHeight;
    const { scrollTop, clientHeight } = grid.current;
    if (top < scrollTop) grid.current.scrollTop = top;
    else if (top + rowHeight > scrollTop + clientHeight - head) {
      grid.current.scrollTop = top + rowHeight + head - clientHeight;
    }
  };
  const activate = (index) => {
    if (!rows.length) return;
    const next = Math.max(0, Math.min(rows.length - 1, index));
    latest.current = next;
    setActive(next);
    onActive?.(next);
    show(next);
    grid.current.focus({ preventScroll: true });
  };
  const page = Math.max(1, Math.floor(view.height / rowHeight) - 1);
  const onKeyDown = (event) => {
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -rows.length, End: rows.length };
    if (event.target !== grid.current || !(event.key in steps)) return;
    event.preventDefault();
    activate(latest.current + steps[event.key]);
  };
  useKeys({
    j: ["Next row", () => activate(latest.current + 1)],
    k: ["Row before", () => activate(latest.current - 1)],
    Enter: ["Open the row", () => rows.length && onOpen?.(rows[latest.current])],
  });
  const onClick = (event, row, index) => {
    if (event.target.closest("a, button")) return;
    setActive(index);
    onActive?.(index);
    if (String(getSelection()) === "") onOpen?.(row);
  };

  return html`<div class="table" role="grid" aria-label=${label} ref=${grid} tabindex="0"
      aria-rowcount=${more ? -1 : rows.length + 1} onKeyDown=${onKeyDown}
      aria-activedescendant=${rows.length && at >= first && at < stop ? `${id}-${at}` : undefined}
      onScroll=${({ currentTarget: { scrollTop: top, clientHeight: height } }) => setView({ top, height })}>
    <${Header} columns=${columns} sort=${sort} onSort=${onSort} />
    <div role="rowgroup" ref=${body}>
      ${rows.slice(first, stop).map((row, i) => html`<div role="row" class="table-row" key=${rowKey(row)}
          id=${`${id}-${first + i}`} aria-rowindex=${first + i + 2} aria-selected=${first + i === at}
          onClick=${(event) => onClick(event, row, first + i)}>
        ${columns.map(({ name, title, cell, number, narrow }) => html`<div role="gridcell" key=${name}
          class=${cellClass(number, narrow)} data-title=${title}>${cell(row)}</div>`)}
      </div>`)}
    </div>
  </div>`;
}
