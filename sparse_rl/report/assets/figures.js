// Which figures there are, in order; the split of step time; every other metric on demand.

const single = (title, name, more = {}) => ({ title, names: [name], series: (run) => [{ label: "", curve: curve(run, name) }], ...more });
const pair = (title, first, second, labels, more = {}) => ({
  title, names: [first, second], keys: [[false, labels[0]], [true, labels[1]]],
  series: (run) => [{ label: labels[0], curve: curve(run, first) }, { label: labels[1], curve: curve(run, second), dash: true }], ...more,
});

// p50 inside p05 .. p95 of the same steps; only the line is smoothed.
function xiBand(run) {
  const [low, middle, high] = ["p05", "p50", "p95"].map((p) => curve(run, `gap/xi/${p}`));
  const at = (c, which) => { const m = new Map(c.step.map((s, i) => [s, c[which][i]])); return middle.step.map((s) => m.get(s) ?? null); };
  return [{ label: "p50", curve: { ...middle, binned: false }, band: { low: at(low, "low"), high: at(high, "high") } }]; // of a bin: the extremes
}

// Whether two curves of a run differ: rewards of 1 for what is right and 0 for the rest say no more than accuracy.
function apart(run, one, other) {
  const [a, b] = [curve(run, one), curve(run, other)];
  return a.mean.some((y, i) => finite(y) && finite(b.mean[i]) && Math.abs(y - b.mean[i]) > 1e-9);
}

const NAMED = /^reward\/(?!right\/)[^/]+\/mean$/;
const STUDENT = /^student\/.*\/kl$/;

// A figure of all metrics that match, one line each. A name has the same style in every run; the legend tells which.
function family(match, short, more) {
  const every = () => [...new Set(state.doc.runs.flatMap((run) => Object.keys(run.curves)))].filter((n) => match.test(n)).sort();
  const styled = () => every().map((n, k) => [["", "dashed", "dotted"][k % 3], n]);
  return {
    match, labels: () => styled().map(([style, n]) => [style, visible(short(n))]),
    series: (run) => styled().filter(([, n]) => Object.hasOwn(run.curves, n)).map(([dash, n]) => ({ label: visible(short(n)), curve: curve(run, n), dash })), ...more,
  };
}

const FIGURES = [
  {
    title: "Reward", names: ["reward/mean", "reward/right/frac"], about: "Mean reward of the training rollouts; dashed: the share that is right, where the two differ.",
    series: (run) => (apart(run, "reward/mean", "reward/right/frac")
      ? [{ label: "reward", curve: curve(run, "reward/mean") }, { label: "share right", dash: true, curve: curve(run, "reward/right/frac") }]
      : [{ label: "", curve: curve(run, "reward/mean") }]),
  },
  family(NAMED, (n) => n.slice(7, -5), { title: "Named rewards", names: ["reward/NAME/mean"], when: (run) => Object.keys(run.curves).some((n) => NAMED.test(n)), about: "What the reward is made of, before weights." }),
  pair("Held-out accuracy", "eval/dense/accuracy", "eval/sparse/accuracy", ["dense cache", "sparse cache"]),
  pair("Held-out reward", "eval/dense/reward", "eval/sparse/reward", ["dense cache", "sparse cache"], { when: (run) => ["dense", "sparse"].some((cache) => apart(run, `eval/${cache}/reward`, `eval/${cache}/accuracy`)) }),
  single("Rejected trajectories", "reject/trajectories/frac", { about: "Share rejected because a token was too unlikely for the learner." }),
  { title: "\u03be: learner over sampler", names: ["gap/xi/p50", "gap/xi/p05", "gap/xi/p95"], series: xiBand, span: 0.04, about: "Ratio of a token\u2019s probabilities: median, and 5th to 95th percentile." },
  single("\u03b1\u2085: overlap with dense", "gap/alpha/p05", { lines: [{ y: 0.86, label: "0.86" }], about: "5th percentile over tokens; healthy above 0.86." }),
  pair("KL to the reference", "old/kl/mean", "update/kl/mean", ["all tokens", "tokens that count"]),
  single("Clipped tokens", "update/clip/frac"),
  single("Critic: variance explained", "value/explained/frac", { when: (run) => Object.hasOwn(run.curves, "value/explained/frac"), about: "PPO. 1: it knows what follows; 0: a constant would do as well." }),
  single("Entropy", "old/entropy/mean", { about: "Nats per token." }),
  single("Response length", "rollout/length/mean", { about: "Tokens." }),
  single("Turns of a conversation", "talk/turns/mean", { when: (run) => Object.hasOwn(run.curves, "talk/turns/mean"), about: "Of the model, on average." }),
  single("Calls of tools that could not be made", "talk/tool_errors/mean", { when: (run) => Object.hasOwn(run.curves, "talk/turns/mean"), about: "Per conversation; the model is told why." }),
  {
    title: "KV cache", names: ["cache/bytes/allocated", "cache/bytes_saved/frac"], keys: [[false, "allocated"], [true, "what dense would take"]], format: bytes,
    series: (run) => [
      { label: "allocated", curve: curve(run, "cache/bytes/allocated") },
      { label: "dense would take", dash: true, curve: derived(run, ["cache/bytes/allocated", "cache/bytes_saved/frac"], (a, saved) => (saved < 1 ? a / (1 - saved) : null)) },
    ],
  },
  single("Sampling speed", "rollout/tokens_per_s", { about: "Tokens per second." }),
  family(STUDENT, (n) => n.slice(8, -3), { title: "Students\u2019 KL", names: ["student/NAME/kl"], about: "KL(teacher || student), nats per response token." }),
];

