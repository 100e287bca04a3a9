"""Bad input gets one sentence with the numbers and the remedy, and the engine stays usable."""

import os
import signal
from contextlib import contextmanager

import pytest
import torch

from sparse_rl import COMPRESSORS, Engine, NonFiniteLogits, OutOfMemory, RolloutInterrupted, Sampling, SparseRLError
from sparse_rl.models import ModelShape
from tests.helpers.models import prompts_of, tiny


@pytest.fixture
def engine(llama):
    engine = Engine(llama, compressor="rkv", budget=16, interval=8, rows=2)
    yield engine
    after = engine.generate(prompts_of(9), sampling=Sampling(20), seed=5)[0]
    fresh = Engine(llama, compressor="rkv", budget=16, interval=8, rows=2).generate(
        prompts_of(9), sampling=Sampling(20), seed=5
    )[0]
    assert after.tokens.equal(fresh.tokens)  # whatever happened, it works as if nothing had
    assert after.trace.evicted_at.equal(fresh.trace.evicted_at)
    assert llama.config._attn_implementation == "sdpa" and not llama.training


@pytest.mark.parametrize("compressor", ["rkv", "snapkv"])
def test_budget_not_above_sinks_and_window(llama, compressor):
    with pytest.raises(SparseRLError, match=r"budget 8 must be above sinks 0 \+ window 8 = 8.*at least 9"):
        Engine(llama, compressor=compressor, budget=8, interval=4)
    with pytest.raises(SparseRLError, match=r"budget 12.*sinks 4 \+ window 8.*13"):
        Engine(llama, compressor=COMPRESSORS[compressor](sinks=4), budget=12, interval=4)


def test_budget_of_the_window_compressor(llama):
    with pytest.raises(SparseRLError, match=r"budget 4 must be above sinks 4.*at least 5"):
        Engine(llama, compressor="window", budget=4, interval=4)


@pytest.mark.parametrize("budget, interval", [(0, 4), (16, 0), (-1, -1)])
def test_budget_and_interval_must_be_positive(llama, budget, interval):
    with pytest.raises(SparseRLError, match=r"(budget|interval) is (0|-1); it must be a whole number of at least 1"):
        Engine(llama, compressor="knorm", budget=budget, interval=interval)


def test_unknown_compressor_names_the_nearest(llama):
    with pytest.raises(SparseRLError, match="'snapvk'; did you mean 'snapkv'"):
        Engine(llama, compressor="snapvk")
    with pytest.raises(SparseRLError, match="must be a name or a Compressor, not int"):
        Engine(llama, compressor=7)


def test_empty_prompt(engine):
    with pytest.raises(SparseRLError, match="prompt 1 is empty"):
        engine.generate([[1], []])


def test_prompt_beyond_the_context(engine):
    with pytest.raises(
        SparseRLError, match="prompt 0 has 4100 tokens, beyond the model's context of 4096; shorten it by 4"
    ):
        engine.generate(prompts_of(4100))


def test_going_beyond_the_context_while_generating_is_said():
    model = small("llama", max_position_embeddings=64)
    engine = Engine(model, compressor="knorm", budget=8, interval=4)
    with pytest.warns(UserWarning, match="10 prompt tokens and 60 new ones go beyond the 64 positions"):
        trajectory = engine.generate(prompts_of(10), sampling=Sampling(60))[0]
    assert len(trajectory.tokens) == 70


def test_token_outside_the_vocabulary(engine):
    with pytest.raises(SparseRLError, match="prompt 0 holds token id 61, outside the vocabulary of 61"):
        engine.generate([[1, 61]])
    with pytest.raises(SparseRLError, match="token id -1"):
        engine.generate([[1, -1]])


def test_prompts_are_token_ids(engine):
    with pytest.raises(SparseRLError, match=r"not 'hello'; encode text"):
        engine.generate(["hello"])
    with pytest.raises(SparseRLError, match=r"a prompt is a list of token ids, not 5"):
        engine.generate([5, 6, 7])


def test_group_size_and_rows(engine, llama):
    with pytest.raises(SparseRLError, match="group_size is 0"):
        engine.generate([[1]], group_size=0)
    with pytest.raises(SparseRLError, match="rows is 0"):
        Engine(llama, rows=0)


