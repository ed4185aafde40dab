// Memory over time: what the ledger counts, stacked by purpose, against the limit.

import { barOf, byId, bytes, color, count, make, many, percent, setText } from "./format.js";
import { term } from "./words.js";

/** Kinds with name and color, from the ground up: what stays lies below what comes and goes. */
export const KINDS = [
  ["weights", "Weights", "light-dark(#93a4b3, #64788a)"],
  ["draft", "Draft model", "light-dark(#8a6fc4, #a58be0)"],
  ["buffers", "Buffers", "light-dark(#8e99e0, #7683d9)"],
  ["prompts", "Prompts", "light-dark(#d98ba6, #cf7b9b)"],
  ["grammars", "Grammars", "light-dark(#c9a24d, #b98f3a)"],
  ["features", "Features", "light-dark(#b0795a, #c08a6c)"],
  ["index", "Index", "light-dark(#c58bd8, #b57bd0)"],
  ["checkpoints", "Checkpoints", "light-dark(#5cab6c, #62b975)"],
  ["tails", "Tails", "var(--tails)"],
  ["key_index", "Key index", "light-dark(#4f7fd1, #6d98e0)"],
  ["nodes", "Nodes", "var(--nodes)"],
];
/** Share of the limit from which the limit is drawn in any case. */
const NEAR = 0.6;
const SHOWN_SECONDS = 300;
const LEAST_SECONDS = 30;
const HEIGHT = 232;

/** Columns of time, limit, and each kind; what is older than is shown is dropped. */
class History {
  times = [];
  limits = [];
  kinds = Object.fromEntries(KINDS.map(([kind]) => [kind, []]));

  add(at, limit, byKind) {
    const last = this.times.at(-1);
    if (last !== undefined && at <= last) return;
    this.times.push(at);
    this.limits.push(limit);
    for (const [kind] of KINDS) this.kinds[kind].push(byKind[kind] ?? 0);
    while (this.times[0] < at - SHOWN_SECONDS - 5) {
      this.times.shift();
      this.limits.shift();
      for (const [kind] of KINDS) this.kinds[kind].shift();
    }
  }

  /** Return the tops of the layers, the highest first: so each hides the foot of the last. */
  tops() {
    const sums = this.times.map(() => 0);
    return KINDS.map(([kind]) => this.kinds[kind].map((value, at) => (sums[at] += value))).reverse();
  }
}

/** The chart with its legend and tiers. */
export class MemoryChart {
  constructor() {
    this.history = new History();
    this.place = byId("chart");
    this.place.style.height = `${HEIGHT}px`;
    this.whole = byId("whole");
    this.whole.addEventListener("change", () => this.draw());
    this.legend = new Map(KINDS.map(([kind, ...entry]) => [kind, legendEntry(kind, ...entry)]));
    byId("legend").append(...[...this.legend.values()].map((entry) => entry.element));
    new ResizeObserver(() => this.resize()).observe(this.place);
  }

  /** Take in what the server remembers from before this page was opened. */
  remember({ at_seconds: times, limit_bytes: limits, by_kind: kinds }) {
    times.forEach((at, row) =>
      this.history.add(
        at,
        limits[row],
        Object.fromEntries(Object.entries(kinds).map(([kind, values]) => [kind, values[row]])),
      ),
    );
  }

  /** Take in a snapshot, and draw. */
  show({ at_seconds: at, stats, tiers }) {
    this.history.add(at, stats.limit_bytes, stats.by_kind);
    for (const [kind, entry] of this.legend) {
      const value = stats.by_kind[kind] ?? 0;
      setText(entry.value, bytes(value));
      entry.element.hidden = value === 0;
    }
    this.place.setAttribute(
      "aria-label",
      `Memory over time: ${bytes(stats.used_bytes)} of ${bytes(stats.limit_bytes)} used now; ` +
        `drawn up to ${bytes(Math.round(this.top(stats.limit_bytes)))}`,
    );
    this.showTiers(stats, tiers);
    this.draw();
  }

  showTiers(stats, tiers) {
    const pieces = KINDS.map(([kind, , shade]) => [(stats.by_kind[kind] ?? 0) / stats.limit_bytes, shade]);
    const { memory, ...cold } = tiers;
    byId("tiers").replaceChildren(
      make("dt", {}, "memory"),
      make("dd", { class: "row" }, barOf(...pieces), tierText(memory)),
      ...Object.entries(cold).flatMap(([name, tier]) => tierRow(name, tier, stats.tiers[name])),
    );
  }

  /** Draw anew, in the colors of the theme. */
  restyle() {
    this.plot?.destroy();
    this.plot = undefined;
    this.draw();
  }

  draw() {
    if (typeof uPlot === "undefined" || this.history.times.length < 1) return;
    const columns = [this.history.times, ...this.history.tops(), this.history.limits];
    if (this.plot) this.plot.setData(columns);
    else this.plot = new uPlot(this.options(), columns, this.place);
  }

