"""Prompts and given tokens on a CUDA device, through fused layers and many rows at a time: as the modules read them.

The noise floor is what bf16 itself changes: modules in bf16 against the same weights in fp32.
"""

import copy

import pytest
import torch

from sparse_rl import Engine, Sampling
from sparse_rl.kernels import ops
from sparse_rl.rollout.feed import Feeder
from tests.helpers.decoding import change_rules
from tests.helpers.gpu import SMALL, on_gpu
from tests.helpers.models import prompts_of
from tests.helpers.reading import fed, feeding, read
from tests.rollout.test_live import held, plan_of

pytestmark = pytest.mark.gpu

FAMILY = ("llama", "qwen2", "qwen3", "mistral")
KERNELS = {"add_and_norm", "silu_gate", "rotate"}


def kernels_used(monkeypatch) -> set[str]:
    used, module_for = set(), ops.module_for

    def noted(operation, *given):
        module = module_for(operation, *given)
        if module == "layers":
            used.add(operation)
        return module

    monkeypatch.setattr(ops, "module_for", noted)
    return used


def found_by(model, compressor="rkv", **options):
    """What is left by prompts, and by given tokens in rows that lie apart: log-probs, and all tensors of the caches."""
    prompts, scratch = read(model, compressor, **options)
    given, cache, _ = fed(model, compressor, **options)
    logits = torch.cat([prompts, torch.stack([given[row] for row in sorted(given)])])
    return logits.double().log_softmax(-1), [*scratch.tensors, *cache.tensors]


def by_modules(model, compressor="rkv", **options):
    with pytest.MonkeyPatch.context() as patch:
        change_rules(patch, fuses_prompts=False)
        return found_by(model, compressor, **options)


def alone(model, compressor="rkv", **options):
    """As `by_modules`, and given tokens are fed row by row."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Feeder, "groups", lambda self, chunks: [[chunk] for chunk in chunks])
        return by_modules(model, compressor, **options)


def apart(mine, theirs) -> tuple[float, float]:
    """Of log-probs, in nats; of keys, values and queries, relative."""
    numbers = [(a.double(), b.double()) for a, b in zip(mine[1], theirs[1], strict=True) if a.is_floating_point()]
    off, size = (sum(x.norm().item() ** 2 for x in part) ** 0.5 for part in zip(*((a - b, b) for a, b in numbers)))
    return (mine[0] - theirs[0]).abs().mean().item(), off / size


@pytest.mark.parametrize("compressor", ["rkv", "h2o"])
@pytest.mark.parametrize("name", FAMILY)
def test_at_the_noise_floor_of_bf16(name, compressor, monkeypatch):
    model = on_gpu(name, torch.bfloat16, **SMALL, vocab_size=5000)
    exact = copy.deepcopy(model).float()
    used = kernels_used(monkeypatch)
    ours = found_by(model, compressor)
    assert used == KERNELS
    used.clear()
    theirs, fine = alone(model, compressor), alone(exact, compressor)
    assert not used
    for mine, other in zip(ours[1], theirs[1], strict=True):
        assert mine.is_floating_point() or mine.equal(other)  # feed indices
    floor, mine, between = apart(theirs, fine), apart(ours, fine), apart(ours, theirs)
    for i in range(2):
        assert mine[i] < 1.3 * floor[i] and between[i] < 1.8 * floor[i], (floor, mine, between)


@pytest.mark.parametrize("compressor", ["rkv", "h2o", "dense"])
@pytest.mark.parametrize("name", [*FAMILY, "qwen3-moe", "mixtral", "gemma3", "gpt-oss"])
@pytest.mark.parametrize("interval", [16, 60])
def test_in_fp32_it_is_the_modules(interval, name, compressor):
    """Also of models of which nothing is fused, whose rows are fed together all the same, and of chunks that are padded
    beyond a sliding window.
    """
    model = on_gpu(name)
    ours, *others = (way(model, compressor, interval=interval) for way in (found_by, by_modules, alone))
    for theirs in others:
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-3, atol=1e-3)
        for a, b in zip(ours[1], theirs[1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_the_host_does_not_wait_while_it_feeds():
    """So the next group's launches are prepared while the device works at this one."""
    feeder, chunks, loop = feeding(on_gpu("qwen2", torch.bfloat16, **SMALL))
    with loop.engine._switched():
        feeder.feed(chunks)  # compiles
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            feeder.feed(chunks)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_captured_steps_stay():
    """Reading tokens through fused layers changes nothing that a graph depends on."""
    engine = Engine(on_gpu("llama"), "rkv", budget=16, interval=8, rows=6)
    engine.generate(prompts_of(9, 20), 3, Sampling(20, stop_ids=()))
    kept = {key: dict(decoder.graphs or {}) for key, decoder in engine.decoders.items()}
    engine.generate(prompts_of(9, 20), 3, Sampling(20, stop_ids=()))
    assert kept and all(kept.values())
    for key, graphs in kept.items():
        assert all((engine.decoders[key].graphs or {})[width] is graph for width, graph in graphs.items())
    with engine.open(64, 400) as live:
        held(live, [plan_of(seed, 3) for seed in range(6)])
        decoder = engine.decoder(None)
        graphs = dict(decoder.graphs or {})
        assert graphs
        held(live, [plan_of(seed, 3) for seed in range(6, 12)])
        assert engine.decoder(None) is decoder
        assert all((decoder.graphs or {})[width] is graph for width, graph in graphs.items())
