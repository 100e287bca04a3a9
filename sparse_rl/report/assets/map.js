// The eviction map: tokens from left to right, heads from top to bottom. Token k is seen by query q iff k <= q < gone[row * T + k].

const NEVER = 65535;
const PLACE = { left: 40, right: 8, marks: 10, strip: 12, space: 4, bottom: 20 };
const atlas = { t: null, gone: null, tokens: 0, layers: 0, heads: 0, rows: [], seen: null, cells: null, cellsFor: "", at: null, turn: 0 };

async function inflate(data, wanted) { // -> a buffer of so many bytes
  const packed = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  const raw = await new Response(stream).arrayBuffer();
  if (raw.byteLength !== wanted) throw new Error(`it has ${raw.byteLength} bytes instead of ${wanted}`);
  return raw;
}

async function openMap(t) {
  const turn = ++atlas.turn;
  Object.assign(atlas, { t: null, gone: null, cells: null, cellsFor: "", at: null });
  $("m-body").hidden = true;
  $("m-note").textContent = !t ? "" : t.map ? "Reading the map\u2026" : "There is no map of this completion; if it had a trace, the run\u2019s notes say why.";
  greyText();
  if (!t?.map) return;
  let [gone, regret] = [null, null];
  try {
    gone = new Uint16Array(await inflate(t.map.data, 2 * t.map.layers * t.map.heads * t.map.tokens));
    regret = await readRegret(t.map);
  } catch (error) {
    if (turn === atlas.turn) $("m-note").textContent = `The map of this trajectory cannot be read: ${visible(error.message)}.`;
    return;
  }
  if (turn !== atlas.turn) return;
  const { layers, heads, tokens } = t.map;
  Object.assign(atlas, { t, gone, layers, heads, tokens });
  Object.assign(missed, regret ?? NOTHING_MISSED);
  const wish = state.map;
  if (wish.layer >= layers) wish.layer = -1;
  if (wish.head >= heads) wish.head = -1;
  fill($("m-layer"), [[-1, `all ${layers}`], ...Array.from({ length: layers }, (_, i) => [i, String(i)])], wish.layer);
  fill($("m-head"), [[-1, `all ${heads}`], ...Array.from({ length: heads }, (_, i) => [i, String(i)])], wish.head);
  if (wish.key !== view.key) Object.assign(wish, { key: view.key, query: tokens - 1, grey: false, given: -1 });
  if (wish.given >= missed.tokens.length) wish.given = -1;
  fill($("m-colour"), [["kept", "how long it was kept"], ["evicted", "when it was evicted"], ...(missed.mass ? [["missed", "how much it was missed"]] : [])], isMissing() || wish.colour !== "missed" ? wish.colour : "kept");
  $("m-grey").checked = wish.grey;
  wish.query = Math.min(wish.query, tokens - 1);
  $("m-query").max = tokens - 1;
  $("m-query").value = wish.query;
  $("m-note").textContent = "Every row is a head, every column a token. Drag the position to grey out, here and in the text, what the sampler no longer sees from there; the strip is the share of these heads that still see a token.";
  $("m-body").hidden = false;
  showWorst();
  chooseRows();
}

// Rows of the layer and head chosen, and how many (row, token) pairs each query sees.
function chooseRows() {
  const { layers, heads, tokens, gone } = atlas;
  const { layer, head } = state.map;
  atlas.rows = [];
  for (let l = 0; l < layers; l++) for (let h = 0; h < heads; h++) if ((layer < 0 || l === layer) && (head < 0 || h === head)) atlas.rows.push(l * heads + h);
  const change = new Int32Array(tokens + 1);
  for (const row of atlas.rows) {
    for (let k = 0; k < tokens; k++) {
      const until = Math.min(gone[row * tokens + k], tokens);
      if (until > k) { change[k]++; change[until]--; }
    }
  }
  atlas.seen = change.slice(0, tokens);
  for (let q = 1; q < tokens; q++) atlas.seen[q] += atlas.seen[q - 1];
  drawMap();
}

const seenBy = (row, k, q) => k <= q && q < atlas.gone[row * atlas.tokens + k];
const shareOf = (k, q) => atlas.rows.reduce((n, row) => n + seenBy(row, k, q), 0) / atlas.rows.length;

// Tokens shown: all, or a part around the position.
function part() {
  const wide = Math.max(Math.min(16, atlas.tokens), Math.ceil(atlas.tokens / state.map.zoom));
  const from = Math.max(0, Math.min(atlas.tokens - wide, state.map.query - (wide >> 1)));
  return [from, from + wide];
}

