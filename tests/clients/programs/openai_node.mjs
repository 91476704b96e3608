// The openai package for Node: chats, streams, responses, tools. Usage: node openai_node.mjs URL MODEL
import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the weather in Bern?" }];
const parameters = {
  type: "object",
  properties: { city: { enum: ["Bern", "Zürich"] }, is_warm: { type: "boolean" } },
  required: ["city", "is_warm"],
  additionalProperties: false,
};

const answer = await client.chat.completions.create({ model, messages, max_tokens: 20, seed: 1 });
let text = "";
for await (const chunk of await client.chat.completions.create({ model, messages, max_tokens: 20, seed: 1, stream: true }))
  text += chunk.choices[0]?.delta?.content ?? "";
assert.equal(text, answer.choices[0].message.content);

const json = await client.chat.completions.create({
  model,
  messages,
  max_tokens: 200,
  response_format: { type: "json_schema", json_schema: { name: "weather", strict: true, schema: parameters } },
});
assert.equal(typeof JSON.parse(json.choices[0].message.content).is_warm, "boolean");

const runner = client.chat.completions.stream({
  model,
  messages,
  max_tokens: 200,
  tools: [{ type: "function", function: { name: "weather", parameters, strict: true } }],
  tool_choice: "required",
  parallel_tool_calls: false,
});
const called = await runner.finalChatCompletion();
assert.equal(called.choices[0].message.tool_calls[0].function.name, "weather");

const question = messages[0].content;
const whole = await client.responses.create({ model, input: question, max_output_tokens: 20, seed: 1 });
let streamed = "";
let last;
for await (const event of await client.responses.create({ model, input: question, max_output_tokens: 20, seed: 1, stream: true })) {
  if (event.type === "response.output_text.delta") streamed += event.delta;
  last = event;
}
assert.equal(streamed, whole.output_text);
assert.ok(["response.completed", "response.incomplete"].includes(last.type));

const responded = await client.responses.create({
  model,
  input: question,
  max_output_tokens: 200,
  tools: [{ type: "function", name: "weather", parameters, strict: true }],
  tool_choice: { type: "function", name: "weather" },
});
const call = responded.output.find((item) => item.type === "function_call");
assert.ok(["Bern", "Zürich"].includes(JSON.parse(call.arguments).city));
console.log("ok");
