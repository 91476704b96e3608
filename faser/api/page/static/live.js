// The live view: what the server does now.

import { h } from "./dom.js";

export function mountLive(root) {
  root.append(h("p", { class: "notice" }, "The live view comes here."));
  return { show() {}, hide() {} };
}
