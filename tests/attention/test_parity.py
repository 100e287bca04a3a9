"""With nothing evicted, the engine is transformers' `generate`."""

import torch

from sparse_rl import Engine, Sampling, token_logprobs
from tests.helpers.models import prompts_of

NEW_TOKENS = 128


def reference(model, prompt):
    """Greedy tokens and their log-probs from `model.generate`, run alone."""
    out = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    response = out.sequences[0, len(prompt) :]
    logprobs = torch.cat(out.logits).log_softmax(-1).gather(1, response[:, None])[:, 0]
    return response, logprobs


def test_greedy_dense_rollouts_equal_generate(model):
    prompts = prompts_of(3, 17, 40, 1, 29)
    engine = Engine(model, compressor="dense", rows=3)  # fewer rows than prompts: rows are refilled
    trajectories = engine.generate(prompts, sampling=Sampling(max_new_tokens=NEW_TOKENS, temperature=0.0))
    for prompt, trajectory in zip(prompts, trajectories, strict=True):
        response, logprobs = reference(model, prompt)
        assert trajectory.tokens.tolist() == prompt + response.tolist()
        torch.testing.assert_close(trajectory.sampler_logprobs[len(prompt) :], logprobs, atol=1e-4, rtol=0)
        assert trajectory.sampler_logprobs[: len(prompt)].eq(0).all()
        assert trajectory.finish_reason == "length"


def test_dense_view_equals_the_models_own_logits(model):
    tokens = torch.tensor(prompts_of(60)[0])
    with torch.no_grad():
        expected = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        torch.testing.assert_close(token_logprobs(model, tokens)[1:], expected, atol=1e-5, rtol=0)


def test_prefill_does_not_depend_on_its_chunks(model):
    prompts = prompts_of(50)
    sampling = Sampling(max_new_tokens=20)
    runs = [
        Engine(model, compressor="snapkv", budget=16, interval=8, rows=1, prefill_chunk=chunk).generate(
            prompts, sampling=sampling
        )[0]
        for chunk in (1, 7, 16, 512)
    ]
    for run in runs[1:]:
        assert run.tokens.equal(runs[0].tokens)
        assert run.trace.evicted_at.equal(runs[0].trace.evicted_at)
        torch.testing.assert_close(run.sampler_logprobs, runs[0].sampler_logprobs, atol=1e-5, rtol=0)


def test_stop_tokens_end_a_response_as_in_generate(llama):
    prompt = prompts_of(9)[0]
    engine = Engine(llama, compressor="dense", rows=2)
    free = engine.generate([prompt], sampling=Sampling(max_new_tokens=40, temperature=0.0))[0]
    stop = int(free.response_tokens[11])
    first = free.response_tokens.tolist().index(stop)
    stopped = engine.generate([prompt], sampling=Sampling(max_new_tokens=40, temperature=0.0, stop_ids=(stop,)))[0]
    assert stopped.finish_reason == "stop"
    assert stopped.response_tokens.tolist() == free.response_tokens[: first + 1].tolist()
    expected = llama.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=stop)
    assert stopped.tokens.tolist() == expected[0].tolist()
