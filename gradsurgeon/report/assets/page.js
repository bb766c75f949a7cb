"use strict";
// The page: how a run ended, its curves, what went wrong, what stands out, all norms, its rules.

const main = document.getElementById("main"), root = document.documentElement;
const LEVELS = { fine: "good", look: "warning", broken: "bad" };
const GRAVITY = ["bad", "warning", "running", "good"];
const ICONS = { bad: "✕", warning: "!", running: "▸", good: "✓" };
const MOST_OF_LINE = 600, LOUD = 2;
const UNTOUCHED = 10000;
// What the page opens on: so many columns of the map before the first trap, and a share of them after it.
const COLUMNS_BEFORE = 100, AFTER = 0.12, LEAST_AFTER = 3;
const HINT = "Drag to zoom, double-click to see all steps. A vertical line is a trip, a shaded band a skipped step, ▼ at the top a value that is not finite, a pink band many of them. In a long run a point is the largest of a few steps.";
const NO_LOSS = "The loss is drawn here if a norm-log rule acts on parameters, and backward passes begin at one number.";
// The width of what stands left of every plot and map, so that all of them share one x axis.
let gutter = 0;
let current = { index: 0, axes: [], maps: {} };

/** The line at the bottom of the window: what lies below the mouse, and the way out of a zoom. */
const panel = {
  seen: "",
  reading: element("p", { class: "reading", "aria-live": "polite" }),
  reset: button("show all steps", () => panel.axis.choose(), { hidden: "" }),
  say(text) { this.reading.textContent = text || this.seen; this.update(); },
  zoomed(axis, is) {
    this.axis = axis;
    this.reset.hidden = !is;
    this.seen = is ? `steps ${Math.max(0, Math.ceil(axis.min)).toLocaleString("en")} to ${Math.floor(axis.max).toLocaleString("en")} of ${axis.span.join(" to ")} are shown` : "";
    this.say("");
  },
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
  const count = Array.from({ length: 20 }, (_, at) => at + 1).find((parts) => data.runs.every((other) => other === run || last(other, parts) !== last(run, parts)));
  const name = count ? last(run, count) : run.folder, modelOf = (one) => one.title.split(" on ").pop(), model = modelOf(run);
  // The first of several models of a script has the folder of all.
  return data.runs.every((other) => modelOf(other) === model) || name === model ? name : `${name} (${model})`;
}

const wholesOf = (run) => run.kinds.flatMap((kind) => kind.wholes);
/** Tells whether an event, or a mark of some, is a trap that tripped. */
const isTrip = (event) => MARKS[event.kind || event[2]] === "bad";

/** Returns the colour of a band: a run that goes on has a colour of its own if nothing is wrong. */
function levelOf(run) {
  return run.ended?.state === "running" && run.band.state === "fine" ? "running" : LEVELS[run.band.state];
}

/** Lists what a reader may want to know of a run, each a word and a text. */
function factsOf({ span, ranks, about: { created, torch, gradsurgeon } }) {
  const steps = span.map((step) => step.toLocaleString("en")).join(" to "), began = created && `${created.slice(0, 16).replace("T", " ")} UTC`;
  const facts = [["steps", steps], ["ranks", ranks > 1 ? String(ranks) : ""], ["began", began], ["torch", torch], ["gradsurgeon", gradsurgeon]];
  return facts.filter(([, text]) => text).map(([word, text]) => element("span", {}, `${word} `, element("b", {}, text)));
}

function band(run) {
  const name = short(nameOfRun(run), 200), { sentence } = run.band, level = levelOf(run), { words, diagnosis } = run.ended || { words: sentence };
  const more = sentence.startsWith(words) ? diagnosis : words;
  document.getElementById("title").replaceChildren(name, " ", element("small", {}, short(run.title, 200)));
  document.title = `${name}: gradsurgeon report`;
  main.append(
    element("div", { class: `band ${level}`, role: "status" }, element("span", { class: "icon", "aria-hidden": "true" }, ICONS[level]),
      element("div", {}, element("strong", {}, short(sentence, 400)), more ? element("p", {}, short(more, 400)) : null)),
    element("p", { class: "facts" }, ...factsOf(run)),
    ...data.problems.map((problem) => element("p", { class: "problem" }, `Not on this page: ${problem}`)),
    ...run.notes.map(note));
}