// Shares of a step's seconds, stacked, of one run at a time.
class Split extends Chart {
  constructor() {
    super({ title: "Where a step\u2019s time goes", names: ["time/*"], format: percent, series: () => [] });
    this.select = el("select", { "aria-label": "Run whose step time is split" });
    this.select.addEventListener("change", () => { state.splitRun = this.select.value; redraw(); });
    this.extra.append(this.select);
    this.legend = el("p", { class: "names stages" });
    this.card.append(this.legend);
  }

  traces() {
    const runs = shownRuns().filter((run) => run.curves["time/step"]);
    const run = runs.find((r) => r.id === state.splitRun) ?? runs[0];
    this.select.replaceChildren(...runs.map((r) => el("option", { value: r.id, selected: r === run }, visible(r.name))));
    this.select.hidden = runs.length < 2;
    this.legend.replaceChildren();
    if (!run) return [];
    const total = curve(run, "time/step");
    const names = Object.keys(run.curves).filter((n) => n.startsWith("time/") && n !== "time/step" && n !== "time/eval");
    const stages = names.map((name) => { const c = curve(run, name); return [name.slice(5), new Map(c.step.map((s, i) => [s, c.mean[i]]))]; });
    const known = total.step.map((s) => stages.reduce((sum, [, at]) => sum + (at.get(s) ?? 0), 0));
    stages.push(["other", new Map(total.step.map((s, i) => [s, Math.max(0, (total.mean[i] ?? 0) - known[i])]))]);
    const below = total.step.map(() => 0);
    return stages.map(([label, at], k) => {
      const own = total.step.map((s) => at.get(s) ?? 0);
      const share = own.map((y, i) => (finite(total.mean[i]) && total.mean[i] > 0 ? y / Math.max(total.mean[i], known[i]) : null));
      const low = [...below];
      share.forEach((y, i) => { below[i] += y ?? 0; });
      const high = share.map((y, i) => (y === null ? null : below[i]));
      const x = state.axis === "step" ? total.step : total.step.map((s) => secondsAt(run, s));
      const tint = colour(`stage${k % 8}`);
      this.legend.append(el("span", { class: "stage" }, swatch(tint), visible(label)));
      return { run, label, colour: tint, x, own, share, curve: { step: total.step, mean: high, low, high } };
    }).filter((t) => t.x.every(finite));
  }

  range(traces) {
    const x = traces[0]?.x ?? [0, 1];
    return { x0: x[0], x1: x.length > 1 ? x[x.length - 1] : x[0] + 1, y0: 0, y1: 1 };
  }

  paint(g, traces) {
    for (const t of traces) {
      g.fillStyle = t.colour;
      for (const piece of pieces(t.x, t.curve.high, t.curve.high)) area(g, piece.map((i) => [this.X(t.x[i]), this.Y(t.curve.low[i]), this.Y(t.curve.high[i])]));
    }
  }

