"""What trainers send: prime-rl's requests, in our words, and our own client's trajectories."""

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import save_file

from sparse_rl import Engine, Sampling, SparseRLError, token_logprobs
from sparse_rl.cache import SlotFormat
from sparse_rl.integrations.client import RolloutClient
from tests.helpers.serving import served

PROMPTS = ["1+2+3+4+5+6+7+8=", "9+9=", "3+4+5+6="]
ADMIN = {"Authorization": "Bearer root"}


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    root = tmp_path_factory.mktemp("broadcasts")
    with served(dense_rows=0, admin_key="root", weights_root=root) as (address, service):
        yield address, service, root


def test_trajectories_of_a_server_are_those_of_the_engine_and_replay(running):
    address, service, _ = running
    prompts = [service.tokenizer.encode(prompt) for prompt in PROMPTS]
    with RolloutClient(address) as client:
        got = client.generate(prompts, group_size=2, max_tokens=60, temperature=0.8, seed=4)
    engine = Engine(service.model, "rkv", budget=24, interval=4, rows=4)
    sampling = Sampling(60, temperature=0.8, stop_ids=service.stop_ids)
    assert [(t.prompt_index, t.sample_index) for t in got] == [(i, j) for i in range(3) for j in range(2)]
    for trajectory in got:
        (*_, own) = engine.generate(
            [prompts[trajectory.prompt_index]], group_size=trajectory.sample_index + 1, sampling=sampling, seed=4
        )
        assert trajectory.tokens.equal(own.tokens) and trajectory.finish_reason == own.finish_reason
        assert trajectory.trace.evicted_at.int().equal(own.trace.evicted_at.int())
        replayed = token_logprobs(service.model, trajectory.tokens, trajectory.trace, temperature=0.8)
        at = trajectory.num_prompt_tokens
        torch.testing.assert_close(trajectory.sampler_logprobs[at:], replayed[at:], atol=1e-4, rtol=0)
    assert any((t.trace.evicted_at.int() < len(t.tokens)).any() for t in got)


def test_a_trace_says_to_the_client_how_slots_were_stored():
    with served(dense_rows=0, slots="int8") as (address, service), RolloutClient(address) as client:
        (got,) = client.generate([service.tokenizer.encode(PROMPTS[0])], max_tokens=60, seed=4)
    assert got.trace.slots == SlotFormat("int8")
    at = got.num_prompt_tokens
    replayed = token_logprobs(service.model, got.tokens, got.trace)
    gap = (got.sampler_logprobs - replayed)[at:].abs()
    assert gap.median() < 1e-4 and gap.max() < 0.05  # in fp32 a code may differ
    plain = token_logprobs(service.model, got.tokens, type(got.trace)(got.trace.evicted_at))
    assert (got.sampler_logprobs - plain)[at:].abs().mean() > 10 * gap.mean()


def test_a_refusal_reaches_the_caller(running):
    with RolloutClient(running[0]) as client, pytest.raises(SparseRLError, match="the prompt has 150 tokens"):
        client.generate([[5] * 150])
    with RolloutClient("http://127.0.0.1:9") as client, pytest.raises(SparseRLError, match="does not answer"):
        client.generate([[5]])


def test_prime_rl_updates_weights(running):
    """Health and models, then pause, update from an absolute folder with a marker in it, and resume."""
    address, service, root = running
    folder = root / "step_3"
    folder.mkdir()
    (folder / "NCCL_READY").touch()
    save_file({n: p.detach().clone() for n, p in service.model.named_parameters()}, folder / "model.safetensors")
    with httpx.Client(base_url=address, headers=ADMIN, timeout=60) as admin:
        assert admin.get("/health").status_code == 200
        assert "sums" in [model["id"] for model in admin.get("/v1/models").json()["data"]]
        assert admin.post("/pause", params={"mode": "keep", "clear_cache": "false"}).status_code == 200
        before = service.desk.places["sums"].engine.version
        updated = admin.post("/update_weights", json={"weight_dir": folder.as_posix()})
        assert updated.status_code == 200 and updated.json()["version"] == before + 1
        assert admin.post("/resume").status_code == 200
        refused = admin.post("/init_broadcaster", json={"host": "x", "port": 1, "rank_offset": 0, "timeout": 1})
        assert refused.status_code == 400 and "filesystem" in refused.json()["error"]["message"]
        assert httpx.post(f"{address}/init_broadcaster", json={}).status_code == 403
        without = admin.post("/update_weights", json={"weight_dir": None})  # what comes over a broadcast
        assert without.status_code == 400


def test_prime_rl_finds_out_how_much_there_is_room_for(running):
    """By vLLM's names: the engine's label, gauges, and a size in a label; a row for each answer of full length."""
    address, service, _ = running
    found = {
        sample.name: sample
        for family in text_string_to_metric_families(httpx.get(f"{address}/metrics").text)
        for sample in family.samples
        if family.name.startswith("vllm:") and family.type == "gauge"
    }
    assert {sample.labels["engine"] for sample in found.values()} == {"0"}
    about = httpx.get(f"{address}/v1/models").json()["data"][0]
    size = int(found["vllm:cache_config_info"].labels["kv_cache_size_tokens"])
    assert size // about["max_model_len"] == service.desk.places["sums"].engine.rows == 4
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert found[f"vllm:{name}"].value == 0


def test_a_prompt_that_is_too_long_is_known_as_such(running):
    """verifiers ends an episode where these words are in a refusal; anything else is a failure of the server."""
    refused = httpx.post(f"{running[0]}/inference/v1/generate", json={"token_ids": [5] * 150})
    assert refused.status_code == 400 and "context length" in refused.json()["error"]["message"]
    assert refused.json()["error"]["code"] == "context_length_exceeded"


def test_prime_rl_scores_a_prompt(running):
    address, service, _ = running
    tokens = service.tokenizer.encode(PROMPTS[0])
    sampling = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1}
    body = {"model": "sums", "token_ids": tokens, "sampling_params": sampling, "cache_salt": "3", "priority": 0}
    answer = httpx.post(f"{address}/inference/v1/generate", json=body, timeout=60).json()
    first, *rest = answer["prompt_logprobs"]
    assert first is None and [int(next(iter(entry))) for entry in rest] == tokens[1:]
    found = torch.tensor([next(iter(entry.values()))["logprob"] for entry in rest])
    with torch.no_grad():
        logits = service.model(torch.tensor([tokens])).logits[0, :-1].float().log_softmax(-1)
    expected = logits.gather(1, torch.tensor(tokens)[1:, None])[:, 0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
