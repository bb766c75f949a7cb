"use strict";
// Sections that few runs have: the gradients of several losses, and tensors that rules have captured.

const MAP_SIZE = 72;
const TOP_CODE = 254;

function lossSections(run, axis) {
  if (!run.versus.length) return;
  const part = section("Losses against each other");
  for (const one of run.versus) {
    part.append(heading("h3", one.table.title), list(one.table.notes), table(one.table));
    for (const [title, lines] of one.charts) {
      const most = Math.max(...lines.map((line) => line.every)), hint = most > 1 ? `The run is long: a point is the mean of up to ${most} steps.` : "";
      if (lines.length) new Chart(part, axis, { title, lines, hint, log: false, marks: run.marks });
    }
  }
}

/** Draws bars by the logarithm of the counts: most elements are often in one of them. */
function histogram({ name, low, high, counts }) {
  const most = Math.log1p(Math.max(...counts)) || 1, bars = counts.map((count, at) => (count ? `M${at} 1V${1 - Math.log1p(count) / most}h1V1z` : "")).join("");
  return figure(low === high ? `all are ${shown(low)}` : `${shown(low)} to ${shown(high)}, counts in log`,
    svg("svg", { viewBox: `0 0 ${counts.length} 1`, preserveAspectRatio: "none", role: "img", "aria-label": `how the elements of ${name} lie` }, svg("path", { d: bars })));
}

/** Draws one canvas per map; all have the colours of one scale. */
function mapGrid(maps, labelOf) {
  const [count, height, width] = maps.shape, scale = MAP_SIZE / Math.max(height, width), codes = bytesOf(maps.codes), size = width * height;
  return element("div", { class: "maps" }, ...Array.from({ length: count }, (_, index) => {
    const label = labelOf(index), style = `width: ${width * scale}px; height: ${height * scale}px`;
    const canvas = element("canvas", { width, height, role: "img", "aria-label": label, title: label, style }), image = new ImageData(width, height);
    codes.subarray(index * size, (index + 1) * size).forEach((code, at) => { if (code <= TOP_CODE) image.data.set([...ramp(code / TOP_CODE), 255], 4 * at); });
    canvas.getContext("2d").putImageData(image, 0, 0);
    return canvas;
  }));
}

function capturedTensor(tensor) {
  const { maps, shape, low, high, mean } = tensor, outer = shape && shape.length === 4 ? "0, " : "";
  const facts = [
    `step ${tensor.step}${tensor.call ? `, call ${tensor.call}` : ""}`, shape ? shape.join(" x ") || "a single number" : "", tensor.dtype.replace(/^torch\./, ""),
    low === undefined ? "" : `${shown(low)} to ${shown(high)}`, mean === undefined ? "" : `mean ${shown(mean)}`];
  const scale = maps && maps.low < maps.high ? `, ${shown(maps.low)} (dark) to ${shown(maps.high)} (bright)` : "";
  return element("div", { class: "capture" }, element("h4", {}, tensor.name),
    element("p", { class: "note" }, facts.filter(Boolean).join(" · "), tensor.nonfinite ? element("span", { class: "problem" }, ` · ${tensor.nonfinite} of ${tensor.elements} not finite`) : null),
    tensor.note ? note(tensor.note) : null,
    element("div", { class: "side" }, tensor.counts.length ? histogram(tensor) : null,
      maps ? figure(`maps [${outer}0:${maps.shape[0]}]${scale}`, mapGrid(maps, (index) => `[${outer}${index}]`)) : null));
}

function captures(run) {
  if (!run.captures.length) return;
  const part = section("Captures", "What capture rules kept last of each tensor when the session ended. The maps of a tensor have one scale; what is not finite stands out, and what is large is averaged.");
  for (const { rule, tensors, more } of run.captures) {
    const count = tensors.length + more, title = element("summary", {}, element("strong", {}, rule), `: ${count} tensor${count === 1 ? "" : "s"}`);
    part.append(element("details", { open: "" }, title, ...tensors.map(capturedTensor), more ? note(`and ${more} more, of which nothing was stored`) : null));
  }
}
