"""Model folders that are truncated, edited or half copied: one sentence says what is wrong, and no layer is random."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sparse_rl.errors import OutOfMemory, SparseRLError
from sparse_rl.models import load_config, load_merged, load_model, weight_bytes
from sparse_rl.models.load import BUILT_IN
from sparse_rl.models.lora import with_lora
from tests.helpers.models import tiny
from tests.helpers.runs import run

WEIGHTS = "model.safetensors"
Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(BUILT_IN["tiny-sums"], tmp_path / "model")


def refusal(folder) -> str:
    with pytest.raises(SparseRLError) as error:
        load_model(str(folder), device="cpu")
    message = str(error.value)
    assert "\n" not in message and len(message) < 800 and str(folder) in message
    return message


def edit_weights(folder, change):
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, metadata={"format": "pt"})


def edit_config(folder, **keys):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.mark.parametrize("damage", ["half", "header", "empty", "text", "absent"])
def test_damaged_weights_are_refused(folder, damage):
    whole = (folder / WEIGHTS).read_bytes()
    content = {"half": whole[: len(whole) // 2], "header": whole[:20], "empty": b"", "text": b"not what it seems"}
    if damage == "absent":
        (folder / WEIGHTS).unlink()
    else:
        (folder / WEIGHTS).write_bytes(content[damage])
    assert "copy" in refusal(folder)


def test_tensors_that_would_be_random_are_named(folder):
    edit_weights(folder, lambda tensors: {name: tensor for name, tensor in tensors.items() if name != Q})
    assert f"has no weights for 1 of its model's tensors ({Q})" in refusal(folder)


def test_a_config_with_more_layers_than_the_weights_is_refused(folder):
    edit_config(folder, num_hidden_layers=5)
    message = refusal(folder)
    assert "has no weights for 18 of its model's tensors (model.layers.3." in message and ", ...)" in message


def test_tensors_of_another_shape_are_named(folder):
    edit_weights(folder, lambda tensors: {n: t[:-1].clone() if n == Q else t for n, t in tensors.items()})
    assert f"1 tensors whose shape differs from its config.json ({Q} is [95, 96], not [96, 96])" in refusal(folder)


def test_tensors_without_a_place_are_told_but_do_no_harm(folder):
    edit_weights(folder, lambda tensors: tensors | {"model.more.weight": torch.ones(2)})
    with pytest.warns(UserWarning, match=r"1 tensors that its config.json has no place for: model.more.weight"):
        loaded, _ = load_model(str(folder), device="cpu")
    expected = load_model("tiny-sums", device="cpu")[0].state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_not_missing(tmp_path, tied, recwarn):
    config = tiny("llama").config
    config.tie_word_embeddings = tied
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    load_model("tiny")[1].save_pretrained(tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / WEIGHTS)) is not tied
    loaded, _ = load_model(str(tmp_path), device="cpu")
    assert torch.equal(loaded.get_output_embeddings().weight, model.get_output_embeddings().weight)
    assert not [w for w in recwarn if "tensors" in str(w.message)]


def test_an_adapter_that_lacks_a_tensor_is_refused(tmp_path):
    pytest.importorskip("peft")
    model, tokenizer = load_model("tiny-sums", device="cpu")
    model.config._name_or_path = str(BUILT_IN["tiny-sums"])
    with_lora(model, 2, 4).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    load_model(str(tmp_path), device="cpu"), load_merged(str(tmp_path))
    path = tmp_path / "adapter_model.safetensors"
    first, *rest = sorted(tensors := load_file(path))
    save_file({name: tensors[name] for name in rest}, path, metadata={"format": "pt"})
    with pytest.raises(SparseRLError) as merging:
        load_merged(str(tmp_path))
    for message in (refusal(tmp_path), str(merging.value)):
        assert "has no weights for 1 of its model's tensors" in message
        assert first.split(".layers.")[1].split(".lora")[0] in message


@pytest.mark.parametrize(
    "keys, message",
    [
        (
            {"num_hidden_layers": 10**29},
            "num_hidden_layers is 100000000000000000000000000000; it must be between 1 and 10,000",
        ),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": None}, "'num_attention_heads' expected int, got NoneType"),
        ({"num_attention_heads": 0}, "cannot load"),
        ({"hidden_size": "wide"}, "'hidden_size' expected int, got str"),
        ({"vocab_size": 10**9}, "describes 192,000,304,800 parameters"),  # 715 GiB, which nobody should try to allocate
        ({"hidden_act": "nonesuch"}, "no model can be made from this config"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"dtype": 7}, "no model can be made from this config"),
        ({"model_type": "nonesuch", "auto_map": {"AutoConfig": "evil.Config"}}, "needs the Python code"),
    ],
)
def test_odd_values_in_a_config_get_a_sentence(folder, keys, message):
    edit_config(folder, **keys)
    with pytest.raises(SparseRLError) as error:
        load_model(str(folder), device="cpu")
    assert message in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(SparseRLError):
        weight_bytes(load_config(str(folder))) if "vocab_size" not in keys else load_model(str(folder))


@pytest.mark.parametrize("content", ["null", "[]", "", "{", '"text"', "[" * 100_000, "\xff"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json", "sparse_rl.json"])
def test_files_that_are_no_objects_get_a_sentence(folder, name, content):
    (folder / name).write_bytes(content.encode("latin1"))
    try:
        load_model(str(folder), device="cpu")  # transformers can do without some of them
    except SparseRLError as error:
        assert "\n" not in str(error) and len(str(error)) < 800
    else:
        assert name == "generation_config.json"


def test_a_code_file_in_a_folder_is_not_run(folder, tmp_path):
    (folder / "evil.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    edit_config(folder, auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    load_model(str(folder), device="cpu")  # a known type: its own class is taken
    edit_config(folder, model_type="nonesuch")
    assert "needs the Python code" in refusal(folder)
    assert not (tmp_path / "ran").exists()


def test_plan_says_it_in_a_sentence_as_well(folder):
    edit_config(folder, head_dim=10**30)
    found = run("plan", "--model", folder)
    assert found.returncode == 1 and found.stderr.startswith("sparse-rl: ") and found.stderr.count("\n") == 1


def test_weights_that_do_not_fit_on_the_device_are_a_sentence(folder, monkeypatch):
    def full(self, device):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 14.00 GiB.")

    monkeypatch.setattr(torch.nn.Module, "to", full)
    with pytest.raises(OutOfMemory, match=r"the weights of .* do not fit on cpu \(CUDA out of memory.*\); free its"):
        load_model(str(folder), device="cpu")
