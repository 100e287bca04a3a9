"""Prompts and given tokens through fused layers, and given tokens of many rows at a time: what the modules make of them
row by row.

On a CPU neither is done. Here it is told to, and either the kernels' twins run or, in Triton's interpreter, the kernels
themselves.
"""

import copy
import dataclasses

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

from sparse_rl import Engine, Sampling, SparseRLError
from sparse_rl.attention import slots
from sparse_rl.compressors import make
from sparse_rl.kernels import modules, ops
from sparse_rl.kernels.modules import fused_forward, fusing, known_modules
from sparse_rl.planning.memory import fed_row_bytes, most_fed
from sparse_rl.rollout import decode
from sparse_rl.rollout.feed import Chunk, Feeder
from tests.helpers.decoding import change_rules, same
from tests.helpers.hybrids import hybrid
from tests.helpers.models import prompts_of, tiny
from tests.helpers.reading import PROMPTS, fed, feeding, read, read_as_on_a_gpu
from tests.rollout.test_live import assert_replayed, held, opened, plan_of

FAMILY = ("llama", "qwen2", "qwen3", "mistral")
MIXTURES = ("qwen3-moe", "mixtral")  # all but their experts
OTHERS = ("gemma2", "gemma3", "phi3", "gpt-oss")  # nothing is fused; sliding windows, soft-caps and sinks
BY_KERNELS = ("add_and_norm", "silu_gate", "rotate")


def use_kernels(monkeypatch) -> None:
    """Only those of known layers, in the interpreter."""
    pytest.importorskip("triton")
    monkeypatch.setattr(ops, "place_of", lambda tensor: ops.Place("cuda", triton=True))
    for operation in set(ops.KERNELS) - set(BY_KERNELS):
        monkeypatch.setitem(ops.KERNELS, operation, ())


def count(monkeypatch) -> list[str]:
    calls: list[str] = []

    def counted(name, function):
        return lambda *given: calls.append(name) or function(*given)

    for name in BY_KERNELS:
        monkeypatch.setattr(ops, name, counted(name, getattr(ops, name)))
    return calls


