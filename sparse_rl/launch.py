"""Several processes of one command on this machine, by torch's own launcher. More machines: accelerate launch, or torchrun."""

from __future__ import annotations

import logging
import sys

from .errors import SparseRLError, whole


def launch(processes: int, arguments: list[str]) -> int:
    """Run `sparse-rl ARGUMENTS` in that many processes; if one fails, the others are ended. Returns the exit status."""
    import torch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    whole(**{"--num-processes": processes})
    if torch.cuda.is_available() and processes > torch.cuda.device_count():
        raise SparseRLError(f"--num-processes is {processes}, but this machine has {torch.cuda.device_count()} GPUs; use at most as many.")
    for name in ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api"):  # what they have to say is said below
        logging.getLogger(name).setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id="sparse-rl",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.5,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "sparse_rl", *arguments)
    except (KeyboardInterrupt, SignalException):
        return 130
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode == 130:  # it was stopped, and has said so
            return 130
        how = f"was ended by signal {-failure.exitcode}" if failure.exitcode < 0 else f"failed with exit status {failure.exitcode}"
        folder = arguments[arguments.index("--out") + 1]
        raise SparseRLError(
            f"process {rank} of {processes} {how}, and the others were ended; what it said is above. "
            f"Go on with: sparse-rl train {folder} --resume --num-processes {processes}"
        ) from None
    return 0
