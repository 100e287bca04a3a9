// The page: its state, and how a new document takes the place of the old one without losing what the reader chose.

const state = {
  doc: null, hidden: new Set(), colours: new Map(), open: new Map(), smooth: 0, axis: "step", splitRun: null,
  filter: { run: "", kept: "", verdict: "", sort: "step" }, chosen: null, listed: ROWS,
  map: { key: null, layer: -1, head: -1, colour: "kept", zoom: 1, query: 0, grey: false, given: -1 },
};

function adopt(doc) {
  const seen = new Map();
  for (const run of doc.runs) {
    run.name = String(run.name || "run");
    run.curves ??= {};
    seen.set(run.name, (seen.get(run.name) ?? 0) + 1);
    run.id = seen.get(run.name) === 1 ? run.name : `${run.name} (${seen.get(run.name)})`;
  }
  doc.differences ??= [];
  state.doc = doc;
  doc.runs.forEach(runColour); // in their order, as pictures do
}

function show() {
  $("notes").replaceChildren(...(state.doc.notes ?? []).map((text) => el("li", {}, visible(text))));
  document.title = `Sparse-RL: ${state.doc.runs.map((run) => visible(run.name)).slice(0, 3).join(", ") || "no run"}`;
  showChips();
  showVerdicts();
  showFigures();
  showSamplers();
  showTrajectories();
  showTable();
}

function live(text, lost) {
  $("live").hidden = false;
  $("live").className = lost ? "lost" : "";
  $("live").textContent = text;
}

// Asks for the document again and again; a failure is shown, and asked again.
async function follow() {
  let before = "";
  while (state.doc.live) {
    await new Promise((go) => setTimeout(go, 1000 * state.doc.live.every));
    try {
      const answer = await fetch("data.json", { cache: "no-store", signal: AbortSignal.timeout(20000) });
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      const text = await answer.text();
      if (text !== before) {
        adopt(JSON.parse(text));
        show();
        before = text;
      }
      live(`\u25cf live \u00b7 ${new Date().toLocaleTimeString()}`, false);
    } catch (error) {
      live(`\u25cb not updating (${visible(error.message)}); trying again`, true);
    }
  }
  live("\u25cb ended", true);
}

function start() {
  adopt(JSON.parse($("data").textContent));
  makeFigures();
  listenTokens();
  listenMap();
  followTheme(() => { show(); drawMap(); });
  $("smooth").addEventListener("input", () => {
    const span = 10 ** Number($("smooth").value); // 1 / (1 - a): as many values count
    state.smooth = 1 - 1 / span;
    $("smooth-value").textContent = state.smooth ? `over ${num(span, 2)} values` : "off";
    redraw();
  });
  for (const input of document.querySelectorAll("input[name=axis]")) input.addEventListener("change", () => { state.axis = input.value; showFigures(); });
  document.addEventListener("keydown", (event) => event.key === "Escape" && noTip());
  show();
  if (state.doc.live) { live("\u25cf live", false); follow(); }
}

start();
