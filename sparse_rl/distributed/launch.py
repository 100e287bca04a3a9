"""Several processes of one command on this machine, by torch's own launcher.

For several machines use accelerate launch, or torchrun.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import SparseRLError, require_int

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_PATIENCE = "3600"  # seconds that a process that is told to stop may take to finish an update and write a checkpoint


def launch(processes: int, arguments: list[str], folder: Path, go_on: str) -> int:
    """Run `sparse-rl ARGUMENTS` in that many processes; if one fails, the others are ended. Returns the exit status.

    folder: of the run; go_on: the command that continues it
    """
    import torch
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    require_int(**{"--num-processes": processes})
    if (others := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise SparseRLError(
            f"--num-processes is {processes}, but this process is one of {others} that another launcher started; omit "
            "it."
        )
    if torch.cuda.is_available() and processes > torch.cuda.device_count():
        raise SparseRLError(
            f"--num-processes is {processes}, but this machine has {torch.cuda.device_count()} GPUs; use at most as "
            "many."
        )
    # The launcher's own messages are silenced; the sentence below replaces them.
    for name in ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api"):
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
            rank = first_failure(error.failures)
            code = error.failures[rank].exitcode
            if code == 130:  # it was stopped, and has said so
                return 130
            end = f"was ended by signal {-code}" if code < 0 else f"failed with exit status {code}"
            begun = (folder / "recipe.yaml").exists()
            hint = f" Go on with: {go_on} --num-processes {processes}" if begun else ""
            raise SparseRLError(
                f"process {rank} of {processes} {end}, and the others were ended; its own message is above.{hint}"
            ) from None
    return 0


def first_failure(failures: Mapping[int, ProcessFailure]) -> int:
    """The rank of the process whose failure made the others fail.

    All failed at about the same time. A process that was killed makes the others fail with a status; SIGTERM is what
    the launcher itself sends.
    """

    def order(rank: int) -> tuple[bool, bool, float]:
        failure = failures[rank]
        return failure.exitcode == -signal.SIGTERM, failure.exitcode > 0, failure.timestamp

    return min(failures, key=order)
