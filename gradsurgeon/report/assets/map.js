"use strict";
// The map of norms: a row for each tensor or module, over the steps of the run, drawn on a canvas.

const ROW = 18, MOST_ROWS = 600, ALL_OPEN = 48;
// The colours begin so many orders of magnitude below the median, and norms this far above them are spikes.
const BELOW = 4, FAR = 0.5;
const DIGITS = 2;
const KEYS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], PageUp: [-10, 0], PageDown: [10, 0], Home: [0, -1e9], End: [0, 1e9] };
// A cell is 1 more than the upper half of the bits of a norm as float32, so it grows with the logarithm of the norm.
const ABSENT = 0, ZERO = 1, NONFINITE = 0xffff, PER_DECADE = 128 * Math.log2(10);
const bits = new Uint32Array(1), float = new Float32Array(bits.buffer);

function normOf(code) {
  if (code <= ZERO) return code === ZERO ? 0 : null;
  if (code === NONFINITE) return NaN;
  bits[0] = (code - 1) << 16;
  return float[0];
}

/** Unpacks the cells of a map, whose high bytes come before all low bytes. */
async function unpack(map) {
  const packed = new Blob([bytesOf(map.cells)]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(packed).arrayBuffer()), count = bytes.length / 2;
  return Uint16Array.from({ length: count }, (_, i) => (bytes[i] << 8) | bytes[count + i]);
}

/** Returns the span of the colours: a few outliers must not give all other cells one colour. */
function spanOf(cells) {
  const known = cells.filter((code) => code > ZERO && code !== NONFINITE).sort(), at = (share) => known[Math.floor(share * known.length)];
  if (!known.length) return null;
  // Noise of a few percent must not look like an earthquake.
  const high = at(0.998), low = Math.max(at(0.005), at(0.5) - BELOW * PER_DECADE), lack = Math.max(0, PER_DECADE - (high - low));
  return [low - lack / 2, high + lack / 2];
}

/** Returns the modules that names spell, as a tree; a module with one tensor is one row with it. */
function treeOf(names, kind) {
  const root = { name: "", children: new Map(), row: -1 };
  names.forEach((name, row) => {
    let node = root;
    const parts = name.split(".");
    parts.forEach((label, depth) => {
      // A name may be that of a tensor and of a module, which are two nodes.
      const key = depth === parts.length - 1 ? row : label;
      if (!node.children.has(key)) node.children.set(key, { name: parts.slice(0, depth + 1).join("."), label, children: new Map(), row: -1 });
      node = node.children.get(key);
    });
    node.row = row;
  });
  const folded = (node) => {
    const list = [...node.children.values()], isTwin = (one) => one.row >= 0 && node.children.has(one.label);
    // What a module has itself stands in it, as its first row.
    for (const one of list.filter(isTwin)) {
      const module = node.children.get(one.label);
      module.children = new Map([[-1, { ...one, label: `(${kind})` }], ...module.children]);
    }
    node.list = list.filter((one) => !isTwin(one)).map(folded);
    node.count = node.row >= 0 ? 1 : node.list.reduce((sum, child) => sum + child.count, 0);
    return node === root || node.list.length !== 1 ? node : { ...node.list[0], label: `${node.label}.${node.list[0].label}` };
  };
  return folded(root);
}

function nodesOf(node) {
  return [node, ...node.list.flatMap(nodesOf)];
}

/** Returns half of the usual distance of two columns: each column stands around its step. */
function halfOf({ firsts, lasts }) {
  const gaps = firsts.slice(1).map((step, at) => step - firsts[at]).sort((a, b) => a - b);
  return firsts.some((step, at) => step !== lasts[at]) || !gaps.length ? 0.5 : gaps[gaps.length >> 1] / 2;
}

