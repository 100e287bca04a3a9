// Trajectories: the list, and the tokens of the chosen one, coloured by their gap.

const LIMITS = [0.05, 0.2, 0.5, 1, 2, 4]; // |gap| in nats where the next shade begins
const CHUNK = 2000; // tokens put on the page at once
const ROWS = 100; // trajectories listed at once

const gapOf = (t, i) => (finite(t.old?.[i]) && finite(t.sampler?.[i]) ? t.old[i] - t.sampler[i] : null);
const worst = new WeakMap();
function worstOf(t) { // index of the response token with the largest |gap|; null: no gap is known
  if (!worst.has(t)) {
    let most = null;
    for (let i = 0; i < (t.sampler?.length ?? 0); i++) {
      const gap = gapOf(t, i);
      if (gap !== null && (most === null || Math.abs(gap) > Math.abs(gapOf(t, most)))) most = i;
    }
    worst.set(t, most);
  }
  return worst.get(t);
}
const worstGap = (t) => (worstOf(t) === null ? 0 : Math.abs(gapOf(t, worstOf(t))));
const shade = (gap) => (gap === null ? "" : ` g${gap < 0 ? "n" : "p"}${LIMITS.filter((limit) => Math.abs(gap) >= limit).length}`);
const keyOf = (run, t, i) => JSON.stringify([run.id, t.step, t.prompt_index, t.sample_index, (run.trajectories ?? []).slice(0, i).filter((o) => o.step === t.step && o.prompt_index === t.prompt_index && o.sample_index === t.sample_index).length]);

const ORDER = {
  step: (a, b) => b.t.step - a.t.step || a.t.prompt_index - b.t.prompt_index || a.t.sample_index - b.t.sample_index,
  gap: (a, b) => worstGap(b.t) - worstGap(a.t),
  reward: (a, b) => (b.t.reward ?? 0) - (a.t.reward ?? 0),
};

function found() {
  const { run, kept, verdict, sort } = state.filter;
  return shownRuns().filter((r) => !run || r.id === run)
    .flatMap((r) => (r.trajectories ?? []).map((t, i) => ({ run: r, t, key: keyOf(r, t, i) })))
    .filter(({ t }) => (!kept || t.accepted === (kept === "accepted")) && (!verdict || t.verdict === verdict))
    .sort(ORDER[sort]);
}

function fill(select, options, value) {
  select.replaceChildren(...options.map(([v, text]) => el("option", { value: v, selected: v === value }, text)));
}

function showTrajectories() {
  const runs = shownRuns().filter((run) => run.trajectories?.length);
  const any = state.doc.runs.some((run) => run.trajectories?.length);
  $("browser").hidden = !any;
  $("t-none").hidden = any;
  if (state.filter.run && !runs.some((run) => run.id === state.filter.run)) state.filter.run = "";
  fill($("f-run"), [["", "all"], ...runs.map((run) => [run.id, visible(run.name)])], state.filter.run);
  const verdicts = [...new Set(runs.flatMap((run) => run.trajectories.map((t) => t.verdict)))].filter((v) => v !== null && v !== undefined).sort();
  if (!verdicts.includes(state.filter.verdict)) state.filter.verdict = "";
  fill($("f-verdict"), [["", "all"], ...verdicts.map((v) => [v, visible(v)])], state.filter.verdict);
  listTrajectories();
}

