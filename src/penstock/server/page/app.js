// The page: one stream of snapshots from the server, and a part of the page for each thing in them.

import { Refused, events } from "./api.js";
import { Chat } from "./chat.js";
import { MemoryChart } from "./chart.js";
import { byId, bytes, make, many, percent, rough, setText, speed } from "./format.js";
import { followLinks } from "./links.js";
import { Picker } from "./picker.js";
import { Requests } from "./requests.js";
import { TreeView } from "./tree.js";
import { term } from "./words.js";

const AGAIN_SECONDS = 2;
const SILENCE_SECONDS = 10;
const SPARK_POINTS = 60;
const NO_TREE = { nodes: [], left_out: 0, count: 0, tokens: 0, nbytes: 0 };

const chart = new MemoryChart();
const tree = new TreeView();
const requests = new Requests();
const speeds = [];
let shown = null;
let latest = null;
let watch = () => {};
const picker = new Picker(() => {
  if (latest) chat.serves(latest); // a question may be sent before the next snapshot
  watch();
});
const chat = new Chat(picker);
const preempted = term("preempted", "queue-meaning", "–");

/** Follow the server for ever; when it goes, say so and come back. */
async function follow() {
  for (;;) {
    const silence = new AbortController();
    let timer;
    let changed = false;
    watch = () => {
      changed = true;
      silence.abort();
    };
    const model = picker.chosen ? `?model=${encodeURIComponent(picker.chosen)}` : "";
    try {
      const alive = () => {
        clearTimeout(timer);
        timer = setTimeout(() => silence.abort(), SILENCE_SECONDS * 1000);
      };
      for await (const { event, data } of events(`v1/live${model}`, { signal: silence.signal, alive })) {
        if (event === "snapshot") show(JSON.parse(data));
      }
      state("gone", "server not reachable");
    } catch (error) {
      if (changed) continue;
      console.warn(error);
      const refused = error instanceof Refused;
      state("gone", refused ? "server not ready" : "server not reachable", refused ? error.message : "");
    }
    clearTimeout(timer);
    await new Promise((resolve) => setTimeout(resolve, AGAIN_SECONDS * 1000));
  }
}

function show(snapshot) {
  state("live", "live");
  setText(byId("model"), snapshot.model || loadedNames(snapshot.models) || "no model is loaded");
  setText(byId("version"), `penstock ${snapshot.version}`);
  document.title = `${percent(snapshot.stats.used_bytes / snapshot.stats.limit_bytes)} · penstock`;
  picker.show(snapshot.models);
  byId("stats").hidden = !snapshot.model;
  byId("stats").href = `v1/cache/stats?model=${encodeURIComponent(snapshot.model)}`; // or a pool would load its first
  latest = snapshot;
  chat.serves(snapshot);
  if (snapshot.history) {
    chart.remember(snapshot.history);
    speeds.splice(0, speeds.length, ...snapshot.history.generated_per_second.slice(-SPARK_POINTS));
  }
  showTiles(snapshot);
  chart.show(snapshot);
  requests.show(snapshot.requests);
  if (snapshot.tree) tree.show(snapshot.tree, snapshot.model);
  else if (snapshot.model !== shown) tree.show(NO_TREE, "");
  shown = snapshot.model;
}

/** Names of the loaded models, where none of them writes text. */
function loadedNames(models) {
  return (models ?? []).filter(({ state }) => state === "loaded").map(({ name }) => name).join(", ");
}

