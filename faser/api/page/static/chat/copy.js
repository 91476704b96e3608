// Buttons that copy text.

import { h } from "../dom.js";

// text(): what is copied when the button is pressed.
export function copyButton(text, attributes = {}) {
  const button = h("button", { type: "button", class: "quiet", ...attributes, onclick: () => copy(text(), button) }, "Copy");
  return button;
}

async function copy(text, button) {
  let copied = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copied = copyBySelection(text, button);  // the clipboard is there for HTTPS and localhost only
  }
  button.textContent = copied ? "Copied" : "Not allowed";
  setTimeout(() => { button.textContent = "Copy"; }, 1200);
}

function copyBySelection(text, button) {
  const field = h("textarea", { class: "unseen", readonly: true, "aria-hidden": "true" });
  field.value = text;
  button.after(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  button.focus();
  return copied;
}