def test_no_prompts_give_no_trajectories(engine):
    assert engine.generate([]) == []


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(max_new_tokens=0), "max_new_tokens is 0"),
        (dict(temperature=-1.0), "temperature is -1.0"),
        (dict(temperature=float("nan")), "temperature is nan"),
        (dict(top_p=0.0), "top_p is 0.0"),
        (dict(top_k=-2), "top_k is -2"),
        (dict(max_new_tokens=1.5), "max_new_tokens is 1.5"),
        (dict(top_p=0.9, for_correction=True), "top_p 0.9 cannot go with a correction.*biased.*top_p=1"),
        (dict(top_k=5, for_correction=True), "top_k 5.*cannot go with a correction"),
    ],
)
def test_sampling_is_checked(options, message):
    with pytest.raises(SparseRLError, match=message):
        Sampling(**options)


@contextmanager
def hooked(model, hook):
    handle = model.model.layers[1].register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def poisoned_from(model, call: int):
    """Make the logits NaN from the `call`-th forward pass on."""
    calls = iter(range(10**9))
    handle = model.lm_head.register_forward_hook(
        lambda module, inputs, out: out * torch.nan if next(calls) >= call else out
    )
    try:
        yield
    finally:
        handle.remove()


def test_non_finite_logits_name_row_and_step(engine, llama):
    with (
        poisoned_from(llama, call=0),
        pytest.raises(NonFiniteLogits, match=r"row 0 \(prompt 0, sample 0\).*step 0 \(token 5\)"),
    ):
        engine.generate(prompts_of(5))
    two_prompts, good_steps = 2, 7
    with (
        poisoned_from(llama, call=two_prompts + good_steps),
        pytest.raises(NonFiniteLogits, match=r"row 0 \(prompt 0, sample 0\).*step 8 \(token 13\)"),
    ):
        engine.generate(prompts_of(5, 6))


def test_what_was_finished_before_non_finite_logits_is_not_lost(engine, llama):
    with poisoned_from(llama, call=30), pytest.raises(NonFiniteLogits) as caught:
        engine.generate(prompts_of(5, 5, 5, 5, 5, 5), sampling=Sampling(10))
    assert [t.prompt_index for t in caught.value.trajectories] == [0, 1, 2, 3]


def test_an_interrupt_returns_what_was_finished(engine):
    finished = []

    def interrupt(trajectory):
        finished.append(trajectory)
        if len(finished) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        engine.generate(prompts_of(5, 6, 7, 8, 9), sampling=Sampling(12), on_finish=interrupt)
    assert isinstance(caught.value, RolloutInterrupted)
    assert [t.prompt_index for t in caught.value.trajectories] == [0, 1, 2]
    assert all(a is b for a, b in zip(caught.value.trajectories, finished, strict=True))


def test_ctrl_c_while_a_trajectory_is_being_saved_waits_for_it(engine):
    saved = []

    def save(trajectory):
        if len(saved) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        saved.append(trajectory)

    with pytest.raises(RolloutInterrupted) as caught:
        engine.generate(prompts_of(5, 6, 7, 8, 9), sampling=Sampling(12), on_finish=save)
    assert len(saved) == len(caught.value.trajectories) == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupt_inside_the_model(engine, llama):
    calls = iter(range(10**9))

    def hook(module, inputs):
        if next(calls) == 30:  # two waves of two are through after 26 passes
            raise KeyboardInterrupt

    with hooked(llama, hook), pytest.raises(RolloutInterrupted) as caught:
        engine.generate(prompts_of(5, 6, 7, 8, 9), sampling=Sampling(12))
    assert len(caught.value.trajectories) == 4


def test_dense_says_when_a_later_call_needs_more(llama):
    growing = Engine(llama, compressor="dense", rows=2)
    growing.generate(prompts_of(10), sampling=Sampling(20))
    assert len(growing.generate(prompts_of(10), sampling=Sampling(40))[0].tokens) == 50 and growing.cache.capacity == 50
    engine = Engine(llama, compressor="dense", rows=2, max_tokens=30)
    with pytest.raises(
        SparseRLError, match=r"hold 30 tokens, but the call needs 50 \(10 prompt \+ 40 new\).*max_tokens=50"
    ):
        engine.generate(prompts_of(10), sampling=Sampling(40))
    assert len(engine.generate(prompts_of(10), sampling=Sampling(15))[0].tokens) == 25
    roomy = Engine(llama, compressor="dense", rows=2, max_tokens=50)
    assert len(roomy.generate(prompts_of(10), sampling=Sampling(40))[0].tokens) == 50


