"""The page at / in a browser: a chat, the switch between caches, and the map."""

import shutil

import pytest

from tests.helpers.serving import served

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the test extra")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def running():
    with served() as running:
        yield running


@pytest.fixture
def address(running):
    return running[0]


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("size", [(1280, 800), (390, 800)], ids=["desktop", "phone"])
def test_a_chat(browser, address, size, colours, tmp_path):
    page = browser.new_page(viewport=dict(zip(("width", "height"), size)), color_scheme=colours)
    problems, asked = [], []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    assert page.inner_text("#cache") == "rkv, 24 + 4 slots for each layer and KV head"
    page.fill("#text", "1+2+3+4+5+6+7+8=")
    page.fill("#temperature", "0")
    page.press("#text", "Enter")
    page.wait_for_function("document.querySelector('#send').textContent === 'Send' && running === null")
    said = page.inner_text(".said.model")
    assert said and float(page.inner_text("#speed")) > 0
    assert 0 < float(page.inner_text("#seen")) <= float(page.inner_text("#tokens"))
    assert page.evaluate("$('map').width") == int(page.inner_text("#tokens"))
    drawn = page.evaluate("""(() => {
        const map = $("map"), {data} = map.getContext("2d").getImageData(0, 0, map.width, map.height);
        const seen = colour("--seen"), same = i => seen.every((value, k) => data[i + k] === value);
        return Array.from({length: data.length / 4}, (_, i) => same(4 * i)).filter(Boolean).length / map.height;
    })()""")
    assert abs(drawn - float(page.inner_text("#seen"))) <= 0.5
    page.select_option("#model", "sums:dense")
    assert page.inner_text("#cache") == "dense cache: nothing is evicted"
    page.click("#clear")
    page.fill("#text", "2+2=")
    page.press("#text", "Enter")
    page.wait_for_function("running === null && document.querySelectorAll('.said.model').length === 1")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    assert problems == [] and all(url.startswith((address, "data:")) for url in asked)
    page.close()


def test_what_the_server_refuses_is_shown(browser, address):
    page = browser.new_page()
    page.goto(address)
    page.fill("#text", "1" * 300)
    page.press("#text", "Enter")
    page.wait_for_selector(".bad")
    assert "prompt has" in page.inner_text(".bad")
    page.close()


def test_a_new_conversation_knows_nothing_of_an_answer_that_was_stopped(browser, running):
    address, service = running
    page = browser.new_page()
    sent = []
    page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
    page.goto(address)
    service.desk.paused = True
    page.fill("#text", "1+2=")
    page.press("#text", "Enter")
    page.wait_for_function("running !== null")
    page.click("#clear")
    page.wait_for_function("running === null")
    service.desk.paused = False
    page.fill("#text", "2+2=")
    page.press("#text", "Enter")
    page.wait_for_function("running === null && document.querySelectorAll('.said.model').length === 1")
    assert [message["content"] for message in sent[-1]["messages"]] == ["2+2="]
    page.close()
