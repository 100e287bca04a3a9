"""Samplers as processes of a Ray cluster, on this machine's loopback interface: the run is that of one process."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from sparse_rl.files import read_lines
from tests.helpers.runs import PATIENCE, recipe

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


def test_samplers_and_a_node_are_lost_and_the_metrics_are_the_same(tmp_path):
    from sparse_rl.train.run import train

    train(settings(), tmp_path / "one", show=False)
    done = in_a_process("killed_run", tmp_path / "pool")
    assert (tmp_path / "pool" / "metrics.jsonl").read_bytes() == (tmp_path / "one" / "metrics.jsonl").read_bytes()
    last = read_lines(tmp_path / "pool" / "timing.jsonl")[-1]
    assert "happened killed node" in done.stdout and last["pool/lost/count"] >= 2, done.stdout[-2000:]
    assert last["pool/asked_again/count"] > 0 and last["pool/duplicates/different"] == 0
