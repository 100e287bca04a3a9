"""triattention: its score against loops and against true future logits, its calibration, and its file."""

import cmath
import math

import pytest
import torch

from sparse_rl import COMPRESSORS, Engine, Sampling, SparseRLError
from sparse_rl.compressors.triattention import OFFSETS, Calibration
from sparse_rl.learn.calibrate import calibrate, find_rotation, rotate
from sparse_rl.models import Companion, ModelShape, companions_of, load_model, set_companion
from tests.attention.test_replay import gaps
from tests.cli.test_cli import run
from tests.compressors.test_compressors import random_view
from tests.helpers.models import ARCHITECTURES, prompts_of, tiny


def half_rotation(dim, base=100.0, rotary=None):
    rotary = rotary or dim
    half = rotary // 2
    frequency, partner = torch.zeros(dim, dtype=torch.float64), torch.arange(dim)
    for f in range(half):
        frequency[f] = frequency[f + half] = base ** (-2 * f / rotary)
        partner[f], partner[f + half] = f + half, f
    return frequency, partner


def made_up(layers, heads, dim, rotary=None, seed=0):
    g = torch.Generator().manual_seed(seed)
    mean = torch.randn(layers, heads, dim, generator=g)
    frequency, partner = half_rotation(dim, rotary=rotary)
    modulus = mean.abs() + torch.rand(layers, heads, dim, generator=g) + mean[..., partner].abs()
    modulus = (modulus + modulus[..., partner]) / 2
    return Companion({
        "mean": mean, "modulus": modulus,
        "frequency": frequency.repeat(layers, 1), "partner": partner.repeat(layers, 1),
    })  # fmt: skip


def loop_score(mean, modulus, frequency, key, time, rotary):
    """trig + norm of one query head and key, by complex numbers; what RoPE leaves alone counts as real numbers."""
    half, total = rotary // 2, 0.0
    for f in range(half):
        mu, k = complex(mean[f], mean[f + half]), complex(key[f], key[f + half])
        trig = sum((mu * cmath.exp(1j * frequency[f] * (time + delta)) * k.conjugate()).real for delta in OFFSETS)
        total += trig / len(OFFSETS) + (modulus[f] - abs(mu)) * abs(k)
    for d in range(rotary, len(key)):
        total += mean[d] * key[d] + (modulus[d] - abs(mean[d])) * abs(key[d])
    return total


@pytest.mark.parametrize("rotary", [8, 4])
@pytest.mark.parametrize("group", ["max", "mean"])
def test_the_score_equals_the_loops(rotary, group):
    groups, used, window = 2, 20, 3
    view = random_view(groups=groups, used=used)
    view = type(view)(**{**vars(view), "layer": torch.tensor([2, 0])})
    companion = made_up(3, 4, 8, rotary)
    compressor = COMPRESSORS["triattention"](group=group, window=window).bind(16, 4)
    compressor.calibration = Calibration(companion, torch.device("cpu"))
    got = compressor.score(view)
    t = companion.tensors
    for row, layer in enumerate((2, 0)):
        for head in range(2):
            per_head = []
            for q in (2 * head, 2 * head + 1):
                about = [t[name][layer, q].double().tolist() for name in ("mean", "modulus")]
                scores = [
                    loop_score(*about, t["frequency"][layer].tolist(), view.keys[row, head, j].tolist(), used, rotary)
                    for j in range(used)
                ]
                part = scores[: used - window]
                mean = sum(part) / len(part)
                std = math.sqrt(sum((x - mean) ** 2 for x in part) / len(part))
                per_head.append([(x - mean) / std for x in scores])
            combine = max if group == "max" else lambda pair: sum(pair) / 2
            expected = torch.tensor([combine(pair) for pair in zip(*per_head)])
            torch.testing.assert_close(got[row, head], expected, atol=2e-4, rtol=1e-4)


def test_a_constant_query_is_predicted_exactly():
    """If all queries of a head are alike before RoPE, trig is the mean of their true logits, and norm is 0."""
    dim, used = 8, 12
    frequency, partner = half_rotation(dim)
    g = torch.Generator().manual_seed(3)
    query, keys = torch.randn(dim, generator=g).double(), torch.randn(used, dim, generator=g).double()
    stored = rotate(keys, frequency, partner, torch.arange(used))
    moduli = torch.hypot(query, query[partner])
    companion = Companion({
        "mean": query.float()[None, None], "modulus": moduli.float()[None, None],
        "frequency": frequency[None], "partner": partner[None],
    })  # fmt: skip
    got = Calibration(companion, torch.device("cpu")).predict(
        stored.float()[None, None], torch.tensor([0]), torch.tensor([used])
    )[0, 0, 0]
    future = rotate(query.expand(len(OFFSETS), dim), frequency, partner, used + torch.tensor(OFFSETS))
    torch.testing.assert_close(got, (future @ stored.T).mean(0).float(), atol=1e-4, rtol=1e-4)


