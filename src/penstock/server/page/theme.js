// Before anything is drawn: the theme that was chosen here, or the system's.
(function () {
  "use strict";
  let chosen = null;
  try {
    chosen = localStorage.getItem("penstock-theme");
  } catch {
    // no storage: the system's
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.style.colorScheme = chosen;
})();
