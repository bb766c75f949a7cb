"use strict";
// What rules have kept of tensors: numbers, how the elements lie, feature maps and Grad-CAM.

const MAP_SIZE = 72;
const TOP_CODE = 254;

function figure(caption, ...children) {
  return element("figure", {}, element("figcaption", {}, caption), ...children);
}

/** Bars by the logarithm of the counts: most elements are often in one of them. */
function histogram(tensor) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const most = Math.log1p(Math.max(...tensor.counts)) || 1;
  const bars = tensor.counts.map((count, at) => (count ? `M${at} 1V${1 - Math.log1p(count) / most}h1V1z` : ""));
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", bars.join(""));
  svg.append(path);
  for (const [name, value] of [["viewBox", `0 0 ${tensor.counts.length} 1`], ["preserveAspectRatio", "none"], ["role", "img"], ["aria-label", `how the elements of ${tensor.name} lie`]]) svg.setAttribute(name, value);
  return figure(tensor.low === tensor.high ? `all are ${shown(tensor.low)}` : `${shown(tensor.low)} to ${shown(tensor.high)}, counts in log`, svg);
}

/** One canvas per map; all have the colours of one scale. */
function mapGrid(maps, labelOf) {
  const [count, height, width] = maps.shape;
  const codes = Uint8Array.from(atob(maps.codes), (letter) => letter.charCodeAt(0));
  const scale = MAP_SIZE / Math.max(height, width);
  return element("div", { class: "maps" }, ...Array.from({ length: count }, (_, index) => {
    const label = labelOf(index);
    const canvas = element("canvas", { width, height, role: "img", "aria-label": label, title: label, style: `width: ${width * scale}px; height: ${height * scale}px` });
    const context = canvas.getContext("2d");
    const image = context.createImageData(width, height);
    for (let at = 0; at < width * height; at++) {
      const code = codes[index * width * height + at];
      if (code <= TOP_CODE) image.data.set([...ramp(code / TOP_CODE), 255], 4 * at);
    }
    context.putImageData(image, 0, 0);
    return canvas;
  }));
}

function featureMaps(tensor) {
  // By index, since four dimensions may be those of a batch of images or of the weights of a convolution.
  const outer = tensor.shape.length === 4 ? "0, " : "";
  const { low, high } = tensor.maps;
  const scale = low < high ? `, ${shown(low)} (dark) to ${shown(high)} (bright)` : "";
  return figure(`maps [${outer}0:${tensor.maps.shape[0]}]${scale}`, mapGrid(tensor.maps, (index) => `[${outer}${index}]`));
}

function cam(tensor) {
  const { shape, high, step } = tensor.cam;
  return element("div", { class: "cam" }, figure(`Grad-CAM [0:${shape[0]}]${step === tensor.step ? "" : ` of step ${step}`}${high > 0 ? "" : ", 0 everywhere"}`, mapGrid(tensor.cam, (index) => `sample ${index}`)));
}

function capturedTensor(tensor) {
  const range = tensor.low === undefined ? [] : [`${shown(tensor.low)} to ${shown(tensor.high)}`, ...(tensor.mean === undefined ? [] : [`mean ${shown(tensor.mean)}`])];
  const bad = tensor.nonfinite ? [`${tensor.nonfinite} of ${tensor.elements} not finite`] : [];
  const shape = tensor.shape ? [tensor.shape.length ? tensor.shape.join(" x ") : "a single number"] : [];
  const facts = [`step ${tensor.step}${tensor.call ? `, call ${tensor.call}` : ""}`, ...shape, tensor.dtype.replace(/^torch\./, ""), ...range];
  return element("div", { class: "capture" },
    element("h4", {}, tensor.name),
    element("p", { class: "hint" }, facts.join(" · "), ...bad.map((text) => element("span", { class: "problem" }, ` · ${text}`))),
    ...(tensor.note ? [element("p", { class: "note" }, tensor.note)] : []),
    element("div", {}, ...(tensor.counts.length ? [histogram(tensor)] : []), ...(tensor.maps ? [featureMaps(tensor)] : []), ...(tensor.cam ? [cam(tensor)] : [])));
}

function captures(run) {
  if (!run.captures.length) return;
  const part = section("Captures");
  part.append(element("p", { class: "hint" }, "What capture rules kept last of each tensor when the session ended. The maps of a tensor have one scale, each Grad-CAM its own from 0 to its largest; what is not finite stands out, and what is large is averaged."));
  for (const { rule, tensors, more } of run.captures) {
    const rest = more ? [element("p", { class: "note" }, `and ${more} more, of which nothing was stored`)] : [];
    const title = element("summary", {}, element("strong", {}, rule), `: ${tensors.length + more} tensor${tensors.length + more === 1 ? "" : "s"}`);
    part.append(element("details", { open: "" }, title, ...tensors.map(capturedTensor), ...rest));
  }
}
