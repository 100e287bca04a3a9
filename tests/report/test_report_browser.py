"""The report's page in a real browser, on documents whose every value is known."""

import functools
import http.server
import json
import math
import re
import shutil
import threading

import numpy as np
import pytest

from sparse_rl.report.page import page as page_of
from sparse_rl.report.palette import COLOURS, METHODS, places
from tests.helpers.planted_report import (
    MAIN,
    NEVER,
    curve,
    curves,
    deflated,
    document,
    evictions,
    packed,
    run,
    seen,
    trajectory,
)  # fmt: skip
from tests.helpers.runs import PATIENCE

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]
LEFT, RIGHT = 52, 10  # what a chart leaves free beside its curves
MAP_LEFT, MAP_RIGHT, MAP_TOP = 40, 8, 26


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the test extra")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def show(browser, tmp_path):
    """Opens the page of a document; at the end no page may have complained, or asked for anything but itself."""
    pages, said, asked = [], [], []

    def opened(planted: dict, width: int = 1280, dark: bool = False, **options):
        (tmp_path / "report.html").write_text(page_of(planted), encoding="utf-8")
        tab = browser.new_page(
            viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light", **options
        )
        tab.set_default_timeout(1000 * PATIENCE)
        pages.append(tab)
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto((tmp_path / "report.html").as_uri())
        return tab

    yield opened
    for tab in pages:
        tab.close()
    assert said == []
    assert set(asked) <= {(tmp_path / "report.html").as_uri()}


def canvas(tab, title: str, exact: bool = False):
    """The canvas of a figure, on the screen and drawn."""
    found = tab.locator("article.card", has=tab.get_by_role("heading", name=title, exact=exact)).locator("canvas")
    found.scroll_into_view_if_needed()
    tab.wait_for_function("c => c.chart.dirty === false && c.chart.drawn", arg=found.element_handle())
    return found


def drawn(tab) -> None:
    """Wait until what was asked for is on the screen."""
    tab.evaluate("() => new Promise(go => requestAnimationFrame(() => requestAnimationFrame(go)))")


def picture(tab, found) -> str:
    drawn(tab)
    return found.evaluate("c => c.toDataURL()")


def colours(found) -> int:
    return found.evaluate(
        "c => new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size"
    )


def told(tab) -> tuple[str, list[tuple[str, str]]]:
    heading = tab.inner_text("#tip b")
    return heading, list(zip(tab.locator("#tip dt").all_inner_texts(), tab.locator("#tip dd").all_inner_texts()))


def hover(tab, found, share: float) -> tuple[str, list[tuple[str, str]]]:
    """What the tip says at a share of the way along a figure."""
    box = found.bounding_box()
    tab.mouse.move(box["x"] + LEFT + share * (box["width"] - LEFT - RIGHT), box["y"] + 60)
    return told(tab)


def number(text: str) -> float:
    return float(text.replace("\u2212", "-").split()[0])


def slide(tab, selector: str, value: float) -> None:
    tab.locator(selector).evaluate(
        "(s, v) => { s.value = v; s.dispatchEvent(new Event('input', {bubbles: true})) }", value
    )
    drawn(tab)


TITLES = [
    "Reward",
    "Held-out accuracy",
    "Rejected",
    "\u03be",
    "\u03b1",
    "KL to the reference",
    "Clipped",
    "Entropy",
    "Response length",
    "KV cache",
]
TITLES += ["Sampling speed", "time goes", "Students"]


def test_every_figure_draws_every_run(show):
    two, one = show(document(run("a", seed=1), run("b", seed=2))), show(document(run("a", seed=1)))
    for title in TITLES:
        both, alone = canvas(two, title), canvas(one, title)
        assert colours(both) > 8, title
        if title != "time goes":  # of one run at a time
            assert picture(two, both) != picture(one, alone), title


def test_hover_tells_the_planted_values_of_all_runs(show):
    a, b = run("a", seed=1), run("b", seed=2)
    tab = show(document(a, b))
    found = canvas(tab, "Reward")
    for step in (1, 17, 42, 60):
        heading, rows = hover(tab, found, (step - 1) / 59)
        assert heading == f"step {step}"
        assert [name for name, _ in rows] == ["a", "b"]
        assert [number(value) for _, value in rows] == [r["curves"]["reward/mean"]["mean"][step - 1] for r in (a, b)]
    _, rows = hover(
        tab, canvas(tab, "Held-out accuracy"), 0.5
    )  # evaluations at 10, 20, ... 60: the nearest to 35 is 30 or 40
    expected = [r["curves"][f"eval/{v}/accuracy"]["mean"] for r in (a, b) for v in ("dense", "sparse")]
    assert [number(value) for _, value in rows] in ([e[2] for e in expected], [e[3] for e in expected])


def test_derived_figures_are_computed_from_the_planted_curves(show):
    a = run("a", seed=3)
    tab = show(document(a))
    c = {name: found["mean"] for name, found in a["curves"].items()}
    _, rows = hover(tab, canvas(tab, "KV cache"), 9 / 59)
    dense = c["cache/bytes/allocated"][9] / (1 - c["cache/bytes_saved/frac"][9])
    assert [number(value) for _, value in rows] == [
        float(f"{x / 2**20:.4g}") for x in (c["cache/bytes/allocated"][9], dense)
    ]
    _, rows = hover(tab, canvas(tab, "\u03be"), 9 / 59)
    assert [float(x) for x in re.findall(r"[\d.]+", rows[0][1])] == [c[f"gap/xi/{p}"][9] for p in ("p50", "p05", "p95")]
    heading, rows = hover(tab, canvas(tab, "time goes"), 9 / 59)
    seconds = [c["time/rollout"][9], c["time/update"][9]]
    whole = max(c["time/step"][9], sum(seconds))
    assert heading == "step 10" and [name for name, _ in rows] == ["rollout", "update", "other"]
    assert [number(value) for _, value in rows] == pytest.approx(
        [100 * s / whole for s in [*seconds, whole - sum(seconds)]], abs=0.06
    )


