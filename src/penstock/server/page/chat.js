// Chat with the model. Each answer says what it took, and how much of its prompt was served from
// the cache. Editing a message starts a branch: the tree shows it.

import { ask, events } from "./api.js";
import { byId, count, duration, make, percent, say, speed } from "./format.js";

const HINT_SECONDS = 0.35;
/** Tokens from which an answer shows its speed: a shorter one comes in one piece. */
const LEAST_TOKENS = 8;
const RECALL = [
  "The code of the amber falcon is 4821.",
  "What is the code of the amber falcon?",
  "The owner of the silent otter is Clara.",
];
const ANY = ["Explain in two sentences what a key/value cache is.", "Write a haiku about a reservoir."];

/** The conversation. */
export class Chat {
  messages = [];
  model = "";
  running = null;

  constructor() {
    this.log = byId("log");
    this.draft = byId("draft");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.running.abort();
      else this.say(this.draft.value);
    });
    this.draft.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.running) this.say(this.draft.value);
    });
    this.draft.addEventListener("input", () => {
      this.fitDraft();
      this.hintLater();
    });
    byId("system").addEventListener("input", () => this.hintLater());
    byId("clear-chat").addEventListener("click", () => this.clear());
  }

  /** Learn which model is served: what could be said first depends on it. */
  serves(model) {
    if (model === this.model) return;
    this.model = model;
    const starters = /recall/i.test(model) ? RECALL : ANY;
    byId("starters").replaceChildren(
      ...starters.map((text) => {
        const button = make("button", { type: "button", class: "starter" }, text);
        button.addEventListener("click", () => this.say(text));
        return button;
      }),
    );
  }

  clear() {
    this.halt();
    this.messages = [];
    this.log.replaceChildren(byId("welcome") ?? this.welcome);
    this.hint("");
    this.draft.focus();
  }

  /** Say something, and write down the answer while it comes. */
  async say(text) {
    const said = text.trim();
    if (!said || this.running || !this.model) return;
    this.welcome ??= byId("welcome");
    this.welcome.remove();
    this.draft.value = "";
    this.fitDraft();
    this.hint("");
    const at = this.messages.length;
    this.messages.push({ role: "user", content: said });
    this.bubble("user", said, at);
    await this.answer();
  }

  async answer() {
    const running = new AbortController();
    this.running = running;
    this.showRunning();
    const bubble = this.bubble("assistant", "");
    bubble.element.classList.add("coming");
    const started = performance.now();
    const told = { first: null, last: null, usage: null, finish: null };
    let text = "";
    try {
      for await (const { event, data } of events("v1/chat/completions", {
        method: "POST",
        body: this.body(),
        signal: running.signal,
      })) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (event === "error" || chunk.error) throw new Error(chunk.error?.message ?? data);
        told.usage = chunk.usage ?? told.usage;
        const [choice] = chunk.choices ?? [];
        told.finish = choice?.finish_reason ?? told.finish;
        const piece = choice?.delta?.content;
        if (!piece) continue;
        told.last = performance.now();
        told.first ??= told.last;
        text += piece;
        say(bubble.text, text);
        this.follow();
      }
      say(bubble.cost, cost(told, started));
    } catch (error) {
      if (error.name === "AbortError") say(bubble.cost, "stopped");
      else {
        bubble.element.classList.add("failed");
        say(bubble.cost, error.message);
      }
    }
    bubble.element.classList.remove("coming");
    if (this.running !== running) return; // another conversation has begun
    this.messages.push({ role: "assistant", content: text });
    this.running = null;
    this.showRunning();
    this.follow();
    if (matchMedia("(pointer: fine)").matches) this.draft.focus();
  }

  body() {
    return {
      model: this.model,
      messages: this.conversation(),
      temperature: Number(byId("temperature").value) || 0,
      max_tokens: Number(byId("max-tokens").value) || 256,
      stream: true,
      stream_options: { include_usage: true },
    };
  }

  conversation() {
    const system = byId("system").value.trim();
    return system ? [{ role: "system", content: system }, ...this.messages] : [...this.messages];
  }

  /** Take a message back, and all behind it, and have it written again. */
  edit(at) {
    this.halt();
    this.draft.value = this.messages[at].content;
    this.messages.length = at;
    while (this.log.children.length > at) this.log.lastElementChild.remove();
    this.fitDraft();
    this.draft.focus();
    this.hintLater();
  }

  /** Evict the answer that is coming, and what would become of it. */
  halt() {
    this.running?.abort();
    this.running = null;
    this.showRunning();
  }

  bubble(role, content, at) {
    const text = make("p", { class: "text" }, content);
    const cost = make("p", { class: "cost" });
    const element = make("article", { class: `message ${role}`, "aria-label": role === "user" ? "You" : "Model" }, text);
    if (role === "assistant") element.append(cost);
    else {
      const edit = make("button", { type: "button", class: "edit", "aria-label": "Edit, and go on from here", title: "Edit, and go on from here" }, "✎");
      edit.addEventListener("click", () => this.edit(at));
      element.append(edit);
    }
    this.log.append(element);
    this.log.scrollTop = this.log.scrollHeight;
    return { element, text, cost };
  }

  /** Scroll with the answer, unless the reader has scrolled up. */
  follow() {
    const left = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight;
    if (left < 90) this.log.scrollTop = this.log.scrollHeight;
  }

  showRunning() {
    const send = byId("send");
    send.classList.toggle("stop", Boolean(this.running));
    send.setAttribute("aria-label", this.running ? "Stop" : "Send");
    send.title = this.running ? "Stop" : "Send (Enter)";
  }

  fitDraft() {
    this.draft.style.height = "auto";
    this.draft.style.height = `${Math.min(this.draft.scrollHeight, 180)}px`;
  }

  hintLater() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.askHint(), HINT_SECONDS * 1000);
  }

  /** Show how much of the prompt that would be sent now is in the cache. */
  async askHint() {
    const draft = this.draft.value.trim();
    if (!draft || this.running) return this.hint("");
    try {
      const messages = [...this.conversation(), { role: "user", content: draft }];
      const found = await ask("v1/cache/explain", { method: "POST", body: { messages } });
      if (this.draft.value.trim() !== draft) return;
      const { held_tokens: held, prompt_tokens: all } = found;
      this.hint(`${count(held)} of ${count(all)} tokens are held already (${percent(held / all)})`, held / all);
    } catch {
      this.hint("");
    }
  }

  hint(text, share = 0) {
    const hint = byId("hint");
    say(hint, text);
    hint.style.setProperty("--share", `${share * 100}%`);
  }
}

function cost({ first, last, usage, finish }, started) {
  const said = [];
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    said.push(`${count(cached)} of ${count(usage.prompt_tokens)} prompt tokens from the cache`);
  }
  if (first !== null) said.push(`first token ${duration((first - started) / 1000)}`);
  if (usage?.completion_tokens >= LEAST_TOKENS && last > first) {
    said.push(`${speed((usage.completion_tokens - 1) / ((last - first) / 1000))} tokens/s`);
  }
  if (finish === "length") said.push("cut at its length");
  return said.join(" · ");
}