  at(x) {
    const found = super.at(x);
    if (!found) return null;
    return [found[0], found[1], this.drawn.map((t) => {
      const i = nearest(t.x, x);
      return [el("span", {}, swatch(t.colour), visible(t.label)), t.share[i] === null ? "gap" : `${percent(t.share[i])} \u00b7 ${seconds(t.own[i])}`];
    })];
  }
}

function swatch(tint) {
  const node = el("span", { class: "swatch" });
  node.style.background = tint;
  return node;
}

let main = [];
const extra = new Map(); // name -> Chart
const charts = () => [...main, ...extra.values()];
const has = (run, figure) => (figure.when?.(run) ?? true) && figure.series(run).some((s) => s.curve.mean.some(finite));
const belongs = (figure, name) => figure.names.includes(name) || Boolean(figure.match?.test(name));

function makeFigures() {
  main = FIGURES.map((figure) => new Chart(figure));
  main.splice(-1, 0, new Split());
  $("figures").append(...main.map((chart) => chart.card));
  for (const chart of main) sizeWatch.observe(chart.card);
  $("find").addEventListener("input", listNames);
}

function showFigures() {
  const absent = [];
  for (const chart of main) {
    const there = chart instanceof Split ? state.doc.runs.some((run) => run.curves["time/step"]) : state.doc.runs.some((run) => has(run, chart.figure));
    chart.card.hidden = !there;
    if (!there && !chart.figure.when) absent.push(`${chart.figure.title} (${chart.figure.names[0]})`);
  }
  $("absent").textContent = absent.length ? `Not in ${state.doc.runs.length === 1 ? "this run" : "any of these runs"}: ${absent.join("; ")}.` : "";
  const lost = state.axis === "seconds" ? shownRuns().filter((run) => !run.clock?.step?.length) : [];
  $("curve-hint").textContent = lost.length ? `Not drawn, because these runs wrote no times: ${lost.map((run) => visible(run.name)).join(", ")}.` : "";
  listNames();
  redraw();
}

const otherNames = () => [...new Set(state.doc.runs.flatMap((run) => Object.keys(run.curves)))].filter((name) => !FIGURES.some((f) => belongs(f, name))).sort();

function listNames() {
  const names = otherNames();
  const wanted = $("find").value.trim().toLowerCase();
  const found = names.filter((name) => name.toLowerCase().includes(wanted));
  $("others-count").textContent = `(${names.length})`;
  keepFocus($("names"), () => $("names").replaceChildren(...found.map((name) => el("button", {
    type: "button", "data-key": name, "aria-pressed": String(extra.has(name)), class: "name", click: () => toggleName(name),
  }, visible(name))), ...(found.length ? [] : [el("span", { class: "hint" }, "no metric has this name")])));
  for (const name of [...extra.keys()]) if (!names.includes(name)) dropName(name);
}

function toggleName(name) {
  if (extra.has(name)) dropName(name);
  else {
    const chart = new Chart(single(visible(name), name, { format: name.includes("bytes/") ? bytes : name.startsWith("time/") ? seconds : num }));
    chart.extra.append(el("button", { type: "button", class: "close", "aria-label": "remove this figure", click: () => toggleName(name) }, "\u00d7"));
    extra.set(name, chart);
    sizeWatch.observe(chart.card);
    $("extra").append(chart.card);
  }
  listNames();
}

function dropName(name) {
  const { card, canvas } = extra.get(name);
  screenWatch.unobserve(canvas);
  sizeWatch.unobserve(card);
  card.remove();
  extra.delete(name);
}

// Scroll to the figure of a metric; one without a figure of its own is drawn among the others.
function goTo(name) {
  let chart = main.find((c) => !c.card.hidden && (belongs(c.figure, name) || (c instanceof Split && name.startsWith("time/") && name !== "time/eval")));
  if (!chart && otherNames().includes(name)) {
    $("others").open = true;
    if (!extra.has(name)) toggleName(name);
    chart = extra.get(name);
  }
  if (!chart) return;
  chart.card.scrollIntoView({ block: "center", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
  chart.card.focus({ preventScroll: true });
}