def test_bins_tell_their_extremes_and_gaps_are_gaps(show):
    values = [0.5, 0.625, None, 0.75, 0.5]
    tab = show(
        document(
            run("a", curves={"reward/mean": curve([2, 4, 6, 8, 10], values, 0.25)}, clock={"step": [], "seconds": []})
        )
    )
    found = canvas(tab, "Reward")
    assert hover(tab, found, 0.25)[1] == [("a", "0.625 (0.375 \u2026 0.875)")]
    assert hover(tab, found, 0.5) == ("step 6", [("a", "gap")])
    lines = found.evaluate("""c => { const g = c.chart.g, drawn = []; let last;
        g.moveTo = (x, y) => { last = [x, y] }; g.lineTo = (x, y) => { drawn.push([last[0], x]); last = [x, y] };
        const X = c.chart.X; c.chart.draw();
        return drawn.filter(([a, b]) => Math.min(a, b) < X(6) - 1 && Math.max(a, b) > X(6) + 1
            && Math.abs(a - b) < X(10) - X(2) - 1).length }""")
    assert lines == 0  # nothing but the axes' lines crosses the gap
    assert "Not in this run" in tab.inner_text("#absent") and "gap/alpha/p05" in tab.inner_text("#absent")


def test_smoothing_is_an_exponential_average_and_the_raw_values_stay(show):
    a = run("a", seed=4)
    tab = show(document(a))
    found = canvas(tab, "Reward")
    plain = picture(tab, found)
    slide(tab, "#smooth", 1)
    assert picture(tab, found) != plain and tab.inner_text("#smooth-value") == "over 10 values"
    values = a["curves"]["reward/mean"]["mean"][:30]
    weights = 0.9 ** np.arange(29, -1, -1)
    raw, smooth = (number(x) for x in hover(tab, found, 29 / 59)[1][0][1].split("\u223c"))
    assert (raw, smooth) == (values[29], pytest.approx(float(weights @ values / weights.sum()), rel=1e-5))


def test_smoothing_reaches_as_far_where_steps_share_a_point(show):
    """10 points of 20 steps each are smoothed as the 200 steps they stand for, each taken for the mean of its point."""
    values = [0.5, 0.9, 0.1, 0.4, 0.8, 0.2, 0.6, 0.3, 0.7, 1.0]
    tab = show(
        document(run("a", curves={"reward/mean": curve(list(range(20, 201, 20)), values, 0.1) | {"each": 20.0}}))
    )
    slide(tab, "#smooth", 1.5)
    a = 1 - 10**-1.5
    weights = a ** np.arange(199, -1, -1)
    expected = float(weights @ np.repeat(values, 20) / weights.sum())
    said = hover(tab, canvas(tab, "Reward"), 1.0)[1][0][1]
    assert number(said.split("\u223c")[1]) == pytest.approx(expected, rel=1e-5)


def test_wall_clock_axis(show):
    slow = run("slow", seed=5, clock={"step": list(range(1, 61)), "seconds": [3.0 * s for s in range(1, 61)]})
    fast = run("fast", seed=6)
    tab = show(document(slow, fast, run("none", seed=7, clock={"step": [], "seconds": []})))
    found = canvas(tab, "Reward")
    before = picture(tab, found)
    tab.locator("label", has=tab.locator("input[value=seconds]")).click()
    assert picture(tab, found) != before
    seconds = 60.0  # step 20 of the slow run, step 40 of the fast one
    _, rows = hover(tab, found, (seconds - 1.5) / (180 - 1.5))
    expected = [slow["curves"]["reward/mean"]["mean"][19], fast["curves"]["reward/mean"]["mean"][39]]
    assert [number(value) for _, value in rows] == expected
    assert "none" in tab.inner_text("#curve-hint")


def test_a_hidden_run_vanishes_everywhere(show):
    a, b = run("a", seed=1, trajectories=[trajectory()]), run("b", seed=2, trajectories=[trajectory(step=20)])
    tab, alone = show(document(a, b)), show(document(a))
    found = canvas(tab, "Reward")
    tab.click(".chip:has-text('b')")
    assert picture(tab, found) == picture(alone, canvas(alone, "Reward"))
    assert tab.locator(".verdict").count() == 1 and tab.locator("#t-list .item").count() == 1
    assert tab.locator("thead th").all_inner_texts() == ["a"]
    tab.click(".chip:has-text('b')")
    assert tab.locator(".verdict").count() == 2


def test_runs_of_one_name_are_kept_apart(show):
    a, b = run("a", seed=1), run("a", seed=2)
    tab = show(document(a, b))
    tab.click(".chip >> nth=0")
    _, rows = hover(tab, canvas(tab, "Reward"), 0)
    assert [number(value) for _, value in rows] == [b["curves"]["reward/mean"]["mean"][0]]


def test_verdicts_say_their_level_in_words_and_lead_to_their_figure(show):
    tab = show(document(run("a")))
    assert [text.split() for text in tab.locator(".verdict li .level").all_inner_texts()] == [
        ["\u2715", "fail"],
        ["!", "warn"],
        ["\u2713", "good"],
    ]
    tab.click(".figure:has-text('gap/alpha/p05')")
    assert "\u03b1" in tab.evaluate("document.activeElement.querySelector('h3').textContent")
    tab.click(".figure:has-text('rollout/loops/frac')")  # has no figure of its own
    assert tab.evaluate("document.activeElement.querySelector('h3').textContent").startswith("rollout/loops/frac")