function ramp() {
  const stops = [0, 1, 2, 3].map((i) => rgb(`ramp${i}`));
  const table = new Uint8Array(256 * 3);
  for (let i = 0; i < 255; i++) {
    const x = (i / 254) * (stops.length - 1);
    const k = Math.min(stops.length - 2, Math.floor(x));
    for (let c = 0; c < 3; c++) table[3 * i + c] = stops[k][c] + (stops[k + 1][c] - stops[k][c]) * (x - k);
  }
  rgb("never").forEach((value, c) => { table[3 * 255 + c] = value; });
  return table;
}

// Shade of every cell [rows, columns]: the mean over its tokens; 255: none of them was ever evicted.
function shades(from, to, columns) {
  const { rows, gone, tokens } = atlas;
  const key = [state.map.layer, state.map.head, state.map.colour, missed.mass !== null, from, to, columns].join();
  if (atlas.cellsFor === key) return atlas.cells;
  const kept = state.map.colour !== "evicted";
  const scale = new Float32Array(tokens + 1).map((_, n) => (kept ? Math.log2(1 + n) / Math.log2(1 + tokens) : n / tokens));
  const cells = new Uint8Array(rows.length * columns);
  const edges = edgesOf(from, to, columns);
  for (let r = 0; r < rows.length; r++) {
    for (let c = 0; c < columns; c++) {
      const a = edges[c], b = edges[c + 1];
      if (isMissing()) { cells[r * columns + c] = missedShade(rows[r], a, b); continue; }
      let sum = 0, never = 0;
      for (let k = a; k < b; k++) {
        const g = gone[rows[r] * tokens + k];
        if (g === NEVER) { never++; sum += kept ? scale[tokens - k] : 1; } else sum += scale[Math.max(0, Math.min(tokens, kept ? g - k : g))];
      }
      cells[r * columns + c] = never === b - a ? 255 : Math.round((254 * sum) / (b - a));
    }
  }
  Object.assign(atlas, { cells, cellsFor: key });
  return cells;
}
// Where the tokens of each column begin. -> [columns + 1]
const edgesOf = (from, to, columns) => Int32Array.from({ length: columns + 1 }, (_, c) => from + Math.floor(((to - from) * c) / columns));

const pixels = document.createElement("canvas");
function drawMap() {
  if (!atlas.gone) return;
  const { rows, gone, tokens } = atlas;
  const { query: q, grey: greyed } = state.map;
  const [from, to] = part();
  const tall = Math.max(1, Math.min(18, Math.floor(400 / rows.length)));
  const top = PLACE.marks + PLACE.strip + PLACE.space;
  const [g, width, height] = sharp($("m-canvas"), top + tall * rows.length + PLACE.bottom);
  const inner = width - PLACE.left - PLACE.right;
  const columns = Math.max(1, Math.min(to - from, Math.floor(inner)));
  const cells = shades(from, to, columns);
  const table = ramp();
  const [grey, later, ink] = [rgb("unseen"), rgb("later"), rgb("ink")];
  const edges = edgesOf(from, to, columns);
  const image = new ImageData(columns, rows.length + 1); // the strip is row 0
  const out = new Uint32Array(image.data.buffer); // a pixel: alpha, blue, green, red from the top byte down
  const mixed = (x, y, i, share) => (255 << 24) | ((x[2] + (y[i + 2] - x[2]) * share) << 16) | ((x[1] + (y[i + 1] - x[1]) * share) << 8) | (x[0] + (y[i] - x[0]) * share);
  const total = new Float64Array(columns);
  for (let r = 0; r < rows.length; r++) {
    const start = rows[r] * tokens;
    for (let c = 0; c < columns; c++) {
      const a = edges[c], b = Math.min(edges[c + 1], q + 1);
      let n = 0;
      for (let k = start + a; k < start + b; k++) if (gone[k] > q) n++;
      total[c] += n / Math.max(1, b - a);
      const at = (r + 1) * columns + c;
      out[at] = greyed && a >= b ? mixed(later, later, 0, 0) : mixed(grey, table, 3 * cells[r * columns + c], greyed ? n / (b - a) : 1);
    }
  }
  for (let c = 0; c < columns; c++) out[c] = mixed(later, ink, 0, total[c] / rows.length);
  pixels.width = columns;
  pixels.height = rows.length + 1;
  pixels.getContext("2d").putImageData(image, 0, 0);
  g.imageSmoothingEnabled = false;
  g.drawImage(pixels, 0, 0, columns, 1, PLACE.left, PLACE.marks, inner, PLACE.strip);
  g.drawImage(pixels, 0, 1, columns, rows.length, PLACE.left, top, inner, tall * rows.length);
  Object.assign(atlas, { from, to, top, tall, inner });
  decorate(g, width, height);
  $("m-seen").textContent = `${q} of ${tokens - 1}: a head sees ${num(atlas.seen[q] / rows.length, 4)} of ${q + 1} tokens (${percent(atlas.seen[q] / rows.length / (q + 1))})`;
  showMapLegend(table);
  greyText();
}

