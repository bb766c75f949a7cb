"use strict";
// The page: how a run ended, its curves, what went wrong, what stands out, all norms, its rules.

const main = document.getElementById("main");
const GRAVITY = ["bad", "warning", "running", "good"];
const ICONS = { bad: "✕", warning: "!", running: "▸", good: "✓" };
const MOST_OF_LINE = 300;
const HINT = "Drag to zoom, double-click to see all steps. A vertical line is a trip, hatching a skipped step, ▼ at the top a value that is not finite.";
// The width of what stands left of every plot and map, so that all of them share one x axis.
let gutter = 0;
let current = { index: 0, views: [], maps: {} };

/** The line at the bottom of the window: what lies below the mouse, and the way out of a zoom. */
const panel = {
  reading: element("p", { class: "reading", "aria-live": "polite" }),
  reset: button("show all steps", () => panel.axis.zoom(), { hidden: "" }),
  say(text) { this.reading.textContent = text; this.update(); },
  zoomed(axis, is) { this.axis = axis; this.reset.hidden = !is; this.update(); },
  update() { this.reading.parentElement.hidden = this.reset.hidden && !this.reading.textContent; },
};

function note(text) {
  return element("p", { class: "note" }, text);
}

function list(texts) {
  return element("ul", { class: "remarks" }, ...texts.map((text) => element("li", {}, short(text, 1000))));
}

function section(title, hint = "") {
  const made = element("section", {}, element("h2", {}, title, " ", hint ? help(hint) : null));
  main.append(made);
  return made;
}

/** Returns the last parts of a run's folder that no other run has. */
function nameOfRun(run) {
  const last = (one, count) => one.folder.split("/").filter(Boolean).slice(-count).join("/");
  for (let count = 1; count < 20; count++) {
    if (data.runs.every((other) => other === run || last(other, count) !== last(run, count))) return last(run, count);
  }
  return run.folder;
}

function band(run) {
  const name = short(nameOfRun(run), 200), { level, words } = run.ended || { level: "warning", words: "nothing was recorded of its end" };
  document.getElementById("title").replaceChildren(name, " ", element("small", {}, short(run.title, 200)));
  document.title = `${name}: gradsurgeon report`;
  const facts = run.facts.map(([word, text]) => element("span", {}, `${word} `, element("b", {}, text)));
  main.append(
    element("div", { class: `band ${level}`, role: "status" }, element("span", { class: "icon", "aria-hidden": "true" }, ICONS[level]),
      element("div", {}, element("strong", {}, short(words, 400)), run.diagnosis ? element("p", {}, short(run.diagnosis, 400)) : null)),
    element("p", { class: "facts" }, ...facts),
    ...data.problems.map((problem) => element("p", { class: "problem" }, `Not on this page: ${problem}`)),
    ...run.notes.map(note));
}

/** Groups events that say the same of several steps, or on several ranks. */
function grouped(events) {
  const groups = new Map();
  for (const event of events) {
    const key = JSON.stringify([event.kind, event.rule, event.name, event.message.split("\n", 2).join("\n").replace(/\d[\d,.]*/g, "#")]);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(event);
  }
  return [...groups.values()];
}

function whereOf(group) {
  const ranks = [...new Set(group.map((one) => one.rank))].sort((a, b) => a - b), steps = group.map((one) => one.step);
  const from = Math.min(...steps), to = Math.max(...steps);
  const on = ranks.some(Boolean) ? [ranks.length > 1 ? `ranks ${ranks.slice(0, -1).join(", ")} and ${ranks.at(-1)}` : `rank ${ranks[0]}`] : [];
  return [from === to ? `step ${from}` : `steps ${from} to ${to}`, ...(group.length > 1 ? [`${group.length} times`] : []), ...on].join(", ");
}

