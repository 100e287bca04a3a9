"""Text from ordinary code: the engine's tokens, in one piece or many; engines are kept, and freed with their model."""

import copy
import gc
import pickle
import signal
import warnings
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sparse_rl.rollout.text as generation
from sparse_rl import COMPRESSORS, Engine, NonFiniteLogits, OutOfMemory, Sampling, SparseRLError, generate
from sparse_rl.beacon import add_beacon
from sparse_rl.compressors import make
from sparse_rl.models import tiny_tokenizer
from sparse_rl.rollout.text import TextPieces
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


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("compressor", ["dense", "rkv", "snapkv", "window", "random", "prompt-only:rkv", "beacon:4"])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
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


# ---------------------------------------------------------------------------------------- kept engines


def test_a_second_call_makes_nothing_anew():
    model = fresh()
    first = generate(model, TOKENIZER, "12", **SMALL)
    (engine,) = engines_of(model)
    cache, scratch = engine.cache, engine.scratch
    assert (
        generate(model, TOKENIZER, "12", **SMALL)
        == first
        == "".join(generate(model, TOKENIZER, "12", stream=True, **SMALL))
    )
    generate(model, TOKENIZER, "34", **SMALL | {"max_new_tokens": 20, "temperature": 1.0, "seed": 3})
    assert engines_of(model) == [engine] and engine.cache is cache and engine.scratch is scratch
    generate(model, TOKENIZER, ["1", "2", "3"], **SMALL)
    generate(model, TOKENIZER, ["1", "2", "3", "4"], **SMALL)
    assert [e.rows for e in engines_of(model)] == [1, 4]


def test_few_engines_are_kept_those_used_last():
    model = fresh()
    for budget in (12, 13, 14, 15, 16, 13, 17):
        generate(model, TOKENIZER, "12", budget=budget, interval=8, max_new_tokens=4)
    assert [engine.compressor.budget for engine in engines_of(model)] == [15, 16, 13, 17]


def test_options_tell_engines_apart():
    model = fresh()
    a = generate(model, TOKENIZER, "12", "rkv", **SMALL)
    b = generate(model, TOKENIZER, "12", "rkv", compressor_options={"protect_prompt": True, "window": 2}, **SMALL)
    c = generate(model, TOKENIZER, "12", COMPRESSORS["rkv"](protect_prompt=True, window=2), **SMALL)
    d = generate(model, TOKENIZER, "12", COMPRESSORS["rkv"], **SMALL)
    assert a == d != b == c


def test_a_model_takes_its_engines_with_it():
    model = fresh()
    generate(model, TOKENIZER, "12", **SMALL)
    list(generate(model, TOKENIZER, "12", stream=True, **SMALL))
    gone = [weakref.ref(model), weakref.ref(engines_of(model)[0]), weakref.ref(engines_of(model)[0].cache.keys)]
    del model
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3


def test_copies_and_files_of_a_model_have_no_engines():
    model = fresh()
    text = generate(model, TOKENIZER, "12", **SMALL)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert engines_of(other) == []
        assert generate(other, TOKENIZER, "12", **SMALL) == text
    shallow = copy.copy(model)
    assert generate(shallow, TOKENIZER, "12", **SMALL) == text
    assert engines_of(shallow)[0].model is shallow
    assert set(model.state_dict()) == set(tiny("llama").state_dict())


def test_weights_may_change_and_the_model_may_move():
    model = fresh()
    before = generate(model, TOKENIZER, "12", **SMALL)
    (engine,) = engines_of(model)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.roll(1, dims=0))
    after = generate(model, TOKENIZER, "12", **SMALL)
    assert after != before and engines_of(model) == [engine]
    model.double()
    assert generate(model, TOKENIZER, "12", **SMALL)
    (now,) = engines_of(model)
    assert now is not engine and now.cache.keys.dtype == torch.float64
    model.float().resize_token_embeddings(70, mean_resizing=False)
    assert generate(model, TOKENIZER, "Z", **SMALL)  # its id is 63, which was beyond the vocabulary


def test_engines_kept_for_other_settings_make_room(monkeypatch):
    """With room for one and a half caches, the second engine is made when the first is freed; what never fits fails."""
    import sparse_rl.rollout.storage as module

    def text(name, budget=48):
        return generate(model, TOKENIZER, "12", name, budget=budget, interval=16, rows=4, max_new_tokens=20)

    def taken() -> int:
        gc.collect()
        kept = [thing for thing in gc.get_objects() if type(thing) is module.Storage and thing.cache is not None]
        return sum(storage.cache.nbytes for storage in kept)

    model = fresh()
    expected = [text(name) for name in ("knorm", "window")]
    model = fresh()
    elsewhere = taken()
    assert text("knorm") == expected[0]
    memory = elsewhere + (taken() - elsewhere) * 3 // 2
    monkeypatch.setattr(module, "available_memory", lambda device: memory - taken())
    assert text("window") == expected[1]
    assert [engine.compressor.name for engine in engines_of(model)] == ["window"]
    assert (
        "".join(generate(model, TOKENIZER, "12", "knorm", 48, 16, rows=4, max_new_tokens=20, stream=True))
        == expected[0]
    )
    assert [engine.compressor.name for engine in engines_of(model)] == ["knorm"]
    for _ in range(2):
        with pytest.raises(OutOfMemory):
            text("window", budget=480)


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


