// X-ray: the tokens of an answer coloured by where they come from, and the steps that made them.

import { h, s } from "../dom.js";

// Letters mark a step's drafter for those who do not see colours.
const DRAFTERS = {
  ngram: ["n", "n-gram", "copied from this conversation"],
  ngram_model: ["w", "n-gram model", "from the word pairs that this model likes"],
  suffix: ["s", "suffix", "from what was said after the same words before"],
  draft_model: ["m", "draft model", "by a smaller model"],
  eagle3: ["h", "head", "by a small model that reads the model's hidden states"],
  mtp: ["t", "MTP layer", "by the model's own layer for drafting"],
  dflash: ["b", "block drafter", "a block at once, by a small model that reads the model's hidden states"],
  dspark: ["k", "block drafter", "a block at once, by a small model that reads the model's hidden states"],
  grammar: ["g", "grammar", "all that the answer's format allows"],
};
const OWN = {
  corrected: ["corrected", "the model's own, where it refused a draft token"],
  bonus: ["bonus", "the model's own, after a draft that was accepted as a whole"],
  plain: ["plain", "the model's own, in a step without a draft"],
};
const MOST_BARS = 160;
const STRIP = { width: 640, height: 36, narrowest: 4, widest: 9 };

// What the trace says, added up. A step: {drafter, gamma, accepted}.
export class Trace {
  constructor() {
    this.steps = [];
    this.tokens = [];  // {text, origin, drafter, gamma, accepted, first}
    this.origins = new Map();  // "accepted ngram", "corrected", …: number of tokens
    this.verified = 0;
    this.accepted = 0;
  }

  add({ drafter, gamma, accepted, tokens }) {
    this.steps.push({ drafter, gamma, accepted });
    this.verified += gamma;
    this.accepted += accepted;
    tokens.forEach(({ text, origin }, at) => {
      this.tokens.push({ text, origin, drafter, gamma, accepted, first: at === 0 });
      const key = origin === "accepted" ? `accepted ${drafter}` : origin;
      this.origins.set(key, (this.origins.get(key) ?? 0) + 1);
    });
  }

  get gammaMean() {
    return this.steps.length ? this.verified / this.steps.length : 0;
  }
}

// The tokens as elements, one after the other; add() shows those that have come since.
export class TokenView {
  constructor(trace) {
    this.trace = trace;
    this.shown = 0;
    this.element = h("div", { class: "tokens" });
  }

  add() {
    const made = document.createDocumentFragment();
    for (; this.shown < this.trace.tokens.length; this.shown += 1) {
      const token = this.trace.tokens[this.shown];
      if (token.first && token.gamma) {
        const letter = DRAFTERS[token.drafter]?.[0] ?? "?";
        made.append(h("span", { class: `step ${colour(token.drafter)}`, "aria-hidden": "true", "data-step": `${letter}${token.accepted}/${token.gamma}` }));
      }
      if (token.text === "") continue;
      made.append(h("span", { class: classes(token), title: describe(token) }, token.text));
    }
    this.element.append(made);
  }
}

function classes({ text, origin, drafter }) {
  const own = origin === "accepted" ? `accepted ${colour(drafter)}` : origin;
  return text.startsWith("\n") && origin !== "plain" ? `token ${own} break` : `token ${own}`;
}

function colour(drafter) {
  return `by-${Object.hasOwn(DRAFTERS, drafter) ? drafter : "other"}`;
}

function describe({ origin, drafter, gamma, accepted }) {
  if (origin === "plain") return "plain: a step without a draft";
  const name = DRAFTERS[drafter]?.[1] ?? drafter;
  const step = `${accepted} of ${gamma} by ${name} accepted in this step`;
  return origin === "accepted" ? `drafted by ${name}; ${step}` : `${origin}: ${OWN[origin][1]}; ${step}`;
}

// Legend with counts: <ul> of origins.
export function legend(trace) {
  const items = [];
  for (const [name, [letter, label, hint]] of Object.entries(DRAFTERS)) {
    const count = trace.origins.get(`accepted ${name}`);
    if (count) items.push(item(`token accepted ${colour(name)}`, `${label} (${letter})`, count, hint, `accepted ${name}`));
  }
  for (const [name, [label, hint]] of Object.entries(OWN)) {
    const count = trace.origins.get(name);
    if (count) items.push(item(`token ${name}`, label, count, hint, name));
  }
  return h("ul", { class: "legend", "aria-label": "Tokens by origin" }, ...items);
}

function item(classes, label, count, hint, origin) {
  return h("li", { title: hint, "data-origin": origin, "data-count": count },
    h("span", { class: classes, "aria-hidden": "true" }, "abc"), ` ${label} `, h("b", {}, String(count)));
}

// γ of each step as bars; the part that was accepted is filled. Many steps share a bar, which then has their means.
export function gammaStrip(trace) {
  const per = Math.max(1, Math.ceil(trace.steps.length / MOST_BARS));
  const bars = [];
  for (let at = 0; at < trace.steps.length; at += per) {
    const steps = trace.steps.slice(at, at + per);
    const mean = (of) => steps.reduce((sum, each) => sum + of(each), 0) / steps.length;
    bars.push({ gamma: mean((each) => each.gamma), accepted: mean((each) => each.accepted), drafter: steps.find((each) => each.drafter)?.drafter });
  }
  const top = Math.max(4, ...bars.map((each) => each.gamma));
  const { height } = STRIP;
  const pitch = Math.max(STRIP.narrowest, Math.min(STRIP.widest, Math.floor(STRIP.width / bars.length)));
  const width = bars.length * pitch;
  const bar = (classes, at, value) => {
    const tall = Math.max(1, (value / top) * height);
    return s("rect", { class: classes, x: at * pitch, y: height - tall, width: pitch - 1, height: tall });
  };
  const rects = bars.flatMap(({ gamma, accepted, drafter }, at) => [
    bar("none", at, 0),
    gamma > 0 && bar(`drafted ${colour(drafter)}`, at, gamma),
    accepted > 0 && bar(`kept ${colour(drafter)}`, at, accepted),
  ]);
  const words = `γ of ${trace.steps.length} steps: ${trace.gammaMean.toFixed(2)} on average, at most ${Math.max(0, ...trace.steps.map((each) => each.gamma))}; ` +
    `${trace.accepted} of ${trace.verified} draft tokens accepted`;
  return h("figure", { class: "gamma" },
    s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": words, preserveAspectRatio: "none" }, ...rects),
    h("figcaption", {}, words));
}
