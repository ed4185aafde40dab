// `@langchain/openai`: chat or responses, as the argument says.
import assert from "node:assert/strict";
import { HumanMessage, ToolMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";
import {
  CODE, DESCRIPTION, KEY, MODEL, QUESTION, SAID, SCRIPTED_URL, TASK, URL,
  lookUp, report, wasCalled,
} from "./asked.mjs";

const model = (url) =>
  new ChatOpenAI({
    model: MODEL,
    apiKey: KEY,
    maxRetries: 0,
    useResponsesApi: process.argv[2] === "responses",
    configuration: { baseURL: `${url}/v1` },
  });
const thing = z.object({ thing: z.enum(["falcon", "dolphin"]) });
const lookUpTool = tool(lookUp, { name: "look_up", description: DESCRIPTION, schema: thing });
const animal = z.object({
  name: z.enum(["falcon", "dolphin"]),
  wild: z.boolean(),
  size: z.enum(["small", "large"]),
});

async function whole(stream) {
  let message = null;
  for await (const chunk of stream) message = message === null ? chunk : message.concat(chunk);
  return message;
}

async function loop(ask) {
  const messages = [new HumanMessage(TASK)];
  for (let turn = 0; turn < 3; turn++) {
    const answer = await ask(messages);
    messages.push(answer);
    for (const call of answer.tool_calls ?? []) {
      const content = await lookUpTool.invoke(call.args);
      messages.push(new ToolMessage({ content, tool_call_id: call.id }));
    }
    if (!answer.tool_calls?.length) break;
  }
  wasCalled();
  assert.equal(messages.at(-1).text, SAID);
}

await report({
  async chat() {
    const answer = await model(URL).invoke(QUESTION);
    assert.ok(answer.text.includes(CODE), answer.text);
    assert.ok(answer.usage_metadata.output_tokens > 0);
  },
  async stream() {
    const answer = await whole(await model(URL).stream(QUESTION));
    assert.ok(answer.text.includes(CODE), answer.text);
    assert.ok(answer.usage_metadata.output_tokens > 0);
  },
  async tools() {
    const bound = model(SCRIPTED_URL).bindTools([lookUpTool]);
    await loop((messages) => bound.invoke(messages));
  },
  async streamed_tools() {
    const bound = model(SCRIPTED_URL).bindTools([lookUpTool]);
    await loop(async (messages) => whole(await bound.stream(messages)));
  },
  async demanded() {
    const asked = model(URL).withStructuredOutput(animal, { method: "functionCalling" });
    animal.parse(await asked.invoke("What have you seen?"));
  },
  async structured() {
    const asked = model(URL).withStructuredOutput(animal, { method: "jsonSchema" });
    animal.parse(await asked.invoke("What have you seen?"));
  },
});