/** Draws numbers as a line of their logarithms: how they grew says more than each of them. */
function magnitudes(rows) {
  const logs = rows.map(([, text]) => Math.log10(Number(text.replace(/,/g, "").replace(/Inf$/, "Infinity")))), finite = logs.filter(Number.isFinite);
  const low = Math.min(...finite, 0), high = Math.max(...finite, low + 1);
  const x = (at) => 6 + (at * 488) / Math.max(1, rows.length - 1), y = (log) => 64 - (56 * (Math.min(high, Number.isFinite(log) ? log : high) - low)) / (high - low);
  const dots = logs.map((log, at) => svg("circle", { cx: x(at), cy: y(log), r: 3.5, ...(Number.isFinite(log) ? {} : { class: "bad" }) }, svg("title", {}, rows[at].join(": "))));
  const [first, last] = [rows[0], rows.at(-1)].map(([operation, text]) => `${text} in ${operation}`);
  return element("figure", { class: "magnitudes" }, element("figcaption", {}, "largest magnitude of each operation, log scale"),
    svg("svg", { viewBox: "0 0 500 70", role: "img", "aria-label": `from ${first} to ${last}` }, svg("path", { d: "M" + logs.map((log, at) => `${x(at)} ${y(log)}`).join("L") }), ...dots),
    element("p", { class: "ends" }, element("span", {}, first), element("span", {}, last)));
}

function diagnosis(event) {
  const found = event.diagnosis;
  return element("div", { class: "diagnosis" },
    element("p", { class: "headline" }, found.headline, " ", element("span", { class: "badge quiet" }, found.certainty)),
    found.at ? element("pre", { class: "source" }, `${found.at}${found.function ? ` in ${found.function}` : ""}`, ...(found.source ? ["\n", element("mark", {}, found.source)] : [])) : null,
    found.tensors.length ? table(["", "tensor", "shape", "values"], found.tensors, { names: [1] }) : null,
    found.cause ? element("p", {}, element("span", { class: "badge" }, found.cause), " ", found.remedy || "") : null,
    found.magnitudes.length > 1 ? magnitudes(found.magnitudes) : null,
    found.rest.length ? element("details", {}, element("summary", {}, "more of the diagnosis"), element("pre", {}, found.rest.join("\n"))) : null);
}

function eventEntry(group, open) {
  const event = group.find((one) => one.diagnosis) || group[0], lines = event.message.split("\n");
  const first = lines[0].replace(/^step \d+(, rule [^:]*)?(: |, )/, "");
  const told = [whereOf(group), short(event.rule), event.rule ? "" : short(event.name)].filter(Boolean).join(", ");
  const line = [element("span", { class: `kind ${event.kind}` }, event.kind), ` ${told}: ${short(first, MOST_OF_LINE)}`];
  if (lines.length < 2 && first.length <= MOST_OF_LINE) return element("p", { class: "event" }, ...line);
  const message = element("pre", {}, lines.slice(first.length > MOST_OF_LINE ? 0 : 1).join("\n"));
  return element("details", { class: "event", ...(open ? { open: "" } : {}) }, element("summary", {}, ...line),
    ...(event.diagnosis ? [diagnosis(event), element("details", {}, element("summary", {}, "the whole message"), message)] : [message]));
}

function happened(run, axis) {
  const part = section("What happened", HINT);
  const wholes = run.kinds.flatMap((kind) => kind.wholes), values = run.losses.flatMap((line) => line.values).map(number).filter(Number.isFinite);
  const long = (lines) => lines.filter((line) => line.every > 1).map((line) => `The run is long: a point is the largest norm that is known of ${line.every} steps.`)[0] || "";
  if (run.losses.length) addChart(part, axis, { title: "loss", lines: run.losses, log: Math.min(...values) > 0 && Math.max(...values) > 30 * Math.min(...values), events: run.events, height: 150 });
  if (wholes.length) addChart(part, axis, { title: "norm of the gradient", hint: long(wholes), lines: wholes, events: run.events });
  else part.append(note(`${run.nothing || "No norms of parameters were recorded"}: a norm-log rule on the parameters (params: "*") draws the norm of the gradient here.`));
  if (!run.losses.length) part.append(element("details", {}, element("summary", {}, "no loss was recorded"), note('The loss is drawn here if the script calls gradsurgeon.tag(loss, "loss") and a norm-log rule records it (tensors: "loss", tensor: value, stats: [mean]).')));
  const groups = grouped(run.events), bad = groups.filter(([event]) => event.kind in PATHS_OF_EVENTS), others = groups.filter(([event]) => !(event.kind in PATHS_OF_EVENTS));
  if (!groups.length) part.append(element("p", {}, "No trap has tripped, and there were no other events."));
  part.append(...bad.map((group, index) => eventEntry(group, index === 0)), ...others.map((group) => eventEntry(group, false)));
  if (run.left_out) part.append(note(`${run.left_out} events in between are left out: gradsurgeon export RUN --format jsonl shows all`));
}

