"use strict";
// Curves over the steps, drawn with uPlot. A logarithmic chart draws log10 of its values on a linear axis.

const Y_AXIS = 64;
// Kinds of events that a chart shows, by their colours.
const MARKS = { trap: "bad", spike: "bad", check: "bad", "hook-lost": "warn", "skipped-step": "skipped", "scaler-skip": "skipped" };

/** The x axis that all charts and maps of a run share: the steps that are seen, and the one below the mouse. */
class Steps {
  constructor(span, half) {
    const [first, last] = span.length ? span : [0, 1], pad = Math.max(half, 0.012 * (last - first));
    this.whole = [first - pad, last + pad];
    [this.min, this.max] = this.whole;
    this.views = new Set();
  }

  /** Shows some steps in every view; without a range, all of them. */
  zoom([min, max] = this.whole) {
    if (max - min < 2 && min !== this.whole[0]) return;
    [this.min, this.max] = [min, max];
    for (const view of this.views) view.update();
    panel.zoomed(this, min !== this.whole[0]);
  }

  /** Puts the crosshair of every view but the one below the mouse at a step; `null` takes it away. */
  point(step, source = null) {
    if (this.pointing) return;
    this.pointing = true;
    for (const view of this.views) if (view !== source) view.cross(step);
    this.pointing = false;
  }
}

/** Returns the steps of all lines, and a column for each line, which is `undefined` where it has no value. */
function aligned(lines) {
  const steps = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, index) => [step, index]));
  // Of two values at one step the worse counts: the non-finite, or else the larger.
  const worse = (one, other) => (one === undefined || !Number.isFinite(other) ? other : Number.isFinite(one) ? Math.max(one, other) : one);
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

/** Returns the points that no line leads to, such as one between two gaps; of a column of two, all. */
function isolated(column) {
  const known = [...column.keys()].filter((index) => column[index] !== undefined);
  const gap = (at) => at < 0 || at >= known.length || column[known[at]] === null;
  return known.length < 3 ? known : known.filter((index, at) => column[index] !== null && gap(at - 1) && gap(at + 1));
}

/** Returns ticks between two logarithms: powers of ten, or numbers between them where the range is small. */
function logTicks(min, max, most) {
  const span = max - min, stride = [1, 2, 3, 5, 10, 20].find((one) => span / one <= most), ticks = [];
  if (span >= 1.7) for (let at = Math.ceil(min / stride) * stride; at <= max; at += stride) ticks.push(at);
  else if (span > 0.6) for (let at = Math.floor(min); at <= max; at++) ticks.push(at, at + Math.log10(2), at + Math.log10(5));
  else {
    const low = 10 ** min, high = 10 ** max, size = 10 ** Math.floor(Math.log10((high - low) / most));
    const step = [1, 2, 5, 10].map((times) => times * size).find((one) => (high - low) / one <= most);
    for (let at = Math.ceil(low / step); at * step <= high; at++) ticks.push(Math.log10(at * step));
  }
  return ticks.filter((at) => at >= min && at <= max);
}

function tickText(at) {
  const exponent = Math.round(at);
  if (Math.abs(at - exponent) > 1e-9 || (exponent >= -2 && exponent <= 3)) return shown(10 ** at);
  return "10" + String(exponent).replace(/./g, (digit) => (digit === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]));
}

/** A chart beside its legend. A line has label, steps and values, and maybe a colour, a width and digits. */
class Chart {
  constructor(part, axis, { title, unit = "", hint = "", lines, log = true, height = 170, marks = [] }) {
    Object.assign(this, { axis, lines, log, height, marks });
    this.box = element("div", { class: "plot" });
    this.step = element("span", {});
    this.entries = lines.map((line, index) => this.entry(line, index, title));
    this.legend = element("div", { class: "legend" }, heading("h3", title, hint), element("p", { class: "scale" }, element("span", {}, [unit, log ? "log scale" : ""].filter(Boolean).join(", ")), this.step), element("ul", {}, ...this.entries));
    this.track = element("div", { class: "track" }, this.legend, this.box);
    part.append(this.track);
    // A chart that cannot be drawn takes no other with it.
    try {
      this.draw();
      axis.views.add(this);
    } catch (error) {
      this.box.replaceChildren(note(`This chart could not be drawn: ${error.message}`));
    }
  }

  name(index) {
    return this.lines[index].colour || `curve-${index % 10}`;
  }

  entry(line, index, title) {
    const swatch = this.lines.length > 1 ? element("span", { class: "swatch", style: `background: var(--${this.name(index)})` }) : null;
    const made = element("li", {}, swatch, swatch || line.label !== title ? nameOf(line.label, 80) : null, element("span", { class: "value" }));
    made.addEventListener("mouseenter", () => this.plot.setSeries(index + 1, { focus: true }));
    made.addEventListener("mouseleave", () => this.plot.setSeries(null, { focus: true }));
    return made;
  }

  draw() {
    const [steps, known] = aligned(this.lines), where = (is) => steps.filter((_, at) => known.some((column) => column[at] !== undefined && is(column[at])));
    const height = (value) => (!Number.isFinite(value) || (this.log && value <= 0) ? null : this.log ? Math.log10(value) : value);
    // A curve goes on over `undefined`; `null` is a gap.
    const columns = known.map((column) => column.map((value) => (value === undefined ? value : height(value))));
    if (!steps.length) throw new Error("nothing was recorded of it");
    Object.assign(this, { known, bad: where((value) => !Number.isFinite(value)), zeros: this.log ? where((value) => value === 0) : [] });
    if (this.zeros.length) this.legend.append(element("p", { class: "scale" }, "▲ exactly 0, which has no place on this axis"));
    this.plot = new uPlot(this.options(columns), [steps, ...columns], this.box);
    this.plot.over.setAttribute("role", "img");
    this.plot.over.setAttribute("aria-label", this.lines.map((line) => line.label).join(", "));
  }