const columnX = (k) => PLACE.left + ((k - atlas.from) / (atlas.to - atlas.from)) * atlas.inner;

function decorate(g, width, height) {
  const { from, to, top, tall, rows, heads, t } = atlas;
  g.font = "11px system-ui, sans-serif";
  g.fillStyle = colour("dim");
  g.textAlign = "right";
  g.textBaseline = "middle";
  g.fillText("share", PLACE.left - 5, PLACE.marks + PLACE.strip / 2);
  const label = (row) => (state.map.layer >= 0 ? `h ${row % heads}` : state.map.head >= 0 || row % heads === 0 ? `L ${Math.floor(row / heads)}` : "");
  let free = -Infinity;
  rows.forEach((row, r) => {
    const y = top + (r + 0.5) * tall;
    if (label(row) && y >= free) { g.fillText(label(row), PLACE.left - 5, y + (tall < 11 ? 3 : 0)); free = y + 12; }
  });
  g.textAlign = "center";
  g.textBaseline = "top";
  for (const k of niceTicks(from, to - 1, Math.max(2, Math.floor(width / 110)))) if (k === Math.round(k)) g.fillText(String(k), Math.min(columnX(k + 0.5), width - 18), height - PLACE.bottom + 6);
  g.fillStyle = colour("beacon");
  for (const k of t.beacons ?? []) {
    if (k < from || k >= to) continue;
    const x = columnX(k + 0.5);
    g.beginPath();
    for (const [dx, dy] of [[0, -4], [3.5, 0], [0, 4], [-3.5, 0]]) g.lineTo(x + dx, PLACE.marks / 2 + dy);
    g.fill();
  }
  g.fillStyle = colour("given");
  for (const [begin, end] of t.given ?? []) {
    const [left, right] = [Math.max(begin, from), Math.min(end, to)];
    if (left < right) g.fillRect(columnX(left), PLACE.marks / 2 - 2, Math.max(1, columnX(right) - columnX(left)), 4);
  }
  const line = (x, name) => { g.strokeStyle = colour(name); path(g, [[x, 1], [x, height - PLACE.bottom + 3]]); };
  g.lineWidth = 1.5;
  if (state.map.grey) line(columnX(state.map.query + 1), "accent");
  if (t.num_prompt > from && t.num_prompt < to) { g.setLineDash([2, 3]); line(columnX(t.num_prompt), "dim"); g.setLineDash([]); }
  if (atlas.at) {
    g.strokeStyle = colour("ink");
    g.strokeRect(columnX(atlas.at.k) - 0.5, top + atlas.at.r * tall - 0.5, Math.max(3, atlas.inner / (to - from)) + 1, Math.max(3, tall) + 1);
  }
}

function showMapLegend(table) {
  const key = `${state.map.colour} ${isMissing()} ${isDark()} ${atlas.tokens}`;
  if ($("m-legend").dataset.for === key) return;
  $("m-legend").dataset.for = key;
  const shadeOf = (i) => `rgb(${table[3 * i]} ${table[3 * i + 1]} ${table[3 * i + 2]})`;
  const bar = el("span", { class: "bar-scale" });
  bar.style.background = `linear-gradient(90deg, ${[0, 64, 127, 191, 254].map(shadeOf).join(", ")})`;
  const ends = isMissing() ? ["evicted and not missed", `missed most (${num(missed.top, 3)})`] : state.map.colour !== "evicted" ? ["evicted soon", "kept long"] : ["evicted early", "evicted late"];
  $("m-legend").replaceChildren(el("span", {}, ends[0], bar, ends[1]), el("span", {}, swatch(shadeOf(255)), "never evicted"), el("span", {}, swatch(colour("unseen")), "no longer seen"),
    el("span", {}, swatch(colour("later")), "not yet written"), el("span", { class: "beacon" }, "\u25c6 beacon"), el("span", {}, swatch(colour("given")), "given"), el("span", {}, "dotted: end of the prompt"));
}

// Rows for the tip of a token, with the heads chosen.
function mapFacts(i) {
  if (!atlas.gone || atlas.t !== view.t || i >= atlas.tokens) return [];
  const { rows, gone, tokens } = atlas;
  const q = state.map.query;
  if (rows.length === 1) return [["evicted at", goneText(gone[rows[0] * tokens + i])], ...missedFacts(i)];
  return [...missedFacts(i), [`seen from ${q}`, i > q ? "not yet written" : `${rows.reduce((n, row) => n + seenBy(row, i, q), 0)} of ${rows.length} heads`]];
}
const goneText = (g) => (g === NEVER ? "never" : String(g));

