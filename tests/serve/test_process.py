"""`sparse-rl serve` as a process: what it takes from a checkpoint, what it refuses, and how it ends."""

import contextlib
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from sparse_rl.export.card import Card
from sparse_rl.models import Record, load_model, set_record
from tests.helpers.runs import PATIENCE, command

SMALL = ["--rows", "4", "--max-tokens", "4000", "--dense-rows", "0"]
LONG = {"prompt": "1+2=", "max_tokens": 1000, "ignore_eos": True, "stream": True, "seed": 1}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint that remembers its cache, exported; with a run's worth of nothing else."""
    folder = tmp_path_factory.mktemp("model") / "checkpoint"
    model, tokenizer = load_model("tiny-sums", "float32")
    set_record(model, Record(compressor="snapkv", options={"window": 4}, budget=24, interval=8, template="{prompt}"))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    exported = folder.parent / "exported"
    subprocess.run(command("export", folder, "--to", exported), check=True, capture_output=True, timeout=PATIENCE)
    return exported


@contextlib.contextmanager
def started(*arguments):
    """(process, address) of a server that listens."""
    process = subprocess.Popen(
        command("serve", *arguments, "--port", 0), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        lines = []
        while "http://" not in (lines[-1] if lines else ""):
            lines.append(process.stdout.readline())
            assert lines[-1], process.communicate()[1]
        yield process, lines[-1].split()[0]
    finally:
        process.kill()
        process.communicate()


def test_an_exported_model_is_served_on_its_cache_and_drains(trained):
    with started(trained, *SMALL) as (process, address), httpx.Client(base_url=address, timeout=PATIENCE) as client:
        (model,) = client.get("/v1/models").json()["data"]
        assert model["id"] == "exported"
        cache = {"compressor": "snapkv", "budget": 24, "interval": 8, "rows": 4, "version": 0}
        assert model["sparse_rl"] == cache
        with client.stream("POST", "/v1/completions", json=LONG | {"stream_options": {"include_usage": True}}) as told:
            pieces = told.iter_text()
            text = next(pieces)
            process.send_signal(signal.SIGTERM)
            text += "".join(pieces)
        assert text.endswith("data: [DONE]\n\n") and '"completion_tokens": 1000' in text
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0 and "Traceback" not in errors, errors
        assert "as it was trained" in errors or "snapkv" in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_second_signal_ends_at_once(number):
    arguments = ["tiny-sums", "--rows", 4, "--max-tokens", 200_000, "--dense-rows", 0, "--prompt-tokens", 100]
    with started(*arguments) as (process, address), httpx.Client(base_url=address, timeout=PATIENCE) as client:
        asked = LONG | {"max_tokens": 190_000}
        with client.stream("POST", "/v1/completions", json=asked) as told:
            pieces = told.iter_text()
            next(pieces)
            process.send_signal(number)
            for _ in range(20):  # it goes on
                next(pieces)
            process.send_signal(number)
            with contextlib.suppress(httpx.HTTPError):
                for _ in pieces:
                    pass
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 130 and "Traceback" not in errors, errors


def test_what_cannot_be_served_is_one_sentence(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = [
            (["--port", port], "cannot be used"),
            (["--host", "0.0.0.0"], "--api-key"),
            (["--weights-root", tmp_path], "--admin-key"),
            (["--weights-root", tmp_path / "none", "--admin-key", "k"], "is not a folder"),
            (["--rows", 0], "rows"),
        ]
        for arguments, said in cases:
            done = subprocess.run(
                command("serve", "tiny-sums", *arguments), capture_output=True, text=True, timeout=PATIENCE
            )
            assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
            assert len(done.stderr.strip().splitlines()) <= 2, done.stderr


def test_a_missing_extra_is_one_sentence():
    without = "import sys; sys.modules['uvicorn'] = None; from sparse_rl.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", without, "serve", "tiny-sums"], capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 1 and "sparse-rl[serve]" in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_the_card_says_how_to_serve():
    text = Card("mine", Record(compressor="rkv", budget=24), None, None).text()
    assert "sparse-rl serve mine\n" in text
