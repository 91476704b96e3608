// The panel of settings: fields, and the request that they make.

import { h } from "../dom.js";

const SAMPLE_TOOLS = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather in a city now.",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
}];
const SAMPLE_SCHEMA = {
  type: "object",
  properties: { city: { type: "string" }, population: { type: "integer" } },
  required: ["city", "population"],
  additionalProperties: false,
};

// name, label, limits of the input, what it is for. Empty: the server's default.
const SAMPLING = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.05 }, "0: always the most likely token (greedy)"],
  ["top_p", "Top p", { min: 0.01, max: 1, step: 0.01 }, "nucleus sampling: the most likely tokens that add up to this probability"],
  ["top_k", "Top k", { min: 0, step: 1 }, "only the k most likely tokens; 0: all"],
  ["min_p", "Min p", { min: 0, max: 1, step: 0.01 }, "minimum probability, relative to the most likely token"],
  ["max_tokens", "Max tokens", { min: 1, step: 1 }, "maximum length of the answer"],
  ["seed", "Seed", { step: 1 }, "the same seed gives the same answer"],
  ["repetition_penalty", "Repetition", { min: 0.01, step: 0.05 }, "above 1: discourages repeated tokens"],
  ["presence_penalty", "Presence", { min: -2, max: 2, step: 0.1 }, "above 0: discourages tokens that have already appeared"],
];

let serial = 0;

function field(label, control, hint = null) {
  serial += 1;
  control.id = `set-${serial}`;
  if (hint) control.title = hint;
  return h("div", { class: "field" }, h("label", { for: control.id }, label), control);
}

function area(value, rows, attributes = {}) {
  const made = h("textarea", { rows, spellcheck: "false", ...attributes });
  made.value = value;
  return made;
}

function choice(options) {
  return h("select", {}, ...options.map(([value, label]) => h("option", { value }, label)));
}

function group(title, open, ...children) {
  return h("details", { class: "group", open }, h("summary", {}, title), h("div", { class: "fields" }, ...children));
}

export class Settings {
  constructor() {
    this.salt = null;  // of the conversation
    this.model = choice([]);
    this.system = area("", 3, { placeholder: "e.g. You are a helpful assistant.", spellcheck: "true" });
    this.numbers = Object.fromEntries(SAMPLING.map(([name, , limits]) =>
      [name, h("input", { type: "number", inputmode: "decimal", placeholder: "default", ...limits })]));
    this.stop = area("", 2, { placeholder: "one per line" });
    this.drafts = choice([["", "server's choice"], ["true", "on"], ["false", "off"]]);
    this.gamma = h("input", { type: "number", min: 0, step: 1, placeholder: "server's" });
    this.class = h("input", { type: "text", placeholder: "default", autocapitalize: "off" });
    this.trace = h("input", { type: "checkbox", checked: true });
    this.useTools = h("input", { type: "checkbox" });
    this.tools = area(JSON.stringify(SAMPLE_TOOLS, null, 1), 9, { class: "mono" });
    this.format = choice([["text", "text"], ["json_object", "JSON object"], ["json_schema", "JSON with this schema"]]);
    this.schema = area(JSON.stringify(SAMPLE_SCHEMA, null, 1), 9, { class: "mono" });
    this.element = h("form", { class: "settings", onsubmit: (event) => event.preventDefault() },
      group("Model", true, field("Model", this.model), field("System prompt", this.system)),
      group("Sampling", true,
        h("div", { class: "pairs" }, ...SAMPLING.map(([name, label, , hint]) => field(label, this.numbers[name], hint))),
        field("Stop sequences", this.stop)),
      group("Speculation", false,
        h("div", { class: "pairs" },
          field("Drafts", this.drafts),
          field("Max draft tokens (γ)", this.gamma, "maximum draft tokens per step; 0: none"),
          field("Class", this.class, "a request class that the operator has defined")),
        check("Trace tokens, for X-ray", this.trace)),
      group("Tools", false, check("Offer these tools", this.useTools), field("Tools, as JSON", this.tools)),
      group("Answer format", false, field("Format", this.format), field("Schema", this.schema)),
    );
    const schemaField = this.schema.parentElement;
    this.showSchema = () => { schemaField.hidden = this.format.value !== "json_schema"; };
    this.format.addEventListener("change", this.showSchema);
    this.showSchema();
  }

  // What the fields hold, without the model; setValues puts it back.
  values() {
    return this.fields().map((each) => (each.type === "checkbox" ? each.checked : each.value));
  }

  setValues(values) {
    const fields = this.fields();
    if (values.length !== fields.length) return;  // kept by a page with other fields
    fields.forEach((each, at) => { each[each.type === "checkbox" ? "checked" : "value"] = values[at]; });
    this.showSchema();
  }

  fields() {
    return [...this.element.elements].filter((each) => each !== this.model);
  }

  setModels(models) {
    const kept = this.model.value;
    this.model.replaceChildren(...models.map((each) => h("option", { value: each.id }, each.id)));
    if (models.some((each) => each.id === kept)) this.model.value = kept;
  }

  // The body of a request. Throws Error with words for the reader where a field cannot be used.
  body(messages) {
    const body = { messages: this.system.value.trim()
      ? [{ role: "system", content: this.system.value.trim() }, ...messages] : messages };
    if (this.model.value) body.model = this.model.value;
    for (const [name, label] of SAMPLING) {
      const input = this.numbers[name];
      if (input.validity.badInput) throw new Error(`${label} is not a number.`);
      if (input.value !== "") body[name] = Number(input.value);
    }
    const stop = this.stop.value.split("\n").filter((each) => each !== "");
    if (stop.length) body.stop = stop;
    const speculative = {};
    if (this.drafts.value) speculative.enabled = this.drafts.value === "true";
    if (this.gamma.value !== "") speculative.max_tokens = Number(this.gamma.value);
    if (this.class.value.trim()) speculative.class = this.class.value.trim();
    if (this.trace.checked) speculative.trace = true;
    if (Object.keys(speculative).length) body.speculative = speculative;
    if (this.useTools.checked) body.tools = parsed(this.tools.value, "Tools");
    if (this.format.value === "json_object") body.response_format = { type: "json_object" };
    if (this.format.value === "json_schema") {
      const schema = parsed(this.schema.value, "Schema");
      body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    }
    return { ...body, cache_salt: this.salt, stream: true, stream_options: { include_usage: true } };
  }
}

function check(label, control) {
  serial += 1;
  control.id = `set-${serial}`;
  return h("div", { class: "row check" }, control, h("label", { for: control.id }, label));
}

function parsed(text, name) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name} is not JSON: ${error.message}`);
  }
}
