"use strict";
// Text, numbers, colours and the floating tip. Data reaches the page as text nodes only.

const $ = (id) => document.getElementById(id);

function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (key === "class") node.className = value;
    else if (key === "click") node.addEventListener("click", value);
    else if (key.includes("-")) node.setAttribute(key, value);
    else node[key] = value;
  }
  node.append(...children);
  return node;
}

// Characters that are not seen, or that change the order of others, as symbols: U+202E is ⟨U+202E⟩.
const UNSEEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0]/gu;
const MARKS = { "\n": "\u21b5", "\t": "\u21e5" };
const visible = (text) => String(text).replace(UNSEEN, (c) => MARKS[c] ?? `\u27e8U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}\u27e9`);
const said = (text, kind = "") => el("span", { class: `said ${kind}` }, visible(text));

const finite = (x) => typeof x === "number" && Number.isFinite(x);
const num = (x, digits = 6) => (finite(x) ? String(Number(x.toPrecision(digits))).replace("-", "\u2212") : "\u2013");

const BYTES = ["B", "KiB", "MiB", "GiB", "TiB"];
function bytes(x) {
  if (!finite(x)) return "\u2013";
  const power = Math.min(4, Math.max(0, Math.floor(Math.log2(Math.max(1, Math.abs(x))) / 10)));
  return `${num(x / 1024 ** power, 4)} ${BYTES[power]}`;
}
function seconds(x) {
  if (!finite(x)) return "\u2013";
  if (x < 100) return `${num(x, 3)} s`;
  const whole = Math.round(x);
  const [h, m, s] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  return h ? `${h} h ${m} min` : `${m} min${s ? ` ${s} s` : ""}`;
}
const percent = (x) => (finite(x) ? `${num(100 * x, 3)} %` : "\u2013");
function short(x) {
  const size = Math.abs(x);
  if (size >= 1e9) return `${num(x / 1e9, 4)}G`;
  if (size >= 1e6) return `${num(x / 1e6, 4)}M`;
  if (size >= 1e4) return `${num(x / 1e3, 4)}k`;
  return size && size < 1e-3 ? x.toExponential(0).replace("-", "\u2212") : num(x, 4);
}

// Theme: the system's, or the one chosen here. Colours of the stylesheet, resolved for canvases.
const THEMES = ["auto", "light", "dark"];
const system = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
let resolved = new Map();
function colour(name) {
  if (!resolved.has(name)) {
    $("probe").style.color = `var(--${name})`;
    resolved.set(name, getComputedStyle($("probe")).color);
  }
  return resolved.get(name);
}
const rgb = (name) => colour(name).match(/[\d.]+/g).slice(0, 3).map(Number);
function followTheme(changed) {
  const redo = () => { resolved = new Map(); changed(); };
  system.addEventListener("change", redo);
  $("theme").addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % 3];
    if (next === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    $("theme").textContent = `Theme: ${next}`;
    redo();
  });
}

// One floating tip for curves, tokens and the map. rows: [[label node or text, value], ...]
function tip(x, y, heading, rows, more = "") {
  const box = $("tip");
  box.replaceChildren(el("b", {}, heading), el("dl", {}, ...rows.flatMap(([label, value]) => [el("dt", {}, label), el("dd", {}, value)])));
  if (more) box.append(el("p", {}, more));
  box.hidden = false;
  const [width, height] = [box.offsetWidth, box.offsetHeight];
  const right = x + 16 + width <= document.documentElement.clientWidth;
  const below = y + 16 + height <= innerHeight;
  box.style.left = `${Math.max(4, right ? x + 16 : Math.min(x - width - 16, document.documentElement.clientWidth - width - 4))}px`;
  box.style.top = `${Math.max(4, below ? y + 16 : y - height - 16)}px`;
}
const noTip = () => { $("tip").hidden = true; };

// A canvas sharp on its screen. -> [context, width, height] in CSS pixels
function sharp(canvas, height) {
  const width = Math.max(40, canvas.clientWidth);
  const scale = Math.min(3, devicePixelRatio || 1);
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return [context, width, height];
}
