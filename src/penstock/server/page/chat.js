// Chat with the model. Each answer says what it took, and how much of its prompt was served from
// the cache. Editing a message starts a branch: the tree shows it.

import { ask, events } from "./api.js";
import { Answer, questionBubble } from "./bubbles.js";
import { Conversations } from "./conversations.js";
import { barOf, byId, count, duration, make, percent, setText, speed } from "./format.js";
import { parted, Pictures } from "./pictures.js";

/** Tokens of a text that goes on without a template, where no length is asked for: it has no end. */
const CONTINUED_TOKENS = 256;
const SAY = "Say something. The figures of this page show the cost of each answer.";
const RECALLS = "This small model recalls facts that it is told, and little else: penstock models lists others.";
const CONTINUE = "This model has no chat template: it continues the text that you begin.";
const HINT_SECONDS = 0.35;
/** Tokens from which an answer shows its speed: a shorter one comes in one piece. */
const LEAST_TOKENS = 8;
/** Of an answer that arrives within so few milliseconds no speed is shown. */
const LEAST_MS = 100;
/** First messages, and what may follow: long enough that the second prompt hits the cache. */
const RECALL = [
  {
    name: "Tell it eight facts, then ask",
    text:
      "The code of the amber falcon is 4821. The owner of the silent otter is Clara. " +
      "The colour of the brave fox is green. The code of the crooked mirror is 8850. " +
      "The owner of the nimble rocket is Boris. The colour of the quiet lantern is black. " +
      "The code of the golden kettle is 1307. The owner of the rusty anchor is Diana.",
    then: ["What is the code of the amber falcon?", "Who is the owner of the rusty anchor?"],
  },
];
const TEXT = [
  { name: "A penstock is", text: "A penstock is", then: [] },
  { name: "1, 1, 2, 3, 5,", text: "1, 1, 2, 3, 5,", then: [] },
];
const ANY = [
  {
    name: "Read a paragraph, then answer questions on it",
    text:
      "Read this. A language model writes one token at a time, and for each it looks back at all " +
      "tokens before it. So that it need not compute them again, it keeps two lists of numbers for " +
      "each of them, the keys and the values. They grow with the conversation, and after a while " +
      "they take more memory than the model. When two requests begin with the same text, their " +
      "first keys and values are the same, so one copy serves both. Sum it up in one sentence.",
    then: ["Now for a child of eight, in one sentence.", "Which one word says it best?"],
  },
  { name: "Write a haiku about a reservoir", text: "Write a haiku about a reservoir.", then: [] },
];

/** The conversation. */
export class Chat {
  /** Messages in the order of the bubbles; those of a failed turn have `leftOut`. */
  messages = [];
  id = null;
  model = null;
  /** Whether the model has a chat template; one without continues the text. */
  chats = true;
  running = null;
  /** Questions that a starter offers for later turns. */
  next = [];

