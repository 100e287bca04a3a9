// Regret: how much evicted tokens were missed, and what the text would have been worth had one stayed.

const FINE = 100; // as in report/hindsight.py
const NOTHING_MISSED = { mass: null, top: 0, changes: null, tokens: [], total: [] };
const missed = { ...NOTHING_MISSED }; // of the trajectory whose map is open

async function readRegret(map) {
  const found = map.regret;
  if (!found) return null;
  const mass = new Uint8Array(await inflate(found.mass, map.layers * map.heads * map.tokens));
  const changes = new Int16Array(await inflate(found.changes, 2 * found.tokens.length * map.tokens));
  return { mass, changes, top: found.top, tokens: found.tokens, total: found.total };
}

const massOf = (level) => Math.expm1((level / 254) * Math.log1p(FINE * missed.top)) / FINE;
const isMissing = () => state.map.colour === "missed" && missed.mass !== null;

// The colour of cells: the token of a cell that was missed most.
function missedShade(row, from, to) {
  let [most, stayed] = [0, true];
  for (let k = from; k < to; k++) {
    if (atlas.gone[row * atlas.tokens + k] !== NEVER) stayed = false;
    most = Math.max(most, missed.mass[row * atlas.tokens + k]);
  }
  return stayed ? 255 : most;
}

// How the log-prob of token i changes if the chosen token had stayed, in nats; null: none is chosen.
const changeOf = (i) => (state.map.given < 0 || !missed.changes ? null : missed.changes[state.map.given * atlas.tokens + i] / 1000);

function missedFacts(i) {
  if (!missed.mass) return [];
  const sum = atlas.rows.reduce((n, row) => n + massOf(missed.mass[row * atlas.tokens + i]), 0);
  const change = changeOf(i);
  return [["attention it missed", num(sum, 3)], ...(change === null ? [] : [["change if given back, nats", num(change, 3)]])];
}

function showWorst() {
  const box = $("m-worst");
  box.hidden = !missed.tokens.length;
  if (box.hidden) return;
  const { t } = atlas;
  const chosen = state.map.given;
  const name = (k) => el("span", { class: "said mono" }, t.pieces[k] ? visible(t.pieces[k]) : "\u27e8\u27e9");
  const gain = (n) => { let sum = 0; for (let i = t.num_prompt; i < atlas.tokens; i++) if (!isGiven(t, i)) sum += missed.changes[n * atlas.tokens + i]; return sum / 1000; };
  const give = (n) => { state.map.given = state.map.given === n ? -1 : n; showWorst(); greyText(); };
  keepFocus(box, () => box.replaceChildren(
    el("h3", {}, "Missed most"),
    el("p", { class: "hint" }, `Attention that later queries would have given to evicted tokens, asked with the weights of step ${t.map.regret.step}. Give one back, and the text is coloured by how its log-probs change.`),
    el("div", { class: "filters" }, ...missed.tokens.map((k, n) => el("button", { type: "button", "data-key": String(n), "aria-pressed": String(n === chosen), click: () => give(n) },
      name(k), el("small", {}, ` at ${k}: missed ${num(missed.total[n], 3)}; all log-probs ${gain(n) < 0 ? "" : "+"}${num(gain(n), 3)}`)))),
    el("p", { class: "hint", role: "status" }, ...(chosen < 0 ? ["The text is coloured by gaps."] : ["Had ", name(missed.tokens[chosen]), ` at ${missed.tokens[chosen]} stayed, blue or red tokens above would be more or less likely; press again for gaps.`]))));
}