function showTiles({ stats, hit_rate: hitRate, generated_per_second: generated, prefilled_per_second: prefilled, max_batch_size: slots }) {
  const used = stats.used_bytes / stats.limit_bytes;
  setText(byId("used"), bytes(stats.used_bytes));
  meter("used-meter", used);
  setText(byId("used-note"), `${percent(used)} of the limit of ${bytes(stats.limit_bytes)}${spilledNote(stats)}`);
  setText(byId("hit"), stats.prompt_tokens ? percent(hitRate) : "–");
  meter("hit-meter", hitRate);
  setText(byId("hit-note"), `${rough(stats.hit_tokens)} of ${rough(stats.prompt_tokens)} prompt tokens`);
  setText(byId("speed"), `${speed(generated)} tokens/s`);
  setText(byId("speed-note"), speedNote(prefilled, stats));
  speeds.push(generated);
  while (speeds.length > SPARK_POINTS) speeds.shift();
  spark();
  const working = stats.running + stats.prefilling + stats.restoring;
  setText(byId("running"), working ? `${working} running` : stats.waiting ? "waiting" : "idle");
  setText(byId("waiting"), `${many(stats.waiting, "answer")} waiting, `);
  setText(preempted, `${stats.preempted} preempted`);
  showSlots(stats, slots);
}

function speedNote(prefilled, stats) {
  const read = `${speed(prefilled)} prompt tokens/s read`;
  if (!stats.proposed_tokens) return read;
  const right = rough(stats.accepted_tokens);
  const drafted = stats.accepted_draft_tokens;
  const by = drafted ? `, ${rough(drafted)} by the draft model` : "";
  return `${read}, ${right} of ${rough(stats.proposed_tokens)} guessed tokens right${by}`;
}

/** What has left memory for a cold tier, and what steps read of it; nothing if all stays. */
function spilledNote({ spilling, decode, by_kind: kinds }) {
  if (!spilling) return "";
  const { cached_blocks: cached, read_blocks: read } = spilling.counts;
  const places = `; ${rough(spilling.active_tokens)} tokens here, ${many(spilling.spilled_tokens, "token")} in the tier`;
  const index = `, index of ${bytes(kinds.key_index)}`;
  if (!cached && !read) return places + index;
  const step = rough(Math.round(read / Math.max(1, decode.count)));
  return `${places}${index}; ${step} blocks read a step, ${percent(cached / (cached + read))} found in memory`;
}

function meter(id, share) {
  const element = byId(id);
  element.setAttribute("aria-valuenow", Math.round(share * 100));
  element.firstElementChild.style.width = `${Math.min(1, share) * 100}%`;
}

/** A box for each place in the batch: writing, reading its prompt, or free. */
function showSlots({ running, prefilling, restoring }, slots) {
  const reading = prefilling + restoring;
  const place = byId("slots");
  const drawn = Math.min(slots, 32);
  while (place.children.length < drawn) place.append(make("i"));
  while (place.children.length > drawn) place.lastElementChild.remove();
  [...place.children].forEach((box, at) => {
    box.className = at < running ? "" : at < running + reading ? "computed" : "cold";
  });
}

function spark() {
  const [area, line] = byId("speed-spark").children;
  const most = Math.max(1, ...speeds);
  const step = 120 / (SPARK_POINTS - 1);
  const from = 120 - (speeds.length - 1) * step;
  const points = speeds.map((value, at) => `${(from + at * step).toFixed(1)} ${(22.5 - (value / most) * 21).toFixed(1)}`);
  line.setAttribute("d", `M${points.join("L")}`);
  area.setAttribute("d", `M${points.join("L")}L120 24L${from.toFixed(1)} 24Z`);
}

function state(kind, text, reason = "") {
  const element = byId("state");
  element.title = reason;
  element.dataset.state = kind;
  setText(element.lastElementChild, text);
  byId("board").classList.toggle("stale", kind === "gone"); // the figures are those of before
}

function dark() {
  const chosen = document.documentElement.style.colorScheme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function showTheme() {
  setText(byId("theme"), dark() ? "☀" : "☾");
  chart.restyle();
}

byId("theme").addEventListener("click", () => {
  const theme = dark() ? "light" : "dark";
  document.documentElement.style.colorScheme = theme;
  try {
    localStorage.setItem("penstock-theme", theme);
  } catch {
    // no storage: for this visit
  }
  showTheme();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showTheme);
byId("queue-note").append(preempted);
followLinks();
showTheme();
follow();
