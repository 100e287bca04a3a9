"""Text from ordinary code: the engine's tokens, in one piece or many; engines are kept, and freed with their model."""

import gc
import signal
import warnings

import pytest
import torch

from sparse_rl import Engine, NonFiniteLogits, Sampling, SparseRLError, generate
from sparse_rl.beacon import add_beacon
from sparse_rl.compressors import make
from sparse_rl.models import tiny_tokenizer
from tests.helpers.models import prompts_of, tiny

TOKENIZER = tiny_tokenizer()
TOKENIZER.eos_token = None  # responses run to their limit, unless a test names an end
TEXTS = ["3p4", "abcabcabcabcabcabc12", "z", "9" * 30]  # characters within the 61 ids that the models know
SMALL = dict(budget=16, interval=8, max_new_tokens=40)


def fresh(name: str = "llama", **changes):
    """Made anew, not a copy of one that other tests may have left hooks on."""
    return tiny.__wrapped__(name, **changes)


def engines_of(model) -> list[Engine]:
    return list(vars(model)["_sparse_rl_engines"].engines.values())


def decoded(trajectories) -> list[str]:
    return [TOKENIZER.decode(t.response_tokens, skip_special_tokens=True) for t in trajectories]


# ---------------------------------------------------------------------------------------- the engine's results


WAYS = ["dense", "rkv", "snapkv", "window", "random", "prompt-only:rkv", "beacon:4"]


@pytest.mark.parametrize(
    "name, compressor, temperature",
    [*(("llama", way, 1.0) for way in WAYS), ("llama", "rkv", 0.0), ("qwen2", "rkv", 1.0), ("qwen2", "dense", 0.0)],
)
def test_texts_are_those_of_the_engine(name, compressor, temperature):
    model = fresh(name)
    if compressor.startswith("beacon"):
        add_beacon(model, (4,))
    ids = [TOKENIZER.encode(text) for text in TEXTS]
    engine = Engine(model, compressor, budget=16, interval=8, rows=3)
    expected = decoded(engine.generate(ids, sampling=Sampling(40, temperature), seed=5))
    assert len(set(expected)) == len(TEXTS)
    options = dict(compressor=compressor, temperature=temperature, seed=5, **SMALL)
    assert generate(model, TOKENIZER, TEXTS, **options) == expected
    assert [generate(model, TOKENIZER, text, **options) for text in TEXTS] == expected
    assert ["".join(generate(model, TOKENIZER, text, stream=True, **options)) for text in TEXTS] == expected


def test_streams_with_several_steps_to_a_round_are_the_same():
    model, ids = tiny("llama"), prompts_of(9)[0]
    (expected,) = Engine(model, "rkv", budget=16, interval=8, rows=1).generate([ids], sampling=Sampling(40))
    engine = Engine(model, "rkv", budget=16, interval=8, rows=1, poll=(3, 7))
    pieces = list(engine.stream(ids, Sampling(40)))
    assert [token for piece in pieces for token in piece] == expected.response_tokens.tolist()
    assert 40 / 8 <= len(pieces) < 20


def test_a_chat_goes_through_the_template():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}{% if add_generation_prompt %}a{% endif %}"
    )
    model, chat = tiny("llama"), [{"role": "user", "content": "12"}, {"role": "b", "content": "34"}]
    expected = generate(model, tokenizer, "user12b34a", **SMALL)
    assert generate(model, tokenizer, chat, **SMALL) == expected
    assert generate(model, tokenizer, [chat, "12"], **SMALL) == [expected, generate(model, tokenizer, "12", **SMALL)]
    assert "".join(generate(model, tokenizer, chat, stream=True, **SMALL)) == expected
    with pytest.raises(SparseRLError, match="no chat template"):
        generate(model, TOKENIZER, chat)


def test_special_tokens_are_no_text():
    model = fresh()
    model.generation_config.eos_token_id = 1
    texts = generate(model, TOKENIZER, TEXTS, temperature=3.0, budget=16, interval=8, max_new_tokens=400)
    assert min(map(len, texts)) < 300 and not any("<" in text for text in texts)
    for text, whole in zip(TEXTS, texts, strict=True):
        pieces = generate(
            model, TOKENIZER, text, temperature=3.0, budget=16, interval=8, max_new_tokens=400, stream=True
        )
        assert "".join(pieces) == whole


# ---------------------------------------------------------------------------------------- sampling