function eventEntry(event) {
  const [start, ...rest] = event.message.split("\n"), first = start.replace(/^step \d+(, rule [^:]*)?(: |, )/, ""), isLong = first.length > MOST_OF_LINE;
  const told = [event.repeated || `step ${event.step}`, event.ranks, short(event.rule || event.name)].filter(Boolean).join(", ");
  const line = element("span", {}, element("span", { class: `kind ${event.kind}` }, event.kind), ` ${told}: ${short(first, MOST_OF_LINE)}`);
  if (!rest.length && !isLong) return element("p", {}, line);
  const text = element("pre", {}, (isLong ? [start, ...rest] : rest).join("\n"));
  // A diagnosis that blames something says more than the gradients that it explains.
  if (!event.diagnosis?.where) return fold(line, text);
  return fold(line, element("p", {}, element("strong", {}, short(event.diagnosis.headline, 300))), diagnosisOf(event.diagnosis, event.message), fold("the message as in the terminal", text));
}

/** Draws lines in one chart, if there are any. */
function chart(part, axis, title, lines, marks, log) {
  const isRate = title === "learning rate", unit = title.startsWith("norm") ? "l2 norm" : "";
  if (lines.length) new Chart(part, axis, { title, unit, lines, log, marks, height: isRate ? 100 : 150 });
}

function happened(run, axis) {
  const part = section(data.runs.length > 1 ? `What happened in ${short(nameOfRun(run))}` : "What happened", HINT), wholes = wholesOf(run), values = run.losses.flatMap((line) => line.values).map(number).filter(Number.isFinite);
  // Of several runs they are drawn above, beside one another.
  if (data.runs.length === 1) {
    chart(part, axis, "loss", run.losses, run.marks, Math.min(...values) > 0 && Math.max(...values) > 30 * Math.min(...values));
    chart(part, axis, "learning rate", run.rates, run.marks, false);
    chart(part, axis, "norm of the gradient", wholes, run.marks, true);
  }
  if (!wholes.length) part.append(note(`${run.nothing || "No norms of parameters were recorded"}: a norm-log rule on the parameters (params: "*") draws the norm of the gradient here.`));
  if (!run.losses.length) part.append(fold("no loss was recorded", note(NO_LOSS)));
  if (!run.events.length) part.append(element("p", {}, "No trap has tripped, and there were no other events."));
  const [trips, others] = [true, false].map((wanted) => run.events.filter((event) => isTrip(event) === wanted));
  const entries = [...trips, ...others].map(eventEntry), first = trips.findIndex((event) => event.kind === "trap");
  // A trap says more than a finding of a check before it.
  if (trips.length) entries[Math.max(0, first)].open = true;
  part.append(...entries);
  if (run.left_out) part.append(note(`${run.left_out} events in between are left out: gradsurgeon export RUN --format jsonl shows all`));
}

function standsOut(run) {
  if (!run.kinds.length) return;
  section("What stands out").append(run.callouts.length ? list(run.callouts) : element("p", {}, "None of the recorded norms is far from the others, non-finite, or a spike."));
}

/** Returns a table whose head says once what all of its names begin with. */
function withoutPrefix({ head: [first, ...head], rows }) {
  const prefix = prefixOf(rows.map(([name]) => name));
  return { head: [prefix ? `${first} in ${prefix.slice(0, -1)}` : first, ...head], rows: rows.map(([name, ...cells]) => [name.slice(prefix.length), ...cells]) };
}

/** Returns the steps before the first trap, in which its cause lies; `undefined` where there was no trap. */
function opening(run, axis, half) {
  const trap = run.marks.find((mark) => mark[2] === "trap");
  if (!trap || !run.span.length) return undefined;
  const [first, last] = run.span, at = Math.min(trap[0], last), from = Math.max(first - half, at - 2 * half * COLUMNS_BEFORE);
  return [from, Math.min(axis.whole[1], at + Math.max(LEAST_AFTER, AFTER * (at - from)))];
}