def assert_same_cache(mine, theirs, tolerance=2e-4):
    for a, b in zip(mine.tensors, theirs.tensors, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    if mine.states is not None:
        for a, b in zip(mine.states.tensors, theirs.states.tensors, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# ----------------------------------------------------------------------------------------------------------- the same


@pytest.mark.parametrize("compressor", ["rkv", "h2o"])
@pytest.mark.parametrize("name", [*FAMILY, *MIXTURES])
def test_prompts_leave_what_the_modules_leave(name, compressor, monkeypatch):
    """Logits, slots, recent queries, and attention received; padding and all."""
    model = tiny(name)
    expected, cache = read(model, compressor)
    read_as_on_a_gpu(monkeypatch, fused=True)
    calls = count(monkeypatch)
    logits, scratch = read(model, compressor)
    norms = 2 + 2 * name.startswith("qwen3")  # per layer
    assert [calls.count(x) for x in BY_KERNELS] == [3 * norms + 1, 3 * (name in FAMILY), 3]
    torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-4)
    assert_same_cache(scratch, cache)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("compressor", ["rkv", "h2o", "dense"])
@pytest.mark.parametrize("name", [*FAMILY, *MIXTURES, *OTHERS, "qwen3_5_text", "falcon_h1"])
def test_rows_fed_together_are_rows_fed_alone(name, compressor, fused, monkeypatch):
    """Rows that lie apart, chunks of several lengths, some of which fill their row; every other slot stays."""
    model = tiny(name) if name in (*FAMILY, *MIXTURES, *OTHERS) else hybrid(name)
    change_rules(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(Feeder, "groups", lambda self, chunks: [[chunk] for chunk in chunks])
        expected, cache, _ = fed(model, compressor)
    read_as_on_a_gpu(monkeypatch, fused)
    calls = count(monkeypatch)
    logits, together, groups = fed(model, compressor)
    assert groups == (1 if cache.states is None else 2)
    assert bool(calls) == (fused and name in (*FAMILY, *MIXTURES))
    for row, theirs in expected.items():
        torch.testing.assert_close(logits[row], theirs, rtol=2e-4, atol=2e-4)
    assert_same_cache(together, cache)


@pytest.mark.parametrize("compressor", ["rkv", "h2o"])
@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt-oss"])
def test_padding_that_windows_do_not_reach_beyond_is_not_nan(name, compressor, monkeypatch):
    """A chunk of 4 beside one of 67 tokens, where windows have 24: attention received would be NaN, too."""
    with monkeypatch.context() as patch:
        patch.setattr(Feeder, "groups", lambda self, chunks: [[chunk] for chunk in chunks])
        expected, cache, _ = fed(tiny(name), compressor, interval=60)
    read_as_on_a_gpu(monkeypatch, fused=False)
    attend, seen = slots.attend_with_probs, []
    monkeypatch.setattr(
        slots, "attend_with_probs", lambda *given, **named: seen.append(attend(*given, **named)) or seen[-1]
    )
    logits, together, groups = fed(tiny(name), compressor, interval=60)
    assert groups == 1 and all(part.isfinite().all() for pair in seen for part in pair)
    assert bool(seen) == (compressor == "h2o")
    for row, theirs in expected.items():
        torch.testing.assert_close(logits[row], theirs, rtol=2e-4, atol=2e-4)
    assert_same_cache(together, cache)


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_the_kernels_in_a_forward_pass(name, monkeypatch):
    model = tiny(name, num_hidden_layers=1)
    expected, cache, _ = fed(model)
    prompts, scratch = read(model)
    read_as_on_a_gpu(monkeypatch, fused=True)
    use_kernels(monkeypatch)
    logits, together, _ = fed(model)
    for row, theirs in expected.items():
        torch.testing.assert_close(logits[row], theirs, rtol=2e-4, atol=2e-4)
    assert_same_cache(together, cache)
    found, own = read(model)
    torch.testing.assert_close(found, prompts, rtol=2e-4, atol=2e-4)
    assert_same_cache(own, scratch)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_slots_of_8_bits(kind, monkeypatch):
    """In fp64, where no code is a tie."""
    model = copy.deepcopy(tiny("qwen3")).double()
    compressor = make("rkv", slots=kind)
    expected, cache, _ = fed(model, compressor)
    read_as_on_a_gpu(monkeypatch, fused=False)
    logits, together, groups = fed(model, compressor)
    assert groups == 1
    for row, theirs in expected.items():
        torch.testing.assert_close(logits[row], theirs)
    assert_same_cache(together, cache)


def test_rows_whose_ties_are_noted_are_fed_one_at_a_time(monkeypatch):
    read_as_on_a_gpu(monkeypatch, fused=False)
    feeder, chunks, _ = feeding(tiny("llama"), make("rkv", slots="int8"))
    assert [len(group) for group in feeder.groups(chunks)] == [1] * 5


@pytest.mark.parametrize("compressor", ["rkv", "h2o", "dense", "prompt-only"])
@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gemma3", "qwen3_5_text"])
def test_conversations(name, compressor, monkeypatch):
    """Whole conversations, some of which are parked or read again: one trace replays them, routes are recorded."""
    model = hybrid(name) if name == "qwen3_5_text" else copy.deepcopy(tiny(name))
    read_as_on_a_gpu(monkeypatch, fused=True)
    recorded = dict(record_routes=True) if name == "qwen3-moe" else {}
    engine = Engine(model, compressor, budget=16, interval=8, rows=4, **recorded)
    with engine.open(64, 400, park=2) as live:
        chats = held(live, [plan_of(seed, 5, temperature=1.0) for seed in range(7)])
        trajectories = [live.release(chat) for chat in chats]
    for trajectory in trajectories:
        assert (trajectory.trace.routes is not None) == bool(recorded)
        assert_replayed(model, trajectory)


def random_model(name: str, **settings) -> nn.Module:
    torch.manual_seed(0)
    tokens = dict(vocab_size=61, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    return AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**tokens, **settings)).eval()


WIDTHS = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64)
NARROW = dict(n_embd=32, n_layer=2, n_head=4, n_positions=64)
LONG_FACTORS = dict(
    rope_type="longrope", rope_theta=10000.0, short_factor=[1.0] * 4, long_factor=[4.0] * 4,
    original_max_position_embeddings=64,
)  # fmt: skip
BY_PLACE = {
    "gpt2": lambda: random_model("GPT2", **NARROW),
    "opt": lambda: random_model("OPT", **WIDTHS, ffn_dim=64, word_embed_proj_dim=32),
    "gptj": lambda: random_model("GPTJ", **NARROW, rotary_dim=4),
    "longrope": lambda: random_model(
        "Phi3", **WIDTHS | dict(max_position_embeddings=256), intermediate_size=64, rope_parameters=LONG_FACTORS,
        original_max_position_embeddings=64,
    ),
}  # fmt: skip


