"use strict";
// The page: what happened, what stands out, all norms, the rules; for one run at a time.

const main = document.getElementById("main");
const FIRST_OPEN = 1;

function table(head, rows, { numbers = [], names = [0] } = {}) {
  const cell = (tag, text, index) => element(tag, { class: [numbers.includes(index) ? "number" : "", tag === "td" && names.includes(index) ? "name" : ""].join(" ").trim() }, text);
  return element("div", { class: "scroll" }, element("table", {},
    element("thead", {}, element("tr", {}, ...head.map((text, index) => cell("th", text, index)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((text, index) => cell("td", text, index)))))));
}

function section(title, ...children) {
  const made = element("section", {}, element("h2", {}, title), ...children);
  main.append(made);
  return made;
}

function head(run) {
  document.getElementById("title").textContent = run.title;
  document.title = `${run.title}: gradsurgeon report`;
  main.append(
    element("dl", { class: "facts" }, ...run.facts.map(([word, text]) => element("div", {}, element("dt", {}, word), element("dd", {}, text)))),
    ...run.notes.map((note) => element("p", { class: "note" }, note)));
}

/** One entry for all ranks and steps at which the same happened. */
function grouped(events) {
  const groups = new Map();
  for (const event of events) {
    const key = JSON.stringify([event.kind, event.rule, event.name, event.message.replace(/\d[\d,.]*/g, "#")]);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(event);
  }
  return [...groups.values()];
}

function eventEntry(group, open) {
  const event = group[0];
  const [firstLine, ...rest] = event.message.split("\n");
  const ranks = [...new Set(group.map((one) => one.rank))].sort((a, b) => a - b);
  const where = `step ${event.step}` + (group.length > 1 ? ` to ${group[group.length - 1].step}, ${group.length} times` : "") + (ranks.some((rank) => rank) ? `, rank ${ranks.join(", ")}` : "");
  const line = [element("span", { class: `kind ${event.kind}` }, event.kind), `  ${where}: `, firstLine.replace(/^step \d+, /, "")];
  if (!rest.length) return element("p", {}, ...line);
  return element("details", open ? { open: "" } : {}, element("summary", {}, ...line), ...parts(rest));
}

/** The diagnosis of a trap first: where it was born is asked for before what it has spoilt. */
function parts(lines) {
  const start = lines.findIndex((line) => /^(diagnosis|found by rank)/.test(line));
  const pre = (some) => element("pre", {}, some.join("\n"));
  return start > 0 ? [pre(lines.slice(start)), pre(lines.slice(0, start))] : [pre(lines)];
}

function happened(run) {
  const part = section("What happened");
  const lines = [...run.losses, ...run.totals];
  const draw = (title, shownLines, log) => {
    if (!shownLines.length) return;
    const box = element("div", { class: "chart" });
    part.append(element("h3", {}, title), box);
    chart(box, shownLines, { log, height: 190, events: run.events });
    for (const line of shownLines) if (line.every > 1) part.append(element("p", { class: "hint" }, `${line.label}: the run is long, so a point is of ${line.every} steps: the norm at the first of them, or that of a single ${run.noun} where it is larger`));
  };
  const positive = run.losses.every((line) => line.values.every((value) => value === null || !(number(value) <= 0)));
  draw("loss", run.losses, positive);
  draw("norm of the gradient", run.totals, true);
  if (lines.length) part.append(element("p", { class: "hint" }, "Drag to zoom, double-click for all. A vertical line is an event, a mark at the top is a value that is not finite."));
  else part.append(element("p", { class: "note" }, "No norms were recorded: a norm-log rule on the parameters gives curves here."));
  if (!run.losses.length) part.append(element("p", { class: "hint" }, "The loss is drawn here where the script calls gradsurgeon.tag(loss, \"loss\") and a norm-log rule records it (tensors: \"loss\", tensor: value, stats: [mean])."));
  const groups = grouped(run.events);
  const traps = groups.filter(([event]) => event.kind === "trap");
  const others = groups.filter(([event]) => event.kind !== "trap");
  if (!groups.length) part.append(element("p", {}, "No trap has tripped, and nothing else happened that is worth a word."));
  if (traps.length) part.append(element("h3", {}, traps.length > 1 ? "Traps" : "Trap"), ...traps.map((group, index) => eventEntry(group, index < FIRST_OPEN)));
  if (others.length) part.append(element("h3", {}, "Other events"), ...others.map((group) => eventEntry(group, false)));
  if (run.left_out) part.append(element("p", { class: "note" }, `${run.left_out} events in between are left out: gradsurgeon export shows all`));
}

function standsOut(run) {
  const part = section("What stands out");
  if (run.callouts.length) part.append(element("ul", { class: "callouts" }, ...run.callouts.map((text) => element("li", {}, text))));
  else if (run.worst.length) part.append(element("p", {}, "No norm is far from the others, none was not finite, and none was a spike."));
  if (!run.worst.length) return;
  const spike = (row) => (row.spike ? `${shown(row.spike.times)} x at step ${row.spike.step}` : "-");
  const bad = (row) => (row.nonfinite ? `${row.nonfinite}, first at step ${row.nonfinite_step}` : "-");
  part.append(
    element("h3", {}, `The ${run.worst.length} worst`),
    table(["name", "first", "median", "largest", "last", "spike", "not finite"], run.worst.map((row) => [row.name, shown(row.first), shown(row.median), shown(row.largest), shown(row.last), spike(row), bad(row)]), { numbers: [1, 2, 3, 4] }));
}