def test_what_the_call_leaves_out_is_the_models_own_choice():
    model = fresh()

    def text(**options):
        return generate(model, TOKENIZER, "12", **SMALL, **options)

    def engine(*sampling):
        return decoded(
            Engine(model, budget=16, interval=8).generate([TOKENIZER.encode("12")], sampling=Sampling(40, *sampling))
        )[0]

    greedy = engine(0.0)
    assert text() == text(temperature=0.0) == greedy
    assert text(temperature=0.7) == engine(0.7) != greedy
    with pytest.warns(UserWarning, match="give a temperature"):
        assert text(top_p=0.5) == greedy
    own = model.generation_config
    own.do_sample = True
    assert text() == engine(1.0, 50)  # as transformers
    own.temperature, own.top_k, own.top_p = 2.0, 5, 0.9
    assert text() == engine(2.0, 5, 0.9) != greedy
    assert text(temperature=0.5, top_k=0, top_p=1.0) == engine(0.5)
    assert text(top_k=3) == engine(2.0, 3, 0.9)
    assert text(temperature=0.0) == greedy
    assert text(temperature=2.0, seed=1) != text(temperature=2.0, seed=2)


def test_greedy_dense_is_what_transformers_generates():
    model, ids = tiny("llama"), torch.tensor([TOKENIZER.encode(TEXTS[1])])
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)[
        0, ids.shape[1] :
    ]
    assert generate(model, TOKENIZER, TEXTS[1], "dense", max_new_tokens=40) == TOKENIZER.decode(
        theirs, skip_special_tokens=True
    )


# ---------------------------------------------------------------------------------------- beacons


def test_a_student_is_run_as_it_was_trained():
    model = add_beacon(fresh(), (4,))
    expected = generate(model, TOKENIZER, "12", compressor="beacon:4", max_new_tokens=40)
    assert generate(model, TOKENIZER, "12", max_new_tokens=40) == expected
    assert (
        generate(model, TOKENIZER, "12", compressor="beacon", compressor_options={"chunk": 4}, max_new_tokens=40)
        == expected
    )
    assert (
        generate(model, TOKENIZER, "12", "rkv", **SMALL)
        == generate(tiny("llama"), TOKENIZER, "12", **SMALL)
        != expected
    )


@pytest.mark.parametrize(("chunks", "said"), [((4, 8), "4 or 8 tokens"), ((), "any number of tokens")])
def test_a_beacon_for_several_chunks_must_be_named(chunks, said):
    model = add_beacon(fresh(), chunks)
    with pytest.raises(SparseRLError, match=said):
        generate(model, TOKENIZER, "12")
    assert generate(model, TOKENIZER, "12", "beacon:8", max_new_tokens=20)


# ---------------------------------------------------------------------------------------- streams


def test_pieces_come_while_the_rollout_runs_and_none_is_empty():
    model, steps = fresh(), []
    with torch.no_grad(), warnings.catch_warnings():
        hook = model.register_forward_pre_hook(lambda *_: steps.append(1))
        seen = [(piece, len(steps)) for piece in generate(model, TOKENIZER, "12", stream=True, **SMALL)]
        hook.remove()
    assert all(piece for piece, _ in seen)
    assert [n for _, n in seen] == sorted({n for _, n in seen}) and seen[0][1] <= 2 and seen[-1][1] == 40


def test_between_two_pieces_the_model_may_be_used():
    model = fresh().train()
    options = dict(temperature=1.0, budget=12, interval=2, max_new_tokens=12)
    expected = generate(model, TOKENIZER, "12", **options)
    ids = torch.tensor([TOKENIZER.encode("12")])
    logits = model.eval()(ids).logits.detach()
    model.train()
    pieces = []
    for piece in generate(model, TOKENIZER, "12", stream=True, **options):
        pieces.append(piece)
        assert model.training and torch.is_grad_enabled() and model.config._attn_implementation == "sdpa"
        assert torch.equal(model(ids).logits, logits)
        assert generate(model, TOKENIZER, "12", **options) == expected  # on an engine of its own
    assert "".join(pieces) == expected
    both = zip(*(generate(model, TOKENIZER, "12", stream=True, **options) for _ in range(2)), strict=True)
    assert ["".join(text) for text in zip(*both, strict=True)] == [expected] * 2
    assert len(engines_of(model)) == 1


class Planted(Exception):
    pass


def close(stream):
    next(stream)
    stream.close()


def abandon(stream):
    for _ in stream:
        break


def fail(stream):
    with pytest.raises(Planted):
        for _ in stream:
            raise Planted


def interrupt(stream):
    with pytest.raises(KeyboardInterrupt):
        for _ in stream:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("stop", [close, abandon, fail, interrupt])
