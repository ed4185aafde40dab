// Conversations kept in this browser, bounded in number and in size. Nothing of them leaves it but
// what is sent to the model.

import { parted } from "./pictures.js";
import { byId, count, make, many, setText } from "./format.js";

const KEPT = "penstock-conversations";
const KEEPS = "penstock-keeps";
const OPEN = "penstock-open";
const MOST = 50;
/** Of the JSON of all; browsers take five million. */
const MOST_CHARACTERS = 2_000_000;
const TITLE_CHARACTERS = 60;

/** The kept conversations, newest first, and the dialog that lists them. */
export class Conversations {
  /** `open` shows a conversation; `forget` is told the id of a deleted one. */
  constructor(open, forget) {
    this.open = open;
    this.forget = forget;
    this.dialog = byId("kept");
    byId("show-kept").addEventListener("click", () => {
      this.draw();
      this.dialog.showModal();
    });
    byId("keeps").checked = this.keeps;
    byId("keeps").addEventListener("change", ({ target }) => {
      write("localStorage", KEEPS, target.checked ? "yes" : "no");
      this.draw();
    });
    byId("forget-all").addEventListener("click", () => this.all().forEach(({ id }) => this.remove(id)));
  }

  get keeps() {
    return read("localStorage", KEEPS) !== "no";
  }

  all() {
    try {
      return JSON.parse(read("localStorage", KEPT)) ?? [];
    } catch {
      return []; // not ours
    }
  }

  /** Keep a conversation, and of the others as many as there is room for. */
  keep(conversation) {
    if (!this.keeps) return;
    const { urls, text } = parted(conversation.messages[0].content);
    const start = text.length > TITLE_CHARACTERS ? `${text.slice(0, TITLE_CHARACTERS - 1)}…` : text;
    const title = start || many(urls.length, "image");
    const others = this.all().filter(({ id }) => id !== conversation.id);
    const kept = [{ ...conversation, title, at: Date.now() }, ...others].slice(0, MOST);
    let json = JSON.stringify(kept);
    while (kept.length && (json.length > MOST_CHARACTERS || !write("localStorage", KEPT, json))) {
      kept.pop();
      json = JSON.stringify(kept);
    }
    this.note(conversation.id);
  }

  /** Note which conversation this tab shows, also after a reload. */
  note(id) {
    write("sessionStorage", OPEN, id ?? "");
  }

  /** The conversation that this tab showed last, if it is kept. */
  last() {
    return this.all().find(({ id }) => id === read("sessionStorage", OPEN));
  }

  remove(id) {
    write("localStorage", KEPT, JSON.stringify(this.all().filter((other) => other.id !== id)));
    this.forget(id);
    this.draw();
  }

  draw() {
    const all = this.all();
    const where = this.keeps ? "New ones are kept in this browser alone" : "New ones are not kept";
    setText(byId("kept-note"), `${where}: ${count(all.length)} of ${count(MOST)} are here.`);
    byId("forget-all").hidden = !all.length;
    byId("kept-list").replaceChildren(...all.map((conversation) => this.row(conversation)));
  }

  row(conversation) {
    const { id, title, at, model } = conversation;
    const when = new Date(at).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
    const show = make("button", { type: "button", class: "link" }, title);
    show.addEventListener("click", () => {
      this.dialog.close();
      this.open(conversation);
    });
    const words = `Delete ${title}`;
    const away = make("button", { type: "button", class: "ghost square", "aria-label": words, title: "Delete" }, "✕");
    away.addEventListener("click", () => this.remove(id));
    return make("li", {}, make("div", {}, show, make("p", { class: "note" }, [when, model].filter(Boolean).join(" · "))), away);
  }
}

function read(storage, name) {
  try {
    return window[storage].getItem(name);
  } catch {
    return null; // no storage
  }
}

/** Write, and return whether there was room. */
function write(storage, name, value) {
  try {
    window[storage].setItem(name, value);
    return true;
  } catch {
    return false;
  }
}
