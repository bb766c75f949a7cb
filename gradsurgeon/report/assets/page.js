"use strict";
// The page: what happened, what stands out, all norms, the rules; for one run at a time.

const main = document.getElementById("main");
const FIRST_OPEN = 1;
const MOST_OF_LINE = 300;

function table(head, rows, { numbers = [], names = [0] } = {}) {
  const cell = (tag, text, index) => element(tag, { class: [numbers.includes(index) ? "number" : "", tag === "td" && names.includes(index) ? "name" : ""].join(" ").trim(), ...(text.length > 120 ? { title: text } : {}) }, short(text));
  return element("div", { class: "scroll" }, element("table", {},
    element("thead", {}, element("tr", {}, ...head.map((text, index) => cell("th", text, index)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((text, index) => cell("td", text, index)))))));
}

function section(title, ...children) {
  const made = element("section", {}, element("h2", {}, title), ...children);
  main.append(made);
  return made;
}

/** Of several runs with one title, the last parts of the folder that only this one has. */
function distinction(run, alike) {
  const last = (one, count) => one.folder.split("/").slice(-count).join("/");
  for (let count = 1; alike.length > 1; count++) {
    const mine = last(run, count);
    if (mine === run.folder || alike.every((other) => other === run || last(other, count) !== mine)) return `, ${short(mine)}`;
  }
  return "";
}

