"use strict";
// The map of norms: a row per tensor or per module, a column per few steps, drawn on a canvas.

const ROW = 18;
const SHOWN_AT_FIRST = 72;
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

/** The modules that the names spell, as a tree whose leaves are rows of the map. */
function treeOf(names) {
  const root = { name: "", label: "all", children: new Map(), row: -1 };
  names.forEach((name, row) => {
    let node = root;
    const parts = name.split(".");
    parts.forEach((part, depth) => {
      // A name may be a tensor and hold others at once; apart, they stay two rows.
      const key = depth === parts.length - 1 ? "=" + part : part;
      if (!node.children.has(key)) node.children.set(key, { name: parts.slice(0, depth + 1).join("."), label: part, children: new Map(), row: -1 });
      node = node.children.get(key);
    });
    node.row = row;
  });
  const build = (node) => {
    node.list = [...node.children.values()];
    while (node.list.length === 1 && node.list[0].row < 0 && node !== root) {
      node.label = node.label + "." + node.list[0].label;
      node.list = [...node.list[0].children.values()];
    }
    node.list.forEach(build);
    node.count = node.row >= 0 ? 1 : node.list.reduce((sum, child) => sum + child.count, 0);
  };
  build(root);
  return root;
}

/** Opens modules, outer ones first, as long as the rows fit on a screen. */
function openSome(root) {
  let rows = root.list.length;
  let level = root.list;
  // One row says nothing.
  if (rows === 1 && level[0].row < 0) {
    level[0].open = true;
    rows += level[0].list.length;
    level = level[0].list;
  }
  root.open = true;
  while (level.length) {
    const next = level.filter((node) => node.row < 0);
    const more = next.reduce((sum, node) => sum + node.list.length, 0);
    // A level as a whole or not at all: a few open modules among many would look as if they were special.
    if (rows + more > SHOWN_AT_FIRST) return;
    for (const node of next) node.open = true;
    rows += more;
    level = next.flatMap((node) => node.list);
  }
}

/** The largest cell of all tensors of a module in each column: the codes have the order of the norms. */
function cellsOf(node, cells, columns) {
  if (node.row >= 0) return cells.subarray(node.row * columns, (node.row + 1) * columns);
  if (!node.cells) {
    node.cells = new Uint16Array(columns);
    for (const child of node.list) {
      const theirs = cellsOf(child, cells, columns);
      for (let i = 0; i < columns; i++) if (theirs[i] > node.cells[i]) node.cells[i] = theirs[i];
    }
  }
  return node.cells;
}

