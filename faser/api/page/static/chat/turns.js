// One turn of the conversation on the page: what was said, what it took, and what one can do with it.

import { h } from "../dom.js";
import { MarkdownStream } from "./markdown.js";
import { gammaStrip, legend, TokenView, Trace } from "./xray.js";

// How an answer ended that is not complete.
const ENDINGS = { stopped: "Stopped", length: "Cut off at max tokens", failed: "Interrupted" };
const SHARE_OF_TIME = 8;  // drawing takes at most one eighth of the time

// A message of the user's, or the result of a tool. actions: buttons.
export function userTurn(message, actions) {
  const role = message.role === "tool" ? "Tool result" : "You";
  return h("li", { class: `turn ${message.role}` },
    h("div", { class: "head" }, h("h2", {}, role), h("div", { class: "actions" }, ...actions)),
    h("div", { class: "said" }, message.content));
}

// An answer while it arrives. take(chunk) once per chunk; draws at most once a frame, and less often where it is slow.
export class AnswerTurn {
  constructor({ xray, actions }) {
    this.message = { role: "assistant", content: "" };
    this.reasoning = "";
    this.calls = [];
    this.trace = new Trace();
    this.usage = null;
    this.metrics = null;
    this.finish = null;
    this.began = performance.now();
    this.firstAt = null;
    this.lastAt = null;
    this.drawn = { content: 0, reasoning: 0 };
    this.pending = false;
    this.xray = xray;
    this.kept = null;  // figures of an answer that was kept

    this.thinking = h("div", { class: "thinking-text" });
    this.fold = h("details", { class: "thinking", hidden: true }, h("summary", {}, "Reasoning"), this.thinking);
    this.prose = h("div", { class: "prose" });
    this.tokens = new TokenView(this.trace);
    this.wires = h("div", { class: "wires" });
    this.callList = h("div", { class: "calls" });
    this.numbers = h("p", { class: "numbers" }, "waiting for the first token");
    this.ending = h("span", { class: "ending", hidden: true });
    this.problem = h("div", { class: "problem", role: "alert", hidden: true });
    this.element = h("li", { class: "turn assistant" },
      h("div", { class: "head" }, h("h2", {}, "Model"), this.ending, h("div", { class: "actions" }, ...actions)),
      this.fold, this.prose, this.tokens.element, this.callList, this.wires, this.numbers, this.problem);
    this.element.ariaBusy = "true";
    this.stream = new MarkdownStream(this.prose);
    this.showXray(xray);
  }

  take(chunk) {
    const now = performance.now();
    if (chunk.usage) this.usage = chunk.usage;
    if (chunk.metrics) this.metrics = chunk.metrics.faser ?? null;
    for (const choice of chunk.choices ?? []) {
      const delta = choice.delta ?? {};
      if (delta.content) this.message.content += delta.content;
      if (delta.reasoning_content) this.reasoning += delta.reasoning_content;
      for (const call of delta.tool_calls ?? []) this.takeCall(call);
      if (choice.trace) this.trace.add(choice.trace);
      if (choice.finish_reason) this.finish = choice.finish_reason;
      if (delta.content || delta.reasoning_content || delta.tool_calls || choice.trace) {
        this.firstAt ??= now;
        this.lastAt = now;
      }
    }
    this.schedule();
  }

