"use strict";
// Curves with uPlot.

const charts = new Set();
const EVENT_COLOURS = { trap: "bad", "skipped-step": "warn", "scaler-skip": "warn", spike: "warn", "hook-lost": "warn" };

/** Of two values at one step the one to look at: what is not finite, or else the larger. */
function worse(one, other) {
  if (one === undefined || !Number.isFinite(other)) return other;
  return Number.isFinite(one) ? Math.max(one, other) : one;
}

/** The same steps for all lines, over which uPlot draws; where a line has no value, it has `undefined`. */
function aligned(lines) {
  const steps = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, index) => [step, index]));
  const columns = lines.map((line) => {
    const column = new Array(steps.length).fill(undefined);
    line.steps.forEach((step, index) => {
      const value = number(line.values[index]), at = place.get(step);
      if (value !== null) column[at] = worse(column[at], value);
    });
    return column;
  });
  return [steps, columns];
}

/** The points that no line leads to: between two gaps, or alone. Only a column of two or fewer shows all. */
function isolated(column) {
  const known = [...column.keys()].filter((index) => column[index] !== undefined);
  if (known.length < 3) return known;
  const gap = (at) => at < 0 || at >= known.length || column[known[at]] === null;
  return known.filter((index, at) => column[index] !== null && gap(at - 1) && gap(at + 1));
}

/** The steps at which a value of some column is so. */
function stepsWhere(steps, columns, is) {
  return steps.filter((_, index) => columns.some((column) => column[index] !== undefined && is(column[index])));
}

/** Marks at an edge of the plot, of what no height says. */
function marks(plot, steps, paint, top) {
  const { ctx, bbox } = plot;
  const ratio = devicePixelRatio, from = top ? bbox.top : bbox.top + bbox.height;
  ctx.fillStyle = paint;
  for (const step of steps) {
    const x = plot.valToPos(step, "x", true);
    ctx.beginPath();
    ctx.moveTo(x - 4 * ratio, from);
    ctx.lineTo(x + 4 * ratio, from);
    ctx.lineTo(x, from + (top ? 8 : -8) * ratio);
    ctx.fill();
  }
}

function eventLines(plot, events) {
  const { ctx, bbox } = plot;
  const drawn = new Set();
  for (const event of events) {
    if (!EVENT_COLOURS[event.kind]) continue;
    const x = Math.round(plot.valToPos(event.step, "x", true));
    // Beside one another, runs are told apart by their colours, and not the kinds of events.
    const paint = event.curve === undefined ? colour(EVENT_COLOURS[event.kind]) : curveColour(event.curve);
    if (drawn.has(paint + x)) continue;
    drawn.add(paint + x);
    ctx.fillStyle = paint;
    ctx.globalAlpha = event.curve === undefined ? 0.75 : 0.5;
    ctx.fillRect(x, bbox.top, devicePixelRatio, bbox.height);
  }
  ctx.globalAlpha = 1;
}

function overlay(events, bad, zeros) {
  return (plot) => {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    eventLines(plot, events);
    marks(plot, bad, colour("nonfinite"), true);
    marks(plot, zeros, colour("zero"), false);
    ctx.restore();
  };
}

/** Without a mouse over it, the legend has names and no values. */
function showIdle(plot) {
  plot.root.classList.toggle("idle", plot.cursor.idx === null || plot.cursor.idx === undefined);
}

/** Draws curves over the steps of a run into a box; `log` for norms, which have no sign. */
function chart(box, lines, { log = true, height = 220, events = [] } = {}) {
  const [steps, known] = aligned(lines);
  const bad = stepsWhere(steps, known, (value) => !Number.isFinite(value));
  // A logarithm knows no zero.
  const zeros = log ? stepsWhere(steps, known, (value) => value === 0) : [];
  const hasPlace = (value) => Number.isFinite(value) && (!log || value > 0);
  // Over `undefined` a curve goes on; `null` is a gap.
  const columns = known.map((column) => column.map((value) => (value === undefined || hasPlace(value) ? value : null)));
  const drawable = columns.some((column) => column.some(hasPlace));
  if (!drawable && !bad.length) {
    box.append(element("p", { class: "note" }, zeros.length ? "nothing but zeros was recorded of this" : "nothing was recorded of this"));
    return null;
  }
  const axis = () => ({ stroke: () => colour("faint"), grid: { stroke: () => colour("line"), width: 1 }, ticks: { stroke: () => colour("line") } });
  const series = (line, index) => ({
    label: short(line.label, 80),
    stroke: () => curveColour(index),
    width: 1.5,
    points: { show: false, filter: () => isolated(columns[index]), size: 6, fill: () => curveColour(index) },
    value: (plot, value, place, at) => (at === null || at === undefined ? "" : shown(known[index][at], line.digits)),
  });
  const options = {
    width: Math.max(280, box.clientWidth || 800),
    height,
    scales: { x: { time: false }, y: log && drawable ? { distr: 3 } : { range: drawable ? undefined : [0, 1] } },
    // Where nothing has a height, numbers at the axis would be invented.
    axes: [axis(), { ...axis(), size: Y_AXIS, values: (_, ticks) => ticks.map((tick) => (tick === null || !drawable ? "" : shown(tick))) }],
    series: [{ label: "step", value: (_, value) => (value === null || value === undefined ? "" : String(value)) }, ...lines.map(series)],
    cursor: { sync: { key: "steps" }, drag: { x: true, y: false } },
    hooks: { draw: [overlay(events, bad, zeros)], setCursor: [showIdle] },
  };
  const plot = new uPlot(options, [steps, ...columns], box);
  const picture = plot.root.querySelector(".u-wrap");
  picture.setAttribute("role", "img");
  picture.setAttribute("aria-label", lines.map((line) => line.label).join(", "));
  showIdle(plot);
  charts.add(plot);
  if (zeros.length) box.append(element("p", { class: "hint" }, "A mark at the bottom is a norm of exactly 0, which has no place on this axis."));
  return plot;
}

const Y_AXIS = 64;

function forgetCharts() {
  for (const plot of charts) plot.destroy();
  charts.clear();
}

function redrawCharts() {
  for (const plot of charts) {
    plot.redraw();
    // The legend takes its colours only once.
    plot.root.querySelectorAll(".u-series:not(:first-child) .u-marker").forEach((marker, index) => { marker.style.borderColor = curveColour(index); });
  }
}

let resizing = 0;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(() => {
    for (const plot of charts) plot.setSize({ width: Math.max(280, plot.root.parentElement.clientWidth), height: plot.height });
  }, 150);
});
