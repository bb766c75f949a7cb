"use strict";
// Parts that few runs have: the diagnosis of a trap, the gradients of several losses, and histograms.

const INDICES = 8, OPERATIONS = 5;

/** Writes indices after their noun, the first of many. */
function numbered(noun, indices) {
  const count = indices.length;
  const more = count > INDICES ? ` and ${(count - INDICES).toLocaleString("en")} more` : "";
  return `${noun}${count === 1 ? "" : "s"} ${indices.slice(0, INDICES).join(", ")}${more}`;
}

function rowsOf({ rows, size, columns, input_rows: origin, ids }) {
  const parts = [`all in ${numbered("row", rows)} of ${size}`];
  if (columns.length) parts.push(numbered("column", columns));
  if (origin.length) parts.push(`from ${numbered("row", origin)} of the input`);
  if (ids.length) parts.push(numbered("sample_id", ids));
  return parts.join(", ");
}

function tensorOf({ name, shape, dtype, low, high, nan, inf, minus_inf: minus, numel }) {
  const counts = [[nan, "NaN"], [inf - minus, "Inf"], [minus, "-Inf"]].filter(([count]) => count);
  const texts = counts.map(([count, word]) => `${count.toLocaleString("en")} of ${numel.toLocaleString("en")} ${word}`);
  if (low !== null) texts.push(`${counts.length ? "else " : ""}${shown(low, 4)}${low === high ? "" : ` to ${shown(high, 4)}`}`);
  // So the operation calls its first input, which in Python is no word of the user's.
  return `${name === "self" ? "input" : name} [${shape.join(", ")}] ${dtype}: ${texts.join(", ") || "empty"}`;
}

/** Writes the largest magnitudes up to the fault: the last of many operations, and each module once. */
function magnitudesOf(history) {
  const last = history.slice(-OPERATIONS), cutOf = (label) => label.lastIndexOf(": ") + 1, moduleOf = (label) => label.slice(0, cutOf(label));
  const texts = last.map(([label, value], at) => {
    const isSame = at > 0 && moduleOf(last[at - 1][0]) === moduleOf(label);
    return `${isSame ? label.slice(cutOf(label)).trim() : label} ${shown(value)}`;
  });
  return (history.length > OPERATIONS ? "… → " : "") + texts.join(" → ");
}

/** Lays out a diagnosis by its keys: where, which rows, what to try, why, and the numbers that say so. */
function diagnosisOf(found, message) {
  // The message names the model of the script, and says why a remedy could not be tried.
  const [, again] = message.match(/to run the step again: (.*)/) || [null, found.bundle && `gradsurgeon replay ${found.bundle} --model MODULE:BUILD`];
  const [, tried] = message.match(/^ *tried in the replay: (.*)/m) || [];
  // Runs of earlier states have fewer keys.
  const { evidence = [], reasons = [], inputs = [], outputs = [], history = [] } = found;
  const rows = [
    ["at", found.file && element("span", {}, `${found.file}:${found.line} `, element("code", {}, short(found.code || "", 200)))],
    ["rows", found.rows && rowsOf(found.rows)],
    ["to try", found.remedy && element("strong", {}, found.remedy)],
    ["tried in the replay", tried],
    ["cause", found.cause && [found.cause, ...evidence].join("; ")],
    ["certainty", [found.certainty, ...reasons].join("; because ")],
    ...inputs.map((tensor) => ["in", tensorOf(tensor)]),
    ...outputs.map((tensor) => [found.op ? "out" : "is", tensorOf(tensor)]),
    ["largest before", magnitudesOf(history)],
    ["before", found.before],
    ["again", again],
  ].filter(([, content]) => content);
  return element("dl", { class: "diagnosis" }, ...rows.flatMap(([word, content]) => [element("dt", {}, word), element("dd", {}, typeof content === "string" ? short(content, 600) : content)]));
}

function lossSections(run, axis) {
  if (!run.versus.length) return;
  const part = section("Losses against each other");
  for (const one of run.versus) {
    part.append(heading("h3", one.table.title), list(one.table.notes), table(one.table));
    new Chart(part, axis, { title: one.title, lines: one.lines, log: false, marks: run.marks });
  }
}

/** Draws how large the elements of each tensor were, as bands between quantiles; the first is open. */
function magnitudes(run, axis) {
  if (!run.magnitudes.length) return;
  const part = section("Magnitudes", "Of the elements other than 0: the dark band holds half of them, the light band 90 %, and the line is the median. What is below 3.6e-15 counts as that. Of many tensors the first 60 are here; run.histograms(NAME) has the counts of all.");
  const fills = [{ series: [1, 5], fill: () => colour("curve-0", 0.16) }, { series: [2, 4], fill: () => colour("curve-0", 0.3) }];
  const rules = new Set(run.magnitudes.map(({ rule }) => rule));
  run.magnitudes.forEach(({ name, rule, lines }, index) => {
    const of = rules.size > 1 ? `, rule ${short(rule)}` : "";
    const box = element("div", {}), entry = fold(element("span", {}, nameOf(name), of), box);
    const curves = [...lines].reverse().map((line, at) => ({ ...line, colour: "curve-0", width: at === 2 ? 1.7 : 0.3 }));
    let drawn = null;
    entry.addEventListener("toggle", () => {
      if (drawn) drawn.update();
      else drawn = new Chart(box, axis, { title: "magnitudes", lines: curves, fills, marks: run.marks, height: 150 });
    });
    part.append(entry);
    entry.open = index === 0;
  });
}
