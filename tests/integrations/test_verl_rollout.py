"""Rollouts of verl on our engine: the server that verl's clients ask, alone and inside verl's own classes.

verl is the real one if it is installed, or else a stand-in (tests/helpers/peers.py); what needs Ray and verl is skipped
there.
"""

import asyncio
import importlib.util
import os
import pickle
import time
from argparse import Namespace

import pytest
import torch
from safetensors.torch import save

from sparse_rl import Engine, Sampling, SparseRLError, load_model, token_logprobs
from sparse_rl.integrations.verl_server import RolloutServer, Settings, check_config
from sparse_rl.integrations.verl_weights import copy_weights, missing
from sparse_rl.models import stop_ids
from tests.helpers import peers

REAL_VERL = importlib.util.find_spec("verl") is not None
OURS = {"compressor": "rkv", "budget": 24, "interval": 4, "rows": 4, "options": {"protect_prompt": False}}
PROMPT = [5, 12, 6, 12, 9, 13]


@pytest.fixture(autouse=True)
def verl(monkeypatch):
    if not REAL_VERL:
        peers.stand_in_for_verl(monkeypatch)


def config(**changes) -> Namespace:
    plain = dict(
        engine_kwargs={"sparse_rl": OURS}, dtype="float32", max_model_len=120, prompt_length=40, response_length=60,
        free_cache_engine=True, max_num_seqs=64, seed=3, ignore_eos=False,
    )  # fmt: skip
    return Namespace(**{**plain, **changes})


def serve(work, model="tiny-sums", shares=True, **changes):
    """Run `work(server)` in an event loop."""

    async def run():
        server = RolloutServer(config(**changes), str(model), 0, shares)
        try:
            return await work(server)
        finally:
            if server.desk is not None:
                server.desk.stop()

    return asyncio.run(run())


def ask(server, name, **params):
    return server.generate(PROMPT, {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True, **params}, name)


def test_answers_are_those_of_the_engine_and_replay(verl):
    """A group of requests that are alike but for their ids, more than there are rows."""

    async def work(server):
        answers = await asyncio.gather(*[ask(server, f"request {i}", ignore_eos=True) for i in range(9)])
        return answers, [server._seed_of(None, f"request {i}") for i in range(9)]

    answers, seeds = serve(work)
    model, _ = load_model("tiny-sums")
    engine = Engine(model, "rkv", 24, 4, rows=4)
    assert len({tuple(answer.token_ids) for answer in answers}) > 1  # members of a group differ
    for answer, seed in zip(answers, seeds, strict=True):
        (expected,) = engine.generate([PROMPT], sampling=Sampling(60, stop_ids=()), seed=seed)
        assert answer.token_ids == expected.response_tokens.tolist() and len(answer.token_ids) == 60
        assert answer.stop_reason == "completed" and answer.extra_fields["global_steps"] is None
        replayed = token_logprobs(model, expected.tokens, trace=expected.trace)[len(PROMPT) :]
        torch.testing.assert_close(torch.tensor(answer.log_probs), replayed.detach(), rtol=0, atol=1e-5)
        assert (expected.trace.evicted_at.long() < len(expected.tokens)).any()  # on a cache that evicts


