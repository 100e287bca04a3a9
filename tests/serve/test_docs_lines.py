"""The documents' own lines for a server, run against one: every `curl` line, and the Python clients of docs/serve.md.

Nothing in them is changed but the address and the model's name.
"""

import json
import re
import shutil
import subprocess

import openai
import pytest

from sparse_rl.integrations.client import RolloutClient
from sparse_rl.models import load_model
from tests.helpers.runs import PATIENCE
from tests.helpers.serving import served
from tests.test_docs_blocks import PAGES, Block, blocks

ADDRESS, KEY = "http://127.0.0.1:8000", "SECRET"  # in the documents


def curl_lines(block: Block) -> list[str]:
    joined = re.sub(r"\\\n\s*", "", block.text).splitlines()
    return [line.strip() for line in joined if line.strip().startswith("curl ")]


LINES = [(page, line) for page in PAGES for block in blocks(page) for line in curl_lines(block)]
CLIENTS = [
    block.text for block in blocks("docs/serve.md") if block.language == "python" and block.mark == "needs: a server"
]


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """A server with the admin key of the documents, and the folder of weights that they load."""
    root = tmp_path_factory.mktemp("weights")
    with served(tokens=400, admin_key=KEY, weights_root=root) as (address, service):
        service.model.save_pretrained(root / "step-20")
        yield address, service


@pytest.fixture
def running(started):
    """The server as it is before any update of its weights."""
    for place in started[1].desk.places.values():
        place.engine.version = 0
    return started


def test_the_documents_have_lines_to_run():
    assert {page for page, _ in LINES} >= {"docs/serve.md"} and len(LINES) >= 2 and len(CLIENTS) >= 2


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("page, line", LINES, ids=[f"{page}: {line[:60]}" for page, line in LINES])
def test_a_curl_line_is_answered(page, line, running, tmp_path, monkeypatch):
    address, service = running
    assert ADDRESS in line, f"{page}: this test knows no server at another address"
    (tmp_path / ".curlrc").write_text('silent\nshow-error\nwrite-out = "\\n%{http_code}"\n')
    monkeypatch.setenv("CURL_HOME", str(tmp_path))
    done = subprocess.run(
        line.replace(ADDRESS, address), shell=True, capture_output=True, text=True, timeout=PATIENCE, cwd=tmp_path
    )
    body, _, status = done.stdout.rpartition("\n")
    assert (done.returncode, status) == (0, "200"), f"{page}: {line}\n{done.stdout}\n{done.stderr}"
    answer, asked = json.loads(body), json.loads(line.split("-d '")[1].rstrip("'"))
    if "/v1/chat/completions" in line:
        (choice,) = answer["choices"]
        assert choice["message"]["role"] == "assistant" and choice["message"]["content"]
        assert choice["finish_reason"] in ("stop", "length")
        assert 0 < answer["usage"]["completion_tokens"] <= asked["max_tokens"]
    else:
        assert "/update_weights" in line, f"{page}: say here what the server answers to {line}"
        assert service.version == asked["version"]


def run(text: str, address: str, **names) -> dict:
    assert ADDRESS in text
    exec(
        compile(text.replace(ADDRESS, address).replace('model="mine"', 'model="sums"'), "docs/serve.md", "exec"), names
    )
    return names


def test_the_python_client_is_answered(running):
    (text,) = [text for text in CLIENTS if "openai.OpenAI" in text]
    found = run(text, running[0])
    assert found["answer"].choices[0].message.content and found["answer"].usage.completion_tokens > 0
    with openai.OpenAI(base_url=f"{running[0]}/v1", api_key="none") as client:
        again = client.chat.completions.create(model="sums", messages=[{"role": "user", "content": "Hello"}], seed=1)
    assert again.choices[0].message.content == found["answer"].choices[0].message.content


def test_the_client_for_rl_gets_trajectories_that_replay_and_sends_weights(running):
    address, service = running
    (text,) = [text for text in CLIENTS if "RolloutClient" in text]
    model, _ = load_model("tiny-sums", "float32")
    found = run(text, address, model=model)
    assert len(found["trajectories"]) == 4 and all(t.num_prompt_tokens == 3 for t in found["trajectories"])
    t = found["t"]
    assert (found["replayed"] - t.sampler_logprobs)[t.num_prompt_tokens :].abs().max() < 1e-4
    assert service.version == 20
    with RolloutClient(address) as client:
        assert client.generate([[5, 9, 7]], max_tokens=4)[0].version == 20
