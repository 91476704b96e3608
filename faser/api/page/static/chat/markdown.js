// Markdown as elements, while it arrives. The text comes from a model, so none of it is trusted: it becomes text
// nodes, HTML in it stays text, links lead to http and https only, and there are no images.

import { h } from "../dom.js";
import { copyButton } from "./copy.js";
import { highlighted } from "./highlight.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const DEEPEST = 8;  // lists and quotes within each other; below that their text stays flat
const LONGEST_PIECE = 2000;  // characters of a paragraph that are made again with each push

// One answer. A push makes the last block again and leaves those before it alone, so its cost does not grow with the
// answer.
export class MarkdownStream {
  constructor(root) {
    this.root = root;
    this.rest = "";  // source of the last block
    this.nodes = [];  // elements of the last block
    this.code = null;  // text node of a fence that is still open
    this.paragraph = null;  // a long one, of which the first part is done and the rest comes
  }

  push(text) {
    this.rest += text;
    if (this.code && this.extendFence()) return;
    const lines = this.rest.split("\n");
    const blocks = parse(lines);
    for (const node of this.nodes) node.remove();
    this.nodes = [];
    this.code = null;
    if (!blocks.length) return;
    // The line that is still written may yet belong to the block before it, unless that is code, which has ended.
    const isWritten = blocks.at(-1).line === lines.length - 1 && blocks.at(-2)?.kind !== "code";
    const open = blocks.splice(isWritten ? -2 : -1);
    for (const block of blocks) this.show(block);
    const [first] = open;
    if (first.line > 0) this.rest = lines.slice(first.line).join("\n");
    const last = open.at(-1);
    if (open.length === 1 && last.kind === "text" && this.rest.length > LONGEST_PIECE) this.shorten(last);
    this.nodes = open.flatMap((block) => this.show(block));
    if (last.kind === "code" && !last.closed && open.length === 1 && this.rest.includes("\n")) this.openFence(last);
  }

  // The text is complete, also where it ends within a fence.
  end() {
    if (this.code) this.code.replaceWith(...highlighted(this.code.data, this.language));
    this.code = null;
  }

  // Shows the first part of a long paragraph for good.
  shorten(block) {
    const cut = this.rest.lastIndexOf(" ") + 1;
    if (cut < LONGEST_PIECE / 2) return;
    const [shown] = this.show({ ...block, text: this.rest.slice(0, cut) });
    this.paragraph = shown.closest("p");
    this.rest = this.rest.slice(cut);
    block.text = this.rest;
    block.line = 0;
  }

  show(block) {
    const goesOn = this.paragraph !== null && block.kind === "text" && block.line === 0;
    const made = goesOn ? [h("span", {}, ...inline(block.text))] : elements(block);
    (goesOn ? this.paragraph : this.root).append(...made);
    if (!goesOn) this.paragraph = null;
    return made;
  }

  openFence(block) {
    const shown = this.nodes[0].querySelector("code");
    this.code = shown.firstChild ?? shown.appendChild(document.createTextNode(""));
    this.mark = block.mark;
    this.language = block.language;
    this.seen = this.rest.length;
  }

  // Whether the push only went on with the open fence; the last line may still become its end.
  extendFence() {
    const added = this.rest.slice(this.seen);
    const from = this.rest.lastIndexOf("\n", this.seen - 1) + 1;
    if (this.rest.slice(from).split("\n").some((line) => closes(line, this.mark))) return false;
    this.code.appendData(added);
    this.seen = this.rest.length;
    return true;
  }
}

// A whole text at once.
export function markdown(text) {
  return parse(text.split("\n")).flatMap(elements);
}

