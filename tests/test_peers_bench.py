"""vLLM beside our rollouts: a stand-in for it answers what the benchmarks ask, and its absence is a sentence."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import new_models_gpu
import peers
import rollout_gpu

STAND_IN = """
from types import SimpleNamespace

__version__ = "0"


class SamplingParams(SimpleNamespace):
    pass


class LLM:
    def __init__(self, model, kv_cache_dtype, max_num_seqs, max_model_len, **options):
        assert options["load_format"] == "dummy" and options["skip_tokenizer_init"]
        self.rows, self.room = max_num_seqs, max_model_len

    def generate(self, prompts, sampling, use_tqdm):
        assert len(prompts) == self.rows and sampling.ignore_eos and sampling.logprobs == 0
        assert all(len(p["prompt_token_ids"]) + sampling.max_tokens <= self.room for p in prompts)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * sampling.max_tokens)]) for _ in prompts]
"""


@pytest.fixture
def site(tmp_path):
    """A folder with the stand-in."""
    (tmp_path / "site" / "vllm").mkdir(parents=True)
    (tmp_path / "site" / "vllm" / "__init__.py").write_text(STAND_IN)
    return tmp_path / "site"


def test_a_rollout_of_vllm_is_asked_for_in_its_own_process(site, tmp_path):
    args = Namespace(peer_python=sys.executable, peer_path=str(site), tiny=True, rows=3, prompt=5, new=7, minutes=2)
    found = new_models_gpu.in_vllm("gemma-3-4b", args)
    assert (found["rows"], found["prompt"], found["new"], found["kv_cache_dtype"]) == (3, 5, 7, "auto")
    assert found["tokens_per_s"] == pytest.approx(21 / found["seconds"])


def test_what_is_missing_or_fails_is_a_sentence(tmp_path, monkeypatch):
    config = new_models_gpu.config_of("gemma-3-4b", tiny=True)
    peers.write_config(config, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Gemma3ForCausalLM"]
    nowhere = Namespace(peer_python="/no/such/python", peer_path=None)
    assert "name an interpreter with --peer-python" in peers.vllm_rollout(nowhere, tmp_path, 2, 4, 4)["error"]
    monkeypatch.setattr(peers, "missing", lambda *_: "vllm")
    here = Namespace(peer_python=sys.executable, peer_path=None)
    assert peers.vllm_rollout(here, tmp_path, 2, 4, 4)["error"].startswith("vLLM is left out: ")
    monkeypatch.setattr(peers, "missing", lambda *_: None)
    (tmp_path / "vllm.py").write_text("raise SystemExit('no device')")
    broken = Namespace(peer_python=sys.executable, peer_path=str(tmp_path))
    assert peers.vllm_rollout(broken, tmp_path, 2, 4, 4)["error"].startswith("vLLM failed: no device (")


def test_slots_stand_beside_vllm_in_both_dtypes(site, tmp_path, monkeypatch, capsys):
    out = tmp_path / "slots"
    command = ["rollout_gpu.py", "--out", str(out), "--only", "slots,slots-vllm", "--tiny"]
    monkeypatch.setattr(sys, "argv", [*command, "--peer-path", str(site)])
    rollout_gpu.main()
    keys = {json.loads(line)["key"] for line in (out / "results.jsonl").open()}
    plain = "rollout tiny rkv 16+8 rows 4"
    assert {f"{plain} new 24", f"{plain} fp8 new 24", f"{plain} int8 new 24"} < keys
    assert {f"vllm tiny rows 4 {kind} new 24" for kind in ("auto", "fp8")} < keys and len(keys) == 5
    said = capsys.readouterr().out.splitlines()
    (head,) = [i for i, line in enumerate(said) if line.startswith("| keys and values")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in said[head + 2 : head + 4]]
    assert [row[0] for row in cells] == ["tiny, 4 rows, 24 new, its own dtype", "tiny, 4 rows, 24 new, fp8"]
    assert all(row[3].endswith("x") for row in cells)


def test_slots_without_vllm_say_so_and_are_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(peers, "missing", lambda *_: "vllm")
    command = ["rollout_gpu.py", "--out", str(tmp_path), "--only", "slots-vllm", "--tiny"]
    monkeypatch.setattr(sys, "argv", command)
    rollout_gpu.main()
    assert "vllm tiny rows 4 fp8 new 24: vLLM is left out: " in capsys.readouterr().out
    assert not (tmp_path / "results.jsonl").exists()


def test_a_model_that_was_measured_is_not_measured_again(tmp_path):
    lines = tmp_path / "lines.jsonl"
    assert new_models_gpu.measured(lines, vllm=False) == set()
    known = [
        {"model": "gpt-oss-20b", "error": "no memory"},
        {"model": "qwen3.5-4b-like", "seconds": 1.0},
        {"model": "gemma-3-4b", "seconds": 1.0, "vllm": {"tokens_per_s": 1.0}},
    ]
    lines.write_text("".join(json.dumps(line) + "\n" for line in known))
    assert new_models_gpu.measured(lines, vllm=False) == {"qwen3.5-4b-like", "gemma-3-4b"}
    assert new_models_gpu.measured(lines, vllm=True) == {"gemma-3-4b"}
    assert new_models_gpu.has_error({"vllm": {"error": "vLLM failed: why"}})
    assert not new_models_gpu.has_error({"vllm": {"error": "vLLM is left out: why"}})
