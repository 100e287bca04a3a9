"""Reward models: scores against transformers' own, whole runs with one, and what is refused."""

import json
import shlex
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification

from sparse_rl.errors import SparseRLError
from sparse_rl.files import read_lines
from sparse_rl.learn.advantage import without_variance
from sparse_rl.models import load_model, load_reward_model, tiny_tokenizer
from sparse_rl.planning.training import classifier_bytes
from sparse_rl.tasks import Grade, Prompt, make
from sparse_rl.train.log import Clock
from sparse_rl.train.loop import Trainer
from sparse_rl.train.merge import merge
from sparse_rl.train.rewards import AddedRewards
from sparse_rl.train.run import plan_run, train
from sparse_rl.train.worker import Sampler
from tests.helpers.reward_models import make_reward_model
from tests.helpers.runs import recipe, run, write_recipe
from tests.test_docs_blocks import SHORT, blocks, file_of

TEXTS = ["1+1=", "a longer question, with an answer?", "x", "12 + 7"]
RESPONSES = ["2", "No. Or rather: yes.\n", "yy", "19"]
PROMPTS = "def prompt(i): return f'{i % 9}?', i\ndef reward(answer, text): return 0.0\n"
SMALL = {"rollout": {"max_new_tokens": 24}, "run": {"diagnose": 0, "steps": 2}, "eval": {"every": 0}}


def by_hand(folder: str, texts) -> list[float]:
    """One by one, with nothing of ours."""
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return [model(torch.tensor([tokenizer.encode(text)])).logits[0, 0].item() for text in texts]


@pytest.mark.parametrize("batch_tokens", [1, 64, 10_000])
@pytest.mark.parametrize("pad", [0, None])
@pytest.mark.parametrize("chat", [False, True])
def test_scores_are_those_of_the_classifier(chat, pad, batch_tokens, tmp_path):
    folder = make_reward_model(tmp_path / "scorer", chat, pad_token_id=pad)
    model = load_reward_model(folder, batch_tokens)
    joined = [f"u:{p}\na:{r}\n" if chat else p + r for p, r in zip(TEXTS, RESPONSES)]
    expected = by_hand(folder, joined)
    assert max(expected) - min(expected) > 0.1
    assert model.scores(TEXTS, RESPONSES) == pytest.approx(expected, abs=1e-5)
    if chat:  # text is one message of the user
        messages = [[{"role": "user", "content": text}] for text in TEXTS]
        assert model.scores(messages, RESPONSES) == model.scores(TEXTS, RESPONSES)
    assert not any(p.requires_grad for p in model.model.parameters()) and not model.model.training


def test_an_encoder_can_score_too(tmp_path):
    """BERT pools its first token and has a table of positions; so has RoBERTa, whose table is two rows longer."""
    torch.manual_seed(0)
    size = dict(vocab_size=len(tiny_tokenizer()), hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    config = BertConfig(**size, num_attention_heads=2, max_position_embeddings=66, num_labels=1, pad_token_id=0)
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = 64
    tokenizer.save_pretrained(tmp_path)
    model = load_reward_model(str(tmp_path))
    expected = by_hand(str(tmp_path), [p + r for p, r in zip(TEXTS, RESPONSES)])
    assert model.scores(TEXTS, RESPONSES) == pytest.approx(expected, abs=1e-5)
    assert model.scores(["x" * 60, "x" * 60], ["yyyy", "yyyyy"])[1] is None and model.context == 64


class Peak(TorchDispatchMode):
    """The most bytes that tensors made inside had at a time."""

    def __init__(self):
        super().__init__()
        self.live: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.live:
                self.live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, storage._cdata)
        self.most = max(self.most, sum(self.live.values()))
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_forward_pass_takes_what_the_plan_counts(dtype, tmp_path):
    model = load_reward_model(make_reward_model(tmp_path / "scorer", num_hidden_layers=6))
    model.model.to(dtype)
    rows, longest, config = 4, 512, model.model.config
    texts = ["x" * (longest - 1 - 50 * i) for i in range(rows)]
    with Peak() as peak:
        model.scores(["y"] * rows, texts)
    counted = classifier_bytes(config.hidden_size, config.intermediate_size, dtype.itemsize, rows * longest, longest)
    assert peak.most <= counted <= 2.5 * peak.most


