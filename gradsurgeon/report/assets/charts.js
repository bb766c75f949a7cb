"use strict";
// Curves over the steps, drawn with uPlot. A logarithmic chart draws log10 of its values on a linear axis.

const Y_AXIS = 64;
// Kinds of events that a chart shows, by their colours.
const MARKS = { trap: "bad", spike: "bad", check: "bad", "hook-lost": "warn", "skipped-step": "skipped", "scaler-skip": "skipped" };
// Steps are whole numbers.
const WHOLE = Array.from({ length: 40 }, (_, at) => [1, 2, 5][at % 3] * 10 ** Math.floor(at / 3));
const QUIET = 0.4, FAINT = 0.2;
const TICK_SPACE = 70;

/** The x axis that all charts and maps of a run share: the steps that are seen, and the one below the mouse. */
class Steps {
  constructor(span, half) {
    const [first, last] = span.length ? span : [0, 1], pad = Math.max(half, 0.012 * (last - first));
    this.whole = [first - pad, last + pad];
    [this.min, this.max] = this.whole;
    this.span = [first, last].map((step) => step.toLocaleString("en"));
    this.views = new Set();
  }

  /** Shows some steps in every view; without a range, all of them. */
  zoom([min, max] = this.whole) {
    const isWhole = min <= this.whole[0] && max >= this.whole[1];
    if (max - min < 2 && !isWhole) return;
    [this.min, this.max] = [min, max];
    for (const view of this.views) view.update();
    panel.zoomed(this, !isWhole);
  }

  /** Zooms for the reader, whose choice outlives a page that reloads itself. */
  choose(range) {
    this.chosen = range || "all";
    this.zoom(range);
  }

  /** Puts the crosshair of every view but the one below the mouse at a step; `null` takes it away. */
  point(step, source = null) {
    if (this.pointing) return;
    this.pointing = true;
    for (const view of this.views) if (view !== source) view.cross(step);
    this.pointing = false;
  }

  /** Returns the text of a tick, given the tick before it; a label at the right edge would be cut. */
  label(step, before) {
    return step < 0 || this.share(step) > 0.975 ? "" : (before >= 0 ? "" : "step ") + step.toLocaleString("en");
  }

  share(step) {
    return (step - this.min) / (this.max - this.min);
  }

  sees(step) {
    return step >= this.min && step <= this.max;
  }
}

/** Returns the steps of all lines, and a column for each line, which is `undefined` where it has no value. */
function aligned(lines) {
  return uPlot.join(lines.map((line) => [line.steps, line.values.map((value) => (value === null ? undefined : number(value)))]));
}

/** Returns the points that no line leads to, such as one between two gaps; of a column of two, all. */
function isolated(column) {
  const known = [...column.keys()].filter((index) => column[index] !== undefined), isGap = (at) => (column[known[at]] ?? null) === null;
  return known.filter((_, at) => known.length < 3 || (!isGap(at) && isGap(at - 1) && isGap(at + 1)));
}

/** Returns ticks between two logarithms: powers of ten, or numbers between them where the range is small. */
function logTicks(min, max, most) {
  const span = max - min, range = (from, step) => Array.from({ length: 100 }, (_, at) => (Math.floor(from / step) + at) * step);
  const stepOf = (width) => range(0, 1).flatMap((at) => [1, 2, 5].map((times) => times * 10 ** (at - 50))).find((one) => width / one <= most);
  let ticks = range(10 ** min, stepOf(10 ** max - 10 ** min)).map(Math.log10);
  if (span > 0.6) ticks = range(min, 1).flatMap((at) => [at, at + Math.log10(2), at + Math.log10(5)]);
  if (span > 1.4) ticks = range(min, 1).flatMap((at) => [at, at + Math.log10(3)]);
  if (span >= 2.4) ticks = range(min, [1, 2, 3, 5, 10, 20].find((one) => span / one <= most));
  return ticks.filter((at) => at >= min && at <= max);
}

function tickText(at, digits) {
  const exponent = Math.round(at);
  if (Math.abs(at - exponent) > 1e-9 || (exponent >= -3 && exponent <= 3)) return shown(10 ** at, digits);
  return "10" + String(exponent).replace(/./g, (digit) => (digit === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]));
}

/** Returns the texts of ticks, with so many digits that no two are alike, and in one notation. */
function tickTexts(ticks, text) {
  const texts = (digits) => ticks.map((at) => text(at, digits));
  const digits = [3, 4, 5, 6, 7, 8].find((some) => new Set(texts(some)).size === ticks.length);
  const result = texts(digits ?? 8), isShort = (one) => /^-?[\d.]+e/.test(one);
  // Beside "0.0011", "9e-4" would not look like the next number.
  const isMixed = result.some(isShort) && result.some((one) => one !== "0" && /^-?[\d.]+$/.test(one));
  return isMixed ? result.map((one) => (isShort(one) ? String(Number(one)) : one)) : result;
}

