// `ollama`: chat, generate and the questions about the model.
import assert from "node:assert/strict";
import { Ollama } from "ollama";
import { z } from "zod";
import {
  CODE, DESCRIPTION, MODEL, QUESTION, SAID, SCRIPTED_URL, TASK, URL,
  lookUp, report, wasCalled,
} from "./asked.mjs";

const api = new Ollama({ host: URL });
const scripted = new Ollama({ host: SCRIPTED_URL });
const parameters = {
  type: "object",
  properties: { thing: { type: "string", enum: ["falcon", "dolphin"] } },
  required: ["thing"],
};
const tools = [{ type: "function", function: { name: "look_up", description: DESCRIPTION, parameters } }];
const animal = z.object({
  name: z.enum(["falcon", "dolphin"]),
  wild: z.boolean(),
  size: z.enum(["small", "large"]),
});

async function whole(stream) {
  let message = null;
  for await (const part of stream) {
    if (message === null) message = part.message;
    else {
      message.content += part.message.content;
      message.tool_calls = [...(message.tool_calls ?? []), ...(part.message.tool_calls ?? [])];
    }
  }
  return message;
}

async function loop(ask) {
  const messages = [{ role: "user", content: TASK }];
  for (let turn = 0; turn < 3; turn++) {
    const message = await ask(messages);
    messages.push(message);
    for (const call of message.tool_calls ?? []) {
      const content = lookUp(call.function.arguments);
      messages.push({ role: "tool", tool_name: call.function.name, content });
    }
    if (!message.tool_calls?.length) break;
  }
  wasCalled();
  assert.equal(messages.at(-1).content, SAID);
}

await report({
  async chat() {
    const { models } = await api.list();
    assert.deepEqual(models.map(({ name }) => name), [MODEL]);
    assert.ok((await api.show({ model: MODEL })).capabilities.includes("completion"));
    assert.equal((await api.ps()).models.length, 1);
    const messages = [{ role: "user", content: QUESTION }];
    const answer = await api.chat({ model: MODEL, messages, think: false, keep_alive: "5m" });
    assert.ok(answer.message.content.includes(CODE), answer.message.content);
    assert.ok(answer.prompt_eval_count > 0 && answer.eval_count > 0);
  },
  async stream() {
    const messages = [{ role: "user", content: QUESTION }];
    const { content } = await whole(await api.chat({ model: MODEL, messages, stream: true }));
    assert.ok(content.includes(CODE), content);
    let text = "";
    for await (const part of await api.generate({ model: MODEL, prompt: QUESTION, stream: true })) {
      text += part.response;
    }
    assert.ok(text.includes(CODE), text);
  },
  async tools() {
    const ask = (messages) => scripted.chat({ model: MODEL, messages, tools });
    await loop(async (messages) => (await ask(messages)).message);
  },
  async streamed_tools() {
    const ask = (messages) => scripted.chat({ model: MODEL, messages, tools, stream: true });
    await loop(async (messages) => whole(await ask(messages)));
  },
  async structured() {
    const messages = [{ role: "user", content: "What have you seen?" }];
    const answer = await api.chat({ model: MODEL, messages, format: z.toJSONSchema(animal) });
    animal.parse(JSON.parse(answer.message.content));
  },
});
