"use strict";
// The page of a run that goes on is written anew, and reloads itself; but not under the reader's hands.

const UNTOUCHED = 10000;
const REMEMBERED = "gradsurgeon " + location.pathname;

/** What the reader had chosen before the page reloaded itself, once. */
function recall() {
  try {
    const text = sessionStorage.getItem(REMEMBERED);
    sessionStorage.removeItem(REMEMBERED);
    return JSON.parse(text) || {};
  } catch {
    return {};
  }
}

function remember(state) {
  try {
    sessionStorage.setItem(REMEMBERED, JSON.stringify(state));
  } catch {
    // Where nothing can be stored, the page begins from its top.
  }
}

/** Says when the reader last did something, and whether a button is down. */
function watchReader() {
  const reader = { touched: 0, down: false };
  const touch = () => { reader.touched = Date.now(); };
  for (const kind of ["wheel", "keydown", "touchmove", "scroll"]) addEventListener(kind, touch, { passive: true });
  addEventListener("pointermove", (event) => {
    // A browser also tells of a mouse that rests while the page below it changes.
    if (event.movementX || event.movementY) touch();
    reader.down = event.buttons > 0;
  });
  addEventListener("pointerdown", () => { touch(); reader.down = true; });
  for (const kind of ["pointerup", "pointercancel", "blur"]) addEventListener(kind, () => { reader.down = false; });
  return reader;
}

/** Reloads the page after so many seconds; `state` gives what the reader has chosen. */
function live(seconds, state) {
  const reader = watchReader(), begun = Date.now();
  const idle = () => Date.now() - reader.touched >= UNTOUCHED && !reader.down && getSelection().isCollapsed;
  const timer = setInterval(() => {
    if (Date.now() - begun < 1000 * seconds || !idle()) return;
    clearInterval(timer);
    remember(state());
    location.reload();
  }, 250);
  const written = `written ${document.lastModified.slice(-8)}`;
  const text = element("span", {}, `live: ${written}, reloads itself `);
  const stop = element("button", { type: "button" }, "stop");
  stop.addEventListener("click", () => { clearInterval(timer); text.textContent = `${written}, stopped`; stop.remove(); });
  document.getElementById("live").append(text, stop);
}
