// Runs: chips that hide them, their verdicts, and the table that compares them.

const LEVELS = { fail: ["\u2715", "fail"], warn: ["!", "warn"], good: ["\u2713", "good"] };

const shownRuns = () => state.doc.runs.filter((run) => !state.hidden.has(run.id));
// The colour of a run's method if no other run has it, else one that no method of this page has (palette.py). It stays.
function runColour(run) {
  if (!state.colours.has(run.id)) {
    const methods = state.doc.colours ?? {};
    const taken = new Set(state.colours.values());
    const shown = new Set(state.doc.runs.map((other) => methods[other.arm]));
    const free = Array.from({ length: 20 }, (_, place) => place).filter((place) => !taken.has(place) && !shown.has(place));
    const own = methods[run.arm];
    state.colours.set(run.id, own !== undefined && !taken.has(own) ? own : free[0] ?? state.colours.size % 20);
  }
  return colour(`run${state.colours.get(run.id)}`);
}
const chip = (run) => swatch(runColour(run));

// Rebuild part of the page; the button that had the focus has it again.
function keepFocus(node, build) {
  const key = node.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  build();
  if (key !== undefined) [...node.querySelectorAll("[data-key]")].find((n) => n.dataset.key === key)?.focus({ preventScroll: true });
}

function showChips() {
  $("subject").textContent = state.doc.runs.length === 1 ? visible(state.doc.runs[0].name) : `${state.doc.runs.length} runs`;
  keepFocus($("chips"), () => $("chips").replaceChildren(...state.doc.runs.map((run) => el("button", {
    type: "button", class: "chip", "data-key": run.id, "aria-pressed": String(!state.hidden.has(run.id)), title: "press to hide or show", click: () => toggleRun(run.id),
  }, chip(run), said(run.name), ...(state.doc.runs.length > 6 ? [] : [el("small", {}, `${run.steps ?? 0} steps`)])))));
  $("chips").hidden = !state.doc.runs.length;
}

function toggleRun(id) {
  if (state.hidden.has(id)) state.hidden.delete(id);
  else state.hidden.add(id);
  show();
}

const noteList = (notes) => el("ul", { class: "notes" }, ...notes.map((text) => el("li", {}, visible(text))));

function showVerdicts() {
  const many = shownRuns().length > 4;
  const rank = Object.keys(LEVELS);
  keepFocus($("verdicts"), () => $("verdicts").replaceChildren(...shownRuns().map((run) => {
    const verdict = [...(run.verdict ?? [])].sort((a, b) => rank.indexOf(a.level) - rank.indexOf(b.level));
    const counts = rank.map((level) => [level, verdict.filter((v) => v.level === level).length]).filter(([, n]) => n);
    const box = el("details", { class: "verdict", open: state.open.get(run.id) ?? !many },
      el("summary", { "data-key": `verdict ${run.id}` }, chip(run), said(run.name), el("small", {}, visible([run.method, `${run.steps ?? 0} steps`, run.seconds ? seconds(run.seconds) : null].filter(Boolean).join(" \u00b7 "))),
        el("span", { class: "counts" }, ...counts.map(([level, n]) => el("span", { class: `level ${level}` }, `${LEVELS[level][0]} ${n} ${level}`)))),
      el("ul", {}, ...verdict.map((v) => sentence(run, v)), ...(verdict.length ? [] : [el("li", { class: "hint" }, "No verdict: the run has too few numbers to judge.")])));
    if (run.notes?.length) box.append(noteList(run.notes));
    box.firstChild.addEventListener("click", () => state.open.set(run.id, !box.open));
    return box;
  }), ...(state.doc.runs.length ? [] : [el("p", { class: "hint" }, "There is no run here yet.")])));
}

function sentence(run, { level, text, figure, value }) {
  const [mark, word] = LEVELS[level] ?? ["?", String(level)];
  const link = figure ? [" ", el("button", { type: "button", class: "figure", "data-key": `${run.id} ${figure}`, title: "show the curve", click: () => goTo(figure) }, visible(figure), finite(value) ? ` ${num(value, 4)}` : "")] : [];
  return el("li", {}, el("span", { class: `level ${level in LEVELS ? level : ""}` }, `${mark} ${visible(word)}`), el("span", {}, visible(text), ...link));
}

const best = (values) => values.filter(finite).reduce((a, b) => (a === undefined || b > a ? b : a), undefined);

function showTable() {
  const runs = shownRuns();
  const of = (name) => (run) => { const c = curve(run, name); return c.step.length ? `${num(c.last, 4)} / ${num(best(c.high), 4)}` : "\u2013"; };
  const facts = [
    ["method", (run) => visible(run.method ?? "\u2013")],
    ["steps", (run) => num(run.steps)],
    ["wall clock", (run) => seconds(run.seconds)],
    ["dense accuracy, last / best", of("eval/dense/accuracy")],
    ["sparse accuracy, last / best", of("eval/sparse/accuracy")],
    ["reward, last / best", of("reward/mean")],
    ...(runs.some((run) => apart(run, "reward/mean", "reward/right/frac")) ? [["share right, last / best", of("reward/right/frac")]] : []),
    ...["dense", "sparse"].filter((cache) => runs.some((run) => apart(run, `eval/${cache}/reward`, `eval/${cache}/accuracy`))).map((cache) => [`${cache} reward, last / best`, of(`eval/${cache}/reward`)]),
  ];
  const place = new Map(state.doc.runs.map((run, i) => [run, i]));
  const differing = state.doc.differences.map(({ key, values }) => [said(key, "mono"), (run) => setting(values[place.get(run)])]);
  const rows = [...facts, ...differing].map(([label, value]) => el("tr", {}, el("th", { scope: "row" }, label), ...runs.map((run) => el("td", {}, value(run)))));
  const head = el("tr", {}, el("td"), ...runs.map((run) => el("th", { scope: "col" }, chip(run), said(run.name))));
  const commands = el("tr", {}, el("th", { scope: "row" }, "to reproduce"), ...runs.map((run) => el("td", {}, command(run))));
  keepFocus($("table"), () => $("table").replaceChildren(
    ...(runs.length ? [el("div", { class: "wide", tabIndex: 0, role: "region", "aria-label": "Comparison" }, el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows, commands)))] : []),
    el("p", { class: "hint" }, differing.length ? "Only the settings that differ are shown." : runs.length > 1 ? "The recipes of these runs do not differ." : "")));
}

const setting = (value) => said(value === null || value === undefined ? "null" : typeof value === "object" ? JSON.stringify(value) : value, "mono");

function command(run) {
  if (!run.command) return "\u2013";
  const code = el("code", {}, visible(run.command));
  const copy = el("button", { type: "button", class: "copy", "data-key": `copy ${run.id}`, click: () => copyText(run.command, code, copy) }, "Copy");
  return el("div", { class: "command" }, code, copy);
}

// To the clipboard; where the browser has none for this page, the text is selected instead.
function copyText(text, node, button) {
  const tell = (word) => { button.textContent = word; setTimeout(() => { button.textContent = "Copy"; }, 1500); };
  const select = () => { getSelection().selectAllChildren(node); tell("Selected"); };
  if (!navigator.clipboard) return select();
  navigator.clipboard.writeText(text).then(() => tell("Copied"), select);
}
