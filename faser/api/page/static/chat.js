// The chat: one conversation with the model.

import { h } from "./dom.js";

export function mountChat(root) {
  root.append(h("p", { class: "notice" }, "The chat comes here."));
  return { show() {}, hide() {} };
}