async function norms(run, shownRun) {
  if (!run.map.names.length) return;
  const columns = run.map.firsts.length;
  const worst = element("div", { class: "chart" });
  const density = element("canvas", { role: "img", "aria-label": "how the norms are spread over time" });
  const part = section("All norms");
  const cells = await unpack(run.map);
  // Another run was chosen meanwhile.
  if (shownRun !== current) return;
  const span = spanOf(cells);
  part.append(element("h3", {}, "The worst as curves"), worst, element("h3", {}, `How the norms of all ${run.map.names.length} ${run.noun}s are spread`),
    element("p", { class: "hint" }, `From ${shown(normOf(Math.round(span[0])), CELL_DIGITS)} at the bottom to ${shown(normOf(Math.round(span[1])), CELL_DIGITS)} at the top, by their logarithm; darker where more are.`),
    element("div", { class: "density" }, density),
    element("h3", {}, "Map"),
    element("p", { class: "hint" }, `A row is a ${run.noun}, or a module with the largest norm in it; a column is ${run.map.firsts.some((step, index) => step !== run.map.lasts[index]) ? "a few steps, by their largest norm" : "a step"}. Click a module to unfold it, a ${run.noun} to draw it below.`));
  const mapBox = element("div", {});
  const curves = element("div", { class: "chart", id: "chosen" });
  part.append(mapBox, element("h3", {}, "Chosen curves"), curves);
  let drawn = null;
  const map = new HeatMap(mapBox, run.map, cells, {
    onChoose: (rows) => {
      if (drawn) { charts.delete(drawn); drawn.destroy(); drawn = null; }
      curves.replaceChildren();
      if (rows.length) drawn = chart(curves, rows.map((row) => map.line(row)), { events: run.events });
      else curves.append(element("p", { class: "note" }, `none chosen: click a ${run.noun} in the map`));
    },
  });
  map.onChoose([]);
  const places = run.worst.map((row) => run.map.names.indexOf(row.name)).filter((row) => row >= 0);
  chart(worst, places.map((row) => map.line(row)), { height: 260, events: run.events });
  const paint = () => drawDensity(density, cells, columns, run.map.names.length, span);
  paint();
  repaint = () => { map.draw(); paint(); };
}

function rules(run) {
  const part = section("Rules");
  if (run.rules.length) part.append(table(["rule", "action", "matched", "fired", "changed", "last step", ""], run.rules, { numbers: [2, 3, 4, 5], names: [0] }));
  for (const { file, text } of run.files) part.append(element("details", {}, element("summary", {}, file), element("pre", {}, text)));
}

let current = 0;
let repaint = () => {};

function beside(runs) {
  const lines = (key) => runs.flatMap((run, index) => run[key].map((line) => ({ ...line, label: `${index + 1}: ${line.label}` })));
  const part = section("The runs beside one another");
  part.append(table(["", "run", "folder", "events", "steps"], runs.map((run, index) => [String(index + 1), run.title, run.folder, String(run.events.length + run.left_out), (run.facts.find(([word]) => word === "steps") || ["", "-"])[1]]), { numbers: [3], names: [2] }));
  for (const [key, title] of [["losses", "loss"], ["totals", "norm of the gradient"]]) {
    if (!lines(key).length) continue;
    const box = element("div", { class: "chart" });
    part.append(element("h3", {}, title), box);
    chart(box, lines(key), { height: 190 });
  }
}

function show(index) {
  current += 1;
  const run = data.runs[index];
  repaint = () => {};
  forgetCharts();
  main.replaceChildren();
  head(run);
  if (data.runs.length > 1) beside(data.runs);
  happened(run);
  standsOut(run);
  const done = norms(run, current);
  rules(run);
  // The rules stand last, whenever the cells are there.
  return done.then(() => { const last = [...main.children].find((part) => part.firstChild.textContent === "Rules"); if (last) main.append(last); });
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  redrawCharts();
  repaint();
}

function begin() {
  const preferred = matchMedia("(prefers-color-scheme: dark)");
  setTheme(preferred.matches ? "dark" : "light");
  preferred.addEventListener("change", () => setTheme(preferred.matches ? "dark" : "light"));
  document.getElementById("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  const runs = document.getElementById("runs");
  if (data.runs.length > 1) {
    runs.hidden = false;
    data.runs.forEach((run, index) => {
      const button = element("button", { type: "button", "aria-pressed": String(index === 0) }, `${index + 1}: ${run.folder}`);
      button.addEventListener("click", () => {
        for (const other of runs.children) other.setAttribute("aria-pressed", String(other === button));
        show(index);
      });
      runs.append(button);
    });
  }
  show(0).then(() => { document.documentElement.dataset.ready = "true"; });
}

begin();
