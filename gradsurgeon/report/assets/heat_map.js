"use strict";
// The map of norms: a row per tensor or per module, a column per few steps, drawn on a canvas.

const ROW = 18;
// So many rows are drawn at once, and printed; of more only what is on the screen, since a canvas has a largest height.
const MOST_DRAWN = 200;
// So many orders of magnitude above the span a norm is a spike, and not noise.
const FAR = 0.5;
const CELL_DIGITS = 2;
const { lowest, step: codeStep, absent, zero, first: firstCode, nonfinite } = data.cell;

function normOf(code) {
  if (code === absent) return null;
  if (code === zero) return 0;
  return code === nonfinite ? NaN : 10 ** (lowest + (code - firstCode) * codeStep);
}

/** Unpacks the cells of a map: high bytes first, low bytes after them. */
async function unpack(map) {
  const packed = Uint8Array.from(atob(map.cells), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const count = bytes.length / 2;
  const cells = new Uint16Array(count);
  for (let i = 0; i < count; i++) cells[i] = (bytes[i] << 8) | bytes[count + i];
  return cells;
}

/** The span of the colours, if any cell has one: outliers of a few cells must not make all else one colour. */
function spanOf(cells) {
  const counts = new Uint32Array(65536);
  let total = 0;
  for (const code of cells) if (code >= firstCode && code !== nonfinite) { counts[code]++; total++; }
  if (!total) return null;
  const at = (share) => {
    let sum = 0;
    for (let code = firstCode; code < nonfinite; code++) {
      sum += counts[code];
      if (sum > share * total) return code;
    }
    return nonfinite - 1;
  };
  const low = at(0.005), high = at(0.998);
  // Noise of a few percent must not look like an earthquake.
  const least = 1 / codeStep;
  return high - low < least ? [(low + high - least) / 2, (low + high + least) / 2] : [low, high];
}

// Dark to bright, alike for most kinds of colour blindness (after viridis, by its samples).
const RAMP = ["#440154", "#46327e", "#365c8d", "#277f8e", "#1fa187", "#4ac16d", "#a0da39", "#fde725"].map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));

function ramp(share) {
  const at = Math.max(0, Math.min(1, share)) * (RAMP.length - 1);
  const low = Math.min(RAMP.length - 2, Math.floor(at));
  return RAMP[low].map((value, i) => Math.round(value + (RAMP[low + 1][i] - value) * (at - low)));
}

/** What stands out above the span: from orange to red, so that a spike of one step is seen among thousands. */
function paintOf(code, [low, high], most) {
  const far = high + FAR / codeStep;
  if (code <= far) return ramp((code - low) / (high - low));
  const share = Math.min(1, (code - far) / Math.max(1, most - far));
  return [255, Math.round(150 * (1 - share)), Math.round(30 * (1 - share))];
}