  takeCall(part) {
    const call = (this.calls[part.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    if (part.id) call.id = part.id;
    if (part.function?.name) call.function.name += part.function.name;
    if (part.function?.arguments) call.function.arguments += part.function.arguments;
  }

  schedule() {
    if (this.pending) return;
    this.pending = true;
    const wait = Math.max(0, (this.drawMs ?? 0) * SHARE_OF_TIME - 16);
    setTimeout(() => requestAnimationFrame(() => this.draw()), wait);
    if (document.hidden) setTimeout(() => this.pending && this.draw(), wait + 250);  // no frames in a hidden tab
  }

  draw() {
    if (!this.pending) return;
    this.pending = false;
    const began = performance.now();
    if (this.reasoning.length > this.drawn.reasoning) {
      this.fold.hidden = false;
      this.thinking.append(this.reasoning.slice(this.drawn.reasoning));
      this.drawn.reasoning = this.reasoning.length;
    }
    const content = this.message.content ?? "";
    if (content.length > this.drawn.content) {
      this.stream.push(content.slice(this.drawn.content));
      this.drawn.content = content.length;
    }
    if (this.xray) this.tokens.add();
    this.drawCalls();
    this.drawNumbers();
    this.onDrawn?.();
    this.drawMs = performance.now() - began;  // with the layout, which following the text needs
  }

  drawCalls() {
    this.calls.forEach((call, at) => {
      const shown = this.callList.children[at] ?? this.callList.appendChild(h("div", { class: "call" },
        h("span", { class: "call-name" }), h("pre", { class: "code", tabindex: "0" }, h("code"))));
      shown.firstChild.textContent = call.function.name;
      const code = shown.querySelector("code");
      if (code.textContent !== call.function.arguments) code.textContent = call.function.arguments;
    });
  }

  // Figures of the answer, the server's own where it has sent them; null before the first token.
  figures() {
    if (this.kept || this.firstAt === null) return this.kept;
    const tokens = this.usage?.completion_tokens ?? this.trace.tokens.length;
    const seconds = (this.lastAt - this.firstAt) / 1000;
    return {
      prompt: this.usage?.prompt_tokens ?? null,
      cached: this.usage?.prompt_tokens_details?.cached_tokens ?? null,
      tokens,
      ttftMs: this.firstAt - this.began,
      perSecond: tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : null,
      steps: this.metrics?.steps ?? (this.trace.steps.length || null),
      verified: this.metrics?.verified ?? this.trace.verified,
      accepted: this.metrics?.accepted ?? this.trace.accepted,
    };
  }

  drawNumbers() {
    const now = this.figures();
    if (now === null) return;
    const parts = [];
    const add = (value, unit, title) => parts.push(h("span", { title }, h("b", {}, value), ` ${unit}`));
    if (now.perSecond !== null) add(now.perSecond.toFixed(now.perSecond < 100 ? 1 : 0), "tok/s", "output tokens per second, after the first");
    if (now.tokens) add(String(now.tokens), "tokens", "tokens of the answer");
    if (now.prompt !== null) add(String(now.prompt), now.cached ? `prompt (${now.cached} cached)` : "prompt", "tokens of the prompt");
    add(now.ttftMs < 1000 ? `${now.ttftMs.toFixed(0)} ms` : `${(now.ttftMs / 1000).toFixed(1)} s`, "to first", "time to the first token");
    if (now.steps) add((now.tokens / now.steps).toFixed(2), "per step", "mean tokens per model step");
    if (now.verified) add(`${Math.round((100 * now.accepted) / now.verified)} %`, `of ${now.verified} draft tokens accepted`, "share of the verified draft tokens that were accepted");
    this.numbers.replaceChildren(...parts);
    if (this.xray) this.drawWires();
  }

  drawWires() {
    if (!this.trace.steps.length) {
      this.wires.replaceChildren(h("p", { class: "hint" }, "This answer has no trace: “Trace tokens” was off, or the page was reloaded since."));
      return;
    }
    this.wires.replaceChildren(gammaStrip(this.trace), legend(this.trace));
  }

  showXray(on) {
    this.xray = on;
    const traced = on && (this.trace.tokens.length > 0 || this.finish === null);
    this.tokens.element.hidden = !traced;
    this.prose.hidden = traced;
    this.wires.hidden = !on;
    if (on) {
      this.tokens.add();
      if (this.figures()) this.drawWires();
    }
  }

  // Whether nothing came of it.
  get isEmpty() {
    return !this.message.content && !this.calls.length && [null, "stopped", "failed"].includes(this.finish);
  }

  // What is left of the answer after a reload: all but its trace.
  keep() {
    return { message: this.message, reasoning: this.reasoning, finish: this.finish ?? "failed", figures: this.figures() };
  }

  restore({ message, reasoning, finish, figures }) {
    this.message = message;
    this.calls = message.tool_calls ?? [];
    this.reasoning = reasoning;
    this.kept = figures;
    this.pending = true;
    this.draw();
    this.end(finish);
  }

  fail(words, retry) {
    this.problem.replaceChildren(h("p", {}, words), retry);
    this.problem.hidden = false;
  }

  // finish: how it ended, where the server has not said so: "stopped" by the reader, or "failed".
  end(finish = "failed") {
    this.pending = true;
    this.draw();
    this.stream.end();
    this.finish ??= finish;
    this.ending.textContent = ENDINGS[this.finish] ?? "";
    this.ending.hidden = !this.ending.textContent;
    if (!this.figures()) this.numbers.textContent = "";
    this.showXray(this.xray);
    this.element.ariaBusy = "false";
    if (this.calls.length) this.message.tool_calls = this.calls;
    if (this.calls.length && !this.message.content) this.message.content = null;
  }
}