def test_requests_are_read_as_vllm_s(verl):
    async def work(server):
        own = stop_ids(server.model, server.tokenizer)
        sampling, strings, _, logprobs = server.sampling_of({}, 10, "a")
        assert sampling == Sampling(60, stop_ids=tuple(own)) and strings == [] and not logprobs
        asked = {"max_tokens": 500, "top_k": 7, "top_p": 0.5, "temperature": 0, "stop": "x", "stop_token_ids": [3]}
        sampling, strings, _, logprobs = server.sampling_of({**asked, "logprobs": 0}, 100, "a")
        assert (sampling.max_new_tokens, sampling.top_k, sampling.temperature, strings) == (20, 7, 0.0, ["x"])
        assert set(sampling.stop_ids) == {*own, 3} and sampling.top_p == 0.5
        assert server.sampling_of({"ignore_eos": True}, 70, "a")[0] == Sampling(30, stop_ids=())  # 40 + 60 - 70
        assert server.sampling_of({"max_new_tokens": 4, "repetition_penalty": 1.0}, 5, "a")[0].max_new_tokens == 4
        assert server._seed_of(1, "a") != server._seed_of(2, "a") != server._seed_of(2, "b")
        for asked, said in (
            ({"repetition_penalty": 1.1}, "repetition_penalty is 1.1, which sparse rollouts do not support"),
            ({"logit_bias": {}}, "brings 'logit_bias', which sparse rollouts do not know"),
        ):
            with pytest.raises(SparseRLError, match=said):
                server.sampling_of(asked, 10, "a")
        with pytest.raises(SparseRLError, match="the prompt has 120 tokens, but a prompt with its answer may have 120"):
            server.sampling_of({}, 120, "a")
        with pytest.raises(SparseRLError, match="images"):
            await server.generate(PROMPT, {}, "a", image_data=[1])
        nothing = dict.fromkeys(("max_tokens", "top_k", "temperature", "stop", "seed", "prompt_logprobs", "min_p"))
        assert server.sampling_of(nothing, 10, "a")[0] == server.sampling_of({}, 10, "a")[0]
        server.config.repetition_penalty = 1.2  # verl's vLLM server has it where a request has none
        with pytest.raises(SparseRLError, match=r"repetition_penalty is 1.2"):
            server.sampling_of({}, 10, "a")

    serve(work)


def test_a_pause_ends_answers_with_what_they_have_and_holds_others_back(verl):
    async def work(server):
        running = asyncio.create_task(ask(server, "first", ignore_eos=True))
        while not server._running or not server.desk.counts.generated_tokens:
            await asyncio.sleep(0)
        assert (await server.abort_all_requests())["request_ids"] == ["first"]
        cut = await running
        assert cut.stop_reason == "aborted" and len(cut.token_ids) == len(cut.log_probs) < 60
        late = asyncio.create_task(ask(server, "late"))
        await asyncio.sleep(0.05)
        assert not late.done() and server.desk.counts.requests == 1  # it waits outside
        await server.resume_generation()
        assert (await late).stop_reason == "completed"
        await server.abort_all_requests(reject_request=True)
        refused = await ask(server, "refused")
        assert (refused.stop_reason, refused.token_ids, refused.log_probs) == ("aborted", [], None)
        await server.resume_generation()
        one = asyncio.create_task(ask(server, "one", ignore_eos=True))
        two = asyncio.create_task(ask(server, "two", ignore_eos=True))
        while len(server._running) < 2:
            await asyncio.sleep(0)
        assert (await server.abort_request("one"))["aborted"] and not (await server.abort_request("none"))["aborted"]
        assert ((await one).stop_reason, (await two).stop_reason) == ("aborted", "completed")
        await server.desk.work(lambda: None)
        assert server._running == [] and server.desk.rows_in_use == 0

    serve(work)


@pytest.mark.parametrize("shares", [True, False])
def test_memory_goes_to_the_trainer_and_back(verl, shares):
    async def work(server):
        before = await ask(server, "a")
        await server.sleep()
        assert (server.desk is None) == shares
        waits = asyncio.create_task(ask(server, "a"))
        await asyncio.sleep(0.05)
        if shares:
            assert not waits.done()
            await server.wake_up(["weights"])
            assert server.desk is None
            await server.wake_up(["kv_cache"])
        assert (await waits).token_ids == before.token_ids
        await server.release_kv_cache()
        await server.resume_kv_cache()
        assert (await ask(server, "a")).token_ids == before.token_ids

    serve(work, shares=shares)


