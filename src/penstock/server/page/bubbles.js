// The messages of a conversation as elements. A question is shown as it was written; an answer is
// Markdown, with its reasoning folded above it.

import { duration, make, setText } from "./format.js";
import { copyText, markdown } from "./markdown.js";
import { image, parted } from "./pictures.js";

/** Make a question's bubble, of a text or of images and a text; `edit` takes it back. */
export function questionBubble(content, edit) {
  const { urls, text } = parted(content);
  const words = "Edit, and go on from here";
  const pen = make("button", { type: "button", class: "edit square note", "aria-label": words, title: words }, "✎");
  pen.addEventListener("click", edit);
  return make("article", { class: "message user", "aria-label": "You" }, ...urls.map((url) => image(url)), make("p", { class: "text verbatim" }, text), pen);
}

/** The bubble of an answer that is coming, or has come; `again` asks for another one. */
export class Answer {
  text = "";
  reasoning = "";

  constructor(again) {
    this.again = () => again(this.element);
    this.label = make("summary", {}, "Reasoning …");
    this.thoughts = make("p", { class: "thoughts verbatim" });
    this.folded = make("details", { class: "reasoning note", hidden: true }, this.label, this.thoughts);
    this.body = make("div", { class: "text" });
    this.cost = make("p", { class: "cost note" });
    const copy = button("Copy answer", () => copyText(this.text, copy));
    this.acts = make("p", { class: "row wide note", hidden: true }, copy, button("Regenerate", this.again));
    this.element = make(
      "article",
      { class: "message assistant", "aria-label": "Model" },
      this.folded,
      this.body,
      this.cost,
      this.acts,
    );
    this.began = performance.now();
  }

  /** Wait for the stream, which may go on with what is there. */
  begin() {
    this.element.classList.add("coming");
    this.element.setAttribute("aria-busy", "true"); // it is read aloud once it is whole
    setText(this.cost, "");
    this.acts.hidden = true;
  }

  /** Show an answer that was kept. */
  show({ content, reasoning_content: reasoning, cost }) {
    this.add({ content, reasoning_content: reasoning });
    this.finish();
    setText(this.label, "Reasoned");
    setText(this.cost, cost ?? "");
  }

  /** Take in a piece of the stream; return whether there was anything in it. */
  add({ content, reasoning_content: reasoning }) {
    if (reasoning) {
      this.reasoning += reasoning;
      this.folded.hidden = false;
      setText(this.thoughts, this.reasoning);
    }
    if (content) {
      if (!this.text) this.foldReasoning();
      this.text += content;
      this.drawn ??= requestAnimationFrame(() => this.draw());
    }
    return Boolean(reasoning || content);
  }

  /** Write how long the model reasoned. */
  foldReasoning() {
    setText(this.label, `Reasoned for ${duration((performance.now() - this.began) / 1000)}`);
  }

  draw() {
    this.drawn = undefined;
    this.body.replaceChildren(...markdown(this.text));
  }

  /** Show why there is no answer, with a button that asks again. */
  fail(reason) {
    this.element.classList.add("failed");
    const sentence = /[.!?]$/.test(reason) ? reason : `${reason}.`;
    this.cost.replaceChildren(`${sentence} This turn is not sent along. `, button("Try again", this.again));
  }

  finish() {
    if (this.drawn !== undefined) cancelAnimationFrame(this.drawn);
    if (this.reasoning && !this.text) this.foldReasoning();
    this.draw();
    this.element.classList.remove("coming");
    this.element.setAttribute("aria-busy", "false");
    this.acts.hidden = !this.text;
  }
}

function button(name, act) {
  const made = make("button", { type: "button", class: "link" }, name);
  made.addEventListener("click", act);
  return made;
}