class HeatMap {
  constructor(axis, map, cells, kind, onChoose) {
    Object.assign(this, { axis, map, cells, onChoose, columns: map.firsts.length, at: null, span: spanOf(cells) });
    this.tree = treeOf(map.names, kind);
    this.nodes = nodesOf(this.tree);
    // Of a large model only the modules that hold much of it are open: the rest is a row for each layer.
    for (const node of this.nodes) node.open = node.row < 0 && (this.tree.count <= ALL_OPEN || node.count > this.tree.count / 4);
    const isBad = (at) => this.cellsOf(this.tree)[at] === NONFINITE && map.names.every((_, row) => [NONFINITE, ABSENT].includes(cells[row * this.columns + at]));
    this.bands = spansOf(this.columns, isBad, LONG).map(([from, to]) => ({ from, to, box: element("div", { class: "nonfinite" }, nonfiniteFrom(map.firsts[from], map.lasts[to])) }));
    this.most = cells.reduce((most, code) => (code !== NONFINITE && code > most ? code : most), 0);
    const half = halfOf(map);
    this.starts = map.firsts.map((step) => step - half);
    // A column ends where the next one begins, or soon after its last step where nothing was recorded after it.
    this.ends = this.starts.map((start, at) => Math.min(this.starts[at + 1] ?? Infinity, Math.max(start + (at + 1 < this.columns ? 3 : 2) * half, map.lasts[at] + half)));
    this.build();
  }

  build() {
    this.labels = element("div", { class: "rows" });
    this.canvas = element("canvas", {});
    this.mark = element("div", { class: "mark", hidden: "" });
    this.line = element("div", { class: "crosshair", hidden: "" });
    this.field = element("div", { class: "cells", tabindex: "0", role: "img", "aria-label": "map of norms: arrow keys go from cell to cell" }, this.canvas, ...this.bands.map((band) => band.box), this.line, this.mark);
    this.ticks = element("div", { class: "ticks" });
    this.more = element("p", { class: "note", hidden: "" });
    this.search = element("input", { type: "search", placeholder: "filter names", "aria-label": "show only names with" });
    const all = (open) => () => { for (const node of this.nodes.slice(1)) if (node.row < 0) node.open = open; this.list(); };
    this.box = element("div", {}, element("div", { class: "tools" }, this.search, button("unfold all", all(true)), button("fold all", all(false)), this.legend()),
      element("div", { class: "map" }, this.labels, this.field), this.ticks, this.more);
    this.search.addEventListener("input", () => this.list());
    const on = { mousemove: (event) => this.hover(event), mouseleave: () => this.read(null), keydown: (event) => this.key(event), click: () => this.at && this.choose(this.rows[this.at.row]) };
    for (const [kind, act] of Object.entries(on)) this.field.addEventListener(kind, act);
    this.list();
  }

  legend() {
    const [low, high, most] = [...(this.span || []), this.most].map((code) => shown(normOf(Math.round(code)), DIGITS)), entry = (paint, text) => element("span", {}, swatch(paint), text);
    return element("span", { class: "colours" },
      this.span ? element("span", {}, low, element("span", { class: "ramp", style: `background: linear-gradient(90deg, ${RAMP.map((one) => `rgb(${one})`)})` }), high) : null,
      this.span && this.most > this.span[1] + FAR * PER_DECADE ? entry("linear-gradient(90deg, #ff961e, red)", `far above, to ${most}`) : null,
      entry("var(--nonfinite)", "not finite"), entry("var(--zero)", "0"), "blank: nothing recorded");
  }

  /** Returns a function from a cell to its pixel. */
  palette() {
    const pixel = ([red, green, blue]) => (255 << 24) | (blue << 16) | (green << 8) | red, [low, high] = this.span || [0, 1], far = high + FAR * PER_DECADE;
    const made = Object.assign([], { [ABSENT]: 0, [ZERO]: pixel(rgb("zero")), [NONFINITE]: pixel(rgb("nonfinite")) });
    const spike = (share) => [255, Math.round(150 * (1 - share)), Math.round(30 * (1 - share))];
    return (code) => (made[code] ??= pixel(code <= far ? ramp((code - low) / (high - low)) : spike((code - far) / Math.max(1, this.most - far))));
  }

