"""Warm-up: gradients, order, what is learned from a file, evaluation, signals, resuming and sentences."""

import copy
import gc
import json
import os
import signal
import subprocess
import weakref

import pytest
import torch

import sparse_rl.train.warmup as module
from sparse_rl import tasks
from sparse_rl.errors import OutOfMemory, SparseRLError
from sparse_rl.files import find_checkpoints, read_lines
from sparse_rl.models import load_model
from sparse_rl.train.solutions import Batches, padded
from tests.helpers.models import tiny
from tests.helpers.rows import write
from tests.helpers.runs import PATIENCE, command, recipe, run, write_recipe
from tests.models.test_stops import SMOLLM2, SPECIAL, make_tokenizer


def test_a_warm_up_that_diverges_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "batch_logprobs", lambda model, tokens, mask: model.lm_head.weight.sum() * float("nan"))
    with pytest.raises(
        SparseRLError, match=r"warm-up step 1: loss nan, gradient norm nan; lower warmup.lr \(now 0.002\)"
    ):
        module.warmup(recipe(warmup={"steps": 2}), tmp_path / "model", evaluate=False, show=False)
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [".lock", "recipe.yaml"]


def test_a_warm_up_in_micro_batches_has_the_gradient_of_the_batch():
    tokens = torch.randint(1, 60, (7, 40), generator=torch.Generator().manual_seed(0))
    place, ends = torch.arange(40), torch.tensor([40, 12, 33, 9, 20, 40, 11])
    mask = (place >= 5) & (place < ends[:, None])
    found = []
    for micro_batch_tokens in (10_000, 80, 1):
        model = copy.deepcopy(tiny("llama"))
        loss = module._backward(model, tokens, mask, micro_batch_tokens)
        found.append((loss, torch.cat([p.grad.flatten() for p in model.parameters()])))
    logprobs = module.batch_logprobs(tiny("llama"), tokens, mask)
    assert found[0][0] == pytest.approx(-logprobs.sum().item() / mask.sum().item(), rel=1e-6)
    for loss, gradient in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-6)
        torch.testing.assert_close(gradient, found[0][1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_warm_up_sees_its_prompts_in_order(tmp_path, monkeypatch, workers):
    seen, logprobs = [], module.batch_logprobs
    monkeypatch.setattr(
        module, "batch_logprobs", lambda model, tokens, mask: seen.append(tokens) or logprobs(model, tokens, mask)
    )
    settings = recipe(model={"name": "tiny"}, warmup={"steps": 5, "batch": 3, "workers": workers})
    assert module.warmup(settings, tmp_path / "model", evaluate=False, show=False) == {}
    tokenizer, task = load_model("tiny")[1], tasks.make(settings.task.name, **settings.task.options)
    texts = tokenizer.batch_decode([row for tokens in seen for row in tokens], skip_special_tokens=True)
    assert texts == [prompt.text + task.solution(prompt) for prompt in task.sample(0, 15)]


@pytest.mark.parametrize(
    ("number", "workers"),
    [
        (signal.SIGTERM, 2),
        pytest.param(signal.SIGINT, 0, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 0, marks=pytest.mark.slow),
    ],
)
def test_a_warm_up_that_is_stopped_leaves_its_model(tmp_path, number, workers):
    """The signal goes to the whole group, as terminals and schedulers send it."""
    given = write_recipe(tmp_path, model={"name": "tiny"}, warmup={"steps": 100_000, "batch": 4, "workers": workers})
    process = subprocess.Popen(
        command("warmup", given, "--out", tmp_path / "model"),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    while b"step 25/" not in process.stderr.readline():
        assert process.poll() is None
    os.killpg(process.pid, number)
    _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, error.decode()
    assert "Traceback" not in error.decode() and "stopped after" in error.decode()
    ((step, stopped),) = find_checkpoints(tmp_path / "model" / "checkpoints")
    assert load_model(str(stopped)) and f"stopped after {step} of" in error.decode()
    assert [line["step"] for line in read_lines(tmp_path / "model" / "metrics.jsonl")] == list(range(1, step + 1))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_task_that_cannot_warm_up_is_told_in_a_sentence(tmp_path, workers):
    settings = recipe(
        model={"name": "tiny"}, task={"name": "countdown", "search": 5}, warmup={"steps": 2, "workers": workers}
    )
    with pytest.raises(
        SparseRLError, match=r"^countdown: none of 1000 problems .* had a search of at most 5 characters"
    ):
        module.warmup(settings, tmp_path / "model", show=False)


SUMS = [(a, b) for a in range(2, 6) for b in (1, 3, 7)]
FIELDS = {"prompt": "question", "answer": "answer", "solution": "answer", "remove_marks": True}


def write_sums(folder, pairs=SUMS):
    """A file as GSM8K has it."""
    work = "Ann has {a}+{b} = <<{a}+{b}={c}>>{c}.\n#### {c}"
    rows = [{"question": f"{a} and {b}?", "answer": work.format(a=a, b=b, c=a + b)} for a, b in pairs]
    return write(folder / "sums.jsonl", rows)


def test_a_model_learns_the_solutions_of_a_file(tmp_path):
    """Twelve problems are learned by heart: greedy answers to them are then all right, and say what the file said."""
    given = write_recipe(
        tmp_path, model={"name": "tiny"}, task={"name": "math", "files": write_sums(tmp_path), **FIELDS},
        warmup={"steps": 60, "batch": 12, "lr": 3e-3, "eval_every": 20},
        eval={"prompts": 12, "temperature": 0.0, "options": {"holdout": "all"}}, rollout={"max_new_tokens": 4000},
    )  # fmt: skip
    done = run("warmup", given, "--out", tmp_path / "model")
    assert done.returncode == 0 and "done: accuracy 1.000 on held-out prompts" in done.stdout, done.stderr
    lines = [line for line in read_lines(tmp_path / "model" / "metrics.jsonl") if "eval/dense/loss" in line]
    assert [line["step"] for line in lines] == [20, 40, 60]
    assert lines[0]["eval/dense/loss"] > lines[1]["eval/dense/loss"] > lines[2]["eval/dense/loss"] < 0.01
    assert lines[0]["eval/dense/accuracy"] < 1 and lines[2]["eval/dense/accuracy"] == 1
    longest = len("Ann has 5+7 = 12.\nThe answer is \\boxed{12}.") + 1
    said = " ".join(done.stderr.split())
    assert f"12 held-out prompts x 1, up to {2 * longest} new tokens each (the longest solution has {longest})" in said
    from sparse_rl import generate

    model, tokenizer = load_model(str(tmp_path / "model"))
    found = generate(model, tokenizer, "5 and 7?", compressor="dense", max_new_tokens=60, temperature=0.0)
    assert found == "Ann has 5+7 = 12.\nThe answer is \\boxed{12}."


def test_only_the_solution_of_a_chat_has_a_loss(tmp_path):
    tokenizer = make_tokenizer(SPECIAL[2], SMOLLM2)
    task = tasks.make("math", files=write_sums(tmp_path), template="chat", **FIELDS)
    pairs = Batches(tokenizer, task, 5, 1, tokenizer.eos_token_id)[0]
    tokens, mask = padded(pairs)
    for row, counts, prompt in zip(tokens, mask, task.sample(0, 5)):
        solution = task.solution(prompt)
        assert tokenizer.decode(row[counts]) == solution + SPECIAL[2]
        chat = [*prompt.text, {"role": "assistant", "content": solution}]
        whole = tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]  # ends with a newline
        assert row[: len(whole) - 1].tolist() == whole[:-1] and counts.nonzero()[-1] == len(whole) - 2
        assert not counts[: counts.nonzero()[0]].any() and "assistant\n" in tokenizer.decode(row[~counts])


def test_an_evaluation_can_be_omitted(tmp_path):
    """Then a file needs no held-out problems."""
    given = write_recipe(
        tmp_path, model={"name": "tiny"}, task={"name": "math", "files": write_sums(tmp_path), **FIELDS},
        warmup={"steps": 2, "batch": 2},
    )  # fmt: skip
    refused = run("warmup", given, "--out", tmp_path / "model")
    assert refused.returncode == 1 and "holdout is 0, so none of the 12 problems is held out" in refused.stderr
    assert not (tmp_path / "model").exists()
    done = run("warmup", given, "--out", tmp_path / "model", "--no-eval")
    assert (done.returncode, done.stdout) == (0, f"done: the model is in {tmp_path / 'model'}\n"), done.stderr
    assert [line["step"] for line in read_lines(tmp_path / "model" / "metrics.jsonl")] == [1, 2]
    again = run("warmup", tmp_path / "model", "--resume", "--eval.options.holdout", "all")
    assert again.returncode == 1 and "eval.options is {'holdout': 'all'} but" in again.stderr


def test_solutions_that_are_missing_are_told_before_anything_is_trained(tmp_path):
    fields = {name: value for name, value in FIELDS.items() if name not in ("solution", "remove_marks")}
    settings = recipe(
        model={"name": "tiny"}, task={"name": "math", "files": write_sums(tmp_path), **fields, "holdout": 2}
    )
    with pytest.raises(SparseRLError, match=r"the task math has no worked solutions, .*; set task.solution"):
        module.warmup(settings, tmp_path / "model", show=False)
    assert not (tmp_path / "model").exists()


RESUMED = {"model": {"name": "tiny"}, "eval": {"prompts": 3}}
SHORT = {"steps": 9, "batch": 4, "eval_every": 3, "checkpoint_every": 2}


def bytes_of(folder):
    return {name: (folder / name).read_bytes() for name in ("model.safetensors", "metrics.jsonl", "recipe.yaml")}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The folder of a warm-up that nothing interrupted."""
    folder = tmp_path_factory.mktemp("warm") / "model"
    found = module.warmup(recipe(**RESUMED, warmup=SHORT), folder, show=False)
    lines = read_lines(folder / "metrics.jsonl")
    assert [line["step"] for line in lines if "eval/dense/loss" in line] == [3, 6, 9]
    assert found["accuracy"] == lines[-1]["eval/dense/accuracy"] and not (folder / "checkpoints").exists()
    return folder


@pytest.mark.parametrize("stop", ["step 1", "step 6", "evaluation at 6", "evaluation at 9", "NaN at 7", "write at 9"])
def test_a_stopped_warm_up_goes_on_to_the_same_bytes(tmp_path, monkeypatch, uninterrupted, stop):
    kind, number = stop.split()[0], int(stop.split()[-1])
    step, evaluate, replace = module.Warmup.step, module.Warmup.evaluate, os.replace

    def stopping_step(self, tokens, mask):
        if kind in ("step", "NaN") and self.done == number - 1:
            raise SparseRLError("oh") if kind == "NaN" else KeyboardInterrupt
        return step(self, tokens, mask)

    def stopping_evaluation(self):
        if kind == "evaluation" and self.done == number:
            raise KeyboardInterrupt
        return evaluate(self)

    def full_disk(source, target):
        if kind == "write" and str(target).endswith("config.json"):
            raise OSError("the disk is full")
        return replace(source, target)

    folder, settings = tmp_path / "model", recipe(**RESUMED, warmup=SHORT)
    with monkeypatch.context() as patched, pytest.raises((KeyboardInterrupt, SparseRLError)):
        patched.setattr(module.Warmup, "step", stopping_step)
        patched.setattr(module.Warmup, "evaluate", stopping_evaluation)
        patched.setattr(module.os, "replace", full_disk)
        module.warmup(settings, folder, show=False)
    steps = [found for found, _ in find_checkpoints(folder / "checkpoints")]
    saved = {"step 1": [], "evaluation at 9": [], "write at 9": [8]}
    assert steps[-1:] == saved.get(stop, [number - (kind != "evaluation")])
    module.warmup(settings, folder, resume=True, show=False)
    assert bytes_of(folder) == bytes_of(uninterrupted)
    assert module.warmup(settings, folder, resume=True, show=False)["loss"]  # once more: nothing is left to do
    assert bytes_of(folder) == bytes_of(uninterrupted)


def test_a_warm_up_of_adapters_writes_a_whole_model_and_goes_on_to_the_same_bytes(tmp_path, monkeypatch):
    settings = recipe(model={"name": "tiny", "lora_rank": 2}, eval={"prompts": 3}, warmup=SHORT)
    whole, folder, step = tmp_path / "whole", tmp_path / "model", module.Warmup.step
    module.warmup(settings, whole, show=False)
    before, after = (dict(load_model(str(name))[0].named_parameters()) for name in ("tiny", whole))
    assert before.keys() == after.keys()
    for name, weight in before.items():
        change = after[name] - weight
        if "proj" in name:
            assert torch.linalg.matrix_rank(change, rtol=1e-3) == 2, name
        else:
            assert not change.any(), name

    def stopping_step(self, tokens, mask):
        if self.done == 5:
            raise KeyboardInterrupt
        return step(self, tokens, mask)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(module.Warmup, "step", stopping_step)
        module.warmup(settings, folder, show=False)
    assert (folder / "checkpoints/step-000005/adapter_config.json").exists()
    module.warmup(settings, folder, resume=True, show=False)
    assert bytes_of(folder) == bytes_of(whole) and not list(folder.glob(".*partial"))
    found = read_lines(folder / "metrics.jsonl")[-1]["eval/dense/loss"]
    assert module.warmup(settings, folder, resume=True, show=False)["loss"] == found


@pytest.mark.parametrize("rank, remedy", [(0, "or train only adapters"), (2, r"set model.gradient_checkpointing\.$")])
def test_a_warm_up_that_runs_out_of_memory_is_saved_and_says_so(tmp_path, monkeypatch, rank, remedy):
    backward, calls = module._backward, []

    def full(*args):
        calls.append(args)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return backward(*args)

    settings = recipe(model={"name": "tiny", "lora_rank": rank}, warmup=SHORT)
    said = (
        r"out of memory in a pass through the model \(CUDA .*\); lower learn.micro_batch_tokens "
        rf"\(now {settings.micro_batch_tokens}, "
    )
    with monkeypatch.context() as patched, pytest.raises(OutOfMemory, match=f"{said}.*{remedy}"):
        patched.setattr(module, "_backward", full)
        module.warmup(settings, tmp_path / "model", evaluate=False, show=False)
    assert [step for step, _ in find_checkpoints(tmp_path / "model/checkpoints")][-1] == 3


@pytest.mark.parametrize(
    "rank, remedy", [(0, "use a smaller model, or train only adapters"), (2, r"lower model.lora_rank \(now 2\)")]
)
def test_memory_that_runs_out_in_an_optimizer_step_leaves_no_half_updated_weights(tmp_path, monkeypatch, rank, remedy):
    step = module.MasterAdamW.step

    def full(self, steps_done, loss=0.0):
        found = step(self, steps_done, loss)
        if steps_done == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return found

    settings = recipe(model={"name": "tiny", "lora_rank": rank}, warmup={**SHORT, "checkpoint_every": 3})
    said = rf"out of memory for the optimizer's state \(CUDA .*\); {remedy}"
    with monkeypatch.context() as patched, pytest.raises(OutOfMemory, match=said):
        patched.setattr(module.MasterAdamW, "step", full)
        module.warmup(settings, tmp_path / "model", evaluate=False, show=False)
    assert [step for step, _ in find_checkpoints(tmp_path / "model/checkpoints")][-1] == 3
    assert len(read_lines(tmp_path / "model/metrics.jsonl")) == 4
    with monkeypatch.context() as patched, pytest.raises(OutOfMemory, match=said):
        patched.setattr(module.MasterAdamW, "load_state_dict", lambda self, state: full(self, 4))
        module.warmup(settings, tmp_path / "model", resume=True, evaluate=False, show=False)
    module.warmup(settings, tmp_path / "model", resume=True, evaluate=False, show=False)
    whole = tmp_path / "whole"
    module.warmup(settings, whole, evaluate=False, show=False)
    assert bytes_of(tmp_path / "model") == bytes_of(whole)


def test_memory_that_runs_out_in_an_evaluation_is_a_sentence_and_the_warm_up_is_saved(tmp_path, monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    settings = recipe(model={"name": "tiny"}, eval={"prompts": 3}, warmup={**SHORT, "eval_every": 3})
    monkeypatch.setattr(module, "held_out_loss", full)
    with pytest.raises(OutOfMemory, match=r"out of memory in a pass through the model"):
        module.warmup(settings, tmp_path / "model", show=False)
    assert [step for step, _ in find_checkpoints(tmp_path / "model/checkpoints")][-1] == 3


@pytest.mark.parametrize("rank", [0, 2])
def test_float16_is_refused_and_a_refused_warm_up_leaves_no_folder(tmp_path, rank):
    """Adapters are in fp32, but their gradients come through the frozen weights."""
    for dtype in ("float16", "float16", "bfloat16"):
        settings = recipe(model={"name": "tiny", "lora_rank": rank, "dtype": dtype}, warmup={**SHORT, "steps": 1})
        if dtype == "float16":
            with pytest.raises(SparseRLError, match="the model is float16, in which gradients vanish"):
                module.warmup(settings, tmp_path / "model", evaluate=False, show=False)
            assert not (tmp_path / "model").exists()
        else:
            module.warmup(settings, tmp_path / "model", evaluate=False, show=False)


def test_adapters_are_saved_before_they_are_merged(tmp_path, monkeypatch):
    def killed(*args):
        raise MemoryError

    settings = recipe(model={"name": "tiny", "lora_rank": 2}, warmup={**SHORT, "steps": 3, "checkpoint_every": 0})
    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(module, "load_merged", killed)
        module.warmup(settings, tmp_path / "model", evaluate=False, show=False)
    assert [step for step, _ in find_checkpoints(tmp_path / "model/checkpoints")] == [3]
    module.warmup(settings, tmp_path / "model", resume=True, evaluate=False, show=False)
    assert (tmp_path / "model/config.json").exists() and not list((tmp_path / "model").glob(".*partial"))


def test_merged_adapters_are_loaded_only_to_be_evaluated_and_after_the_trained_model_is_freed(tmp_path, monkeypatch):
    load, models = module.load_for_training, []

    def noting(settings):
        gc.collect()
        assert not models or models[-1]() is None
        found = load(settings)
        models.append(weakref.ref(found[0]))
        return found

    monkeypatch.setattr(module, "load_for_training", noting)
    settings = recipe(model={"name": "tiny", "lora_rank": 2}, eval={"prompts": 3}, warmup={**SHORT, "steps": 2})
    module.warmup(settings, tmp_path / "unasked", evaluate=False, show=False)
    assert len(models) == 1
    models.clear()
    module.warmup(settings, tmp_path / "asked", show=False)
    assert len(models) == 2


def test_a_killed_warm_up_goes_on_to_the_same_bytes(tmp_path):
    warm = {"steps": 60, "batch": 4, "checkpoint_every": 10, "eval_every": 0, "workers": 1}
    given = write_recipe(tmp_path, **RESUMED, warmup=warm)
    whole, folder = tmp_path / "whole", tmp_path / "model"
    process = subprocess.Popen(
        command("warmup", given, "--out", folder), stderr=subprocess.PIPE, start_new_session=True
    )
    while b"step 25/" not in process.stderr.readline():
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert find_checkpoints(folder / "checkpoints") and not (folder / "config.json").exists()
    done = run("warmup", folder, "--resume")
    assert done.returncode == 0 and "done: accuracy" in done.stdout, done.stderr
    module.warmup(recipe(**RESUMED, warmup=warm), whole, show=False)
    assert bytes_of(folder) == bytes_of(whole)


def test_what_a_resumed_warm_up_may_change(tmp_path, uninterrupted):
    folder = tmp_path / "model"
    assert run("warmup", folder, "--resume").returncode == 1
    for options, message in [
        (
            ["--steps", 20],  # the warm-up's, not run.steps
            r"was finished after 9 steps and cannot be continued to warmup.steps 20; start another",
        ),
        (["--warmup.batch", 5], r"warmup.batch is 5 but"),
        (["--seed", 5], f"(sparse-rl warmup {uninterrupted} --resume)"),
    ]:
        done = run("warmup", uninterrupted, "--resume", *options)
        assert done.returncode == 1 and message in " ".join(done.stderr.split()), done.stderr
    done = run("warmup", uninterrupted, "--warmup.steps", 20)
    assert done.returncode == 1 and "exists already; continue it with --resume" in done.stderr
    settings = recipe(**RESUMED, warmup={**SHORT, "steps": 4, "checkpoint_every": 0})
    module.warmup(settings, folder, evaluate=False, show=False)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    before = [line for line in (uninterrupted / "metrics.jsonl").read_text().splitlines() if "warmup/loss" in line]
    assert lines == before[:4] and json.loads(lines[-1])["warmup/tokens"] > 0
