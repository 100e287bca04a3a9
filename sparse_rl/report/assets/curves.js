// Curves of runs: points, smoothing, and a chart that draws them on a canvas.

const EMPTY = { step: [], mean: [], low: [], high: [] };

function curve(run, name) {
  if (!Object.hasOwn(run.curves ?? {}, name)) return EMPTY;
  const found = run.curves[name];
  const last = found.last ?? found.mean.filter(finite).at(-1);
  return { step: found.step, mean: found.mean, low: found.low ?? found.mean, high: found.high ?? found.mean, binned: Boolean(found.low), each: found.each ?? 1, last };
}

// Seconds at a step: those of the run's clock, in between in proportion. null: the run has no clock.
function secondsAt(run, step) {
  const { step: steps = [], seconds: times = [] } = run.clock ?? {};
  const last = steps.length - 1;
  if (last < 0 || step > steps[last]) return last >= 0 && finite(times[last]) ? times[last] : null;
  const i = nearest(steps, step, Math.ceil);
  const [x0, y0] = i ? [steps[i - 1], times[i - 1]] : [0, 0];
  if (!finite(times[i]) || !finite(y0)) return null;
  return steps[i] === x0 ? times[i] : y0 + ((times[i] - y0) * (step - x0)) / (steps[i] - x0);
}

// Index of the value nearest to x in an ascending list; with Math.ceil, of the first that is not below it.
function nearest(list, x, how = Math.round) {
  let [low, high] = [0, list.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] < x) low = middle + 1;
    else high = middle;
  }
  return how === Math.round && low > 0 && x - list[low - 1] <= list[low] - x ? low - 1 : low;
}

// Exponential average of the values so far: sum of a^(n-i) x_i over sum of a^(n-i). A gap stays a gap.
// each: values in a point, all of them taken for its mean, so that runs of many steps are smoothed as far as those of few.
function smoothed(values, a, each = 1) {
  const fade = a ** each;
  let [top, bottom] = [0, 0];
  return values.map((x) => {
    if (!finite(x)) return null;
    top = fade * top + x;
    bottom = fade * bottom + 1;
    return top / bottom;
  });
}

// A derived curve: f, which grows with each of them, of several, at the steps where all have a value or a gap.
function derived(run, names, f) {
  const [first, ...rest] = names.map((name) => curve(run, name));
  const of = (which) => {
    const at = rest.map((c) => new Map(c.step.map((s, i) => [s, c[which][i]])));
    return first.step.map((s, i) => {
      const values = [first[which][i], ...at.map((m) => m.get(s))];
      const y = values.every(finite) ? f(...values) : null;
      return finite(y) ? y : null;
    });
  };
  return { step: first.step, mean: of("mean"), low: of("low"), high: of("high"), binned: first.binned, each: first.each };
}

function niceTicks(low, high, count) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const size = [1, 2, 2.5, 5, 10].find((m) => m * power >= raw) * power;
  const ticks = [];
  const first = Math.ceil(low / size - 1e-9);
  for (let k = 0; k <= 2 * count && (first + k) * size <= high + 1e-9 * size; k++) ticks.push((first + k) * size);
  return ticks;
}

const MARGIN = { left: 52, right: 10, top: 10, bottom: 24 };

class Chart {
  // figure: {title, names, series(run) -> [{label, curve, dash, band}], lines, format, height}
  constructor(figure) {
    this.figure = figure;
    this.cursor = null;
    this.canvas = el("canvas", { tabIndex: 0, "aria-label": `${figure.title}: arrow keys move from step to step`, "role": "application" });
    this.card = el("article", { class: "card", tabIndex: -1 }, ...this.heading(), this.canvas);
    this.listen();
    screenWatch.observe(this.canvas);
    this.canvas.chart = this;
  }

