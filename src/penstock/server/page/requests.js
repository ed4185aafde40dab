// The last requests, newest first; one that is opened tells why it hit or missed.

import { byId, count, duration, make, many, percent, setText, speed } from "./format.js";

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
    byId("why-close").addEventListener("click", () => this.dialog.close());
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
    const at = make("span", { class: "at optional" });
    const bar = make("i");
    const share = make("span");
    const cells = {
      answer: make("td", { class: "number optional" }),
      first: make("td", { class: "number optional" }),
      speed: make("td", { class: "number optional" }),
    };
    const state = make("span", { class: "pill" });
    const element = make(
      "tr",
      {},
      make("th", { scope: "row" }, name, at),
      make("td", { class: "share" }, make("span", { class: "meter" }, bar), share),
      cells.answer,
      cells.first,
      cells.speed,
      make("td", { class: "end" }, state),
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
    bar.style.width = `${part(request) * 100}%`;
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
    const all = Math.max(1, request.prompt_tokens);
    const held = make("i", { class: "held" });
    held.style.width = `${(100 * cached(request)) / all}%`;
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
    const list = make("dl", {});
    for (const [name, value] of facts) list.append(make("div", {}, make("dt", {}, name), make("dd", {}, value)));
    byId("why-body").replaceChildren(
      make("span", { class: "bar", "aria-hidden": "true" }, held),
      make(
        "p",
        { class: "key", "aria-hidden": "true" },
        make("span", {}, make("i", { class: "held" }), "from the cache"),
        make("span", {}, make("i"), "computed"),
      ),
      make("p", { class: "reason" }, found ? sentence(found.reason) : "The prompt has not been matched yet."),
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
