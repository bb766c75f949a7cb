"use strict";
// The page: how a run ended, its curves, what went wrong, what stands out, all norms, its rules.

const main = document.getElementById("main");
const GRAVITY = ["bad", "warning", "running", "good"];
const ICONS = { bad: "✕", warning: "!", running: "▸", good: "✓" };
const MOST_OF_LINE = 300;
const UNITS = { "norm of the gradient": "l2 norm" };
const HINT = "Drag to zoom, double-click to see all steps. A vertical line is a trip, a shaded band a skipped step, ▼ at the top a value that is not finite.";
// The width of what stands left of every plot and map, so that all of them share one x axis.
let gutter = 0;
let current = { index: 0, axes: [], maps: {} };

/** The line at the bottom of the window: what lies below the mouse, and the way out of a zoom. */
const panel = {
  reading: element("p", { class: "reading", "aria-live": "polite" }),
  reset: button("show all steps", () => panel.axis.zoom(), { hidden: "" }),
  say(text) { this.reading.textContent = text; this.update(); },
  zoomed(axis, is) { this.axis = axis; this.reset.hidden = !is; this.update(); },
  update() { this.reading.parentElement.hidden = this.reset.hidden && !this.reading.textContent; },
};

function section(title, hint = "") {
  const made = element("section", {}, heading("h2", title, hint));
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

function wholesOf(run) {
  return run.kinds.flatMap((kind) => kind.wholes);
}

/** Tells whether an event, or a mark of one, is a trap that tripped. */
function isTrip(event) {
  return MARKS[event.kind || event[1]] === "bad";
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

/** Draws numbers as a line of their logarithms: how they grew says more than each of them. */
function magnitudes(rows) {
  const logs = rows.map(([, text]) => Math.log10(Number(text.replace(/,/g, "").replace(/Inf$/, "Infinity")))), finite = logs.filter(Number.isFinite);
  const low = Math.min(...finite, 0), high = Math.max(...finite, low + 1);
  const x = (at) => 6 + (at * 488) / Math.max(1, rows.length - 1), y = (log) => 64 - (56 * ((log === -Infinity ? low : Number.isFinite(log) ? log : high) - low)) / (high - low);
  const dots = logs.map((log, at) => svg("circle", { cx: x(at), cy: y(log), r: 3.5, class: Number.isNaN(log) || log === Infinity ? "bad" : "" }, svg("title", {}, rows[at].join(": "))));
  const [first, last] = [rows[0], rows.at(-1)].map(([operation, text]) => `${text} in ${operation}`);
  return element("figure", { class: "magnitudes" }, element("figcaption", {}, "largest magnitude of each operation, log scale"),
    svg("svg", { viewBox: "0 0 500 70", role: "img", "aria-label": `from ${first} to ${last}` }, svg("path", { d: "M" + logs.map((log, at) => `${x(at)} ${y(log)}`).join("L") }), ...dots),
    element("p", { class: "ends" }, element("span", {}, first), element("span", {}, last)));
}

function diagnosis(found) {
  const about = element("div", {},
    found.tensors.length ? table({ head: ["tensor", "", "shape", "values"], rows: found.tensors.map(([way, name, ...rest]) => [name, way, ...rest]) }) : null,
    found.cause ? element("p", {}, element("span", { class: "badge" }, found.cause), " ", found.remedy || "") : null);
  return element("div", { class: "diagnosis" },
    element("p", { class: "headline" }, found.headline, " ", element("span", { class: "badge quiet" }, found.certainty)),
    found.at ? element("pre", {}, `${found.at}${found.function ? ` in ${found.function}` : ""}\n`, element("mark", {}, found.source)) : null,
    element("div", { class: "side" }, about, found.magnitudes.length > 1 ? magnitudes(found.magnitudes) : null),
    found.rest.length ? fold("more of the diagnosis", element("pre", {}, found.rest.join("\n"))) : null);
}

function eventEntry(event, open) {
  const [start, ...rest] = event.message.split("\n"), first = start.replace(/^step \d+(, rule [^:]*)?(: |, )/, "");
  const told = [event.where, short(event.rule || event.name)].filter(Boolean).join(", ");
  const line = element("span", {}, element("span", { class: `kind ${event.kind}` }, event.kind), ` ${told}: ${short(first, MOST_OF_LINE)}`);
  if (!rest.length && first.length <= MOST_OF_LINE) return element("p", {}, line);
  const message = element("pre", {}, (first.length > MOST_OF_LINE ? [start, ...rest] : rest).join("\n"));
  const made = fold(line, ...(event.diagnosis ? [diagnosis(event.diagnosis), fold("the whole message", message)] : [message]));
  made.open = open;
  return made;
}

function happened(run, axis) {
  const part = section("What happened", HINT), wholes = wholesOf(run), values = run.losses.flatMap((line) => line.values).map(number).filter(Number.isFinite);
  const chart = (title, lines, log) => {
    const every = Math.max(...lines.map((line) => line.every)), hint = every > 1 ? `The run is long: a point is the largest that is known of ${every} steps.` : "";
    if (lines.length) new Chart(part, axis, { title, unit: UNITS[title], lines, hint, log, marks: run.marks, height: 150 });
  };
  chart("loss", run.losses, Math.min(...values) > 0 && Math.max(...values) > 30 * Math.min(...values));
  chart("norm of the gradient", wholes, true);
  if (!wholes.length) part.append(note(`${run.nothing || "No norms of parameters were recorded"}: a norm-log rule on the parameters (params: "*") draws the norm of the gradient here.`));
  if (!run.losses.length) part.append(fold("no loss was recorded", note('The loss is drawn here if the script calls gradsurgeon.tag(loss, "loss") and a norm-log rule records it (tensors: "loss", tensor: value, stats: [mean]).')));
  const serious = run.events.filter(isTrip), others = run.events.filter((event) => !isTrip(event));
  if (!run.events.length) part.append(element("p", {}, "No trap has tripped, and there were no other events."));
  part.append(...serious.map((event, at) => eventEntry(event, at === 0)), ...others.map((event) => eventEntry(event, false)));
  if (run.left_out) part.append(note(`${run.left_out} events in between are left out: gradsurgeon export RUN --format jsonl shows all`));
}

function standsOut(run) {
  if (!run.kinds.length) return;
  section("What stands out").append(run.callouts.length ? list(run.callouts) : element("p", {}, "Nothing: no norm is far from the others, none was not finite, and none was a spike."));
}

/** Draws the section of one kind of tensors: the largest, their curves, and the map of all. */
async function kindSection(run, kind, axis, state) {
  const part = section(`${kind.kind[0].toUpperCase()}${kind.kind.slice(1)}s`, [kind.table.title, ...kind.notes].join(". ")), asked = current;
  const cells = await unpack(kind.map);
  // The reader has chosen another run meanwhile.
  if (asked !== current) return;
  const largest = kind.largest.map((name) => kind.map.names.indexOf(name)), count = largest.length;
  const whole = kind.wholes.length === 1 ? [{ ...kind.wholes[0], colour: "whole", width: 4 }] : [];
  const curves = element("div", { class: "curves" });
  let drawn = null;
  const draw = () => {
    const lines = (map.chosen.length ? map.chosen : largest).map((row, at) => ({ ...map.curve(row), colour: `curve-${at % 10}` }));
    if (drawn) drawn.remove();
    drawn = new Chart(curves, axis, { title: map.chosen.length ? "chosen in the map" : `the ${count} largest`, unit: "l2 norm", lines: [...whole, ...lines], marks: run.marks, height: 240 });
  };
  const map = new HeatMap(axis, kind.map, cells, kind.kind, draw);
  part.append(
    heading("h3", `The ${count} largest`, "Order: first what was not finite, then by the largest spike (times the steps around it), then by median."), table(kind.table), curves,
    heading("h3", `All ${kind.map.names.length.toLocaleString("en")} ${kind.noun}s`, `A row is a ${kind.noun}, or a module with the largest norm in it; a column is a step, or a few by their largest norm. Click a module to unfold it, a ${kind.noun} to draw it as a curve.`), map.box);
  axis.views.add(map);
  current.maps[kind.kind] = map;
  if (state) map.restore(state);
  draw();
  map.update();
}

function rules(run) {
  if (!run.rules.rows.length && !run.files.some((file) => file.text)) return;
  const part = section("Rules");
  const head = run.rules.head.map((text) => (text === "changed" && run.observed ? "would have changed" : text));
  if (run.rules.rows.length) part.append(table({ ...run.rules, head }));
  for (const { file, text } of run.files) if (text) part.append(fold(file, element("pre", {}, text)));
}

/** Shows how each run ended, and the loss and norm of all of them in one colour per run. */
function beside(axis) {
  const part = section("Runs"), paint = (index) => `curve-${index % 10}`;
  const last = (run) => (run.losses.length ? shown(run.losses[0].values.findLast((value) => value !== null)) : "-");
  const cells = ({ ended, ...run }, index) => [
    element("span", {}, element("span", { class: "swatch", style: `background: var(--${paint(index)})` }), button(short(nameOfRun(run)), () => show(index), { "aria-pressed": index === current.index, title: run.folder })),
    element("span", { class: `kind ${ended ? ended.level : ""}` }, ended ? short(ended.words, 200) : "?"),
    String(ended ? ended.trips : 0), last(run), run.span.length ? run.span[1].toLocaleString("en") : "-"];
  part.append(table({ head: ["run", "ended", "traps", "last loss", "last step"], rows: data.runs.map(cells) }));
  // All events of all runs would hide the curves.
  const marks = data.runs.flatMap((run, index) => run.marks.filter(isTrip).slice(0, 1).map(([step, kind]) => [step, kind, paint(index)]));
  const chart = (title, linesOf) => {
    const lines = data.runs.flatMap((run, index) => linesOf(run).map((line) => ({ ...line, label: `${nameOfRun(run)}: ${line.label}`, colour: paint(index) })));
    if (lines.length) new Chart(part, axis, { title, unit: UNITS[title], lines, marks, log: lines.every((line) => line.values.every((value) => value === null || !(number(value) <= 0))), height: 150 });
  };
  chart("loss", (run) => run.losses);
  chart("norm of the gradient", wholesOf);
}

/** Shows one run, and all of them beside one another if there are several. */
async function show(index, state = {}) {
  for (const axis of current.axes) for (const view of [...axis.views]) view.remove();
  const run = data.runs[index], axis = new Steps(run.span, Math.max(0.5, ...run.kinds.map((kind) => halfOf(kind.map))));
  current = { index, axes: [axis], maps: {} };
  main.replaceChildren();
  panel.reset.hidden = true;
  panel.say("");
  band(run);
  if (data.runs.length > 1) {
    const spans = data.runs.flatMap((one) => one.span), all = new Steps(spans.length ? [Math.min(...spans), Math.max(...spans)] : [], 0.5);
    current.axes.push(all);
    beside(all);
  }
  happened(run, axis);
  lossSections(run, axis);
  standsOut(run);
  const maps = state.maps || {}, done = run.kinds.map((kind) => kindSection(run, kind, axis, maps[kind.kind]));
  captures(run);
  rules(run);
  await Promise.all(done);
}

function updateViews() {
  for (const axis of current.axes) for (const view of axis.views) view.update();
}

function layOut() {
  gutter = Math.round(Math.min(300, Math.max(150, 0.24 * document.body.clientWidth)));
  document.documentElement.style.setProperty("--gutter", `${gutter}px`);
  updateViews();
}

/** Follows the theme of the system until the reader chooses one; paper is light, and narrow. */
function themes(chosen) {
  const preferred = matchMedia("(prefers-color-scheme: dark)"), { style, dataset, classList } = document.documentElement;
  const theme = () => chosen || (preferred.matches ? "dark" : "light");
  const set = (name) => { style.colorScheme = dataset.theme = name; layOut(); };
  const print = (on) => { classList.toggle("printing", on); set(on ? "light" : theme()); };
  set(theme());
  preferred.addEventListener("change", () => set(theme()));
  document.getElementById("theme").addEventListener("click", () => { chosen = theme() === "dark" ? "light" : "dark"; set(chosen); });
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
  return () => chosen;
}

function begin() {
  const state = recall(), theme = themes(state.theme), weight = ({ ended }) => (ended ? 1000 * GRAVITY.indexOf(ended.level) - Math.min(999, ended.trips) : 1500);
  document.body.append(element("footer", { hidden: "" }, panel.reading, panel.reset));
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