function listTrajectories() {
  const all = found();
  if (!all.some(({ key }) => key === state.chosen)) state.chosen = all[0]?.key ?? null;
  $("t-count").textContent = `${all.length} trajector${all.length === 1 ? "y" : "ies"}`;
  const several = new Set(all.map(({ run }) => run)).size > 1;
  const scroll = $("t-list").scrollTop;
  keepFocus($("t-list"), () => $("t-list").replaceChildren(...all.slice(0, state.listed).map(({ run, t, key }) => el("button", {
    type: "button", class: "item", "data-key": key, "aria-current": String(key === state.chosen), click: () => { state.chosen = key; listTrajectories(); },
  }, el("span", {}, ...(several ? [chip(run)] : []), `step ${t.step}`, el("small", {}, ` prompt ${t.prompt_index}, sample ${t.sample_index}`)),
  el("span", { class: "facts" }, `${num(t.reward, 3)} `, said(t.verdict ?? "\u2013"), t.accepted === false ? el("b", { class: "rejected" }, " \u2298 rejected") : "", el("small", {}, ` worst ${worstOf(t) === null ? "\u2013" : num(gapOf(t, worstOf(t)), 3)}`)))),
  ...(all.length > state.listed ? [el("button", { type: "button", "data-key": "more", click: () => { state.listed += ROWS; listTrajectories(); } }, `${all.length - state.listed} more`)] : [])));
  $("t-list").scrollTop = scroll;
  choose(all.find(({ key }) => key === state.chosen) ?? null);
}

// The chosen trajectory. `spans` are its tokens on the page, `built` ends when all are there.
const view = { key: null, text: "", run: null, t: null, spans: [], base: [], current: null, built: Promise.resolve(), turn: 0 };

function choose(chosen) {
  document.querySelector(".detail").hidden = !chosen;
  if (!chosen) { Object.assign(view, { key: null, text: "", t: null, run: null, spans: [] }); return openMap(null); }
  const text = JSON.stringify(chosen.t);
  if (view.key === chosen.key && view.text === text) { view.run = chosen.run; return; }
  Object.assign(view, { key: chosen.key, text, run: chosen.run, t: chosen.t, spans: [], base: [], current: null, turn: view.turn + 1 });
  showHead(chosen);
  noTip();
  view.built = build(chosen.t, view.turn);
  openMap(chosen.t);
}

function showHead({ run, t }) {
  const fact = (label, value) => el("span", {}, el("small", {}, label), " ", value);
  $("t-head").replaceChildren(
    fact("run", said(run.name)), fact("step", num(t.step)), fact("reward", num(t.reward, 4)),
    ...Object.entries(t.rewards ?? {}).map(([name, value]) => fact(visible(name), num(value, 4))), fact("verdict", said(t.verdict ?? "\u2013")),
    fact("", t.accepted === false ? el("b", { class: "rejected" }, "\u2298 rejected") : t.accepted ? "accepted" : "\u2013"),
    fact("advantage", num(t.advantage, 4)), fact("ended by", said(t.finish ?? "\u2013")), fact("tokens", `${t.num_prompt} + ${t.pieces.length - t.num_prompt}`),
    ...((t.given ?? []).length ? [fact("turns", num(turnsOf(t))), fact("given tokens", num(t.given.reduce((sum, [begin, end]) => sum + end - begin, 0)))] : []));
  $("worst").disabled = worstOf(t) === null;
}

const pieceText = (piece) => (piece ? piece.split("\n").map(visible).join("\u21b5\n") : "\u27e8\u27e9");

// Of a conversation: whether somebody else wrote a token, and how often the model spoke.
const isGiven = (t, i) => (t.given ?? []).some(([begin, end]) => i >= begin && i < end);
function turnsOf(t) {
  let [count, last] = [0, t.num_prompt];
  for (const [begin, end] of t.given) { count += begin > last; last = end; }
  return count + (last < t.pieces.length);
}

async function build(t, turn) {
  const box = $("tokens");
  box.replaceChildren();
  box.scrollTop = 0;
  const beacons = new Set(t.beacons ?? []);
  for (let from = 0; from < t.pieces.length; from += CHUNK) {
    if (from) await new Promise((go) => setTimeout(go));
    if (turn !== view.turn) return;
    const part = document.createDocumentFragment();
    for (let i = from; i < Math.min(from + CHUNK, t.pieces.length); i++) {
      const base = i < t.num_prompt ? "t prompt" : beacons.has(i) ? "t beacon" : isGiven(t, i) ? "t given" : `t${shade(gapOf(t, i - t.num_prompt))}`;
      const span = el("span", { class: base }, beacons.has(i) ? "\u25c6" : pieceText(t.pieces[i]));
      span.index = i;
      view.spans.push(span);
      view.base.push(base);
      part.append(span);
    }
    box.append(part);
  }
  greyText();
}

