"""`generate` keeps engines with their model, few of them, and they are freed with it."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

from sparse_rl import COMPRESSORS, Engine, OutOfMemory, generate
from sparse_rl.models import tiny_tokenizer
from tests.helpers.models import tiny

TOKENIZER = tiny_tokenizer()
TOKENIZER.eos_token = None  # responses run to their limit
SMALL = dict(budget=16, interval=8, max_new_tokens=40)


def fresh(name: str = "llama", **changes):
    """Made anew, not a copy of one that other tests may have left hooks on."""
    return tiny.__wrapped__(name, **changes)


def engines_of(model) -> list[Engine]:
    return list(vars(model)["_sparse_rl_engines"].engines.values())


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

    made, init = weakref.WeakSet(), module.SlotCache.__init__

    def watched(self, *args):
        made.add(self)
        init(self, *args)

    def taken() -> int:
        return sum(cache.nbytes for cache in made)

    model = fresh()
    expected = [text(name) for name in ("knorm", "window")]
    model = fresh()
    monkeypatch.setattr(module.SlotCache, "__init__", watched)
    assert text("knorm") == expected[0]
    gc.collect()
    memory = taken() * 3 // 2
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
