"""Models by name: character-level ones of any size, folders that are not there; and the encoding of prompts."""

import pytest
import torch

from sparse_rl import Engine, Sampling
from sparse_rl.errors import SparseRLError
from sparse_rl.models import ModelShape, encode, load_config, load_model, tiny_tokenizer, weight_bytes
from tests.helpers.runs import run


def parameters(name: str) -> int:
    return weight_bytes(load_config(name), torch.float32) // 4


def test_a_fresh_model_has_the_named_size():
    shape = ModelShape.of(load_config("tiny:4x256"))
    assert (shape.layers, shape.hidden, shape.query_heads, shape.heads, shape.head_dim) == (4, 256, 8, 4, 32)
    assert [round(parameters(name) / 1e6, 1) for name in ("tiny", "tiny:4x256", "tiny:10x512")] == [0.3, 3.0, 29.1]


def test_a_fresh_model_is_made_from_its_seed_and_runs():
    (model, tokenizer), (again, _), (other, _) = (
        load_model("tiny:2x64", device="cpu", seed=seed) for seed in (1, 1, 2)
    )
    weights = [m.get_input_embeddings().weight for m in (model, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert sum(p.numel() for p in model.parameters()) == parameters("tiny:2x64")
    done = Engine(model, budget=16, interval=8, rows=4).generate(
        [tokenizer.encode("1+2=")], sampling=Sampling(40, stop_ids=())
    )
    assert len(done[0].tokens) == 44 and done[0].sampler_logprobs.isfinite().all()


@pytest.mark.parametrize(
    "name, sentence",
    [
        ("tiny:4", "'tiny:4' does not name a size; write tiny:LAYERSxWIDTH"),
        ("tiny:0x64", "'tiny:0x64' does not name a size"),
        ("tiny:4x200", "the width 200 is not a multiple of 64 .*; use tiny:4x192"),
    ],
)
def test_sizes_that_cannot_be_are_refused(name, sentence):
    with pytest.raises(SparseRLError, match=sentence):
        load_model(name)


def test_a_folder_that_is_not_there_is_not_looked_for_elsewhere(monkeypatch):
    from transformers import AutoConfig, AutoModelForCausalLM

    def asked(*args, **options):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(AutoConfig, "from_pretrained", asked)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", asked)
    for name in ("models/countdown-search", "./here", "/nowhere/at/all", "runs/x/checkpoints/step-000001"):
        for load in (load_config, load_model):
            with pytest.raises(SparseRLError, match=f"there is no model in {name}; make it first"):
                load(name)
    with pytest.raises(SparseRLError, match=r"`sparse-rl warmup recall-warmup --out models/recall`"):
        load_config("models/recall")


def test_a_wrong_name_is_answered_without_the_hub_or_after_one_question(monkeypatch, tmp_path):
    import huggingface_hub
    import transformers.utils.hub
    from transformers import AutoTokenizer

    asked = []

    def no_hub(source, *file, **options):
        asked.append(source)
        raise OSError("no connection")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", no_hub)
    monkeypatch.setattr(transformers.utils.hub, "cached_file", no_hub)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", no_hub)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    sentences = {
        "tiny-sum": "there is no model 'tiny-sum'; did you mean 'tiny-sums'?",
        "Tinysums": "did you mean 'tiny-sums'?",
        "runs/nope": "there is no model in runs/nope",
        "../ex/a": "there is no model in ../ex/a",
        "~/nope": "there is no model in ~/nope",
    }
    for name, sentence in sentences.items():
        done = run("eval", name)
        assert done.returncode == 1 and sentence in done.stderr, done.stderr
        with pytest.raises(SparseRLError, match="there is no model"):
            load_model(name)
    with pytest.raises(SparseRLError, match=r"did you mean 'qwen2.5-1.5b'"):
        load_config("qwen2.5-1.5")
    assert asked == []
    for name in ("nope/never-there", "never-there", "mine/nope"):  # a folder may have the name of an account
        done = run("eval", name, "--bench", "sums")
        assert done.returncode == 1 and f"cannot load {name!r} (no connection); give a hub id" in done.stderr
        assert asked == [huggingface_hub.hf_hub_url(name, "config.json")]
        asked.clear()


def test_chat_template():
    tokenizer = tiny_tokenizer()
    with pytest.raises(SparseRLError, match="no chat template"):
        encode(tokenizer, [{"role": "user", "content": "hi"}])
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    assert tokenizer.decode(encode(tokenizer, [{"role": "user", "content": "hi"}])) == "[hi]>"
    assert tokenizer.decode(encode(tokenizer, "hi")) == "hi"


def test_half_of_a_surrogate_pair_is_no_prompt():
    for prompt in ("1+\ud800", [{"role": "user", "content": "1+\ud800"}]):
        with pytest.raises(SparseRLError, match=r"half of a surrogate pair, which is not text: '1\+\\ud800'; repair"):
            encode(tiny_tokenizer(), prompt)


def test_characters_that_tiny_does_not_have_are_named():
    from sparse_rl.models import tiny_tokenizer, unknown_to_tiny

    (line,) = unknown_to_tiny(tiny_tokenizer(), ["3 ¥ 4 €", "1+1=", "数"])
    assert line.startswith("2 prompts hold characters") and "'¥' '€' '数'" in line
    assert unknown_to_tiny(tiny_tokenizer(), ["1+1=\n"]) == []