  constructor(picker) {
    this.picker = picker;
    this.log = byId("log");
    this.draft = byId("draft");
    this.pictures = new Pictures((why) => this.hint(why));
    /** Whether the end of the conversation is in sight, and stays there while it grows. */
    this.following = true;
    this.lastTop = 0;
    this.log.addEventListener("scroll", () => this.noteScroll());
    new ResizeObserver(() => this.follow()).observe(this.log);
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.running.abort();
      else this.send(this.draft.value);
    });
    this.draft.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.running) this.send(this.draft.value);
    });
    this.draft.addEventListener("input", () => {
      this.fitDraft();
      this.hintLater();
    });
    byId("system").addEventListener("input", () => this.hintLater());
    byId("clear-chat").addEventListener("click", () => this.clear());
    this.kept = new Conversations(
      (conversation) => this.open(conversation),
      (id) => id === this.id && this.clear(),
    );
    const last = this.kept.last();
    if (last) this.open(last);
  }

  /** Learn of the model that would answer: what could be said first depends on it. */
  serves(snapshot) {
    if (snapshot.models && !this.picker.models.length) return this.close(snapshot.models);
    const model = this.picker.chosen ?? snapshot.model;
    this.loaded = snapshot.model === (this.picker.base ?? model);
    this.noteWaiting?.();
    if (this.loaded || model !== this.model) {
      this.pictures.read = !this.loaded || (snapshot.chats && snapshot.sees); // unknown before
    }
    const chats = this.loaded ? snapshot.chats : model !== this.model || this.chats;
    if (model === this.model && chats === this.chats) return;
    this.model = model;
    this.chats = chats;
    this.starters = !chats ? TEXT : /recall/i.test(model) ? RECALL : ANY;
    this.offer();
    byId("starters")?.replaceChildren(
      ...this.starters.map(({ name, text, then }) =>
        suggestion(name, () => {
          this.next = [...then];
          this.send(text);
        }),
      ),
    );
  }

  /** Say what can be written; a model without a chat template continues it. */
  offer() {
    const welcome = byId("welcome") ?? this.welcome;
    setText(welcome.querySelector("p"), !this.chats ? CONTINUE : this.starters === RECALL ? RECALLS : SAY);
    this.draft.placeholder = this.chats ? "Message the model" : "Begin a text";
  }

  /** Say what is served where no model writes text: nothing can be sent. */
  close(models) {
    const parts = ["composer", "settings", "show-kept", "clear-chat"].map(byId);
    if (parts[0].hidden) return;
    this.clear();
    for (const part of parts) part.hidden = true;
    const served = models.map(({ name, kinds }) => `${name} (${kinds.join(", ")})`).join(", ");
    setText(byId("welcome").querySelector("p"), `No model here writes text. Served: ${served}. The API lists the routes.`);
  }

  clear() {
    this.leave();
    this.kept.note(null);
    this.log.replaceChildren(byId("welcome") ?? this.welcome);
    this.draft.focus();
  }

  /** Show a kept conversation, and go on with it. */
  open({ id, system, model, messages }) {
    this.leave();
    this.kept.note(id);
    this.id = id;
    this.messages = messages;
    byId("system").value = system;
    this.picker.choose(model);
    this.welcome ??= byId("welcome");
    this.log.replaceChildren();
    messages.forEach((message, at) => {
      const answer = message.role === "assistant" ? this.bubble() : null;
      answer?.show(message);
      this.append(answer?.element ?? questionBubble(message.content, () => this.edit(at)));
    });
  }

  /** Leave a conversation; what there is of an answer is kept. */
  leave() {
    if (this.running) this.keep(this.coming, { name: "AbortError" });
    this.halt();
    this.messages = [];
    this.next = [];
    this.id = null;
    this.pictures.show([]);
    this.hint("");
  }

  bubble() {
    return new Answer((element) => this.again(element));
  }

  /** Send a message, and write down the answer while it comes. */
  async send(text) {
    const said = text.trim();
    if (!(said || this.pictures.urls.length) || this.running) return;
    this.offered?.remove();
    this.welcome ??= byId("welcome");
    this.welcome.remove();
    this.suggested?.remove();
    this.draft.value = "";
    this.fitDraft();
    this.hint("");
    const at = this.messages.length;
    const content = this.pictures.contentWith(said);
    this.messages.push({ role: "user", content });
    this.append(questionBubble(content, () => this.edit(at)));
    await this.answer();
  }

  /** Go on with the last answer, which was cut. */
  async goOn(bubble) {
    if (this.running || this.messages.at(-1)?.role !== "assistant") return;
    this.offered?.remove();
    const body = this.body(true);
    this.messages.pop();
    await this.answer(bubble, body);
  }

  async answer(bubble = this.bubble(), body = this.body()) {
    const running = new AbortController();
    this.running = running;
    this.coming = bubble;
    this.showRunning();
    this.append(bubble.element);
    bubble.begin();
    const started = performance.now();
    const seen = { first: null, last: null, usage: null, finish: null };
    this.noteWaiting = () => {
      const waits = this.picker.waiting(body.model);
      const seconds = duration((performance.now() - started) / 1000);
      if (seen.first === null && waits) setText(bubble.cost, `${waits}, ${seconds} so far`);
    };
    let failure = null;
    try {
      for await (const { event, data } of events(this.chats ? "v1/chat/completions" : "v1/completions", {
        method: "POST",
        body,
        signal: running.signal,
      })) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (event === "error" || chunk.error) throw new Error(chunk.error?.message ?? data);
        seen.usage = chunk.usage ?? seen.usage;
        const [choice] = chunk.choices ?? [];
        seen.finish = choice?.finish_reason ?? seen.finish;
        if (chunk.prompt_progress) setText(bubble.cost, reading(chunk.prompt_progress));
        if (!bubble.add(choice?.delta ?? { content: choice?.text })) continue;
        if (seen.first === null) setText(bubble.cost, ""); // the prompt is read
        seen.last = performance.now();
        seen.first ??= seen.last;
        this.follow();
      }
      if (seen.finish === null) throw new Error("The connection ended before the answer did.");
      const name = this.picker.chosen === null ? [] : [body.model];
      setText(bubble.cost, [...name, ...cost(seen, started)].join(" · "));
    } catch (error) {
      failure = error;
      if (error.name === "AbortError") setText(bubble.cost, "stopped");
      else bubble.fail(reason(error));
    }
    bubble.finish();
    if (this.running !== running) return; // another conversation has begun
    this.noteWaiting = null;
    this.keep(bubble, failure);
    this.running = null;
    this.showRunning();
    if (seen.finish === "length" && bubble.text) this.offerMore(bubble);
    else this.suggest();
    this.follow();
    if (matchMedia("(pointer: fine)").matches) this.draft.focus();
  }

  /** Keep an answer; of a failed turn, or one stopped before its first word, nothing is sent. */
  keep({ text, reasoning, cost }, failure) {
    const failed = failure !== null && failure.name !== "AbortError";
    const message = { role: "assistant", content: text, cost: cost.textContent };
    if (reasoning) message.reasoning_content = reasoning;
    if (failed || (failure && !text)) message.leftOut = this.messages.at(-1).leftOut = true;
    this.messages.push(message);
    const messages = this.messages.filter(({ leftOut }) => !leftOut);
    if (!messages.length) return;
    this.id ??= `${Date.now()}-${Math.random()}`;
    this.kept.keep({ id: this.id, model: this.model, messages, system: byId("system").value });
  }

  /** Ask the question of an answer again. */
  again(element) {
    if (this.running) return;
    const at = [...this.log.children].indexOf(element) - 1;
    const { urls, text } = parted(this.messages[at].content);
    this.cutBack(at);
    this.pictures.show(urls);
    this.send(text);
  }

  /** Offer to go on with an answer that was cut. */
  offerMore(bubble) {
    this.offered = suggestion("Continue", () => this.goOn(bubble));
    this.log.append(this.offered);
  }

  /** Offer the next question of a starter. */
  suggest() {
    if (!this.next.length || this.messages.at(-1).leftOut) return;
    const text = this.next.shift();
    this.suggested = suggestion(text, () => this.send(text));
    this.log.append(this.suggested);
  }

  /** The request: what is left empty in the settings is the model's own. */
  body(goesOn = false) {
    const asked = { stream: true, stream_options: { include_usage: true } };
    if (this.model) asked.model = this.model; // the server knows its own
    if (!this.chats) asked.max_tokens = CONTINUED_TOKENS;
    for (const { name, value } of document.querySelectorAll(".fields input")) {
      if (value.trim()) asked[name] = Number(value);
    }
    if (!this.chats) return { ...asked, prompt: this.text() };
    const more = goesOn ? { continue_final_message: true, add_generation_prompt: false } : {};
    return { ...asked, messages: this.conversation(), return_progress: true, ...more };
  }

  /** The text so far, for a model without a chat template. */
  text() {
    return this.conversation().map(({ content }) => content).join("");
  }

  conversation() {
    const system = byId("system").value.trim();
    const sent = this.messages
      .filter(({ leftOut }) => !leftOut)
      .map(({ role, content, reasoning_content }) => ({ role, content, reasoning_content }));
    return system ? [{ role: "system", content: system }, ...sent] : sent;
  }

  /** Take a message back, and all behind it, and have it written again. */
  edit(at) {
    this.halt();
    const { urls, text } = parted(this.messages[at].content);
    this.draft.value = text;
    this.pictures.show(urls);
    this.cutBack(at);
    this.fitDraft();
    this.draft.focus();
    this.hintLater();
  }

  cutBack(at) {
    this.messages.length = at;
    while (this.log.children.length > at) this.log.lastElementChild.remove();
  }

  /** Stop the answer that is coming. */
  halt() {
    this.running?.abort();
    this.running = this.noteWaiting = null;
    this.showRunning();
  }

  append(element) {
    this.following = true;
    this.log.append(element);
    this.follow();
  }

  /** Scroll with the answer, unless the reader has scrolled up. */
  follow() {
    if (this.following) this.log.scrollTop = this.log.scrollHeight;
  }

  /** A growing draft also moves the end out of sight: only who scrolls up stops following. */
  noteScroll() {
    const { scrollHeight, scrollTop, clientHeight } = this.log;
    const isAtEnd = scrollHeight - scrollTop - clientHeight < 90;
    if (isAtEnd || scrollTop < this.lastTop) this.following = isAtEnd;
    this.lastTop = scrollTop;
  }

  showRunning() {
    const send = byId("send");
    setText(send, this.running ? "■" : "↑");
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
    const pictured = this.pictures.urls.length || this.messages.some(({ content }) => Array.isArray(content));
    const away = this.picker.waiting(this.model); // a question would load it
    if (!draft || pictured || away || this.running) return this.hint(""); // all images would be sent for it
    try {
      const messages = [...this.conversation(), { role: "user", content: draft }];
      const named = this.model && { model: this.model };
      const body = this.chats ? { ...named, messages } : { ...named, prompt: this.text() + draft };
      const found = await ask("v1/cache/explain", { method: "POST", body });
      if (this.draft.value.trim() !== draft) return;
      const { held_tokens: held, prompt_tokens: all } = found;
      this.hint(`${count(held)} of ${count(all)} tokens are in the cache already (${percent(held / all)})`, held / all);
    } catch {
      this.hint("");
    }
  }

  hint(text, share = 0) {
    byId("hint").replaceChildren(...(share ? [barOf([share])] : []), text);
  }
}