def test_chat_messages_need_a_template(tmp_path):
    model = load_reward_model(make_reward_model(tmp_path / "scorer"))
    with pytest.raises(SparseRLError, match="has no chat template; use prompts of plain text"):
        model.scores([[{"role": "user", "content": "hello"}]], ["x"])


def test_what_cannot_be_scored_costs_the_completion(tmp_path):
    short = make_reward_model(tmp_path / "scorer", max_position_embeddings=30)
    rewards = AddedRewards(recipe(task={"reward_model": short}, rollout={"max_new_tokens": 24}))
    task, prompts = make("sums"), [Prompt("1+1=", [1, 1]), Prompt("1+1=" * 10, [1, 1])]
    good, bad = rewards.grade(task, prompts, [], ["2", "2"])
    assert good.parts.keys() == {"task", "reward_model"} and bad == Grade(min(good.reward, 0.0), "error")
    assert "a text is longer than 30 tokens" in rewards.last_error
    rewards.model.model.score.weight.fill_(torch.nan)
    rewards.last_error = None
    assert rewards.grade(task, prompts[:1], [], ["2"]) == [Grade(0.0, "error")] and "score is nan" in rewards.last_error


class FailsNow:
    """A reward model that cannot score some completions, and likes those of a later call less."""

    name, context = "scorer", 1000

    def __init__(self):
        self.calls = 0

    def scores(self, prompts, texts):
        self.calls += 1
        return [None if row % 4 == 3 else -float(self.calls) for row in range(len(texts))]


def test_what_cannot_be_scored_gets_the_lowest_reward_of_the_step(tmp_path):
    """Whichever round, and so whichever process, graded it."""
    settings = recipe(**SMALL, task={"reward_model": make_reward_model(tmp_path / "scorer")}, learn={"dynamic": 1})
    trainer = Trainer(settings, tmp_path / "run", show=False)
    trainer.sampler.rewards.model, trainer.sampler.rewards.whatever_their_length = (
        FailsNow(),
        lambda g: torch.zeros(len(g)),
    )
    rollout = trainer.collect(Clock())
    scored = [g.reward for g in rollout.grades if "reward_model" in g.parts]
    assert len(rollout.grades) == 32 and min(scored) <= -2 < max(scored)
    assert {g.reward for g in rollout.grades if "reward_model" not in g.parts} == {min(scored)}


def test_groups_differ_where_some_completions_have_no_score(tmp_path):
    """Dynamic sampling sees that from the group alone, not from what other completions got."""
    rewards = AddedRewards(recipe(**SMALL, task={"reward_model": make_reward_model(tmp_path / "scorer")}))
    rewards.model = FailsNow()
    prompts = [Prompt("1+1=", [1, 1])] * 4
    grades = rewards.grade(make("sums"), prompts, [], ["x"] * 4)
    assert len({g.reward for g in grades}) == 1  # the lowest of all
    assert without_variance(rewards.whatever_their_length(grades)[None]).tolist() == [False]
    assert without_variance(rewards.whatever_their_length(grades[3:] * 4)[None]).tolist() == [True]


def test_a_score_that_is_too_large_for_the_reward_costs_the_completion(tmp_path):
    scorer = make_reward_model(tmp_path / "scorer")
    rewards = AddedRewards(recipe(**SMALL, task={"reward_model": scorer, "reward_model_weight": 1e308}))
    rewards.model.model.score.weight.mul_(1e9)
    assert rewards.grade(make("sums"), [Prompt("1+1=", [1, 1])], [], ["2"]) == [Grade(0.0, "error")]
    assert "counted 1e+308 times" in rewards.last_error


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no such role') }}", "{% for %}", "{{ messages[5].content }}"]
)
def test_a_chat_template_that_fails_is_refused_before_the_rollout(template, tmp_path):
    scorer = make_reward_model(tmp_path / "scorer", chat=True)
    tokenizer = AutoTokenizer.from_pretrained(scorer)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(scorer)
    model, tokenizer = load_model("tiny-sums")
    with pytest.raises(SparseRLError, match=r"the chat template of the reward model .* on messages of user, assistant"):
        Sampler(recipe(**SMALL, task={"reward_model": scorer}), model, tokenizer, make("sums"))


