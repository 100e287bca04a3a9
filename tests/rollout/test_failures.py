"""What fails in the middle of a call loses nothing that had finished, and leaves the engine as good as new."""

import os
import signal
from contextlib import contextmanager

import pytest
import torch

from sparse_rl import Engine, NonFiniteLogits, OutOfMemory, RolloutInterrupted, Sampling
from tests.helpers.compressors import STANDALONE
from tests.helpers.models import prompts_of


@contextmanager
def hooked(model, hook):
    handle = model.model.layers[1].register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def poisoned_from(model, call: int):
    """Make the logits NaN from the `call`-th forward pass on."""
    calls = iter(range(10**9))
    handle = model.lm_head.register_forward_hook(
        lambda module, inputs, out: out * torch.nan if next(calls) >= call else out
    )
    try:
        yield
    finally:
        handle.remove()


def test_non_finite_logits_name_row_and_step(engine, llama):
    with (
        poisoned_from(llama, call=0),
        pytest.raises(NonFiniteLogits, match=r"row 0 \(prompt 0, sample 0\).*step 0 \(token 5\)"),
    ):
        engine.generate(prompts_of(5))
    two_prompts, good_steps = 2, 7
    with (
        poisoned_from(llama, call=two_prompts + good_steps),
        pytest.raises(NonFiniteLogits, match=r"row 0 \(prompt 0, sample 0\).*step 8 \(token 13\)"),
    ):
        engine.generate(prompts_of(5, 6))


def test_non_finite_logits_of_any_row_are_found(engine, llama):
    calls = iter(range(10**9))

    def poison(module, inputs, out):
        if next(calls) >= 4:  # two prompts, two steps
            out = out.clone()
            out[1] = torch.nan
        return out

    handle = llama.lm_head.register_forward_hook(poison)
    try:
        with pytest.raises(NonFiniteLogits, match=r"row 1 \(prompt 1, sample 0\).*step 3"):
            engine.generate(prompts_of(5, 6))
    finally:
        handle.remove()


def test_what_was_finished_before_non_finite_logits_is_not_lost(engine, llama):
    with poisoned_from(llama, call=30), pytest.raises(NonFiniteLogits) as caught:
        engine.generate(prompts_of(5, 5, 5, 5, 5, 5), sampling=Sampling(10))
    assert [t.prompt_index for t in caught.value.trajectories] == [0, 1, 2, 3]


@pytest.mark.parametrize("compressor", STANDALONE)
def test_a_nan_inside_the_cache_is_gone_afterwards(compressor, llama):
    """Not-a-number in a slot nobody reads would still be multiplied by zero; the engine must not keep it."""
    engine = Engine(llama, compressor=compressor, budget=16, interval=8, rows=2, max_tokens=100)
    before = engine.generate(prompts_of(5), sampling=Sampling(20))[0]

    def poison(module, inputs, out):
        return out * torch.nan

    handle = llama.model.layers[0].self_attn.v_proj.register_forward_hook(poison)
    try:
        with pytest.raises(NonFiniteLogits):
            engine.generate(
                prompts_of(30), sampling=Sampling(20)
            )  # leaves more slots behind than the next call overwrites
    finally:
        handle.remove()
    after = engine.generate(prompts_of(5), sampling=Sampling(20))[0]
    assert after.tokens.equal(before.tokens) and after.trace.evicted_at.equal(before.trace.evicted_at)


def test_an_interrupt_returns_what_was_finished(engine):
    finished = []

    def interrupt(trajectory):
        finished.append(trajectory)
        if len(finished) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        engine.generate(prompts_of(5, 6, 7, 8, 9), sampling=Sampling(12), on_finish=interrupt)
    assert isinstance(caught.value, RolloutInterrupted)
    assert [t.prompt_index for t in caught.value.trajectories] == [0, 1, 2]
    assert all(a is b for a, b in zip(caught.value.trajectories, finished, strict=True))


def test_ctrl_c_while_a_trajectory_is_being_saved_waits_for_it(engine):
    saved = []

    def save(trajectory):
        if len(saved) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        saved.append(trajectory)

    with pytest.raises(RolloutInterrupted) as caught:
        engine.generate(prompts_of(5, 6, 7, 8, 9), sampling=Sampling(12), on_finish=save)
    assert len(saved) == len(caught.value.trajectories) == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupt_inside_the_model(engine, llama):
    calls = iter(range(10**9))

    def hook(module, inputs):
        if next(calls) == 30:  # two waves of two are through after 26 passes
            raise KeyboardInterrupt

    with hooked(llama, hook), pytest.raises(RolloutInterrupted) as caught:
        engine.generate(prompts_of(5, 6, 7, 8, 9), sampling=Sampling(12))
    assert len(caught.value.trajectories) == 4


def test_out_of_memory_in_the_middle(engine, llama):
    def hook(module, inputs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nlong explanation")

    with (
        hooked(llama, hook),
        pytest.raises(OutOfMemory, match=r"Tried to allocate 2.00 GiB(.|\n)*KV per row(.|\n)*rows="),
    ):
        engine.generate(prompts_of(5))


def test_other_runtime_errors_propagate(engine, llama):
    def hook(module, inputs):
        raise RuntimeError("something else")

    with hooked(llama, hook), pytest.raises(RuntimeError, match=r"^something else$"):
        engine.generate(prompts_of(5))