function closes(line, mark) {
  const found = /^ {0,3}(`{3,}|~{3,})\s*$/.exec(line);
  return found !== null && found[1][0] === mark[0] && found[1].length >= mark.length;
}

// Blocks with the line they begin in.
function parse(lines, depth = 0) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    const begin = at;
    const line = lines[at];
    let found;
    if (!line.trim()) {
      at += 1;
      continue;
    }
    if ((found = FENCE.exec(line))) {
      const mark = found[1];
      at += 1;
      while (at < lines.length && !closes(lines[at], mark)) at += 1;
      const closed = at < lines.length;
      blocks.push({ kind: "code", line: begin, mark, closed, language: found[2], text: lines.slice(begin + 1, at).join("\n") });
      at += 1;
    } else if ((found = HEADING.exec(line))) {
      blocks.push({ kind: "heading", line: begin, level: found[1].length, text: found[2] });
      at += 1;
    } else if (RULE.test(line)) {
      blocks.push({ kind: "rule", line: begin });
      at += 1;
    } else if (QUOTE.test(line) && depth < DEEPEST) {
      while (at < lines.length && lines[at].trim() && (QUOTE.test(lines[at]) || !starts(lines[at]))) at += 1;
      const inner = lines.slice(begin, at).map((each) => each.replace(QUOTE, ""));
      blocks.push({ kind: "quote", line: begin, blocks: parse(inner, depth + 1) });
    } else if (ITEM.test(line) && depth < DEEPEST) {
      at = endOfList(lines, begin);
      blocks.push(list(lines.slice(begin, at), begin, depth));
    } else if (line.includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") && TABLE_RULE.test(lines[at + 1])) {
      at += 2;
      while (at < lines.length && lines[at].trim() && lines[at].includes("|")) at += 1;
      blocks.push({ kind: "table", line: begin, rows: [line, ...lines.slice(begin + 2, at)].map(cells) });
    } else {
      at += 1;
      while (at < lines.length && lines[at].trim() && !starts(lines[at])) at += 1;
      blocks.push({ kind: "text", line: begin, text: lines.slice(begin, at).join("\n") });
    }
  }
  return blocks;
}

function starts(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

function endOfList(lines, begin) {
  const [, indent, mark] = ITEM.exec(lines[begin]);
  const isBullet = (each) => each.length === 1;
  let at = begin + 1;
  while (at < lines.length) {
    const line = lines[at];
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent.length + 1 && isBullet(item[2]) !== isBullet(mark)) break;
    const goesOn = ITEM.test(line) || /^\s{2,}\S/.test(line);
    if (line.trim() ? !goesOn && (!lines[at - 1].trim() || starts(line)) : at + 1 >= lines.length) break;
    at += 1;
  }
  return at;
}

function list(lines, begin, depth) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const items = [];
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && found[1].length <= indent.length + 1) items.push([found[3]]);
    else items.at(-1).push(line.replace(/^\s{1,4}/, ""));
  }
  const number = Number.parseInt(mark, 10);
  return {
    kind: "list", line: begin, start: Number.isNaN(number) ? null : number,
    items: items.map((each) => parse(each, depth + 1)),
  };
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((each) => each.trim().replaceAll("\\|", "|"));
}

function elements(block) {
  switch (block.kind) {
    case "code":
      return [codeBlock(block)];
    case "heading":
      return [h(`h${Math.min(block.level + 2, 6)}`, {}, ...inline(block.text))];
    case "rule":
      return [h("hr")];
    case "quote":
      return [h("blockquote", {}, ...block.blocks.flatMap(elements))];
    case "list": {
      const items = block.items.map((each) => h("li", {}, ...tight(each)));
      return [block.start === null ? h("ul", {}, ...items) : h("ol", { start: block.start }, ...items)];
    }
    case "table": {
      const [head, ...body] = block.rows;
      const row = (each, cell) => h("tr", {}, ...each.map((text) => h(cell, {}, ...inline(text))));
      return [h("div", { class: "table", tabindex: "0" },
        h("table", {}, h("thead", {}, row(head, "th")), h("tbody", {}, ...body.map((each) => row(each, "td")))))];
    }
    default:
      return [h("p", {}, ...inline(block.text))];
  }
}

// Code that is still written is coloured when its fence ends.
function codeBlock({ text, language, closed }) {
  const code = h("code", {}, ...(closed ? highlighted(text, language) : [text]));
  return h("div", { class: "code-block" },
    h("div", { class: "code-head" }, h("span", {}, language), copyButton(() => code.textContent, { "aria-label": "Copy code" })),
    h("pre", { class: "code", tabindex: "0" }, code));
}

// The blocks of a list's item; its first paragraph needs no element.
function tight(blocks) {
  const [first, ...others] = blocks;
  if (first?.kind !== "text") return blocks.flatMap(elements);
  return [...inline(first.text), ...others.flatMap(elements)];
}

// Marks in the order in which they are tried at each place. Each has a bounded or linear match.
const MARKS = [
  [/^\\([!-/:-@[-`{-~])/, ([, char]) => char],
  [/^(`+)(?!`)([\s\S]*?[^`])\1(?!`)/, ([, , code]) => h("code", {}, code)],
  [/^!?\[([^\[\]]{0,500})\]\(\s*<?([^\s()<>]{1,2000})>?(?:\s+"[^"]{0,500}")?\s*\)/, ([whole, text, to]) => link(to, text, whole)],
  [/^<?(https?:\/\/[^\s<>"'`]{1,2000}[^\s<>"'`.,;:!?)\]])>?/, ([whole, to]) => link(to, to, whole)],
  [/^(\*\*|__)(?=\S)([^\n]{1,1000}?\S?)\1/, ([, , text]) => h("strong", {}, ...inline(text))],
  [/^~~(?=\S)([^\n]{1,1000}?)~~/, ([, text]) => h("del", {}, ...inline(text))],
  [/^\*(?=[^\s*])([^\n*]{1,1000}?)\*(?!\*)/, ([, text]) => h("em", {}, ...inline(text))],
  [/^_(?=[^\s_])([^\n_]{1,1000}?)_(?![\p{L}\p{N}_])/u, ([, text]) => h("em", {}, ...inline(text))],
];
const MARK = /[\\`!\[<h*_~]/g;

function inline(text) {
  const found = [];
  let plain = "";
  let at = 0;
  const flush = () => {
    if (plain) found.push(document.createTextNode(plain));
    plain = "";
  };
  while (at < text.length) {
    MARK.lastIndex = at;
    const next = MARK.exec(text)?.index ?? text.length;
    plain += text.slice(at, next);
    at = next;
    if (at >= text.length) break;
    const made = marked(text, at);
    if (made === null) {
      plain += text[at];
      at += 1;
    } else {
      if (typeof made.node === "string") plain += made.node;
      else {
        flush();
        found.push(made.node);
      }
      at += made.length;
    }
  }
  flush();
  return found;
}

function marked(text, at) {
  const inWord = at > 0 && /[\p{L}\p{N}]/u.test(text[at - 1]);
  if (inWord && "_*h".includes(text[at])) return null;
  const ahead = text.slice(at, at + 4100);
  for (const [pattern, make] of MARKS) {
    const match = pattern.exec(ahead);
    if (match) return { node: make(match), length: match[0].length };
  }
  return null;
}

// A link, or the text itself where it leads elsewhere than to http or https.
function link(to, text, whole) {
  let url;
  try {
    url = new URL(to);
  } catch {
    return whole;
  }
  if (url.protocol !== "http:" && url.protocol !== "https:") return whole;
  return h("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, text || to);
}