def test_out_of_memory_shows_the_plan_and_what_fits(llama):
    with pytest.raises(OutOfMemory) as caught:
        Engine(llama, compressor="rkv", budget=512, interval=128, rows=10**9)
    message = str(caught.value)
    assert "weights" in message and "cache, 1000000000 rows" in message and "use rows=" in message
    rows = int(message.rsplit("use rows=", 1)[1].rstrip("."))
    assert 1 < rows < 10**9


def test_out_of_memory_in_the_middle(engine, llama):
    def hook(module, inputs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nlong explanation")

    with (
        hooked(llama, hook),
        pytest.raises(OutOfMemory, match=r"Tried to allocate 2.00 GiB(.|\n)*KV per row(.|\n)*rows="),
    ):
        engine.generate(prompts_of(5))


def test_other_runtime_errors_propagate(engine, llama):
    def hook(module, inputs):
        raise RuntimeError("something else")

    with hooked(llama, hook), pytest.raises(RuntimeError, match=r"^something else$"):
        engine.generate(prompts_of(5))


def test_rope_that_rescales_is_limited_to_its_first_range():
    """Longer than the original context, such RoPE would falsify the keys already cached."""
    rope = dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)
    model = (
        tiny("llama", max_position_embeddings=64)
        .__class__(
            tiny("llama").config.__class__(
                **{**tiny("llama").config.to_dict(), "max_position_embeddings": 64, "rope_parameters": rope}
            )
        )
        .eval()
    )
    engine = Engine(model, budget=16, interval=8)
    assert ModelShape.of(model.config).hard_context == 64
    with pytest.raises(SparseRLError, match=r"prompt 0 has 50 tokens and 20 new ones.*beyond 64.*at most 14"):
        engine.generate(prompts_of(50), sampling=Sampling(20))
    assert len(engine.generate(prompts_of(50), sampling=Sampling(14))[0].tokens) == 64


@pytest.mark.parametrize(
    "config, message",
    [
        (dict(model_type="t5"), "encoder-decoder"),
        (dict(model_type="mamba"), "not supported"),
        (dict(model_type="qwen3_next"), "linear_attention"),
        (dict(model_type="gemma3n_text"), "shares keys and values"),
    ],
)
def test_unsupported_architectures_are_refused_by_their_config(config, message):
    from transformers import AutoConfig

    with pytest.raises(SparseRLError, match=message):
        ModelShape.of(AutoConfig.for_model(**config))


