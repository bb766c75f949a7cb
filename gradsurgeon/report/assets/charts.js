"use strict";
// Curves with uPlot, and what the whole page shares: colours, numbers, elements.

const data = JSON.parse(document.getElementById("data").textContent);

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

function curveColour(index) {
  return colour("curve-" + (index % 10));
}

/** Makes an element; children that are texts become text and never markup. */
function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "class") made.className = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** What is not finite travels by its name. */
function number(value) {
  return typeof value === "string" ? Number(value) : value;
}

/** Writes a number with so many digits: a cell of the map knows two for sure. */
function shown(value, digits = 3) {
  const v = number(value);
  if (v === null || v === undefined) return "";
  if (!Number.isFinite(v)) return Number.isNaN(v) ? "NaN" : v > 0 ? "Inf" : "-Inf";
  if (v === 0) return "0";
  const size = Math.abs(v);
  return size >= 1e5 || size < 1e-3 ? v.toExponential(digits - 1) : String(Number(v.toPrecision(digits)));
}

const charts = new Set();
const EVENT_COLOURS = { trap: "bad", "skipped-step": "warn", "scaler-skip": "warn", spike: "warn", "hook-lost": "warn" };

/** The same steps for all lines: uPlot draws over one array of them. */
function aligned(lines) {
  const steps = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, index) => [step, index]));
  const columns = lines.map((line) => {
    // `undefined` is no point at all, over which a curve goes on; `null` is a gap.
    const column = new Array(steps.length).fill(undefined);
    line.steps.forEach((step, index) => {
      const value = number(line.values[index]);
      column[place.get(step)] = value === null || !Number.isFinite(value) ? null : value;
    });
    return column;
  });
  return [steps, ...columns];
}

/** Where a line is not finite: marked at the top, since no height says it. */
function badSteps(line) {
  return line.steps.filter((_, index) => {
    const value = number(line.values[index]);
    return value !== null && !Number.isFinite(value);
  });
}

function overlay(lines, events) {
  return (plot) => {
    const { ctx, bbox } = plot;
    const ratio = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    const drawn = new Set();
    for (const event of events) {
      const x = Math.round(plot.valToPos(event.step, "x", true));
      const name = EVENT_COLOURS[event.kind];
      if (!name || drawn.has(name + x)) continue;
      drawn.add(name + x);
      ctx.strokeStyle = colour(name);
      ctx.globalAlpha = 0.75;
      ctx.lineWidth = ratio;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.globalAlpha = 1;
    ctx.fillStyle = colour("nonfinite");
    for (const step of new Set(lines.flatMap(badSteps))) {
      const x = plot.valToPos(step, "x", true);
      ctx.beginPath();
      ctx.moveTo(x - 4 * ratio, bbox.top);
      ctx.lineTo(x + 4 * ratio, bbox.top);
      ctx.lineTo(x, bbox.top + 8 * ratio);
      ctx.fill();
    }
    ctx.restore();
  };
}

/** Draws curves over the steps of a run into a box; `log` for norms, which have no sign. */
function chart(box, lines, { log = true, height = 220, events = [], label = "" } = {}) {
  const axis = () => ({ stroke: () => colour("faint"), grid: { stroke: () => colour("line"), width: 1 }, ticks: { stroke: () => colour("line") } });
  const columns = aligned(lines);
  const drawable = columns.slice(1).some((column) => column.some((value) => value > 0 || (!log && value !== null && value !== undefined)));
  if (!drawable && !lines.some((line) => badSteps(line).length)) {
    box.append(element("p", { class: "note" }, "nothing but zeros was recorded of this"));
    return null;
  }
  // A logarithm knows no zero.
  if (log) for (const column of columns.slice(1)) column.forEach((value, index) => { if (value === 0) column[index] = null; });
  const options = {
    width: Math.max(280, box.clientWidth || 800),
    height,
    scales: { x: { time: false }, y: log && drawable ? { distr: 3 } : { range: drawable ? undefined : [0, 1] } },
    axes: [axis(), { ...axis(), size: 64, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : shown(tick))) }],
    series: [
      { label: "step" },
      ...lines.map((line, index) => ({ label: line.label, stroke: () => curveColour(index), width: 1.5, points: { show: columns[0].length < 3 }, value: (_, value) => shown(value, line.digits) })),
    ],
    cursor: { sync: { key: "steps" }, drag: { x: true, y: false } },
    hooks: { draw: [overlay(lines, events)] },
  };
  box.setAttribute("role", "img");
  box.setAttribute("aria-label", label || lines.map((line) => line.label).join(", "));
  const plot = new uPlot(options, columns, box);
  charts.add(plot);
  return plot;
}

function forgetCharts() {
  for (const plot of charts) plot.destroy();
  charts.clear();
}

function redrawCharts() {
  for (const plot of charts) plot.redraw();
}

let resizing = 0;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(() => {
    for (const plot of charts) plot.setSize({ width: Math.max(280, plot.root.parentElement.clientWidth), height: plot.height });
  }, 150);
});
