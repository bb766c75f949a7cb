"use strict";
// How the gradients of several losses lie to each other, and what was made of them.

/** Colours a cell by a number from -1, a conflict, to 1. */
function tint(value) {
  const v = number(value);
  if (v === null || !Number.isFinite(v)) return {};
  return { style: `background: color-mix(in srgb, var(--${v < 0 ? "bad" : "curve-2"}) ${Math.round(55 * Math.min(1, Math.abs(v)))}%, transparent)` };
}

function lossMatrix({ part, cells, tints }) {
  const [head, ...rows] = cells;
  const row = ([loss, ...texts], at) => element("tr", {}, element("th", {}, short(loss, 60)), ...texts.map((text, index) => element("td", { class: "number", ...tint(tints[at][index]) }, text)));
  return element("figure", { class: "losses" }, ...(part ? [element("figcaption", {}, short(part))] : []),
    element("table", {}, element("thead", {}, element("tr", {}, ...head.map((text) => element("th", { class: "number" }, text)))), element("tbody", {}, ...rows.map(row))));
}

function lossCurves(part, title, lines, events) {
  if (!lines.length) return;
  const box = element("div", { class: "chart" });
  part.append(element("h4", {}, title), box);
  chart(box, lines, { log: false, height: 220, events });
  const most = Math.max(...lines.map((line) => line.every));
  if (most > 1) part.append(element("p", { class: "hint" }, `The run is long: a point is the mean of up to ${most} steps.`));
}

function losses(run) {
  if (!run.conflicts.length && !run.combined.length) return;
  const part = section("Losses against each other");
  const hint = (text) => element("p", { class: "hint" }, text);
  const remarks = (one) => element("ul", { class: "callouts" }, ...one.remarks.map((text) => element("li", {}, text)));
  for (const one of run.conflicts) {
    part.append(element("h3", {}, one.title), remarks(one), element("div", { class: "matrices" }, ...one.matrices.map(lossMatrix)), hint(one.matrix_hint));
    if (one.parts_left_out) part.append(hint(`and ${one.parts_left_out} more parts; those with the lowest mean cosines are shown`));
    part.append(table(one.head, one.pairs, { numbers: [1, 2, 3, 4, 5, 6] }));
    if (one.left_out) part.append(hint(`and ${one.left_out} more pairs; the lowest mean cosines are shown`));
    part.append(...one.hints.map(hint));
    lossCurves(part, one.curves.length < one.pairs.length ? `cosine of the ${one.curves.length} worst` : "cosine", one.curves, run.events);
  }
  for (const one of run.combined) {
    part.append(element("h3", {}, one.title), remarks(one), table(one.head, one.weights, { numbers: [1, 2, 3, 4] }));
    lossCurves(part, "weight", one.curves, run.events);
    lossCurves(part, "distance from the plain sum, over its norm", [one.distance], run.events);
  }
}
