"""Samplers as processes of a Ray cluster, on this machine's loopback interface: the run is that of one process."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sparse_rl.files import read_lines
from tests.helpers.runs import PATIENCE, command, recipe, write_recipe

pytest.importorskip("ray", reason="needs Ray: pip install 'sparse-rl[ray]'")
pytestmark = pytest.mark.slow  # a cluster of processes for each test: a minute

_RUN = """
import sys
from tests.pool import test_ray
getattr(test_ray, sys.argv[1])(*sys.argv[2:])
"""


def in_a_process(name, *arguments):
    """Ray decides when it is imported whether it listens beyond this machine, so every test has a process."""
    environment = {**os.environ, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-c", _RUN, name, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def settings(**rollout):
    return recipe(rollout=rollout, run={"steps": 3}, eval={"every": 0})


def loopback_only(pids):
    """Whether none of these processes listens to anything but 127.0.0.1 and ::1."""
    import psutil

    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {c.laddr.ip for c in psutil.Process(pid).net_connections("tcp") if c.status == "LISTEN"}
    return found and found <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def killed_run(folder):
    """Train on two nodes; a sampler is killed and a node is lost while they sample."""
    import psutil
    import ray
    from ray.cluster_utils import Cluster

    from sparse_rl.train.loop import Trainer
    from sparse_rl.train.run import train

    store = 80 * 2**20
    head = {"num_cpus": 2, "object_store_memory": store, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    other = cluster.add_node(num_cpus=1, object_store_memory=store)
    ray.init(address=cluster.address, log_to_driver=False)
    here = ray.get_runtime_context().get_node_id()
    happened = []

    def mishaps(trainer):
        """The first sampler at work is killed, and the second node is lost when one works there."""
        while len(happened) < 2:
            time.sleep(0.01)
            pool = None if trainer.pool is None else trainer.pool.pool
            members = [] if pool is None else list(pool.ledger.members.items())
            busy = [pool.samplers[i].about for i, member in members if not member.idle and i in pool.samplers]
            there = [about for about in busy if about.node != here]
            if busy and not happened:
                os.kill(busy[0].pid, signal.SIGKILL)
                happened.append("killed")
            elif there:
                children = [p.pid for p in psutil.Process().children(recursive=True)]
                happened.append("node" if loopback_only([os.getpid(), *children]) else "open ports")
                cluster.remove_node(other, allow_graceful=False)

    begin = Trainer.run

    def run(trainer):
        threading.Thread(target=mishaps, args=(trainer,), daemon=True).start()
        begin(trainer)

    Trainer.run = run
    train(settings(pool=f"ray://{cluster.address}", samplers=3), folder, show=False)
    ray.shutdown()
    cluster.shutdown()
    print("happened", *happened)


def cut_off_run(folder):
    """Train on two nodes; one freezes while a sampler works there, as a machine does whose cable is pulled."""
    import psutil
    import ray
    from ray.cluster_utils import Cluster

    from sparse_rl.train.loop import Trainer
    from sparse_rl.train.run import train

    store = 80 * 2**20
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": store, "include_dashboard": False}
    )
    cluster.add_node(num_cpus=1, object_store_memory=store)
    ray.init(address=cluster.address, log_to_driver=False)
    here = ray.get_runtime_context().get_node_id()
    frozen = []

    def freeze(trainer):
        while not frozen:
            time.sleep(0.01)
            pool = None if trainer.pool is None else trainer.pool.pool
            members = [] if pool is None else list(pool.ledger.members.items())
            busy = [pool.samplers[i].about for i, member in members if not member.idle and i in pool.samplers]
            for about in [about for about in busy if about.node != here]:
                raylet = psutil.Process(about.pid).parent()
                frozen.extend([raylet, *raylet.children(recursive=True)])
        for process in frozen:
            process.suspend()

    begin = Trainer.run

    def run(trainer):
        threading.Thread(target=freeze, args=(trainer,), daemon=True).start()
        begin(trainer)

    Trainer.run = run
    try:
        train(settings(pool=f"ray://{cluster.address}", samplers=2, patience=5.0), folder, show=False)
    finally:
        for process in frozen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        ray.shutdown()
        cluster.shutdown()
    print("frozen", len(frozen))


def half_precision(**rollout):
    """Few weights move far enough to become another number of bfloat16."""
    sections = {"model": {"dtype": "bfloat16"}, "optimizer": {"lr": 1e-5}, "run": {"steps": 3}, "eval": {"every": 0}}
    return recipe(**sections, rollout={"max_new_tokens": 64, "group_size": 6, **rollout})


def distant_run(folder):
    """The only sampler is on another node than the learner."""
    import ray
    from ray.cluster_utils import Cluster

    from sparse_rl.train.run import train

    store = 80 * 2**20
    head = {"num_cpus": 0, "object_store_memory": store, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=1, object_store_memory=store)
    ray.init(address=cluster.address, log_to_driver=False)
    train(half_precision(pool=f"ray://{cluster.address}", samplers=1), folder, show=False)
    ray.shutdown()
    cluster.shutdown()


def lost_learner(folder, out):
    """A learner is killed; another goes on with its folder, on the same cluster."""
    from ray.cluster_utils import Cluster

    store = 80 * 2**20
    head = {"num_cpus": 2, "object_store_memory": store, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    given = write_recipe(
        Path(folder), rollout={"pool": f"ray://{cluster.address}", "samplers": 2}, run={"steps": 6}, eval={"every": 0}
    )
    learner = subprocess.Popen(command("train", given, "--out", out))
    metrics = Path(out) / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 3:
        assert learner.poll() is None
        time.sleep(0.01)
    learner.kill()
    learner.wait()
    again = subprocess.run(command("train", out, "--resume", "--trust"), timeout=PATIENCE)
    assert again.returncode == 0
    cluster.shutdown()


def several_learners(folder, out):
    """Two learner processes, each with samplers of its own on one cluster."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 3, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    given = write_recipe(
        Path(folder), rollout={"pool": f"ray://{cluster.address}", "samplers": 3}, run={"steps": 3}, eval={"every": 0}
    )
    done = subprocess.run(command("train", given, "--num-processes", 2, "--out", out), timeout=PATIENCE)
    assert done.returncode == 0
    cluster.shutdown()


