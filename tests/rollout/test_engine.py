"""Memory that does not grow, a trace that tells the truth, and the engine's bookkeeping."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_rl import COMPRESSORS, Engine, Sampling
from sparse_rl.attention import register
from sparse_rl.attention.given import given as passed
from tests.helpers.compressors import STANDALONE
from tests.helpers.models import prompts_of, tiny


@pytest.mark.parametrize("compressor", STANDALONE)
def test_cache_bytes_equal_the_plan(compressor, llama):
    engine = Engine(llama, compressor=compressor, budget=32, interval=16, rows=3)
    engine.generate(prompts_of(70), sampling=Sampling(10))
    plan = engine.plan(prompt_tokens=70, new_tokens=10)
    assert engine.cache.nbytes == plan.cache_bytes
    assert engine.scratch.nbytes == plan.scratch_bytes
    assert plan.capacity == {"dense": 80, "prompt-only": 42}.get(compressor, 48)


def live_tensors(since: set[int]) -> dict[int, int]:
    import gc

    return {id(t): t.nbytes for t in gc.get_objects() if issubclass(type(t), torch.Tensor) and id(t) not in since}


def test_memory_is_constant_in_the_response_length():
    """64 or 512 new tokens: the same cache, and beside it only tokens, log-probs and trace grow."""
    model = tiny("llama")
    sizes = {}
    for new in (64, 512):
        before = set(live_tensors(set()))
        engine = Engine(model, compressor="rkv", budget=32, interval=16, rows=2)
        at_start = engine.cache.nbytes
        seen = []

        def record(trajectory, engine=engine, before=before, seen=seen):
            seen.append(sum(live_tensors(before).values()) - engine.cache.nbytes)

        trajectories = engine.generate(prompts_of(10, 10), sampling=Sampling(new), on_finish=record)
        assert all(len(t.response_tokens) == new for t in trajectories)
        assert engine.cache.nbytes == at_start == engine.plan(10, new).cache_bytes
        sizes[new] = (engine.cache.nbytes, max(seen))
    assert sizes[64][0] == sizes[512][0]
    layers, heads = 3, 2
    # Two rows, and the two finished trajectories: tokens (8 bytes), log-probs (4), trace (2 per layer and head). Views
    # count twice.
    grown = (512 - 64) * 2 * (8 + 4 + 2 * layers * heads)
    assert sizes[512][1] - sizes[64][1] <= 4 * grown


def watch(monkeypatch) -> list[dict]:
    """Record, at every attention call, the feed indices each query could really see."""
    seen = []
    original = register.ATTENTIONS["slots"]

    def watching(module, query, key, value, mask, **kwargs):
        out = original(module, query, key, value, mask, **kwargs)
        feed = passed().feed
        for row in range(feed.slot.shape[0]):  # a batch may carry padding beyond
            for t in range(query.shape[2]):
                slots = slice(0, int(feed.slot[row, t]) + 1)
                tokens = feed.cache.feed[module.layer_idx, row, :, slots].clone()  # [H, slots in use]
                seen.append(
                    dict(
                        cache=feed.cache, row=row, layer=module.layer_idx, query=int(feed.index[row, t]), tokens=tokens
                    )
                )
        return out

    monkeypatch.setitem(register.ATTENTIONS, "slots", watching)
    return seen


@settings(deadline=None, max_examples=25)
@given(
    name=st.sampled_from(STANDALONE),
    budget=st.integers(10, 24),
    interval=st.integers(1, 12),
    prompt=st.integers(1, 60),
    new=st.integers(1, 40),
)
def test_the_trace_is_what_the_attention_saw(name, budget, interval, prompt, new):
    model = tiny("llama")
    with pytest.MonkeyPatch.context() as monkeypatch:
        seen = watch(monkeypatch)
        engine = Engine(model, compressor=name, budget=budget, interval=interval, rows=1)
        trajectory = engine.generate(prompts_of(prompt), sampling=Sampling(new))[0]
    visible = trajectory.trace.visible()  # [L, H, T, T]
    queries = set()
    for event in seen:
        tokens = event["tokens"]
        if event["cache"] is engine.cache:
            assert tokens.shape[1] <= engine.cache.capacity
            sinks, window = engine.compressor.protected(budget)
            assert (tokens[:, : min(sinks, tokens.shape[1])] == torch.arange(min(sinks, tokens.shape[1]))).all()
            recent = torch.arange(max(0, event["query"] - window), event["query"] + 1)
            if name != "dense":
                assert all(set(recent.tolist()) <= set(head.tolist()) for head in tokens)
        assert (tokens.diff(dim=1) > 0).all()  # unique, in feed order
        for head in range(2):
            assert visible[event["layer"], head, event["query"]].nonzero()[:, 0].tolist() == tokens[head].tolist()
        queries.add(event["query"])
    assert queries == set(range(prompt + new - 1))  # every token but the last was fed exactly once
    assert len(seen) == 3 * (prompt + new - 1)
    assert visible[:, :, prompt:].sum(-1).max() <= engine.compressor.capacity(prompt, new)


def test_evictions_happen_when_slots_are_full(llama):
    """Prompt 10, capacity 16 + 4: full after feeding index 19, so evicted_at = 20, 24, 28, ..."""
    engine = Engine(llama, compressor="knorm", budget=16, interval=4, rows=1)
    trajectory = engine.generate(prompts_of(10), sampling=Sampling(40))[0]
    times = trajectory.trace.evicted_at.long().unique().tolist()
    assert times == [*range(20, 50, 4), 65535]
    per_time = [(trajectory.trace.evicted_at.long() == t).sum(-1).unique().tolist() for t in times[:-1]]
    assert per_time == [[4]] * len(per_time)  # `interval` tokens each, in every layer and head


@pytest.mark.parametrize("budget", [30, 20])  # above the layers' own window of 24, and below it
@pytest.mark.parametrize("compressor", ["knorm", "tova", "h2o"])
def test_sliding_layers_evict_what_no_query_can_reach_first(compressor, budget):
    """Through the engine: a layer with a window either evicts nothing but what is beyond it, or all of that."""
    model = tiny("gemma3")
    engine = Engine(model, compressor=compressor, budget=budget, interval=7, rows=2)
    trajectory = engine.generate(prompts_of(12), sampling=Sampling(120))[0]
    checked = 0
    for layer, kind in enumerate(model.config.layer_types):
        for evicted_at in trajectory.trace.evicted_at[layer].long():
            for when in evicted_at[evicted_at < len(trajectory.tokens)].unique().tolist():
                alive = [k for k in range(when) if evicted_at[k] >= when]
                beyond = {k for k in alive if when - k >= 24}
                gone = {k for k in alive if evicted_at[k] == when}
                if kind == "sliding_attention":
                    assert gone <= beyond or beyond <= gone
                    checked += bool(beyond)
    assert checked > 10


@pytest.mark.parametrize("compressor", ["random", "knorm", "rkv", "h2o"])
def test_layers_compressed_a_few_at_a_time_choose_the_same(compressor, monkeypatch):
    from sparse_rl.cache import slots

    model = tiny("gemma3")  # layers differ: sliding and full

    def run():
        engine = Engine(model, compressor=compressor, budget=30, interval=7, rows=3)
        return engine.generate(prompts_of(12, 60, 33), sampling=Sampling(60))

    together = run()
    monkeypatch.setitem(slots.CHUNK_BYTES, "cpu", 1)
    for a, b in zip(together, run(), strict=True):
        assert a.tokens.equal(b.tokens) and a.trace.evicted_at.equal(b.trace.evicted_at)


def test_rows_evicted_together_protect_their_own_prompts(llama):
    """Prompts of 10 and 18 tokens with an interval of 4 are evicted in the same steps."""
    engine = Engine(llama, compressor=COMPRESSORS["knorm"](protect_prompt=True), budget=24, interval=4, rows=2)
    trajectories = engine.generate(prompts_of(10, 18, seed=3), sampling=Sampling(80))
    for t in trajectories:
        evicted = t.trace.evicted_at.long() < len(t.tokens)
        assert not evicted[..., : t.num_prompt_tokens].any()
        assert evicted[..., t.num_prompt_tokens : t.num_prompt_tokens + 8].any()


def test_more_queries_than_a_row_has_slots_are_those_a_row_has_seen(llama):
    """What a compressor sees must not depend on who is evicted beside it."""

    class Curious(COMPRESSORS["tova"]):
        name = "curious"
        num_queries = 64

        def score(self, view):
            return view.attention_logits(last=64).softmax(-1).mean((2, 3))

    prompt, *others = prompts_of(30, 4, 60, 12, 25, 9, 16, 28, 22)

    def run(prompts):
        return Engine(llama, compressor=Curious(), budget=16, interval=8, rows=8).generate(
            prompts, sampling=Sampling(60)
        )[0]

    alone = run([prompt])
    for k in range(len(others)):
        beside = run([prompt, *others[k:]])
        assert beside.tokens.equal(alone.tokens) and beside.trace.evicted_at.equal(alone.trace.evicted_at)


def test_versions_and_stop_lists(llama):
    engine = Engine(llama, budget=12, interval=4)
    engine.version = 17
    free = engine.generate(prompts_of(10), sampling=Sampling(40))[0]
    assert free.version == 17
    stops = [int(free.response_tokens[20]), int(free.response_tokens[9])]
    llama.generation_config.eos_token_id = stops
    try:
        stopped = engine.generate(prompts_of(10), sampling=Sampling(40))[0]
    finally:
        llama.generation_config.eos_token_id = None
    first = min(free.response_tokens.tolist().index(stop) for stop in stops)
    assert stopped.finish_reason == "stop" and len(stopped.response_tokens) == first + 1


def test_the_plans_total_is_the_sum_of_its_parts(llama):
    plan = Engine(llama, budget=32, interval=16, rows=3).plan(70, 10)
    per_row = plan.row_bytes + plan.trace_row_bytes + plan.token_row_bytes
    assert plan.total_bytes == plan.weight_bytes + plan.scratch_bytes + plan.working_bytes + 3 * per_row
    more = Engine(llama, budget=32, interval=16, rows=5).plan(70, 10)
    assert plan.with_rows(5) == more
    wider = Engine(llama, budget=40, interval=16, rows=5).plan(70, 10)
    assert more.with_capacity(56).total_bytes == wider.total_bytes


def test_rows_drain_and_refill_in_order(llama):
    prompts = prompts_of(*range(3, 25))
    engine = Engine(llama, compressor="snapkv", budget=12, interval=4, rows=5)
    finished = []
    trajectories = engine.generate(
        prompts, group_size=3, sampling=Sampling(30, stop_ids=(7, 9)), on_finish=finished.append
    )
    assert [(t.prompt_index, t.sample_index) for t in trajectories] == [(p, s) for p in range(22) for s in range(3)]
    assert len(finished) == 66
    for t in trajectories:
        assert t.prompt_tokens.tolist() == prompts[t.prompt_index]
        ends = int(t.tokens[-1]) in (7, 9)
        assert t.finish_reason == ("stop" if ends else "length")
        assert ends or len(t.response_tokens) == 30
        assert not any(int(x) in (7, 9) for x in t.response_tokens[:-1])


def test_one_new_token(llama):
    engine = Engine(llama, budget=12, interval=4, rows=2)
    trajectories = engine.generate(prompts_of(5, 40, 3), sampling=Sampling(1))
    assert [len(t.response_tokens) for t in trajectories] == [1, 1, 1]


def test_row_counts_halve_in_multiples_of_four():
    from sparse_rl.rollout.schedule import row_counts

    assert row_counts(1) == [1]
    assert row_counts(6) == [6, 4]
    assert row_counts(100) == [100, 52, 28, 16, 8, 4]


def test_a_wide_trace_is_kept_in_32_bits(llama, monkeypatch):
    """A call that may exceed 65,535 tokens records in int32; the trajectory's own trace is as narrow as it can be."""
    from sparse_rl.cache import trace

    engine = Engine(llama, compressor="tova", budget=12, interval=4, rows=2)
    narrow = engine.generate(prompts_of(30), sampling=Sampling(40))[0]
    monkeypatch.setattr(trace, "NEVER", 50)
    wide = engine.generate(prompts_of(30), sampling=Sampling(40))[0]
    assert wide.trace.evicted_at.dtype == torch.int32
    assert wide.tokens.equal(narrow.tokens)
    assert wide.trace.visible().equal(narrow.trace.visible())


def test_weights_are_used_in_place(llama):
    """After an update the next rollout follows the new weights, without a word to the engine."""
    engine = Engine(llama, budget=12, interval=4)
    before = engine.generate(prompts_of(10), sampling=Sampling(20, temperature=0.0))[0]
    weight = llama.lm_head.weight
    saved = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.copy_(weight.roll(1, dims=0))
        after = engine.generate(prompts_of(10), sampling=Sampling(20, temperature=0.0))[0]
    finally:
        with torch.no_grad():
            weight.copy_(saved)
    assert int(after.response_tokens[0]) == (int(before.response_tokens[0]) + 1) % 61


def test_peft_models_roll_out_and_replay(llama):
    peft = pytest.importorskip("peft")
    import copy

    from sparse_rl import token_logprobs

    model = peft.get_peft_model(copy.deepcopy(llama), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.5)
    trajectory = Engine(model, budget=12, interval=4).generate(prompts_of(30), sampling=Sampling(30))[0]
    with torch.no_grad():
        gap = token_logprobs(model, trajectory.tokens, trajectory.trace) - trajectory.sampler_logprobs
    assert gap[30:].abs().max() < 1e-4
