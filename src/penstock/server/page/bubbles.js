// The messages of a conversation as elements. A question is shown as it was written; an answer is
// Markdown, with its reasoning folded above it.

import { duration, make, setText } from "./format.js";
import { markdown } from "./markdown.js";
import { image, parted } from "./pictures.js";

/** Make a question's bubble, of a text or of images and a text; `edit` takes it back. */
export function questionBubble(content, edit) {
  const { urls, text } = parted(content);
  const words = "Edit, and go on from here";
  const button = make("button", { type: "button", class: "edit", "aria-label": words, title: words }, "✎");
  button.addEventListener("click", edit);
  return make("article", { class: "message user", "aria-label": "You" }, ...urls.map(image), make("p", { class: "text" }, text), button);
}

/** Make the bubble of an answer that is coming. */
export function answerBubble() {
  return new Answer();
}

class Answer {
  text = "";
  reasoning = "";

  constructor() {
    this.label = make("summary", {}, "Reasoning …");
    this.thoughts = make("p", { class: "thoughts" });
    this.folded = make("details", { class: "reasoning", hidden: true }, this.label, this.thoughts);
    this.body = make("div", { class: "text" });
    this.cost = make("p", { class: "cost" });
    this.element = make(
      "article",
      { class: "message assistant", "aria-label": "Model" },
      this.folded,
      this.body,
      this.cost,
    );
    this.began = performance.now();
  }

  /** Wait for the stream, which may go on with what is there. */
  begin() {
    this.element.classList.add("coming");
    setText(this.cost, "");
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
  fail(reason, again) {
    this.element.classList.add("failed");
    const button = make("button", { type: "button", class: "link" }, "Try again");
    button.addEventListener("click", again);
    const sentence = /[.!?]$/.test(reason) ? reason : `${reason}.`;
    this.cost.replaceChildren(`${sentence} This turn is not sent along. `, button);
  }

  finish() {
    if (this.drawn !== undefined) cancelAnimationFrame(this.drawn);
    if (this.reasoning && !this.text) this.foldReasoning();
    this.draw();
    this.element.classList.remove("coming");
  }
}
