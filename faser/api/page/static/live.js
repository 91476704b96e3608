// The live view: what the server does now and what it did in the last two minutes, from the samples of GET /live.

import { h } from "./dom.js";
import { BarChart, FlowChart, HeatChart, StepChart, TimeChart, say, set } from "./live_charts.js";
import { LiveConnection } from "./live_connection.js";
import * as n from "./live_numbers.js";

const SPAN_S = 120;
const RECENT_S = 30;  // of what is added up: drafts, gammas, depths, modes
const NOW_S = 3;  // of rates
const SAY_EVERY_MS = 30000;
const DRAFTERS = ["draft_model", "layer_skip", "suffix", "ngram", "grammar", "prediction"];
const PERCENTILES = ["p50", "p95", "p99"];

export function mountLive(root) {
  const view = new LiveView(root);
  return { show: () => view.show(), hide: () => view.hide() };
}

class LiveView {
  constructor(root) {
    this.samples = [];
    this.server = null;
    this.at = null;  // seconds ago that the numbers are of; null: now
    this.frame = 0;
    this.heldUntil = false;
    this.saidAt = -Infinity;
    this.panels = [];
    this.build(root);
    this.connection = new LiveConnection({
      message: (message) => this.take(message),
      state: (state) => this.showState(state),
    });
  }

  show() {
    this.connection.open();
  }

  hide() {
    this.connection.close();
  }

  // What the server sends

  take({ server, history, sample }) {
    if (server) this.server = server;
    if (history) this.samples = history.map(n.filled);
    if (sample) this.samples.push(n.filled(sample));
    while (this.samples.length > SPAN_S + 2) this.samples.shift();
    if (!this.frame && !this.held) this.frame = requestAnimationFrame(() => this.draw());
  }

  showState({ kind, words, retryS }) {
    const texts = {
      connecting: "connecting",
      live: "live",
      paused: "paused while out of sight",
      waiting: `${words}; trying again in ${Math.round(retryS)} s`,
      off: words,
    };
    set(this.link, { "data-kind": kind });
    say(this.link, texts[kind]);
    this.again.hidden = !["waiting", "off"].includes(kind);
    set(this.grid, { "data-stale": kind === "live" ? null : "" });
  }

  // The page

