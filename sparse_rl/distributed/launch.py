"""Several processes of one command on this machine, by torch's own launcher. More machines: accelerate launch, or torchrun."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from pathlib import Path

from ..errors import SparseRLError, require_int

_PATIENCE = "3600"  # seconds that processes which are to stop may take to finish an update and write a checkpoint


def launch(processes: int, arguments: list[str]) -> int:
    """Run `sparse-rl ARGUMENTS` in that many processes; if one fails, the others are ended. Returns the exit status."""
    import torch
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    require_int(**{"--num-processes": processes})
    if (others := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise SparseRLError(
            f"--num-processes is {processes}, but this is one of {others} that another launcher started; leave it away."
        )
    if torch.cuda.is_available() and processes > torch.cuda.device_count():
        raise SparseRLError(
            f"--num-processes is {processes}, but this machine has {torch.cuda.device_count()} GPUs; use at most as many."
        )
    for name in (
        "torch.distributed.elastic",
        "torch.distributed.elastic.agent.server.api",
    ):  # what they have to say is said below
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _PATIENCE)
    with tempfile.TemporaryDirectory(prefix="sparse-rl-") as notes:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id="sparse-rl",
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            monitor_interval=0.5,
            logs_specs=DefaultLogsSpecs(log_dir=notes),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "sparse_rl", *arguments)
        except (KeyboardInterrupt, SignalException):
            return 130
        except ChildFailedError as error:
            failures = (
                error.failures
            )  # of about the same time; one that was killed made the others fail, and SIGTERM is the launcher's own
            rank = min(
                failures,
                key=lambda r: (
                    failures[r].exitcode == -signal.SIGTERM,
                    failures[r].exitcode > 0,
                    failures[r].timestamp,
                ),
            )
            failure = failures[rank]
            if failure.exitcode == 130:  # it was stopped, and has said so
                return 130
            how = (
                f"was ended by signal {-failure.exitcode}"
                if failure.exitcode < 0
                else f"failed with exit status {failure.exitcode}"
            )
            folder = arguments[arguments.index("--out") + 1]
            hint = (
                f" Go on with: sparse-rl train {folder} --resume --num-processes {processes}" if _begun(folder) else ""
            )
            raise SparseRLError(
                f"process {rank} of {processes} {how}, and the others were ended; what it said is above.{hint}"
            ) from None
    return 0


def _begun(folder: str) -> bool:
    return (Path(folder) / "recipe.yaml").exists()