# ---------------------------------------------------------------------------------------- text in pieces


def bytewise():
    """Every byte is a token, and 97 letters and pairs more; id 0 is special."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(["<eos>", *alphabet])}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def with_byte_fallback():
    """Words with their spaces, as SentencePiece writes them, and a token for every byte; id 0 is special."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = ["▁the", "▁", "s", "▁▁", "ö", "."]
    vocabulary = {symbol: i for i, symbol in enumerate(["<eos>", *words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


BYTEWISE, FALLBACK = bytewise(), with_byte_fallback()


def of_characters(tokenizer, text: str) -> list[int]:
    if tokenizer is BYTEWISE:
        return tokenizer.encode(text)
    return [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in text.encode()]


@st.composite
def token_lists(draw, tokenizer):
    """Characters of one to four bytes, whole or cut, among random tokens and special ones."""
    parts = st.one_of(
        st.text(st.sampled_from("aé你🙂\ufffd \n"), min_size=1, max_size=3).map(
            lambda text: of_characters(tokenizer, text)
        ),
        st.sampled_from("é你🙂").map(lambda text: of_characters(tokenizer, text)[:-1]),
        st.lists(
            st.integers(0, len(tokenizer) + 2), max_size=3
        ),  # unknown ids among them: a model may have more than its tokenizer
        st.just([0]),
    )
    return [token for part in draw(st.lists(parts, max_size=60)) for token in part]


@settings(deadline=None, max_examples=150)
@given(data=st.data(), name=st.sampled_from(["bytes", "fallback", "characters"]), context=st.sampled_from([2, 5, 64]))
def test_pieces_make_up_the_text(data, name, context):
    tokenizer = {"bytes": BYTEWISE, "fallback": FALLBACK, "characters": TOKENIZER}[name]
    tokens = data.draw(st.lists(st.integers(0, 97), max_size=200) if name == "characters" else token_lists(tokenizer))
    expected = tokenizer.decode(tokens, skip_special_tokens=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "_CONTEXT", context)
        text, told, at = TextPieces(tokenizer), "", 0
        while at < len(tokens):
            step = data.draw(st.integers(1, 9))
            told += text.add(tokens[at : at + step])
            assert expected.startswith(told)
            at += step
        assert told + text.rest() == expected


def test_whole_characters_are_not_held_back():
    said = "größer: 你好 🙂!"
    for tokenizer, certain in ((BYTEWISE, said), (FALLBACK, "")):  # bytes that are read as a whole wait for their end
        text = TextPieces(tokenizer)
        assert "".join(text.add([token]) for token in of_characters(tokenizer, said)) == certain
        assert certain + text.rest() == said
    text = TextPieces(FALLBACK)
    assert text.add(of_characters(FALLBACK, said)) == "" and text.add([1]) == said + " the"


def test_a_long_text_is_not_decoded_again_and_again(monkeypatch):
    asked, text, long = [], TextPieces(BYTEWISE), "a long text, 你好 " * 200
    original = generation._decode
    monkeypatch.setattr(
        generation, "_decode", lambda tokenizer, tokens: asked.append(len(tokens)) or original(tokenizer, tokens)
    )
    assert "".join(text.add([token]) for token in BYTEWISE.encode(long)) + text.rest() == long
    assert max(asked) < 140


def test_a_long_silence_loses_no_space(monkeypatch):
    """A context without text would be the text's beginning, where SentencePiece writes no space."""
    monkeypatch.setattr(generation, "_CONTEXT", 2)
    text = TextPieces(FALLBACK)
    assert (
        "".join(text.add([token]) for token in [1, 1, 1, 1, 0, 0, 0, 0, 0, 2, 0, 0, 1, 3]) + text.rest()
        == "the the the the  thes"
    )


def test_a_models_characters_that_span_tokens_stream_alike():
    model = tiny("qwen2", vocab_size=300)
    for seed in range(5):
        options = dict(temperature=2.0, seed=seed, budget=16, interval=8, max_new_tokens=60)
        whole = generate(model, BYTEWISE, "größer", **options)
        pieces = list(generate(model, BYTEWISE, "größer", stream=True, **options))
        assert "\ufffd" in whole and "".join(pieces) == whole and len(pieces) > 5


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
        ("1", {"compressor": make("rkv"), "compressor_options": {"sinks": 1}}, "make it with them"),
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
