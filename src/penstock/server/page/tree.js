// The prefix tree, drawn as it is read: a box for each node, from the first token on the left to
// the last on the right. A box is as high as all boxes behind it: a widely shared one is tall.

import { ask } from "./api.js";
import { byId, bytes, count, duration, make, many, setText } from "./format.js";

const GAP = 3;
const LEAST_WIDTH = 14;
const TALLEST_ROW = 34;
const LOWEST_ROW = 10;
const HEIGHT = 336;
const COLD_SECONDS = 600;
/** On a narrow screen, boxes that a finger can meet and an eye can read; the drawing scrolls. */
const NARROW = 560;
const NARROW_WIDTH = 64;
const NARROW_ROW = 30;

/** Give each node its children, the number of rows behind it, and its place. */
function grow(nodes) {
  const byNode = new Map(nodes.map((node) => [node.id, { ...node, children: [] }]));
  const roots = [];
  for (const node of byNode.values()) {
    const parent = byNode.get(node.parent);
    if (parent) parent.children.push(node);
    else roots.push(node);
  }
  const spread = (node, depth, before) => {
    node.depth = depth;
    node.x = before;
    node.w = (node.end - node.start) ** 0.5; // a long run is longer, and a short one can be seen
    node.children.sort((a, b) => a.id - b.id);
    for (const child of node.children) spread(child, depth + 1, before + node.w);
    node.rows = node.children.reduce((sum, child) => sum + child.rows, 0) || 1;
  };
  roots.sort((a, b) => a.id - b.id);
  for (const root of roots) spread(root, 0, 0);
  return { byNode, roots };
}

/** Bytes that plain caches would hold, one for each end of the tree. */
function apart(roots) {
  const below = (node, before) => {
    const here = before + node.nbytes;
    return node.children.length ? node.children.reduce((sum, child) => sum + below(child, here), 0) : here;
  };
  return roots.reduce((sum, root) => sum + below(root, 0), 0);
}

/** The drawing, and the facts of the chosen node. */
export class TreeView {
  boxes = new Map();
  chosen = null;
  text = null;
  focused = null;
  tree = null;

  constructor() {
    this.place = byId("canopy");
    this.leaf = byId("leaf");
    this.place.addEventListener("keydown", (event) => this.move(event));
    new ResizeObserver(() => this.tree && this.draw()).observe(this.place.parentElement);
  }

  /** Take in a tree, and draw it. */
  show(tree, model) {
    this.tree = tree;
    this.model = model;
    Object.assign(this, grow(tree.nodes));
    this.sum();
    this.draw();
  }

  sum() {
    const { nodes, left_out: leftOut, nbytes, tokens, count: all } = this.tree;
    const text = [many(all, "node"), many(tokens, "token"), bytes(nbytes)];
    const copies = apart(this.roots);
    if (!leftOut && copies > nbytes * 1.05) text.push(`${bytes(copies)} if each branch had its own`);
    if (leftOut) text.push(`${count(nodes.length)} nodes drawn`);
    setText(byId("tree-sum"), text.join(" · "));
    const none = nodes.length === 0;
    byId("tree-empty").hidden = !none;
    byId("scale").hidden = none;
    this.place.hidden = none;
  }

  draw() {
    const rows = this.roots.reduce((sum, root) => sum + root.rows, 0);
    const room = this.place.parentElement.clientWidth;
    const narrow = room < NARROW;
    this.least = narrow ? NARROW_WIDTH : LEAST_WIDTH;
    const lowest = narrow ? NARROW_ROW : LOWEST_ROW;
    const row = Math.max(lowest, Math.min(TALLEST_ROW, Math.floor(HEIGHT / Math.max(1, rows))));
    this.place.style.height = `${rows * row}px`;
    const width = Math.max(room, this.longest(0));
    this.place.style.width = `${width}px`;
    const scale = this.fit(width);
    const seen = new Set();
    let top = 0;
    for (const root of this.roots) {
      this.lay(root, 0, top, row, scale, seen);
      top += root.rows * row;
    }
    for (const [id, box] of this.boxes) {
      if (seen.has(id)) continue;
      box.remove();
      this.boxes.delete(id);
    }
    this.rove();
    this.showChosen();
  }

  /** Return how wide the longest branch is. */
  longest(scale) {
    const along = (node) =>
      Math.max(this.least, node.w * scale) + node.children.reduce((most, child) => Math.max(most, along(child)), 0);
    return this.roots.reduce((most, root) => Math.max(most, along(root)), 0);
  }

  /** Return how wide a node is: in all, the boxes of the longest branch fill the width. */
  fit(width) {
    let low = 0;
    let high = width;
    for (let round = 0; round < 30; round += 1) {
      const middle = (low + high) / 2;
      if (this.longest(middle) > width) high = middle;
      else low = middle;
    }
    return low;
  }