// Greys the text above like the map: the share of the chosen heads that see a token, in eighths. Only what is on the screen.
function greyText() {
  const { spans, base } = view;
  if (!spans.length) return;
  const on = state.map.grey && atlas.gone && atlas.t === view.t;
  const q = state.map.query;
  const given = state.map.given >= 0 && atlas.gone && atlas.t === view.t;
  const [first, last] = inSight();
  for (let i = first; i < last; i++) {
    let name = given && i >= view.t.num_prompt && i < atlas.tokens && !isGiven(view.t, i) ? `t${shade(changeOf(i))}` : base[i];
    if (on && i < atlas.tokens) {
      const share = i > q ? 0 : shareOf(i, q);
      name += i > q ? " later" : ` v${share === 0 ? 0 : share === 1 ? 8 : Math.max(1, Math.min(7, Math.round(8 * share)))}${i === q ? " query" : ""}`;
    }
    if (spans[i].className !== name) spans[i].className = name;
  }
}

function inSight() {
  const { spans } = view;
  const box = $("tokens");
  const after = (y) => { let [a, b] = [0, spans.length]; while (a < b) { const m = (a + b) >> 1; if (spans[m].offsetTop < y) a = m + 1; else b = m; } return a; };
  return [Math.max(0, after(box.scrollTop - 200) - 50), Math.min(spans.length, after(box.scrollTop + box.clientHeight + 200) + 50)];
}

function tellCell(r, k, x, y) {
  const { rows, heads, gone, tokens, t } = atlas;
  atlas.at = { r, k };
  const row = rows[r];
  const g = gone[row * tokens + k];
  const q = state.map.query;
  drawMap();
  tip(x, y, el("span", { class: "said mono" }, t.pieces[k] ? visible(t.pieces[k]) : "\u27e8\u27e9"), [
    ["token", `${k}${(t.beacons ?? []).includes(k) ? " (beacon)" : k < t.num_prompt ? " (prompt)" : isGiven(t, k) ? " (given)" : ""}`], ["layer", String(Math.floor(row / heads))], ["head", String(row % heads)],
    ["evicted at", goneText(g)], ["kept for", g === NEVER ? "all positions that followed" : `${Math.max(0, g - k)} positions`],
    [`seen from ${q}`, k > q ? "not yet written" : seenBy(row, k, q) ? "yes" : "no"], ["heads that see it", k > q ? "\u2013" : `${Math.round(shareOf(k, q) * rows.length)} of ${rows.length}`],
    ...(missed.mass && g !== NEVER ? [["attention it missed here", num(massOf(missed.mass[row * tokens + k]), 3)]] : [])]);
}

function listenMap() {
  const canvas = $("m-canvas");
  const hide = () => { atlas.at = null; noTip(); drawMap(); };
  const cell = (event) => {
    const box = canvas.getBoundingClientRect();
    const k = atlas.from + Math.floor(((event.clientX - box.left - PLACE.left) / atlas.inner) * (atlas.to - atlas.from));
    const r = Math.floor((event.clientY - box.top - atlas.top) / atlas.tall);
    return k >= atlas.from && k < atlas.to ? [Math.max(0, Math.min(atlas.rows.length - 1, r)), k] : null;
  };
  const over = (event) => { const at = atlas.gone && cell(event); if (at) tellCell(...at, event.clientX, event.clientY); };
  canvas.addEventListener("pointermove", over);
  canvas.addEventListener("pointerdown", over);
  canvas.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && hide());
  canvas.addEventListener("blur", hide);
  canvas.addEventListener("click", (event) => { const at = atlas.gone && cell(event); if (at) pick(at[1], false); });
  canvas.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return hide();
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!move || !atlas.gone) return;
    event.preventDefault();
    const { r, k } = atlas.at ?? { r: 0, k: atlas.from };
    const [row, token] = [Math.max(0, Math.min(atlas.rows.length - 1, r + move[0])), Math.max(atlas.from, Math.min(atlas.to - 1, k + move[1]))];
    const box = canvas.getBoundingClientRect();
    tellCell(row, token, box.left + columnX(token), box.top + atlas.top + row * atlas.tall);
  });
  new ResizeObserver(() => drawMap()).observe($("m-body"));
  let waiting = false;
  $("m-query").addEventListener("input", () => {
    state.map.query = Number($("m-query").value);
    state.map.grey = $("m-grey").checked = true;
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; drawMap(); });
  });
  $("m-grey").addEventListener("change", () => { state.map.grey = $("m-grey").checked; drawMap(); });
  for (const [id, name] of [["m-layer", "layer"], ["m-head", "head"]]) $(id).addEventListener("change", () => { state.map[name] = Number($(id).value); atlas.at = null; chooseRows(); });
  $("m-colour").addEventListener("change", () => { state.map.colour = $("m-colour").value; drawMap(); });
  $("m-zoom").addEventListener("change", () => { state.map.zoom = Number($("m-zoom").value); drawMap(); });
}