  heading() {
    const { title, names, keys = [], about } = this.figure;
    const legend = keys.map(([dash, label]) => el("span", { class: `key ${dash ? "dashed" : ""}` }, label));
    this.extra = el("span", { class: "extra" });
    this.labels = el("span", { class: "labels" }); // of curves whose names only the runs know
    return [el("h3", {}, title, this.extra), el("p", { class: "names" }, names[0] === title ? "" : said(names.join(", "), "mono"), ...legend, this.labels), ...(about ? [el("p", { class: "hint" }, about)] : [])];
  }

  traces() {
    const x = (run, steps) => (state.axis === "step" ? steps : steps.map((s) => secondsAt(run, s)));
    return shownRuns().flatMap((run) => this.figure.series(run).filter((s) => s.curve.step.length).map((s) => ({
      ...s, run, colour: runColour(run), x: x(run, s.curve.step), smooth: state.smooth ? smoothed(s.curve.mean, state.smooth, s.curve.each) : null,
    }))).filter((t) => t.x.every(finite));
  }

  range(traces) {
    let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const t of traces) {
      const band = t.band ?? t.curve;
      for (let i = 0; i < t.x.length; i++) {
        x0 = Math.min(x0, t.x[i]);
        x1 = Math.max(x1, t.x[i]);
        for (const y of [t.curve.mean[i], band.low[i], band.high[i]]) if (finite(y)) { y0 = Math.min(y0, y); y1 = Math.max(y1, y); }
      }
    }
    if (x0 > x1) [x0, x1] = [0, 1];
    if (y0 > y1) [y0, y1] = [0, 1];
    for (const line of this.figure.lines ?? []) { y0 = Math.min(y0, line.y); y1 = Math.max(y1, line.y); }
    if (x0 === x1) [x0, x1] = [x0 - 1, x1 + 1];
    const missing = (this.figure.span ?? 0) - (y1 - y0); // to the least height
    if (missing > 0) [y0, y1] = [y0 - missing / 2, y1 + missing / 2];
    if (y0 >= 0 && y0 < 0.6 * y1) y0 = 0;
    const pad = 0.05 * (y1 - y0) || 0.05 * Math.abs(y1) || 0.5;
    return { x0, x1, y0: y0 === 0 ? 0 : y0 - pad, y1: y1 + pad };
  }

  draw() {
    this.dirty = false;
    const [g, width, height] = sharp(this.canvas, this.figure.height ?? 190);
    const traces = (this.drawn = this.traces());
    if (this.figure.labels) this.labels.replaceChildren(...this.figure.labels().map(([style, label]) => el("span", { class: `key ${style}` }, label)));
    const r = this.range(traces);
    const inner = { w: width - MARGIN.left - MARGIN.right, h: height - MARGIN.top - MARGIN.bottom };
    const X = (x) => MARGIN.left + ((x - r.x0) / (r.x1 - r.x0)) * inner.w;
    const Y = (y) => MARGIN.top + (1 - (y - r.y0) / (r.y1 - r.y0)) * inner.h;
    Object.assign(this, { X, Y, toX: (px) => r.x0 + ((px - MARGIN.left) / inner.w) * (r.x1 - r.x0), g });
    this.axes(g, width, height, r);
    if (!traces.length) {
      g.fillStyle = colour("dim");
      g.textAlign = "center";
      g.fillText("nothing to draw", MARGIN.left + inner.w / 2, height / 2);
    }
    this.paint(g, traces);
    for (const line of this.figure.lines ?? []) {
      g.strokeStyle = g.fillStyle = colour("fail");
      g.setLineDash([2, 3]);
      path(g, [[X(r.x0), Y(line.y)], [X(r.x1), Y(line.y)]]);
      g.setLineDash([]);
      g.textAlign = "right";
      g.textBaseline = "bottom";
      g.strokeStyle = colour("card");
      g.lineWidth = 4;
      g.strokeText(line.label, X(r.x1) - 2, Y(line.y) - 2);
      g.lineWidth = 1;
      g.fillText(line.label, X(r.x1) - 2, Y(line.y) - 2);
    }
    if (this.cursor !== null) {
      g.strokeStyle = colour("dim");
      path(g, [[X(this.cursor), MARGIN.top], [X(this.cursor), height - MARGIN.bottom]]);
    }
  }

  axes(g, width, height, r) {
    g.font = "11px system-ui, sans-serif";
    g.lineWidth = 1;
    g.fillStyle = colour("dim");
    g.strokeStyle = colour("line");
    g.textAlign = "right";
    g.textBaseline = "middle";
    const unit = this.figure.format === bytes ? 1024 ** Math.max(0, Math.floor(Math.log2(Math.max(1, r.y1)) / 10)) : 1;
    const ticks = niceTicks(r.y0 / unit, r.y1 / unit, 5);
    const plain = new Set(ticks.map(short)).size === ticks.length ? short : (y) => num(y, 8); // ticks must not look alike
    for (const y of ticks) {
      path(g, [[MARGIN.left, this.Y(y * unit)], [width - MARGIN.right, this.Y(y * unit)]]);
      g.fillText(unit > 1 || this.figure.format === bytes ? bytes(y * unit) : this.figure.format === percent ? percent(y) : plain(y), MARGIN.left - 6, this.Y(y * unit));
    }
    g.textAlign = "center";
    g.textBaseline = "top";
    const clock = state.axis === "seconds";
    const [scale, name] = clock && r.x1 > 7200 ? [3600, "h"] : clock && r.x1 > 180 ? [60, "min"] : [1, clock ? "s" : ""];
    for (const x of niceTicks(r.x0 / scale, r.x1 / scale, Math.max(2, Math.floor(width / 65)))) {
      if (!clock && x !== Math.round(x)) continue;
      g.fillText(`${short(x)}${name && ` ${name}`}`, Math.min(this.X(x * scale), width - 16), height - MARGIN.bottom + 6);
    }
  }

  paint(g, traces) {
    const { X, Y } = this;
    for (const t of traces) {
      g.fillStyle = t.colour;
      const band = t.band ?? (t.curve.binned ? t.curve : null);
      if (band) {
        g.globalAlpha = t.band ? 0.16 : 0.12;
        for (const piece of pieces(t.x, band.low, band.high)) area(g, piece.map((i) => [X(t.x[i]), Y(band.low[i]), Y(band.high[i])]));
      }
    }
    for (const t of traces) {
      g.strokeStyle = g.fillStyle = t.colour;
      g.lineJoin = "round";
      g.setLineDash(t.dash === "dotted" ? [2, 3] : t.dash ? [5, 4] : []);
      for (const [values, alpha, wide] of t.smooth ? [[t.curve.mean, 0.28, 1], [t.smooth, 1, 1.8]] : [[t.curve.mean, 1, 1.5]]) {
        g.globalAlpha = alpha;
        g.lineWidth = wide;
        for (const piece of pieces(t.x, values, values)) {
          path(g, piece.map((i) => [X(t.x[i]), Y(values[i])]));
          if (piece.length === 1 || t.x.length <= 24) for (const i of piece) dot(g, X(t.x[i]), Y(values[i]), piece.length === 1 ? 2.5 : 2);
        }
      }
    }
    g.globalAlpha = 1;
    g.lineWidth = 1;
    g.setLineDash([]);
  }

  // What the tip says at x: the point of every curve that is nearest. -> [x of the nearest, heading, rows] or null
  at(x) {
    const found = this.drawn.map((t) => ({ t, i: nearest(t.x, x) }));
    if (!found.length) return null;
    const best = found.reduce((a, b) => (Math.abs(b.t.x[b.i] - x) < Math.abs(a.t.x[a.i] - x) ? b : a));
    const step = best.t.curve.step[best.i];
    const rows = found.map(({ t, i }) => {
      const own = t.curve.step[i];
      const name = el("span", {}, chip(t.run), said(t.run.name), t.label ? ` ${t.label}` : "", own === step ? "" : el("i", {}, ` step ${own}`));
      return [name, this.value(t, i)];
    });
    const clock = state.axis === "seconds" ? ` \u00b7 ${seconds(best.t.x[best.i])}` : "";
    return [best.t.x[best.i], `step ${step}${clock}`, rows];
  }

  value(t, i) {
    const format = this.figure.format ?? num;
    const c = t.curve;
    if (!finite(c.mean[i])) return "gap";
    const band = t.band ?? (c.binned ? c : null);
    const within = band && finite(band.low[i]) ? ` (${format(band.low[i])} \u2026 ${format(band.high[i])})` : "";
    const smooth = t.smooth ? ` \u223c ${format(t.smooth[i])}` : "";
    return `${format(c.mean[i])}${within}${smooth}`;
  }

  show(x, clientX, clientY) {
    const found = this.at(x);
    if (!found) return noTip();
    const [at, heading, rows] = found;
    this.cursor = at;
    this.draw();
    tip(clientX, clientY, heading, rows, state.smooth && this.drawn[0].smooth ? "\u223c smoothed" : "");
  }

  hide() {
    noTip();
    this.cursor = null;
    this.draw();
  }

  listen() {
    const at = (event) => this.drawn && this.show(this.toX(event.clientX - this.canvas.getBoundingClientRect().left), event.clientX, event.clientY);
    this.canvas.addEventListener("pointermove", at);
    this.canvas.addEventListener("pointerdown", at);
    this.canvas.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.hide());
    this.canvas.addEventListener("blur", () => this.hide());
    this.canvas.addEventListener("keydown", (event) => {
      const points = [...new Set((this.drawn ?? []).flatMap((t) => t.x))].sort((a, b) => a - b);
      if (event.key === "Escape") return this.hide();
      if (!points.length || !["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) return;
      event.preventDefault();
      const here = this.cursor === null ? -1 : nearest(points, this.cursor);
      const to = { ArrowLeft: Math.max(0, here - 1), ArrowRight: Math.min(points.length - 1, here + 1), Home: 0, End: points.length - 1 }[event.key];
      const box = this.canvas.getBoundingClientRect();
      this.show(points[to], box.left + this.X(points[to]), box.top + 40);
    });
  }
}

