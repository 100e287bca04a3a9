"""`sparse-rl report`: one file of runs, and the page served while they write."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from typer.testing import CliRunner

from sparse_rl import SparseRLError
from sparse_rl.cli.main import app
from sparse_rl.config import load_recipe
from sparse_rl.files import read_lines
from sparse_rl.report import write
from sparse_rl.report.serve import MOST, Handler, Server
from sparse_rl.train.run import train
from tests.helpers.runs import PATIENCE


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "first"
    keys = {
        "run.steps": 3,
        "run.samples": 2,
        "rollout.prompts": 2,
        "rollout.group_size": 4,
        "rollout.rows": 8,
        "eval.prompts": 4,
    }
    train(load_recipe("tiny-sums", [(key, str(value)) for key, value in keys.items()]), folder, show=False)
    return folder


def report(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


@pytest.fixture
def served(run_folder, tmp_path):
    copy = tmp_path / "runs" / "first"
    shutil.copytree(run_folder, copy)
    with Server([tmp_path / "runs"]) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()

        port = server.server_port

        def ask(path: str, **headers) -> tuple[int, str]:
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

        yield ask, copy, server
        server.shutdown()
        thread.join()


def test_the_page_has_what_the_run_wrote(run_folder, tmp_path):
    done = report(run_folder, "-o", tmp_path / "r.html")
    assert done.exit_code == 0 and done.stdout.strip() == str(tmp_path / "r.html"), done.exception
    (run,) = data_of((tmp_path / "r.html").read_text())["runs"]
    reward = {
        line["step"]: line["reward/mean"] for line in read_lines(run_folder / "metrics.jsonl") if "reward/mean" in line
    }
    curve = run["curves"]["reward/mean"]
    assert dict(zip(curve["step"], curve["mean"])) == pytest.approx(reward, rel=1e-5) and run["steps"] == 3
    assert [t["step"] for t in run["trajectories"]] and all(t["map"] for t in run["trajectories"])
    samples = [json.loads(line) for line in (run_folder / "samples" / "step-000003" / "trajectories.jsonl").open()]
    shown = next(t for t in run["trajectories"] if t["step"] == 3 and t["prompt_index"] == samples[0]["prompt_index"])
    first = samples[0]["num_prompt_tokens"]
    assert shown["pieces"] == samples[0]["pieces"] and shown["rank"] == samples[0]["rank"][first:]
    assert shown["weight"] == pytest.approx(samples[0]["weight"][first:], rel=1e-4)


@pytest.mark.parametrize("kind, begins", [("png", b"\x89PNG"), ("md", b"# ")])
def test_other_formats(run_folder, tmp_path, kind, begins):
    done = report(run_folder, run_folder.parent, "-o", tmp_path / "x" / f"r.{kind}")  # the ending says the format
    assert done.exit_code == 0 and (tmp_path / "x" / f"r.{kind}").read_bytes().startswith(begins), done.exception


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere"], "nowhere"),
        (["--format", "pdf", "nowhere"], "there is no format 'pdf'"),
        (["--live", "nowhere"], "nowhere"),
        (["--live", "RUN", "--port", 70000], "--port is 70000; it must be between 0"),
        (["--live", "RUN", "--port", -1], "--port is -1; it must be between 0"),
    ],
)
def test_mistakes_get_a_sentence(arguments, message, run_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = report(*(run_folder if argument == "RUN" else argument for argument in arguments))
    assert isinstance(done.exception, SparseRLError) and message in str(done.exception) and not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_told(run_folder, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for out in (tmp_path / "file" / "r.html", tmp_path / "folder"):
        with pytest.raises(SparseRLError, match=r"could not be written \(.*\); nothing half-written was left"):
            write([run_folder], out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]  # nothing is left behind


def test_links_out_of_a_run_are_not_followed(run_folder, tmp_path):
    shutil.copytree(run_folder, tmp_path / "secret")
    shutil.copytree(run_folder, tmp_path / "run")
    for name in ("recipe.yaml", "timing.jsonl", "samples"):
        shutil.rmtree(tmp_path / "run" / name) if name == "samples" else (tmp_path / "run" / name).unlink()
        (tmp_path / "run" / name).symlink_to(tmp_path / "secret" / name)
    (run,) = data_of(write([tmp_path / "run"], tmp_path / "r.html").read_text())["runs"]
    assert (
        not run["recipe"]
        and not run["trajectories"]
        and "time/step" not in run["curves"]
        and "reward/mean" in run["curves"]
    )
    assert sum("out of the run's folder" in note for note in run["notes"]) == 3


def test_links_inside_samples_are_not_followed_out(run_folder, tmp_path):
    shutil.copytree(run_folder, tmp_path / "secret")
    shutil.copytree(run_folder, tmp_path / "run")
    steps = sorted((tmp_path / "run" / "samples").iterdir())
    shutil.rmtree(steps[0])
    steps[0].symlink_to(tmp_path / "secret" / "samples" / steps[0].name)
    for step in steps[1:]:
        (step / "trajectories.jsonl").unlink()
        (step / "trajectories.jsonl").symlink_to(tmp_path / "secret" / "samples" / step.name / "trajectories.jsonl")
    (run,) = data_of(write([tmp_path / "run"], tmp_path / "r.html").read_text())["runs"]
    assert (
        run["trajectories"] == [] and sum("out of the run's folder" in note for note in run["notes"]) == len(steps) > 1
    )


@pytest.mark.parametrize(
    "recipe", ["learn: {method: " + "x" * 3_000_000 + "}", "learn: {bar: 0x" + "f" * 10_000 + "}", "BOMB"]
)
def test_recipes_that_would_take_for_ever_are_cut(run_folder, tmp_path, recipe):
    shutil.copytree(run_folder, tmp_path / "run")
    bomb = (
        "a: &a ["
        + ",".join(["x"] * 90)
        + "]\n"
        + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 90)}]\n" for a, b in zip("abcd", "bcde"))
    )
    (tmp_path / "run" / "recipe.yaml").write_text(bomb + "learn: {x: *e}\n" if recipe == "BOMB" else recipe)
    assert len(write([tmp_path / "run"], tmp_path / "r.html").read_bytes()) < 2_000_000


def test_samples_that_grow_are_seen(served):
    ask, run, _ = served
    path = run / "samples" / "step-000003" / "trajectories.jsonl"
    whole = path.read_text()
    path.write_text(whole.splitlines()[0] + "\n")
    before = len(json.loads(ask("/data.json")[1])["runs"][0]["trajectories"])
    path.write_text(whole)
    assert len(json.loads(ask("/data.json")[1])["runs"][0]["trajectories"]) == before + 1


def test_the_live_page_follows_its_runs(served):
    ask, run, _ = served
    status, page = ask("/")
    assert status == 200 and data_of(page)["live"] == {"every": 2.0}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps({"step": 4, "reward/mean": 0.25}) + "\n" + '{"step": 5, "rew'
        )  # and a line that is being written
    (shown,) = json.loads(ask("/data.json")[1])["runs"]
    assert shown["curves"]["reward/mean"]["mean"][-1] == 0.25 and shown["steps"] == 4
    shutil.copytree(run, run.parent / "second")
    assert len(json.loads(ask("/data.json")[1])["runs"]) == 2
    shutil.rmtree(run)
    assert [r["name"].split("/")[-1] for r in json.loads(ask("/data.json")[1])["runs"]] == ["second"]
    shutil.rmtree(run.parent)
    status, gone = ask("/data.json")
    assert status == 503 or json.loads(gone)["runs"] == []
    assert ask("/nothing")[0] == 404  # it still answers


@pytest.mark.parametrize(
    "path", ["/recipe.yaml", "/../../etc/passwd", "/%2e%2e/recipe.yaml", "/data.json?x", "/samples/", "/data.json/.."]
)
def test_nothing_else_is_served(served, path):
    ask, _, _ = served
    status, text = ask(path)
    assert status == 404 and "root:" not in text and "rollout" not in text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "", "127.0.0.1", "0.0.0.0:{port}"])
def test_other_names_are_refused(served, host):
    ask, _, server = served
    assert server.server_address[0] == "127.0.0.1"
    assert ask("/", Host=host.format(port=server.server_port))[0] == 403
    assert ask("/data.json", Host=f"localhost:{server.server_port}")[0] == 200


def test_port_80_goes_without_saying(served):
    ask, _, server = served
    server.server_port = 80
    assert ask("/data.json", Host="127.0.0.1")[0] == ask("/data.json", Host="localhost:80")[0] == 200
    assert ask("/data.json", Host="evil.example")[0] == 403


@pytest.mark.parametrize("path, status", [("/", 200), ("/data.json", 200), ("/nothing", 404)])
def test_head_is_get_without_the_body(served, path, status):
    _, _, server = served
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    heads = []
    for method in (
        "HEAD",
        "GET",
        "HEAD",
    ):  # on one connection: a body that is not asked for would be taken for the next answer
        connection.request(method, path)
        answer = connection.getresponse()
        assert answer.status == status and bool(answer.read()) == (method == "GET")
        heads.append({name: value for name, value in answer.getheaders() if name != "Date"})
    assert heads[0] == heads[1] == heads[2] and int(heads[0]["Content-Length"]) > 0


def test_connections_are_bounded_and_the_silent_ones_end(served, monkeypatch):
    ask, _, server = served
    address = ("127.0.0.1", server.server_port)
    silent = [socket.create_connection(address, timeout=20) for _ in range(MOST)]
    for _ in range(3):
        with socket.create_connection(address, timeout=20) as refused:
            assert refused.recv(1) == b""  # closed at once
    for connection in silent:
        connection.close()
    while ask_or_nothing(ask) != 200:  # their threads notice it
        time.sleep(0.01)
    monkeypatch.setattr(Handler, "timeout", 0.1)
    with socket.create_connection(address, timeout=20) as connection:
        connection.sendall(b"GET / HT")
        assert connection.recv(1) == b""  # it was silent for too long
    monkeypatch.setattr(Handler, "timeout", 60)
    with socket.create_connection(address, timeout=20) as connection:
        connection.sendall(b"GET /data.json HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % server.server_port)
        assert connection.recv(12) == b"HTTP/1.1 200"
    assert ask("/data.json")[0] == 200


def test_a_request_that_drips_is_ended(served, monkeypatch):
    ask, _, server = served
    monkeypatch.setattr(Handler, "timeout", 0.5)
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nX: ")
        connection.settimeout(0.1)
        for _ in range(200):  # never silent for as long as it may be
            try:
                connection.sendall(b"x")
                if not connection.recv(1 << 16):
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            pytest.fail("the connection is still open")
    monkeypatch.setattr(Handler, "timeout", 60)
    assert ask("/data.json")[0] == 200


def ask_or_nothing(ask) -> int | None:
    try:
        return ask("/data.json")[0]
    except (OSError, http.client.HTTPException):
        return None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_live_command_stops_cleanly(run_folder, number):
    command = [sys.executable, "-c", "from sparse_rl.cli import main; main()", "report", str(run_folder), "--live"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    address = re.match(r"http://127\.0\.0\.1:(\d+)/", process.stdout.readline())
    connection = http.client.HTTPConnection("127.0.0.1", int(address[1]))
    connection.request("GET", "/data.json")
    assert connection.getresponse().status == 200
    process.send_signal(number)
    rest, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, rest, errors) == (0, "stopped\n", "")
