"""Who may ask a server, and how much."""

import contextlib
import json
import socket

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.helpers.serving import all_free, served, until

KEY = {"Authorization": "Bearer one"}
ADMIN = {"Authorization": "Bearer root"}
ASKED = {"prompt": "1+2=", "max_tokens": 8, "temperature": 1.0, "seed": 1}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    root = tmp_path_factory.mktemp("weights")
    settings = dict(api_keys=("one", "two"), admin_key="root", weights_root=root, most_bytes=20_000, patience=1.0)
    with served(rows=2, waiting=4, dense_rows=0, **settings) as (address, service):
        yield httpx.Client(base_url=address, timeout=60), service, root


@pytest.fixture
def client(guarded):
    return guarded[0]


def test_a_key_is_needed(client):
    for headers in ({}, {"Authorization": "Bearer"}, {"Authorization": "Bearer three"}):
        refused = client.post("/v1/completions", json=ASKED, headers=headers)
        assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
    assert client.post("/v1/completions", json=ASKED, headers=KEY).status_code == 200
    assert client.get("/health").status_code == 200 and client.get("/metrics").status_code == 401


def test_the_administrator_alone_changes_the_model(client):
    for path in ("/pause", "/resume", "/update_weights"):
        assert client.post(path, json={}, headers=KEY).status_code == 403


def test_others_do_not_see_a_trace(client):
    identity = client.post("/v1/completions", json=ASKED | {"trace": True}, headers=KEY).json()["choices"][0][
        "trace_id"
    ]
    found = {who: client.get(f"/v1/traces/{identity}", headers={"Authorization": f"Bearer {who}"}).status_code
             for who in ("one", "two", "root")}  # fmt: skip
    assert found == {"one": 200, "two": 404, "root": 200}


def test_a_paused_server_waits(client, guarded):
    assert client.post("/pause", headers=ADMIN).json() == {"paused": True}
    service = guarded[1]
    with (
        httpx.Client(base_url=client.base_url, headers=KEY, timeout=60) as other,
        other.stream("POST", "/v1/completions", json=ASKED | {"stream": True}) as stream,
    ):
        assert until(lambda: service.desk.waiting + service.desk.running == 1)
        assert client.get("/health").json()["paused"]
        client.post("/resume", headers=ADMIN)
        assert stream.read().endswith(b"data: [DONE]\n\n")


def test_new_weights_have_a_version_and_change_the_answer(client, guarded):
    _, service, root = guarded
    state = {name: value.detach().clone() for name, value in service.model.state_dict().items()}
    asked = ASKED | {"max_tokens": 20, "ignore_eos": True}
    before = client.post("/v1/completions", json=asked, headers=KEY).json()
    (root / "step").mkdir()
    tied = {n: v for n, v in state.items() if n in dict(service.model.named_parameters())}
    save_file({name: value.flip(0) if "norm" not in name else value for name, value in tied.items()},
              root / "step" / "model.safetensors")  # fmt: skip
    told = client.post("/update_weights", json={"weight_dir": "step", "version": 7}, headers=ADMIN)
    assert told.status_code == 200 and told.json()["version"] == 7
    after = client.post("/v1/completions", json=asked, headers=KEY).json()
    assert (before["weight_version"], after["weight_version"]) == (0, 7)
    assert before["choices"][0]["text"] != after["choices"][0]["text"]
    save_file(tied, root / "step" / "model.safetensors")
    client.post("/update_weights", json={"weight_dir": "step"}, headers=ADMIN)
    assert client.post("/v1/completions", json=asked, headers=KEY).json()["choices"] == before["choices"]


@pytest.mark.parametrize("name", ["..", "/etc", "../step", "nothing", "", "a\0b", 3, None])
def test_no_other_folder_is_read(client, name):
    refused = client.post("/update_weights", json={"weight_dir": name}, headers=ADMIN)
    assert refused.status_code in (400, 403) and refused.json()["error"]["message"]


def test_weights_that_do_not_fit_change_nothing(client, guarded):
    _, service, root = guarded
    (root / "odd").mkdir()
    name, weight = next(iter(service.model.named_parameters()))
    kept = weight.detach().clone()
    save_file({name: kept[:1] + 1}, root / "odd" / "model.safetensors")
    refused = client.post("/update_weights", json={"weight_dir": "odd"}, headers=ADMIN)
    assert refused.status_code == 400 and name in refused.json()["error"]["message"]
    assert weight.equal(kept)


def test_a_large_request_is_refused(client):
    assert client.post("/v1/completions", json={"prompt": "1" * 30_000}, headers=KEY).status_code == 413

    def parts():
        for _ in range(100):
            yield b" " * 1000

    assert client.post("/v1/completions", content=parts(), headers=KEY).status_code == 413


def test_a_slow_request_is_refused(client):
    with socket.create_connection((client.base_url.host, client.base_url.port)) as slow:
        slow.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer one\r\nContent-Length: 99\r\n\r\n{"
        )
        assert slow.recv(100).startswith(b"HTTP/1.1 408")