  resize() {
    this.plot?.setSize({ width: this.place.clientWidth, height: HEIGHT });
  }

  options() {
    const shades = KINDS.map(([, , shade]) => shade).reverse();
    const muted = color("var(--muted)");
    const axis = {
      stroke: muted,
      font: "11px " + getComputedStyle(document.body).fontFamily,
      grid: { stroke: color("var(--edge)"), width: 1 },
      ticks: { show: false },
    };
    return {
      width: this.place.clientWidth,
      height: HEIGHT,
      padding: [10, 18, 0, 0],
      legend: { show: false },
      cursor: { drag: { x: false, y: false }, points: { show: false }, y: false },
      scales: {
        x: { time: false, range: (_, least, most) => [Math.max(Math.min(least, most - LEAST_SECONDS), most - SHOWN_SECONDS), most] },
        y: { range: (_, __, most) => [0, this.top(most)] },
      },
      axes: [
        {
          ...axis,
          grid: { show: false },
          size: 30,
          gap: 9,
          space: 70,
          splits: (_, __, least, most) => ages(least, most),
          values: (plot, splits) => splits.map((at) => ageText(plot.scales.x.max - at)),
        },
        {
          ...axis,
          size: 62,
          space: 38,
          values: (_, splits) => splits.map(bytes),
          splits: (_, __, ___, most) => this.marks(most),
        },
      ],
      series: [
        {},
        ...shades.map((shade) => ({
          fill: color(shade),
          stroke: color("var(--card)"),
          width: 1,
          points: { show: false },
        })),
        {
          stroke: color("var(--bad)"),
          width: 2,
          dash: [6, 5],
          points: { show: false },
        },
      ],
      hooks: { setCursor: [(plot) => this.point(plot.cursor.idx)] },
    };
  }

  /** The top of the scale: a little above the highest use, or the limit if that is near. */
  top(most) {
    const peak = Math.max(...this.history.tops()[0]);
    const limit = Math.max(...this.history.limits);
    return this.whole.checked || peak > NEAR * limit ? most * 1.06 : peak * 1.15;
  }

  /** Round sizes to mark, and the limit itself. */
  marks(most) {
    const limit = this.history.limits.at(-1);
    if (limit > most) return rounds(most);
    return [...rounds(most).filter((value) => value < limit * 0.92), limit];
  }

  /** Show the values under the pointer in the legend. */
  point(at) {
    const past = at !== null && at !== undefined;
    for (const [kind, entry] of this.legend) {
      const value = past ? this.history.kinds[kind][at] : this.history.kinds[kind].at(-1);
      if (value !== undefined) setText(entry.value, bytes(value));
    }
  }
}

function legendEntry(kind, name, shade) {
  const value = make("b", {}, "–");
  const swatch = make("i", { class: "swatch" });
  swatch.style.setProperty("--color", shade);
  const button = term(kind, "memory-meaning", swatch, `${name} `, value);
  button.classList.add("row");
  const element = make("li", {}, button);
  return { element, value };
}

/** Show a cold tier: its share of its limit, if it has one, and its reads and writes. */
function tierRow(name, tier, figures) {
  const on = tier.state === "on";
  const bar = on && tier.limit_bytes ? [barOf([tier.used_bytes / tier.limit_bytes])] : [];
  const text = on ? [tierText(tier), movedText(figures), tier.why] : [tier.why ?? "off"];
  return [
    make("dt", {}, name),
    make("dd", { class: "row" }, ...bar, text.filter(Boolean).join("; ")),
  ];
}

function movedText({ counts }) {
  return (
    `${many(counts.read_blocks, "block")} read (${bytes(counts.read_bytes)}), ` +
    `${count(counts.written_blocks)} written (${bytes(counts.written_bytes)})`
  );
}

function tierText({ used_bytes: used, limit_bytes: limit }) {
  if (!limit) return "";
  return `${bytes(used)} of ${bytes(limit)} (${percent(used / limit)})`;
}

/** Round times to mark, counted back from now. */
function ages(least, most) {
  const step = [5, 10, 15, 30, 60, 120].find((seconds) => (most - least) / seconds <= 6) ?? 300;
  const found = [];
  for (let age = 0; most - age >= least; age += step) found.unshift(most - age);
  return found;
}

function ageText(age) {
  const seconds = Math.round(age);
  if (seconds === 0) return "now";
  return seconds < 60 || seconds % 60 ? `−${seconds} s` : `−${seconds / 60} min`;
}

/** Round sizes to mark, four or five of them. */
function rounds(most) {
  const rough = most / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((value) => value >= rough * 0.9);
  const found = [];
  for (let value = 0; value <= most; value += step) found.push(value);
  return found;
}
