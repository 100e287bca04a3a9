"""What a model must be, and how far its positions reach; other models are refused in one sentence."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Phi3Config

from sparse_rl import Engine, Sampling, SparseRLError
from sparse_rl.models import ModelShape
from tests.helpers.models import prompts_of


def small(name: str, **own):
    """A tiny random model of any architecture."""
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
    "config, message",
    [
        (dict(model_type="t5"), "encoder-decoder"),
        (dict(model_type="mamba"), "without attention there are no keys and values"),
        (dict(model_type="zaya"), "its hybrid layers keep a state of a kind not known here beside"),
        (dict(model_type="zamba2"), "its hybrid layers keep .*; its linear_attention layers are recurrent and keep"),
        (dict(model_type="deepseek_v32"), "its indexed_attention layers attend to what an indexer chooses"),
        (dict(model_type="deepseek_v32", layer_types=["full_attention"] * 61), "an indexer with .* chooses the 2048"),
        (dict(model_type="deepseek_v4"), "compressed_sparse_attention layers attend to summaries of several tokens"),
        (dict(model_type="whisper"), "encoder-decoder"),
    ],
)
def test_unsupported_architectures_are_refused_by_their_config(config, message):
    with pytest.raises(SparseRLError, match=message):
        ModelShape.of(AutoConfig.for_model(**config))


@pytest.mark.parametrize(
    "name, own, message",
    [
        ("roformer", dict(is_decoder=True), "attention be replaced"),
        ("diffllama", {}, "attends twice in layer 0, each time with other keys or values"),
        ("doge", {}, "attention mask of its own, which a trace does not hold"),
        ("bert", dict(is_decoder=False), "is not causal"),
        (
            "phimoe",
            dict(sliding_window=24, num_local_experts=2),
            "sliding windows in layers .* does not pass them to its attention",
        ),
    ],
)
def test_unsupported_architectures_are_refused_when_they_run(name, own, message):
    with pytest.raises(SparseRLError, match=message):
        Engine(small(name, **own), compressor="knorm", budget=8, interval=4).generate([[1, 2, 3]])


def test_a_model_with_fewer_layers_than_its_config_is_refused():
    model = small("llama")
    model.model.layers = model.model.layers[:1]
    with pytest.raises(SparseRLError, match=r"layers \[1\] did not use the replaced attention: .* missing"):
        Engine(model, compressor="knorm", budget=8, interval=4).generate([[1, 2, 3]])


def test_only_transformers_models():
    with pytest.raises(SparseRLError, match="Linear is not a transformers model"):
        Engine(torch.nn.Linear(2, 2))


def test_going_beyond_the_context_while_generating_is_said():
    model = small("llama", max_position_embeddings=64)
    engine = Engine(model, compressor="knorm", budget=8, interval=4)
    with pytest.warns(UserWarning, match="10 prompt tokens and 60 new ones go beyond the 64 positions"):
        trajectory = engine.generate(prompts_of(10), sampling=Sampling(60))[0]
    assert len(trajectory.tokens) == 70


def test_rope_that_rescales_is_limited_to_its_first_range():
    """Longer than the original context, such RoPE would falsify the keys already cached."""
    rope = dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)
    model = small("llama", max_position_embeddings=64, rope_parameters=rope)
    engine = Engine(model, budget=16, interval=8)
    assert ModelShape.of(model.config).hard_context == 64
    with pytest.raises(SparseRLError, match=r"prompt 0 has 50 tokens and 20 new ones.*beyond 64.*at most 14"):
        engine.generate(prompts_of(50), sampling=Sampling(20))
    assert len(engine.generate(prompts_of(50), sampling=Sampling(14))[0].tokens) == 64


def test_longrope_is_limited_to_its_original_context():
    rope = dict(rope_type="longrope", rope_theta=10000.0, short_factor=[1.0] * 4, long_factor=[2.0] * 4)
    config = Phi3Config(
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=4096,
        original_max_position_embeddings=48,
        rope_parameters=rope,
    )
    assert ModelShape.of(config).hard_context == 48


def test_learned_positions_end_where_their_table_ends():
    model = small("gpt2", n_positions=32, n_embd=32, n_head=4, n_layer=2, num_key_value_heads=4)
    engine = Engine(model, compressor="knorm", budget=8, interval=4)
    with pytest.raises(SparseRLError, match=r"30 tokens and 20 new ones.*beyond 32.*at most 2"):
        engine.generate(prompts_of(30), sampling=Sampling(20))
    assert len(engine.generate(prompts_of(30), sampling=Sampling(2))[0].tokens) == 32
