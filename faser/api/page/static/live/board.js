// The panels of the live view, and the second that their numbers are of.

import { h } from "../dom.js";
import { TimeChart, say, set } from "./charts.js";
import * as n from "./numbers.js";

export const SPAN_S = 120;
export const RECENT_S = 30; // of what is added up: drafts, gammas, depths
const NOW_S = 3; // of rates

export class Board {
  // grid: the element of the panels. onLook(seconds ago, or null): the numbers are of another second now.
  constructor(grid, onLook) {
    this.grid = grid;
    this.onLook = onLook;
    this.samples = [];
    this.at = null; // seconds ago; null: now
    this.frame = 0;
    this.panels = [];
  }

  // Drop samples that are older than what charts show.
  forget() {
    while (this.samples.length > SPAN_S + 2) this.samples.shift();
  }

  // Draw before the next frame is shown, once, however often it is asked for.
  redraw() {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      if (!this.samples.length) return;
      const range = this.range(this.at ?? 0);
      for (const panel of this.panels) panel(range);
    });
  }

  // The panels that add(this) makes, in a part that the reader folds; the browser remembers whether it is open.
  fold(title, add) {
    const key = `faser-open-${title}`;
    const outer = this.grid;
    this.grid = h("div", { class: "live-grid" });
    add(this);
    const part = h("details", { class: "fold", open: localStorage.getItem(key) === "yes" }, h("summary", {}, title), this.grid);
    part.addEventListener("toggle", () => localStorage.setItem(key, part.open ? "yes" : "no"));
    this.grid = outer;
    outer.append(part);
  }

  // A chart with a title, a line of numbers and a table. draw(range) draws it and returns {words, columns, rows}.
  panel({ title, hint = "", className = "", charts = [], big = null, key = null, draw }) {
    const table = h("table");
    const details = h(
      "details",
      { class: "as-table" },
      h("summary", {}, h("span", { class: "unseen" }, `${title} in `), "numbers"),
      table,
    );
    const section = h(
      "section",
      { class: `panel ${className}` },
      h("header", {}, h("h3", {}, title), hint && h("span", { class: "hint" }, hint), details),
      big && h("p", { class: "big" }, big.value, " ", big.unit, big.side),
      key,
      ...charts.map(({ svg }) => svg),
    );
    details.addEventListener("toggle", () => this.redraw());
    this.grid.append(section);
    this.panels.push((range) => {
      const { words, columns, rows } = draw(range);
      for (const chart of charts) chart.label(`${title}: ${words}`);
      if (details.open) fillTable(table, title, columns, rows);
    });
    return section;
  }

  // A number over time.
  tile({ title, className, series, options, key, number, values, columns, rows }) {
    const chart = new TimeChart(series, { span: SPAN_S, ...options });
    const big = {
      value: h("span", { class: "value" }),
      unit: h("span", { class: "unit" }),
      side: h("span", { class: "side" }),
    };
    this.pointer(chart);
    this.panel({
      title,
      className: `tile ${className ?? ""}`,
      charts: [chart],
      big,
      key: key && legend(key),
      draw: (range) => {
        const [value, unit, side] = number(range);
        say(big.value, value);
        say(big.unit, unit);
        say(big.side, side);
        chart.draw(this.points(values), this.at);
        return {
          words: `${value} ${unit} ${side}`,
          columns: ["", ...columns],
          rows: this.moments().map(([when, part]) => [when, ...rows(part)]),
        };
      },
    });
  }

  pointer(chart, left = 0, right = 0) {
    chart.svg.addEventListener("pointermove", (event) => {
      const box = chart.svg.getBoundingClientRect();
      const part = (event.clientX - box.left - left) / (box.width - left - right);
      this.lookAt(Math.round(SPAN_S * Math.min(0, Math.max(-1, part - 1))) || null);
    });
    chart.svg.addEventListener("pointerleave", () => this.lookAt(null));
  }

  // ago: as a negative number of seconds; null: now.
  lookAt(ago) {
    const at = ago === null ? null : -ago;
    if (at === this.at) return;
    this.at = at;
    this.onLook(at);
    this.redraw();
  }

  get end() {
    return this.samples.at(-1)?.t ?? 0;
  }

  points(values) {
    const end = this.end;
    return this.samples
      .filter((each) => end - each.t <= SPAN_S)
      .map((each) => ({ ago: end - each.t, dt: each.dt, values: values(each) }));
  }

  // The samples that numbers of `at` seconds ago are made of.
  range(at) {
    const until = this.end - at + 0.5;
    const upTo = this.samples.filter((each) => each.t <= until);
    return {
      upTo,
      last: upTo.at(-1) ?? null,
      now: upTo.filter((each) => each.t > until - NOW_S),
      recent: upTo.filter((each) => each.t > until - RECENT_S),
    };
  }

  moments() {
    return [
      ["now", 0],
      ["−10 s", 10],
      ["−30 s", 30],
      ["−60 s", 60],
      ["−90 s", 90],
    ]
      .map(([words, at]) => [words, this.range(at)])
      .filter(([, { last }]) => last);
  }
}

export function legend(entries) {
  const list = h("ul", { class: "legend" });
  fillLegend(list, entries);
  return list;
}

export function fillLegend(list, entries) {
  while (list.childElementCount > entries.length) list.lastChild.remove();
  while (list.childElementCount < entries.length)
    list.append(h("li", {}, h("span", { class: "swatch", "aria-hidden": "true" }), h("span")));
  entries.forEach(([style, words], place) => {
    const [swatch, text] = list.children[place].children;
    set(swatch, { class: `swatch ${style}` });
    say(text, words);
  });
}

export function fillTable(table, title, columns, rows) {
  if (!table.tHead) {
    table.append(h("caption", { class: "unseen" }, title), h("thead", {}, h("tr")), h("tbody"));
    columns.forEach((words) => table.tHead.rows[0].append(words ? h("th", { scope: "col" }, words) : h("td")));
  }
  const body = table.tBodies[0];
  while (body.rows.length > rows.length) body.lastChild.remove();
  while (body.rows.length < rows.length) {
    body.append(h("tr", {}, ...columns.map((_, place) => (place ? h("td") : h("th", { scope: "row" })))));
  }
  rows.forEach((row, index) => row.forEach((words, place) => say(body.rows[index].cells[place], String(words))));
}