def test_the_table_compares_and_hands_out_commands(show):
    a, b = run("a", seed=1), run("b", seed=2, command="sparse-rl train --name 'two words' \u202e")
    tab = show(
        document(
            a,
            b,
            differences=[
                {"key": "rollout.budget", "values": [38, None]},
                {"key": "loss.reject", "values": [True, [1, 2]]},
            ],
        )
    )
    rows = {
        cells[0]: cells[1:]
        for cells in tab.locator("tbody tr").evaluate_all("all => all.map(r => [...r.cells].map(c => c.innerText))")
    }
    assert (
        rows["rollout.budget"] == ["38", "null"] and rows["loss.reject"] == ["true", "[1,2]"] and "run.seed" not in rows
    )
    for label, name in (
        ("reward", "reward/mean"),
        ("dense accuracy", "eval/dense/accuracy"),
        ("sparse accuracy", "eval/sparse/accuracy"),
    ):
        means = [r["curves"][name]["mean"] for r in (a, b)]
        found = [[number(x) for x in cell.split("/")] for cell in rows[f"{label}, last / best"]]
        assert found == [[float(f"{m[-1]:.4g}"), float(f"{max(m):.4g}")] for m in means]
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.click(".copy >> nth=1")
    tab.wait_for_selector(".copy:has-text('Copied')")
    assert tab.evaluate("() => navigator.clipboard.readText()") == b["command"]  # as it is, not as it is shown
    assert "\u27e8U+202E\u27e9" in rows["to reproduce"][1]


def test_other_metrics_are_found_and_drawn(show):
    a = run("a")
    tab = show(document(a))
    tab.click("#others summary")
    tab.fill("#find", "ESS")
    assert tab.locator("#names button").all_inner_texts() == ["gap/ess/frac"]
    tab.click("#names button")
    _, rows = hover(tab, canvas(tab, "gap/ess/frac"), 0)
    assert number(rows[0][1]) == a["curves"]["gap/ess/frac"]["mean"][0]
    tab.click("#names button")
    assert tab.locator("#extra article").count() == 0


def test_keyboard_moves_along_a_curve(show):
    a = run("a")
    tab = show(document(a))
    canvas(tab, "Reward").focus()
    for key in ("Home", "ArrowRight", "ArrowRight"):
        tab.keyboard.press(key)
    assert told(tab)[0] == "step 3" and number(told(tab)[1][0][1]) == a["curves"]["reward/mean"]["mean"][2]
    tab.keyboard.press("Escape")
    assert tab.locator("#tip").is_hidden()


def test_binned_runs_keep_their_last_value_and_the_extremes_of_xi(show):
    steps = list(range(10, 110, 10))
    planted = {f"gap/xi/{p}": curve(steps, [x] * 10, 0.0625) for p, x in (("p05", 0.5), ("p50", 1.0), ("p95", 1.5))}
    planted["reward/mean"] = curve(steps, [0.5] * 10, 0.25) | {"last": 0.375}
    planted["constructor"] = curve(steps, [1.0] * 10)
    tab = show(document(run("a", curves=planted), run("b", curves={})))
    _, rows = hover(tab, canvas(tab, "\u03be"), 0.0)
    assert [float(x) for x in re.findall(r"[\d.]+", rows[0][1])] == [1.0, 0.4375, 1.5625]
    cells = tab.locator("tbody tr").evaluate_all("all => all.map(r => [...r.cells].map(c => c.innerText))")
    assert [
        "reward, last / best",
        "0.375 / 0.75",
        "\u2013",
    ] in cells  # and run b, which lacks them, takes none from elsewhere


def test_trajectories_that_look_alike_can_all_be_opened(show):
    alike = [trajectory(seed=i, step=10, prompt_index=None, sample_index=None, reward=i / 4) for i in range(3)]
    tab = show(document(run("a", trajectories=alike)))
    for i in range(3):
        tab.locator("#t-list .item").nth(i).click()
        drawn(tab)
        assert f"reward {alike[i]['reward']:g}" in " ".join(
            tab.locator("#trajectories").inner_text().split("tokens")[0].split()[-40:]
        )
        assert tab.locator("#t-list [aria-current=true], #t-list .current, #t-list [aria-selected=true]").count() <= 1


def test_trajectory_filters_and_order(show):
    kinds = [("right", True), ("wrong", True), ("wrong", False), ("unfinished", False)]
    planted = [trajectory(seed=i, step=10 * (i + 1), verdict=v, accepted=k) for i, (v, k) in enumerate(kinds)]
    tab = show(document(run("a", trajectories=planted)))
    steps = lambda: [int(re.match(r"step (\d+)", text)[1]) for text in tab.locator("#t-list .item").all_inner_texts()]  # noqa: E731
    assert steps() == [40, 30, 20, 10]
    tab.select_option("#f-kept", "rejected")
    assert steps() == [40, 30]
    tab.select_option("#f-verdict", "wrong")
    assert steps() == [30]
    tab.select_option("#f-kept", "")
    assert steps() == [30, 20]
    tab.select_option("#f-verdict", "")
    tab.select_option("#f-sort", "gap")
    worst = lambda t: max(abs(o - s) for o, s in zip(t["old"], t["sampler"]))  # noqa: E731
    assert steps() == [t["step"] for t in sorted(planted, key=worst, reverse=True)]


