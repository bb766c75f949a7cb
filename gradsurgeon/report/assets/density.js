"use strict";
// How the norms of all tensors are spread over time.

/** Counts finite norms by pixel across and by bin of their logarithm. */
function densityOf(cells, columns, rows, [low, high], across, bins) {
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
  return [counts, present];
}

/** Draws how the norms are spread at each time: dark where many are. */
function drawDensity(canvas, cells, columns, rows, span) {
  const bins = Math.max(16, Math.min(64, 2 * rows)), ratio = devicePixelRatio || 1;
  const across = Math.max(1, Math.round(canvas.clientWidth * ratio));
  const [counts, present] = densityOf(cells, columns, rows, span, across, bins);
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

/** The picture of it below a heading, with its axes, which stand as those of the charts do. */
function density(part, map, cells, span, noun) {
  const canvas = element("canvas", { role: "img", "aria-label": "how the norms are spread over time" });
  const [low, high] = span.map((code) => shown(normOf(Math.round(code)), CELL_DIGITS));
  part.append(element("h3", {}, `How the norms of all ${map.names.length} ${noun}s are spread`),
    element("p", { class: "hint" }, "By their logarithm; darker where more are."),
    element("div", { class: "density" }, element("span", { class: "high" }, high), element("span", { class: "low" }, low), canvas, stepAxis(map.firsts)));
  const paint = () => drawDensity(canvas, cells, map.firsts.length, map.names.length, span);
  paint();
  return paint;
}