def test_an_engine_that_fails_tells_verl_why_and_goes_on(verl):
    def fail(sample=True, meanwhile=None):
        raise RuntimeError("out of memory")

    async def work(server):
        live = server.desk.places["verl"].live
        close, live.step, live.close = live.close, fail, lambda: (time.sleep(0.1), close())
        errors = await asyncio.gather(ask(server, "a"), ask(server, "b"), return_exceptions=True)
        again = (await asyncio.gather(ask(server, "a"), return_exceptions=True))[0]  # at once: heard, not lost
        assert "try again" in str(again) or again.stop_reason == "completed"
        while server.desk.places["verl"].live is live:
            await asyncio.sleep(0)
        errors += await asyncio.gather(server.generate([10**6], {}, "c"), return_exceptions=True)
        assert server._running == [] and server.desk.open == 0
        assert (await ask(server, "d")).stop_reason == "completed"
        return [pickle.loads(pickle.dumps(error)) for error in errors]  # as Ray hands them over

    errors = serve(work)
    assert all(type(error) is SparseRLError for error in errors)
    assert ["out of memory" in str(error) for error in errors] == [True, True, False] and "1000000" in str(errors[2])


def test_a_request_whose_client_is_gone_leaves_nothing_behind(verl):
    async def work(server):
        gone = asyncio.create_task(ask(server, "gone", ignore_eos=True))
        while not server.desk.counts.generated_tokens:
            await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert gone.cancelled() and server._running == []
        while server.desk.open or server.desk.rows_in_use:
            await asyncio.sleep(0)
        await server.sleep()  # waits for nobody

    serve(work)


def test_as_many_requests_may_wait_as_ray_lets_in(verl):
    """Replica.max_concurrency of verl: those that run and those that wait, before the first one has a row."""

    async def work(server):
        tasks = [asyncio.create_task(ask(server, str(i))) for i in range(1024 + 16)]
        while len(server._running) < len(tasks) and not any(task.done() for task in tasks):
            await asyncio.sleep(0)
        await server.abort_all_requests()
        return await asyncio.gather(*tasks)

    assert len(serve(work, max_num_seqs=1024)) == 1040


def test_memory_is_moved_by_one_at_a_time(verl, monkeypatch):
    async def work(server):
        first = asyncio.create_task(ask(server, "first", ignore_eos=True))
        while not server._running:
            await asyncio.sleep(0)
        sleeps = asyncio.create_task(server.sleep())  # while an answer runs
        await asyncio.sleep(0)
        await asyncio.gather(sleeps, server.sleep(), server.wake_up())
        assert len((await first).token_ids) == 60
        assert (await ask(server, "second")).stop_reason == "completed"  # awake: that was asked last
        await server.sleep()
        moved = []
        monkeypatch.setattr(server, "_move", moved.append)
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(Engine, "open", lambda *_, **__: 1 / 0)
            await server.wake_up()
        await server.wake_up(["weights"])
        await server.sleep()  # the trainer's step failed between the two halves
        assert moved == [server.device, server.device, "cpu"]
        await server.wake_up()
        assert (await ask(server, "third")).stop_reason == "completed"

    serve(work)


def test_a_request_that_waits_is_sent_away_when_its_server_leaves(verl):
    async def work(server):
        await server.sleep()
        waits = asyncio.create_task(ask(server, "a"))
        await asyncio.sleep(0.02)
        assert not waits.done()
        await server.abort_all_requests(reject_request=True)  # no resume is near: another server shall have it
        sent = await waits
        assert (sent.stop_reason, sent.token_ids) == ("aborted", [])

    serve(work)


def parts(model, count):
    named = list(model.state_dict().items())
    return [save({n: t.clone() for n, t in named[i::count]}) for i in range(count)]


@pytest.mark.parametrize("asleep", [False, True])
def test_new_weights_answer(verl, asleep, tmp_path):
    other, tokenizer = load_model("tiny-sums")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    other.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    async def work(server, updates):
        if updates:
            if asleep:
                await server.sleep()
                await server.wake_up(["weights"])
            for i, part in enumerate(parts(other, 3)):
                await server.update_weights(part, i == 2)
            await server.set_global_steps(7)
            await server.wake_up(["kv_cache"])
        return await ask(server, "a", ignore_eos=True)

    old, new = (serve(lambda server, u=updates: work(server, u)) for updates in (False, True))
    expected = serve(lambda server: work(server, False), model=tmp_path)
    assert new.token_ids == expected.token_ids != old.token_ids and new.log_probs == expected.log_probs
    assert new.extra_fields["global_steps"] == 7