def test_a_tokenizer_of_another_model_is_refused_before_the_rollout(tmp_path):
    scorer = make_reward_model(tmp_path / "scorer", vocab_size=20)
    model, tokenizer = load_model("tiny-sums")
    with pytest.raises(SparseRLError, match=r"gave the id \d+, but the model has only 20 tokens"):
        Sampler(recipe(**SMALL, task={"reward_model": scorer}), model, tokenizer, make("sums"))


def test_a_run_learns_from_a_reward_model_and_goes_on_to_the_byte(tmp_path):
    """RLHF: the task only has prompts. Rewards are the classifier's, weighted, and a stop leaves no mark."""
    scorer = make_reward_model(tmp_path / "scorer")
    (tmp_path / "prompts.py").write_text(PROMPTS)
    task = {"name": str(tmp_path / "prompts.py"), "workers": 1, "reward_model": scorer, "reward_model_weight": 0.5}
    settings = {**SMALL, "task": task, "eval": {"every": 2, "prompts": 2}}
    whole = recipe(**settings)
    train(whole, tmp_path / "whole", show=False)
    train(recipe(**{**settings, "run": {"steps": 1, "diagnose": 0}}), tmp_path / "parts", show=False)
    lines = read_lines(tmp_path / "whole" / "metrics.jsonl")
    steps = [line for line in lines if "update/loss" in line]
    for line in steps:
        assert line["reward/task/mean"] == 0 and line["update/grad_norm"] > 0
        assert line["reward/mean"] == pytest.approx(0.5 * line["reward/reward_model/mean"]) != 0
        assert line["advantage/groups_without_variance/frac"] < 1
    held_out = [line for line in lines if "eval/dense/reward" in line]
    assert len(held_out) == 2
    for line in held_out:
        assert line["eval/dense/reward"] == pytest.approx(0.5 * line["eval/dense/reward/reward_model"])
    train(whole, tmp_path / "parts", resume=True, show=False)
    resumed = read_lines(tmp_path / "parts" / "metrics.jsonl")
    assert [line for line in resumed if "update/loss" in line] == steps
    samples = [json.loads(line) for line in (tmp_path / "whole/samples/step-000001/trajectories.jsonl").open()]
    expected = by_hand(scorer, [s["prompt"] + s["text"] for s in samples])
    assert [s["rewards"]["reward_model"] for s in samples] == pytest.approx(expected, abs=1e-5)
    other = make_reward_model(tmp_path / "other", seed=1)
    done = run("train", tmp_path / "whole", "--resume", "--trust", "--task.reward_model", other)
    assert done.returncode == 1 and "task.reward_model is" in done.stderr