/** A chart beside its legend. A line has label, steps and values, and maybe a colour, a width, digits, and whether it is quiet. */
class Chart {
  constructor(part, axis, { title, unit = "", prefix = "", hint = "", lines, log = true, height = 170, marks = [], fills = [] }) {
    Object.assign(this, { axis, log, height, marks, fills, lines: lines.map((line, at) => ({ colour: `curve-${at % 10}`, ...line })) });
    this.box = element("div", { class: "plot" });
    this.step = element("span", { class: "step" });
    this.entries = this.lines.map((line, index) => this.entry(line, index, title));
    const scale = [unit, log ? "log scale" : "linear scale", prefix && `names in ${prefix.slice(0, -1)}`].filter(Boolean).join(", ");
    this.legend = element("div", { class: "legend" }, heading("h3", title, hint), this.step, element("p", { class: "scale" }, scale), element("ul", {}, ...this.entries));
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

  /** Returns the colour of a curve: of many curves, most are quiet until the mouse is at them. */
  tone(index) {
    return colour(this.lines[index].colour, this.lines[index].quiet && this.focused !== index + 1 ? QUIET : 1);
  }

  entry(line, index, title) {
    const alone = this.lines.length === 1, focus = (at) => () => this.plot.setSeries(at, { focus: true });
    // All curves of filled bands have one colour.
    const made = element("li", {}, alone || this.fills.length ? null : swatch(`var(--${line.colour})`), alone && line.label === title ? null : nameOf(line.label, 80), element("span", { class: "value" }));
    made.addEventListener("mouseenter", focus(index + 1));
    made.addEventListener("mouseleave", focus(null));
    return made;
  }

  draw() {
    const [steps, ...known] = aligned(this.lines), height = this.log ? Math.log10 : Number;
    if (!steps.length) throw new Error("nothing was recorded of it");
    const where = (is) => steps.filter((_, at) => known.some((column) => column[at] !== undefined && is(column[at])));
    // A curve goes on over `undefined`; `null` is a gap.
    const columns = known.map((column) => column.map((value) => (value === undefined || Number.isFinite(height(value)) ? value && height(value) : null)));
    const bad = new Set(where((value) => !Number.isFinite(value)));
    this.bands = spansOf(steps.length, (at) => bad.has(steps[at]), LONG).map(([first, last]) => this.band(steps, known, first, last));
    const isLone = (step) => !this.bands.some(({ from, to }) => step >= from && step <= to);
    Object.assign(this, { known, bad: [...bad].filter(isLone), zeros: this.log ? where((value) => value === 0) : [] });
    if (this.zeros.length) this.legend.append(element("p", { class: "scale" }, "▲ exactly 0, which has no place on this axis"));
    this.plot = new uPlot(this.options(columns), [steps, ...columns], this.box);
    this.plot.over.setAttribute("role", "img");
    this.plot.over.setAttribute("aria-label", this.lines.map((line) => line.label).join(", "));
  }

  /** Returns where a band lies, and what it says: of several curves, also which one is not finite in most of it. */
  band(steps, known, first, last) {
    const from = steps[first], to = steps[last], valuesOf = (index) => known[index].slice(first, last + 1).filter((value) => value !== undefined);
    const lines = this.lines.filter((_, index) => 2 * valuesOf(index).filter(Number.isFinite).length < valuesOf(index).length);
    const some = lines.length === 1 ? `${short(lines[0].label, 40)}: ` : `${lines.length} of ${this.lines.length}: `;
    return { from, to, text: (lines.length < this.lines.length ? some : "") + nonfiniteFrom(from, to) };
  }

  options(columns) {
    const axis = { stroke: () => colour("faint"), font: "12px system-ui, sans-serif", grid: { stroke: () => colour("grid"), width: 1 }, ticks: { stroke: () => colour("line"), size: 4 } };
    const drawable = columns.some((column) => column.some(Number.isFinite)), most = Math.floor(this.height / 30), text = this.log ? tickText : shown;
    const range = (_, min, max) => {
      const room = Math.max(0.06 * (max - min), this.log ? 0.05 : (max > min ? 1e-6 : 0.1) * Math.abs(max), 1e-30);
      return min === null ? [0, 1] : [min - room, max + room];
    };
    return {
      width: this.box.clientWidth, height: this.height, padding: [8, 0, 0, 0], legend: { show: false },
      scales: { x: { time: false, range: () => [this.axis.min, this.axis.max] }, y: { range } },
      axes: [
        { ...axis, incrs: WHOLE, space: TICK_SPACE, size: 26, values: (_, ticks) => ticks.map((at, index) => this.axis.label(at, ticks[index - 1])) },
        { ...axis, size: () => Math.max(Y_AXIS, gutter - this.box.offsetLeft + this.track.offsetLeft), ...(this.log ? { splits: (_, __, min, max) => logTicks(min, max, most) } : {}), values: (_, ticks) => (drawable ? tickTexts(ticks, text) : ticks.map(() => "")) },
      ],
      series: [{}, ...columns.map((column, index) => ({
        stroke: () => this.tone(index), width: this.lines[index].width || (this.lines[index].quiet ? 1 : 1.7),
        points: { show: false, filter: () => isolated(column), size: 6, fill: () => this.tone(index) },
      }))],
      bands: this.fills,
      focus: { alpha: this.lines.length > 1 && !this.fills.length ? 0.3 : 1 },
      cursor: { y: false, focus: { prox: 16 }, drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => this.axis.choose() } },
      hooks: {
        drawAxes: [() => this.drawMarks()],
        draw: [() => { this.drawBands(); this.triangles(this.bad, "nonfinite", true); this.triangles(this.zeros, "zero", false); }],
        setSelect: [(plot) => this.selected(plot)],
        setCursor: [(plot) => this.moved(plot)],
        setSeries: [(_, index) => { this.focused = index; this.entries.forEach((entry, at) => entry.classList.toggle("on", at + 1 === index)); }],
      },
    };
  }

