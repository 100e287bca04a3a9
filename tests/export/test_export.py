"""Checkpoints travel: adapters find their base, and an exported folder is a plain Hugging Face model with a card."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from sparse_rl import SparseRLError, load_model
from sparse_rl.export import folder as export_folder
from sparse_rl.files import read_lines
from sparse_rl.models import Record, base_of, read_record, set_record, with_lora
from sparse_rl.models.load import BUILT_IN
from sparse_rl.train.checkpoint import save_model
from sparse_rl.train.run import train
from tests.helpers.evaluating import lines
from tests.helpers.runs import recipe, run

TOKENS = torch.tensor([[5, 9, 7, 30, 12, 8]])
SMALL = {"prompts": 2, "group_size": 2, "max_new_tokens": 40, "stop": ["#"]}


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def base_folder(path: Path) -> Path:
    return shutil.copytree(BUILT_IN["tiny-sums"], path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run of all weights, with evaluations."""
    path = tmp_path_factory.mktemp("whole") / "run"
    train(recipe(run={"steps": 1}, eval={"every": 1}, rollout=SMALL), path, show=False)
    return path


@pytest.fixture(scope="module")
def adapted(tmp_path_factory) -> Path:
    """A run of adapters, whose base is a folder named relative to where the run was started."""
    path = tmp_path_factory.mktemp("adapted")
    base_folder(path / "models" / "base")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        settings = recipe(
            model={"name": "models/base", "lora_rank": 2}, run={"steps": 1}, eval={"every": 0}, rollout=SMALL
        )
        train(settings, Path("runs/mine"), show=False)
    folder = path / "runs" / "mine" / "checkpoints" / "step-000001"
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "adapter_model.safetensors")  # one step hardly moves them: make them count
    torch.manual_seed(0)
    save_file({name: 0.1 * torch.randn_like(t) for name, t in weights.items()}, folder / "adapter_model.safetensors")
    return path


@pytest.mark.parametrize("rank", [0, 2])
def test_training_does_not_start_from_adapters_but_from_the_model_that_they_are_merged_into(adapted, tmp_path, rank):
    """New adapters would take the place of the old ones, without a word."""
    start = adapted / "runs/mine"
    settings = {"run": {"steps": 1}, "eval": {"every": 0}, "rollout": SMALL}
    with pytest.raises(SparseRLError, match=r"holds adapters, .* sparse-rl export .*step-000001 --to FOLDER --merge"):
        train(recipe(model={"name": str(start), "lora_rank": rank}, **settings), tmp_path / "run", show=False)
    export_folder.export(str(start), tmp_path / "merged", merge=True)
    trainer = train(
        recipe(model={"name": str(tmp_path / "merged"), "lora_rank": rank}, **settings, optimizer={"lr": 1e-9}),
        tmp_path / "run",
        show=False,
    )
    torch.testing.assert_close(logits(trainer.model), logits(load_model(str(start))[0]), rtol=0, atol=1e-3)


