"""verifiers:NAME: an environment of verifiers (0.4) as a task. It replies and grades; we sample.

    name: verifiers:wordle-v1      the package of the taskset, as verifiers' own command takes it

An environment runs as it is, in a process of its own (verifiers_host.py): its prompts, tools, replies, rewards and
weights are its own, and options that are not ours are its taskset's. What we need to know of it: one agent plays it,
and its conversations only grow.
"""

from __future__ import annotations

import importlib.util
import json
from typing import Any

from ..errors import SparseRLError, require_int
from ..files import OWN_HARNESS, VERIFIERS
from .base import Task
from .environment import Environment
from .judging import finite, named_rewards
from .problem import Grade, Message, Prompt

RUNTIMES = ("subprocess", "docker", "podman", "apptainer", "prime")


class Verifiers(Task):
    def __init__(
        self,
        taskset: str,
        /,
        seed: int = 0,
        size: int | None = None,
        harness: str = OWN_HARNESS,
        runtime: str = "subprocess",
        deadline: float = 60.0,
        **options: Any,
    ):
        """size: how many prompts are used; None: all, if they end.
        harness: verifiers' name of the program that plays; `chat`: a loop that asks the model and calls its tools.
        runtime: where the harness runs.
        deadline: seconds that a reply, or the grade at the end, may take.
        """
        if importlib.util.find_spec("verifiers") is None:
            raise SparseRLError(
                "tasks named verifiers:... need verifiers: install the extra with `pip install 'sparse-rl[verifiers]'`."
            )
        if runtime not in RUNTIMES:
            raise SparseRLError(f"verifiers: runtime is {runtime!r}; it must be one of {', '.join(RUNTIMES)}.")
        if isinstance(deadline, bool) or not isinstance(deadline, (int, float)) or not deadline > 0:
            raise SparseRLError(f"verifiers: deadline is {deadline!r}; it must be a number of seconds above 0.")
        if size is not None:
            require_int(**{"verifiers: size": size})
        self.name, self.seed = f"{VERIFIERS}{taskset}", seed
        made = {"taskset": taskset, "size": size, "harness": harness, "runtime": runtime, "options": options}
        self._made_of, self._deadline = made, deadline
        self._idle: list[Environment] = []  # shared with copies of the task
        first = self.service()
        self._prompts, self.tools = first.prompts, tuple(first.tools)
        first.close()

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, i: int) -> Prompt:
        return Prompt(list(self._prompts[i]), None, index=i)

    @property
    def converses(self) -> bool:
        return True

    def service(self) -> Environment:
        """An environment that no other rollout uses."""
        if self._idle:
            return self._idle.pop()
        return Environment(self.name, self._made_of, self._deadline, released=self._idle.append)

    def transcript(self, messages: list[Message]) -> str:
        """Nothing: an environment grades the conversations that it has held, and no others."""
        return ""

    def judge(self, prompt: Prompt, text: str) -> Grade:
        """text: what the environment said of the conversation"""
        if not text:
            return Grade(0.0, "error")
        found = json.loads(text)
        parts = named_rewards(found["parts"]) if found["parts"] else {}
        reward = finite("the reward", found["reward"])
        return Grade(reward, "right" if self.right(reward, parts) else "partly" if reward > 0 else "wrong", parts)

    def extracted(self, text: str) -> str | None:
        return None

    def close(self) -> None:
        """End the processes. The next rollout starts a new one."""
        while self._idle:
            self._idle.pop().end()
