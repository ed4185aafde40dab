// The last requests, newest first; one that is opened tells why it hit or missed.

import { barOf, byId, count, duration, make, many, percent, setText, speed } from "./format.js";

/** How an open request stands, and how one has ended. */
const WORDS = {
  waiting: "waiting",
  running: "writing",
  stop: "done",
  length: "length reached",
  cancelled: "cancelled",
};

/** The table, and the dialog that a row opens. */
export class Requests {
  rows = new Map();
  opened = null;

  constructor() {
    this.body = byId("rows");
    this.dialog = byId("why");
    this.dialog.addEventListener("click", (event) => {
      if (event.target === this.dialog) this.dialog.close(); // beside it
    });
    this.dialog.addEventListener("close", () => (this.opened = null));
  }

  /** Take in the list, oldest first. */
  show(requests) {
    byId("requests-empty").hidden = requests.length > 0;
    byId("requests-table").hidden = requests.length === 0;
    const open = requests.filter(({ state }) => state === "waiting" || state === "running").length;
    setText(byId("requests-sum"), open ? `${count(open)} open` : "");
    const seen = new Set(requests.map((request) => request.id));
    for (const [id, row] of this.rows) {
      if (seen.has(id)) continue;
      row.element.remove();
      this.rows.delete(id);
    }
    for (const request of requests) {
      let row = this.rows.get(request.id);
      if (!row) {
        row = this.add();
        this.rows.set(request.id, row);
        this.body.prepend(row.element);
      }
      row.request = request;
      this.fill(row);
    }
    if (this.opened && seen.has(this.opened)) this.explain(this.rows.get(this.opened).request);
  }

  add() {
    const name = make("button", { type: "button", class: "link" });
    const at = make("span", { class: "note optional" });
    const bar = barOf([0]);
    const share = make("span");
    const cells = {
      answer: make("td", { class: "right optional" }),
      first: make("td", { class: "right optional" }),
      speed: make("td", { class: "right optional" }),
    };
    const state = make("span", { class: "pill note" });
    const element = make(
      "tr",
      {},
      make("th", { scope: "row" }, name, " ", at),
      make("td", { class: "share" }, make("div", { class: "row" }, bar, share)),
      cells.answer,
      cells.first,
      cells.speed,
      make("td", { class: "right" }, state),
    );
    const row = { element, name, at, bar, share, cells, state, request: null };
    element.addEventListener("click", () => this.open(row.request));
    return row;
  }

  fill({ request, name, at, bar, share, cells, state }) {
    const word = request.state === "failed" ? "failed" : (request.finish ?? request.state);
    setText(name, short(request.label));
    setText(at, clock(request.started));
    name.setAttribute("aria-label", `${short(request.label)}, ${clock(request.started)}: why it hit or missed`);
    name.title = clock(request.started);
    bar.firstElementChild.style.width = `${part(request) * 100}%`;
    setText(share, `${count(cached(request))} of ${count(request.prompt_tokens)}`);
    setText(cells.answer, count(request.completion_tokens));
    setText(cells.first, request.first_token_seconds == null ? "–" : duration(request.first_token_seconds));
    setText(cells.speed, request.tokens_per_second == null ? "–" : `${speed(request.tokens_per_second)}/s`);
    setText(state, WORDS[word] ?? word);
    state.title = request.finish ?? "";
    state.dataset.state = word;
  }

  open(request) {
    this.opened = request.id;
    this.explain(request);
    if (!this.dialog.open) this.dialog.showModal();
  }

  explain(request) {
    const found = request.explanation;
    setText(byId("why-title"), `${short(request.label)}, ${clock(request.started)}`);
    const facts = [
      ["Served from the cache", `${count(cached(request))} tokens (${percent(part(request))})`],
      ["Computed", many(request.prompt_tokens - cached(request), "token")],
      ["Answer", many(request.completion_tokens, "token")],
    ];
    if (request.first_token_seconds != null) facts.push(["First token after", duration(request.first_token_seconds)]);
    if (request.tokens_per_second != null) facts.push(["Speed", `${speed(request.tokens_per_second)} tokens/s`]);
    if (found && found.held_tokens !== cached(request)) {
      facts.push(["Held when it came", many(found.held_tokens, "token")]);
    }
    if (found?.diverges_at != null) facts.push(["First difference at token", count(found.diverges_at)]);
    if (found?.evicted_seconds_ago != null) {
      facts.push(["The next block was evicted", `${duration(found.evicted_seconds_ago)} before`]);
    }
    const list = make("dl", { class: "rows" });
    for (const [name, value] of facts) list.append(make("div", {}, make("dt", { class: "note" }, name), make("dd", {}, value)));
    byId("why-body").replaceChildren(
      barOf([part(request)], [1 - part(request), "var(--tails)"]),
      make(
        "p",
        { class: "row note", "aria-hidden": "true" },
        make("span", { class: "row" }, make("i", { class: "swatch pinned" }), "from the cache"),
        make("span", { class: "row" }, make("i", { class: "swatch computed" }), "computed"),
      ),
      make("p", { class: "reason box" }, found ? sentence(found.reason) : "The prompt has not been matched yet."),
      list,
    );
  }
}

/** Tokens served from the cache; for an open request, the cached tokens at its arrival. */
function cached(request) {
  if (request.finish) return request.cached_tokens;
  return Math.max(request.cached_tokens, request.explanation?.held_tokens ?? 0);
}

function part(request) {
  return request.prompt_tokens ? cached(request) / request.prompt_tokens : 0;
}

function short(label) {
  return label.replace(/^\/v1\//, "");
}

function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString("en-GB");
}

function sentence(text) {
  const said = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(said) ? said : `${said}.`;
}