@pytest.mark.parametrize("compressor", ["rkv", "dense"])
@pytest.mark.parametrize("name", BY_PLACE)
def test_padding_has_no_place_beyond_the_last_token(name, compressor, monkeypatch):
    """A model may have no position there, or compute all positions otherwise once one is large."""

    def conversations():
        engine = Engine(BY_PLACE[name](), compressor, budget=16, interval=24, rows=4)
        turn = Sampling(2, temperature=0.0, stop_ids=())
        with engine.open(56, 64) as live:
            chats = [live.submit(prompt, turn) for prompt in prompts_of(50, 5)]
            live.run()
            for chat, given in zip(chats, prompts_of(2, 18), strict=True):
                live.extend(chat, given, turn)
            live.run()
            return [live.release(chat) for chat in chats]

    alone = conversations()
    read_as_on_a_gpu(monkeypatch, fused=True)
    for mine, theirs in zip(conversations(), alone, strict=True):
        assert mine.tokens.equal(theirs.tokens)
        torch.testing.assert_close(mine.sampler_logprobs, theirs.sampler_logprobs, rtol=0, atol=1e-4)


def test_greedy_conversations_are_the_same(monkeypatch):
    model, plans = tiny("qwen2"), [plan_of(seed, 4, temperature=0.0) for seed in range(6)]

    def run():
        with opened(model, rows=6) as live:
            return [live.release(chat) for chat in held(live, plans)]

    expected = run()
    read_as_on_a_gpu(monkeypatch, fused=True)
    same(run(), expected, 1e-4)


# ------------------------------------------------------------------------------------------ what must not be fused