def test_what_others_wrote_in_a_conversation_is_shown(show):
    t = trajectory(tokens=50, prompt=12, given=[[20, 25], [40, 43]])
    for i in (*range(20, 25), *range(40, 43)):
        t["sampler"][i - 12] = t["old"][i - 12] = None
    tab = show(document(run("a", trajectories=[t])))
    assert tab.locator("#tokens .given").count() == 8
    head = tab.locator("#t-head").inner_text()
    assert "turns 3" in head and "given tokens 8" in head
    tab.locator("#tokens .t").nth(41).hover()
    assert told(tab)[1][1][1] == "given: the model did not sample it"


def test_tokens_tell_their_numbers_and_the_worst_one_is_found(show):
    t = trajectory(tokens=400, prompt=12, seed=3, beacons=(40, 60))
    tab = show(document(run("a", trajectories=[t])))
    gaps = [None if s is None else o - s for s, o in zip(t["sampler"], t["old"])]
    worst = max((i for i, g in enumerate(gaps) if g is not None), key=lambda i: abs(gaps[i]))
    tab.click("#worst")
    assert dict(told(tab)[1])["feed index"] == str(12 + worst)
    tab.keyboard.press("ArrowLeft")
    tab.keyboard.press("ArrowRight")
    facts = dict(told(tab)[1])
    shown = [
        number(facts[key])
        for key in ("sampler\u2019s probability", "old probability", "gap", "\u03be", "rank", "weight")
    ]
    expected = [math.exp(t["sampler"][worst]), math.exp(t["old"][worst]), gaps[worst], math.exp(gaps[worst])]
    assert shown == [float(f"{x:.6g}") for x in expected] + [t["rank"][worst], t["weight"][worst]]
    assert facts["clipped"] == ("yes" if t["clipped"][worst] else "no")
    tab.locator("#tokens .t").nth(40).hover()
    assert told(tab)[1][1][1] == "a beacon" and tab.locator("#tokens .beacon").all_inner_texts() == ["\u25c6"] * 2
    limits = [0.05, 0.2, 0.5, 1, 2, 4]
    shades = [
        None if g is None or abs(g) < 0.05 else ("gn" if g < 0 else "gp") + str(sum(abs(g) >= x for x in limits))
        for g in gaps
    ]
    classes = tab.locator("#tokens .t").evaluate_all("all => all.map(t => t.className)")[12:]
    assert [next(iter(re.findall(r"g[np][1-9]", c)), None) for c in classes] == shades


def grey_of(share: float) -> str:
    return "v0" if share == 0 else "v8" if share == 1 else f"v{min(7, max(1, math.floor(8 * share + 0.5)))}"


def test_the_map_tells_and_greys_what_was_planted(show):
    gone = evictions(3, 2, 50, 12, seed=1)
    tab = show(document(run("a", trajectories=[trajectory(tokens=50, gone=gone, beacons=(20,))])))
    tab.wait_for_selector("#m-canvas", state="visible")
    chart = tab.locator("#m-canvas")
    chart.scroll_into_view_if_needed()
    tall = tab.evaluate("atlas.tall")

    def cell(row: int, token: int) -> dict[str, str]:
        box = chart.bounding_box()
        width = box["width"] - MAP_LEFT - MAP_RIGHT
        tab.mouse.move(box["x"] + MAP_LEFT + (token + 0.5) / 50 * width, box["y"] + MAP_TOP + (row + 0.5) * tall)
        return dict(told(tab)[1])

    for row, token in ((0, 0), (1, 7), (3, 20), (5, 49), (4, 31)):
        layer, head, when = row // 2, row % 2, int(gone[row // 2, row % 2, token])
        facts = cell(row, token)
        assert (facts["token"].split()[0], facts["layer"], facts["head"]) == (str(token), str(layer), str(head))
        assert facts["evicted at"] == ("never" if when == NEVER else str(when))
    assert "beacon" in cell(0, 20)["token"]

    before = chart.evaluate("c => c.toDataURL()")
    for layer, head in (("-1", "-1"), ("1", "-1"), ("2", "0")):
        tab.select_option("#m-layer", layer)
        tab.select_option("#m-head", head)
        for query in (49, 30, 11):
            slide(tab, "#m-query", query)
            sees = seen(gone, query)
            part = sees[slice(None) if layer == "-1" else [int(layer)]][:, slice(None) if head == "-1" else [int(head)]]
            share = part.reshape(-1, 50).mean(0)
            expected = [grey_of(share[k]) if k <= query else "later" for k in range(50)]
            classes = tab.locator("#tokens .t").evaluate_all("all => all.map(t => t.className)")
            assert [re.search(r"\b(v\d|later)\b", c)[0] for c in classes] == expected
            count = part.sum() / len(part.reshape(-1, 50))
            assert float(re.search(r"sees ([\d.]+) of", tab.inner_text("#m-seen"))[1]) == float(f"{count:.4g}")
    assert chart.evaluate("c => c.toDataURL()") != before
    tab.uncheck("#m-grey")
    assert not tab.locator("#tokens .v0").count()


