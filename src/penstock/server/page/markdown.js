// An answer's Markdown as elements. The parser is marked's lexer (marked/LICENSE); the elements are
// made here, one kind of token after the other. No text is ever read as HTML, so nothing that a
// model writes can become a script, a form, a picture from elsewhere or a link to a script.

import { Lexer } from "./marked/marked.esm.js";
import { make } from "./format.js";

const LINKS = /^(https?|mailto):/i;
/** Highest number that a list begins with. */
const LAST_START = 999;
const COPIED_SECONDS = 1.5;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };

/** Return the elements of a Markdown text. */
export function markdown(text) {
  return blocks(new Lexer({ gfm: true, breaks: true }).lex(text));
}

/** Builders of elements by the type of token; a type without one becomes its own text. */
const BUILDERS = {
  space: () => null,
  def: () => null,
  hr: () => make("hr"),
  br: () => make("br"),
  heading: ({ depth, tokens }) => make(`h${Math.min(6, depth + 2)}`, {}, ...blocks(tokens)),
  paragraph: ({ tokens }) => make("p", {}, ...blocks(tokens)),
  blockquote: ({ tokens }) => make("blockquote", {}, ...blocks(tokens)),
  strong: ({ tokens }) => make("strong", {}, ...blocks(tokens)),
  em: ({ tokens }) => make("em", {}, ...blocks(tokens)),
  del: ({ tokens }) => make("del", {}, ...blocks(tokens)),
  codespan: ({ text }) => make("code", {}, text),
  escape: ({ text }) => text,
  checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  text: ({ text, tokens }) => (tokens ? fragment(tokens) : plain(text)),
  link,
  code,
  list,
  table,
};

function blocks(tokens) {
  return tokens.map(build).filter((node) => node !== null);
}

function build(token) {
  const builder = Object.hasOwn(BUILDERS, token.type) ? BUILDERS[token.type] : null;
  return builder ? builder(token) : token.raw;
}

function fragment(tokens) {
  const nodes = document.createDocumentFragment();
  nodes.append(...blocks(tokens));
  return nodes;
}

function plain(text) {
  return text.replace(/&(amp|lt|gt|quot|apos|nbsp);/g, (_, name) => ENTITIES[name]);
}

function link({ href, tokens, raw }) {
  if (!LINKS.test(href)) return raw;
  return make("a", { href, title: href, target: "_blank", rel: "noopener noreferrer" }, ...blocks(tokens));
}

/** A list; "4821." at the beginning of a line is no list, but a number and a full stop. */
function list({ ordered, start, items, raw }) {
  if (ordered && (start > LAST_START || !items.some(({ text }) => text))) return make("p", {}, raw.trimEnd());
  const entries = items.map(({ tokens }) => make("li", {}, ...blocks(tokens)));
  return make(ordered ? "ol" : "ul", { start: ordered && start !== 1 ? start : null }, ...entries);
}

function table({ header, rows }) {
  const cells = (tag, row) =>
    row.map(({ tokens, align }) => make(tag, { class: align }, ...blocks(tokens)));
  return make(
    "div",
    { class: "scroll" },
    make(
      "table",
      {},
      make("thead", {}, make("tr", {}, ...cells("th", header))),
      make("tbody", {}, ...rows.map((row) => make("tr", {}, ...cells("td", row)))),
    ),
  );
}

/** A block of code with its language and a button that copies it. */
function code({ text, lang }) {
  const copy = make("button", { type: "button", class: "link" }, "Copy");
  copy.addEventListener("click", () => copyText(text, copy));
  const name = make("span", {}, (lang ?? "").split(/\s/)[0]);
  return make("figure", { class: "code box" }, make("figcaption", { class: "row spread" }, name, copy), make("pre", { class: "scroll" }, make("code", {}, text)));
}

/** Copy a text, and say so on a button for a moment. */
export async function copyText(text, button) {
  const name = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = copySelected(text) ? "Copied" : "Not allowed";
  }
  setTimeout(() => (button.textContent = name), COPIED_SECONDS * 1000);
}

/** Copy without the clipboard's interface, which pages over plain HTTP from elsewhere lack. */
function copySelected(text) {
  const field = make("textarea", { class: "hidden" });
  field.value = text;
  document.body.append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  return copied;
}
