// The samplers of runs with a pool: where they are, and what each has done.

function showSamplers() {
  const runs = shownRuns().filter((run) => run.samplers);
  $("samplers").hidden = !runs.length;
  keepFocus($("pools"), () => $("pools").replaceChildren(...runs.map((run) => {
    const { step, samplers, hidden, gone, lost } = run.samplers;
    const most = Math.max(0, ...samplers.map((sampler) => sampler.tokens_per_s ?? 0));
    const heads = ["sampler", "node", "pieces", "tokens", "tokens/s", "lost on its node"];
    const rows = samplers.map((sampler) => el("tr", {}, el("td", {}, num(sampler.sampler)), el("td", {}, said(sampler.node, "mono")), el("td", {}, num(sampler.pieces)), el("td", {}, short(sampler.tokens)),
      el("td", {}, finite(sampler.tokens_per_s) ? rated(sampler.tokens_per_s, most) : "\u2013"), el("td", {}, num(sampler.lost))));
    const facts = [`after step ${num(step)}`, `${num(lost)} lost since the start`, ...(hidden ? [`${num(hidden)} more samplers are not shown`] : [])];
    return el("article", { class: "card pool" }, el("h3", {}, chip(run), said(run.name)), el("p", { class: "hint" }, facts.join(" \u00b7 ")),
      el("div", { class: "wide", tabIndex: 0, role: "region", "aria-label": `Samplers of ${visible(run.name)}`, "data-key": `pool ${run.id}` },
        el("table", {}, el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)))), el("tbody", {}, ...rows))),
      ...(gone.length ? [el("p", { class: "hint" }, "Lost on nodes without a sampler now: ", ...gone.slice(0, 20).flatMap(([node, count], i) => [i ? ", " : "", said(node, "mono"), ` ${num(count)}`]), gone.length > 20 ? ", ..." : "")] : []));
  })));
}

// A number with a bar as long as its share of the largest.
function rated(value, most) {
  const meter = el("meter", { min: 0, max: most || 1, value, "aria-hidden": "true" });
  return el("span", { class: "rate" }, meter, short(Number(value.toPrecision(3))));
}
