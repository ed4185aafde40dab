// Numbers as people read them, and the few lines of DOM that every part needs.

/** A space that no line breaks at, between a number and its unit. */
const SPACE = "\u00a0";
const ROUGH = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

/** Write a size in powers of 1000, as `penstock` does in the terminal. */
export function bytes(count) {
  if (Math.abs(count) < 1000) return `${count}${SPACE}B`;
  let value = count;
  for (const unit of ["kB", "MB", "GB", "TB"]) {
    value /= 1000;
    const digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
    if (Math.abs(Number(value.toFixed(digits))) < 1000 || unit === "TB") {
      return `${value.toFixed(digits)}${SPACE}${unit}`;
    }
  }
  return "";
}

/** Write a count with separators. */
export function count(value) {
  return Math.round(value).toLocaleString("en");
}

/** Write a count in three digits: "561K". */
export function rough(value) {
  return value < 10_000 ? count(value) : ROUGH.format(value);
}

/** Write "1 token", "2 tokens". */
export function many(value, word) {
  return `${count(value)} ${word}${Math.round(value) === 1 ? "" : "s"}`;
}

/** Write a duration: "84 ms", "1.2 s", "4 min". */
export function duration(seconds) {
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)}${SPACE}ms`;
  if (seconds < 100) return `${seconds.toFixed(seconds < 10 ? 1 : 0)}${SPACE}s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)}${SPACE}min`;
  return `${Math.round(seconds / 3600)}${SPACE}h`;
}

/** Write a share; what is not all of it is never "100 %". */
export function percent(share) {
  if (share > 0 && share < 0.01) return `<1${SPACE}%`;
  return `${share < 1 ? Math.min(99, Math.round(share * 100)) : 100}${SPACE}%`;
}

/** Write a speed in tokens per second. */
export function speed(value) {
  return value >= 10 || value === 0 ? count(value) : value.toFixed(1);
}

/** Return the element with this id. */
export function byId(id) {
  return document.getElementById(id);
}

/** Make an element; children are elements or texts, and texts are never read as HTML. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, value);
    }
  }
  element.append(...children);
  return element;
}

/** Set a text, and touch the page only if it differs. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Make a bar of pieces: each has a share of the whole, and a color if it is not that of nodes. */
export function barOf(...pieces) {
  const bar = make("span", { class: "meter" });
  for (const [share, shade] of pieces) {
    const piece = make("i");
    piece.style.width = `${share * 100}%`;
    if (shade) piece.style.setProperty("--color", shade);
    bar.append(piece);
  }
  return bar;
}

/** Return a color of the style sheet, as the theme has it. */
export function color(value) {
  const probe = make("i", { hidden: true });
  probe.style.color = value;
  document.body.append(probe);
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}