function standsOut(run) {
  if (!run.kinds.length) return;
  const part = section("What stands out");
  part.append(run.callouts.length ? list(run.callouts) : element("p", {}, "Nothing: no norm is far from the others, none was not finite, and none was a spike."));
}

function largestTable(kind) {
  const sources = kind.largest.some((row) => row.source);
  const cells = (row) => [
    row.name, ...["first", "median", "largest", "last"].map((key) => shown(row[key])),
    row.spike ? `${shown(row.spike.times)} x at step ${row.spike.step}` : "-",
    row.nonfinite ? element("span", { class: "problem" }, `${row.nonfinite}, first at step ${row.nonfinite_step}`) : "-",
    ...(sources ? [row.source] : [])];
  return table(["name", "first", "median", "largest", "last", "spike", "not finite", ...(sources ? ["recorded by"] : [])], kind.largest.map(cells), { numbers: [1, 2, 3, 4] });
}

/** Draws the section of one kind of tensors: the largest, their curves, and the map of all. */
async function kindSection(run, kind, axis, state) {
  const title = `${kind.kind[0].toUpperCase()}${kind.kind.slice(1)}s`, shownRun = current;
  const part = section(title, `${kind.title}. ${kind.notes.join(". ")}`);
  const cells = await unpack(kind.map);
  // The reader has chosen another run meanwhile.
  if (shownRun !== current) return;
  const rows = kind.largest.map((row) => kind.map.names.indexOf(row.name)), whole = kind.wholes.length === 1 ? [{ ...kind.wholes[0], colour: "whole", width: 4 }] : [];
  let drawn = null;
  const draw = () => {
    const chosen = [...map.chosen].map((node) => node.row), lines = (chosen.length ? chosen : rows).map((row) => map.curve(row));
    if (drawn) drawn.remove();
    drawn = addChart(curves, axis, { title: chosen.length ? "chosen in the map" : `the ${rows.length} largest`, lines: [...lines, ...whole], events: run.events, height: 240 });
  };
  const map = new HeatMap(axis, kind.map, cells, draw), curves = element("div", { class: "curves" });
  part.append(
    element("h3", {}, `The ${rows.length} largest `, help("Order: first what was not finite, then by the largest spike (times the steps around it), then by median.")), largestTable(kind), curves,
    element("h3", {}, `All ${kind.map.names.length.toLocaleString("en")} ${kind.noun}s `, help(`A row is a ${kind.noun}, or a module with the largest norm in it; a column is a step, or a few by their largest norm. Click a module to unfold it, a ${kind.noun} to draw it as a curve.`)), map.box);
  axis.views.add(map);
  current.maps[kind.kind] = map;
  draw();
  if (state) map.restore(state);
  map.redraw();
}

function rules(run) {
  const part = section("Rules");
  if (run.rules.length) part.append(table(["rule", "action", "matched", "fired", run.observed ? "would have changed" : "changed", "last step", ""], run.rules, { numbers: [2, 3, 4, 5], names: [0] }));
  for (const { file, text } of run.files) if (text) part.append(element("details", {}, element("summary", {}, file), element("pre", {}, text)));
}

