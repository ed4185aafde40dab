// The links of the footer. A browser sends no key with a link: where the server wants one, the page
// asks with it and shows the answer itself.

import { ask, keyed, send } from "./api.js";
import { byId, make, setText } from "./format.js";

/** Have the footer's links open here as soon as there is a key. */
export function followLinks() {
  for (const link of document.querySelectorAll("footer a")) {
    link.addEventListener("click", (event) => {
      if (!keyed()) return;
      event.preventDefault();
      open(link.textContent, link.getAttribute("href"));
    });
  }
}

async function open(name, path) {
  setText(byId("sheet-title"), name);
  byId("sheet-body").replaceChildren(await content(path));
  byId("sheet").showModal();
}

async function content(path) {
  try {
    if (path === "docs") return routes(await ask("openapi.json"));
    const text = await (await send(path)).text();
    return make("pre", {}, path === "metrics" ? text : JSON.stringify(JSON.parse(text), null, 2));
  } catch (error) {
    return make("p", { class: "reason box" }, error.message);
  }
}

/** List the routes of an OpenAPI document. */
function routes({ paths }) {
  const rows = Object.entries(paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, route]) =>
      make(
        "div",
        {},
        make("dt", {}, make("code", {}, `${method.toUpperCase()} ${path}`)),
        make("dd", {}, (route.description ?? route.summary ?? "").split("\n")[0]),
      ),
    ),
  );
  return make("dl", {}, ...rows);
}
