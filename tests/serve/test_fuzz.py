"""Random requests, byte by byte: whatever comes, no answer is an error of ours, and refusals have OpenAI's shape.

The default suite sends a sample; `make slow` sends 2,000.
"""

import json
import random
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.helpers.serving import all_free, served, until

MOST_BYTES, PATIENCE = 20_000, 0.5
TEXTS = ["", "1+2=", "\0", "\ud800", "é\u202e🙂" * 20, "a" * 3000, "{{ 7*7 }}", "../../etc/passwd", "<eos>", "\r\n\r\n"]
NUMBERS = [0, 1, -1, 2, 0.5, 1e-40, 5e-324, 1e308, -1e308, 2**31, 2**63, -(2**63) - 1, 10**40, 1.5, 64, 65]
FIELDS = {
    "/v1/completions": ["prompt", "logprobs", "echo", "suffix", "best_of"],
    "/v1/chat/completions": [
        "messages", "logprobs", "top_logprobs", "tools", "tool_choice", "chat_template_kwargs", "conversation",
        "max_completion_tokens", "add_generation_prompt",
    ],
    "/inference/v1/generate": ["token_ids", "sampling_params", "request_id"],
    "/tokenize": ["prompt", "messages", "tools"],
    "/detokenize": ["tokens"],
    "/update_weights": ["weight_dir", "version", "update_info"],
    "/init_weight_transfer_engine": ["init_info"],
    "/finish_weight_update": ["weight_version", "version"],
}  # fmt: skip
COMMON = [
    "model", "n", "stop", "seed", "stream", "stream_options", "max_tokens", "temperature", "top_p", "top_k", "trace",
    "map", "stop_token_ids", "ignore_eos", "return_token_ids", "logit_bias", "min_p", "frequency_penalty",
    "response_format", "user", "unheard of",
]  # fmt: skip
GOOD = {
    "/v1/completions": {"prompt": "1+2=", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "1+"}], "max_tokens": 4},
    "/inference/v1/generate": {"token_ids": [5, 6], "sampling_params": {"max_tokens": 4}},
    "/tokenize": {"prompt": "1+2="},
    "/detokenize": {"tokens": [5, 6]},
    "/update_weights": {"weight_dir": "none"},
    "/init_weight_transfer_engine": {"init_info": {"master_address": "127.0.0.1", "master_port": 0}},
    "/finish_weight_update": {"weight_version": "3"},
}
PATHS = [
    "/", "//", "/v1", "/v1/traces/" + "x" * 500, "/v1/traces/%2e%2e%2fetc", "/pause/x", "/%00", "/v1/models/sums",
    "/v1/models/%ff", "/../../etc/passwd", "/metrics?" + "a" * 2000,
]  # fmt: skip
LIKELY = {  # values that a field nearly takes
    "messages": [
        [], [{}], [{"role": "user"}], [{"role": "tool", "content": 3}], [{"role": "user", "content": [{"text": "1"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[" * 2000}}]}],
        [{"role": "\ud800", "content": "1"}], [{"role": "user", "content": "1"}] * 300,
    ],
    "tools": [[], [{}], [{"type": "function", "function": {"name": "\ud800"}}], [[]]],
    "chat_template_kwargs": [{"chat_template": "{{ 1/0 }}"}, {"messages": 1}, {"self": 1}, {"x": 1}],
    "prompt": [[], [[]], [""], [5, 6], [[5], [6]], [5, "6"], [10**9], [-1], ["1"] * 300],
    "sampling_params": [{"n": 3}, {"stream": True}, {"prompt_logprobs": 5}, {"logprobs": 3}, {"top_k": 10**40}],
    "stop": [[], [""], ["1", "2"], ["x"] * 17, ["\ud800"]],
    "stream": [True], "map": [True], "trace": [True], "echo": [True], "logprobs": [3, True], "n": [3, 64, 10**9],
    "stop_token_ids": [[5], [10**30], [-1], list(range(17))],
    "stream_options": [{"include_usage": True}],
    "model": ["sums", "sums:dense", "sums/../x"],
    "weight_dir": ["..", "/etc", "a" * 300, "\ud800", "a/" * 400],
}  # fmt: skip


def value(draw: random.Random, depth: int = 3):
    """Any JSON."""
    kind = draw.randrange(7 if depth else 5)
    if kind < 2:
        return draw.choice(TEXTS)
    if kind < 4:
        return draw.choice(NUMBERS)
    if kind == 4:
        return draw.choice([None, True, False])
    inner = [value(draw, depth - 1) for _ in range(draw.randrange(4))]
    return inner if kind == 5 else {draw.choice(TEXTS): one for one in inner}


def deep(draw: random.Random) -> str:
    many = draw.choice([50, 900, 3000])
    return draw.choice(["[" * many + "]" * many, '{"a":' * many + "1" + "}" * many])


def body_of(draw: random.Random, path: str) -> bytes:
    """A good request with some of its fields changed; sometimes its bytes, too."""
    body = dict(GOOD[path])
    for _ in range(draw.randrange(4)):
        field = draw.choice(FIELDS[path] + COMMON)
        likely = field in LIKELY and draw.random() < 0.6
        body[field] = draw.choice(LIKELY[field]) if likely else value(draw)
    text = json.dumps(body, ensure_ascii=draw.random() < 0.7)
    if draw.random() < 0.1:
        text = text[:-1] + f', "{draw.choice(FIELDS[path])}": {deep(draw)}}}'
    content = text.encode("utf-8", "surrogatepass")
    if draw.random() < 0.15:  # cut, or a byte changed
        at = draw.randrange(len(content))
        content = content[:at] + (b"" if draw.random() < 0.5 else bytes([draw.randrange(256)]) + content[at + 1 :])
    return b" " * (MOST_BYTES + 1) if draw.random() < 0.03 else content


def head_of(draw: random.Random, path: str, length: int) -> bytes:
    method = "POST" if draw.random() < 0.97 else draw.choice(["GET", "PUT", "HEAD", "OPTIONS", "BREW"])
    return (
        f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer root\r\nConnection: close\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def request(draw: random.Random) -> tuple[list[bytes], str]:
    """(what is sent, its kind); of a slow request the rest never comes."""
    kind = draw.choices(["body", "path", "http", "slow", "gone"], [85, 4, 5, 3, 3])[0]
    path = draw.choice(list(GOOD))
    content = body_of(draw, path)
    if kind == "path":
        path = draw.choice(PATHS)
        return [head_of(draw, path, len(content)), content], kind
    if kind == "http":
        odd = [
            bytes(draw.randrange(256) for _ in range(50)) + b"\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
            b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: " + b"9" * 30 + b"\r\n\r\n",
            b"POST /tokenize HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
        ]
        return [draw.choice(odd)], kind
    if kind == "slow":
        whole = head_of(draw, path, len(content) + 50) + content
        return [whole[: draw.randrange(1, len(whole))]], kind
    return [head_of(draw, path, len(content)), content], kind


def answer(port: int, parts: list[bytes], kind: str) -> bytes | None:
    """All that the server answers; None: the client has gone before."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        received = b""
        try:
            for part in parts:
                connection.sendall(part)
            if kind == "gone":
                return None
            while got := connection.recv(65536):
                received += got
        except (ConnectionResetError, BrokenPipeError):  # refused before all was sent
            pass
        return received


def check(received: bytes, parts: list[bytes]) -> int:
    """-> the status"""
    shown = b"".join(parts)[:2000], received[:2000]
    head, _, body = received.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    assert status < 500, shown
    if b"chunked" in head:
        body = b"".join(body.split(b"\r\n")[1::2])
    if parts[0].startswith(b"HEAD"):
        return status
    if status >= 400:
        error = json.loads(body)["error"]
        assert isinstance(error["message"], str) and error["message"], shown
        assert isinstance(error["type"], str) and {"param", "code"} <= error.keys(), shown
    elif b"text/event-stream" in head:
        *lines, last, rest = body.split(b"\n\n")
        assert last == b"data: [DONE]" and rest == b"", shown
        assert all("error" not in json.loads(line.removeprefix(b"data: ")) for line in lines), shown
    elif b"application/json" in head:
        json.loads(body)
    return status


def fuzz(many: int, first: int, root: Path) -> Counter:
    """How often which status came."""
    settings = dict(admin_key="root", weights_root=root, most_bytes=MOST_BYTES, patience=PATIENCE)
    known = {"prompt": "1+2+3+4+5+6+7+8=", "max_tokens": 60, "temperature": 1.0, "seed": 5}
    with served(rows=4, waiting=64, **settings) as (address, service):
        port = int(address.rsplit(":", 1)[1])
        before = httpx.post(f"{address}/v1/completions", json=known).json()["choices"]

        def one(number: int) -> str:
            parts, kind = request(random.Random(number))
            received = answer(port, parts, kind)
            if received is None:
                return "gone"
            assert received, (number, kind, parts)
            return str(check(received, parts))

        with ThreadPoolExecutor(4) as threads:
            found = Counter(threads.map(one, range(first, first + many)))
        assert until(lambda: service.desk.running + service.desk.waiting == 0)
        service.conversations.expire(lambda: 1e12)
        assert until(lambda: all_free(service)) and service.desk.open == 0
        assert service.desk.counts.failed == 0 and service.desk.alive
        assert httpx.post(f"{address}/v1/completions", json=known).json()["choices"] == before
    return found


def test_random_requests_are_answered_or_refused(tmp_path, capfd):
    found = fuzz(120, 0, tmp_path)
    assert "Traceback" not in capfd.readouterr().err
    assert {"200", "400"} <= found.keys()


@pytest.mark.slow
def test_two_thousand_random_requests(tmp_path, capfd):
    found = fuzz(2000, 1000, tmp_path)
    assert "Traceback" not in capfd.readouterr().err
    print(dict(sorted(found.items())))
    assert {"200", "400", "404", "405", "408", "413", "gone"} <= found.keys()