def test_the_map_tells_what_was_missed_and_the_text_what_giving_back_changes(show):
    gone = evictions(3, 2, 50, 12, seed=1)
    levels = np.where(gone == NEVER, 0, np.arange(gone.size).reshape(gone.shape) % 255).astype(np.uint8)
    changes = np.zeros((2, 50), "<i2")
    changes[0, [20, 30]], changes[1, 40] = (3000, -2500), 250
    regret = {"step": 5, "top": 2.0, "mass": deflated(levels), "tokens": [3, 9], "total": [1.5, 0.75]}
    own = {**packed(gone), "regret": {**regret, "changes": deflated(changes)}}
    given = [[42, 45]]
    tab = show(document(run("a", trajectories=[trajectory(tokens=50, map=own, given=given), trajectory(gone=gone)])))
    tab.wait_for_selector("#m-worst", state="visible")
    chart = tab.locator("#m-canvas")
    before = picture(tab, chart)
    tab.select_option("#m-colour", "missed")
    assert picture(tab, chart) != before and "missed most (2)" in tab.inner_text("#m-legend")

    chart.scroll_into_view_if_needed()
    tall, box = tab.evaluate("atlas.tall"), chart.bounding_box()
    for row, token in ((0, 10), (3, 20), (5, 31), (1, 0)):
        x = box["x"] + MAP_LEFT + (token + 0.5) / 50 * (box["width"] - MAP_LEFT - MAP_RIGHT)
        tab.mouse.move(x, box["y"] + MAP_TOP + (row + 0.5) * tall)
        facts, level = dict(told(tab)[1]), int(levels[row // 2, row % 2, token])
        if gone[row // 2, row % 2, token] == NEVER:
            assert "attention it missed here" not in facts
        else:
            expected = math.expm1(level / 254 * math.log1p(200.0)) / 100
            assert float(facts["attention it missed here"]) == pytest.approx(expected, rel=6e-3, abs=1e-6)

    buttons, text = tab.locator("#m-worst button"), tab.locator("#tokens .t")
    assert "at 3: missed 1.5; all log-probs +0.5" in buttons.nth(0).inner_text()
    assert "at 9: missed 0.75; all log-probs +0.25" in buttons.nth(1).inner_text()
    plain = text.evaluate_all("all => all.map(t => t.className)")
    buttons.nth(0).click()
    classes = text.evaluate_all("all => all.map(t => t.className)")
    neutral = classes[25]
    assert len({classes[20], classes[30], neutral}) == 3  # likelier, less likely, and unchanged
    assert {classes[i] for i in range(8, 50) if i not in (20, 30, 42, 43, 44)} == {neutral}
    assert classes[:8] == plain[:8] and classes[42:45] == plain[42:45]  # the prompt and given tokens have no log-prob
    buttons.nth(1).click()
    assert buttons.nth(0).get_attribute("aria-pressed") == "false"
    classes = text.evaluate_all("all => all.map(t => t.className)")
    assert classes[40] != neutral and classes[20] == classes[30] == neutral
    buttons.nth(1).click()  # again: back to gaps
    assert text.evaluate_all("all => all.map(t => t.className)") == plain

    tab.locator("#t-list .item").nth(1).click()  # one without regret
    tab.wait_for_selector("#m-colour option[value=missed]", state="detached")
    assert tab.eval_on_selector("#m-colour", "s => [...s.options].map(o => o.value)") == ["kept", "evicted"]
    tab.wait_for_selector("#m-canvas", state="visible")
    assert tab.is_hidden("#m-worst")


@pytest.mark.parametrize("dark", [False, True])
def test_the_picture_of_the_map_is_grey_where_nothing_is_seen(show, dark):
    gone = evictions(3, 2, 50, 12, seed=2)
    tab = show(document(run("a", trajectories=[trajectory(tokens=50, gone=gone)])), dark=dark)
    tab.wait_for_selector("#m-canvas", state="visible")
    slide(tab, "#m-query", 30)
    unseen, later = tab.evaluate("() => [rgb('unseen'), rgb('later')]")
    pixels = tab.locator("#m-canvas").evaluate(
        """(c, [left, right, top]) => { const w = c.clientWidth - left - right;
        const all = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
        const at = (x, y) => [...all.slice(4 * (Math.floor(y) * c.width + Math.floor(x))).slice(0, 3)];
        return Array.from({length: 6}, (_, r) => Array.from({length: 50}, (_, k) =>
            at(left + (k + 0.3) * w / 50, top + (r + 0.5) * atlas.tall))) }""",
        [MAP_LEFT, MAP_RIGHT, MAP_TOP],
    )
    shown = np.array(pixels)  # [rows, tokens, 3]
    sees = seen(gone, 30).reshape(6, 50)
    assert (shown[:, 31:] == later).all()
    assert ((shown[:, :31] == unseen).all(-1) == ~sees[:, :31]).all()
    tab.uncheck("#m-grey")
    before = tab.locator("#m-canvas").evaluate("c => c.toDataURL()")
    tab.select_option("#m-colour", "evicted")
    assert tab.locator("#m-canvas").evaluate("c => c.toDataURL()") != before


def test_a_map_that_cannot_be_read_is_said_so(show):
    broken = trajectory(gone=evictions(1, 1, 60, 9))
    broken["map"]["tokens"] = 61
    tab = show(document(run("a", trajectories=[broken])))
    tab.wait_for_function("() => document.getElementById('m-note').textContent.includes('120 bytes instead of 122')")
    assert tab.locator("#m-canvas").is_hidden() and tab.locator("#tokens .t").count() == 60


HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'>\u202egnp\x00\u2066\ud800"


def with_regret(gone, tokens):
    """A map whose trajectory missed some tokens."""
    changes = np.full((len(tokens), gone.shape[-1]), 1000, "<i2")
    mass = (gone != NEVER).astype(np.uint8) * 200
    regret = {"step": 5, "top": 2.0, "mass": deflated(mass), "tokens": tokens, "total": [1.5] * len(tokens)}
    return {**packed(gone), "regret": {**regret, "changes": deflated(changes)}}


def test_hostile_text_is_text(show):
    where = with_regret(evictions(1, 1, 10, 4), [3, 5])
    t = trajectory(tokens=10, prompt=2, verdict=HOSTILE, finish=HOSTILE, map=where, pieces=[HOSTILE] * 10)
    names = (HOSTILE, f"student/{HOSTILE}/kl", f"time/{HOSTILE}", "time/step", "reward/mean")
    planted = {name: curve([1, 2], [0.5, 0.75]) for name in names}
    verdict = [{"level": "bad", "text": HOSTILE, "figure": HOSTILE, "value": 1.0}]
    verdict += [{"level": HOSTILE, "text": "", "figure": "", "value": None}]
    a = run(
        HOSTILE, method=HOSTILE, command=HOSTILE, notes=[HOSTILE], curves=planted, verdict=verdict, trajectories=[t]
    )
    tab = show(
        document(a, run("b"), notes=[HOSTILE], differences=[{"key": HOSTILE, "values": [HOSTILE, {HOSTILE: 1}]}])
    )
    shown = HOSTILE
    for character in "\u202e\x00\u2066\ud800":
        shown = shown.replace(character, f"\u27e8U+{ord(character):04X}\u27e9")
    tab.click(".figure >> nth=0")
    hover(tab, canvas(tab, "Reward"), 0)
    canvas(tab, "Students")
    canvas(tab, "time goes")
    tab.locator("#m-worst button").first.click()
    assert shown in tab.locator("#m-worst [role=status]").text_content()
    tab.locator("#tokens .t").nth(5).hover()
    for place in (
        "#m-worst",
        "#chips",
        "#verdicts",
        "#notes",
        "#tokens",
        "#t-list",
        "#t-head",
        "#table",
        "#names",
        "#tip",
        "#extra",
        "#figures",
    ):
        assert shown in tab.locator(place).text_content(), place
    assert tab.evaluate("window.hacked") is None
    assert tab.locator("img, main script, body > script:not([id]) ~ *").count() == 0
    everything = tab.locator("body > :not(script)").evaluate_all("all => all.map(n => n.textContent).join('')")
    assert not re.search("[\x00\u202e\u2066]", everything)


@pytest.mark.parametrize("dark", [False, True])
def test_phone_width_and_dark(show, dark):
    long = "runs/" + "a-name-without-an-end" * 6
    where = with_regret(evictions(4, 4, 200, 40), list(range(8)))
    t = trajectory(tokens=200, map=where, verdict="x" * 80, pieces=["p" * 90] * 200)
    a = run(long, trajectories=[t], notes=["n" * 200], command="c" * 400)
    tab = show(
        document(a, run("b"), differences=[{"key": "k" * 80, "values": ["v" * 200, None]}]),
        width=360,
        dark=dark,
        has_touch=True,
    )
    tab.wait_for_selector("#m-canvas", state="visible")
    tab.wait_for_selector("#m-worst", state="visible")
    assert tab.evaluate("document.documentElement.scrollWidth") == 360
    wide = """all => all.filter(n => n.getBoundingClientRect().right > 361 && !n.closest('.wide'))
        .map(n => n.id || n.className)"""
    assert tab.locator("main *").evaluate_all(wide) == []
    canvas(tab, "Reward").tap()
    assert told(tab)[0].startswith("step") and tab.locator("#tip").bounding_box()["width"] <= 352

    def light():
        colour = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3])) > 384

    assert light() is not dark
    while "light" not in tab.inner_text("#theme"):
        tab.click("#theme")
    assert light()
    before = picture(tab, canvas(tab, "Reward"))
    tab.click("#theme")
    assert not light() and picture(tab, canvas(tab, "Reward")) != before