/** The span of the colours: outliers of a few cells must not make all else one colour. */
function spanOf(cells) {
  const counts = new Uint32Array(65536);
  let total = 0;
  for (const code of cells) if (code >= firstCode && code !== nonfinite) { counts[code]++; total++; }
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

class HeatMap {
  constructor(box, map, cells, { onChoose }) {
    this.map = map;
    this.cells = cells;
    this.columns = map.firsts.length;
    this.onChoose = onChoose;
    this.chosen = new Set();
    this.tree = treeOf(map.names);
    openSome(this.tree);
    this.span = spanOf(cells);
    this.most = cells.reduce((most, code) => (code !== nonfinite && code > most ? code : most), 0);
    this.labels = element("div", { class: "rows" });
    this.canvas = element("canvas", { tabindex: "0", role: "img", "aria-label": "map of norms: arrow keys go from cell to cell" });
    this.reading = element("p", { class: "reading", "aria-live": "polite" });
    this.at = null;
    box.append(this.tools(), this.legend(), this.reading, element("div", { class: "map" }, this.labels, this.canvas));
    this.canvas.addEventListener("mousemove", (event) => this.point(event));
    this.canvas.addEventListener("mouseleave", () => this.read(null));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("click", (event) => { this.point(event); this.choose(this.rows[this.at.row]); });
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.canvas);
    this.list();
  }

  tools() {
    const all = (open) => {
      const set = (node) => { if (node.row < 0) { node.open = open || node === this.tree; node.list.forEach(set); } };
      set(this.tree);
      this.list();
    };
    const search = element("input", { type: "search", placeholder: "show only names with ...", "aria-label": "show only names with" });
    search.addEventListener("input", () => { this.search = search.value.trim().toLowerCase(); this.list(); });
    const unfold = element("button", { type: "button" }, "unfold all");
    const fold = element("button", { type: "button" }, "fold all");
    unfold.addEventListener("click", () => all(true));
    fold.addEventListener("click", () => all(false));
    return element("div", { class: "tools" }, search, unfold, fold);
  }

  legend() {
    const strip = element("canvas", { class: "ramp", width: "160", height: "1", "aria-hidden": "true" });
    const context = strip.getContext("2d");
    for (let x = 0; x < 160; x++) { context.fillStyle = `rgb(${ramp(x / 159)})`; context.fillRect(x, 0, 1, 1); }
    const swatch = (name, text) => element("span", {}, element("span", { class: "swatch", style: `background: var(--${name})` }), text);
    const [low, high, most] = [...this.span, this.most].map((code) => shown(10 ** (lowest + (code - firstCode) * codeStep), CELL_DIGITS));
    const above = this.most > this.span[1] + FAR / codeStep ? [element("span", {}, element("span", { class: "swatch", style: "background: linear-gradient(90deg, rgb(255, 150, 30), red)" }), `far above, up to ${most}`)] : [];
    return element("p", { class: "legend" }, element("span", {}, low), strip, element("span", {}, high), ...above, swatch("nonfinite", "not finite"), swatch("zero", "exactly 0"), "blank: no gradient");
  }

  /** Makes the list of rows that are open, or whose names have what is searched for. */
  list() {
    this.rows = [];
    const add = (node, depth) => {
      if (node !== this.tree) this.rows.push({ node, depth });
      if (node.open) node.list.forEach((child) => add(child, depth + (node === this.tree ? 0 : 1)));
    };
    const matching = (node) => {
      if (node.row >= 0 && node.name.toLowerCase().includes(this.search)) this.rows.push({ node, depth: 0 });
      (node.list || []).forEach(matching);
    };
    if (this.search) matching(this.tree);
    else add(this.tree, 0);
    this.labels.replaceChildren(...this.rows.map((row) => this.label(row)));
    this.draw();
  }

  label(row) {
    const { node, depth } = row;
    const leaf = node.row >= 0;
    const text = leaf ? (this.search ? node.name : node.label) : `${node.open ? "▾" : "▸"} ${node.label} (${node.count})`;
    const button = element("button", { type: "button", title: node.name, style: `padding-left: ${depth * 12}px` }, text);
    if (leaf) button.setAttribute("aria-pressed", String(this.chosen.has(node)));
    else button.setAttribute("aria-expanded", String(Boolean(node.open)));
    button.addEventListener("click", () => this.choose(row));
    return element("div", {}, button);
  }

  /** Folds or unfolds a module; draws a tensor as a curve, or no longer. */
  choose(row) {
    if (!row) return;
    const { node } = row;
    const place = this.rows.indexOf(row);
    if (node.row < 0) {
      node.open = !node.open;
      this.list();
    } else {
      if (!this.chosen.delete(node)) this.chosen.add(node);
      this.labels.children[place].replaceWith(this.label(row));
      this.onChoose([...this.chosen].map((one) => one.row));
    }
    const button = this.labels.children[place] && this.labels.children[place].firstChild;
    if (button && document.activeElement !== this.canvas) button.focus();
  }

  draw() {
    const width = this.canvas.clientWidth, height = this.rows.length * ROW;
    const ratio = devicePixelRatio || 1;
    if (!width) return;
    this.canvas.style.height = `${height}px`;
    const across = Math.max(1, Math.round(width * ratio));
    this.canvas.width = across;
    this.canvas.height = Math.max(1, Math.round(height * ratio));
    const context = this.canvas.getContext("2d");
    const line = context.createImageData(across, 1);
    const bad = rgb("nonfinite"), none = rgb("zero");
    this.rows.forEach(({ node }, index) => {
      const cells = cellsOf(node, this.cells, this.columns);
      for (let x = 0; x < across; x++) {
        // A pixel that stands for several columns shows the largest of them.
        const start = Math.floor((x * this.columns) / across);
        const end = Math.max(start + 1, Math.floor(((x + 1) * this.columns) / across));
        let code = absent;
        for (let i = start; i < end; i++) if (cells[i] > code) code = cells[i];
        const paint = code === nonfinite ? bad : code === zero ? none : paintOf(code, this.span, this.most);
        line.data.set([...paint, code === absent ? 0 : 255], x * 4);
      }
      const top = Math.round(index * ROW * ratio), bottom = Math.round(((index + 1) * ROW - 1) * ratio);
      for (let y = top; y < bottom; y++) context.putImageData(line, 0, y);
    });
    this.mark(context, ratio);
  }

  mark(context, ratio) {
    if (!this.at) return;
    const width = this.canvas.width / this.columns;
    context.strokeStyle = colour("text");
    context.lineWidth = 2 * ratio;
    context.strokeRect(this.at.column * width - ratio, this.at.row * ROW * ratio, Math.max(width, 3) + 2 * ratio, (ROW - 1) * ratio);
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top) / ROW);
    const column = Math.floor(((event.clientX - box.left) / box.width) * this.columns);
    this.read({ row: Math.max(0, Math.min(this.rows.length - 1, row)), column: Math.max(0, Math.min(this.columns - 1, column)) });
  }

  key(event) {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], PageUp: [-10, 0], PageDown: [10, 0], Home: [0, -this.columns], End: [0, this.columns] };
    const at = this.at || { row: 0, column: 0 };
    if (event.key === "Enter" || event.key === " ") this.choose(this.rows[at.row]);
    else if (moves[event.key]) {
      const [down, right] = moves[event.key];
      this.read({ row: Math.max(0, Math.min(this.rows.length - 1, at.row + down)), column: Math.max(0, Math.min(this.columns - 1, at.column + right)) });
    } else return;
    event.preventDefault();
  }

  /** Says in words what a cell holds. */
  read(at) {
    this.at = at;
    this.draw();
    if (!at || !this.rows[at.row]) {
      this.reading.textContent = "";
      return;
    }
    const { node } = this.rows[at.row];
    const code = cellsOf(node, this.cells, this.columns)[at.column];
    const from = this.map.firsts[at.column], to = this.map.lasts[at.column];
    const when = from === to ? `step ${from}` : `steps ${from} to ${to}`;
    const value = normOf(code);
    const many = from === to && node.row >= 0 ? "" : "largest ";
    const what = value === null ? "no gradient" : Number.isNaN(value) ? "not finite" : `${many}norm ${shown(value, CELL_DIGITS)}`;
    this.reading.textContent = `${node.name}${node.row < 0 ? ` (${node.count})` : ""}, ${when}: ${what}`;
  }

  /** What is drawn of a row as a curve. */
  line(row) {
    const cells = this.cells.subarray(row * this.columns, (row + 1) * this.columns);
    return { label: this.map.names[row], digits: CELL_DIGITS, steps: this.map.firsts, values: Array.from(cells, (code) => normOf(code)) };
  }
}