def test_several_learner_processes_have_samplers_each(tmp_path):
    given = write_recipe(tmp_path / "alone", run={"steps": 3}, eval={"every": 0})
    done = subprocess.run(command("train", given, "--num-processes", 2, "--out", tmp_path / "two"), timeout=PATIENCE)
    assert done.returncode == 0
    in_a_process("several_learners", tmp_path, tmp_path / "pool")
    assert (tmp_path / "pool" / "metrics.jsonl").read_bytes() == (tmp_path / "two" / "metrics.jsonl").read_bytes()


def test_a_node_is_cut_off(tmp_path):
    from sparse_rl.train.run import train

    train(settings(), tmp_path / "one", show=False)
    done = in_a_process("cut_off_run", tmp_path / "pool")
    assert (tmp_path / "pool" / "metrics.jsonl").read_bytes() == (tmp_path / "one" / "metrics.jsonl").read_bytes()
    last = read_lines(tmp_path / "pool" / "timing.jsonl")[-1]
    assert "frozen" in done.stdout and last["pool/lost/count"] >= 1 and last["pool/duplicates/different"] == 0


def test_a_distant_sampler_fetches_what_changed(tmp_path):
    from sparse_rl.train.run import train

    train(half_precision(), tmp_path / "one", show=False)
    in_a_process("distant_run", tmp_path / "pool")
    assert (tmp_path / "pool" / "metrics.jsonl").read_bytes() == (tmp_path / "one" / "metrics.jsonl").read_bytes()
    fetched = [line["pool/bytes/fetched"] for line in read_lines(tmp_path / "pool" / "timing.jsonl")]
    whole = fetched[0]
    assert whole > 0 and whole < fetched[-1] < 1.5 * whole, fetched  # the versions of two updates came as changes


def test_the_learner_is_lost_and_another_attaches_to_the_pool(tmp_path):
    from sparse_rl.train.run import train

    train(recipe(run={"steps": 6}, eval={"every": 0}), tmp_path / "one", show=False)
    in_a_process("lost_learner", tmp_path, tmp_path / "pool")
    assert (tmp_path / "pool" / "metrics.jsonl").read_bytes() == (tmp_path / "one" / "metrics.jsonl").read_bytes()


def test_samplers_and_a_node_are_lost_and_the_metrics_are_the_same(tmp_path):
    from sparse_rl.train.run import train

    train(settings(), tmp_path / "one", show=False)
    done = in_a_process("killed_run", tmp_path / "pool")
    assert (tmp_path / "pool" / "metrics.jsonl").read_bytes() == (tmp_path / "one" / "metrics.jsonl").read_bytes()
    last = read_lines(tmp_path / "pool" / "timing.jsonl")[-1]
    assert "happened killed node" in done.stdout and last["pool/lost/count"] >= 2, done.stdout[-2000:]
    assert last["pool/asked_again/count"] > 0 and last["pool/duplicates/different"] == 0