def test_weights_that_do_not_fit_or_do_not_come_are_refused(verl):
    model, _ = load_model("tiny-sums")
    name, parameter = next(iter(model.named_parameters()))
    kept = parameter.clone()
    for tensors, said in (
        ({name: kept + 1, "other": torch.zeros(1)}, "verl sends 'other', which the sampler's model does not have"),
        ({name: torch.zeros(3)}, r"has shape \[3\] in verl"),
    ):
        with pytest.raises(SparseRLError, match=said):
            copy_weights(model, save(tensors), {})
    assert torch.equal(parameter, kept)

    async def work(server):
        one, two = parts(server.model, 2)
        with pytest.raises(SparseRLError, match=r"verl did not send \d+ weights, such as"):
            await server.update_weights(one, True)
        await server.update_weights(one, False)
        await server.update_weights(two, True)

    serve(work)


def test_experts_come_one_by_one(verl):
    """As verl's FSDP engine sends them (unfuse_moe_params)."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = dict(vocab_size=20, hidden_size=8, intermediate_size=8, moe_intermediate_size=6, num_hidden_layers=2)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=4, num_experts=3, num_experts_per_tok=2)
    models = [Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads)) for _ in range(2)]
    sent = {}
    for name, tensor in models[0].state_dict().items():
        base = name.rpartition(".")[0]
        if name.endswith("experts.gate_up_proj"):
            for i, (gate, up) in enumerate(tensor.chunk(2, dim=1) for tensor in tensor.split(1)):
                sent[f"{base}.{i}.gate_proj.weight"] = gate[0].contiguous()
                sent[f"{base}.{i}.up_proj.weight"] = up[0].contiguous()
        elif name.endswith("experts.down_proj"):
            sent |= {f"{base}.{i}.down_proj.weight": one.clone() for i, one in enumerate(tensor)}
        else:
            sent[name] = tensor.clone()
    if REAL_VERL:
        from verl.workers.engine.fsdp.utils import unfuse_moe_params

        theirs = dict(unfuse_moe_params(models[0].state_dict().items(), "qwen3_moe"))
        assert theirs.keys() == sent.keys() and all(torch.equal(theirs[name], sent[name]) for name in sent)
    names, arrived = list(sent), {}
    last = next(name for name in names if ".1.up_proj" in name)
    copy_weights(models[1], save({name: sent[name] for name in names if name != last}), arrived)
    (lacking,) = missing(models[1], arrived)
    assert lacking.endswith("layers.0.mlp.experts.gate_up_proj")
    copy_weights(models[1], save({last: sent[last]}), arrived)
    assert missing(models[1], arrived) == []
    for (name, one), other in zip(models[0].state_dict().items(), models[1].state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    for wrong in (last.replace(".1.", ".3."), last.replace("experts", "others")):
        with pytest.raises(SparseRLError, match="which the sampler's model does not have"):
            copy_weights(models[1], save({wrong: sent[last]}), arrived)
    with pytest.raises(SparseRLError, match=r"has shape \[6, 8\] in verl, but \[8, 6\] in the sampler"):
        copy_weights(models[1], save({last.replace("up_proj", "down_proj"): sent[last]}), arrived)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"quantization": "fp8"},
            "rollout.quantization is fp8, which sparse rollouts do not support; leave it at None",
        ),
        ({"enable_rollout_routing_replay": True}, "enable_rollout_routing_replay is True"),
        ({"logprobs_mode": "raw_logprobs"}, "logprobs_mode is raw_logprobs"),
        ({"mtp": Namespace(enable=True, enable_rollout=True)}, "mtp.enable_rollout is True"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(verl, changes, said):
    check_config(config(mtp=Namespace(enable=True, enable_rollout=False)))
    with pytest.raises(SparseRLError, match=said):
        check_config(config(**changes))


def test_a_length_that_the_model_cannot_read_is_refused(verl):
    with pytest.raises(SparseRLError, match=r"allows 5000 tokens for a prompt .*, but the model has 4096"):
        serve(None, max_model_len=None, prompt_length=1000, response_length=4000)


def test_settings_are_closed(verl):
    assert Settings.of({"sparse_rl": {"budget": None, "options": None}}) == Settings()
    assert Settings.of({}) == Settings()
    assert Settings.of({"sparse_rl": {"budget": 64}}).budget == 64
    with pytest.raises(SparseRLError, match=r"engine_kwargs.sparse_rl has no key 'budgte'; did you mean 'budget'"):
        Settings.of({"sparse_rl": {"budgte": 64}})


@pytest.mark.skipif(not REAL_VERL, reason="needs verl and Ray")
def test_verl_s_own_client_manager_and_workers(tmp_path):
    """LLMServerManager starts our server beside a worker; its client asks it; the worker's adapter sends weights."""
    import ray
    from omegaconf import OmegaConf
    from verl.workers.config import HFModelConfig, RolloutConfig
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerManager

    model, tokenizer = load_model("tiny-sums")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    rollout = RolloutConfig(
        name="sparse-rl", tensor_model_parallel_size=1, max_model_len=120, prompt_length=40, response_length=60,
        dtype="float32", seed=3, engine_kwargs={"sparse_rl": OURS}, n_gpus_per_node=1, max_num_seqs=64,
        full_determinism=True,
    )  # fmt: skip
    model_config = OmegaConf.create({"path": str(tmp_path)})
    whole = Namespace(actor_rollout_ref=Namespace(rollout=rollout, model=model_config))

    class Worker:
        """A process of verl's trainer: it has the adapter, and weights of its own."""

        def __init__(self):
            os.environ["RANK"] = "0"

        async def update(self, path, shift):
            lm, _ = load_model(path)
            adapter_class = get_rollout_class("sparse-rl", "async")
            adapter = adapter_class(rollout, HFModelConfig(path=path, load_tokenizer=False), None)
            await adapter.release()
            await adapter.resume(["weights"])
            named = ((name, tensor + shift) for name, tensor in lm.state_dict().items())
            await adapter.update_weights(named, global_steps=5, peft_config=None, base_sync_done=True)
            await adapter.resume(["kv_cache"])

    ray.init("local", num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1")
    try:
        worker = ray.remote(Worker).remote()
        group = Namespace(workers=[worker], world_size=1)

        async def work():
            manager = LLMServerManager(whole, group)
            await manager._initialize_llm_servers()
            await manager._init_global_load_balancer()
            client = manager.get_client(FullyAsyncLLMServerClient)
            params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True, "ignore_eos": True}

            async def answers():
                asked = [client.generate(f"r{i}", prompt_ids=PROMPT, sampling_params=params) for i in range(6)]
                return await asyncio.gather(*asked)

            first = await answers()
            (replica,) = manager.get_replicas()
            await worker.update.remote(str(tmp_path), 0.0)
            second = await answers()
            await worker.update.remote(str(tmp_path), 0.01)
            third = await answers()
            await replica.abort_all_requests()
            await replica.resume_generation()
            with pytest.raises(SparseRLError, match="1000000"):  # what we refuse arrives as it was said
                await client.generate("r", prompt_ids=[10**6], sampling_params=params)
            return first, second, third

        first, second, third = asyncio.run(work())
    finally:
        ray.shutdown()
    assert [a.token_ids for a in first] == [a.token_ids for a in second] != [a.token_ids for a in third]
    assert all(len(a.token_ids) == 60 == len(a.log_probs) for a in first)
    assert [a.extra_fields["global_steps"] for a in (first[0], third[0])] == [None, 5]
    engine = Engine(model, "rkv", 24, 4, rows=4)
    seed = RolloutServer._seed_of(Namespace(config=rollout, replica_rank=0), None, "r0")
    (expected,) = engine.generate([PROMPT], sampling=Sampling(60, stop_ids=()), seed=seed)
    assert first[0].token_ids == expected.response_tokens.tolist()
