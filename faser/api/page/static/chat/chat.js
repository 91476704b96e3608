// The chat: the conversation that this tab shows, and the others that the browser keeps.

import { postJson, request, ServerError } from "../api.js";
import { h } from "../dom.js";
import { Conversations, randomName } from "./conversations.js";
import { copyButton } from "./copy.js";
import { Settings } from "./settings.js";
import { KINDS, snippet } from "./snippets.js";
import { dataOf } from "./sse.js";
import { AnswerTurn, userTurn } from "./turns.js";

// Questions that the default model answers well at temperature 0, its default.
const SAMPLES = [
  "Explain in two sentences what photosynthesis is.",
  "Write a Python function that checks whether a number is even.",
  "Give me three tips for better sleep.",
];
const DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct";

class Chat {
  constructor(root) {
    this.turns = [];  // {message, element, answer: AnswerTurn or undefined}
    this.settings = new Settings();
    this.id = null;
    this.store = new Conversations({ onOpen: (kept) => this.open(kept), onGone: () => this.begin({ save: false }) });
    this.lastBody = null;
    this.running = null;  // AbortController of the answer that arrives
    this.xray = false;

    this.small = h("p", { class: "small-model", hidden: true });
    this.list = h("ol", { class: "turns", "aria-label": "Conversation" });
    this.empty = h("div", { class: "empty" },
      h("h2", {}, "How can I help?"),
      this.small,
      this.store.promise,
      h("p", {}, "Cached prefixes and drafts are private to each conversation."),
      h("div", { class: "samples" }, ...SAMPLES.map((text) => h("button", { type: "button", onclick: () => this.say(text) }, text))));
    this.said = h("div", { class: "unseen", role: "status", "aria-live": "polite" });
    this.input = h("textarea", { id: "ask", rows: 2, placeholder: "Message", "aria-label": "Message", "aria-describedby": "ask-hint", enterkeyhint: "send" });
    this.send = h("button", { class: "primary", type: "submit" }, "Send");
    this.stop = h("button", { type: "button", class: "stop", hidden: true, onclick: () => this.running?.abort() }, "Stop");
    this.xrayButton = h("button", { type: "button", class: "toggle", "aria-pressed": "false", onclick: () => this.showXray(!this.xray) }, "X-ray");
    this.again = h("button", { type: "button", class: "quiet", disabled: true, onclick: () => this.regenerate() }, "Regenerate");
    this.newButton = h("button", { type: "button", class: "quiet", disabled: true, onclick: () => { this.begin(); this.input.focus(); } }, "New chat");
    this.exportButton = h("button", { type: "button", class: "quiet", disabled: true, onclick: () => this.exporter.showModal() }, "Export");
    this.form = h("form", { class: "compose", onsubmit: (event) => { event.preventDefault(); this.submit(); } },
      this.input,
      h("div", { class: "compose-row" }, this.xrayButton, this.again, this.newButton, this.exportButton,
        h("span", { id: "ask-hint", class: "hint" }, "Enter to send · Shift+Enter for a new line · Esc to stop"), this.stop, this.send));
    this.panel = h("details", { class: "panel", open: matchMedia("(min-width: 961px)").matches },
      h("summary", {}, "Chats and settings"), this.store.element, this.settings.element);
    matchMedia("(min-width: 961px)").addEventListener("change", (event) => { this.panel.open = event.matches; });
    this.exporter = this.makeExporter();
    this.log = h("div", { class: "log" }, this.empty, this.list);
    root.append(h("div", { class: "chat" },
      h("div", { class: "talk" }, this.log, this.said, this.form),
      h("aside", { "aria-label": "Chats and settings" }, this.panel)), this.exporter);

    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.submit();
      }
    });
    root.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.running) this.running.abort();
    });
    addEventListener("faser-models", (event) => this.setModels(event.detail));
    this.askModels();
    addEventListener("pagehide", () => this.save());
    const kept = this.store.shown();
    if (kept) this.open(kept);
    else this.begin();
  }

  // app.js tells of models when it has them; a chat that is opened later asks.
  async askModels() {
    try {
      this.setModels((await (await request("v1/models", { quiet: true })).json()).data);
    } catch {
      // the server is loading, or wants a key
    }
  }

  setModels(models) {
    this.settings.setModels(models);
    const [{ id, root }] = models;
    this.small.textContent = `${id} is a small model to try the server with: expect mistakes. For another one, start the server with faser serve MODEL.`;
    this.small.hidden = root !== DEFAULT_MODEL;
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
    const copy = copyButton(() => message.content);
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
    this.save();
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

  // Another conversation, with a salt of its own; the one that is shown stays in the list. save: false: it was deleted.
  begin({ save = true } = {}) {
    this.leave(save);
    this.id = randomName();
    this.settings.salt = randomName();
    this.store.show(this.id);
  }

  // Show a conversation that was kept.
  open({ id, salt, settings, turns }) {
    this.leave(true);
    this.id = id;
    this.settings.salt = salt;
    this.settings.setValues(settings);
    for (const turn of turns) {
      if (turn.message.role === "assistant") this.addAnswer().answer.restore(turn);
      else this.addMessage(turn.message);
    }
    this.store.show(id);
    const last = this.turns.at(-1);
    if (last.answer?.calls.length) this.askForResults(last.answer);
    this.scroll(true);
  }

  leave(save) {
    if (save) this.save();
    this.id = null;
    this.running?.abort();
    this.cut(0);
    this.lastBody = null;
    this.refresh();
  }

  save() {
    if (this.id === null) return;
    const turns = this.turns.filter(({ answer }) => !answer?.isEmpty);
    this.store.put({
      id: this.id, salt: this.settings.salt, settings: this.settings.values(),
      turns: turns.map(({ message, answer }) => answer?.keep() ?? { message }),
    });
  }

  addAnswer() {
    const answer = new AnswerTurn({ xray: this.xray, actions: [copyButton(() => answer.message.content ?? "")] });
    const turn = { element: answer.element, answer, get message() { return answer.message; } };
    this.append(turn);
    return turn;
  }

  async answer() {
    const messages = this.turns.filter(({ answer }) => !answer?.isEmpty).map(({ message }) => message);
    const turn = this.addAnswer();
    const { answer } = turn;
    this.save();
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
      const isStopped = error.name === "AbortError";
      answer.end(isStopped ? "stopped" : "failed");
      if (isStopped) this.tell("Stopped.");
      else this.fail(turn, error);
    }
    this.running = null;
    this.refresh();
    if (!this.turns.includes(turn)) return;  // another conversation is shown
    this.save();
    if (answer.calls.length) this.askForResults(answer);
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
    this.newButton.disabled = !this.turns.length;
    this.exportButton.disabled = !this.turns.length;
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
    const show = () => { text.textContent = this.lastBody ? snippet(kind, this.lastBody) : "No request since the page was loaded."; };
    const kinds = Object.entries(KINDS).map(([name, label]) =>
      h("label", { class: "row" }, h("input", { type: "radio", name: "snippet", value: name, checked: name === kind, onchange: () => { kind = name; show(); } }), label));
    const copy = copyButton(() => text.textContent, { class: "primary" });
    const save = h("button", { type: "button", onclick: () => this.download() }, "Save conversation");
    const close = h("button", { type: "button", class: "quiet", onclick: () => dialog.close() }, "Close");
    const dialog = h("dialog", { class: "export", "aria-labelledby": "export-title" },
      h("h2", { id: "export-title" }, "The last request"),
      h("fieldset", { class: "row" }, h("legend", { class: "unseen" }, "As"), ...kinds),
      text, h("div", { class: "row end" }, close, save, copy));
    const showModal = dialog.showModal.bind(dialog);
    dialog.showModal = () => { show(); showModal(); };
    return dialog;
  }

  download() {
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

export function mountChat(root) {
  const chat = new Chat(root);
  return { show: () => { if (matchMedia("(pointer: fine)").matches) chat.input.focus({ preventScroll: true }); }, hide() {} };
}
