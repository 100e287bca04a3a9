"""Clients as they are: lm-eval, OpenAI's with tools and cancelled tasks. (curl: tests/serve/test_docs_lines.py.)"""

import asyncio
import json
import subprocess
import sys

import openai
import pytest

from tests.helpers.runs import PATIENCE
from tests.helpers.serving import all_free, served, until

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture(scope="module")
def running():
    with served() as (address, service):
        yield address, service


@pytest.mark.parametrize("said, calls, content", [(CALL, 1, None), (f"so {CALL}{CALL}", 2, "so"), ("5<eos>", 0, None)])
def test_tools_are_called(running, monkeypatch, said, calls, content):
    """The tiny model cannot write a call, so its text is planted where tokens become text."""
    address, _ = running
    monkeypatch.setattr("sparse_rl.serve.answer.Teller.add", lambda *_: "")
    monkeypatch.setattr("sparse_rl.serve.answer.Teller.end", lambda *_: said)
    monkeypatch.setattr("sparse_rl.serve.tools.spoken", lambda *_: said)
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60)
    asked = dict(model="sums", messages=[{"role": "user", "content": "1+2="}], tools=[TOOL], seed=1, temperature=0)
    choice = client.chat.completions.create(**asked).choices[0]
    found = choice.message.tool_calls or []
    assert [(c.function.name, json.loads(c.function.arguments)) for c in found] == [("add", {"a": 1})] * calls
    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    assert choice.message.content == (content if calls else said)
    streamed, text, reason = [], "", None
    for chunk in client.chat.completions.create(stream=True, **asked):
        (part,) = chunk.choices
        streamed += part.delta.tool_calls or []
        text += part.delta.content or ""
        reason = part.finish_reason or reason
    assert [call.function.name for call in streamed] == ["add"] * calls and reason == choice.finish_reason
    assert text == (choice.message.content or "") and [call.index for call in streamed] == list(range(calls))


def test_a_cancelled_task_frees_its_rows(running):
    address, service = running

    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            settings = dict(model="sums", prompt="1+2=", max_tokens=190, n=4, extra_body={"ignore_eos": True})
            task = asyncio.create_task(client.completions.create(**settings))
            while not service.desk.running:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(ask())
    assert until(lambda: all_free(service))


GENERATE = """
task: own_generate
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["<eos>"], max_gen_toks: 20, temperature: 0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOOSE = """
task: own_choose
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: 0
doc_to_choice: "{{[answer, wrong]}}"
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@pytest.mark.others
def test_lm_eval_measures_a_server(running, tmp_path):
    """Both kinds of tasks: texts that are generated, and log-probs of an echoed prompt."""
    pytest.importorskip("lm_eval")
    address, service = running
    data = tmp_path / "data.jsonl"
    sums = [("1+2=", "3", "++"), ("2+2=", "4", "=="), ("4+5=", "9", "++")]
    data.write_text("".join(json.dumps(dict(zip(("question", "answer", "wrong"), row))) + "\n" for row in sums))
    for name, text in (("generate", GENERATE), ("choose", CHOOSE)):
        (tmp_path / f"{name}.yaml").write_text(text.replace("FILE", str(data)))
    service.tokenizer.save_pretrained(tmp_path / "tokenizer")
    given = f"model=sums,base_url={address}/v1/completions,tokenizer={tmp_path / 'tokenizer'},max_length=150"
    line = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", given]
    line += ["--tasks", "own_generate,own_choose", "--include_path", str(tmp_path), "--output_path", str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = tmp_path.rglob("results_*.json")
    found = json.loads(results.read_text())["results"]
    assert found["own_choose"]["acc,none"] == 1.0  # a digit is likelier than another sign
    assert 0 <= found["own_generate"]["exact_match,none"] <= 1
    assert until(lambda: all_free(service))