def test_whoever_stops_reading_has_stopped_the_rollout(stop):
    model, steps = fresh(), []
    expected = generate(model, TOKENIZER, "12", **SMALL)
    (engine,) = engines_of(model)
    hook = model.register_forward_pre_hook(lambda *_: steps.append(1))
    stop(generate(model, TOKENIZER, "12", stream=True, **SMALL))
    gc.collect()
    assert len(steps) <= 2
    hook.remove()
    assert model.config._attn_implementation == "sdpa" and engine.storage.state is None
    assert (
        generate(model, TOKENIZER, "12", **SMALL)
        == expected
        == "".join(generate(model, TOKENIZER, "12", stream=True, **SMALL))
    )
    assert engines_of(model) == [engine]


@pytest.mark.parametrize("error", [Planted, KeyboardInterrupt, NonFiniteLogits])
def test_errors_of_the_rollout_reach_the_reader(error):
    model, steps = fresh(), []
    expected = generate(model, TOKENIZER, "12", **SMALL)

    def plant(module, args, output):
        steps.append(1)
        if len(steps) == 10 and error is NonFiniteLogits:
            output.logits.fill_(torch.nan)
        elif len(steps) == 10:
            raise error

    hook, pieces = model.register_forward_hook(plant), []
    with pytest.raises(error):
        for piece in generate(model, TOKENIZER, "12", stream=True, **SMALL):
            pieces.append(piece)
    hook.remove()
    assert 0 < len(pieces) < 10 and expected.startswith("".join(pieces))
    assert model.config._attn_implementation == "sdpa"
    assert generate(model, TOKENIZER, "12", **SMALL) == expected


def test_a_later_call_of_the_same_engine_cuts_a_stream_off():
    engine, prompts = Engine(tiny("llama"), budget=16, interval=8, rows=1), prompts_of(5, 9)
    expected = [engine.generate([prompt], sampling=Sampling(20))[0].response_tokens.tolist() for prompt in prompts]
    old = engine.stream(prompts[0], Sampling(20))
    next(old)
    new = engine.stream(prompts[1], Sampling(20))
    tokens = next(new)
    with pytest.raises(SparseRLError, match="cut off after 2 tokens"):
        list(old)
    assert tokens + [token for piece in new for token in piece] == expected[1]


# ---------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("messages", "options", "said"),
    [
        (["1", "2"], {"stream": True}, "one prompt, but 2 were given"),
        ([], {"stream": True}, "one prompt, but 0 were given"),
        ({"role": "user", "content": "1"}, {}, "messages is {'role'"),
        ([[]], {}, r"messages is \[\[\]\]"),
        ([1, 2], {}, r"messages is \[1, 2\]"),
        (["1", {"role": "user"}], {}, "give a text, a chat"),
        ("", {}, "prompt 0 is empty"),
        ("1", {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ("1", {"temperature": -1.0}, "temperature is -1.0"),
        ("1", {"rows": 0}, "rows is 0"),
        ("1", {"compressor": "rvk"}, "did you mean 'rkv'"),
        ("1", {"compressor_options": {"sink": 1}}, "did you mean 'sinks'"),
        ("1", {"compressor": make("rkv"), "compressor_options": {"sinks": 1}}, "pass them when"),
        ("1", {"compressor": "beacon:4"}, "has no beacon"),
        ("Z", {}, "outside the vocabulary"),
    ],
)
def test_mistakes_get_a_sentence(messages, options, said):
    with pytest.raises(SparseRLError, match=said) as caught:
        list(generate(tiny("llama"), TOKENIZER, messages, **options))
    assert "\n" not in str(caught.value)


def test_a_position_table_that_ends_and_a_model_that_is_none():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = tiny.__wrapped__("llama", max_position_embeddings=64, rope_parameters=rope)
    for stream in (False, True):
        with pytest.raises(SparseRLError, match="set max_new_tokens to at most 62"):
            list(generate(model, TOKENIZER, "12", max_new_tokens=63, stream=stream))
    with pytest.raises(SparseRLError, match="load it first"):
        generate("tiny-sums", TOKENIZER, "12")
    with pytest.raises(SparseRLError, match="not a transformers model"):
        generate(torch.nn.Linear(2, 2), TOKENIZER, "12")


def test_batches_of_nothing_and_of_the_same():
    assert generate(tiny("llama"), TOKENIZER, []) == []
    assert (
        len(set(generate(tiny("llama"), TOKENIZER, ["1"] * 3, temperature=5.0, rows=2, **SMALL))) == 3
    )  # a prompt given thrice