function head(run) {
  const title = short(run.title, 200) + distinction(run, data.runs.filter((other) => other.title === run.title));
  document.getElementById("title").textContent = title;
  document.title = `${title}: gradsurgeon report`;
  main.append(
    element("dl", { class: "facts" }, ...run.facts.map(([word, text]) => element("div", {}, element("dt", {}, word), element("dd", {}, text)))),
    ...data.problems.map((problem) => element("p", { class: "problem" }, `Not on this page: ${problem}`)),
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
  const [firstLine, ...others] = event.message.split("\n");
  // What is cut off in one line stands whole below it.
  const rest = firstLine.length > MOST_OF_LINE ? [firstLine, ...others] : others;
  const ranks = [...new Set(group.map((one) => one.rank))].sort((a, b) => a - b);
  // Ranks and threads report in any order.
  const steps = group.map((one) => one.step);
  const from = Math.min(...steps), to = Math.max(...steps);
  const where = (from === to ? `step ${from}` : `steps ${from} to ${to}`) + (group.length > 1 ? `, ${group.length} times` : "") + (ranks.some((rank) => rank) ? `, rank ${ranks.join(", ")}` : "");
  const line = [element("span", { class: `kind ${event.kind}` }, event.kind), `  ${where}: `, short(firstLine.replace(/^step \d+, /, ""), MOST_OF_LINE)];
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
  if (!run.totals.length) part.append(element("p", { class: "note" }, `${run.map.names.length || run.conflicts.length || run.combined.length ? "No norms of parameters were recorded" : run.norms}: a norm-log rule on the parameters (params: "*") draws the norm of the gradient here.`));
  if (!run.losses.length) part.append(element("p", { class: "hint" }, "The loss is drawn here where the script calls gradsurgeon.tag(loss, \"loss\") and a norm-log rule records it (tensors: \"loss\", tensor: value, stats: [mean])."));
  const groups = grouped(run.events);
  const traps = groups.filter(([event]) => event.kind === "trap");
  const others = groups.filter(([event]) => event.kind !== "trap");
  if (!groups.length) part.append(element("p", {}, `No trap has tripped, and there were no other events. What the ${run.map.names.length ? "norms" : "records"} say stands below.`));
  if (traps.length) part.append(element("h3", {}, traps.length > 1 ? "Traps" : "Trap"), ...traps.map((group, index) => eventEntry(group, index < FIRST_OPEN)));
  if (others.length) part.append(element("h3", {}, "Other events"), ...others.map((group) => eventEntry(group, false)));
  if (run.left_out) part.append(element("p", { class: "note" }, `${run.left_out} events in between are left out: gradsurgeon export RUN --format jsonl shows all`));
}

function standsOut(run) {
  // Of a run without norms another section says it all.
  if (!run.callouts.length && !run.worst.length && (run.conflicts.length || run.combined.length)) return;
  const part = section("What stands out");
  if (run.callouts.length) part.append(element("ul", { class: "callouts" }, ...run.callouts.map((text) => element("li", {}, text))));
  else if (run.worst.length) part.append(element("p", {}, "No norm is far from the others, none was not finite, and none was a spike."));
  if (!run.worst.length) return;
  const spike = (row) => (row.spike ? `${shown(row.spike.times)} x at step ${row.spike.step}` : "-");
  // Norms of gradients and of outputs are not alike.
  const sources = run.worst.some((row) => row.source);
  const bad = (row) => (row.nonfinite ? `${row.nonfinite}, first at step ${row.nonfinite_step}` : "-");
  part.append(
    element("h3", {}, `The ${run.worst.length} worst`),
    element("p", { class: "hint" }, "First those that were not finite, then those whose largest spike stands highest above the norms of the steps around it: as many times as it says. Those without either go by their median."),
    table(
      ["name", "first", "median", "largest", "last", "spike", "not finite", ...(sources ? ["recorded by"] : [])],
      run.worst.map((row) => [row.name, shown(row.first), shown(row.median), shown(row.largest), shown(row.last), spike(row), bad(row), ...(sources ? [row.source] : [])]),
      { numbers: [1, 2, 3, 4] }));
}

async function norms(run, shownRun, state) {
  if (!run.map.names.length) return;
  const part = section("All norms");
  const cells = await unpack(run.map);
  // Another run was chosen meanwhile.
  if (shownRun !== current) return;
  const span = spanOf(cells);
  const worst = element("div", { class: "chart" });
  part.append(element("p", { class: "hint" }, run.norms), element("h3", {}, "The worst as curves"), worst);
  const paint = span ? density(part, run.map, cells, span, run.noun) : () => {};
  part.append(
    element("h3", {}, "Map"),
    element("p", { class: "hint" }, `A row is a ${run.noun}, or a module with the largest norm in it; a column is ${run.map.firsts.some((step, index) => step !== run.map.lasts[index]) ? "a few steps, by their largest norm" : "a step"}. Click a module to unfold it, a ${run.noun} to draw it below.`));
  map = mapOf(run, part, cells);
  map.restore(state);
  const places = run.worst.map((row) => run.map.names.indexOf(row.name)).filter((row) => row >= 0);
  chart(worst, places.map((row) => map.line(row)), { height: 260, events: run.events });
  repaint = () => { map.draw(); paint(); };
}

/** The map, with the curves of what is chosen in it. */
function mapOf(run, part, cells) {
  const box = element("div", {});
  const curves = element("div", { class: "chart", id: "chosen" });
  part.append(box, element("h3", {}, "Chosen curves"), curves);
  let drawn = null;
  const made = new HeatMap(box, run.map, cells, {
    onChoose: (rows) => {
      if (drawn) { charts.delete(drawn); drawn.destroy(); drawn = null; }
      curves.replaceChildren();
      if (rows.length) drawn = chart(curves, rows.map((row) => made.line(row)), { events: run.events });
      else curves.append(element("p", { class: "note" }, `none chosen: click a ${run.noun} in the map`));
    },
  });
  made.onChoose([]);
  return made;
}

function rules(run) {
  const part = section("Rules");
  if (run.rules.length) part.append(table(["rule", "action", "matched", "fired", run.observed ? "would have changed" : "changed", "last step", ""], run.rules, { numbers: [2, 3, 4, 5], names: [0] }));
  for (const { file, text } of run.files) part.append(element("details", {}, element("summary", {}, file), element("pre", {}, text)));
}

// Counts what was shown, so that what was asked for before is not shown later.
let current = 0;
let chosenRun = 0;
let map = null;
let repaint = () => {};

/** The events of all runs, each to be drawn in the colour of the first curve of its run. */
function eventsBeside(runs, key) {
  let curve = 0;
  return runs.flatMap((run) => {
    const mine = curve;
    curve += run[key].length;
    return run[key].length ? run.events.map((event) => ({ ...event, curve: mine })) : [];
  });
}

function beside(runs) {
  const lines = (key) => runs.flatMap((run, index) => run[key].map((line) => ({ ...line, label: `${index + 1}: ${line.label}` })));
  const part = section("The runs beside one another");
  part.append(table(["", "run", "folder", "events", "steps"], runs.map((run, index) => [String(index + 1), run.title, run.folder, String(run.events.length + run.left_out), (run.facts.find(([word]) => word === "steps") || ["", "-"])[1]]), { numbers: [3], names: [2] }));
  for (const [key, title] of [["losses", "loss"], ["totals", "norm of the gradient"]]) {
    if (!lines(key).length) continue;
    const box = element("div", { class: "chart" });
    part.append(element("h3", {}, title), box);
    chart(box, lines(key), { height: 190, events: eventsBeside(runs, key) });
  }
}

function show(index, state = {}) {
  current += 1;
  chosenRun = index;
  const run = data.runs[index];
  repaint = () => {};
  map = null;
  forgetCharts();
  main.replaceChildren();
  head(run);
  if (data.runs.length > 1) beside(data.runs);
  happened(run);
  losses(run);
  standsOut(run);
  const done = norms(run, current, state);
  captures(run);
  rules(run);
  // The rules stand last, whenever the cells are there.
  return done.then(() => { const last = [...main.children].find((part) => part.firstChild.textContent === "Rules"); if (last) main.append(last); });
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  redrawCharts();
  repaint();
}

/** Follows the theme of the system until the reader chooses one. */
function themes(state) {
  const preferred = matchMedia("(prefers-color-scheme: dark)");
  const ofSystem = () => (preferred.matches ? "dark" : "light");
  let chosen = state.theme;
  setTheme(chosen || ofSystem());
  preferred.addEventListener("change", () => { if (!chosen) setTheme(ofSystem()); });
  document.getElementById("theme").addEventListener("click", () => {
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    setTheme(chosen);
  });
  // Paper is light, and does not scroll.
  const print = (printing) => {
    if (map) map.printing = printing;
    setTheme(printing ? "light" : chosen || ofSystem());
  };
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
  return () => chosen;
}

function runButtons() {
  const runs = document.getElementById("runs");
  if (data.runs.length < 2) return;
  runs.hidden = false;
  data.runs.forEach((run, index) => {
    const button = element("button", { type: "button", title: run.folder, "aria-pressed": String(index === chosenRun) }, `${index + 1}: ${short(run.folder)}`);
    button.addEventListener("click", () => {
      for (const other of runs.children) other.setAttribute("aria-pressed", String(other === button));
      show(index);
    });
    runs.append(button);
  });
}

function begin() {
  const state = recall();
  const theme = themes(state);
  const done = show(data.runs[state.run] ? state.run : 0, state);
  runButtons();
  let asked = 0;
  const scrolled = () => { cancelAnimationFrame(asked); asked = requestAnimationFrame(() => map && map.scrolled()); };
  for (const kind of ["scroll", "resize"]) addEventListener(kind, scrolled, { passive: true });
  done.then(() => {
    if (state.scroll) scrollTo(0, state.scroll);
    if (data.reload) live(data.reload, () => ({ run: chosenRun, theme: theme(), scroll: scrollY, ...(map ? map.state() : {}) }));
    document.documentElement.dataset.ready = "true";
  });
}

begin();
