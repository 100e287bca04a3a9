"""`sparse-rl serve`, asked by OpenAI's own client."""

import base64
import json
import threading

import numpy as np
import openai
import pytest
import torch

import sparse_rl
from sparse_rl import Sampling, Trace, token_logprobs
from tests.helpers.serving import TOKENS, all_free, served, until

PROMPT = "1+2+3+4+5+6+7+8="
CHAT = [{"role": "user", "content": PROMPT}]
SAMPLED = {"temperature": 1.0, "seed": 5}


@pytest.fixture(scope="module")
def running():
    with served() as (address, service):
        yield address, service


@pytest.fixture(scope="module")
def client(running):
    return openai.OpenAI(base_url=f"{running[0]}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def service(running):
    return running[1]


def own_text(service, prompt, seed, sample=0, new=60, **settings):
    """The completion that the engine itself gives, on a cache of its own."""
    ids = service.tokenizer.encode(prompt)
    engine = sparse_rl.Engine(service.model, "rkv", budget=24, interval=4, rows=4)
    sampling = Sampling(new, stop_ids=service.stop_ids, **settings)
    done = engine.generate([ids], group_size=sample + 1, sampling=sampling, seed=seed)[sample]
    return service.tokenizer.decode(done.response_tokens, skip_special_tokens=True), done


def test_a_completion_is_the_engines(client, service):
    got = client.completions.create(model="sums", prompt=PROMPT, max_tokens=60, n=3, **SAMPLED)
    assert [choice.text for choice in got.choices] == [own_text(service, PROMPT, 5, i)[0] for i in range(3)]
    assert got.usage.prompt_tokens == len(PROMPT) and got.usage.completion_tokens > 0


def test_a_stream_has_the_same_text_and_says_why_it_ended(client, service):
    chunks = list(
        client.chat.completions.create(
            model="sums", messages=CHAT, max_tokens=60, stream=True, stream_options={"include_usage": True}, **SAMPLED
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    whole = client.chat.completions.create(model="sums", messages=CHAT, max_tokens=60, **SAMPLED)
    expected, done = own_text(service, f"u:{PROMPT}<eos>a:", 5)
    assert text == whole.choices[0].message.content == expected
    ended = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1]
    assert ended == whole.choices[0].finish_reason == done.finish_reason
    assert chunks[-1].usage == whole.usage


def test_the_text_is_that_of_generate(client, service):
    text = sparse_rl.generate(
        service.model, service.tokenizer, PROMPT, "rkv", 24, 4, max_new_tokens=60, temperature=1.0, seed=9
    )
    got = client.completions.create(model="sums", prompt=PROMPT, max_tokens=60, temperature=1.0, seed=9)
    assert got.choices[0].text == text


def test_log_probs_are_those_of_a_replay(client, service, running):
    got = client.completions.create(
        model="sums", prompt=PROMPT, max_tokens=60, logprobs=3, extra_body={"return_token_ids": True, "trace": True},
        temperature=0.7, seed=3,
    )  # fmt: skip
    choice = got.choices[0]
    prompt, tokens = choice.model_extra["prompt_token_ids"], choice.model_extra["token_ids"]
    content = client.get(f"/traces/{choice.model_extra['trace_id']}", cast_to=openai.HttpxBinaryResponseContent)
    trace = Trace.from_bytes(content.read())
    assert trace.num_tokens == len(prompt + tokens) and (trace.evicted_at.int() < 65535).any()
    replayed = token_logprobs(service.model, torch.tensor(prompt + tokens), trace, temperature=0.7)[len(prompt) :]
    torch.testing.assert_close(torch.tensor(choice.logprobs.token_logprobs), replayed.cpu(), atol=1e-4, rtol=0)
    for text, value, top in zip(*(getattr(choice.logprobs, n) for n in ("tokens", "token_logprobs", "top_logprobs"))):
        assert len(top) == 3 and max(top.values()) >= value - 1e-4
        assert text not in top or abs(top[text] - value) < 1e-4


def test_an_echoed_prompt_has_log_probs(client, service):
    got = client.completions.create(model="sums", prompt=PROMPT, max_tokens=1, logprobs=1, echo=True, temperature=0)
    found = got.choices[0].logprobs.token_logprobs
    ids = torch.tensor(service.tokenizer.encode(PROMPT))
    with torch.no_grad():
        logits = service.model(ids[None]).logits[0].float().log_softmax(-1)
    expected = logits[:-1].gather(1, ids[1:, None])[:, 0]
    assert found[0] is None and got.choices[0].text.startswith(PROMPT)
    torch.testing.assert_close(torch.tensor(found[1 : len(ids)]), expected, atol=1e-4, rtol=0)


def test_a_stop_string_ends_the_text_before_it(client, service):
    whole, _ = own_text(service, PROMPT, 5)
    middle = whole[4:6]
    settings = dict(model="sums", prompt=PROMPT, max_tokens=60, stop=[middle, "never"], **SAMPLED)
    got = client.completions.create(**settings).choices[0]
    assert got.text == whole[: whole.find(middle)]
    assert got.finish_reason == "stop" and got.model_extra["stop_reason"] == middle
    assert "".join(c.choices[0].text for c in client.completions.create(stream=True, **settings)) == got.text


def test_requests_do_not_know_of_each_other(client, service):
    prompts = [PROMPT, "3+4+5=", "9+9+9+9+9+9=", "1+1=", "7+2+7+2+7+2+7+2="]
    got = {}

    def ask(i):
        answer = client.completions.create(model="sums", prompt=prompts[i % 5], max_tokens=50, temperature=1.0, seed=i)
        got[i] = answer.choices[0].text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(15)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {i: own_text(service, prompts[i % 5], i, new=50)[0] for i in range(15)}
    assert all_free(service)


def test_a_client_that_hangs_up_frees_its_row(client, service):
    before = service.desk.counts.cancelled
    stream = client.completions.create(
        model="sums", prompt=PROMPT, max_tokens=150, stream=True, extra_body={"ignore_eos": True}, **SAMPLED
    )
    next(iter(stream))
    stream.close()
    assert until(lambda: all_free(service))
    assert service.desk.counts.cancelled == before + 1


def test_the_dense_cache_is_another_model(client, service):
    names = [model.id for model in client.models.list()]
    assert names == ["sums", "sums:dense"]
    got = client.completions.create(model="sums:dense", prompt=PROMPT, max_tokens=60, **SAMPLED)
    engine = sparse_rl.Engine(service.model, "dense", rows=4)
    sampling = Sampling(60, stop_ids=service.stop_ids)
    (done,) = engine.generate([service.tokenizer.encode(PROMPT)], sampling=sampling, seed=5)
    assert got.choices[0].text == service.tokenizer.decode(done.response_tokens, skip_special_tokens=True)


@pytest.mark.parametrize("logprobs", [0, 1])
def test_token_ids_in_token_ids_out(client, service, logprobs):
    ids = service.tokenizer.encode(PROMPT)
    sampling = {"max_tokens": 60, "temperature": 1.0, "seed": 5, "logprobs": logprobs}
    got = client.post("http://ignored/inference/v1/generate".replace("http://ignored", str(client.base_url)[:-4]),
                      body={"token_ids": ids, "sampling_params": sampling}, cast_to=object)  # fmt: skip
    _, done = own_text(service, PROMPT, 5)
    (choice,) = got["choices"]
    assert choice["token_ids"] == done.response_tokens.tolist()
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{i}" for i in choice["token_ids"]]  # as vLLM names them
    assert not any(entry["top_logprobs"] for entry in content)
    found = torch.tensor([entry["logprob"] for entry in content])
    torch.testing.assert_close(found, done.sampler_logprobs[len(ids) :], atol=1e-6, rtol=0)
    assert got["weight_version"] == 0


def test_the_map_of_what_is_seen_is_that_of_the_trace(client, monkeypatch):
    monkeypatch.setattr("sparse_rl.serve.desk._LOOK", 0.0)
    stream = client.completions.create(
        model="sums", prompt=PROMPT, max_tokens=60, stream=True, extra_body={"map": True, "trace": True}, **SAMPLED
    )
    looks, last = [], None
    for chunk in stream:
        last = chunk.choices[0].model_extra
        looks += [last["seen"]] if "seen" in last else []
    content = client.get(f"/traces/{last['trace_id']}", cast_to=openai.HttpxBinaryResponseContent)
    evicted_at = Trace.from_bytes(content.read()).evicted_at.long().flatten(0, 1)  # [L * H, T]
    assert len(looks) > 10 and any(not look_of(look).all() for look in looks)
    for look in looks:
        assert look_of(look).equal(evicted_at[:, : look["tokens"]] >= look["tokens"])


def look_of(look):
    packed = np.frombuffer(base64.b64decode(look["bits"]), np.uint8).reshape(look["heads"], -1)
    return torch.from_numpy(np.unpackbits(packed, axis=1)[:, : look["tokens"]].astype(bool))


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, {"prompt": "1+", "temperature": -1}),
        (400, {"prompt": "1+", "n": 0}),
        (400, {"prompt": []}),
        (400, {"prompt": [1, 10**6]}),
        (400, {"prompt": "1" * TOKENS}),
        (400, {"prompt": "1+", "stop": ""}),
        (400, {"prompt": "1+", "frequency_penalty": 0.5}),
        (400, {"prompt": "1+", "logprobs": 2, "stream": True}),
        (400, {"prompt": "1+", "response_format": {"type": "json_object"}}),
        (404, {"prompt": "1+", "model": "another"}),
    ],
)
def test_a_refusal_has_openais_shape(client, status, body):
    with pytest.raises(openai.APIStatusError) as refused:
        client.post("/completions", body=body, cast_to=object)
    assert refused.value.status_code == status
    error = json.loads(refused.value.response.text)["error"]
    assert error["message"] and error["type"] == "invalid_request_error"
