// Colours for code: comments, strings, numbers, keywords and names that are called. It knows words, not grammars.

import { h } from "../dom.js";

const LONGEST = 50000;  // characters; longer code stays plain

const words = (text) => new Set(text.split(" "));
const C_LIKE = "break case catch class const continue default do else enum extends false finally for if import in interface new null package private protected public return static struct super switch this throw true try typeof var void while";
const SCRIPT = words(`${C_LIKE} as async await delete export from function get implements instanceof let of readonly set type undefined yield`);
const COMPILED = words(`${C_LIKE} as async auto await bool boolean byte char chan constexpr crate defer delete double dyn final float fn fmt func fun go goto impl int let long loop map match mod move mut namespace nil nullptr pub range ref self select short signed sizeof string template trait type typedef union unsafe unsigned use using val virtual where yield`);
const PYTHON = words("False None True and as assert async await break case class continue def del elif else except finally for from global if import in is lambda match nonlocal not or pass raise return self try while with yield");
const RUBY = words("and begin break case class def do else elsif end ensure false for if in module next nil not or puts require rescue return self super then true unless until when while yield");
const SHELL = words("case do done elif else esac exit export fi for function if in local return set then until while");
const SQL = words("all alter and as asc between by case create cross delete desc distinct drop else end exists false from full group having in index inner insert into is join key left like limit not null offset on or order outer primary references right select set table then true union unique update values view when where with");
const NAMES = words("false no null true yes");

const SLASHES = String.raw`\/\/[^\n]*|\/\*[\s\S]*?(?:\*\/|$)`;
const HASH = String.raw`#[^\n]*`;
const QUOTED = String.raw`"(?:\\[\s\S]|[^"\\\n])*"?|'(?:\\[\s\S]|[^'\\\n])*'?`;
const CHARACTER = String.raw`"(?:\\[\s\S]|[^"\\\n])*"?|'(?:\\[^'\n]{1,8}|[^'\\\n])'`;  // 'a is a lifetime of Rust
const ATTRIBUTE = String.raw`(?<==)(?:"[^"]*"?|'[^']*'?)`;
const TICKED = String.raw`${"`"}(?:\\[\s\S]|[^${"`"}\\])*${"`"}?`;
const TRIPLE = String.raw`"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)`;
const NUMBER = String.raw`\b\d[\w.]*`;
const WORD = String.raw`[\p{L}_$][\p{L}\p{N}_$]*`;

// comment, string, keyword: patterns; keywords: words, and anyCase: whether SELECT is select. A pattern takes time that
// grows with its match alone, so no code is slow to colour.
function language(comment, string, keywords, { anyCase = false, keyword = "(?!)" } = {}) {
  const kinds = { comment, string, keyword, number: NUMBER, word: WORD };
  const pattern = Object.entries(kinds).map(([kind, each]) => `(?<${kind}>${each})`).join("|");
  return { keywords, anyCase, pattern: new RegExp(pattern, "gu") };
}

const FAMILIES = [
  ["javascript js jsx mjs typescript ts tsx php dart", language(SLASHES, `${QUOTED}|${TICKED}`, SCRIPT)],
  ["c cc cpp c++ h hpp java kotlin kt csharp cs c# go golang rust rs swift scala", language(SLASHES, CHARACTER, COMPILED)],
  ["python py python3", language(HASH, `${TRIPLE}|${QUOTED}`, PYTHON)],
  ["ruby rb", language(HASH, QUOTED, RUBY)],
  ["bash sh shell zsh console dockerfile makefile make", language(String.raw`(?<![\w$\{])#[^\n]*`, QUOTED, SHELL)],
  ["sql mysql postgresql sqlite", language(String.raw`--[^\n]*|\/\*[\s\S]*?(?:\*\/|$)`, QUOTED, SQL, { anyCase: true })],
  ["yaml yml toml ini", language(HASH, QUOTED, NAMES)],
  ["json jsonc json5", language(SLASHES, QUOTED, NAMES)],
  ["html xml svg", language(String.raw`<!--[\s\S]*?(?:-->|$)`, ATTRIBUTE, words(""), { keyword: String.raw`<\/?[\w:-]+|\/?>` })],
  ["css scss", language(String.raw`\/\*[\s\S]*?(?:\*\/|$)`, QUOTED, words(""))],
];
const LANGUAGES = new Map(FAMILIES.flatMap(([names, family]) => names.split(" ").map((name) => [name, family])));

// Text nodes and spans whose text, one after the other, is the code.
export function highlighted(code, name) {
  const family = LANGUAGES.get((name ?? "").toLowerCase());
  if (!family || code.length > LONGEST) return [code];
  const found = [];
  let done = 0;
  for (const match of code.matchAll(family.pattern)) {
    const kind = kindOf(match, family, code);
    if (!kind) continue;
    if (match.index > done) found.push(code.slice(done, match.index));
    found.push(h("span", { class: `code-${kind}` }, match[0]));
    done = match.index + match[0].length;
  }
  found.push(code.slice(done));
  return found;
}

function kindOf({ 0: text, index, groups }, { keywords, anyCase }, code) {
  if (groups.word === undefined) return Object.keys(groups).find((kind) => groups[kind] !== undefined);
  if (keywords.has(anyCase ? text.toLowerCase() : text)) return "keyword";
  return code[index + text.length] === "(" ? "call" : null;
}
