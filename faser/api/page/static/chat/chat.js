// The chat: one conversation with the model. It lives in this tab's memory and nowhere else.

import { postJson, request, ServerError } from "../api.js";
import { h } from "../dom.js";
import { Settings } from "./settings.js";
import { KINDS, snippet } from "./snippets.js";
import { dataOf } from "./sse.js";
import { AnswerTurn, userTurn } from "./turns.js";

const SAMPLES = [
  "Explain speculative decoding to a child, in five sentences.",
  "Write a Python function that checks whether a text is a palindrome, with a test.",
  "List the planets as a Markdown table: name, moons, length of a year.",
];

class Chat {
  constructor(root) {
    this.turns = [];  // {message, element, answer: AnswerTurn or undefined}
    this.settings = new Settings();
    this.lastBody = null;
    this.running = null;  // AbortController of the answer that arrives
    this.xray = false;

    this.list = h("ol", { class: "turns", "aria-label": "Conversation" });
    this.empty = h("div", { class: "empty" },
      h("h2", {}, "Ask the model something."),
      h("p", {}, "The conversation stays in this tab's memory and is gone when the tab is. Requests carry a cache salt of this tab, so nothing is shared with other clients."),
      h("div", { class: "samples" }, ...SAMPLES.map((text) => h("button", { type: "button", onclick: () => this.say(text) }, text))));
    this.said = h("div", { class: "unseen", role: "status", "aria-live": "polite" });
    this.input = h("textarea", { id: "ask", rows: 2, placeholder: "Message", "aria-label": "Message", "aria-describedby": "ask-hint", enterkeyhint: "send" });
    this.send = h("button", { class: "primary", type: "submit" }, "Send");
    this.stop = h("button", { type: "button", class: "stop", hidden: true, onclick: () => this.running?.abort() }, "Stop");
    this.xrayButton = h("button", { type: "button", class: "toggle", "aria-pressed": "false", onclick: () => this.showXray(!this.xray) }, "X-ray");
    this.again = h("button", { type: "button", class: "quiet", disabled: true, onclick: () => this.regenerate() }, "Regenerate");
    this.clearButton = h("button", { type: "button", class: "quiet", disabled: true, onclick: () => this.clear() }, "Clear");
    this.exportButton = h("button", { type: "button", class: "quiet", disabled: true, onclick: () => this.exporter.showModal() }, "Export");
    this.form = h("form", { class: "compose", onsubmit: (event) => { event.preventDefault(); this.submit(); } },
      this.input,
      h("div", { class: "compose-row" }, this.xrayButton, this.again, this.clearButton, this.exportButton,
        h("span", { id: "ask-hint", class: "hint" }, "Enter sends, Shift+Enter breaks the line, Esc stops"), this.stop, this.send));
    this.panel = h("details", { class: "panel", open: matchMedia("(min-width: 961px)").matches },
      h("summary", {}, "Settings"), this.settings.element);
    matchMedia("(min-width: 961px)").addEventListener("change", (event) => { this.panel.open = event.matches; });
    this.exporter = this.makeExporter();
    this.log = h("div", { class: "log" }, this.empty, this.list);
    root.append(h("div", { class: "chat" },
      h("div", { class: "talk" }, this.log, this.said, this.form),
      h("aside", { "aria-label": "Settings" }, this.panel)), this.exporter);

    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.submit();
      }
    });
    root.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.running) this.running.abort();
    });
    addEventListener("faser-models", (event) => this.settings.setModels(event.detail));
    this.askModels();
  }

  // app.js tells of models when it has them; a chat that is opened later asks.
  async askModels() {
    try {
      this.settings.setModels((await (await request("v1/models", { quiet: true })).json()).data);
    } catch {
      // the server is loading, or wants a key
    }
  }

  submit() {
    const text = this.input.value.trim();
    if (!text || this.running) return;
    this.input.value = "";
    this.say(text);
  }

  say(text) {
    if (this.running) return;
    this.addMessage({ role: "user", content: text });
    this.answer();
  }

  addMessage(message) {
    const turn = { message };
    const copy = h("button", { type: "button", class: "quiet", onclick: () => copyText(message.content, copy) }, "Copy");
    const edit = h("button", { type: "button", class: "quiet", onclick: () => this.edit(turn) }, "Edit");
    turn.element = userTurn(message, message.role === "user" ? [copy, edit] : [copy]);
    this.append(turn);
  }

  append(turn) {
    this.turns.push(turn);
    this.list.append(turn.element);
    this.empty.hidden = true;
    this.scroll(true);
    this.refresh();
  }

  // Everything from this turn on goes; its text comes back to be changed.
  edit(turn) {
    if (this.running) return;
    this.input.value = turn.message.content;
    this.cut(this.turns.indexOf(turn));
    this.input.focus();
  }

  cut(at) {
    for (const gone of this.turns.splice(at)) gone.element.remove();
    this.empty.hidden = this.turns.length > 0;
    this.refresh();
  }

  regenerate() {
    if (this.running) return;
    while (this.turns.length && this.turns.at(-1).answer) this.cut(this.turns.length - 1);
    if (this.turns.length) this.answer();
  }

  clear() {
    this.running?.abort();
    this.cut(0);
    this.lastBody = null;
    this.refresh();
    this.input.focus();
  }

  async answer() {
    const copy = h("button", { type: "button", class: "quiet", onclick: () => copyText(answer.message.content ?? "", copy) }, "Copy");
    const answer = new AnswerTurn({ xray: this.xray, actions: [copy] });
    const turn = { message: answer.message, element: answer.element, answer };
    const messages = this.turns.filter((each) => !each.answer?.failed).map((each) => each.message);
    this.append(turn);
    answer.onDrawn = () => this.scroll(false);
    this.running = new AbortController();
    this.refresh();
    this.tell("The model is answering.");
    try {
      this.lastBody = this.settings.body(messages);
      await this.receive(answer, this.lastBody, this.running.signal);
      answer.end();
      this.tell(`The answer is complete: ${answer.message.content ?? "it calls a tool"}`);
    } catch (error) {
      answer.end();
      if (error.name === "AbortError") this.tell("Stopped.");
      else this.fail(turn, error);
      if (!answer.message.content && !answer.calls.length) answer.failed = true;
    }
    this.running = null;
    this.refresh();
    if (answer.calls.length && !answer.failed) this.askForResults(answer);
    this.scroll(false);
  }

  async receive(answer, body, signal) {
    const response = await postJson("v1/chat/completions", body, { signal });
    let complete = false;
    for await (const data of dataOf(response)) {
      if (data === "[DONE]") {
        complete = true;
        break;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(chunk.error.message, { status: chunk.error.code });
      answer.take(chunk);
    }
    if (!complete) throw new ServerError("The connection ended before the answer did.");
  }

  fail(turn, error) {
    const retry = h("button", { type: "button", onclick: () => { this.cut(this.turns.indexOf(turn)); this.answer(); } }, "Try again");
    turn.answer.fail(words(error), retry);
  }

  // A field for the result of each tool call; sending them asks for the next answer.
  askForResults(answer) {
    const fields = answer.calls.map((call) => h("textarea", { rows: 2, "aria-label": `Result of ${call.function.name}`, placeholder: `Result of ${call.function.name}, as the tool would return it` }));
    const form = h("form", { class: "results", onsubmit: (event) => {
      event.preventDefault();
      form.remove();
      answer.calls.forEach((call, at) => this.addMessage({ role: "tool", tool_call_id: call.id, content: fields[at].value }));
      this.answer();
    } }, ...fields, h("button", { type: "submit", class: "primary" }, "Send results"));
    answer.callList.append(form);
    fields[0].focus();
  }

  showXray(on) {
    this.xray = on;
    this.xrayButton.setAttribute("aria-pressed", String(on));
    for (const { answer } of this.turns) answer?.showXray(on);
  }

  refresh() {
    const busy = this.running !== null;
    this.send.hidden = busy;
    this.stop.hidden = !busy;
    this.again.disabled = busy || !this.turns.length;
    this.clearButton.disabled = !this.turns.length;
    this.exportButton.disabled = this.lastBody === null;
  }

  tell(text) {
    this.said.textContent = text;
  }

  // Follows the answer, unless the reader has scrolled up. always: a new turn.
  scroll(always) {
    const box = getComputedStyle(this.log).overflowY === "auto" ? this.log : document.scrollingElement;
    if (always || box.scrollHeight - box.scrollTop - box.clientHeight < 160) box.scrollTop = box.scrollHeight;
  }

  makeExporter() {
    const text = h("pre", { class: "code", tabindex: "0" });
    let kind = "curl";
    const show = () => { text.textContent = this.lastBody ? snippet(kind, this.lastBody) : ""; };
    const kinds = Object.entries(KINDS).map(([name, label]) =>
      h("label", { class: "row" }, h("input", { type: "radio", name: "snippet", value: name, checked: name === kind, onchange: () => { kind = name; show(); } }), label));
    const copy = h("button", { type: "button", class: "primary", onclick: () => copyText(text.textContent, copy) }, "Copy");
    const save = h("button", { type: "button", onclick: () => this.save() }, "Save conversation");
    const close = h("button", { type: "button", class: "quiet", onclick: () => dialog.close() }, "Close");
    const dialog = h("dialog", { class: "export", "aria-labelledby": "export-title" },
      h("h2", { id: "export-title" }, "The last request"),
      h("fieldset", { class: "row" }, h("legend", { class: "unseen" }, "As"), ...kinds),
      text, h("div", { class: "row end" }, close, save, copy));
    const showModal = dialog.showModal.bind(dialog);
    dialog.showModal = () => { show(); showModal(); };
    return dialog;
  }

  save() {
    const conversation = { request: this.lastBody, messages: this.turns.map(({ message }) => message) };
    const url = URL.createObjectURL(new Blob([JSON.stringify(conversation, null, 2)], { type: "application/json" }));
    h("a", { href: url, download: "conversation.json" }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }
}

function words(error) {
  if (!(error instanceof ServerError)) return error.message;
  if (error.retryAfterS && !/try again in/.test(error.message)) return `${error.message} Try again in ${error.retryAfterS} s.`;
  return error.message;
}

async function copyText(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => { button.textContent = label; }, 1200);
}

export function mountChat(root) {
  const chat = new Chat(root);
  return { show: () => { if (matchMedia("(pointer: fine)").matches) chat.input.focus({ preventScroll: true }); }, hide() {} };
}