def test_empty_and_old_runs_are_shown(show):
    nothing = {"clock": {"step": [], "seconds": []}, "curves": {}, "verdict": [], "recipe": {}, "trajectories": []}
    bare = run("bare", points=0, method=None, command=None, notes=["no metrics.jsonl"]) | nothing
    old = trajectory(rank=None, weight=None, clipped=None)
    tab = show(document(bare, run("old", trajectories=[old])))
    assert "no metrics.jsonl" in tab.inner_text("#verdicts") and "no map of this completion" in tab.inner_text(
        "#m-note"
    )
    tab.click("#worst")
    assert dict(told(tab)[1])["rank"] == "\u2013"
    none = show(document())
    assert "There is no run here yet" in none.inner_text("#verdicts")


def test_a_big_document_is_usable(show):
    names = [*MAIN, *(f"other/metric{i}" for i in range(60 - len(MAIN)))]
    runs = [run(f"run-{i}", points=500, seed=i, curves=curves(500, i, names, spread=0.1)) for i in range(20)]
    gone = evictions(28, 8, 16_000, 512)
    runs[0]["trajectories"] = [trajectory(tokens=16_000, prompt=500, gone=gone, beacons=tuple(range(600, 16_000, 50)))]
    tab = show(document(*runs))
    _, rows = hover(tab, canvas(tab, "Reward"), 1.0)
    assert [number(value) for _, value in rows] == [r["curves"]["reward/mean"]["mean"][-1] for r in runs]
    tab.wait_for_selector("#m-canvas", state="visible")
    for query in (15_999, 8_000, 900):
        slide(tab, "#m-query", query)
        count = seen(gone, query).sum() / (28 * 8)
        assert float(re.search(r"sees ([\d.]+) of", tab.inner_text("#m-seen"))[1]) == float(f"{count:.4g}")
    tab.click("#worst")
    assert tab.locator("#tokens .t").count() == 16_000
    index = int(dict(told(tab)[1])["feed index"])
    box, at = tab.locator("#tokens").bounding_box(), tab.locator("#tokens .t[aria-current]").bounding_box()
    assert box["y"] <= at["y"] <= box["y"] + box["height"]
    share = seen(gone, 900)[..., index].mean()
    drawn(tab)
    classes = tab.locator("#tokens .t[aria-current]").get_attribute("class")
    assert re.search(r"\b(v\d|later)\b", classes)[0] == (grey_of(share) if index <= 900 else "later")