/** Draws the section of one kind of tensors: the most urgent, their curves, and the map of all. */
async function kindSection(run, kind, axis, state) {
  // The map shows all tensors: none is left out.
  const notes = kind.table.notes.filter((text) => !text.startsWith("... and "));
  const part = section(`${kind.kind[0].toUpperCase()}${kind.kind.slice(1)}s`, [kind.table.title, ...notes].join(". ")), asked = current;
  const cells = await unpack(kind.map);
  // The reader has chosen another run meanwhile.
  if (asked !== current) return;
  const { names } = kind.map, urgent = kind.urgent.map((name) => names.indexOf(name)), count = urgent.length, curves = element("div", { class: "curves" });
  const whole = kind.wholes.length === 1 ? [{ ...kind.wholes[0], colour: "whole", width: 4 }] : [];
  let drawn = null;
  const draw = () => {
    const { chosen } = map, rows = chosen.length ? chosen : urgent;
    // Ten noisy curves are a bundle in which none can be followed: the worst ones stand out.
    const prefix = prefixOf(rows.map((row) => names[row]));
    const lines = rows.map((row, at) => ({ ...map.curve(row, prefix), colour: `curve-${at % 10}`, quiet: rows.length > LOUD + 1 && at >= LOUD }));
    if (drawn) drawn.remove();
    drawn = new Chart(curves, axis, { title: chosen.length ? "chosen in the map" : `the ${count} in the table`, unit: "l2 norm", prefix, lines: [...whole, ...lines], marks: run.marks, height: 240 });
  };
  const map = new HeatMap(axis, kind.map, cells, kind.kind, draw);
  part.append(
    heading("h3", `${count} of ${names.length.toLocaleString("en")}: not finite first, then spikes, then the largest`, "Spikes are in the order of their size (times the steps around them), the largest in the order of their medians."), table(withoutPrefix(kind.table)), curves,
    heading("h3", `All ${names.length.toLocaleString("en")} ${kind.noun}s${kind.kind === "gradient" ? " that got a gradient" : ""}`, `A row is a ${kind.noun}, or a module with the largest norm in it; a column is a step, or a few by their largest norm. Click a module to unfold it, a ${kind.noun} to draw it as a curve.`), map.box);
  axis.views.add(map);
  current.maps[kind.kind] = map;
  if (state) map.restore(state);
  draw();
  map.update();
}

function rules(run) {
  const { files: included = [] } = run.rule_file, files = (included.length ? included : [run.rule_file]).filter((file) => file.text);
  if (!run.rules.rows.length && !files.length) return;
  const part = section("Rules"), head = run.rules.head.map((text) => (text === "changed" && run.observed ? "would have changed" : text));
  if (run.rules.rows.length) part.append(table({ ...run.rules, head }));
  part.append(...files.map(({ file, text }) => fold(file || "?", element("pre", {}, text))));
}

/** Shows how each run ended, and the loss and norm of all of them in one colour per run. */
function beside(axis) {
  const part = section("Runs"), paint = (index) => `curve-${index % 10}`;
  const last = (run) => (run.losses.length ? shown(run.losses[0].values.at(-1)) : "-");
  const cells = (run, index) => [
    element("span", { class: "run" }, swatch(`var(--${paint(index)})`), button(short(nameOfRun(run)), () => show(index), { "aria-pressed": index === current.index, title: run.folder })),
    element("span", { class: `kind ${levelOf(run)}` }, run.ended ? short(run.ended.words, 200) : "?"),
    String(run.ended ? run.ended.trips : 0), String(run.ended ? run.ended.findings : 0), last(run), run.span.length ? run.span[1].toLocaleString("en") : "-"];
  part.append(table({ head: ["run", "ended", "traps", "findings", "last loss", "last step"], rows: data.runs.map(cells) }));
  // All events of all runs would hide the curves.
  const marks = data.runs.flatMap((run, index) => run.marks.filter(isTrip).slice(0, 1).map(([step, , kind]) => [step, step, kind, paint(index)]));
  for (const [title, linesOf] of [["loss", (run) => run.losses], ["learning rate", (run) => run.rates], ["norm of the gradient", wholesOf]]) {
    const lines = data.runs.flatMap((run, index) => linesOf(run).map((line) => ({ ...line, label: `${nameOfRun(run)}: ${line.label}`, colour: paint(index) })));
    chart(part, axis, title, lines, marks, lines.every((line) => line.values.every((value) => !(number(value) <= 0))));
  }
}