def small(name: str, **own):
    """A tiny random model of any architecture."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = dict(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    config = AutoConfig.for_model(name, **{**sizes, **own}, pad_token_id=0, bos_token_id=None, eos_token_id=None)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    "name, own, message",
    [
        ("gpt_oss", dict(head_dim=8, num_local_experts=2, num_experts_per_tok=1), "adds s_aux"),
        ("gptj", dict(n_embd=32, n_head=4, n_layer=2, rotary_dim=4, n_positions=64), "attention be replaced"),
        ("diffllama", {}, "attends twice in layer 0"),
        ("doge", {}, "attention mask of its own"),
        (
            "bart",
            dict(d_model=32, decoder_layers=2, decoder_attention_heads=4, is_encoder_decoder=False),
            "takes no position_ids",
        ),
        ("bert", dict(is_decoder=False), "is not causal"),
        (
            "phimoe",
            dict(sliding_window=24, num_local_experts=2),
            "sliding windows in layers .* does not pass them to its attention",
        ),
        ("deepseek_v3", dict(q_lora_rank=8, kv_lora_rank=8, first_k_dense_replace=2), "config says|layers scale"),
    ],
)
def test_unsupported_architectures_are_refused_when_they_run(name, own, message):
    with pytest.raises(SparseRLError, match=message):
        Engine(small(name, **own), compressor="knorm", budget=8, interval=4).generate([[1, 2, 3]])


def test_a_model_with_fewer_layers_than_its_config_is_refused():
    model = small("llama")
    model.model.layers = model.model.layers[:1]
    with pytest.raises(SparseRLError, match=r"layers \[1\] did not use the replaced attention"):
        Engine(model, compressor="knorm", budget=8, interval=4).generate([[1, 2, 3]])


def test_only_transformers_models():
    with pytest.raises(SparseRLError, match="Linear is not a transformers model"):
        Engine(torch.nn.Linear(2, 2))


def test_learned_positions_end_where_their_table_ends():
    model = small("gpt2", n_positions=32, n_embd=32, n_head=4, n_layer=2, num_key_value_heads=4)
    engine = Engine(model, compressor="knorm", budget=8, interval=4)
    with pytest.raises(SparseRLError, match=r"30 tokens and 20 new ones.*beyond 32.*at most 2"):
        engine.generate(prompts_of(30), sampling=Sampling(20))
    assert len(engine.generate(prompts_of(30), sampling=Sampling(2))[0].tokens) == 32


def test_longrope_is_limited_to_its_original_context():
    from transformers import Phi3Config

    rope = dict(rope_type="longrope", rope_theta=10000.0, short_factor=[1.0] * 4, long_factor=[2.0] * 4)
    config = Phi3Config(
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=4096,
        original_max_position_embeddings=48,
        rope_parameters=rope,
    )
    assert ModelShape.of(config).hard_context == 48


def test_a_changed_model_needs_a_new_engine(llama):
    import copy

    model = copy.deepcopy(llama)
    engine = Engine(model, budget=16, interval=8)
    model.double()
    with pytest.raises(SparseRLError, match=r"now torch.float64 on cpu.*make a new Engine"):
        engine.generate(prompts_of(5))


@pytest.mark.parametrize("compressor", list(COMPRESSORS))
def test_a_nan_inside_the_cache_is_gone_afterwards(compressor, llama):
    """Not-a-number in a slot nobody reads would still be multiplied by zero; the engine must not keep it."""
    engine = Engine(llama, compressor=compressor, budget=16, interval=8, rows=2, max_tokens=100)
    before = engine.generate(prompts_of(5), sampling=Sampling(20))[0]

    def poison(module, inputs, out):
        return out * torch.nan

    handle = llama.model.layers[0].self_attn.v_proj.register_forward_hook(poison)
    try:
        with pytest.raises(NonFiniteLogits):
            engine.generate(
                prompts_of(30), sampling=Sampling(20)
            )  # leaves more slots behind than the next call overwrites
    finally:
        handle.remove()
    after = engine.generate(prompts_of(5), sampling=Sampling(20))[0]
    assert after.tokens.equal(before.tokens) and after.trace.evicted_at.equal(before.trace.evicted_at)


def test_non_finite_logits_of_any_row_are_found(engine, llama):
    calls = iter(range(10**9))

    def poison(module, inputs, out):
        if next(calls) >= 4:  # two prompts, two steps
            out = out.clone()
            out[1] = torch.nan
        return out

    handle = llama.lm_head.register_forward_hook(poison)
    try:
        with pytest.raises(NonFiniteLogits, match=r"row 1 \(prompt 1, sample 0\).*step 3"):
            engine.generate(prompts_of(5, 6))
    finally:
        handle.remove()


@pytest.mark.parametrize(
    "name, options", [("h2o", {}), ("h2o", dict(sinks=4)), ("rkv", dict(sinks=3)), ("window", {}), ("knorm", {})]
)
def test_the_budget_that_is_suggested_works(llama, name, options):
    compressor = COMPRESSORS[name](**options)
    too_small = next(b for b in range(40, 0, -1) if not compressor.has_room(b)) if not compressor.has_room(1) else 1
    if not compressor.has_room(too_small):
        with pytest.raises(SparseRLError) as caught:
            Engine(llama, compressor=compressor, budget=too_small, interval=4)
        suggested = int(str(caught.value).rsplit("at least ", 1)[1].rstrip("."))
        assert (
            Engine(llama, compressor=compressor, budget=suggested, interval=4).compressor.budget
            == suggested
            > too_small
        )
    if name != "window":
        protecting = COMPRESSORS[name](**options, protect_prompt=True)
        with pytest.raises(SparseRLError) as caught:
            Engine(llama, compressor=protecting, budget=48, interval=4).generate(prompts_of(60))
        suggested = int(str(caught.value).split("at least ")[1].split(",")[0])
        trajectory = Engine(llama, compressor=protecting, budget=suggested, interval=4).generate(
            prompts_of(60), sampling=Sampling(90)
        )[0]
        assert not (trajectory.trace.evicted_at.long() < 150)[..., :60].any()


def test_a_compressor_that_returns_nonsense_is_told(llama):
    class Nonsense(COMPRESSORS["knorm"]):
        name = "nonsense"

        def keep(self, view, budget):
            return torch.zeros(view.keys.shape[0], view.keys.shape[1], budget, dtype=torch.int64)

    with pytest.raises(SparseRLError, match=r"nonsense\.keep must return distinct, ascending slot numbers below 30"):
        Engine(llama, compressor=Nonsense(), budget=16, interval=8).generate(prompts_of(30), sampling=Sampling(20))