/** Draws how the norms of all tensors are spread at each time: dark where many are. */
function drawDensity(canvas, cells, columns, rows, span) {
  const bins = Math.max(16, Math.min(64, 2 * rows)), width = canvas.clientWidth, ratio = devicePixelRatio || 1;
  const [low, high] = span;
  const across = Math.max(1, Math.round(width * ratio));
  const counts = new Float64Array(across * bins);
  const present = new Float64Array(across);
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      const code = cells[row * columns + column];
      if (code < firstCode || code === nonfinite) continue;
      const bin = Math.max(0, Math.min(bins - 1, Math.floor(((code - low) / (high - low)) * bins)));
      const start = Math.floor((column * across) / columns);
      const end = Math.max(start + 1, Math.floor(((column + 1) * across) / columns));
      for (let x = start; x < end; x++) { counts[x * bins + bin]++; present[x]++; }
    }
  }
  canvas.width = across;
  canvas.height = bins;
  const context = canvas.getContext("2d");
  const image = context.createImageData(across, bins);
  const paint = rgb("curve-0");
  for (let x = 0; x < across; x++) {
    for (let bin = 0; bin < bins; bin++) {
      const share = present[x] ? counts[x * bins + bin] / present[x] : 0;
      image.data.set([...paint, Math.round(255 * Math.min(1, Math.sqrt(share * 4)))], ((bins - 1 - bin) * across + x) * 4);
    }
  }
  context.putImageData(image, 0, 0);
}
