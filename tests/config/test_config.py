"""Recipes: closed keys, typed values, overrides; every shipped recipe loads, and every key has help."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from sparse_rl.cli.options import takes
from sparse_rl.config import SECTIONS, load_recipe, make_recipe, table_of_keys
from sparse_rl.errors import SparseRLError

RECIPES = sorted((Path(__file__).parent.parent.parent / "recipes").glob("*.yaml"))
SMALL = {"model": {"name": "tiny-sums"}, "task": {"name": "sums", "count": 5}}


def test_values_are_typed():
    recipe = make_recipe(
        yaml.safe_load(
            "{model: {name: tiny}, task: {name: sums}, optimizer: {lr: 1e-4, betas: [0, 0.95]}, loss: {beta: 1}}"
        )
    )
    assert recipe.optimizer.lr == 1e-4 and isinstance(recipe.optimizer.lr, float)  # YAML itself reads 1e-4 as text
    assert recipe.optimizer.betas == (0.0, 0.95) and recipe.loss.beta == 1.0
    assert recipe.task.options == {} and make_recipe(SMALL).task.options == {"count": 5}


def test_overrides_by_full_name():
    pairs = [("rollout.budget", "38"), ("task.count", "7"), ("warmup.steps", "9")]
    recipe = make_recipe(SMALL, pairs)
    assert (recipe.rollout.budget, recipe.task.options, recipe.warmup.steps) == (38, {"count": 7}, 9)


def test_overrides_by_last_part():
    recipe = make_recipe(SMALL, [("lr", "1e-5"), ("method", "tis"), ("steps", "3"), ("trackers", "wandb")])
    assert (recipe.optimizer.lr, recipe.learn.method, recipe.run.steps) == (1e-5, "tis", 3)
    assert recipe.run.trackers == ["wandb"]


def test_overrides_of_parts_of_a_correction():
    pairs = [("method", "tis"), ("learn.correction.cap", "3"), ("learn.correction.mask-outside", "[0.1, 10]")]
    correction = make_recipe(SMALL, pairs).learn.resolve_method().correction
    assert correction.cap == 3.0 and correction.mask_outside == (0.1, 10.0) and correction.reject_below is None


def test_a_part_of_a_correction_can_be_switched_off():
    recipe = make_recipe({**SMALL, "learn": {"method": "sparse-rl", "correction": {"cap": None}}})
    assert recipe.learn.resolve_method().correction.cap is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"modle": {}}, "section 'modle'; did you mean 'model'"),
        ({"model": "tiny", "task": {"name": "sums"}}, "section 'model' holds 'tiny'; it must hold keys"),
        ([1], "holds list; a recipe is sections"),
        ({"task": {"name": "sums"}}, "has no section 'model'"),
        ({**SMALL, "rollout": {"bugdet": 3}}, "no key rollout.bugdet; did you mean 'budget'"),
        ({**SMALL, "rollout": {"budget": "many"}}, "rollout.budget is 'many'; it must be a whole number"),
        ({**SMALL, "rollout": {"budget": True}}, "rollout.budget is True"),
        ({**SMALL, "rollout": {"budget": 0}}, "rollout.budget is 0; it must be a whole number of at least 1"),
        ({**SMALL, "rollout": {"temperature": 0}}, "rollout.temperature is 0.0; training needs a positive number"),
        ({**SMALL, "optimizer": {"lr": 1.0}}, "lr 1.0 must be above 0 and below 1"),
        ({**SMALL, "optimizer": {"lr": 0.5, "weight_decay": 1e30}}, r"weight_decay is 1e\+30 and lr 0.5.*at most 2\."),
        ({**SMALL, "optimizer": {"lr": "fast"}}, "optimizer.lr is 'fast'; it must be a number"),
        ({**SMALL, "optimizer": {"lr": float("nan")}}, "optimizer.lr is nan"),
        ({**SMALL, "optimizer": {"betas": [0.9]}}, r"optimizer.betas is \[0.9\]; it must be a list of 2 numbers"),
        ({**SMALL, "learn": {"method": "sparserl"}}, "no method 'sparserl'; did you mean 'sparse-rl'"),
        ({**SMALL, "learn": {"correction": {"capp": 1}}}, "no part 'capp'; did you mean 'cap'"),
        ({**SMALL, "learn": {"correction": {"cap": "big"}}}, "learn.correction.cap is 'big'"),
        ({**SMALL, "learn": {"advantage": "grop"}}, "did you mean 'grpo'"),
        ({**SMALL, "learn": {"method": "tis", "refill": 2}}, "refill is 2 but tis rejects no trajectories"),
        ({**SMALL, "learn": {"minibatches": 9}, "rollout": {"prompts": 2, "group_size": 4}},
         "is 9 but a step has 8 trajectories"),
        ({**SMALL, "rollout": {"group_size": 1}}, "compare completions of a prompt; use at least 2"),
        ({**SMALL, "loss": {"mean": "tokenmean"}}, "did you mean 'token-mean'"),
        ({**SMALL, "loss": {"mean": "token-mean", "renormalise": True}}, "renormalise is true, but"),
        ({**SMALL, "learn": {"correction": {"reject_below": 0}}}, "correction.reject_below is 0.0; it must be above 0"),
        ({**SMALL, "learn": {"correction": {"cap": -1}}}, "correction.cap is -1.0"),
        ({**SMALL, "learn": {"advantage_eps": -1}}, "advantage_eps is -1.0"),
        ({**SMALL, "optimizer": {"eps": -1}}, "eps -1.0"),
        ({**SMALL, "optimizer": {"lr": float("inf")}}, "optimizer.lr is inf; it must be a finite number"),
        ({**SMALL, "optimizer": {"weight_decay": float("inf")}}, "weight_decay is inf; it must be a finite number"),
        ({**SMALL, "optimizer": {"eps": "1e999"}}, "optimizer.eps is '1e999'; it must be a number"),
        ({**SMALL, "ppo": {"gamma": 10**400}}, "; it must be a number"),
        ({**SMALL, "loss": {"beta": float("nan")}}, "loss.beta is nan; it must be a finite number"),
        ({**SMALL, "learn": {"correction": {"cap": float("-inf")}}}, "cap is -inf; it must be a finite number"),
        ({**SMALL, "model": {"name": "tiny", "lora_rank": -1}}, "model.lora_rank is -1"),
        ({**SMALL, "run": {"seed": 10**22}}, "it must be below 2"),
        ({**SMALL, "task": {"name": "sums", 5: 6}}, "task.options has a key 5; its keys are names"),
        ({**SMALL, "task": {"name": "sums", None: 6}}, "task.options has a key None; its keys are names"),
        ({**SMALL, "rollout": {"compressor_options": {5: 6}}}, "rollout.compressor_options has a key 5"),
        ({**SMALL, "model": {"dtype": "bf16"}}, "model.name is not given"),
    ],
)  # fmt: skip
def test_mistakes_get_a_sentence(data, message):
    with pytest.raises(SparseRLError, match=message):
        make_recipe(data)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("temperature", "several keys; write --rollout.temperature or --eval.temperature"),
        ("budgte", "did you mean 'rollout.budget'. .sparse-rl list keys` lists what there is.$"),
        ("rollot.budget", "did you mean 'rollout'"),
        ("correction.mask_outside", "no section 'correction'"),
        ("rollout.budget.x", "names a key inside rollout.budget, which has no keys"),
        ("model.name.foo", "names a key inside model.name"),
    ],
)  # fmt: skip
def test_override_mistakes_get_a_sentence(key, message):
    with pytest.raises(SparseRLError, match=message):
        make_recipe(SMALL, [(key, "1")])


def test_a_missing_or_broken_file(tmp_path):
    with pytest.raises(SparseRLError, match=r"no recipe, file or folder .*none.yaml; `sparse-rl list recipes`"):
        load_recipe(tmp_path / "none.yaml")
    with pytest.raises(SparseRLError, match=r"folder tiny-smus; did you mean 'tiny-sums'\? `sparse-rl list"):
        load_recipe("tiny-smus")
    with pytest.raises(SparseRLError, match=r"letters.py is Python, .* `task: {name: letters.py}`"):
        load_recipe(tmp_path / "letters.py")
    assert load_recipe("tiny-sums") == load_recipe(RECIPES[0].parent / "tiny-sums.yaml")
    (tmp_path / "recipe.yaml").write_text("model: {name: [}")
    with pytest.raises(SparseRLError, match="is not YAML"):
        load_recipe(tmp_path)


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_loads_and_comes_back_the_same(path, tmp_path):
    recipe = load_recipe(path)
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    assert load_recipe(tmp_path) == recipe


def test_every_key_has_help():
    rows = table_of_keys()
    assert len(rows) == sum(len(dataclasses.fields(kind)) for kind in SECTIONS.values())
    assert all(help and default for _, default, help in rows)


@pytest.mark.parametrize(
    "key, sentence",
    [
        ("late", "student.late is now called student.freeze_teacher"),
        ("shuffle-advantages", "the key learn.shuffle_advantages does not exist any more"),
    ],
)
def test_an_old_key_by_its_last_part_gets_its_new_name(key, sentence):
    with pytest.raises(SparseRLError, match=sentence):
        make_recipe(SMALL, [(key, "true")])


def test_options_of_a_compressor_are_spelled_as_in_eval():
    found = load_recipe("tiny-sums", [("compressor.window", "4")])
    assert found.rollout.compressor_options["window"] == 4


SUMS = """
model: {name: tiny}
task: {name: sums, count: 8, seed: 3, overlong: 0.2, reward_weights: {brief: 0.5}}
rollout: {compressor: rkv, budget: 40, compressor_options: {protect_prompt: true, sinks: 2}}
"""


@pytest.mark.parametrize(
    ("keys", "options", "cache", "said"),
    [
        ([], {"count", "seed", "reward_weights"}, {"protect_prompt", "sinks"}, []),
        ([("task.name", "sums")], {"count", "seed", "reward_weights"}, {"protect_prompt", "sinks"}, []),
        ([("task.name", "stories")], {"seed", "reward_weights"}, {"protect_prompt", "sinks"}, ["stories has no count"]),
        ([("task.name", "gym:leg_counting")], {"seed"}, None, ["gym:leg_counting has no count and no reward_weights"]),
        ([("task.name", "my.py")], {"count", "seed", "reward_weights"}, {"protect_prompt", "sinks"}, []),
        ([("task.name", "stories"), ("task.count", "9")], {"count", "seed", "reward_weights"}, None, ["stories has"]),
        ([("compressor", "window")], None, {"sinks"}, ["window has no protect_prompt"]),
        ([("compressor", "snapkv")], None, {"protect_prompt", "sinks"}, []),
        ([("compressor", "window"), ("compressor.protect_prompt", "1")], None, {"protect_prompt", "sinks"}, ["wind"]),
    ],
)  # fmt: skip
def test_another_task_or_compressor_loses_the_options_that_it_has_not(tmp_path, keys, options, cache, said):
    """What the command line itself sets stays, so that a mistake there is still refused."""
    path, told = tmp_path / "recipe.yaml", []
    path.write_text(SUMS)
    recipe = load_recipe(path, keys, takes, told.append)
    assert options is None or recipe.task.options.keys() == options
    assert cache is None or recipe.rollout.compressor_options.keys() == cache
    assert recipe.task.overlong == 0.2
    assert len(told) == len(said) and all(line.startswith(start) for line, start in zip(told, said))
    assert load_recipe(path, [("task.name", "stories")]).task.options["count"] == 8  # a library call changes nothing


@pytest.mark.parametrize(
    ("section", "keys", "said"),
    [
        ("rollout: {compressor: rkv, compressor_options: {importance_weight: 0.3, pool: 5}}", "prompt-only", "weight:"),
        ("rollout: {compressor: rkv, compressor_options: {protect_prompt: true}}", "beacon:2-8", "no protect_prompt"),
        ("rollout: {compressor_options: {importance_weight: 0.3}}", "rkv", None),
        ("rollout: {compressor_options: {importance_wieght: 0.3}}", "rkv", None),  # refused later
        ("rollout: {compressor: rkv, compressor_options: {sinkz: 2}}", "snapkv", None),
        ("rollout: {compressor: snapkv, compressor_options: {pool: 5}}", "prompt-only", None),
    ],
)
def test_only_options_of_the_old_compressor_are_left_out(tmp_path, section, keys, said):
    path, told = tmp_path / "recipe.yaml", []
    path.write_text(f"model: {{name: tiny}}\ntask: {{name: sums}}\nlearn: {{method: shadow}}\n{section}\n")
    load_recipe(path, [("compressor", keys)], takes, told.append)
    assert (told == []) if said is None else said in told[0]


def test_how_slots_are_stored_is_not_left_out_but_refused(tmp_path):
    path = tmp_path / "recipe.yaml"
    rollout = "{compressor: snapkv, compressor_options: {slots: fp8}}"
    path.write_text(f"model: {{name: tiny}}\ntask: {{name: sums}}\nrollout: {rollout}\n")
    with pytest.raises(SparseRLError, match=r"write rollout\.slots"):
        load_recipe(path, [("compressor", "rkv")], takes)