/** Shows one run, and all of them beside one another if there are several. */
async function show(index, state = {}) {
  for (const axis of current.axes) for (const view of [...axis.views]) view.remove?.();
  const run = data.runs[index], half = Math.max(0.5, ...run.kinds.map((kind) => halfOf(kind.map))), axis = new Steps(run.span, half);
  current = { index, axes: [axis], maps: {} };
  main.replaceChildren();
  const seen = state.seen || opening(run, axis, half);
  axis.zoom(seen === "all" ? undefined : seen);
  axis.chosen = state.seen;
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
  magnitudes(run, axis);
  rules(run);
  await Promise.all(done);
}

function layOut() {
  gutter = Math.round(Math.min(300, Math.max(150, 0.24 * document.body.clientWidth)));
  root.style.setProperty("--gutter", `${gutter}px`);
  for (const axis of current.axes) for (const view of axis.views) view.update();
}

/** Follows the theme of the system until the reader chooses one; paper is light, and narrow. */
function themes(chosen) {
  const preferred = matchMedia("(prefers-color-scheme: dark)"), theme = () => chosen || (preferred.matches ? "dark" : "light");
  const set = (name) => { root.style.colorScheme = root.dataset.theme = name; layOut(); };
  const print = (on) => { root.classList.toggle("printing", on); set(on ? "light" : theme()); };
  set(theme());
  preferred.addEventListener("change", () => set(theme()));
  document.getElementById("theme").addEventListener("click", () => { chosen = theme() === "dark" ? "light" : "dark"; set(chosen); });
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
  return () => chosen;
}

/** Reloads the page of a run that goes on after so many seconds, but not under the reader's hands, and keeps what they chose. */
function live(seconds, state) {
  const begun = Date.now(), written = `written ${document.lastModified.slice(-8)}`, text = element("span", {}, `live: ${written}, reloads itself `);
  let touched = 0;
  const touch = () => { touched = Date.now(); };
  for (const kind of ["wheel", "keydown", "touchmove", "scroll", "pointerdown"]) addEventListener(kind, touch, { passive: true });
  // A browser also reports a mouse that rests while the page below it changes.
  addEventListener("pointermove", (event) => { if (event.movementX || event.movementY || event.buttons) touch(); });
  const timer = setInterval(() => {
    if (Date.now() - begun < 1000 * seconds || Date.now() - touched < UNTOUCHED || !getSelection().isCollapsed) return;
    clearInterval(timer);
    history.replaceState(state(), "");
    location.reload();
  }, 250);
  const stop = button("stop", () => { clearInterval(timer); text.textContent = `${written}, stopped`; stop.remove(); });
  document.getElementById("live").append(text, stop);
}

async function begin() {
  // What the reader had chosen before the page reloaded itself.
  const state = history.state || {}, theme = themes(state.theme), weight = (run) => 1000 * GRAVITY.indexOf(levelOf(run)) - (run.ended ? Math.min(999, run.ended.trips + run.ended.findings) : 0);
  history.replaceState(null, "");
  document.body.append(element("footer", { hidden: "" }, panel.reading, panel.reset));
  const worst = data.runs.reduce((best, run, index) => (weight(run) < weight(data.runs[best]) ? index : best), 0);
  let resizing = 0;
  addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(layOut, 100); });
  await show(data.runs[state.run] ? state.run : worst, state);
  if (state.scroll) scrollTo(0, state.scroll);
  const maps = () => Object.fromEntries(Object.entries(current.maps).map(([kind, map]) => [kind, map.state()]));
  if (data.reload) live(data.reload, () => ({ run: current.index, seen: current.axes[0].chosen, theme: theme(), scroll: scrollY, maps: maps() }));
  root.dataset.ready = "true";
}

begin();
