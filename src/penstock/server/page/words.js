// Words of the page that need a sentence: shown by a click, a touch or the Enter key.

import { byId, make, setText } from "./format.js";

const MEANINGS = {
  weights: "Weights are the model itself. They stay in memory as long as the server runs.",
  draft: "The draft model is a small one. It proposes tokens that the model then checks together.",
  buffers: "Buffers are the working memory of one step. They are set aside before the first request.",
  prompts: "Prompts are the room for texts and tokens of open requests. It is set aside at the start.",
  grammars: "Grammars keep answers to a schema. They are the compiled ones, and the states to come.",
  features: "Features are images as the model sees them, so that none is read twice.",
  index: "The index lists the tokens of the tree, so that a prompt can be looked up in it.",
  checkpoints: "Checkpoints are saved states of recurrent layers, from which an answer can go on.",
  tails: "Tails are the newest tokens of the answers being written, with the room promised to them.",
  key_index: "The key index has a few bits of each key. By it a step finds the tokens worth reading.",
  nodes: "Nodes are the boxes of the prefix tree: keys and values of prompts, shared by all requests.",
  preempted: "A preempted answer had to make room for another. It goes on by itself and loses no text.",
};

/** Make a button of a word; a click shows its sentence at `place`, and a second one hides it. */
export function term(name, place, ...children) {
  const button = make(
    "button",
    { type: "button", class: "term", "aria-expanded": "false", title: MEANINGS[name] },
    ...children,
  );
  button.dataset.term = name;
  button.addEventListener("click", () => toggle(button, byId(place)));
  return button;
}

function toggle(button, place) {
  const shown = place.dataset.term === button.dataset.term;
  for (const other of document.querySelectorAll(".term[aria-expanded=true]")) {
    if (byId(other.getAttribute("aria-controls")) === place) other.setAttribute("aria-expanded", "false");
  }
  button.setAttribute("aria-controls", place.id);
  button.setAttribute("aria-expanded", String(!shown));
  place.dataset.term = shown ? "" : button.dataset.term;
  setText(place, shown ? "" : MEANINGS[button.dataset.term]);
  place.hidden = shown;
}