  lay(node, left, top, row, scale, seen) {
    seen.add(node.id);
    let box = this.boxes.get(node.id);
    if (!box) {
      box = make("button", { type: "button", class: "node row single", role: "treeitem", tabindex: "-1" });
      box.append(make("span", { class: "size" }), make("span"), make("span", { class: "pill note" }));
      box.addEventListener("click", () => this.choose(node.id));
      box.addEventListener("focus", () => (this.focused = node.id));
      this.boxes.set(node.id, box);
      this.place.append(box);
    }
    const width = Math.max(this.least, node.w * scale);
    const height = node.rows * row;
    Object.assign(box.style, {
      left: `${left}px`,
      top: `${top}px`,
      width: `${width - GAP}px`,
      height: `${height - GAP}px`,
    });
    this.dress(box, node, width, height);
    let below = top;
    for (const child of node.children) {
      this.lay(child, left + width, below, row, scale, seen);
      below += child.rows * row;
    }
  }

  dress(box, node, width, height) {
    const warmth = Math.max(0, 1 - Math.log1p(node.idle_seconds) / Math.log1p(COLD_SECONDS));
    box.style.setProperty("--warmth", warmth.toFixed(2));
    box.classList.toggle("pinned", node.pins > 0);
    box.classList.toggle("kept", node.held_seconds > 0);
    const high = height > 84 && width > 90;
    const [size, length, pins] = box.children;
    box.classList.toggle("high", high);
    size.hidden = width < 58 || height < 16;
    length.hidden = !high;
    pins.hidden = size.hidden || width < 96 || !node.pins;
    box.setAttribute("aria-level", node.depth + 1);
    box.setAttribute("aria-label", this.words(node));
    box.title = this.words(node);
    setText(size, bytes(node.nbytes));
    setText(length, many(node.end - node.start, "token"));
    setText(pins, node.pins ? `${node.pins}×` : "");
  }

  words(node) {
    const pins = node.pins ? `, read by ${node.pins} now` : "";
    return `Tokens ${count(node.start)} to ${count(node.end)}, ${bytes(node.nbytes)}${pins}`;
  }

  choose(id) {
    this.chosen = this.chosen === id ? null : id;
    this.text = null;
    this.showChosen();
  }

  /** Show the chosen node below the drawing. */
  showChosen() {
    const node = this.byNode?.get(this.chosen);
    for (const [id, box] of this.boxes) {
      const on = id === this.chosen && Boolean(node);
      box.setAttribute("aria-selected", on);
    }
    this.leaf.hidden = !node;
    if (!node) return;
    const facts = [
      ["Tokens", `${count(node.start)} – ${count(node.end)}`],
      ["Bytes", bytes(node.nbytes)],
      ["Read now by", String(node.pins)],
      ["Read before", many(node.hits, "time")],
      ["Last used", node.idle_seconds < 1 ? "just now" : `${duration(node.idle_seconds)} ago`],
    ];
    if (node.held_seconds > 0) facts.push(["Kept for", duration(node.held_seconds)]);
    const list = make("dl", { class: "row wide" });
    for (const [name, value] of facts) list.append(make("div", {}, make("dt", { class: "note" }, name), make("dd", {}, value)));
    const show = make("button", { type: "button", class: "ghost" }, "Show its first words");
    show.addEventListener("click", () => this.read(node.id));
    this.leaf.replaceChildren(list, this.text === null ? show : make("blockquote", { class: "verbatim" }, this.text));
  }

  async read(id) {
    try {
      const { nodes } = await ask(`v1/cache/tree?text=1&model=${encodeURIComponent(this.model)}`);
      this.text = nodes.find((node) => node.id === id)?.text ?? "It is gone.";
    } catch (error) {
      this.text = error.message;
    }
    if (this.chosen === id) this.showChosen();
  }

  /** One box can be reached with Tab; the arrows go on from there. */
  rove() {
    const first = this.roots[0]?.id;
    if (!this.boxes.has(this.focused)) this.focused = first;
    for (const [id, box] of this.boxes) box.tabIndex = id === this.focused ? 0 : -1;
  }

  move(event) {
    const node = this.byNode?.get(this.focused);
    if (!node) return;
    const beside = this.byNode.get(node.parent)?.children ?? this.roots;
    const at = beside.indexOf(node);
    const to = {
      ArrowRight: node.children[0],
      ArrowLeft: this.byNode.get(node.parent),
      ArrowDown: beside[at + 1],
      ArrowUp: beside[at - 1],
      Home: this.roots[0],
    }[event.key];
    if (!to) return;
    event.preventDefault();
    this.boxes.get(to.id).focus();
    this.rove();
  }
}
