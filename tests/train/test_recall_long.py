"""The recipe of long prompts at a size for a CPU: its model warms up, learns under prompt-only, chunk by chunk, too."""

import pytest

from sparse_rl.config import load_recipe
from sparse_rl.files import read_lines
from sparse_rl.models import encode, load_config, load_model
from sparse_rl.tasks import make
from sparse_rl.train.run import train
from sparse_rl.train.warmup import warmup

SMALL = [("task.count", "40"), ("rollout.budget", "48"), ("rollout.rows", "4"), ("rollout.prompts", "2")]
SMALL += [("rollout.group_size", "2"), ("model.dtype", "float32"), ("eval.prompts", "2"), ("run.steps", "2")]
SMALL += [("learn.micro_batch_tokens", "2048"), ("rollout.max_new_tokens", "8"), ("eval.every", "2")]


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recall") / "warm"
    keys = [("model.name", "tiny:1x64@16384"), ("model.dtype", "float32"), ("task.count", "[8, 20]")]
    keys += [("warmup.steps", "2"), ("warmup.batch", "2"), ("warmup.workers", "0"), ("eval.prompts", "2")]
    keys += [("eval.options", "{count: 20}"), ("learn.micro_batch_tokens", "2048"), ("rollout.max_new_tokens", "8")]
    warmup(load_recipe("recall-long-warmup", keys), folder, show=False)
    return folder


@pytest.mark.parametrize("chunk", [0, 32])
def test_the_recipe_learns_at_a_small_size(warm, tmp_path, chunk):
    options = ("rollout.compressor_options", f"{{window: 8, prompt_chunk: {chunk}}}")
    keys = [*SMALL, ("model.name", str(warm)), options]
    trainer = train(load_recipe("recall-long", keys), tmp_path / "run", show=False)
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "reward/mean" in line]
    assert len(lines) == 2 and all(line["gap/abs/mean"] < 1e-4 for line in lines)
    assert trainer.sampler.engine.scratch.capacity == (80 if chunk else 248)  # 48 + 32, or 40 pairs and the question
    assert lines[-1]["cache/tokens_saved/frac"] > 0.5


def test_its_prompts_have_eight_thousand_tokens_and_fit_its_model():
    recipe = load_recipe("recall-long")
    model, tokenizer = load_model("tiny:1x64@16384")
    prompt = make(recipe.task.name, **recipe.task.options).sample(0, 1)[0]
    tokens = len(encode(tokenizer, prompt.text))
    assert 8_000 < tokens < load_config(load_recipe("recall-long-warmup").model.name).max_position_embeddings
    assert model.config.max_position_embeddings == 16384