def test_calibration_finds_queries_before_rope(llama):
    """Against the model's own projections, which RoPE has not touched."""
    tokens = prompts_of(70, 50)
    caught = []
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(lambda module, args, out: caught.append(out.detach()))
        for layer in llama.model.layers
    ]
    try:
        companion = calibrate(llama, tokens, tokens=100)
        caught.clear()
        with torch.no_grad():
            llama(torch.tensor(tokens[0])[None])
            llama(torch.tensor(tokens[1][:30])[None])
    finally:
        for hook in hooks:
            hook.remove()
        companions_of(llama).clear()
    assert companion.about["tokens"] == "100"
    for layer in range(3):
        queries = torch.cat([caught[layer][0], caught[3 + layer][0]]).view(100, 4, 8).double()
        pairs = torch.complex(queries[..., :4], queries[..., 4:])
        got = companion.tensors["mean"][layer].double()
        torch.testing.assert_close(torch.complex(got[:, :4], got[:, 4:]), pairs.mean(0), atol=1e-4, rtol=1e-4)
        moduli = pairs.abs().mean(0).float()
        torch.testing.assert_close(companion.tensors["modulus"][layer], moduli.repeat(1, 2), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("strange", [-1, 10_000])
def test_text_of_another_tokenizer_is_refused(llama, strange):
    with pytest.raises(SparseRLError, match=f"holds token id {strange}, outside the vocabulary of"):
        calibrate(llama, [[5, 6, 7], [5, strange, 7]])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_calibrated_models_replay_exactly(architecture):
    model = tiny(architecture)
    try:
        calibrate(model, prompts_of(60), tokens=60)
        engine = Engine(model, compressor="triattention", budget=12, interval=4, rows=4)
        prompts = prompts_of(5, 16, 48)
        for trajectory in engine.generate(prompts, group_size=2, sampling=Sampling(40), seed=1):
            shadow, _ = gaps(model, trajectory)
            assert shadow < 1e-4
    finally:
        companions_of(model).clear()


def test_what_rope_does_is_found_layer_by_layer():
    shape = ModelShape.of(tiny("gemma3").config, torch.float32)
    frequency, _ = find_rotation(tiny("gemma3"), shape)
    assert frequency[0].equal(frequency[2]) and not frequency[0].equal(frequency[1])  # sliding layers have their own
    shape = ModelShape.of(tiny("smollm3").config, torch.float32)
    frequency, partner = find_rotation(tiny("smollm3"), shape)
    assert not frequency[2].any() and partner[2].equal(torch.arange(shape.head_dim))  # a layer without RoPE


def test_an_unknown_or_another_model_is_refused(llama):
    with pytest.raises(SparseRLError, match=r"needs triattention.safetensors, but there is none beside this model"):
        Engine(llama, compressor="triattention", budget=16, interval=8)
    try:
        set_companion(llama, "triattention", made_up(2, 4, 8))
        with pytest.raises(SparseRLError, match="belongs to another model"):
            Engine(llama, compressor="prompt-only:triattention", budget=16, interval=8)
    finally:
        companions_of(llama).clear()


def test_the_command_writes_beside_the_model_and_others_read_it(tmp_path):
    text, folder = tmp_path / "text.txt", tmp_path / "model"
    text.write_text("12+7=19;3+4=7;" * 20)
    assert "save a copy with --out" in run("calibrate", "tiny-sums", "--data", str(text)).stderr
    done = run("calibrate", "tiny-sums", "--data", str(text), "--out", str(folder), "--tokens", "200")
    assert done.returncode == 0 and "measured on 200 tokens" in done.stdout, done.stderr
    first = companions_of(load_model(str(folder))[0])["triattention"]
    again = run("calibrate", str(folder), "--data", str(text), "--tokens", "100")
    assert again.returncode == 0, again.stderr
    second = companions_of(load_model(str(folder))[0])["triattention"]
    assert not first.tensors["mean"].equal(second.tensors["mean"])
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "12+7+5+3+9+1="}\n')
    done = run(
        "rollout", str(folder), "--prompts", str(prompts), "--out", str(tmp_path / "out"), "--budget", "12",
        "--interval", "4", "--max-new-tokens", "30", "--compressor", "triattention",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    exported = run("export", str(folder), "--to", str(tmp_path / "exported"))
    assert exported.returncode == 0 and (tmp_path / "exported" / "triattention.safetensors").is_file(), exported.stderr
    (folder / "triattention.safetensors").write_bytes(b"torn")
    with pytest.raises(SparseRLError, match="is damaged"):
        load_model(str(folder))