@pytest.mark.slow
def test_what_a_reward_model_likes_is_learned(tmp_path):
    """From random weights, on a row of 12 slots: responses come to please a random scorer."""
    scorer = make_reward_model(tmp_path / "scorer")
    (tmp_path / "prompts.py").write_text(PROMPTS)
    settings = recipe(
        model={"name": "tiny"},
        task={"name": str(tmp_path / "prompts.py"), "workers": 1, "reward_model": scorer},
        rollout={"max_new_tokens": 24, "budget": 12, "prompts": 8},
        learn={"method": "shadow"},
        optimizer={"lr": 1e-3},
        eval={"every": 0},
        run={"steps": 12, "checkpoint_every": 12, "diagnose": 0, "samples": 0},
    )
    train(settings, tmp_path / "run", show=False)
    rewards = [line["reward/reward_model/mean"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 3


def test_every_process_scores_its_share(tmp_path):
    settings = recipe(**SMALL, task={"reward_model": make_reward_model(tmp_path / "scorer")})
    model, tokenizer = load_model("tiny-sums")

    def part(rank, processes):
        return Sampler(settings, model, tokenizer, make("sums"), rank, processes).step(1, Clock())

    whole, merged = part(0, 1), merge([part(0, 2), part(1, 2)], settings.rollout.group_size)
    assert whole.texts == merged.texts
    torch.testing.assert_close(whole.rewards, merged.rewards, rtol=1e-5, atol=1e-6)


def test_the_plan_counts_the_reward_model(tmp_path):
    scorer = make_reward_model(tmp_path / "scorer")
    plain, scored = plan_run(recipe(), 40), plan_run(recipe(task={"reward_model": scorer}), 40)
    weights = sum(p.nbytes for p in load_reward_model(scorer).model.parameters())
    assert scored.reward_model_bytes == weights and plain.reward_model_bytes == 0
    assert scored.total_bytes - plain.total_bytes >= weights and scored.grading_bytes > 0
    assert "reward model" in scored.text() and "reward model" not in plain.text()
    told = run("plan", "--recipe", write_recipe(tmp_path, task={"reward_model": scorer}), "--prompt-tokens", 40)
    assert told.returncode == 0 and "grading: activations of the reward model" in told.stdout, told.stderr


def test_what_is_no_reward_model_is_refused(tmp_path):
    good = make_reward_model(tmp_path / "good")
    model, tokenizer = load_model("tiny")
    model.save_pretrained(tmp_path / "language")
    tokenizer.save_pretrained(tmp_path / "language")
    headless = make_reward_model(tmp_path / "headless")
    config = json.loads((tmp_path / "language" / "config.json").read_text())
    (tmp_path / "language-as-scorer").mkdir()
    for file in (tmp_path / "language").iterdir():
        shutil.copy(file, tmp_path / "language-as-scorer")
    config |= {
        "architectures": ["LlamaForSequenceClassification"],
        "id2label": {"0": "score"},
        "label2id": {"score": 0},
    }
    (tmp_path / "language-as-scorer" / "config.json").write_text(json.dumps(config))
    code = json.loads((tmp_path / "headless" / "config.json").read_text())
    code |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine", "AutoModelForSequenceClassification": "m.M"}}
    (tmp_path / "headless" / "config.json").write_text(json.dumps(code))
    cases = {
        str(tmp_path / "nowhere"): "there is no model in .*nowhere",
        make_reward_model(tmp_path / "three", labels=3): "has 3 labels, but a reward is a single number",
        str(tmp_path / "language"): "is a LlamaForCausalLM, which scores nothing",
        str(tmp_path / "language-as-scorer"): "has no weights for 1 of its model's tensors .score.weight",
        headless: "needs the Python code in its folder, which is never run",
        make_reward_model(tmp_path / "short", max_position_embeddings=64): "reads 64 tokens, but responses alone have "
        "up to 64",
    }
    for name, said in cases.items():
        with pytest.raises(SparseRLError, match=said):
            AddedRewards(recipe(task={"reward_model": name}))
    for key, value in (("reward_model_tokens", 0), ("reward_model_weight", float("nan"))):
        with pytest.raises(SparseRLError, match=f"task.{key} is"):
            recipe(task={"reward_model": good, key: value})
    given = write_recipe(tmp_path, task={"reward_model": str(tmp_path / "nowhere")})
    done = run("train", given, "--out", tmp_path / "run")
    assert done.returncode == 1 and "Traceback" not in done.stderr and not (tmp_path / "run").exists()


def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in blocks("docs/reward-models.md"):
        if name := file_of(block):
            Path(name).write_text(block.text)
        for program, *arguments in map(shlex.split, block.commands()):
            if program == "python":
                exec(compile(Path(arguments[0]).read_text(), arguments[0], "exec"), {})
                continue
            done = run(*arguments, *SHORT["train"].split())
            assert program == "sparse-rl" and done.returncode == 0, done.stderr
    (rlhf,), (both,) = (read_lines(Path("runs") / name / "metrics.jsonl") for name in ("rlhf", "both"))
    assert rlhf["reward/mean"] == pytest.approx(rlhf["reward/reward_model/mean"]) != 0 == rlhf["reward/task/mean"]
    expected = both["reward/task/mean"] + 0.1 * both["reward/reward_model/mean"]
    assert both["reward/mean"] == pytest.approx(expected)