def test_adapters_find_their_base_from_anywhere(adapted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = adapted / "runs/mine/checkpoints/step-000001"
    assert Path(base_of(str(folder))[0]) == adapted / "models/base"
    expected = logits(load_model(str(folder))[0])
    assert torch.equal(expected, logits(AutoModelForCausalLM.from_pretrained(folder)))  # and so does transformers
    assert not torch.allclose(expected, logits(load_model("tiny-sums")[0]), atol=1e-2)
    moved = shutil.copytree(adapted, tmp_path / "elsewhere")
    config = moved / "runs/mine/checkpoints/step-000001/sparse_rl.json"
    about = json.loads(config.read_text())
    config.write_text(json.dumps({**about, "base": {**about["base"], "path": "/gone"}}))
    assert Path(base_of(str(config.parent))[0]).resolve() == moved / "models/base"  # it moved along
    assert torch.equal(expected, logits(load_model(str(config.parent))[0]))


def test_a_missing_base_is_named_with_its_place(adapted, tmp_path, monkeypatch):
    lost = shutil.copytree(adapted / "runs/mine/checkpoints/step-000001", tmp_path / "lost")
    (adapted / "models/base").rename(adapted / "models/renamed")
    try:
        with pytest.raises(SparseRLError) as error:
            load_model(str(lost))
    finally:
        (adapted / "models/renamed").rename(adapted / "models/base")
    assert "adapters of the model 'models/base'" in str(error.value) and str(adapted / "models/base") in str(
        error.value
    )
    foreign = {"base_model_name_or_path": "/nowhere/base", "peft_type": "LORA"}
    (lost / "adapter_config.json").write_text(json.dumps(foreign))
    (lost / "sparse_rl.json").unlink()
    with pytest.raises(SparseRLError, match="was in /nowhere/base"):
        load_model(str(lost))
    (lost / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(SparseRLError, match="names no base model"):
        load_model(str(lost))


def test_adapters_of_random_weights_are_made_again_from_the_seed(tmp_path):
    model, tokenizer = load_model("tiny:1x64", seed=3)
    model = with_lora(model, 2, 4)
    set_record(model, Record(start="tiny:1x64", start_seed=3))
    save_model(tmp_path / "a", model, tokenizer)
    assert torch.equal(logits(model), logits(load_model(str(tmp_path / "a"))[0]))
    done = run("export", tmp_path / "a", "--to", tmp_path / "b")
    assert done.returncode == 1 and "export a whole model with --merge" in done.stderr and not (tmp_path / "b").exists()


def test_an_exported_model_is_a_plain_one(whole, tmp_path):
    done = run("export", whole, "--to", tmp_path / "plain")
    assert done.returncode == 0, done.stderr
    checkpoint = whole / "checkpoints" / "step-000001"
    assert not (tmp_path / "plain" / "training.pt").exists() and not list(tmp_path.glob(".*"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert torch.equal(logits(model), logits(load_model(str(checkpoint))[0]))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "plain")
    assert read_record(str(tmp_path / "plain")) == read_record(str(checkpoint))
    stops = {1, tokenizer.convert_tokens_to_ids("#")}  # transformers stops where training did
    assert set(GenerationConfig.from_pretrained(tmp_path / "plain").eos_token_id) == stops


def test_its_card_says_how_it_was_trained_and_how_to_run_it(whole, tmp_path):
    assert run("export", whole, "--to", tmp_path / "plain").returncode == 0
    card = (tmp_path / "plain" / "README.md").read_text()
    _, head, body = card.split("---\n", 2)
    assert yaml.safe_load(head)["library_name"] == "transformers"
    line = [x for x in read_lines(whole / "metrics.jsonl") if "eval/dense/accuracy" in x and x["step"] == 1][-1]
    for part in (
        "method `sparse-rl`", "task `sums`", "| compressor | rkv |", "| options | protect_prompt True |",
        "| budget | 42 |", "| interval | 4 |", f"| dense | {line['eval/dense/accuracy']:.1%} |",
        f"| rkv, budget 42 | {line['eval/sparse/accuracy']:.1%} |", "sparse_rl.generate(", "AutoModelForCausalLM",
        "--compressor dense", "lora_rank: 0",
    ):  # fmt: skip
        assert part in body, part


def test_an_exported_model_is_evaluated_as_it_was_trained(whole, tmp_path):
    assert run("export", whole, "--to", tmp_path / "plain").returncode == 0
    for name, model in {"a": tmp_path / "plain", "b": whole}.items():
        done = run("eval", model, "--limit", 6, "--out", tmp_path / name)
        assert done.returncode == 0 and "budget 42; interval 4; protect prompt True" in done.stderr, done.stderr
    assert lines(tmp_path / "a" / "items.jsonl") == lines(tmp_path / "b" / "items.jsonl")


@pytest.mark.parametrize("merge", [False, True])
def test_adapters_are_exported_as_they_are_or_merged(adapted, tmp_path, merge):
    checkpoint = adapted / "runs/mine/checkpoints/step-000001"
    done = run("export", adapted / "runs/mine", "--to", tmp_path / "out", *(["--merge"] if merge else []))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "adapter_config.json").exists() != merge
    assert (tmp_path / "out" / "config.json").exists() == merge
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.allclose(logits(model), logits(load_model(str(checkpoint))[0]), atol=1e-5)
    AutoTokenizer.from_pretrained(tmp_path / "out")
    assert read_record(str(tmp_path / "out")) == read_record(str(checkpoint))
    assert ("Adapters" in (tmp_path / "out" / "README.md").read_text()) != merge
    assert load_model(str(tmp_path / "out"))[0].config.sparse_rl["budget"] == 42


OWN_TASK = """
def prompt(i): return f"{i}+{i}=", str(2 * i)
def reward(answer, text): return float(answer in text)
"""
OWN_COMPRESSOR = """
from sparse_rl import ScoreCompressor
class Newest(ScoreCompressor):
    def __init__(self, sign: float = 1.0): self.sign = sign
    def score(self, view): return self.sign * view.feed.float()
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    """A checkpoint of a run with a task and a compressor in files of one's own, and data in a folder."""
    path = tmp_path_factory.mktemp("own files")
    (path / "mine.py").write_text(OWN_COMPRESSOR)
    (path / "work.py").write_text(OWN_TASK)
    settings = recipe(
        task={"name": str(path / "work.py")}, run={"steps": 1, "checkpoint_every": 1}, eval={"every": 0},
        rollout={**SMALL, "compressor": f"{path / 'mine.py'}:Newest", "compressor_options": {"sign": 2.0}},
    )  # fmt: skip
    train(settings, path / "run", show=False)
    return path


def texts_of(folder: Path) -> str:
    return "".join(file.read_text() for file in folder.iterdir() if file.suffix != ".safetensors")


def test_own_python_files_go_along_and_no_path_of_this_machine_does(own, tmp_path, monkeypatch):
    refused = run("export", own / "run", "--to", tmp_path / "out")
    assert refused.returncode == 1 and "repeat the command with --trust" in refused.stderr
    assert run("export", own / "run", "--to", tmp_path / "out", "--trust").returncode == 0
    assert str(own.parent) not in texts_of(tmp_path / "out")
    assert (tmp_path / "out" / "mine.py").read_text() == OWN_COMPRESSOR
    moved = (tmp_path / "out").rename(tmp_path / "elsewhere")
    record = read_record(str(moved))
    assert record is not None and record.task == str(moved / "work.py")
    assert record.compressor == f"{moved / 'mine.py'}:Newest" and record.options == {"sign": 2.0}
    assert run("export", moved, "--to", tmp_path / "out").returncode == 0  # its files lie in it: no question

    monkeypatch.chdir(tmp_path)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Read `work.py`, `mine.py:Newest` first" in card
    command = next(line for line in card.splitlines() if line.startswith("sparse-rl eval"))
    assert command == "sparse-rl eval out --trust"
    refused = run("eval", "out")
    assert refused.returncode == 1 and "--trust" in refused.stderr
    done = run(*command.split()[1:], "--limit", 2)
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr("builtins.print", lambda text: said.append(text))
    said: list[str] = []
    exec(card.split("```python\n")[2].split("```")[0], {})
    assert len(said) == 1 and isinstance(said[0], str)


def test_the_card_and_the_record_name_data_by_file_name(foreign, tmp_path):
    config = foreign / "checkpoints" / "step-000001" / "config.json"
    options = {"files": ["/home/me/some where/own.jsonl", "hub:a/b:train"], "suffix": " /no_think"}
    cache = {"compressor": "rkv", "budget": 42, "start": "~/models/mine"}
    record = {**cache, "task": "math", "task_options": options}
    config.write_text(json.dumps({**json.loads(config.read_text()), "sparse_rl": record}))
    (foreign / "recipe.yaml").write_text("task: {files: [/home/me/own.jsonl, 'hub:a/b:train'], suffix: /no_think}\n")
    assert run("export", foreign, "--to", tmp_path / "out").returncode == 0
    found = read_record(str(tmp_path / "out"))
    assert found is not None and found.start == "mine" and "/home/me" not in texts_of(tmp_path / "out")
    assert found.task_options["files"][1] == "hub:a/b:train" and found.task_options["suffix"] == " /no_think"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "sparse-rl eval out --task.files FILES\n" in card and "which are not part of this folder" in card
    assert "task: {files: [own.jsonl, 'hub:a/b:train'], suffix: /no_think}" in card


def test_adapters_of_a_local_base_are_not_pushed(adapted, tmp_path):
    done = run("export", adapted / "runs/mine", "--to", tmp_path / "out", "--push", "me/model")
    assert done.returncode == 1 and "push it with --merge" in done.stderr and not (tmp_path / "out").exists()


def test_mistakes_get_a_sentence(whole, tmp_path):
    (tmp_path / "there").mkdir()
    for arguments, sentence in (
        ([whole, "--to", tmp_path / "there"], "exists already"),
        ([whole, "--to", tmp_path / "x", "--merge"], "nothing to merge; omit --merge"),
        (["tiny", "--to", tmp_path / "x"], "is not a folder"),
    ):
        done = run("export", *arguments)
        assert done.returncode == 1 and sentence in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "x").exists()


def test_offline_the_folder_is_written_and_a_sentence_says_how_to_push_it(whole, tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    done = run("export", whole, "--to", tmp_path / "out", "--push", "me/model")
    assert done.returncode == 1 and "was written, but could not be pushed to 'me/model'" in done.stderr
    assert f"hf upload me/model {tmp_path / 'out'}" in done.stderr and (tmp_path / "out" / "config.json").exists()


def test_pushing_uploads_the_folder(whole, tmp_path, monkeypatch):
    import huggingface_hub

    sent = {}

    class Api:
        def create_repo(self, repo_id, exist_ok):
            return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo_id}")

        def upload_folder(self, repo_id, folder_path):
            sent[repo_id] = sorted(path.name for path in Path(folder_path).iterdir())

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    done = run("export", whole, "--to", tmp_path / "out", "--push", "me/model")
    assert done.returncode == 0 and "pushed to https://huggingface.co/me/model" in done.stdout, done.stderr
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(sent["me/model"])
    assert 'from_pretrained("me/model")' in (tmp_path / "out" / "README.md").read_text()


def test_a_failed_export_leaves_nothing(whole, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export_folder, "_write_generation_config", full)
    done = run("export", whole, "--to", tmp_path / "out")
    assert done.returncode == 1 and "the disk is full" in done.stderr and list(tmp_path.iterdir()) == []


@pytest.fixture
def foreign(tmp_path) -> Path:
    """A checkpoint in a run folder, without training."""
    base_folder(tmp_path / "run" / "checkpoints" / "step-000001")
    (tmp_path / "run" / "checkpoints" / "step-000001" / "training.pt").write_bytes(b"")
    (tmp_path / "run" / "recipe.yaml").write_text("run: {}\n")
    (tmp_path / "secret").write_text("a private key")
    return tmp_path / "run"


@pytest.mark.parametrize(
    "link", ["notes.txt", "chat_template.jinja", "additional_chat_templates/x.jinja", "../../recipe.yaml", "..", "."]
)
def test_what_links_name_outside_a_checkpoint_is_not_exported(foreign, tmp_path, link):
    """The last two: the checkpoints, or the checkpoint itself, are a link to a folder of the user."""
    path = foreign / "checkpoints" / "step-000001"
    if link in ("..", "."):
        (path / link).resolve().rename(tmp_path / "private")
        path = path.parent if link == ".." else path
        path.symlink_to(tmp_path / "private")
    else:
        path = Path(os.path.normpath(path / link))
        path.unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(tmp_path / "secret")
    done = run("export", foreign / "checkpoints" / "step-000001", "--to", tmp_path / "out")
    assert done.returncode == 1 and "is a link to a place outside" in done.stderr, done.stderr
    assert not (tmp_path / "out").exists()


def test_links_inside_a_checkpoint_are_exported_as_files(foreign, tmp_path):
    path = foreign / "checkpoints" / "step-000001"
    (path / "blobs").mkdir()
    (path / "config.json").rename(path / "blobs" / "config")
    (path / "config.json").symlink_to("blobs/config")
    done = run("export", foreign, "--to", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "config.json").is_file() and not (tmp_path / "out" / "config.json").is_symlink()


@pytest.mark.parametrize("content", ["null", "[" * 100_000, "[1]", "{", "\udc00"])
def test_a_damaged_generation_config_is_one_sentence(foreign, tmp_path, content):
    path = foreign / "checkpoints" / "step-000001" / "generation_config.json"
    path.write_bytes(content.encode(errors="surrogatepass"))
    done = run("export", foreign, "--to", tmp_path / "out")
    assert done.returncode == 1 and "cannot load" in done.stderr and "step-000001" in done.stderr, done.stderr
    assert not (tmp_path / "out").exists() and len(done.stderr.splitlines()) == 1