function rgb(name) {
  const hex = colour(name);
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

/** The colours of cells, as pixels of a canvas; each is made when it is first asked for. */
function paletteOf(span, most) {
  const made = new Uint32Array(65536);
  const pixel = ([red, green, blue]) => (255 << 24) | (blue << 16) | (green << 8) | red;
  made[zero] = pixel(rgb("zero"));
  made[nonfinite] = pixel(rgb("nonfinite"));
  return (code) => made[code] || (code === absent ? 0 : (made[code] = pixel(paintOf(code, span, most))));
}

/** Numbers of steps below columns, which all have the same width, whatever lies between their steps. */
function stepAxis(firsts) {
  const least = firsts.length / 8;
  const size = 10 ** Math.floor(Math.log10(Math.max(1, least)));
  const stride = [1, 2, 5, 10].map((times) => times * size).find((columns) => columns >= least) || 1;
  const axis = element("div", { class: "steps", "aria-hidden": "true" });
  for (let column = 0; column < firsts.length; column += stride) {
    const share = (column + 0.5) / firsts.length;
    axis.append(element("span", { class: share > 0.9 ? "late" : "", style: `left: ${100 * share}%` }, String(firsts[column])));
  }
  return axis;
}

/** Whether columns stand far from where a line over all steps would put them. */
function jumps(firsts) {
  const last = firsts.length - 1, span = firsts[last] - firsts[0];
  return firsts.some((step, column) => Math.abs((step - firsts[0]) / span - column / last) > 0.02);
}

class HeatMap {
  constructor(box, map, cells, { onChoose }) {
    this.map = map;
    this.cells = cells;
    this.columns = map.firsts.length;
    this.onChoose = onChoose;
    this.chosen = new Set();
    this.search = "";
    this.tree = treeOf(map.names);
    openSome(this.tree);
    this.span = spanOf(cells);
    this.most = cells.reduce((most, code) => (code !== nonfinite && code > most ? code : most), 0);
    this.at = null;
    this.build(box);
    this.list();
  }

  build(box) {
    this.labels = element("div", { class: "rows" });
    this.canvas = element("canvas", {});
    this.mark = element("div", { class: "mark", hidden: "" });
    this.field = element("div", { class: "cells", tabindex: "0", role: "img", "aria-label": "map of norms: arrow keys go from cell to cell" }, this.canvas, this.mark);
    this.reading = element("p", { class: "reading", "aria-live": "polite" });
    this.empty = element("p", { class: "note", hidden: "" });
    this.unprinted = element("p", { class: "note printed-only" });
    this.axis = stepAxis(this.map.firsts);
    box.append(this.tools(), this.legend(), this.reading, this.empty, element("div", { class: "map" }, this.labels, this.field), this.axis, this.unprinted);
    if (jumps(this.map.firsts)) box.append(element("p", { class: "hint" }, "A column stands where there are records: the numbers below the map jump over steps that have none."));
    this.field.addEventListener("mousemove", (event) => this.point(event));
    this.field.addEventListener("mouseleave", () => this.read(null));
    this.field.addEventListener("keydown", (event) => this.key(event));
    this.field.addEventListener("click", (event) => { this.point(event); if (this.at) this.choose(this.rows[this.at.row]); });
    new ResizeObserver(() => this.draw()).observe(this.field);
  }

  tools() {
    const all = (open) => {
      eachNode(this.tree, (node) => { node.open = open || node === this.tree; });
      this.list();
    };
    this.searchBox = element("input", { type: "search", placeholder: "show only names with ...", "aria-label": "show only names with" });
    this.searchBox.addEventListener("input", () => this.list());
    const unfold = element("button", { type: "button" }, "unfold all");
    const fold = element("button", { type: "button" }, "fold all");
    unfold.addEventListener("click", () => all(true));
    fold.addEventListener("click", () => all(false));
    return element("div", { class: "tools" }, this.searchBox, unfold, fold);
  }

  legend() {
    const swatch = (name, text) => element("span", {}, element("span", { class: "swatch", style: `background: var(--${name})` }), text);
    return element("p", { class: "legend" }, ...(this.span ? this.scale() : []), swatch("nonfinite", "not finite"), swatch("zero", "exactly 0"), "blank: nothing recorded");
  }

  /** Which colour is which norm. */
  scale() {
    const strip = element("canvas", { class: "ramp", width: "160", height: "1", "aria-hidden": "true" });
    const context = strip.getContext("2d");
    for (let x = 0; x < 160; x++) { context.fillStyle = `rgb(${ramp(x / 159)})`; context.fillRect(x, 0, 1, 1); }
    const [low, high, most] = [...this.span, this.most].map((code) => shown(10 ** (lowest + (code - firstCode) * codeStep), CELL_DIGITS));
    const above = this.most > this.span[1] + FAR / codeStep ? [element("span", {}, element("span", { class: "swatch", style: "background: linear-gradient(90deg, rgb(255, 150, 30), red)" }), `far above, up to ${most}`)] : [];
    return [element("span", {}, low), strip, element("span", {}, high), ...above];
  }

  /** Makes the list of rows that are open, or whose names have what is searched for. */
  list() {
    const asked = this.searchBox.value.trim();
    this.search = asked.toLowerCase();
    this.rows = rowsOf(this.tree, this.search);
    this.empty.hidden = this.rows.length > 0;
    this.axis.hidden = !this.rows.length;
    this.empty.textContent = `no name has ${short(asked)}`;
    const longest = this.rows.reduce((most, row) => Math.max(most, this.text(row).length + row.depth * 1.6), 0);
    this.labels.style.width = `min(40%, ${Math.ceil(longest) + 1}ch)`;
    this.read(null);
    this.draw();
  }

  text({ node }) {
    if (node.row >= 0) return this.search ? node.name : node.label;
    return `${node.open ? "▾" : "▸"} ${node.label} (${node.count})`;
  }

  label(row, index) {
    const { node, depth } = row;
    const button = element("button", { type: "button", title: short(node.name, 1000), style: `top: ${index * ROW}px; padding-left: ${depth * 12}px` }, short(this.text(row), 400));
    if (node.row >= 0) button.setAttribute("aria-pressed", String(this.chosen.has(node)));
    else button.setAttribute("aria-expanded", String(Boolean(node.open)));
    button.addEventListener("click", () => this.choose(row));
    return button;
  }

  /** Folds or unfolds a module; draws a tensor as a curve, or no longer. */
  choose(row) {
    if (!row) return;
    const { node } = row;
    const focused = document.activeElement === row.button;
    if (node.row < 0) {
      node.open = !node.open;
      this.list();
    } else {
      if (!this.chosen.delete(node)) this.chosen.add(node);
      if (row.button) row.button.setAttribute("aria-pressed", String(this.chosen.has(node)));
      this.tellChosen();
    }
    const again = focused && this.rows.find((one) => one.node === node);
    if (again && again.button) again.button.focus({ preventScroll: true });
  }

  tellChosen() {
    this.onChoose([...this.chosen].map((one) => one.row));
  }

  /** The rows to draw: all, if they are few; else those on the screen, and as many again around them. */
  wanted() {
    const count = this.rows.length;
    if (count <= MOST_DRAWN || this.printing) return [0, Math.min(count, MOST_DRAWN)];
    const top = -this.field.getBoundingClientRect().top;
    const within = (row) => Math.max(0, Math.min(count, Math.floor(row)));
    return [within((top - innerHeight / 2) / ROW), within((top + 1.5 * innerHeight) / ROW) + 1].map((row) => Math.min(row, count));
  }

  /** Draws again where the reader has scrolled to what is not drawn. */
  scrolled() {
    const top = -this.field.getBoundingClientRect().top, [from, to] = this.drawn;
    const first = Math.max(0, top / ROW), last = Math.min(this.rows.length, (top + innerHeight) / ROW);
    if (first < last && (first < from || last > to)) this.draw();
  }

  draw() {
    if (!this.field.clientWidth) return;
    this.drawn = this.wanted();
    const height = (this.printing ? this.drawn[1] : this.rows.length) * ROW;
    this.field.style.height = this.labels.style.height = `${height}px`;
    this.axis.style.marginLeft = `${this.labels.offsetWidth}px`;
    const rest = this.rows.length - MOST_DRAWN;
    this.unprinted.textContent = rest > 0 ? `The first ${MOST_DRAWN} rows are printed, and ${rest} more are not.` : "";
    this.drawLabels();
    this.drawCells();
  }

  /** Makes the labels of what is drawn, and keeps the one that has the focus, wherever it is. */
  drawLabels() {
    const [from, to] = this.drawn;
    const kept = this.rows.map((row, index) => [row, index]).filter(([row, index]) => (index >= from && index < to) || (row.button && row.button === document.activeElement));
    const buttons = kept.map(([row, index]) => (row.button ||= this.label(row, index)));
    const wanted = new Set(buttons);
    for (const button of [...this.labels.children]) if (!wanted.has(button)) button.remove();
    // What stays is not moved: moving would take the focus from it.
    let next = this.labels.firstChild;
    for (const button of buttons) {
      if (button === next) next = next.nextSibling;
      else this.labels.insertBefore(button, next);
    }
  }

  drawCells() {
    const [from, to] = this.drawn, count = to - from;
    const ratio = devicePixelRatio || 1;
    const across = Math.max(1, Math.round(this.field.clientWidth * ratio));
    this.canvas.width = across;
    this.canvas.height = Math.max(1, Math.round(count * ROW * ratio));
    this.canvas.style.top = `${from * ROW}px`;
    this.canvas.style.height = `${count * ROW}px`;
    if (!count) return;
    const thin = element("canvas", { width: String(across), height: String(count) });
    const image = new ImageData(across, count);
    const pixels = new Uint32Array(image.data.buffer), paint = paletteOf(this.span, this.most);
    for (let row = 0; row < count; row++) this.paintRow(pixels.subarray(row * across, (row + 1) * across), this.rows[from + row].node, paint);
    thin.getContext("2d").putImageData(image, 0, 0);
    const context = this.canvas.getContext("2d");
    context.imageSmoothingEnabled = false;
    for (let row = 0; row < count; row++) {
      const top = Math.round(row * ROW * ratio), bottom = Math.round(((row + 1) * ROW - 1) * ratio);
      context.drawImage(thin, 0, row, across, 1, 0, top, across, bottom - top);
    }
  }

  paintRow(pixels, node, paint) {
    const cells = cellsOf(node, this.cells, this.columns), across = pixels.length;
    for (let x = 0; x < across; x++) {
      // A pixel that stands for several columns shows the largest of them.
      const start = Math.floor((x * this.columns) / across);
      const end = Math.max(start + 1, Math.floor(((x + 1) * this.columns) / across));
      let code = absent;
      for (let i = start; i < end; i++) if (cells[i] > code) code = cells[i];
      pixels[x] = paint(code);
    }
  }

  cell(row, column) {
    const within = (value, count) => Math.max(0, Math.min(count - 1, value));
    return this.rows.length ? { row: within(row, this.rows.length), column: within(column, this.columns) } : null;
  }

  point(event) {
    const box = this.field.getBoundingClientRect();
    this.read(this.cell(Math.floor((event.clientY - box.top) / ROW), Math.floor(((event.clientX - box.left) / box.width) * this.columns)));
  }

  key(event) {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], PageUp: [-10, 0], PageDown: [10, 0], Home: [0, -this.columns], End: [0, this.columns] };
    const at = this.at || { row: 0, column: 0 };
    if (event.key === "Enter" || event.key === " ") {
      const row = this.rows[at.row];
      this.choose(row);
      if (row) this.read(this.cell(at.row, at.column));
    } else if (moves[event.key]) {
      const [down, right] = moves[event.key];
      this.read(this.cell(at.row + down, at.column + right));
      this.mark.scrollIntoView({ block: "nearest" });
    } else return;
    event.preventDefault();
  }

  /** Marks a cell, and says in words what it holds. */
  read(at) {
    this.at = at;
    this.mark.hidden = !at;
    this.reading.textContent = at ? this.words(at) : "";
    if (!at) return;
    const share = 100 / this.columns;
    Object.assign(this.mark.style, { left: `${at.column * share}%`, width: `max(3px, ${share}%)`, top: `${at.row * ROW}px` });
  }

  words({ row, column }) {
    const { node } = this.rows[row];
    const code = cellsOf(node, this.cells, this.columns)[column];
    const from = this.map.firsts[column], to = this.map.lasts[column];
    const when = from === to ? `step ${from}` : `steps ${from} to ${to}`;
    const value = normOf(code);
    const many = from === to && node.row >= 0 ? "" : "largest ";
    const what = value === null ? "nothing recorded" : Number.isNaN(value) ? "not finite" : `${many}norm ${shown(value, CELL_DIGITS)}`;
    return `${short(node.name)}${node.row < 0 ? ` (${node.count})` : ""}, ${when}: ${what}`;
  }

  /** What the reader has chosen, by names, since a page that is written anew may have other rows. */
  state() {
    const open = [];
    eachNode(this.tree, (node) => { if (node.row < 0 && node.open) open.push(node.name); });
    return { open, chosen: [...this.chosen].map((node) => node.name), search: this.searchBox.value };
  }

  restore({ open, chosen, search }) {
    if (!open) return;
    const opened = new Set(open), picked = new Set(chosen);
    eachNode(this.tree, (node) => {
      if (node.row < 0) node.open = opened.has(node.name);
      else if (picked.has(node.name)) this.chosen.add(node);
    });
    this.searchBox.value = search;
    this.list();
    this.tellChosen();
  }

  /** What is drawn of a row as a curve. */
  line(row) {
    const cells = this.cells.subarray(row * this.columns, (row + 1) * this.columns);
    return { label: this.map.names[row], digits: CELL_DIGITS, steps: this.map.firsts, values: Array.from(cells, (code) => normOf(code)) };
  }
}