@pytest.mark.parametrize("change", ["hook", "gate", "norm", "wrapped", "layer"])
def test_what_was_changed_since_the_engine_was_opened_runs_as_it_is(change, monkeypatch):
    """The list of modules is older than the change."""
    model, tokens = copy.deepcopy(tiny("llama")), torch.tensor(prompts_of(6))
    known = known_modules(model)
    first, second, third = model.model.layers
    before = model(tokens, use_cache=False).logits
    if change == "hook":
        first.post_attention_layernorm.register_forward_hook(lambda module, args, output: 2 * output)
    elif change == "gate":
        second.mlp.act_fn = nn.GELU()
    elif change == "norm":
        third.input_layernorm = nn.Sequential(third.input_layernorm, nn.LayerNorm(32, elementwise_affine=False))
    elif change == "wrapped":
        own = third.self_attn.forward
        third.self_attn.forward = lambda *args, **kwargs: tuple(
            2 * x if isinstance(x, torch.Tensor) else x for x in own(*args, **kwargs)
        )
    else:
        model.model.layers[1] = copy.deepcopy(first)
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
        with fusing(known):
            assert "forward" in vars(first.mlp)
            assert ("forward" in vars(first)) == (change != "hook")
            torch.testing.assert_close(model(tokens, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)
    assert change == "layer" or (expected - before).abs().max() > 1e-2
    assert ("forward" in vars(third.self_attn)) == (change == "wrapped")


def test_adapters(monkeypatch):
    pytest.importorskip("peft")
    from sparse_rl.models import with_lora

    model = with_lora(copy.deepcopy(tiny("qwen2")), rank=4, alpha=8)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    expected, cache, _ = fed(model)
    read_as_on_a_gpu(monkeypatch, fused=True)
    calls = count(monkeypatch)
    logits, together, _ = fed(model)
    assert calls
    for row, theirs in expected.items():
        torch.testing.assert_close(logits[row], theirs, rtol=2e-4, atol=2e-4)
    assert_same_cache(together, cache)


def test_steps_are_not_fused_and_nothing_stays(monkeypatch):
    """Only forward passes that read prompts or given tokens are; a step that was captured before stays as it was."""
    read_as_on_a_gpu(monkeypatch, fused=True)
    model, seen = copy.deepcopy(tiny("qwen3")), []
    forward = decode.forward_modules
    monkeypatch.setattr(
        "sparse_rl.rollout.capture.forward_modules",
        lambda *given: seen.append(any("forward" in vars(m) for m in model.modules())) or forward(*given),
    )
    before = [dict(vars(m)) for m in model.modules()]
    engine = Engine(model, "rkv", budget=16, interval=8, rows=4)
    for _ in range(2):
        engine.generate(prompts_of(5, 20, 9), 2, Sampling(12, stop_ids=()))
    with engine.open(64, 200) as live:
        held(live, [plan_of(seed, 3) for seed in range(3)])
        decoder = engine.decoder(None)
        held(live, [plan_of(seed, 3) for seed in range(3)])
        assert engine.decoder(None) is decoder
    assert len(seen) > 30 and not any(seen)
    assert [dict(vars(m)) for m in model.modules()] == before


def test_an_error_leaves_nothing(monkeypatch):
    read_as_on_a_gpu(monkeypatch, fused=True)
    model = copy.deepcopy(tiny("llama"))
    monkeypatch.setattr(ops, "rotate", lambda *given: (_ for _ in ()).throw(SparseRLError("called")))
    with pytest.raises(SparseRLError, match="called"):
        Engine(model, budget=16, interval=8, rows=2).generate(prompts_of(5))
    assert not any("forward" in vars(m) for m in model.modules())


def test_a_forward_pass_looks_at_known_modules_alone(monkeypatch):
    read_as_on_a_gpu(monkeypatch, fused=True)
    feeder, chunks, loop = feeding(tiny("llama"))
    assert len(feeder.known) == 3 * 5 + 1
    calls = count(monkeypatch)
    with loop.engine._switched():
        looked_at, look = [], modules.fused_forward
        monkeypatch.setattr(modules, "fused_forward", lambda module: looked_at.append(module) or look(module))
        feeder.feed(chunks[:1])
    assert calls and looked_at == feeder.known


def test_a_cpu_fuses_nothing():
    assert not feeding(tiny("llama"))[2].known


def test_known_modules_are_those_with_a_fused_forward():
    for name in (*FAMILY, *MIXTURES, *OTHERS):
        model = tiny(name)
        assert known_modules(model) == [m for m in model.modules() if fused_forward(m) is not None]
        assert bool(known_modules(model)) == (name in (*FAMILY, *MIXTURES))


# -------------------------------------------------------------------------------------------------- groups and memory


def grouped(lengths, rows=256, together=16384, states=None):
    feeder, _, _ = feeding(tiny("llama"))
    cache = copy.copy(feeder.cache)
    cache.states = states
    feeder = dataclasses.replace(feeder, cache=cache, most=rows, together=together)
    groups = feeder.groups([Chunk(row, [1] * length, 0, 0) for row, length in enumerate(lengths)])
    assert sorted(chunk.row for group in groups for chunk in group) == list(range(len(lengths)))
    assert all([c.row for c in group] == sorted(c.row for c in group) for group in groups)
    return [(len(group), max(len(chunk.tokens) for chunk in group)) for group in groups]


def test_as_few_groups_as_the_tokens_allow(monkeypatch):
    monkeypatch.setattr("sparse_rl.planning.memory.chunk_bytes", lambda device: 2**30)
    assert grouped([129] * 256) == [(86, 129), (85, 129), (85, 129)]
    assert grouped([10] * 256) == [(256, 10)]
    assert grouped([10] * 128 + [500] * 32) == [(32, 500), (128, 10)]
    assert grouped([129] * 256, rows=100) == [(86, 129), (85, 129), (85, 129)]
    assert grouped([129] * 5, rows=1) == [(1, 129)] * 5  # on a CPU
    assert grouped([20000, 3]) == [(1, 20000), (1, 3)]
    assert grouped([7, 3, 7, 3, 3], states=object()) == [(2, 7), (3, 3)]


def test_what_attention_makes_is_bounded(monkeypatch):
    shape = feeding(tiny("llama"))[2].cache.shape
    a_row = fed_row_bytes(shape, 32, 8)
    assert a_row == 32 * (2 * 2 * 8 * 4 + 8 * 4 * 8)
    monkeypatch.setattr("sparse_rl.planning.memory.chunk_bytes", lambda device: 3 * a_row)
    assert most_fed(shape, 32, 8, 16384, torch.device("cpu")) == 3
    assert most_fed(shape, 32, 8, 17, torch.device("cpu")) == 2
    assert most_fed(shape, 3200, 8, 17, torch.device("cpu")) == 1
    assert grouped([8] * 8) == [(3, 8), (3, 8), (2, 8)]


def test_an_open_engine_reads_prompts_into_rows_of_their_own_length(monkeypatch):
    """Given tokens need no scratch, so its rows are no longer than prompts are, and there are more of them."""
    read_as_on_a_gpu(monkeypatch, fused=False)
    model = tiny("llama")
    engine = Engine(model, "dense", rows=4, prefill_chunk=100)
    with engine.open(max(PROMPTS), 300):
        assert (engine.scratch.capacity, engine.cache.capacity) == (max(PROMPTS), 300)
        plan = engine.storage.live_plan(max(PROMPTS), 300)
        assert plan.scratch_bytes == engine.scratch.nbytes and plan.cache_bytes == engine.cache.nbytes
        assert plan.most_fed_rows == 4
        alone = dataclasses.replace(plan, most_fed_rows=0)
        assert plan.working_bytes > alone.working_bytes
