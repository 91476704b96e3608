// Elements without markup: text is always text. Attributes are set one by one, so no string becomes HTML.

const SVG = "http://www.w3.org/2000/svg";

// h("button", {class: "quiet", onclick: f, "aria-label": "Stop"}, "Stop"): an element.
// Keys that begin with "on" are listeners; true is an empty attribute; false, null and undefined leave it out.
export function h(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

// The same for SVG.
export function s(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

export function byId(id) {
  return document.getElementById(id);
}

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.filter((each) => each !== null && each !== undefined && each !== false));
  return element;
}