class Server(http.server.BaseHTTPRequestHandler):
    """Serves what a test says; None: as if the run's server had stopped."""

    def __init__(self, files: dict, *arguments):
        self.files = files
        super().__init__(*arguments)

    def do_GET(self):
        body = self.files.get(self.path)
        self.send_response(200 if body is not None else 503)
        self.send_header("Content-Type", "text/html; charset=utf-8" if self.path == "/" else "application/json")
        self.end_headers()
        self.wfile.write((body or "").encode())

    def log_message(self, *_):
        pass


def test_a_live_page_follows_and_keeps_what_the_reader_chose(browser):
    live = {"every": 0.05}
    planted = [trajectory(step=s, seed=s, gone=evictions(2, 2, 60, 9, s)) for s in (10, 20)]
    a, b = run("a", seed=1, trajectories=planted), run("b", seed=2)
    files = {"/": page_of(document(a, b, live=live)), "/data.json": json.dumps(document(a, b, live=live))}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Server, files))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    tab = browser.new_page()
    errors = []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    try:
        tab.goto(f"http://127.0.0.1:{server.server_port}/")
        tab.wait_for_selector("#live:has-text('live')")
        tab.click(".chip:has-text('b')")
        tab.click("#t-list .item:has-text('step 10')")
        tab.wait_for_selector("#m-canvas", state="visible")
        slide(tab, "#m-query", 33)
        slide(tab, "#smooth", 0.5)

        longer = run("a", points=90, seed=3, trajectories=[*planted, trajectory(step=30)])
        files["/data.json"] = json.dumps(document(longer, b, run("c", seed=4), live=live))
        tab.wait_for_selector(".chip:has-text('c')")
        _, rows = hover(tab, canvas(tab, "Reward"), 1.0)
        assert number(rows[0][1]) == longer["curves"]["reward/mean"]["mean"][-1] and len(rows) == 2
        assert tab.locator(".chip:has-text('b')").get_attribute("aria-pressed") == "false"
        assert tab.locator(".item[aria-current=true]").inner_text().startswith("step 10")
        assert (
            tab.input_value("#m-query") == "33"
            and tab.input_value("#smooth") == "0.5"
            and "33 of 59" in tab.inner_text("#m-seen")
        )
        assert tab.locator("#t-list .item").count() == 3

        del files["/data.json"]
        tab.wait_for_selector("#live:has-text('not updating')")
        resumed = run("a", points=20, seed=5)
        files["/data.json"] = json.dumps(document(resumed, live=live))  # resumed further back; the others are deleted
        tab.wait_for_selector(".chip:has-text('20 steps')")
        assert tab.locator(".chip").count() == 1 and "not updating" not in tab.inner_text("#live")
        _, rows = hover(tab, canvas(tab, "Reward"), 1.0)
        assert number(rows[0][1]) == resumed["curves"]["reward/mean"]["mean"][-1]
        files["/data.json"] = json.dumps(document(live=live))
        tab.wait_for_selector("#verdicts:has-text('No run')")
        assert errors == []
    finally:
        tab.close()
        server.shutdown()
        server.server_close()


def test_what_was_never_on_the_screen_is_drawn_for_printing(show):
    tab = show(document(run("a")))
    blank = """() => [...document.querySelectorAll("#figures canvas")].filter((c) => {
        const empty = Object.assign(document.createElement("canvas"), {width: c.width, height: c.height});
        return c.offsetParent && c.toDataURL() === empty.toDataURL();
    }).length"""
    assert tab.evaluate(blank) > 0
    tab.evaluate("() => dispatchEvent(new Event('beforeprint'))")
    assert tab.evaluate(blank) == 0


def test_a_method_has_its_colour_of_the_palette(show):
    arms = ["naive", "sparse-rl", "none", "none", "mine", "dense"]
    runs = [run(f"run {i}", seed=i, arm=arm) for i, arm in enumerate(arms)]
    tab = show(document(*runs, colours=METHODS))
    shown = tab.locator(".chip .swatch").evaluate_all("all => all.map((n) => getComputedStyle(n).backgroundColor)")
    expected = [tuple(int(COLOURS[place][0][i : i + 2], 16) for i in (1, 3, 5)) for place in places(arms)]
    assert shown == [f"rgb({', '.join(map(str, rgb))})" for rgb in expected]