// Runs of indices between gaps.
function pieces(x, low, high) {
  const found = [];
  let piece = [];
  for (let i = 0; i < x.length; i++) {
    if (finite(low[i]) && finite(high[i])) piece.push(i);
    else if (piece.length) { found.push(piece); piece = []; }
  }
  if (piece.length) found.push(piece);
  return found;
}
function path(g, points) {
  g.beginPath();
  points.forEach(([x, y], i) => (i ? g.lineTo(x, y) : g.moveTo(x, y)));
  g.stroke();
}
function area(g, points) {
  g.beginPath();
  points.forEach(([x, low], i) => (i ? g.lineTo(x, low) : g.moveTo(x, low)));
  for (const [x, , high] of [...points].reverse()) g.lineTo(x, high);
  g.fill();
  if (points.length === 1) g.fillRect(points[0][0] - 1.5, Math.min(points[0][1], points[0][2]), 3, Math.abs(points[0][1] - points[0][2]));
}
function dot(g, x, y, radius) {
  g.beginPath();
  g.arc(x, y, radius, 0, 2 * Math.PI);
  g.fill();
}

// Charts are drawn when they are on the screen, once a frame.
const screenWatch = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const chart = entry.target.chart;
    chart.onScreen = entry.isIntersecting;
    if (chart.onScreen && chart.dirty !== false) chart.draw();
  }
}, { rootMargin: "200px" });
addEventListener("beforeprint", () => charts().forEach((chart) => chart.draw()));
const sizeWatch = new ResizeObserver(() => redraw());
let asked = false;
function redraw() {
  for (const chart of charts()) chart.dirty = true;
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => {
    asked = false;
    for (const chart of charts()) if (chart.onScreen && chart.dirty) chart.draw();
  });
}
