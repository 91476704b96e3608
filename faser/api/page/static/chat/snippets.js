// A request as text to take along. The key is never part of it.

import { address } from "../api.js";

export const KINDS = { json: "JSON", curl: "curl", python: "Python" };

export function snippet(kind, body) {
  if (kind === "json") return JSON.stringify(body, null, 2);
  if (kind === "curl") return curl(body);
  return python(body);
}

function curl(body) {
  const quoted = JSON.stringify(body, null, 1).replaceAll("'", "'\\''");
  return `curl -N ${address("v1/chat/completions")} \\
  -H 'Content-Type: application/json' -H "Authorization: Bearer $FASER_API_KEY" \\
  -d '${quoted}'`;
}

// The OpenAI client knows some fields; FASER's own go through extra_body.
const KNOWN = new Set(["messages", "model", "temperature", "top_p", "max_tokens", "seed", "presence_penalty", "stop",
  "tools", "response_format", "stream", "stream_options"]);

function python(body) {
  const known = Object.entries(body).filter(([name]) => KNOWN.has(name));
  const extra = Object.entries(body).filter(([name]) => !KNOWN.has(name));
  const lines = known.map(([name, value]) => `    ${name}=${literal(value, 4)},`);
  if (extra.length) lines.push(`    extra_body=${literal(Object.fromEntries(extra), 4)},`);
  return `import os

from openai import OpenAI

client = OpenAI(base_url=${literal(address("v1"))}, api_key=os.environ.get("FASER_API_KEY", "none"))
stream = client.chat.completions.create(
${lines.join("\n")}
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
`;
}

function literal(value, indent = 0) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map((each) => literal(each, indent)).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([key, each]) => `${JSON.stringify(key)}: ${literal(each, indent)}`).join(", ")}}`;
  }
  return JSON.stringify(value);
}