def test_rewards_that_say_more_than_accuracy_have_figures(show):
    plain, more = run("plain", seed=1), run("more", seed=2)
    steps = more["curves"]["reward/mean"]["step"]
    plain["curves"]["reward/right/frac"] = plain["curves"]["reward/mean"]
    for cache in ("dense", "sparse"):
        plain["curves"][f"eval/{cache}/reward"] = plain["curves"][f"eval/{cache}/accuracy"]
    tab = show(document(plain))
    headings = tab.locator("article.card:visible h3").all_text_contents()
    assert headings and not {"Held-out reward", "Named rewards"} & set(headings)
    assert "Held-out reward" not in tab.locator("#absent").text_content()
    more["curves"]["reward/right/frac"] = curve(steps, [0.25] * len(steps))
    more["curves"]["reward/brief/mean"] = curve(steps, [0.5] * len(steps))
    more["curves"]["eval/dense/reward"] = curve([10, 20], [2.0, 3.0])
    tab = show(document(more))
    assert [label for label, _ in hover(tab, canvas(tab, "Reward", exact=True), 0.5)[1]] == [
        "more reward",
        "more share right",
    ]
    _, rows = hover(tab, canvas(tab, "Named rewards"), 0.5)
    assert [number(value) for _, value in rows] == [0.5]
    canvas(tab, "Held-out reward")
    more["curves"]["reward/aloud/mean"] = curve(steps, [0.7] * len(steps))
    other = run("other", curves={"reward/brief/mean": curve(steps, [0.1] * len(steps))})
    named = show(document(other, more))
    canvas(named, "Named rewards")
    keys = named.locator("article.card", has=named.get_by_role("heading", name="Named rewards")).locator(".key")
    assert [(key.inner_text(), key.get_attribute("class").split()[1:]) for key in keys.all()] == [
        ("aloud", []),
        ("brief", ["dashed"]),
    ]
    styles = "FIGURES.find((f) => f.title === 'Named rewards').series(state.doc.runs[0]).map((s) => [s.label, s.dash])"
    assert named.evaluate(styles) == [["brief", "dashed"]]  # a name has its style in every run
    table = tab.locator("#table").text_content()
    assert "share right, last / best" in table and "dense reward, last / best" in table


def test_conversations_have_figures(show):
    plain, talk = run("plain", seed=1), run("talk", seed=2)
    steps = talk["curves"]["reward/mean"]["step"]
    talk["curves"]["talk/turns/mean"] = curve(steps, [2.5] * len(steps))
    talk["curves"]["talk/tool_errors/mean"] = curve(steps, [0.25] * len(steps))
    tab = show(document(plain))
    assert "Turns of" not in tab.locator("body").inner_text() and "Turns" not in tab.locator("#absent").text_content()
    tab = show(document(talk))
    for title, value in (("Turns of a conversation", 2.5), ("Calls of tools that could not be made", 0.25)):
        assert [number(found) for _, found in hover(tab, canvas(tab, title), 0.5)[1]] == [value]


def test_ticks_of_a_curve_that_hardly_moves_do_not_look_alike(show):
    steps = [1, 2, 3]
    still = {f"gap/xi/{p}": curve(steps, [1.0, 1.0 + 1e-6, 1.0]) for p in ("p05", "p50", "p95")}
    still["old/entropy/mean"] = curve(steps, [1.0, 1.00002, 1.00004])
    still["rollout/length/mean"] = curve(steps, [10.0, 20.0, 30.0])
    tab = show(document(run("still", curves=still)))
    tab.evaluate(
        "() => { const fill = CanvasRenderingContext2D.prototype.fillText; window.told = [];"
        "CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {"
        " if (this.textAlign === 'right') window.told.push(text); fill.call(this, text, x, y); }; }"
    )
    for title in ("\u03be: learner over sampler", "Entropy", "Response length"):
        ticks = tab.evaluate(
            "(title) => { window.told = []; main.find((c) => c.figure.title === title).draw(); return window.told; }",
            title,
        )
        assert len(ticks) >= 3 and len(set(ticks)) == len(ticks), (title, ticks)
        if title.startswith("\u03be"):
            assert {"0.98", "1", "1.02"} <= set(ticks)  # rounding does not fill the figure


# ---------- samplers of a pool


def pooled(name: str, **changes) -> dict:
    """A run whose pool has samplers on two nodes, one of them with a hostile name."""
    samplers = [
        {"sampler": i, "node": node, "pieces": 40 + i, "tokens": 12_000 * (i + 1), "tokens_per_s": 900.0 - 100 * i}
        for i, node in enumerate(["gpu7 ab12cd", "gpu7 ab12cd", HOSTILE])
    ]
    lost = [{**sampler, "lost": 2 * (i < 2)} for i, sampler in enumerate(samplers)]
    found = {"step": 60, "samplers": lost, "hidden": 0, "gone": [["gpu9 <b>00</b>", 3]], "lost": 5}
    return run(name, samplers={**found, **changes})


HOSTILE = "<img src=x onerror=alert(1)>\u202eoops"


@pytest.mark.parametrize("width", [1280, 390])
def test_samplers_are_shown_with_their_nodes(show, width):
    tab = show(document(pooled("runs/pool"), run("runs/alone", seed=1)), width=width)
    section = tab.locator("#samplers")
    assert section.is_visible() and section.locator("article").count() == 1
    rows = [row.locator("td").all_inner_texts() for row in section.locator("tbody tr").all()]
    assert rows[0] == ["0", "gpu7 ab12cd", "40", "12k", "900", "2"] and rows[1][5] == "2"
    assert rows[2][1] == "<img src=x onerror=alert(1)>\u27e8U+202E\u27e9oops" and rows[2][5] == "0"
    assert section.locator("img").count() == section.locator("b").count() == 0
    text = section.inner_text()
    assert "after step 60" in text and "5 lost since the start" in text and "gpu9 <b>00</b> 3" in text
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.locator("#chips button").first.click()  # hides the run
    assert not section.is_visible()


def test_a_page_without_pools_has_no_samplers(show):
    tab = show(document(run("runs/alone"), run("runs/other", seed=1, samplers=None)))
    assert tab.locator("#samplers").is_hidden()


def test_samplers_that_are_not_shown_are_counted(show):
    odd = {"sampler": 0, "node": "", "pieces": 0, "tokens": 0, "tokens_per_s": None, "lost": 0}
    tab = show(document(pooled("runs/pool", samplers=[odd], hidden=88, step=None, gone=[])), dark=True)
    assert "88 more samplers are not shown" in tab.locator("#samplers").inner_text()
    assert tab.locator("#samplers tbody td").all_inner_texts()[4] == "\u2013"
