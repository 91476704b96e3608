// Vercel's AI SDK: text, a stream, a loop with a tool, and an object, by each of its three providers, or the models named.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";

const [url, name, ...only] = process.argv.slice(2);
const baseURL = `${url}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const models = {
  compatible: createOpenAICompatible({ name: "faser", baseURL, apiKey: "none", supportsStructuredOutputs: true })(name),
  responses: openai.responses(name),
  chat: openai.chat(name),
  anthropic: createAnthropic({ baseURL, apiKey: "none" })(name),
};
const question = { prompt: "What is the weather in Oslo?", maxOutputTokens: 40, temperature: 0, maxRetries: 0 };

for (const [provider, model] of Object.entries(models)) {
  if (only.length && !only.includes(provider)) continue;
  const whole = await generateText({ model, ...question });
  assert.ok(whole.text.length > 0, `${provider}: no text`);
  assert.ok(whole.usage.outputTokens > 0, `${provider}: no usage`);

  const stream = streamText({ model, ...question, onError: ({ error }) => { throw error; } });
  let text = "";
  for await (const piece of stream.textStream) text += piece;
  assert.ok(text.length > 0, `${provider}: no streamed text`);
  const { outputTokens } = await stream.usage;
  assert.equal(await stream.finishReason, outputTokens < 40 ? "stop" : "length", provider);

  const asked = [];
  const city = jsonSchema({
    type: "object",
    properties: { city: { enum: ["Oslo", "Paris"] } },
    required: ["city"],
    additionalProperties: false,
  });
  const weather = tool({
    description: "The weather of a city",
    inputSchema: city,
    execute: async (input) => (asked.push(input.city), "sunny"),
  });
  const loop = await generateText({
    model,
    ...question,
    maxOutputTokens: 200,
    tools: { weather },
    toolChoice: { type: "tool", toolName: "weather" },
    stopWhen: stepCountIs(2),
  });
  assert.ok(asked.length === 2 && asked.every((each) => ["Oslo", "Paris"].includes(each)), `${provider}: ${asked}`);
  assert.equal(loop.steps.length, 2, provider);

  const structured = await generateText({ model, ...question, maxOutputTokens: 200, output: Output.object({ schema: city }) });
  assert.ok(["Oslo", "Paris"].includes(structured.output.city), provider);
}
console.log("ok");
