// Conversations that this browser keeps: one entry of localStorage each. sessionStorage knows the one that a tab shows.

import { h } from "../dom.js";

const PREFIX = "faser-chat-";
const SHOWN = "faser-chat";
const OFF = "faser-chats-off"; // there: conversations are not kept
const LONGEST_TITLE = 80;

// 128 random bits in hexadecimal.
export function randomName() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (each) => each.toString(16).padStart(2, "0")).join("");
}

// What is kept, and the list of it. A conversation: {id, at, title, …}; the rest is the caller's.
// onOpen(conversation): the reader chose it. onGone(): the one that this tab shows was deleted.
export class Conversations {
  constructor({ onOpen, onGone }) {
    this.onOpen = onOpen;
    this.onGone = onGone;
    this.promise = h("p");
    this.list = h("ul", { class: "kept" });
    this.none = h("p", { class: "hint" }, "None yet.");
    this.note = h("p", { class: "wrong", role: "status" });
    this.keep = h("input", { type: "checkbox", id: "keep-chats", onchange: () => this.setKeeping(this.keep.checked) });
    this.deleteAll = h("button", { type: "button", class: "quiet", onclick: () => this.sweep() && this.onGone() }, "Delete all");
    this.element = h("details", { class: "group", open: true }, h("summary", {}, "Conversations"),
      h("div", { class: "fields" }, this.list, this.none, this.note,
        h("div", { class: "row check" }, this.keep, h("label", { for: "keep-chats" }, "Keep in this browser"), this.deleteAll)));
    addEventListener("storage", ({ key }) => this.changedElsewhere(key));
    this.draw();
  }

  // The one that this tab showed before it was loaded again, or null.
  shown() {
    return this.read(PREFIX + sessionStorage.getItem(SHOWN));
  }

  show(id) {
    sessionStorage.setItem(SHOWN, id);
    this.draw();
  }

  // Keep a conversation as it is now; one without turns is not kept.
  put(conversation) {
    if (!conversation.turns.length) localStorage.removeItem(PREFIX + conversation.id);
    else if (this.isKeeping) this.write({ ...conversation, at: Date.now(), title: titleOf(conversation) });
    this.draw();
  }

  write(conversation) {
    try {
      localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
      this.note.textContent = "";
    } catch (error) {
      this.note.textContent = `The browser does not keep this conversation (${error.name}). Delete others to make room.`;
    }
  }

  read(key) {
    return JSON.parse(localStorage.getItem(key));
  }

  all() {
    const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
    return keys.map((key) => this.read(key)).sort((one, other) => other.at - one.at);
  }

  get isKeeping() {
    return localStorage.getItem(OFF) === null;
  }

  delete(id) {
    localStorage.removeItem(PREFIX + id);
    this.draw();
    if (id === sessionStorage.getItem(SHOWN)) this.onGone();
  }

  // Delete all after a question. Returns whether none is left.
  sweep() {
    const all = this.all();
    if (all.length && !confirm(`Delete ${all.length === 1 ? "1 conversation" : `${all.length} conversations`} from this browser?`)) return false;
    for (const { id } of all) localStorage.removeItem(PREFIX + id);
    this.draw();
    return true;
  }

  setKeeping(on) {
    if (on) localStorage.removeItem(OFF);
    else if (this.sweep()) localStorage.setItem(OFF, "");
    this.draw();
  }

  changedElsewhere(key) {
    this.draw();
    if (key === PREFIX + sessionStorage.getItem(SHOWN) && localStorage.getItem(key) === null) this.onGone();
  }

  draw() {
    const all = this.all();
    const shown = sessionStorage.getItem(SHOWN);
    this.keep.checked = this.isKeeping;
    this.promise.textContent = this.isKeeping
      ? "Conversations are kept in this browser until you delete them."
      : "Your conversation is kept in this tab only and is lost when you close or reload it.";
    this.none.hidden = all.length > 0;
    this.deleteAll.hidden = !all.length;
    this.list.replaceChildren(...all.map((each) => h("li", {},
      h("button", { type: "button", class: "quiet open", "aria-current": each.id === shown ? "true" : null, onclick: () => this.onOpen(this.read(PREFIX + each.id)) }, each.title),
      h("button", { type: "button", class: "quiet", "aria-label": `Delete ${each.title}`, onclick: () => this.delete(each.id) }, "×"))));
  }
}

function titleOf({ turns }) {
  const text = turns[0].message.content.trim().replace(/\s+/g, " ");
  return text.length > LONGEST_TITLE ? `${text.slice(0, LONGEST_TITLE)}…` : text;
}
