// The charts of the live view, drawn as SVG at the width that they have on the screen. They know no samples.
//
// Each chart is a class with an `svg` and a `draw`. The text of a chart is its aria-label and the table below it;
// board.js sets both.

import { s } from "../dom.js";

// Set what differs; a DOM that stays as it is costs no layout.
export function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null) element.removeAttribute(name);
    else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
  }
}

export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// The least of 1, 2, 2.5, 5, 10, … that is at least `value`.
export function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  const digit = [1, 2, 2.5, 5, 10].find((each) => each * power >= value * (1 - 1e-9));
  return digit * power;
}

const round = (value) => Math.round(value * 10) / 10;

// What all charts share: an SVG as wide as its place, which draws again when that changes.
class Chart {
  constructor(height) {
    this.height = height;
    this.width = 0;
    this.drawn = null;
    this.svg = s("svg", { class: "chart", role: "img", height });
    new ResizeObserver(([entry]) => this.resize(entry.contentRect.width)).observe(this.svg);
  }

  resize(width) {
    if (!width || Math.abs(width - this.width) < 1) return;
    this.width = width;
    set(this.svg, { viewBox: `0 0 ${width} ${this.height}` });
    if (this.drawn) this.draw(...this.drawn);
  }

  // Whether there is room to draw; what is drawn is kept until there is.
  begin(...what) {
    this.drawn = what;
    return this.width > 0;
  }

  path(classes) {
    return this.svg.appendChild(s("path", { class: classes }));
  }

  text(classes, attributes = {}) {
    return this.svg.appendChild(s("text", { class: classes, ...attributes }));
  }

  // Words in the place of what there is nothing to draw of; "" when there is.
  without(words) {
    if (!words && !this.empty) return;
    this.empty ??= this.text("empty-words", { "text-anchor": "middle", y: round(this.height / 2) });
    set(this.empty, { x: round(this.width / 2) });
    say(this.empty, words);
  }

  label(words) {
    set(this.svg, { "aria-label": words });
  }
}

// Values over time. series: [{kind: "area" or "line", class, stacked}]; a stacked area lies on the one before it.
export class TimeChart extends Chart {
  constructor(series, { height = 92, span = 120, format, least = 0, most = null }) {
    super(height);
    Object.assign(this, { series, span, format, least, most });
    this.bottom = height - 15;
    this.grid = this.path("grid");
    this.paths = series.map((each) => this.path(`${each.kind} ${each.class}`));
    this.cursor = this.path("cursor");
    this.top = this.text("axis", { x: 0, y: 9 });
    this.times = [
      [1, "now", "end"],
      [0.5, `−${span / 2} s`, "middle"],
      [0, `−${span} s`, "start"],
    ].map(([at, words, anchor]) => {
      const text = this.text("axis", { y: height - 2, "text-anchor": anchor });
      text.textContent = words;
      return [at, text];
    });
  }

  // points: [{ago, dt, values}], ago in seconds, the oldest first; a value may be null. at: seconds ago, or null.
  draw(points, at) {
    if (!this.begin(points, at)) return;
    const x = (ago) => round(this.width * (1 - Math.min(ago, this.span) / this.span));
    let largest = this.least;
    for (const { values } of points) {
      let stack = 0;
      values.forEach((value, place) => {
        stack = this.series[place].stacked ? stack + (value ?? 0) : (value ?? 0);
        largest = Math.max(largest, stack);
      });
    }
    const most = this.most ?? ceiling(largest);
    const y = (value) => round(this.bottom - (this.bottom - 12) * Math.min(1, value / most));
    set(this.grid, { d: `M0 ${this.bottom + 0.5}H${this.width}M0 12.5H${this.width}` });
    const there = points.some(({ values }) => values.some((value) => value !== null));
    say(this.top, there ? this.format(most) : "");
    for (const [place, text] of this.times) set(text, { x: round(this.width * place) });
    let below = points.map(() => 0);
    this.series.forEach((each, place) => {
      const above = points.map(({ values }, index) => (each.stacked ? below[index] : 0) + (values[place] ?? 0));
      const paths = runs(points, place).map((there) =>
        each.kind === "area"
          ? area(there, points, x, y, above, each.stacked ? below : null)
          : line(there, points, x, y, above),
      );
      set(this.paths[place], { d: paths.join("") || "M0 0" });
      if (each.stacked) below = above;
    });
    set(this.cursor, { d: at === null ? "M0 0" : `M${x(at)} 10V${this.bottom}` });
  }
}

// The indices of points that have a value, in runs without a gap between them.
function runs(points, place) {
  const found = [];
  let last = null;
  points.forEach((point, index) => {
    if (point.values[place] === null) return;
    if (last === index - 1 && index && points[last].ago - point.ago <= point.dt + 1.5) found.at(-1).push(index);
    else found.push([index]);
    last = index;
  });
  return found;
}

