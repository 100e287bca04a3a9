"""Text, streams and evaluations on a CUDA device, where the host looks every 8 to 16 steps and steps are captured."""

import json

import pytest
import torch

import sparse_rl
from sparse_rl import Engine, Sampling, load_model, tasks
from sparse_rl.beacon import add_beacon
from sparse_rl.evaluation import Exam, Results, ask
from tests.helpers.gpu import on_gpu
from tests.helpers.models import prompts_of

pytestmark = pytest.mark.gpu
SUMS = ["2+9+9+8+6+4+8+1=", "5+5+4+2+6+4+7+4=", "1+1+2+3+5+8+1+3=", "9+9+9="]


@pytest.mark.parametrize("compressor", ["rkv", "dense", "snapkv", "beacon:4"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_is_what_the_engine_samples(compressor, temperature):
    model, tokenizer = load_model("tiny-sums")
    model = add_beacon(model) if compressor.startswith("beacon") else model
    how = {
        "compressor": compressor,
        "budget": 40,
        "interval": 4,
        "max_new_tokens": 80,
        "temperature": temperature,
        "seed": 3,
    }
    answers = sparse_rl.generate(model, tokenizer, SUMS, **how)
    expected = Engine(model, compressor, 40, 4, rows=4).generate(
        [tokenizer.encode(s) for s in SUMS], 1, Sampling(80, temperature), 3
    )
    assert answers == [tokenizer.decode(t.response_tokens, skip_special_tokens=True) for t in expected]
    single = sparse_rl.generate(model, tokenizer, SUMS[0], **how)
    pieces = list(sparse_rl.generate(model, tokenizer, SUMS[0], **how, stream=True))
    assert "".join(pieces) == single and len(pieces) > 1


def test_a_second_call_captures_nothing_anew():
    model, tokenizer = load_model("tiny-sums")
    found = []
    for _ in range(3):
        sparse_rl.generate(model, tokenizer, SUMS[0], budget=40, interval=4, max_new_tokens=40)
        (engine,) = model._sparse_rl_engines.engines.values()
        found.append((id(engine), [id(decoder) for decoder in engine.decoders.values()], torch.cuda.memory_allocated()))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("compressor", ["rkv", "dense", "beacon:4"])
def test_every_token_is_told_once(compressor):
    """Also when rows are moved together, and when a response ends within a round."""
    model = add_beacon(on_gpu("llama"))
    engine, told = Engine(model, compressor, budget=24, interval=8, rows=4), {}
    sampling = Sampling(61, stop_ids=tuple(range(0, 40)))
    done = engine.generate(
        prompts_of(5, 30, 9), 5, sampling, 1, on_tokens=lambda p, s, tokens: told.setdefault((p, s), []).append(tokens)
    )
    assert {len(t.response_tokens) for t in done} != {61}
    for t in done:
        assert [token for part in told[t.prompt_index, t.sample_index] for token in part] == t.response_tokens.tolist()


def test_an_evaluation_goes_on(tmp_path, monkeypatch):
    model, tokenizer = load_model("tiny-sums")
    task = tasks.make("sums").held_out()
    exam = Exam("sums", task, task.sample(0, 24), 2, Sampling(64))
    add = Results.add

    def stop(self, completion):
        add(self, completion)
        if len(self.ungraded) == 11:
            raise KeyboardInterrupt

    def asked():
        with Results(tmp_path, {"benches": {"sums": exam.settings()}}) as results:
            return ask(Engine(model, "rkv", 38, 4, rows=8), tokenizer, [exam], 3, results)

    with monkeypatch.context() as patch:
        patch.setattr(Results, "add", stop)
        with pytest.raises(KeyboardInterrupt):
            asked()
    kept = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    (summary,) = asked()
    items = {(i["index"], i["sample"]): i for i in map(json.loads, (tmp_path / "items.jsonl").read_text().splitlines())}
    assert len(kept) == 11 and len(items) == 48 and summary.problems == 24
    assert all(items[c["index"], c["sample"]]["text"] == c["text"] for c in kept)
