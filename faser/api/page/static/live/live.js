// The live view: what the server does now and what it did in the last two minutes, from the samples of GET /live.

import { h } from "../dom.js";
import { Board, SPAN_S } from "./board.js";
import { say, set } from "./charts.js";
import { LiveConnection } from "./connection.js";
import { addLoad } from "./load.js";
import * as n from "./numbers.js";
import { addRequests } from "./requests.js";
import { addSpeculation } from "./speculation.js";

const SAY_EVERY_MS = 30000;

export function mountLive(root) {
  const view = new LiveView(root);
  return { show: () => view.connection.open(), hide: () => view.connection.close() };
}

class LiveView {
  constructor(root) {
    this.server = null;
    this.held = false;
    this.later = []; // samples that came while the view is held
    this.saidAt = -Infinity;
    this.build(root);
    this.connection = new LiveConnection({
      message: (message) => this.take(message),
      state: (state) => this.showState(state),
    });
  }

  build(root) {
    this.link = h("p", { class: "link", role: "status", "data-kind": "connecting" }, "connecting");
    this.again = h(
      "button",
      { type: "button", class: "quiet", hidden: true, onclick: () => this.connection.open() },
      "Try now",
    );
    this.facts = h("p", { class: "facts" });
    this.clock = h("output", { class: "clock", for: "live-at" }, "now");
    this.slider = h("input", {
      id: "live-at",
      type: "range",
      min: -SPAN_S,
      max: 0,
      step: 1,
      value: 0,
      "aria-label": "Time shown",
      "aria-valuetext": "now",
      oninput: () => this.board.lookAt(Number(this.slider.value) || null),
    });
    this.hold = h(
      "button",
      { type: "button", "aria-pressed": "false", onclick: () => this.setHeld(!this.held) },
      "Hold",
    );
    this.spoken = h("p", { class: "unseen", "aria-live": "polite" });
    const grid = h("div", { class: "live-grid" });
    this.board = new Board(grid, (at) => this.showTime(at));
    root.append(
      h("h2", { class: "unseen" }, "Live server metrics"),
      h(
        "div",
        { class: "live-bar" },
        this.link,
        this.again,
        this.facts,
        h("div", { class: "when" }, this.clock, this.slider, this.hold),
      ),
      grid,
      this.spoken,
    );
    addLoad(this.board);
    addSpeculation(this.board);
    addRequests(this.board);
    root.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.board.lookAt(null);
    });
  }

  // A message of the feed. While the view is held, samples are kept for later.
  take({ server, history, sample }) {
    if (server) this.server = server;
    if (history) {
      this.later = [];
      this.board.samples = history.map(n.filled);
    }
    if (sample) (this.held ? this.later : this.board.samples).push(n.filled(sample));
    this.board.forget();
    if (this.held || !this.board.samples.length) return;
    this.board.redraw();
    this.showFacts(this.board.samples.at(-1));
    this.speak();
  }

  setHeld(held) {
    this.held = held;
    set(this.hold, { "aria-pressed": held });
    if (!held) this.board.samples.push(...this.later.splice(0));
    this.board.forget();
    this.board.redraw();
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
    set(this.board.grid, { "data-stale": kind === "live" ? null : "" });
  }

  showTime(at) {
    const words = at === null ? "now" : `${at} s ago`;
    this.slider.value = at === null ? 0 : -at;
    set(this.slider, { "aria-valuetext": words });
    say(this.clock, words);
  }

  showFacts(last) {
    const engine = this.server?.engine;
    const facts = [
      last.state === "ready" ? "" : `engine ${last.state}`,
      this.server?.model,
      engine && `${n.size(engine.parameters)} parameters`,
      engine && `${engine.dtype}, ${engine.backend} on ${engine.device}`,
      engine && `${n.count(engine.kv_tokens)} KV tokens`,
      `up ${n.uptime(last.t)}`,
      this.server && `FASER ${this.server.version}`,
    ];
    say(this.facts, facts.filter(Boolean).join(" · "));
  }

  // For those who hear the page: not every second.
  speak() {
    if (performance.now() - this.saidAt < SAY_EVERY_MS) return;
    this.saidAt = performance.now();
    const { last, now } = this.board.range(0);
    say(
      this.spoken,
      `${n.count(last.running)} running, ${n.count(last.waiting)} waiting, ` +
        `${n.count(n.rate(now, (each) => each.output))} tokens per second, KV cache ${n.percent(last.kv)} in use`,
    );
  }
}