/** Shows how each run ended, and the loss and norm of all of them in one colour per run. */
function beside(axis) {
  const part = section("Runs");
  const last = (run) => (run.losses.length ? shown(run.losses[0].values.filter((value) => value !== null).at(-1)) : "-");
  const cells = (run, index) => [
    element("span", { class: "swatch", style: `background: var(--curve-${index % 10})` }),
    button(nameOfRun(run), () => show(index), { "aria-pressed": String(index === current.index), title: run.folder }),
    element("span", { class: `outcome ${run.ended ? run.ended.level : ""}` }, run.ended ? short(run.ended.words, 120) : "?"),
    String(run.ended ? run.ended.trips : 0), last(run), run.span.length ? run.span[1].toLocaleString("en") : "-"];
  part.append(table(["", "run", "ended", "traps", "last loss", "last step"], data.runs.map(cells), { numbers: [3, 4, 5], names: [] }));
  const first = data.runs.flatMap((run, index) => run.events.filter((event) => event.kind in PATHS_OF_EVENTS).slice(0, 1).map((event) => ({ ...event, paint: `curve-${index % 10}` })));
  for (const [title, linesOf] of [["loss", (run) => run.losses], ["norm of the gradient", (run) => run.kinds.flatMap((kind) => kind.wholes)]]) {
    const lines = data.runs.flatMap((run, index) => linesOf(run).map((line) => ({ ...line, label: `${nameOfRun(run)}: ${line.label}`, colour: `curve-${index % 10}` })));
    if (lines.length) addChart(part, axis, { title, lines, log: lines.every((line) => line.values.every((value) => value === null || !(number(value) <= 0))), events: first, height: 150 });
  }
}

/** Shows one run, and all of them beside one another if there are several. */
async function show(index, state = {}) {
  for (const axis of current.views) for (const view of [...axis.views]) view.remove();
  const run = data.runs[index], axis = new Steps(run.span, Math.max(0.5, ...run.kinds.map((kind) => halfOf(kind.map))));
  current = { index, views: [axis], maps: {} };
  main.replaceChildren();
  panel.reset.hidden = true;
  panel.say("");
  if (data.runs.length > 1) {
    const spans = data.runs.flatMap((one) => one.span), all = new Steps(spans.length ? [Math.min(...spans), Math.max(...spans)] : [], 0.5);
    current.views.push(all);
    beside(all);
  }
  band(run);
  happened(run, axis);
  lossSections(run, axis);
  standsOut(run);
  const maps = state.maps || {}, done = run.kinds.map((kind) => kindSection(run, kind, axis, maps[kind.kind]));
  captures(run);
  rules(run);
  await Promise.all(done);
}

function everyView(act) {
  for (const axis of current.views) for (const view of axis.views) view[act]();
}

function layOut() {
  gutter = Math.round(Math.min(300, Math.max(150, 0.24 * document.body.clientWidth)));
  document.documentElement.style.setProperty("--gutter", `${gutter}px`);
  everyView("resize");
}

/** Follows the theme of the system until the reader chooses one; paper is light, and narrow. */
function themes(chosen) {
  const preferred = matchMedia("(prefers-color-scheme: dark)"), root = document.documentElement;
  const set = (theme) => { root.dataset.theme = theme; everyView("redraw"); };
  const again = () => set(chosen || (preferred.matches ? "dark" : "light"));
  again();
  preferred.addEventListener("change", again);
  document.getElementById("theme").addEventListener("click", () => { chosen = root.dataset.theme === "dark" ? "light" : "dark"; set(chosen); });
  addEventListener("beforeprint", () => { root.classList.add("printing"); layOut(); set("light"); });
  addEventListener("afterprint", () => { root.classList.remove("printing"); layOut(); again(); });
  return () => chosen;
}

function begin() {
  const state = recall(), theme = themes(state.theme), weight = ({ ended }) => (ended ? 1000 * GRAVITY.indexOf(ended.level) - Math.min(999, ended.trips) : 1500);
  document.body.append(element("footer", { class: "panel", hidden: "" }, panel.reading, panel.reset));
  layOut();
  const worst = data.runs.reduce((best, run, index) => (weight(run) < weight(data.runs[best]) ? index : best), 0);
  const done = show(data.runs[state.run] ? state.run : worst, state);
  let resizing = 0;
  addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(layOut, 100); });
  const chosen = () => ({ run: current.index, theme: theme(), scroll: scrollY, maps: Object.fromEntries(Object.entries(current.maps).map(([kind, map]) => [kind, map.state()])) });
  done.then(() => {
    if (state.scroll) scrollTo(0, state.scroll);
    if (data.reload) live(data.reload, chosen);
    document.documentElement.dataset.ready = "true";
  });
}

begin();
