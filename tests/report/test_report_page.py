"""The page is one file: the document is in it as it was, and no text of it gets out."""

import base64
import hashlib
import json
import re

import pytest

from sparse_rl.report.page import page
from tests.helpers.planted_report import document, run

HOSTILE = (
    "</script><script>window.hacked=1</script><!-- {{script}} {{data}} \u2028\u2029\u202e\x00\ud800"
    "<img src=x onerror='window.hacked=1'>"
)


def parts(text: str) -> tuple[str, list[str], list[str], str]:
    """The policy, the styles, the scripts that run, and the data, of a page."""
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1]
    return (
        policy,
        re.findall(r"<style>(.*?)</style>", text, re.S),
        re.findall(r"<script>(.*?)</script>", text, re.S),
        data,
    )


def test_the_document_is_in_the_page_as_it_was():
    planted = document(run(HOSTILE, notes=[HOSTILE]), notes=[HOSTILE])
    text = page(planted)
    _, _, scripts, data = parts(text)
    assert json.loads(data) == planted
    assert "<" not in data and data.isascii()
    assert len(scripts) == 1 and "hacked" not in scripts[0]
    text.encode()  # lone halves of characters are escaped, so the file can be written


@pytest.mark.parametrize("live, connect", [(None, "'none'"), ({"every": 1.0}, "'self'")])
def test_the_policy_allows_our_script_and_style_and_nothing_else(live, connect):
    policy, styles, scripts, _ = parts(page(document(live=live)))
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    for name, (source,) in (("style-src", styles), ("script-src", scripts)):
        assert rules[name] == f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
    assert rules["default-src"] == "'none'" and rules["connect-src"] == connect and "unsafe" not in policy


def test_nothing_is_loaded_from_elsewhere():
    text = page(document())
    assert not re.search(
        r"https?://|\bimport\b\s*[({'\"]|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function",
        text,
    )


def test_numbers_that_json_cannot_hold_are_refused():
    with pytest.raises(ValueError):
        page(document(run("a", seconds=float("nan"))))
