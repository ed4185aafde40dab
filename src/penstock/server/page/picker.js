// The model that the chat talks to, where several are served, or one with adapters; none is loaded by
// choosing it.

import { byId, bytes, make, setText } from "./format.js";

/** How a model that is not loaded stands, for an answer that waits for it. */
const WAITS = { away: "waits for room", loading: "is loading", leaving: "goes, and is loaded again" };

/** The list of models in the chat's header; hidden where one name is served. */
export class Picker {
  /** What can be chosen: models that write text, and each with an adapter; `base` is the model. */
  models = [];
  chosen = null;
  known = false;

  /** `changed` is called when another model is chosen. */
  constructor(changed) {
    this.changed = changed;
    this.list = byId("picker");
    this.list.addEventListener("change", () => {
      this.chosen = this.list.value;
      changed();
    });
  }

  /** The chosen model, without its adapter. */
  get base() {
    return this.models.find(({ name }) => name === this.chosen)?.base;
  }

  /** Take in the models of a snapshot; null where there is one name. */
  show(models) {
    this.known = true;
    this.models = (models ?? [])
      .filter(({ kinds }) => kinds.includes("chat"))
      .flatMap((model) =>
        ["", ...model.adapters.map((adapter) => `+${adapter}`)].map((suffix) => ({
          ...model,
          base: model.name,
          name: model.name + suffix,
        })),
      );
    this.list.hidden = !this.models.length;
    if (!this.models.some(({ name }) => name === this.chosen)) this.chosen = this.models[0]?.name ?? null;
    const { options } = this.list;
    while (options.length > this.models.length) options[options.length - 1].remove();
    this.models.forEach(({ name, state, pinned }, row) => {
      if (!options[row]) this.list.append(make("option"));
      options[row].value = name;
      setText(options[row], `${name} · ${state}${pinned ? ", pinned" : ""}`);
    });
    if (this.chosen !== null) this.list.value = this.chosen;
  }

  /** Choose a model, if it is served; before the first snapshot that is not known. */
  choose(name) {
    if (name === this.chosen || (this.known && !this.models.some((model) => model.name === name))) return;
    this.chosen = this.list.value = name;
    this.changed();
  }

  /** Say why an answer of a model waits, or nothing if the model is loaded. */
  waiting(name) {
    const model = this.models.find((other) => other.name === name);
    if (!model || model.state === "loaded") return "";
    return `${name}${model.size ? ` (${bytes(model.size)})` : ""} ${WAITS[model.state]}`;
  }
}
