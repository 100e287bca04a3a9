"""New weights through a process group, over loopback, and from folders of all kinds of models."""

import copy
import threading
import time
from types import SimpleNamespace

import httpx
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from sparse_rl import SparseRLError
from sparse_rl.beacon import add_beacon, save_beacon
from sparse_rl.compressors.learned import fresh
from sparse_rl.integrations import client as module
from sparse_rl.integrations.client import RolloutClient, WeightSender
from sparse_rl.models import Companion, companions_of, load_model, save_companions, set_companion
from sparse_rl.serve.guard import ADMIN
from sparse_rl.serve.weights import Update, files, update
from tests.helpers.serving import served, until

HEADERS = {"Authorization": "Bearer root"}
ASKED = {"prompt": "1+2+3=", "max_tokens": 20, "temperature": 1.0, "seed": 1, "ignore_eos": True}


@pytest.fixture
def running():
    with served(rows=2, dense_rows=1, admin_key="root") as (address, service):
        yield address, service


def post(address, path, **body):
    return httpx.post(address + path, json=body, headers=HEADERS, timeout=60)


def trained(model):
    """The same model after some steps."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(1.1)
    return changed


@pytest.mark.parametrize("part", [2**30, 5000])
def test_a_trainer_sends_weights_to_two_servers_while_they_answer(running, monkeypatch, part):
    monkeypatch.setattr(module, "PART", part)
    address, service = running
    with served(rows=2, dense_rows=0, admin_key="root") as (other, second):
        changed = trained(service.model)
        with WeightSender([address, other], "root", timeout=30) as sender:
            for version in (20, 21):
                answering = threading.Thread(target=lambda: httpx.post(f"{address}/v1/completions", json=ASKED))
                answering.start()
                sender.send(changed, version)
                answering.join()
        for place in (service, second):
            assert place.version == 21
            for (name, got), want in zip(place.model.named_parameters(), changed.parameters(), strict=True):
                assert got.equal(want), name
    with RolloutClient(address) as asking:
        (got,) = asking.generate([service.tokenizer.encode("1+2=")], max_tokens=5)
    assert got.version == 21


def test_in_another_dtype_and_by_name(running):
    address, service = running
    weights = {name: p.detach().bfloat16() for name, p in trained(service.model).named_parameters()}
    with WeightSender([address], "root", timeout=30) as sender:
        sender.send(weights.items())
    assert service.version == 1
    assert all(p.equal(weights[name].float()) for name, p in service.model.named_parameters())


def test_weights_that_do_not_fit_change_nothing_and_nobody_hangs(running):
    address, service = running
    kept = copy.deepcopy(service.model.state_dict())
    name, first = next(iter(service.model.named_parameters()))
    own = dict(trained(service.model).named_parameters())
    for weights, said in (
        ({name: first[:1]}, "has shape"),
        ({"odd": first}, "'odd', which the model does not have"),
        ({name: first}, "weights are missing"),
        ({**own, name: own[name].to(torch.complex64)}, "'complex64' is not one of"),
    ):
        start = time.monotonic()
        with WeightSender([address], "root", timeout=30) as sender, pytest.raises(SparseRLError, match=said):
            sender.send(list(weights.items()), 5)
        assert time.monotonic() - start < 10
    assert service.version == 0
    assert all(kept[n].equal(value) for n, value in service.model.state_dict().items())


def test_a_trainer_that_dies_in_the_middle_changes_nothing(running, monkeypatch):
    address, service = running
    kept = copy.deepcopy(service.model.state_dict())
    sent = []

    def die(group, tensor):
        sent.append(tensor)
        if len(sent) == 3:
            group.close()
            raise SparseRLError("it died.")
        group._move(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8))

    with WeightSender([address], "root", timeout=30) as sender:
        monkeypatch.setattr(module.Broadcast, "send", die)
        with pytest.raises(SparseRLError, match="gone, or too slow"):
            sender.send(trained(service.model))
        monkeypatch.undo()
    assert httpx.post(f"{address}/v1/completions", json=ASKED).status_code == 200
    assert all(kept[n].equal(value) for n, value in service.model.state_dict().items())
    assert post(address, "/start_weight_update").json()["error"]["message"].startswith("the server is in no group")
    with WeightSender([address], "root", timeout=30) as sender:
        sender.send(service.model)
    assert service.version == 1


@pytest.mark.parametrize(
    "path, body",
    [
        ("/init_weight_transfer_engine", {}),
        ("/init_weight_transfer_engine", {"init_info": {"master_address": "127.0.0.1", "master_port": 0}}),
        ("/init_weight_transfer_engine",
         {"init_info": {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 2, "world_size": 2}}),
        ("/init_weight_transfer_engine",
         {"init_info": {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2,
                        "timeout": 1}}),
        ("/start_weight_update", {}),
        ("/update_weights", {"update_info": {"names": ["a"], "dtype_names": [], "shapes": []}}),
        ("/finish_weight_update", {}),
        ("/finish_weight_update", {"weight_version": "1.5"}),
        ("/load_lora_adapter", {"lora_name": "a", "lora_path": "/b"}),
        ("/pause?mode=abort", {}),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(running, path, body):
    refused = post(running[0], path, **body)
    assert refused.status_code == 400 and refused.json()["error"]["message"]
    assert running[1].version == 0 and not running[1].desk.paused


def test_a_wrong_key_is_told_before_anybody_waits(running):
    with pytest.raises(SparseRLError, match="/is_paused was refused"):
        WeightSender([running[0]], "none")
    with pytest.raises(SparseRLError, match="does not answer"):
        WeightSender([running[0], "http://127.0.0.1:9"], "root")


def test_every_route_of_the_administrator_needs_the_key(running):
    address, _ = running
    for path in ADMIN:
        for method in ("GET", "POST"):
            assert httpx.request(method, address + path).status_code == 403
    assert httpx.get(f"{address}/is_paused", headers=HEADERS).json() == {"is_paused": False}


def test_a_full_queue_is_asked_again(monkeypatch):
    with served(rows=1, waiting=2, dense_rows=0) as (address, service), RolloutClient(address) as asking:
        monkeypatch.setattr(module.time, "sleep", lambda _, sleep=time.sleep: sleep(0.01))
        prompt = service.tokenizer.encode("1+2=")
        got = asking.generate([prompt] * 12, group_size=2, max_tokens=30, seed=1, ignore_eos=True)
        assert len(got) == 24 and until(lambda: service.desk.open == 0)


def test_the_client_samples_from_the_whole_distribution(running):
    """Whatever the model's own config says; a replay could not know it."""
    address, service = running
    prompt = service.tokenizer.encode("1+2=")
    with RolloutClient(address) as asking:
        (expected,) = asking.generate([prompt], max_tokens=20, seed=1)
        service.defaults.update(temperature=0.5, top_p=0.5, top_k=3)
        (got,) = asking.generate([prompt], max_tokens=20, seed=1)
    assert got.tokens.equal(expected.tokens) and got.sampler_logprobs.equal(expected.sampler_logprobs)


