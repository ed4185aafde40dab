// The server's interface: the key, JSON, and server-sent events read with fetch, since
// EventSource sends no key.

import { byId, setText } from "./format.js";

const KEY = "penstock-key";
let key = null;
let asking = null;

try {
  key = sessionStorage.getItem(KEY);
} catch {
  // no storage: the key lives as long as the page
}

/** Tell whether a key is in use. */
export function keyed() {
  return Boolean(key);
}

/** Ask for the key; all requests that need it wait for the same answer. */
function askForKey(wrong) {
  asking ??= new Promise((resolve) => {
    const dialog = byId("key-dialog");
    setText(
      byId("key-note"),
      wrong ? "That was not the key. It is kept in this tab only." : "It is kept in this tab only.",
    );
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    dialog.addEventListener(
      "close",
      () => {
        key = byId("key").value.trim();
        byId("key").value = "";
        try {
          sessionStorage.setItem(KEY, key);
        } catch {
          // no storage
        }
        asking = null;
        resolve();
      },
      { once: true },
    );
    dialog.showModal();
  });
  return asking;
}

/** What the server said instead of an answer. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Send a request, with the key if there is one; ask for the key when it is wanted. */
export async function send(path, { method = "GET", body, signal } = {}) {
  for (;;) {
    const used = key;
    const headers = {};
    if (used) headers.Authorization = `Bearer ${used}`;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const response = await fetch(path, {
      method,
      headers,
      signal,
      cache: "no-store",
      body: body === undefined ? undefined : JSON.stringify(body),
    });
    if (response.status === 401) {
      if (used === key) await askForKey(Boolean(used));
      continue;
    }
    if (!response.ok) throw new Refused(response.status, await reason(response));
    return response;
  }
}

async function reason(response) {
  try {
    const { error } = await response.json();
    return error.message;
  } catch {
    return `The server answered ${response.status} ${response.statusText}`;
  }
}

/** Send a request and return its JSON. */
export async function ask(path, options) {
  return (await send(path, options)).json();
}

/** Yield the events of a stream as {event, data}; `alive` is called for comments, too. */
export async function* events(path, { alive = () => {}, ...options } = {}) {
  const response = await send(path, options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let event = "message";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      alive();
      rest += value;
      const lines = rest.split("\n");
      rest = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line === "") {
          if (data.length) yield { event, data: data.join("\n") };
          event = "message";
          data = [];
        } else if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line.startsWith("event:")) event = line.slice(6).trim();
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