  /** Lists the rows that are open, or the tensors whose names have the text that is searched for. */
  list() {
    const asked = this.search.value.trim(), text = asked.toLowerCase(), rows = [];
    const visit = (node, depth) => {
      if (text ? node.row >= 0 && node.name.toLowerCase().includes(text) : node !== this.tree) rows.push({ node, depth: text ? 0 : depth });
      if (text || node.open) for (const child of node.list) visit(child, depth + 1);
    };
    visit(this.tree, -1);
    this.rows = rows.slice(0, MOST_ROWS);
    this.more.hidden = rows.length > 0 && rows.length <= MOST_ROWS;
    this.more.textContent = rows.length ? `and ${rows.length - MOST_ROWS} more rows: fold modules, or filter the names` : `no name has ${short(asked)}`;
    this.labels.replaceChildren(...this.rows.map((row, index) => this.label(row, index, text)));
    this.labels.style.height = this.field.style.height = `${this.rows.length * ROW}px`;
    this.read(null);
    this.update();
  }

  label(row, index, searched) {
    const { node, depth } = row, isLeaf = node.row >= 0;
    const text = isLeaf ? (searched ? node.name : node.label) : `${node.open ? "▾" : "▸"} ${node.label} (${node.count})`;
    row.button = button(short(text, 400), () => this.choose(row), { title: short(node.name, 1000), style: `top: ${index * ROW}px; padding-left: ${depth * 12 + 4}px`, [isLeaf ? "aria-pressed" : "aria-expanded"]: node.open });
    return row.button;
  }

  /** Folds or unfolds a module; draws a tensor as a curve, or no longer. */
  choose({ node, button: label }) {
    const focused = document.activeElement === label;
    node.open = !node.open;
    this.list();
    if (focused) this.rows.find((row) => row.node === node).button.focus({ preventScroll: true });
    if (node.row >= 0) this.onChoose();
  }

  get chosen() {
    return this.nodes.filter((node) => node.row >= 0 && node.open).map((node) => node.row);
  }

  /** Returns the largest cell of all tensors of a module in each column: codes have the order of norms. */
  cellsOf(node) {
    if (node.row >= 0) return this.cells.subarray(node.row * this.columns, (node.row + 1) * this.columns);
    if (!node.cells) {
      const parts = node.list.map((child) => this.cellsOf(child));
      node.cells = Uint16Array.from({ length: this.columns }, (_, at) => parts.reduce((most, cells) => Math.max(most, cells[at]), ABSENT));
    }
    return node.cells;
  }

  /** Draws a line of pixels for each row, which the style makes as high as the row. */
  update() {
    const across = Math.round(this.field.clientWidth * (devicePixelRatio || 1)), paint = this.palette(), codes = new Uint16Array(across);
    Object.assign(this.canvas, { width: across, height: this.rows.length });
    this.drawTicks();
    for (const { from, to, box } of this.bands) this.put(box, this.starts[from], this.ends[to]);
    if (!across || !this.rows.length) return;
    const image = new ImageData(across, this.rows.length), pixels = new Uint32Array(image.data.buffer);
    const pixelAt = (step) => Math.max(0, Math.min(across, Math.round(this.axis.share(step) * across)));
    const lefts = this.starts.map(pixelAt), rights = this.ends.map((step, at) => Math.max(pixelAt(step), Math.min(across, lefts[at] + 1)));
    this.rows.forEach(({ node }, row) => {
      codes.fill(ABSENT);
      // A pixel of several columns shows the largest of them.
      this.cellsOf(node).forEach((code, at) => { for (let x = lefts[at]; x < rights[at]; x++) if (code > codes[x]) codes[x] = code; });
      codes.forEach((code, x) => { pixels[row * across + x] = paint(code); });
    });
    this.canvas.getContext("2d").putImageData(image, 0, 0);
  }

