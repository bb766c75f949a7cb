"use strict";
// What the whole page shares: its data, colours, numbers, texts, elements.

// What draws as nothing, or turns the direction of the text after it.
const HIDDEN = /[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g;
const HIDDEN_IN_LINES = /(?!\n|\t|\r\n)[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g;

function escaped(letter) {
  const code = letter.charCodeAt(0);
  return code < 256 ? "\\x" + code.toString(16).padStart(2, "0") : "\\u" + code.toString(16);
}

/** Shows control characters of a name as escapes; messages and rule files may have several lines. */
function visible(key, text) {
  return typeof text === "string" ? text.replace(key === "message" || key === "text" ? HIDDEN_IN_LINES : HIDDEN, escaped) : text;
}

const data = JSON.parse(document.getElementById("data").textContent, visible);

/** Leaves out the middle of a long name: its end tells it from its neighbours. */
function short(text, most = 120) {
  return text.length <= most ? text : `${text.slice(0, Math.floor(most / 2))}…${text.slice(1 - Math.ceil(most / 2))}`;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

function curveColour(index) {
  return colour("curve-" + (index % 10));
}

/** Makes an element; children that are texts become text and never markup. */
function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "class") made.className = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** What is not finite travels by its name. */
function number(value) {
  return typeof value === "string" ? Number(value) : value;
}

/** Writes a number with so many digits: a cell of the map knows two for sure. */
function shown(value, digits = 3) {
  const v = number(value);
  if (v === null || v === undefined) return "";
  if (!Number.isFinite(v)) return Number.isNaN(v) ? "NaN" : v > 0 ? "Inf" : "-Inf";
  if (v === 0) return "0";
  const size = Math.abs(v);
  return size >= 1e5 || size < 1e-3 ? v.toExponential(digits - 1) : String(Number(v.toPrecision(digits)));
}
