"use strict";
// Sections that few runs have: the gradients of several losses, and tensors that rules have captured.

function lossSections(run, axis) {
  if (!run.versus.length) return;
  const part = section("Losses against each other");
  for (const one of run.versus) {
    part.append(heading("h3", one.table.title), list(one.table.notes), table(one.table));
    const most = Math.max(...one.lines.map((line) => line.every)), hint = most > 1 ? `The run is long: a point is one step of ${most}.` : "";
    new Chart(part, axis, { title: one.title, lines: one.lines, hint, log: false, marks: run.marks });
  }
}
