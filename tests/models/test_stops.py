"""One set of stop ids: from chat template, tokenizer and configs; what warm-up teaches is what rollouts stop at."""

import json

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sparse_rl import Engine, Sampling, SparseRLError, generate, load_model, tasks
from sparse_rl.config import make_recipe
from sparse_rl.models.stops import Ends, end_of_turn, end_token, ends_of, own_stop_ids, repair, stop_ids
from sparse_rl.train.warmup import Batches, warmup
from sparse_rl.train.worker import Sampler

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMOLLM2 = (  # as its GGUF file has it
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ECHO = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
REFUSING = "{{ raise_exception('no assistant here') }}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # 0, 1, 2: SmolLM2's


def make_tokenizer(eos: str | None, template: str | None = None) -> PreTrainedTokenizerFast:
    symbols = [*SPECIAL, *map(chr, range(32, 127)), "\n"]
    tokenizer = Tokenizer(WordLevel({symbol: i for i, symbol in enumerate(symbols)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, additional_special_tokens=SPECIAL)
    made.chat_template = template
    return made


def make_model(config=None, generation=None) -> LlamaForCausalLM:
    """A tiny model whose config and generation config name these ids."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            bos_token_id=None, eos_token_id=config, pad_token_id=None,
        )
    )  # fmt: skip
    model.generation_config = GenerationConfig(eos_token_id=generation)
    return model.eval()


PAIRS = {  # tokenizer's eos, template, config, generation config -> stop ids, the one that is taught
    "smollm2 gguf, transformers 5.17": (SPECIAL[1], SMOLLM2, 2, 2, (2,), 2),
    "smollm2 gguf, transformers 5.22": (SPECIAL[2], SMOLLM2, 2, 2, (2,), 2),
    "chat folder, qwen2.5-instruct": (SPECIAL[2], CHATML, 2, [2, 0], (0, 2), 2),
    "base with a template, qwen2.5": (SPECIAL[0], CHATML, 0, 0, (0, 2), 2),
    "base folder": (SPECIAL[0], None, 0, 0, (0,), 0),
    "base, only the config knows": (None, None, 0, None, (0,), 0),
    "base, only the tokenizer knows": (SPECIAL[0], None, None, None, (0,), 0),
    "chat, the template writes the tokenizer's": (SPECIAL[2], ECHO, 2, [2, 0], (0, 2), 2),
    "the config sides with the tokenizer": (SPECIAL[0], None, 0, [5, 9], (0, 5, 9), 0),
    "a template that refuses": (SPECIAL[0], REFUSING, 0, 0, (0,), 0),
}


@pytest.mark.parametrize("name", PAIRS)
def test_stop_ids(name):
    eos, template, config, generation, stops, taught = PAIRS[name]
    model, tokenizer = make_model(config, generation), make_tokenizer(eos, template)
    assert stop_ids(model, tokenizer) == stops
    assert end_token(model, tokenizer) == taught and taught in stops
    repair(model, tokenizer)
    assert stop_ids(model, tokenizer) == stops and end_token(model, tokenizer) == taught
    if ends_of(model, tokenizer).turn is not None:
        assert tokenizer.eos_token_id in stops and taught in own_stop_ids(model)


def test_what_a_template_writes_after_an_answer():
    assert end_of_turn(make_tokenizer(SPECIAL[0]), set()) is None
    assert end_of_turn(make_tokenizer(SPECIAL[0], CHATML), set()) == 2
    assert end_of_turn(make_tokenizer(SPECIAL[2], ECHO), set()) is None  # it only repeats the tokenizer
    plain = make_tokenizer(SPECIAL[0], "{% for m in messages %}[{{ m.content }}] {% endfor %}")
    assert end_of_turn(plain, set()) is None  # ] is a token like any other
    assert end_of_turn(plain, {plain.convert_tokens_to_ids("]")}) == plain.convert_tokens_to_ids("]")
    assert end_of_turn(make_tokenizer(SPECIAL[0], "{{ messages[0].content }}"), set()) is None


def test_a_disagreement_that_nothing_decides_is_refused():
    for template in (None, ECHO, REFUSING):
        model, tokenizer = make_model(2, [2, 0]), make_tokenizer(SPECIAL[1], template)
        with pytest.raises(
            SparseRLError, match=r"with id 1, but the model stops at 2 and 0, .* set tokenizer.eos_token"
        ):
            stop_ids(model, tokenizer)
        repair(model, tokenizer)
        assert tokenizer.eos_token_id == 1 and own_stop_ids(model) == (2, 0)  # left as it was
    with pytest.raises(SparseRLError, match="has an end token, so a solution could not end"):
        end_token(make_model(), make_tokenizer(None))
    assert stop_ids(make_model(), make_tokenizer(None)) == ()
    assert Ends(turn=7, generation=(), config=(), tokenizer=7).stops() == (7,)


def save(folder, model, tokenizer) -> str:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_loading_repairs_the_tokenizer(tmp_path):
    folder = save(tmp_path / "m", make_model(2, 2), make_tokenizer(SPECIAL[1], SMOLLM2))
    model, tokenizer = load_model(folder, device="cpu")
    assert (tokenizer.eos_token, tokenizer.eos_token_id, own_stop_ids(model)) == (SPECIAL[2], 2, (2,))
    folder = save(tmp_path / "base", make_model(0, 0), make_tokenizer(SPECIAL[0], CHATML))
    model, tokenizer = load_model(folder, device="cpu")
    assert (tokenizer.eos_token_id, own_stop_ids(model)) == (0, (0, 2))  # a base model also stops at the end of a turn
    model.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "generation_config.json").read_text())["eos_token_id"] == [0, 2]


@pytest.mark.parametrize("name", ["tiny", "tiny:2x64", "random:qwen2.5-0.5b", "random:llama-3.2-1b"])
def test_models_by_shape_agree_with_their_tokenizer(name, monkeypatch):
    small = (32, 64, 1, 2, 1, 16, 128, True, 512)
    shapes = {"qwen2.5-0.5b": ("qwen2", *small), "llama-3.2-1b": ("llama", *small)}
    monkeypatch.setattr("sparse_rl.models.shape.SHAPES", shapes)
    model, tokenizer = load_model(name, device="cpu")
    assert stop_ids(model, tokenizer) == (tokenizer.eos_token_id,)


class Ask(tasks.Task):
    """Prompts as chats, with a solution."""

    def __getitem__(self, i):
        return tasks.Prompt([{"role": "user", "content": f"Say {i % 10}."}], str(i % 10))

    def solution(self, prompt):
        return prompt.answer

    def reward(self, prompt, text):
        return float(text == prompt.answer)


def test_warm_up_teaches_what_rollouts_stop_at(tmp_path, monkeypatch):
    monkeypatch.setitem(tasks.TASKS, "ask", Ask)
    folder = save(tmp_path / "start", make_model(2, 2), make_tokenizer(SPECIAL[1], SMOLLM2))
    recipe = make_recipe({
        "model": {"name": folder}, "task": {"name": "ask"},
        "rollout": {"max_new_tokens": 16, "prompts": 2, "group_size": 2, "rows": 4},
        "warmup": {"steps": 80, "batch": 32, "lr": 1e-2}, "eval": {"prompts": 16},
    })  # fmt: skip
    found = warmup(recipe, tmp_path / "warm", show=False)
    assert found["truncated"] < 0.1
    model, tokenizer = load_model(str(tmp_path / "warm"), device="cpu")
    assert tokenizer.eos_token_id == 2
    task = Ask()
    taught = Batches(tokenizer, task, 2, 1, end_token(model, tokenizer))[0][0][1][-1]
    sampler = Sampler(recipe, model, tokenizer, task)
    assert taught == 2 and sampler.sampling.stop_ids == stop_ids(model, tokenizer) == own_stop_ids(model) == (2,)
    chat = task[3].text
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    (done,) = Engine(model, "dense", rows=1).generate([ids], sampling=Sampling(16, temperature=0.0))
    assert done.finish_reason == "stop" and done.response_tokens[-1] == 2
    answer = generate(model, tokenizer, chat, compressor="dense", max_new_tokens=16, temperature=0.0)
    assert answer == tokenizer.decode(done.response_tokens[:-1])
