"use strict";
// The page of a run that goes on is written anew, and reloads itself; but not under the reader's hands.

const UNTOUCHED = 10000;
const REMEMBERED = "gradsurgeon " + location.pathname;

/** Returns what the reader had chosen before the page reloaded itself, once. */
function recall() {
  try {
    const text = sessionStorage.getItem(REMEMBERED);
    sessionStorage.removeItem(REMEMBERED);
    return JSON.parse(text) || {};
  } catch {
    return {};
  }
}

/** Reloads the page after so many seconds; `state` returns what the reader has chosen. */
function live(seconds, state) {
  const begun = Date.now();
  let touched = 0;
  const touch = () => { touched = Date.now(); };
  for (const kind of ["wheel", "keydown", "touchmove", "scroll", "pointerdown"]) addEventListener(kind, touch, { passive: true });
  // A browser also reports a mouse that rests while the page below it changes.
  addEventListener("pointermove", (event) => { if (event.movementX || event.movementY || event.buttons) touch(); });
  const timer = setInterval(() => {
    if (Date.now() - begun < 1000 * seconds || Date.now() - touched < UNTOUCHED || !getSelection().isCollapsed) return;
    clearInterval(timer);
    // Where nothing can be stored, the page begins from its top.
    try { sessionStorage.setItem(REMEMBERED, JSON.stringify(state())); } catch {}
    location.reload();
  }, 250);
  const written = `written ${document.lastModified.slice(-8)}`, text = element("span", {}, `live: ${written}, reloads itself `);
  const stop = button("stop", () => { clearInterval(timer); text.textContent = `${written}, stopped`; stop.remove(); });
  document.getElementById("live").append(text, stop);
}