  build(root) {
    this.link = h("p", { class: "link", role: "status", "data-kind": "connecting" }, "connecting");
    this.again = h("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.connection.open() }, "Try now");
    this.hold = h("button", { type: "button", "aria-pressed": "false", onclick: () => this.setHeld(!this.held) }, "Hold");
    this.facts = h("p", { class: "facts" });
    this.clock = h("output", { class: "clock", for: "live-at" }, "now");
    this.slider = h("input", {
      id: "live-at", type: "range", min: -SPAN_S, max: 0, step: 1, value: 0, "aria-label": "Time that the numbers are of",
      "aria-valuetext": "now", oninput: () => this.lookAt(Number(this.slider.value) || null),
    });
    this.spoken = h("p", { class: "unseen", "aria-live": "polite" });
    this.grid = h("div", { class: "live-grid" });
    root.append(
      h("h2", { class: "unseen" }, "What the server does now"),
      h("div", { class: "live-bar" }, this.link, this.again, this.facts,
        h("div", { class: "when" }, this.clock, this.slider, this.hold)),
      this.grid, this.spoken);
    this.tiles();
    this.speculation();
    this.requests();
    root.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.at !== null) this.lookAt(null);
    });
  }

  setHeld(held) {
    this.held = held;
    set(this.hold, { "aria-pressed": held });
    if (!held) this.draw();
  }

  // A chart with a title, a line of numbers and a table. draw(range) draws it and returns {words, columns, rows}.
  panel({ title, hint = "", className = "", charts = [], big = null, key = null, draw }) {
    const table = h("table");
    const details = h("details", { class: "numbers" }, h("summary", {}, h("span", { class: "unseen" }, `${title} in `), "numbers"), table);
    const section = h("section", { class: `panel ${className}` },
      h("header", {}, h("h3", {}, title), hint && h("span", { class: "hint" }, hint), details),
      big && h("p", { class: "big" }, big.value, " ", big.unit, big.side), key, ...charts.map(({ svg }) => svg));
    details.addEventListener("toggle", () => this.draw());
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
    const big = { value: h("span", { class: "value" }), unit: h("span", { class: "unit" }), side: h("span", { class: "side" }) };
    this.pointer(chart);
    this.panel({
      title, className: `tile ${className ?? ""}`, charts: [chart], big, key: key && legend(key),
      draw: (range) => {
        const [value, unit, side] = number(range);
        say(big.value, value);
        say(big.unit, unit);
        say(big.side, side);
        chart.draw(this.points(values), this.at);
        return { words: `${value} ${unit}, ${side}`, columns: ["", ...columns], rows: this.moments().map(([when, part]) => [when, ...rows(part)]) };
      },
    });
  }

  tiles() {
    const perSecond = (value) => `${n.count(value)}/s`;
    this.tile({
      title: "Output", options: { format: perSecond },
      series: [{ kind: "area", class: "own", stacked: true }, { kind: "area", class: "gained", stacked: true }],
      key: [["own", "the model's own tokens"], ["gained", "accepted drafts"]],
      number: ({ now }) => [n.count(n.rate(now, (each) => each.output)), "tokens/s", `${n.count(n.rate(now, (each) => each.prompt - each.cached))} prompt tokens/s`],
      values: (each) => [Math.max(0, each.output - n.accepted(each)) / each.dt, Math.min(each.output, n.accepted(each)) / each.dt],
      columns: ["output tokens/s", "of them accepted drafts", "prompt tokens/s"],
      rows: ({ now }) => [n.count(n.rate(now, (each) => each.output)), n.count(n.rate(now, n.accepted)), n.count(n.rate(now, (each) => each.prompt - each.cached))],
    });
    this.tile({
      title: "Requests", options: { format: n.count, least: 4 },
      series: [{ kind: "area", class: "own", stacked: true }, { kind: "area", class: "waits", stacked: true }],
      key: [["own", "running"], ["waits", "waiting"]],
      number: ({ last }) => [n.count(last?.running), "running", `${n.count(last?.waiting)} waiting`],
      values: (each) => [each.running, each.waiting],
      columns: ["running", "waiting"],
      rows: ({ last }) => [n.count(last?.running), n.count(last?.waiting)],
    });
    this.tile({
      title: "Tokens per sequence and step", options: { format: (value) => n.fraction(value, 1), least: 2 },
      series: [{ kind: "area", class: "gained" }, { kind: "line", class: "even" }],
      key: [["gained", "with drafts"], ["even", "without, 1"]],
      number: ({ now, recent }) => [
        n.fraction(n.tokensPerStep(now)), "tokens",
        `${n.percent(n.share(n.total(recent, n.accepted), n.total(recent, (each) => n.drafted(each, "verified"))))} of drafts accepted`,
      ],
      values: (each) => {
        const tokens = n.tokensPerStep([each]);
        return [tokens, tokens && 1];
      },
      columns: ["tokens per step", "drafts accepted"],
      rows: ({ now }) => [n.fraction(n.tokensPerStep(now)), n.percent(n.share(n.total(now, n.accepted), n.total(now, (each) => n.drafted(each, "verified"))))],
    });
    this.latency("Time to first token", "ttft", "requests");
    this.latency("Time per output token", "tpot", "requests");
    this.tile({
      title: "KV cache", options: { format: n.percent, least: 0.05 },
      series: [{ kind: "area", class: "own" }],
      key: [["own", "blocks in use"]],
      number: ({ last, recent }) => {
        const hits = n.share(n.total(recent, (each) => each.hits), n.total(recent, (each) => each.queries));
        return [n.percent(last?.kv ?? null), "in use", `${hits === null ? "no" : n.percent(hits)} prefix hits`];
      },
      values: (each) => [each.kv],
      columns: ["in use", "prefix hits", "preemptions"],
      rows: ({ last, now }) => [
        n.percent(last?.kv ?? null), n.percent(n.share(n.total(now, (each) => each.hits), n.total(now, (each) => each.queries))),
        n.count(n.total(now, (each) => each.preemptions)),
      ],
    });
  }

  latency(title, kind, what) {
    const of = (sample) => sample?.latencies[kind] ?? [0, null, null, null];
    this.tile({
      title, options: { format: n.durationText },
      series: [{ kind: "line", class: "p99" }, { kind: "line", class: "p95" }, { kind: "line", class: "p50" }],
      key: [["p50", "p50"], ["p95", "p95"], ["p99", "p99"]],
      number: ({ last }) => {
        const [, p50, p95, p99] = of(last);
        const [value, unit] = n.duration(p50);
        return [value, unit ? `${unit} p50` : "", p50 === null ? `no ${what} in ${RECENT_S} s` : `p95 ${n.durationText(p95)} · p99 ${n.durationText(p99)}`];
      },
      values: (each) => of(each).slice(1).reverse(),
      columns: [...PERCENTILES, `${what} of ${RECENT_S} s`],
      rows: ({ last }) => [...of(last).slice(1).map(n.durationText), n.count(of(last)[0])],
    });
  }

  speculation() {
    const flow = new FlowChart({});
    this.panel({
      title: "What became of the drafts", hint: `tokens of ${RECENT_S} s`, className: "wide", charts: [flow],
      draw: ({ recent }) => {
        const found = n.drafters(recent);
        const names = [...DRAFTERS, ...Object.keys(found)].filter((name, place, all) => found[name] && all.indexOf(name) === place);
        const all = { drafted: 0, pruned: 0, verified: 0, accepted: 0 };
        for (const name of names) for (const kind of Object.keys(all)) all[kind] += found[name][kind];
        const wasted = all.verified - all.accepted;
        const of = (part) => n.percent(n.share(part, all.verified));
        flow.draw(names.map((name) => ({ class: `by-${name.replaceAll("_", "-")}`, ...found[name] })), {
          drafted: `drafted ${n.count(all.drafted)}`, judged: `judged ${n.count(all.verified)}`, pruned: `pruned ${n.count(all.pruned)}`,
          accepted: `accepted ${n.count(all.accepted)} · ${of(all.accepted)}`, wasted: `wasted ${n.count(wasted)} · ${of(wasted)}`,
        });
        fillLegend(this.drafterKey, names.map((name) => [`by-${name.replaceAll("_", "-")}`, `${name.replaceAll("_", " ")} ${n.percent(n.share(found[name].drafted, all.drafted))}`]));
        return {
          words: names.length ? `${n.count(all.drafted)} drafted, ${n.count(all.verified)} judged, ${n.count(all.accepted)} accepted` : "no drafts",
          columns: ["drafter", "drafted", "pruned", "judged", "accepted", "predicted", "wasted"],
          rows: names.map((name) => {
            const own = found[name];
            return [name, n.count(own.drafted), n.count(own.pruned), n.count(own.verified), n.count(own.accepted), n.count(own.expected), n.count(own.verified - own.accepted)];
          }),
        };
      },
    }).querySelector("header").after(this.drafterKey = h("ul", { class: "legend" }));

    const heat = new HeatChart({ span: SPAN_S });
    this.pointer(heat, heat.left, heat.side);
    this.panel({
      title: "γ, draft tokens judged in a step", hint: "share by second", charts: [heat],
      draw: ({ recent }) => {
        const counts = n.gammas(recent);
        const rows = Math.max(5, ...this.samples.map((each) => each.speculation?.gammas?.length ?? 0));
        heat.draw(this.points((each) => each.speculation?.gammas ?? []).map(({ ago, dt, values }) => ({ ago, dt, counts: values })), rows, counts, `${RECENT_S} s`, this.at);
        const all = n.sum(counts);
        return {
          words: all ? `mean ${n.fraction(n.sum(counts.map((count, gamma) => gamma * count)) / all)} in the last ${RECENT_S} s` : "no steps",
          columns: ["γ", "sequences × steps", "share"],
          rows: counts.map((count, gamma) => [gamma, n.count(count), n.percent(n.share(count, all))]),
        };
      },
    });

    const steps = new StepChart({});
    this.panel({
      title: "Steps", hint: "the last ones, one after the other", className: "full", charts: [steps],
      key: legend([["step-draft", "draft"], ["step-plain", "verify: plain"], ["step-serial", "verify: drafts made before"], ["step-overlapped", "verify: drafts made meanwhile"], ["step-rest", "host"]]),
      draw: ({ upTo }) => {
        const found = [...upTo].reverse().find((each) => each.timeline.length)?.timeline ?? [];
        const made = n.steps(found);
        steps.draw(made);
        const mean = (value) => (made.length ? n.durationText(n.total(made, value) / made.length) : n.NONE);
        return {
          words: made.length ? `${made.length} steps of ${mean((each) => each.length)}, ${mean((each) => each.draft)} of it drafting` : "none yet",
          columns: ["step", "length", "drafting", "verifying", "sequences", "rows", "mode"],
          rows: made.slice(-12).reverse().map((each, place) => [place ? `−${place}` : "last", n.durationText(each.length), n.durationText(each.draft), n.durationText(each.verify), n.count(each.sequences), n.count(each.rows), each.mode]),
        };
      },
    });

    const depth = new BarChart({ left: 22, right: 96 });
    this.panel({
      title: "Accepted by depth", hint: `drafts of ${RECENT_S} s`, charts: [depth],
      draw: ({ recent }) => {
        const found = n.depths(recent).filter(({ tried }) => tried > 0);
        const shown = found.slice(0, 8);
        depth.draw(shown.map(({ tried, accepted }, place) => ({
          name: String(place + 1), words: `${n.percent(accepted / tried)} of ${n.count(tried)}`, parts: [[accepted / tried, "good"]],
        })));
        return {
          words: found.map(({ tried, accepted }, place) => `depth ${place + 1} ${n.percent(accepted / tried)}`).join(", ") || "no drafts",
          columns: ["depth", "drafted so far", "accepted", "share"],
          rows: found.map(({ tried, accepted }, place) => [place + 1, n.count(tried), n.count(accepted), n.percent(accepted / tried)]),
        };
      },
    });

    this.tile({
      title: "Step time", options: { format: n.durationText },
      series: [{ kind: "area", class: "own" }, { kind: "line", class: "predicted" }],
      key: [["own", "measured"], ["predicted", "predicted"]],
      number: ({ now, recent }) => {
        const ms = n.share(n.total(now, (each) => each.speculation?.measured_ms), n.total(now, (each) => each.steps));
        const error = n.share(n.total(recent, (each) => each.speculation?.predicted_ms), n.total(recent, (each) => each.speculation?.measured_ms));
        const [value, unit] = n.duration(ms);
        return [value, unit, error === null ? "no steps" : `predicted ${error >= 1 ? "+" : "−"}${n.percent(Math.abs(error - 1))}`];
      },
      values: (each) => (each.steps && each.speculation ? [(each.speculation.measured_ms ?? 0) / each.steps, (each.speculation.predicted_ms ?? 0) / each.steps] : [null, null]),
      columns: ["measured", "predicted", "steps"],
      rows: ({ now }) => {
        const steps = n.total(now, (each) => each.steps);
        return [...["measured_ms", "predicted_ms"].map((name) => n.durationText(n.share(n.total(now, (each) => each.speculation?.[name]), steps))), n.count(steps)];
      },
    });

    this.tile({
      title: "Mode", options: { format: n.percent, most: 1, least: 1 },
      series: ["plain", "serial", "overlapped"].map((mode) => ({ kind: "area", class: `mode-${mode}`, stacked: true })),
      key: [["mode-plain", "no drafts"], ["mode-serial", "drafts before the step"], ["mode-overlapped", "drafts during it"]],
      number: ({ last, recent }) => {
        const spec = last?.speculation;
        const why = Object.entries(n.merged(recent, (each) => each.speculation?.bypasses)).sort(([, one], [, other]) => other - one)[0];
        return [spec?.mode ?? n.NONE, spec ? `· policy ${spec.policy}` : "", why ? `drafts left out: ${why[0]}` : ""];
      },
      values: (each) => {
        const modes = modeShares([each]);
        return modes ? ["plain", "serial", "overlapped"].map((mode) => modes[mode]) : [null, null, null];
      },
      columns: ["plain", "serial", "overlapped"],
      rows: ({ now }) => ["plain", "serial", "overlapped"].map((mode) => n.percent(modeShares(now)?.[mode] ?? null)),
    });
  }

  requests() {
    const slo = new BarChart({ left: 128, right: 96 });
    const none = h("p", { class: "empty" }, "No request that ended named a latency target (speculative.slo).");
    this.panel({
      title: "Latency targets met", hint: "requests of two minutes, by class", charts: [slo],
      draw: ({ upTo }) => {
        const found = Object.entries(n.attainment(upTo)).flatMap(([name, targets]) => Object.entries(targets).map(([target, [met, missed]]) => [name, target, met, missed]));
        none.hidden = found.length > 0;
        slo.svg.toggleAttribute("hidden", !found.length);
        slo.draw(found.map(([name, target, met, missed]) => ({
          name: `${name} ${target}`, words: `${n.percent(met / (met + missed))} of ${n.count(met + missed)}`,
          parts: [[met / (met + missed), "good"], [missed / (met + missed), "missed"]],
        })));
        return {
          words: found.map(([name, target, met, missed]) => `${name} ${target} ${n.percent(met / (met + missed))}`).join(", ") || "no targets",
          columns: ["class", "target", "met", "missed"], rows: found.map(([name, target, ...counts]) => [name, target, ...counts.map(n.count)]),
        };
      },
    }).append(none);

    const table = h("table", { class: "shown" });
    this.panel({
      title: "Latency", hint: `of ${RECENT_S} s, ±2 %`, className: "half",
      draw: ({ last }) => {
        const columns = ["", ...PERCENTILES, "count"];
        const rows = [["first token", "ttft"], ["per output token", "tpot"], ["between chunks", "itl"]].map(([name, kind]) => {
          const [count, ...values] = last?.latencies[kind] ?? [0, null, null, null];
          return [name, ...values.map(n.durationText), n.count(count)];
        });
        fillTable(table, "Latency", columns, rows);
        return { words: "", columns, rows };
      },
    }).append(table);

    const ended = h("table", { class: "shown" });
    this.panel({
      title: "Requests ended", hint: "in two minutes", className: "half",
      draw: ({ upTo }) => {
        const counts = n.merged(upTo, (each) => each.finished);
        const rows = [["stopped by themselves", counts.stop], ["at their length", counts.length], ["aborted", counts.abort], ["failed", counts.error], ["refused", n.total(upTo, (each) => each.rejected)]]
          .map(([name, count]) => [name, n.count(count ?? 0)]);
        fillTable(ended, "Requests ended", ["", "requests"], rows);
        return { words: "", columns: ["", "requests"], rows };
      },
    }).append(ended);
    for (const shown of this.grid.querySelectorAll(".half .numbers")) shown.remove();
  }

  // Time: the numbers are of now, or of the second that the pointer or the slider is at

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
    const words = at === null ? "now" : `${at} s ago`;
    this.slider.value = at === null ? 0 : -at;
    set(this.slider, { "aria-valuetext": words });
    say(this.clock, words);
    this.frame ||= requestAnimationFrame(() => this.draw());
  }

  get end() {
    return this.samples.at(-1)?.t ?? 0;
  }

  points(values) {
    const end = this.end;
    return this.samples.filter((each) => end - each.t <= SPAN_S).map((each) => ({ ago: end - each.t, dt: each.dt, values: values(each) }));
  }

  // The samples that numbers of `at` seconds ago are made of.
  range(at) {
    const until = this.end - at + 0.5;
    const upTo = this.samples.filter((each) => each.t <= until);
    return {
      upTo, last: upTo.at(-1) ?? null, now: upTo.filter((each) => each.t > until - NOW_S),
      recent: upTo.filter((each) => each.t > until - RECENT_S),
    };
  }

  moments() {
    return [["now", 0], ["−10 s", 10], ["−30 s", 30], ["−60 s", 60], ["−90 s", 90]]
      .map(([words, at]) => [words, this.range(at)]).filter(([, { last }]) => last);
  }

  draw() {
    this.frame = 0;
    if (!this.samples.length) return;
    const range = this.range(this.at ?? 0);
    for (const panel of this.panels) panel(range);
    this.showFacts(range);
    if (performance.now() - this.saidAt >= SAY_EVERY_MS) {
      this.saidAt = performance.now();
      const { last, now } = range;
      this.spoken.textContent = `${n.count(last.running)} running, ${n.count(last.waiting)} waiting, `
        + `${n.count(n.rate(now, (each) => each.output))} tokens per second, KV cache ${n.percent(last.kv)} in use`;
    }
  }

  showFacts({ last }) {
    const { server } = this;
    const engine = server?.engine;
    const state = last.state === "ready" ? "" : `engine ${last.state}`;
    const facts = [
      state, server?.model, engine && `${n.size(engine.parameters)} parameters`, engine && `${engine.dtype}, ${engine.backend} on ${engine.device}`,
      engine && `${n.count(engine.kv_tokens)} KV tokens`, `up ${n.uptime(this.end)}`, server && `FASER ${server.version}`,
    ];
    say(this.facts, facts.filter(Boolean).join(" · "));
  }
}

function modeShares(samples) {
  const modes = n.merged(samples, (each) => each.speculation?.modes);
  const all = n.sum(Object.values(modes));
  if (!all) return null;
  const found = { plain: 0, serial: 0, overlapped: 0 };
  for (const [mode, steps] of Object.entries(modes)) found[n.MODES[mode] ?? "overlapped"] += steps / all;
  return found;
}

function legend(entries) {
  const list = h("ul", { class: "legend" });
  fillLegend(list, entries);
  return list;
}

function fillLegend(list, entries) {
  while (list.childElementCount > entries.length) list.lastChild.remove();
  while (list.childElementCount < entries.length) list.append(h("li", {}, h("span", { class: "swatch", "aria-hidden": "true" }), h("span")));
  entries.forEach(([style, words], place) => {
    const [swatch, text] = list.children[place].children;
    set(swatch, { class: `swatch ${style}` });
    say(text, words);
  });
}

function fillTable(table, title, columns, rows) {
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