  options(columns) {
    const drawable = columns.some((column) => column.some(Number.isFinite)), most = Math.floor(this.height / 30);
    const axis = { stroke: () => colour("faint"), font: "12px system-ui, sans-serif", grid: { stroke: () => colour("grid"), width: 1 }, ticks: { stroke: () => colour("line"), size: 4 } };
    const edge = () => this.axis.max - 0.025 * (this.axis.max - this.axis.min);
    const range = (_, min, max) => {
      const room = Math.max(0.06 * (max - min), this.log ? 0.05 : 1e-6 * Math.abs(max), 1e-30);
      return min === null ? [0, 1] : [min - room, max + room];
    };
    return {
      width: this.box.clientWidth, height: this.height, padding: [8, 0, 0, 0], legend: { show: false },
      scales: { x: { time: false, range: () => [this.axis.min, this.axis.max] }, y: { range } },
      axes: [
        // Steps are whole numbers.
        { ...axis, incrs: Array.from({ length: 40 }, (_, at) => [1, 2, 5][at % 3] * 10 ** Math.floor(at / 3)), space: 70, size: 26, values: (_, ticks) => ticks.map((at, index) => (at < 0 || at > edge() ? "" : (ticks[index - 1] >= 0 ? "" : "step ") + at.toLocaleString("en"))) },
        { ...axis, size: () => Math.max(Y_AXIS, gutter - this.box.offsetLeft + this.track.offsetLeft), ...(this.log ? { splits: (_, __, min, max) => logTicks(min, max, most) } : {}), values: (_, ticks) => ticks.map((at) => (!drawable ? "" : this.log ? tickText(at) : shown(at))) },
      ],
      series: [{}, ...columns.map((column, index) => ({
        stroke: () => colour(this.name(index)), width: this.lines[index].width || 1.6,
        points: { show: false, filter: () => isolated(column), size: 6, fill: () => colour(this.name(index)) },
      }))],
      focus: { alpha: this.lines.length > 1 ? 0.2 : 1 },
      cursor: { y: false, focus: { prox: 16 }, drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => this.axis.zoom() } },
      hooks: {
        drawAxes: [(plot) => this.drawMarks(plot)],
        draw: [() => { this.triangles(this.bad, "nonfinite", true); this.triangles(this.zeros, "zero", false); }],
        setSelect: [(plot) => this.selected(plot)],
        setCursor: [(plot) => this.moved(plot)],
        setSeries: [(_, index) => this.entries.forEach((entry, at) => entry.classList.toggle("on", at + 1 === index))],
      },
    };
  }

  seen(step) {
    return step >= this.axis.min && step <= this.axis.max;
  }

  /** Draws a line for every trip, and shades the steps that were skipped. */
  drawMarks({ ctx, bbox, valToPos }) {
    for (const [step, kind, paint] of this.marks.filter(([one]) => this.seen(one))) {
      const name = paint || MARKS[kind], x = valToPos(step, "x", true);
      const wide = name === "skipped" ? Math.max(5, 2 * (valToPos(step + 0.5, "x", true) - x)) : devicePixelRatio;
      ctx.fillStyle = name ? colour(name) : "transparent";
      ctx.fillRect(Math.round(x - wide / 2), bbox.top, wide, bbox.height);
    }
  }

  /** Marks steps at the top or the bottom edge: their values have no height. */
  triangles(steps, name, top) {
    const { ctx, bbox, valToPos } = this.plot, from = top ? bbox.top : bbox.top + bbox.height, size = 5 * devicePixelRatio;
    ctx.fillStyle = colour(name);
    for (const step of steps.filter((one) => this.seen(one))) {
      const x = valToPos(step, "x", true);
      ctx.beginPath();
      ctx.moveTo(x - size, from);
      ctx.lineTo(x + size, from);
      ctx.lineTo(x, from + 1.6 * (top ? size : -size));
      ctx.fill();
    }
  }

  selected(plot) {
    const { left, width } = plot.select;
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    if (width > 3) this.axis.zoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
  }

  moved(plot) {
    const at = plot.cursor.idx, step = plot.cursor.left < 0 || at === null || at === undefined ? null : plot.data[0][at];
    this.step.textContent = step === null ? "" : `step ${step.toLocaleString("en")}`;
    this.entries.forEach((entry, index) => { entry.lastChild.textContent = step === null ? "" : shown(this.known[index][at], this.lines[index].digits); });
    this.axis.point(step, this);
  }

  cross(step) {
    this.plot.setCursor(step === null || !this.seen(step) ? { left: -10, top: -10 } : { left: this.plot.valToPos(step, "x"), top: -1000 });
  }

  /** Draws anew: in another width, over other steps, or in other colours. */
  update() {
    const { min, max } = this.axis;
    this.plot.setSize({ width: this.box.clientWidth, height: this.height });
    this.plot.setScale("x", { min, max });
    this.plot.redraw(false, true);
  }

  remove() {
    this.axis.views.delete(this);
    if (this.plot) this.plot.destroy();
    this.track.remove();
  }
}
