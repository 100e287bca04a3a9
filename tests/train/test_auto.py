"""`auto` in a recipe: micro-batches and recomputing that the memory plan has room for, kept for the rest of the run."""

import itertools
from pathlib import Path

import pytest
import torch
import yaml

from sparse_rl.config import load_recipe, make_recipe
from sparse_rl.errors import SparseRLError
from sparse_rl.planning.memory import size
from sparse_rl.train import auto
from sparse_rl.train.run import choose_for, plan_run, train, with_values
from tests.helpers.runs import recipe, run, write_recipe

AUTO = {"learn": {"micro_batch_tokens": "auto"}, "model": {"gradient_checkpointing": "auto"}}
SMALL = {"run": {"steps": 1, "samples": 0, "diagnose": 0}, "eval": {"every": 0}}


def both(**more):
    return recipe(learn={**AUTO["learn"], **more.get("learn", {})}, model=AUTO["model"], **SMALL)


def test_the_first_that_fits_is_chosen():
    """The order is a promise: more tokens first, recomputing only where 16,384 do not fit without."""
    given, asked = both(), []

    def choice(allowed) -> tuple:
        asked.clear()
        return tuple(auto.choose(given, lambda keys: asked.append(dict(keys)) or allowed(keys)).values())

    assert choice(lambda keys: True) == (65536, False)
    assert choice(lambda keys: keys[auto.TOKENS] <= 16384) == (16384, False)
    assert choice(lambda keys: keys[auto.CHECKPOINTING]) == (65536, True)
    assert choice(lambda keys: keys[auto.CHECKPOINTING] and keys[auto.TOKENS] <= 5000) == (4096, True)
    assert choice(lambda keys: keys[auto.CHECKPOINTING] == "offload") == (16384, "offload")
    assert choice(lambda keys: False) == (1024, "offload") and len(asked) == 13  # what takes least, if nothing fits
    one = recipe(model=AUTO["model"], **SMALL)
    assert auto.choose(one, lambda keys: False) == {auto.CHECKPOINTING: "offload"}
    divided = recipe(model={**AUTO["model"], "shard": True}, **SMALL)
    assert auto.choose(divided, lambda keys: False) == {auto.CHECKPOINTING: True}
    other = recipe(learn=AUTO["learn"], **SMALL)
    assert auto.choose(other, lambda keys: keys[auto.TOKENS] < 20_000) == {auto.TOKENS: 16384}
    assert auto.choose(recipe(**SMALL), lambda keys: True) == {} and auto.choose(given, None) == {
        auto.TOKENS: 16384,
        auto.CHECKPOINTING: False,
    }


@pytest.mark.parametrize("processes", [1, 2])
def test_what_is_chosen_for_a_gpu_fits_it_and_nothing_faster_does(processes):
    base = {"learn.micro_batch_tokens": "auto", "model.gradient_checkpointing": "auto"}
    given = load_recipe("qwen2.5-1.5b-simplerl", list(base.items()))
    speeds, columns = [], {"choice": [], "plan": []}
    for gigabytes in (44, 48, 60, 80, 139):
        memory = gigabytes * 2**30
        chosen = choose_for(given, 1024, memory, processes)
        plan = plan_run(with_values(given, chosen), 1024, processes)
        assert plan.fits(memory)
        order = [*itertools.product((False, True), auto.SIZES), *((True, tokens) for tokens in auto.SMALLER)]
        place = order.index((chosen[auto.CHECKPOINTING], chosen[auto.TOKENS]))
        for recompute, tokens in order[:place]:
            keys = {auto.CHECKPOINTING: recompute, auto.TOKENS: tokens}
            assert not plan_run(with_values(given, keys), 1024, processes).fits(memory)
        speeds.append(-place)
        if processes == 1 and gigabytes in (48, 80, 139):
            columns["choice"].append(f"{chosen[auto.TOKENS]}, {str(chosen[auto.CHECKPOINTING]).lower()}")
            columns["plan"].append(size(plan.total_bytes))
    page = (Path(__file__).parents[2] / "docs/train.md").read_text()
    for name, cells in columns.items() if processes == 1 else ():
        assert f" | {' | '.join(cells)} |" in page, name
    assert speeds == sorted(speeds) and len(set(speeds)) > 2  # more memory, faster settings