def loaded(model, folder):
    """A folder's weights, put into a model as the server does it."""
    service = SimpleNamespace(model=model, desk=SimpleNamespace(places={}), version=0)
    return update(service, folder, None)


def test_experts_come_as_checkpoints_hold_them(tmp_path):
    config = Qwen3MoeConfig(vocab_size=32, hidden_size=16, intermediate_size=32, moe_intermediate_size=16,
                            num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
                            num_experts=4, num_experts_per_tok=2)  # fmt: skip
    model, other = AutoModelForCausalLM.from_config(config), AutoModelForCausalLM.from_config(config)
    other.save_pretrained(tmp_path)
    loaded(model, tmp_path)
    for (name, got), want in zip(model.named_parameters(), other.parameters(), strict=True):
        assert got.equal(want), name


def test_a_folder_brings_its_beacon_and_what_a_compressor_learned(tmp_path):
    model, _ = load_model("tiny-sums", "float32")
    add_beacon(model, (4,), seed=1)
    set_companion(model, "learned", fresh(model, seed=1))
    set_companion(model, "triattention", Companion({"mean": torch.ones(2)}))
    other = trained(model)
    for tensor in companions_of(other)["learned"].tensors.values():
        tensor.add_(1)
    beaconed = {name: p.detach() for name, p in other.named_parameters() if not name.endswith(".beacon")}
    save_file({name: p.contiguous() for name, p in beaconed.items()}, tmp_path / "model.safetensors")
    with pytest.raises(SparseRLError, match=r"1 weights are missing there, such as .*beacon"):
        loaded(model, tmp_path)
    save_beacon(tmp_path, other)
    save_companions(tmp_path, other)
    assert loaded(model, tmp_path)["tensors"] > len(beaconed) + 1
    for (name, got), want in zip(model.named_parameters(), other.parameters(), strict=True):
        assert got.equal(want), name
    for name, got in companions_of(model)["learned"].tensors.items():
        assert got.equal(companions_of(other)["learned"].tensors[name])
    plain, _ = load_model("tiny-sums", "float32")
    with pytest.raises(SparseRLError, match="has a beacon, but the one that is served has none"):
        list(files(tmp_path, plain))


def test_tied_weights_may_come_by_both_names():
    model, _ = load_model("tiny-sums", "float32")
    new = Update(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        new.expect(name, parameter.shape, "here")
    new.check_whole()


def test_a_server_that_stops_does_not_wait_for_a_group():
    group = module.Broadcast.sender("127.0.0.1", 3, 30.0)  # the third never comes
    told = []
    with served(rows=1, dense_rows=0, admin_key="root") as (address, service):
        info = {"master_address": "127.0.0.1", "master_port": group.port, "rank_offset": 1, "world_size": 3}

        def ask():
            told.append(post(address, "/init_weight_transfer_engine", init_info={**info, "timeout": 60}))

        asking = threading.Thread(target=ask)
        asking.start()
        assert httpx.post(f"{address}/v1/completions", json=ASKED).status_code == 200
        service.desk.end()
        asking.join(20)
    assert told[0].status_code == 503 and "stopping" in told[0].json()["error"]["message"]
