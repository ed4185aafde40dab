// `ai` with one of its providers: compatible (chat), openai (responses) or anthropic (messages).
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import {
  CODE, DESCRIPTION, KEY, MODEL, QUESTION, SAID, SCRIPTED_URL, TASK, URL,
  lookUp, report, wasCalled,
} from "./asked.mjs";

const kind = process.argv[2];
const providers = {
  compatible: (baseURL) =>
    createOpenAICompatible({
      baseURL, name: "penstock", apiKey: KEY, includeUsage: true, supportsStructuredOutputs: true,
    }),
  openai: (baseURL) => createOpenAI({ baseURL, apiKey: KEY }),
  anthropic: (baseURL) => createAnthropic({ baseURL, apiKey: KEY }),
};
const model = (url) => providers[kind](`${url}/v1`)(MODEL);
const asked = { model: model(URL), maxRetries: 0, maxOutputTokens: 200 };
const scripted = { ...asked, model: model(SCRIPTED_URL), stopWhen: stepCountIs(4) };
const thing = z.object({ thing: z.enum(["falcon", "dolphin"]) });
const tools = {
  look_up: tool({ description: DESCRIPTION, inputSchema: thing, execute: lookUp }),
};
const animal = z.object({
  name: z.enum(["falcon", "dolphin"]),
  wild: z.boolean(),
  size: z.enum(["small", "large"]),
});

async function streamed(options) {
  const result = streamText({
    ...options,
    onError: ({ error }) => {
      throw error;
    },
  });
  const parts = [];
  for await (const part of result.fullStream) {
    assert.notEqual(part.type, "error", String(part.error));
    parts.push(part);
  }
  return { parts, text: await result.text, usage: await result.usage };
}

await report({
  async chat() {
    const { text, usage, finishReason } = await generateText({ ...asked, prompt: QUESTION });
    assert.ok(text.includes(CODE), text);
    assert.ok(usage.outputTokens > 0 && usage.inputTokens > 0);
    assert.equal(finishReason, "stop");
  },
  async stream() {
    const { text, usage } = await streamed({ ...asked, prompt: QUESTION });
    assert.ok(text.includes(CODE), text);
    assert.ok(usage.outputTokens > 0 && usage.inputTokens > 0);
  },
  async tools() {
    const { text, steps } = await generateText({ ...scripted, prompt: TASK, tools });
    wasCalled();
    assert.equal(steps.length, 2);
    assert.equal(text, SAID);
  },
  async streamed_tools() {
    const { text, parts } = await streamed({ ...scripted, prompt: TASK, tools });
    wasCalled();
    assert.equal(text, SAID);
    const grown = parts.filter((part) => part.type === "tool-input-delta");
    assert.ok(grown.length > 0, "its input came in parts");
  },
  async demanded() {
    for (const toolChoice of ["required", { type: "tool", toolName: "look_up" }]) {
      const free = { look_up: tool({ description: DESCRIPTION, inputSchema: thing }) };
      const options = { ...asked, prompt: QUESTION, tools: free, toolChoice };
      const { toolCalls, finishReason } = await generateText(options);
      assert.equal(toolCalls.length, 1);
      thing.parse(toolCalls[0].input);
      assert.equal(finishReason, "tool-calls");
    }
  },
  async structured() {
    const output = Output.object({ schema: animal });
    const made = await generateText({ ...asked, prompt: "What have you seen?", output });
    animal.parse(made.output);
  },
});