def test_a_full_queue_says_when_to_come_again(client, guarded):
    service = guarded[1]
    client.post("/pause", headers=ADMIN)
    with (
        httpx.Client(base_url=client.base_url, headers=KEY, timeout=60) as other,
        other.stream("POST", "/v1/completions", json=ASKED | {"stream": True, "n": 4}) as stream,
    ):
        assert until(lambda: service.desk.waiting == 4)
        refused = client.post("/v1/completions", json=ASKED, headers=KEY)
        assert refused.status_code == 429 and int(refused.headers["Retry-After"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full" and "at most 4 may" in refused.json()["error"]["message"]
        client.post("/resume", headers=ADMIN)
        assert stream.read().endswith(b"data: [DONE]\n\n")
    never = client.post("/v1/completions", json=ASKED | {"n": 5}, headers=KEY)
    assert never.status_code == 400 and "at most 4 may wait" in never.json()["error"]["message"]
    assert until(lambda: all_free(service))


def test_who_leaves_a_paused_server_frees_a_place(client, guarded):
    service = guarded[1]
    client.post("/pause", headers=ADMIN)
    with contextlib.ExitStack() as streams:
        for _ in range(4):
            other = streams.enter_context(httpx.Client(base_url=client.base_url, headers=KEY, timeout=60))
            streams.enter_context(other.stream("POST", "/v1/completions", json=ASKED | {"stream": True}))
        assert until(lambda: service.desk.waiting == 4)
        assert client.post("/v1/completions", json=ASKED, headers=KEY).status_code == 429
    assert until(lambda: service.desk.open == 0)
    with client.stream("POST", "/v1/completions", json=ASKED | {"stream": True}, headers=KEY) as stream:
        assert stream.status_code == 200
        client.post("/resume", headers=ADMIN)
        assert stream.read().endswith(b"data: [DONE]\n\n")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ["model", "prompt", "messages", "n", "stop", "seed", "stream", "logprobs", "top_logprobs", "tools", "echo"]
FIELDS += ["max_tokens", "temperature", "top_p", "top_k", "stop_token_ids", "logit_bias", "token_ids", "tokens"]
FIELDS += ["sampling_params", "stream_options", "chat_template_kwargs", "weight_dir", "version", "weight_version"]
FIELDS += ["init_info", "update_info"]
PATHS = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/tokenize", "/detokenize",
         "/update_weights", "/init_weight_transfer_engine", "/start_weight_update", "/finish_weight_update",
         "/v1/traces/x", "/pause/x")  # fmt: skip
BASES = ({"prompt": "1+", "max_tokens": 2}, {"messages": [{"role": "user", "content": "1+"}], "max_tokens": 2},
         {"token_ids": [5], "sampling_params": {"max_tokens": 2}})  # fmt: skip


@settings(max_examples=80)
@given(path=st.sampled_from(PATHS), base=st.sampled_from(BASES), odd=st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_nonsense_is_refused_and_never_an_error_of_ours(guarded, path, base, odd):
    body = json.dumps(base | odd)
    answer = guarded[0].post(path, content=body.encode("utf-8", "replace"), headers=ADMIN)
    assert answer.status_code < 500, (answer.text, body)
    if answer.status_code >= 400:
        assert answer.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"9" * 5000, b"[" * 15000, b'"' + b"\\ud800" + b'"'])
def test_a_body_that_is_no_object_is_refused(client, body):
    refused = client.post("/v1/completions", content=body, headers=KEY)
    assert refused.status_code == 400 and refused.json()["error"]["message"]


def test_without_a_key_other_names_of_this_machine_are_refused():
    with served(dense_rows=0) as (address, _):
        for host, status in (("evil.example", 403), ("localhost", 200), ("127.0.0.1:99", 200), ("[::1]:80", 200)):
            assert httpx.get(f"{address}/v1/models", headers={"Host": host}).status_code == status


def test_pages_of_other_servers_are_refused():
    with served(dense_rows=0) as (address, _):
        for origin, status in (("https://evil.example", 403), ("null", 403), (address, 200)):
            assert httpx.get(f"{address}/v1/models", headers={"Origin": origin}).status_code == status


def test_a_head_that_is_slow_or_no_http_is_refused_in_the_same_shape(client):
    for sent, status in ((b"GET /hea", 408), (b"garbage\r\n\r\n", 400)):
        with socket.create_connection((client.base_url.host, client.base_url.port)) as odd:
            odd.sendall(sent)
            received = b"".join(iter(lambda: odd.recv(1000), b""))
        head, _, body = received.partition(b"\r\n\r\n")
        assert int(head.split()[1]) == status and json.loads(body)["error"]["message"]


def test_a_request_brings_no_template_of_its_own(client):
    asked = {"messages": [{"role": "user", "content": "1+"}], "chat_template_kwargs": {"chat_template": "{{ 1/0 }}"}}
    refused = client.post("/v1/chat/completions", json=asked, headers=KEY)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "chat_template_kwargs"


def test_extreme_settings_do_not_end_the_answers_of_others(client, guarded):
    for odd in ({"temperature": 1e-40}, {"top_k": 10**30}, {"top_p": 1e-300}):
        assert client.post("/v1/completions", json=ASKED | odd, headers=KEY).status_code == 200
    assert guarded[1].desk.counts.failed == 0
