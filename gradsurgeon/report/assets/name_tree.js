"use strict";
// The modules that the names of tensors spell, as a tree.

const SHOWN_AT_FIRST = 72;

/** The modules that the names spell, as a tree whose leaves are rows of the map. */
function treeOf(names) {
  const root = { name: "", label: "all", children: new Map(), row: -1 };
  names.forEach((name, row) => {
    let node = root;
    const parts = name.split(".");
    parts.forEach((part, depth) => {
      // A name may be a tensor and hold others at once; apart, they stay two rows, whatever they are called.
      const key = depth === parts.length - 1 ? row : part;
      if (!node.children.has(key)) node.children.set(key, { name: parts.slice(0, depth + 1).join("."), label: part, children: new Map(), row: -1 });
      node = node.children.get(key);
    });
    node.row = row;
  });
  const build = (node) => {
    node.list = [...node.children.values()];
    while (node.list.length === 1 && node.list[0].row < 0 && node !== root) {
      node.label = node.label + "." + node.list[0].label;
      node.name = node.list[0].name;
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

/** The rows that are open, or, of a search, the tensors whose names have what is searched for. */
function rowsOf(root, search) {
  const rows = [];
  const visit = (node, depth) => {
    const matches = node.row >= 0 && node.name.toLowerCase().includes(search);
    if (search ? matches : node !== root) rows.push({ node, depth: search ? 0 : depth });
    if (search || node.open) node.list.forEach((child) => visit(child, node === root ? 0 : depth + 1));
  };
  visit(root, 0);
  return rows;
}

/** Calls a function for each module, and each tensor in it. */
function eachNode(node, act) {
  act(node);
  for (const child of node.list) eachNode(child, act);
}