function line(there, points, x, y, values) {
  if (there.length === 1) there = [there[0], there[0]];
  return there.map((index, place) => `${place ? "L" : "M"}${x(points[index].ago)} ${y(values[index])}`).join("");
}

// A point stands for the time since the one before it, so the first begins dt earlier.
function area(there, points, x, y, above, below) {
  const first = points[there[0]];
  const start = x(first.ago + first.dt);
  const up = there.map((index) => `L${x(points[index].ago)} ${y(above[index])}`).join("");
  const back = [...there]
    .reverse()
    .map((index) => `L${x(points[index].ago)} ${y(below ? below[index] : 0)}`)
    .join("");
  const base = y(below ? below[there[0]] : 0);
  return `M${start} ${base}L${start} ${y(above[there[0]])}${up}${back}Z`;
}

// Columns of shares over time: how dark a cell is tells how often its row was chosen.
export class HeatChart extends Chart {
  static LEVELS = [0.02, 0.1, 0.25, 0.5, 0.75];

  constructor({ height = 194, span = 120 }) {
    super(height);
    this.span = span;
    this.left = 18;
    this.side = 58; // of the bars at the right, and a gap before them
    this.bottom = height - 15;
    this.frame = this.path("grid");
    this.bars = this.path("heat heat-4");
    this.levels = HeatChart.LEVELS.map((_, level) => this.path(`heat heat-${level + 1}`));
    this.cursor = this.path("cursor");
    this.rows = [];
    this.times = [
      [1, "now", "end"],
      [0, `−${span} s`, "start"],
    ].map(([at, words, anchor]) => {
      const text = this.text("axis", { y: height - 2, "text-anchor": anchor });
      text.textContent = words;
      return [at, text];
    });
    this.sum = this.text("axis", { y: height - 2, "text-anchor": "end" });
  }

  // columns: [{ago, dt, counts}]; rows: how many there are. sums: counts of the bars; words: what these are of.
  draw(columns, rows, sums, words, at) {
    if (!this.begin(columns, rows, sums, words, at)) return;
    const room = this.width - this.left - this.side;
    const x = (ago) => round(this.left + room * (1 - Math.min(this.span, ago) / this.span));
    const step = (this.bottom - 2) / rows;
    const paths = HeatChart.LEVELS.map(() => "");
    for (const { ago, dt, counts } of columns) {
      const all = counts.reduce((one, other) => one + other, 0);
      if (!all) continue;
      const [from, to] = [x(ago + dt), x(ago)];
      counts.forEach((count, row) => {
        const level = HeatChart.LEVELS.findLastIndex((each) => count / all >= each);
        if (level < 0) return;
        const top = round(this.bottom - (row + 1) * step);
        paths[level] += `M${from} ${top}H${Math.max(to - 0.5, from + 1)}v${round(step - 1)}H${from}Z`;
      });
    }
    paths.forEach((d, level) => set(this.levels[level], { d: d || "M0 0" }));
    const end = this.width - this.side + 10;
    const all = sums.reduce((one, other) => one + other, 0);
    const barWidth = (count) => round(((this.side - 10) * count) / all);
    const bars = sums.map((count, row) =>
      all ? `M${end} ${round(this.bottom - (row + 1) * step)}h${barWidth(count)}v${round(step - 1)}H${end}Z` : "",
    );
    set(this.bars, { d: bars.join("") || "M0 0" });
    set(this.sum, { x: this.width });
    say(this.sum, words);
    set(this.frame, {
      d: `M${this.left} ${this.bottom + 0.5}H${end - 10}M${end} ${this.bottom + 0.5}H${this.width}`,
    });
    while (this.rows.length < rows) {
      const text = this.text("axis", { x: 0 });
      text.textContent = this.rows.length;
      this.rows.push(text);
    }
    this.rows.forEach((text, row) => {
      const every = rows > 12 ? 4 : 1;
      set(text, {
        y: round(this.bottom - (row + 0.5) * step + 3.5),
        visibility: row < rows && row % every === 0 ? "visible" : "hidden",
      });
    });
    for (const [place, text] of this.times) set(text, { x: round(this.left + room * place) });
    set(this.cursor, { d: at === null ? "M0 0" : `M${x(at)} 2V${this.bottom}` });
  }
}

// Horizontal bars with a name before and words behind each. bars: [{name, parts: [[share, class]], words, faint}]
export class BarChart extends Chart {
  constructor({ left = 30, right = 64, row = 18 }) {
    super(row);
    Object.assign(this, { left, right, row, bars: [] });
  }