// What is known of a token, for the tip.
function facts(t, i) {
  const k = i - t.num_prompt;
  const rows = [["feed index", num(i)]];
  if ((t.beacons ?? []).includes(i)) rows.push(["", "a beacon"]);
  else if (k < 0) rows.push(["", "part of the prompt"]);
  else if (isGiven(t, i)) rows.push(["", "given: the model did not sample it"]);
  else {
    const gap = gapOf(t, k);
    const probability = (x) => (finite(x) ? num(Math.exp(x)) : "\u2013");
    rows.push(["sampler\u2019s probability", probability(t.sampler?.[k])], ["old probability", probability(t.old?.[k])],
      ["gap", num(gap)], ["\u03be", probability(gap)], ["rank", num(t.rank?.[k])], ["weight", num(t.weight?.[k])],
      ["clipped", t.clipped?.[k] === 1 ? "yes" : t.clipped?.[k] === 0 ? "no" : "\u2013"]);
  }
  return rows.concat(mapFacts(i));
}

function tellToken(i, x, y) {
  tip(x, y, el("span", { class: "said mono" }, view.t.pieces[i] ? visible(view.t.pieces[i]) : "\u27e8\u27e9"), facts(view.t, i));
}

function pick(i, tell = true) {
  if (view.spans[view.current]) view.spans[view.current].removeAttribute("aria-current");
  view.current = i;
  const span = view.spans[i];
  if (!span) return;
  span.setAttribute("aria-current", "true");
  const box = $("tokens");
  if (span.offsetTop < box.scrollTop || span.offsetTop + span.offsetHeight > box.scrollTop + box.clientHeight) box.scrollTop = span.offsetTop - box.clientHeight / 2;
  if (tell) {
    const at = span.getBoundingClientRect();
    tellToken(i, at.left, at.bottom - 8);
  }
}

function listenTokens() {
  const box = $("tokens");
  const over = (event) => event.target.index !== undefined && tellToken(event.target.index, event.clientX, event.clientY);
  box.addEventListener("pointermove", over); // not pointerover: that also comes when the page scrolls under a pointer at rest
  box.addEventListener("pointerleave", noTip);
  box.addEventListener("blur", noTip);
  box.addEventListener("click", (event) => event.target.index !== undefined && pick(event.target.index));
  box.addEventListener("scroll", () => greyText(), { passive: true });
  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return noTip();
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move || !view.t) return;
    event.preventDefault();
    pick(Math.max(0, Math.min(view.spans.length - 1, (view.current ?? view.t.num_prompt - 1) + move)));
  });
  $("worst").addEventListener("click", async () => {
    const turn = view.turn;
    await view.built;
    if (turn !== view.turn) return;
    box.scrollIntoView({ block: "nearest", behavior: "instant" });
    box.focus({ preventScroll: true });
    pick(view.t.num_prompt + worstOf(view.t));
  });
  for (const [id, name] of [["f-run", "run"], ["f-kept", "kept"], ["f-verdict", "verdict"], ["f-sort", "sort"]]) {
    $(id).addEventListener("change", () => { state.filter[name] = $(id).value; state.listed = ROWS; listTrajectories(); });
  }
  const steps = [...LIMITS.keys()].map((k) => k + 1);
  $("legend").append(
    el("small", {}, "gap, nats: the learner finds it less likely"),
    ...[...steps].reverse().map((k) => el("span", { class: `t gn${k}` }, `\u2212${LIMITS[k - 1]}`)), el("span", { class: "t" }, "0"), ...steps.map((k) => el("span", { class: `t gp${k}` }, `${LIMITS[k - 1]}`)),
    el("small", {}, "more likely"), el("span", { class: "t beacon" }, "\u25c6"), el("small", {}, "beacon"), el("span", { class: "t given" }, "abc"), el("small", {}, "given, in a conversation"));
}
