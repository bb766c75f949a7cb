"use strict";
// What every part of the page uses: the data, texts, numbers, colours and elements.

// These characters draw nothing, or turn the direction of the text after them; lines and tabs stay.
const HIDDEN = /(?![\n\t\r])[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g;
const escaped = (letter) => (letter < "\xff" ? "\\x" : "\\u") + letter.charCodeAt(0).toString(16).padStart(2, "0");
const data = JSON.parse(document.getElementById("data").textContent, (_, value) => (typeof value === "string" ? value.replace(HIDDEN, escaped) : value));
// Dark to bright, alike for most kinds of colour blindness (eight samples of viridis).
const RAMP = ["440154", "46327e", "365c8d", "277f8e", "1fa187", "4ac16d", "a0da39", "fde725"].map((hex) => hex.match(/../g).map((part) => parseInt(part, 16)));
// So many letters that names have in common are said once, and so many successive steps are one band.
const LONG_PREFIX = 10, LONG = 8;
const NUMBER = /^([-<>]?[\d.,]+(e[-+]\d+)?%?|-|-?inf|nan)?$/i;

/** Returns a text without its middle if it is long: the end of a name tells it from its neighbours. */
function short(text, most = 120) {
  return text.length <= most ? text : `${text.slice(0, Math.floor(most / 2))}…${text.slice(1 - Math.ceil(most / 2))}`;
}

/** Makes an element; children that are texts become text and never markup. */
function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.filter((child) => child !== null));
  return made;
}

function button(text, act, attributes = {}) {
  const made = element("button", { type: "button", ...attributes }, text);
  made.addEventListener("click", act);
  return made;
}

function note(text) {
  return element("p", { class: "note" }, text);
}

function swatch(paint) {
  return element("span", { class: "swatch", style: `background: ${paint}` });
}

function list(texts) {
  return element("ul", { class: "remarks" }, ...texts.map((text) => element("li", {}, short(text, 1000))));
}

/** Folds something below a line that opens it. */
function fold(title, ...children) {
  return element("details", {}, element("summary", {}, title), ...children);
}

/** A heading, with a "?" beside it that shows a hint when it is opened. */
function heading(tag, text, hint = "") {
  const help = element("details", { class: "help" }, element("summary", { "aria-label": "what this shows" }, "?"), note(hint));
  return element("div", { class: "heading" }, element(tag, {}, text), hint ? help : null);
}

/** A name that breaks at its dots before it breaks anywhere else. */
function nameOf(text, most = 200) {
  const parts = short(text, most).split(/(?<=\.)/);
  return element("span", { class: "name", title: short(text, 1000) }, ...parts.flatMap((part) => [part, element("wbr", {})]));
}

/** Returns the modules that all names lie in, with a dot at the end; none if they are short, or if there is one name. */
function prefixOf(names) {
  const [first, ...others] = names.map((name) => name.split(".").slice(0, -1));
  const differs = first.findIndex((part, at) => others.some((parts) => parts[at] !== part)), common = differs < 0 ? first : first.slice(0, differs);
  const prefix = common.map((part) => `${part}.`).join("");
  return others.length && prefix.length >= LONG_PREFIX ? prefix : "";
}

/** Returns the first and the last index of successive places at which something holds, of so many at least. */
function spansOf(count, holds, least) {
  const spans = [];
  for (let at = 0; at < count; at++) {
    if (!holds(at)) continue;
    if (spans.at(-1)?.[1] === at - 1) spans.at(-1)[1] = at;
    else spans.push([at, at]);
  }
  return spans.filter(([from, to]) => to - from + 1 >= least);
}

function nonfiniteFrom(first, last) {
  return `non-finite from ${first.toLocaleString("en")} to ${last.toLocaleString("en")}`;
}

/** Makes a table; names stand in the first column, and columns of numbers at the right. The page draws histories as curves. */
function table({ head: titles, rows: lines }) {
  const isShown = (_, at) => titles[at] !== "history", head = titles.filter(isShown), rows = lines.map((cells) => cells.filter(isShown));
  const numeric = head.map((_, at) => rows.every((cells) => NUMBER.test(cells[at])));
  const content = (cell, at) => (typeof cell !== "string" ? cell : at ? short(cell, 300) : nameOf(cell));
  const kind = (cell, at) => [numeric[at] ? "number" : "", /^-?(nan|inf)$/i.test(cell) ? "problem" : ""].join(" ");
  const row = (tag, cells) => element("tr", {}, ...cells.map((cell, at) => element(tag, { class: kind(cell, at) }, content(cell, at))));
  return element("div", { class: "scroll" }, element("table", {}, element("thead", {}, row("th", head)), element("tbody", {}, ...rows.map((cells) => row("td", cells)))));
}

const probe = element("i", { hidden: "" });

/** Returns a colour of the theme as red, green and blue. */
function rgb(name) {
  document.body.append(probe);
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color.match(/\d+/g).slice(0, 3).map(Number);
}

function colour(name, opacity = 1) {
  return opacity === 1 ? `rgb(${rgb(name)})` : `rgba(${rgb(name)},${opacity})`;
}

/** Returns the colour of the map at a share from 0 to 1. */
function ramp(share) {
  const at = Math.max(0, Math.min(1, share)) * (RAMP.length - 1), low = Math.min(RAMP.length - 2, Math.floor(at));
  return RAMP[low].map((value, i) => Math.round(value + (RAMP[low + 1][i] - value) * (at - low)));
}

function bytesOf(base64) {
  return Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
}

/** Non-finite numbers travel as their names. */
function number(value) {
  return typeof value === "string" ? Number(value) : value;
}

/** Writes a number with so many digits: a cell of the map has two that are right. */
function shown(value, digits = 3) {
  const v = number(value);
  if (v === null || v === undefined) return "";
  if (!Number.isFinite(v)) return String(v).replace("inity", "");
  const size = Math.abs(v);
  const rounded = Number(v.toPrecision(digits));
  return v !== 0 && (size >= 1e5 || size < 1e-3) ? rounded.toExponential() : String(rounded);
}