  draw(bars) {
    const height = Math.max(1, bars.length) * this.row;
    if (height !== this.height) {
      this.height = height;
      set(this.svg, { height, ...(this.width ? { viewBox: `0 0 ${this.width} ${height}` } : {}) });
    }
    if (!this.begin(bars)) return;
    while (this.bars.length < bars.length) this.bars.push(this.bar(this.bars.length));
    const room = Math.max(10, this.width - this.left - this.right);
    this.bars.forEach((own, place) => {
      const bar = bars[place];
      set(own.group, { visibility: bar ? "visible" : "hidden" });
      if (!bar) return;
      say(own.name, bar.name);
      say(own.words, bar.words);
      set(own.words, { x: this.width });
      set(own.ground, { width: room });
      let from = this.left;
      own.parts.forEach((rect, index) => {
        const [part, style] = bar.parts[index] ?? [0, ""];
        const width = Math.max(0, Math.min(1, part)) * room;
        set(rect, { x: round(from), width: round(width), class: `bar ${style}` });
        from += width;
      });
    });
  }

  bar(place) {
    const y = place * this.row;
    const group = this.svg.appendChild(s("g"));
    const add = (name, attributes) => group.appendChild(s(name, attributes));
    return {
      group,
      ground: add("rect", { class: "ground", x: this.left, y: y + 2, height: this.row - 6, rx: 2 }),
      parts: [0, 1, 2].map(() => add("rect", { y: y + 2, height: this.row - 6 })),
      name: add("text", { class: "name", x: 0, y: y + this.row - 6.5 }),
      words: add("text", { class: "words", y: y + this.row - 6.5, "text-anchor": "end" }),
    };
  }
}

// What became of draft tokens: each drafter's are verified or pruned; what is verified is accepted or wasted.
export class FlowChart extends Chart {
  constructor({ height = 176 }) {
    super(height);
    this.bands = this.svg.appendChild(s("g"));
    this.nodes = this.svg.appendChild(s("g"));
    this.words = this.svg.appendChild(s("g"));
  }

  // flows: [{name, class, drafted, pruned, verified, accepted}]; words: of the five kinds, [title, number].
  draw(flows, words) {
    if (!this.begin(flows, words)) return;
    const all = flows.reduce((one, { drafted }) => one + drafted, 0);
    const verified = flows.reduce((one, { verified }) => one + verified, 0);
    const pruned = all - verified;
    const kept = flows.reduce((one, { accepted }) => one + accepted, 0);
    const gap = 26;
    const top = 18;
    const room = this.height - top - 8 - gap;
    const scale = all > 0 ? room / all : 0;
    const node = 5;
    const [left, middle, right] = [0, Math.round(this.width * 0.46), this.width - node];
    const at = {
      drafted: top,
      verified: top,
      pruned: top + verified * scale + gap,
      accepted: top,
      wasted: top + kept * scale + gap,
    };
    const bands = [];
    const nodes = [];
    const place = { ...at };
    const take = (kind, amount) => {
      const from = place[kind];
      place[kind] += amount * scale;
      return from;
    };
    for (const flow of flows) {
      const wasted = flow.verified - flow.accepted;
      for (const [from, to, x, end, amount, style] of [
        ["drafted", "verified", left + node, middle, flow.verified, ""],
        ["drafted", "pruned", left + node, middle, flow.pruned, "lost"],
      ])
        bands.push([band(x, end, take(from, amount), take(to, amount), amount * scale), `${flow.class} ${style}`]);
      nodes.push([left, place.drafted - flow.drafted * scale, flow.drafted * scale, flow.class]);
      flow.out = [flow.accepted, wasted];
    }
    place.out = at.verified;
    for (const flow of flows) {
      const [good, bad] = flow.out;
      bands.push([band(middle + node, right, place.out, take("accepted", good), good * scale), flow.class]);
      bands.push([
        band(middle + node, right, place.out + good * scale, take("wasted", bad), bad * scale),
        `${flow.class} lost`,
      ]);
      place.out += (good + bad) * scale;
    }
    if (verified > 0) nodes.push([middle, at.verified, verified * scale, "verified"]);
    if (pruned > 0) nodes.push([middle, at.pruned, pruned * scale, "wasted"]);
    if (kept > 0) nodes.push([right, at.accepted, kept * scale, "accepted"]);
    if (verified > kept) nodes.push([right, at.wasted, (verified - kept) * scale, "wasted"]);
    children(
      this.bands,
      "path",
      bands.map(([d, style]) => ({ d, class: `band ${style}` })),
    );
    children(
      this.nodes,
      "rect",
      nodes.map(([x, y, height, style]) => ({
        x,
        y: round(y),
        width: node,
        height: round(Math.max(1, height)),
        class: `node ${style}`,
      })),
    );
    const narrow = this.width < 460;
    this.without(all ? "" : words.none);
    const labels = !all
      ? []
      : [
          [left, at.drafted, "start", words.drafted],
          [middle + node / 2, at.verified, "middle", words.verified],
          [right + node, at.accepted, "end", words.accepted],
        ];
    if (pruned > 0) labels.push([middle + node / 2, at.pruned, "middle", words.pruned]);
    if (verified > kept) labels.push([right + node, at.wasted, "end", words.wasted]);
    children(
      this.words,
      "text",
      labels.map(([x, y, anchor]) => ({ x, y: round(y - 6), "text-anchor": anchor, class: "name" })),
    );
    labels.forEach(([, , , text], index) =>
      say(this.words.children[index], narrow ? text.replace(/ · .*/, "") : text),
    );
  }
}