function suggestion(text, act) {
  const button = make("button", { type: "button", class: "starter box" }, text);
  button.addEventListener("click", act);
  return button;
}

/** Say why a turn failed; a browser has no words of its own for a server that is away. */
function reason(error) {
  return error instanceof TypeError ? "The server is not reachable." : error.message;
}

/** Write how much of a prompt is read; nothing once it is. */
function reading({ total, processed, left_ms: left }) {
  if (processed >= total) return "";
  const said = `reading the prompt: ${count(processed)} of ${count(total)} tokens`;
  return left === null ? said : `${said}, about ${duration(left / 1000)} left`;
}

function cost({ first, last, usage, finish }, started) {
  const said = [];
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    said.push(`${count(cached)} of ${count(usage.prompt_tokens)} prompt tokens from the cache (${percent(cached / usage.prompt_tokens)})`);
  }
  if (first !== null) said.push(`first token ${duration((first - started) / 1000)}`);
  if (usage?.completion_tokens >= LEAST_TOKENS && last - first >= LEAST_MS) {
    said.push(`${speed((usage.completion_tokens - 1) / ((last - first) / 1000))} tokens/s`);
  }
  const guessed = usage?.completion_tokens_details;
  if (guessed?.accepted_prediction_tokens || guessed?.rejected_prediction_tokens) {
    const { accepted_prediction_tokens: right, rejected_prediction_tokens: wrong } = guessed;
    said.push(`${count(right)} of ${count(right + wrong)} guessed tokens right`);
  }
  if (finish === "length") said.push("cut at its length");
  return said;
}