def test_a_run_records_its_choice_and_keeps_it(tmp_path, monkeypatch):
    """As on a machine without a GPU, wherever the test runs: without its memory there is nothing to choose by."""
    monkeypatch.setattr(auto, "device_memory", lambda: None)
    given, folder = write_recipe(tmp_path, **AUTO, **SMALL), tmp_path / "run"
    done = run("train", given, "--out", folder)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert "auto: learn.micro_batch_tokens 16384, model.gradient_checkpointing false (the defaults" in said
    user = yaml.safe_load((folder / "recipe.yaml").read_text())
    assert user["learn"]["micro_batch_tokens"] == user["model"]["gradient_checkpointing"] == "auto"
    assert yaml.safe_load((folder / "chosen.yaml").read_text()) == {auto.TOKENS: 16384, auto.CHECKPOINTING: False}
    (folder / "chosen.yaml").write_text(yaml.safe_dump({auto.TOKENS: 300, auto.CHECKPOINTING: True, "x": 1}))
    resumed = train(load_recipe(folder, [("run.steps", "2")]), folder, resume=True, show=False)
    assert resumed.learner.micro_batch_tokens == resumed.students.micro_batch_tokens == 300
    assert resumed.model.is_gradient_checkpointing
    assert yaml.safe_load((folder / "chosen.yaml").read_text()) == {auto.TOKENS: 300, auto.CHECKPOINTING: True}
    changed = load_recipe(folder, [("run.steps", "3"), (auto.TOKENS, "500")])
    last = train(changed, folder, resume=True, show=False)  # a number of one's own wins
    assert last.learner.micro_batch_tokens == 500 and last.model.is_gradient_checkpointing


def test_a_gpu_gets_what_its_plan_says(tmp_path, monkeypatch):
    """The device is not there, only its memory: a run makes the same choice, and plans for the longest prompt."""
    given = both()
    tight = plan_run(with_values(given, {auto.TOKENS: 16384, auto.CHECKPOINTING: False}), 16)
    seen = []

    def planned(recipe, prompt_tokens, processes=1):
        seen.append(prompt_tokens)
        return plan_run(recipe, prompt_tokens, processes)

    monkeypatch.setattr("sparse_rl.train.run.plan_run", planned)
    monkeypatch.setattr(auto, "device_memory", lambda: tight.total_bytes // 4)
    trainer = train(given, tmp_path / "run", show=False)
    longest = max(len(trainer.tokenizer.encode(p.text)) for p in trainer.task.sample(0, auto.PROMPTS))
    assert trainer.recipe.checkpoints_gradients and set(seen) == {longest}
    assert trainer.recipe.micro_batch_tokens == yaml.safe_load((tmp_path / "run/chosen.yaml").read_text())[auto.TOKENS]


def test_the_plan_says_what_a_run_would_choose():
    keys = ["--learn.micro_batch_tokens", "auto", "--model.gradient_checkpointing", "auto", "--prompt-tokens", 1024]
    said = run("plan", "--recipe", "qwen2.5-1.5b-simplerl", *keys, "--gpu-memory", 139).stdout
    assert "learn.micro_batch_tokens auto: " in said and "model.gradient_checkpointing auto: " in said
    small = run("plan", "--recipe", "qwen2.5-1.5b-simplerl", *keys, "--gpu-memory", 48).stdout
    assert "model.gradient_checkpointing auto: true" in small and "fits" in small
    many = run("plan", "--recipe", "qwen2.5-1.5b-simplerl", *keys, "--gpus", 2)
    assert many.returncode == 0, many.stderr


def test_other_words_are_refused():
    for section, message in (
        (
            {"learn": {"micro_batch_tokens": "most"}},
            r"learn.micro_batch_tokens is 'most'; it must be",
        ),
        ({"learn": {"micro_batch_tokens": 0}}, "learn.micro_batch_tokens"),
        ({"learn": {"micro_batch_tokens": 1.5}}, "learn.micro_batch_tokens is 1.5"),
        ({"model": {"name": "tiny", "gradient_checkpointing": "yes"}}, "must be true, false, selective"),
        ({"model": {"name": "tiny", "gradient_checkpointing": 3}}, "model.gradient_checkpointing is 3"),
    ):
        with pytest.raises(SparseRLError, match=message):
            make_recipe({"model": {"name": "tiny"}, "task": {"name": "sums"}, **section})


@pytest.mark.gpu
def test_the_choice_follows_a_capped_allocator():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    whole = auto.device_memory()
    torch.cuda.set_per_process_memory_fraction(0.25)
    try:
        assert auto.device_memory() == pytest.approx(whole / 4, rel=0.01)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