function band(x, end, from, to, height) {
  if (height < 0.05) return "M0 0";
  const bend = (x + end) / 2;
  const [a, b, c, d] = [from, to, to + height, from + height].map(round);
  return `M${x} ${a}C${bend} ${a} ${bend} ${b} ${end} ${b}V${c}C${bend} ${c} ${bend} ${d} ${x} ${d}Z`;
}

// As many children of a kind as there are attributes.
function children(group, name, attributes) {
  while (group.childElementCount > attributes.length) group.lastChild.remove();
  while (group.childElementCount < attributes.length) group.append(s(name));
  attributes.forEach((each, index) => set(group.children[index], each));
}

// The last steps, one after the other: what drafted, what verified, and how many rows each had.
export class StepChart extends Chart {
  static KINDS = ["draft", "verify plain", "verify serial", "verify overlapped", "rest", "rows"];

  constructor({ height = 118 }) {
    super(height);
    this.left = 48;
    this.grid = this.path("grid");
    this.paths = Object.fromEntries(StepChart.KINDS.map((kind) => [kind, this.path(`step ${kind}`)]));
    [
      ["draft", 20],
      ["verify", 48],
      ["tokens", 84],
    ].forEach(([words, y]) => {
      this.text("name", { x: 0, y }).textContent = words;
    });
    this.most = this.text("axis", { "text-anchor": "end" });
    this.ticks = [0, 1, 2, 3, 4].map(() => this.text("axis", { y: height - 2, "text-anchor": "middle" }));
  }

  // words: in the place of steps where there are none.
  // steps: [{end, length, draft, verify, rows, mode}], milliseconds; end: before now, so at most 0.
  draw(steps, words) {
    if (!this.begin(steps, words)) return;
    this.without(steps.length ? "" : words);
    const found = Object.fromEntries(StepChart.KINDS.map((kind) => [kind, ""]));
    const first = steps.length ? steps[0].end - steps[0].length : -1000;
    const last = steps.length ? steps.at(-1).end : 0;
    const span = Math.max(20, last - first);
    const room = this.width - this.left;
    const x = (ms) => round(this.left + room * Math.max(0, (ms - first) / span));
    const bottom = this.height - 16;
    const tallest = Math.max(1, ...steps.map(({ rows }) => rows));
    const box = (from, to, y, height) =>
      `M${x(from)} ${round(y)}H${Math.max(x(to) - 0.6, x(from) + 0.6)}v${round(height)}H${x(from)}Z`;
    for (const step of steps) {
      const begin = step.end - step.length;
      const together = step.mode === "overlapped";
      const verifyFrom = together ? begin : begin + step.draft;
      const verifyTo = Math.min(step.end, verifyFrom + step.verify);
      if (step.draft > 0) found.draft += box(begin, begin + step.draft, 8, 16);
      found[`verify ${step.mode}`] += box(verifyFrom, verifyTo, 34, 20);
      if (step.end - verifyTo > 0.2) found.rest += box(verifyTo, step.end, 42, 4);
      const height = ((bottom - 66) * step.rows) / tallest;
      found.rows += box(begin, step.end, bottom - height, height);
    }
    for (const [kind, d] of Object.entries(found)) set(this.paths[kind], { d: d || "M0 0" });
    const tick = ceiling(span / 4.5);
    let lines = `M${this.left} ${bottom + 0.5}H${this.width}`;
    this.ticks.forEach((text, index) => {
      const at = last - index * tick;
      const there = at >= first && steps.length > 0;
      set(text, { visibility: there ? "visible" : "hidden", x: Math.min(x(at), this.width - 12) });
      say(text, index ? `−${index * tick} ms` : "now");
      if (there) lines += `M${x(at)} 4V${bottom}`;
    });
    set(this.grid, { d: lines });
    set(this.most, { x: this.left - 6, y: 97 });
    say(this.most, steps.length ? `≤ ${tallest}` : "");
  }
}