  /** Writes steps below the cells, as below a chart. */
  drawTicks() {
    const { min, max } = this.axis, most = this.field.clientWidth / TICK_SPACE, apart = WHOLE.find((one) => (max - min) / one <= most), ticks = [];
    for (let step = apart * Math.max(0, Math.ceil(min / apart)); apart && step < max; step += apart) ticks.push(step);
    this.ticks.replaceChildren(...ticks.map((step, at) => element("span", { style: `left: ${100 * this.axis.share(step)}%` }, this.axis.label(step, ticks[at - 1]))));
  }

  /** Puts a box over some steps, as far as they are seen. */
  put(box, from, to) {
    const [left, right] = [from, to].map((step) => 100 * Math.max(0, Math.min(1, this.axis.share(step))));
    box.hidden = right <= left;
    Object.assign(box.style, { left: `${left}%`, width: `calc(${right - left}% + 1px)` });
  }

  cross(step) {
    this.line.hidden = step === null || !this.axis.sees(step);
    this.line.style.left = `${100 * this.axis.share(step)}%`;
  }

  hover({ clientX, clientY }) {
    const box = this.field.getBoundingClientRect(), step = this.axis.min + ((clientX - box.left) / box.width) * (this.axis.max - this.axis.min);
    this.read({ row: Math.floor((clientY - box.top) / ROW), column: this.starts.findLastIndex((start) => start <= step) });
  }

  key(event) {
    const at = this.at || { row: 0, column: 0 }, chooses = ["Enter", " "].includes(event.key), [down, right] = KEYS[event.key] || [0, 0];
    if (!this.rows.length || !(chooses || KEYS[event.key])) return;
    if (chooses) this.choose(this.rows[at.row]);
    this.read({ row: at.row + down, column: at.column + right });
    this.mark.scrollIntoView({ block: "nearest" });
    event.preventDefault();
  }

  /** Marks a cell, tells in words what it holds, and puts the crosshair at its step. */
  read(at) {
    const within = (value, count) => Math.max(0, Math.min(count - 1, value));
    this.at = at && this.rows.length ? { row: within(at.row, this.rows.length), column: within(at.column, this.columns) } : null;
    this.mark.hidden = !this.at;
    panel.say(this.at ? this.words(this.at) : "");
    this.axis.point(this.at ? this.map.firsts[this.at.column] : null);
    if (!this.at) return;
    const [left, right] = [this.starts, this.ends].map((steps) => 100 * this.axis.share(steps[this.at.column]));
    Object.assign(this.mark.style, { left: `${left}%`, width: `max(3px, ${right - left}%)`, top: `${this.at.row * ROW}px` });
  }

  words({ row, column }) {
    const { node } = this.rows[row], value = normOf(this.cellsOf(node)[column]), from = this.map.firsts[column], to = this.map.lasts[column];
    const many = from === to && node.row >= 0 ? "" : "largest ";
    const what = value === null ? "nothing recorded" : Number.isNaN(value) ? "not finite" : `${many}norm ${shown(value, DIGITS)}`;
    return `${short(node.name)}${node.row < 0 ? ` (${node.count})` : ""}, ${from === to ? `step ${from}` : `steps ${from} to ${to}`}: ${what}`;
  }

  /** Returns what is open, by names: a page that is written anew may have other rows. */
  state() {
    return { open: this.nodes.filter((node) => node.open).map((node) => [node.name, node.row < 0].join()), search: this.search.value };
  }

  restore({ open, search }) {
    for (const node of this.nodes) node.open = open.includes([node.name, node.row < 0].join());
    this.search.value = search;
    this.list();
  }

  /** Returns the curve of a row; its label begins after the prefix. */
  curve(row, prefix) {
    return { label: this.map.names[row].slice(prefix.length), digits: DIGITS, steps: this.map.firsts, values: Array.from(this.cellsOf({ row }), normOf) };
  }
}
