"""verifiers' own clients against a running server: an environment of ours, and nothing of theirs changed.

`eval` forwards chats; `train` is the client that prime-rl trains with: it writes prompts as token ids by itself, asks
/inference/v1/generate, and keeps tokens and log-probs. `make others` runs them: the extra
`test` leaves verifiers out.
"""

import asyncio
import sys

import pytest
import torch

from sparse_rl import Engine, Sampling
from tests.helpers.counting import ASKING
from tests.helpers.serving import all_free, served, until

vf = pytest.importorskip("verifiers.v1")
pytestmark = pytest.mark.others

from sparse_rl.tasks import verifiers_host  # noqa: E402

SEED, NEW, TEMPERATURE = 3, 12, 0.9


@pytest.fixture
def environment(tmp_path, monkeypatch):
    (tmp_path / "asking_env.py").write_text(ASKING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, verifiers_host.HARNESS, verifiers_host)
    agent = {"harness": {"id": verifiers_host.HARNESS}, "runtime": {"type": "subprocess"}}
    return vf.load_environment(vf.resolve_env_config({"taskset": {"id": "asking-env", "count": 3}, "player": agent}))


def episodes(environment, client):
    sampling = vf.Sampling(max_tokens=NEW, seed=SEED, temperature=TEMPERATURE)

    async def run():
        async with environment.serving():
            context = vf.ModelContext(model="sums", client=client, sampling=sampling)
            return await asyncio.gather(*(environment.run_episode(task, context) for task in environment.taskset))

    found = asyncio.run(run())
    assert all(episode.ok for episode in found), [episode.errors for episode in found]
    return [episode.traces[0] for episode in found]


def test_both_clients_run_an_environment_of_ours(environment, tmp_path):
    with served() as (address, service):
        service.tokenizer.save_pretrained(tmp_path / "model")
        service.model.save_pretrained(tmp_path / "model")
        about = dict(base_url=f"{address}/v1", api_key_var="SPARSE_RL_NO_KEY")
        chats = episodes(environment, vf.EvalClientConfig(**about))
        trained = episodes(environment, vf.TrainClientConfig(**about, renderer_model_name=str(tmp_path / "model")))
        assert until(lambda: all_free(service))
        engine = Engine(service.model, "rkv", budget=24, interval=4, rows=4)
        sampling = Sampling(NEW, temperature=TEMPERATURE, stop_ids=service.stop_ids)
        for chat, trace in zip(chats, trained, strict=True):
            assert trace.num_turns == chat.num_turns == 3 and trace.reward >= 0.75
            fed: list[int] = []
            for node in trace.nodes:
                sampled = sum(node.mask)
                if sampled:
                    prompt = fed + node.token_ids[: len(node.token_ids) - sampled]
                    (own,) = engine.generate([prompt], sampling=sampling, seed=SEED)
                    assert node.token_ids[-sampled:] == own.response_tokens.tolist()
                    expected = own.sampler_logprobs[own.num_prompt_tokens :]
                    torch.testing.assert_close(torch.tensor(node.logprobs), expected, atol=1e-6, rtol=0)
                fed += node.token_ids
        first = [node.message.content for node in chats[0].nodes[:2]]
        assert first == [node.message.content for node in trained[0].nodes[:2]]