  /** Draws a line where a trap began to trip, and shades the steps in which it went on, or that were skipped. */
  drawMarks() {
    for (const [from, to, kind, paint = MARKS[kind]] of this.marks.filter((mark) => MARKS[mark[2]])) {
      if (paint === "skipped") this.shade(from - 0.5, to + 0.5, colour(paint), 5);
      else {
        if (to > from) this.shade(from - 0.5, to + 0.5, colour(paint, FAINT / 2));
        this.shade(from, from, colour(paint));
      }
    }
  }

  /** Fills the height of the plot between two steps, and returns the edges of what is seen of it. */
  shade(from, to, paint, least = devicePixelRatio) {
    const { ctx, bbox, valToPos } = this.plot, [left, right] = [from, to].map((step) => valToPos(step, "x", true));
    const room = Math.max(0, least - (right - left)) / 2, end = bbox.left + bbox.width;
    const low = Math.max(bbox.left, Math.round(left - room)), high = Math.min(end, Math.round(right + room));
    ctx.fillStyle = paint;
    if (high > low) ctx.fillRect(low, bbox.top, high - low, bbox.height);
    return [low, high];
  }

  /** Shades what is not finite for long, and says so where there is room. */
  drawBands() {
    const { ctx, bbox } = this.plot;
    ctx.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textAlign = "center";
    for (const { from, to, text } of this.bands) {
      const [left, right] = this.shade(from - 0.5, to + 0.5, colour("nonfinite", FAINT));
      ctx.fillStyle = colour("text");
      if (ctx.measureText(text).width < right - left) ctx.fillText(text, (left + right) / 2, bbox.top + 16 * devicePixelRatio);
    }
  }

  /** Marks steps at the top or the bottom edge: their values have no height. */
  triangles(steps, name, top) {
    const { ctx, bbox, valToPos } = this.plot, from = top ? bbox.top : bbox.top + bbox.height, size = 5 * devicePixelRatio;
    ctx.fillStyle = colour(name);
    for (const x of steps.filter((step) => this.axis.sees(step)).map((step) => valToPos(step, "x", true))) {
      ctx.fill(new Path2D(`M${x - size} ${from}H${x + size}L${x} ${from + 1.6 * (top ? size : -size)}Z`));
    }
  }

  selected(plot) {
    const { left, width } = plot.select;
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    if (width > 3) this.axis.choose([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
  }

  moved({ cursor: { idx, left }, data: [steps] }) {
    const step = left < 0 ? null : steps[idx] ?? null;
    this.step.textContent = step === null ? "" : `step ${step.toLocaleString("en")}`;
    this.entries.forEach((entry, at) => { entry.lastChild.textContent = step === null ? "" : shown(this.known[at][idx], this.lines[at].digits); });
    this.axis.point(step, this);
  }

  cross(step) {
    this.plot.setCursor(step === null || !this.axis.sees(step) ? { left: -10, top: -10 } : { left: this.plot.valToPos(step, "x"), top: -1000 });
  }

  /** Draws anew: in another width, over other steps, or in other colours. */
  update() {
    const { min, max } = this.axis;
    // A chart in a closed fold has no width, and is drawn anew when it opens.
    if (!this.box.clientWidth) return;
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
