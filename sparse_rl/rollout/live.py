"""An engine that stays open: prompts come at any time with their own settings, and conversations can be continued.

    with engine.open(prompt_tokens=512, max_tokens=4096) as live:
        chat = live.submit(prompt, Sampling(max_new_tokens=256), seed=0)
        while chat.status != "stopped":
            live.step()                     # a round for all conversations; chat.read() has the new tokens
        live.extend(chat, tool_output)      # fed in chunks, evicting as they come; then sampled on
        ...
        chat = live.renew(chat, question)   # or: read everything as a new prompt, under a new trace
        ...
        trajectory = live.release(chat)     # one trace over all turns; its row is free

What a conversation samples depends on its own tokens, settings and seed alone, not on when they arrive or who else runs
(to the bit on a CPU). `submit`, `extend`, `renew` and `cancel` may be called from any thread: they take effect with the
next round. Everything else belongs to the thread that steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from ..errors import SparseRLError, require_int
from ..records import Trajectory
from ..signals import uninterrupted
from ..streams import stream_key
from .conversation import Conversation
from .limits import Limits, check_extendable, check_renewable
from .live_loop import LiveLoop
from .requests import check_seed, token_list
from .sampling import Sampling

if TYPE_CHECKING:
    from .engine import Engine


class QueueFull(SparseRLError):
    """Too many conversations are waiting; try again when some have ended."""


class LiveEngine:
    """The open engine that `Engine.open` returns. Leaving its `with` ends all conversations and frees the rows."""

    def __init__(
        self,
        engine: Engine,
        call: AbstractContextManager[int],
        prompt_tokens: int,
        max_tokens: int,
        waiting: int,
        conversations: int,
        hold: int,
        hold_seconds: float | None,
        park: int,
        tokenizer=None,
        patience: float | None = 0.0,
    ):
        self.engine, self.prompt_tokens, self.max_tokens, self.tokenizer = engine, prompt_tokens, max_tokens, tokenizer
        self.most_waiting, self.most_conversations = waiting, conversations
        self._limits = Limits(engine, prompt_tokens, max_tokens, tokenizer)
        self._call, self._number = call, call.__enter__()
        self._inbox: list[Callable[[], None]] = []  # requests of other threads since the last round
        self._lock = threading.Lock()  # guards the inbox and the counts of conversations; held briefly
        self._open: dict[int, Conversation] = {}  # conversations that have not ended, by number
        self._news: dict[int, Conversation] = {}  # conversations that `step` will return, by number
        self._waiting = self._submitted = 0
        self.closed = self._left = False  # one that was cut off is closed, and has yet to let go of its conversations
        try:
            with engine._switched():  # what is captured knows the model as it is then
                self._loop = LiveLoop(engine, max_tokens, hold, hold_seconds, park, patience)
        except BaseException as error:
            self._leave(error)
            raise

    # ------------------------------------------------------------------------------------------- from any thread

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling | None = None,
        seed: int = 0,
        *,
        sample: int = 0,
        prompt_index: int = 0,
        stop_strings: Sequence[str] = (),
    ) -> Conversation:
        """Begin a conversation. Its first turn is the `sample`-th completion of `generate([prompt], ..., seed=seed)`.
        Raises `QueueFull` if too many conversations are waiting.
        """
        self._check_open()
        prompt = token_list(prompt)
        self._limits.check_tokens(prompt, "the prompt")
        self._limits.check_length(len(prompt), "the prompt", "shorten it")
        sampling = Sampling() if sampling is None else sampling
        return self._begin(prompt, sampling, seed, sample, prompt_index, stop_strings)

    def extend(
        self,
        conversation: Conversation,
        tokens: Sequence[int] = (),
        sampling: Sampling | None = None,
        *,
        stop_strings: Sequence[str] = (),
    ) -> None:
        """Continue a conversation that stopped: feed it `tokens` after its last turn, then sample. Without tokens it
        continues as if it had not stopped.

        It goes on under its trace, wherever its row is: held or parked, to the bit; read again under the trace, up to
        rounding. Its `way` says which.
        """
        self._check_own(conversation)
        check_extendable(conversation)
        given, sampling = token_list(tokens, "what is given"), conversation.sampling if sampling is None else sampling
        if given:
            self._limits.check_tokens(given, "what is given")
        self._limits.check_room(len(conversation.tokens), len(given))
        stop_ids, text = self._limits.check_settings(sampling, stop_strings)
        if sampling.support != conversation.sampling.support:
            raise SparseRLError(
                f"support is {sampling.support!r}, but this conversation began with {conversation.sampling.support!r}; "
                "use that one for all of its turns."
            )
        with self._lock:
            self._check_open()
            check_extendable(conversation)
            conversation.status = "waiting"

            def go_on() -> None:
                if conversation.number in self._loop.alive:
                    conversation.sampling, conversation.stop_ids = sampling, stop_ids
                    conversation.stop_strings, conversation.text = tuple(stop_strings), text
                    self._loop.extend(conversation, given)

            self._inbox.append(go_on)

    def renew(
        self,
        conversation: Conversation,
        tokens: Sequence[int] = (),
        sampling: Sampling | None = None,
        *,
        keep: int | None = None,
        seed: int | None = None,
        stop_strings: Sequence[str] = (),
    ) -> Conversation:
        """Begin a conversation anew: read its tokens, and `tokens` after them, as one prompt under a new trace.

        That is one pass, where reading it under its trace takes one between every two evictions, and the tokens that
        were evicted are seen again. So it samples something else than `extend` does: what `submit` gives for the same
        prompt, to the bit on a CPU. The conversation that is returned says so (`renewed`, also of its trajectory), and
        has the place of the old one, however many wait. The old one ends, and its trajectory is lost unless it was
        read before. One that has ended, even with its engine, is taken like a new one.

        keep: how many of its tokens stay, from the first (None: all), where its past was edited; seed: None: its own
        """
        self._check_own(conversation)
        check_renewable(conversation)
        given, old = token_list(tokens, "what is given"), list(conversation.tokens)
        known = len(old)
        require_int(at_least=0, at_most=known, keep=(keep := known if keep is None else keep))
        prompt = old[:keep] + given
        self._limits.check_tokens(prompt, "what is to be read")
        remedies = ["extend it", "keep fewer"] if conversation.status == "stopped" else ["keep fewer"]
        self._limits.check_length(len(prompt), f"conversation {conversation.number} as a prompt", *remedies)
        sampling = conversation.sampling if sampling is None else sampling
        seed = conversation.seed if seed is None else seed
        which = conversation.sample_index, conversation.prompt_index
        return self._begin(prompt, sampling, seed, *which, stop_strings, conversation, known)

    def cancel(self, conversation: Conversation) -> None:
        """End a conversation in any state and free its row. Its trajectory is lost, but its tokens can
        still be read.
        """
        self._check_own(conversation)
        with self._lock:
            self._check_open()
            self._inbox.append(lambda: self._end(conversation, "cancelled"))

    # --------------------------------------------------------------------------------------- from one thread alone

    @property
    def idle(self) -> bool:
        """Whether a round would do nothing and return nothing."""
        return not self._inbox and not self._news and self._loop.idle

    def step(self, sample: bool = True, meanwhile: Callable[[], None] | None = None) -> list[Conversation]:
        """One round: some tokens for every running conversation. -> those with news: new tokens, or a stop

        sample: False: only take in requests, so that cancelled conversations end and others wait.
        meanwhile: work for the host that should not keep a GPU waiting, such as handing on the last round's news. It
        is called when the GPU has been given the round's work, perhaps more than once; on a CPU, before the round.
        An interrupt is held back until the round has ended, so nothing is lost and one may continue to step: the next
        round also returns the news of the interrupted one.
        """
        self._check_open()
        with uninterrupted():
            try:
                self._take_orders()
                self._loop.news, self._loop.meanwhile = {}, meanwhile or (lambda: None)
                if sample and (not self._loop.idle or (self._loop.held and self._loop.hold_seconds is not None)):
                    with self.engine._switched():
                        self._loop.round()
            except KeyboardInterrupt:  # another thread requested it before the round began
                raise
            except BaseException as error:
                self._leave(error)
                raise
            self._news |= self._loop.news
            with self._lock:
                self._waiting = len(self._loop.queue) + len(self._inbox)
        news, self._news = self._news, {}
        return [conversation for conversation in news.values() if conversation.status != "ended"]

    def run(self) -> None:
        """Do rounds until every conversation has stopped."""
        while not self.idle or self._loop.queue:
            if self.idle:  # every row is held for a conversation that may continue
                time.sleep(min(self.until_yield, 0.01))
            self.step()

    def trajectory(self, conversation: Conversation) -> Trajectory:
        """The trajectory of a conversation that stopped: all its turns under one trace."""
        self._check_own(conversation)
        if conversation.status == "ended":
            raise SparseRLError(
                f"conversation {conversation.number} has ended, so its trajectory is gone; read a trajectory before "
                "its conversation ends."
            )
        if conversation.status != "stopped":
            raise SparseRLError(
                f"conversation {conversation.number} is {conversation.status}; wait until it has stopped to read its "
                "trajectory."
            )
        return conversation.trajectory(self._loop.trace_of(conversation))

    def release(self, conversation: Conversation) -> Trajectory:
        """End a conversation that stopped, free its row, and return its trajectory."""
        trajectory = self.trajectory(conversation)
        reason = conversation.finish_reason
        assert reason is not None
        self._end(conversation, reason)
        return trajectory

    @property
    def until_yield(self) -> float:
        """Seconds until a held row is given to a conversation that waits; infinite if none will be."""
        return self._loop.until_yield()

    @property
    def rows_in_use(self) -> int:
        return self.engine.rows - len(self._loop.free_rows())

    @property
    def num_open(self) -> int:
        """Conversations that have not ended."""
        return len(self._open)

    def close(self) -> None:
        """End all conversations."""
        if not self._left:
            self._leave(None)

    def __enter__(self) -> LiveEngine:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------------ inside

    def _take_orders(self) -> None:
        with self._lock:
            orders, self._inbox = self._inbox, []
        for order in orders:
            order()

    def _begin(
        self,
        prompt: list[int],
        sampling: Sampling,
        seed: int,
        sample: int,
        prompt_index: int,
        stop_strings: Sequence[str],
        old: Conversation | None = None,
        known: int = 0,
    ) -> Conversation:
        """Begin a conversation. old: the one that it renews, which ends if it has not; known: the tokens it had"""
        self._limits.check_room(len(prompt), 0)
        self.engine.compressor.check_prompt(len(prompt))
        stop_ids, text = self._limits.check_settings(sampling, stop_strings)
        require_int(at_least=0, sample=sample, prompt_index=prompt_index)
        check_seed(seed)
        with self._lock:
            self._check_open()
            if old is not None:
                check_renewable(old)
                if len(old.tokens) != known:
                    raise SparseRLError(f"conversation {old.number} went on while it was renewed; renew it again.")
            if old is None or old.status == "ended":
                self._check_queue()
            else:
                old.status, old.finish_reason = "ended", "renewed"
                self._open.pop(old.number, None)  # a loop that released it at the same moment may have
                self._inbox.append(lambda: self._forget(old))
            conversation = Conversation(
                self._submitted, prompt, seed, stream_key(seed, prompt, 0, sample), stream_key(seed, prompt), sampling,
                stop_ids, prompt_index, sample, stop_strings=tuple(stop_strings), text=text,
                renewed=0 if old is None else old.renewed + 1,
            )  # fmt: skip
            self._submitted += 1
            self._waiting += 1
            self._open[conversation.number] = conversation
            self._inbox.append(lambda: self._enter(conversation))
        return conversation

    def _enter(self, conversation: Conversation) -> None:
        if conversation.status != "ended":
            self._loop.alive[conversation.number] = conversation
            self._loop.queue.append(conversation)

    def _end(self, conversation: Conversation, reason: str) -> None:
        if conversation.status != "ended":
            conversation.status, conversation.finish_reason = "ended", reason
            self._forget(conversation)

    def _forget(self, conversation: Conversation) -> None:
        """Free the row of a conversation that ended."""
        if conversation.number in self._loop.alive:
            self._loop.drop(conversation)
        with self._lock:
            self._open.pop(conversation.number, None)  # one that was renewed is no longer there

    def _leave(self, error: BaseException | None) -> None:
        """Close. After an error, the content of rows is discarded."""
        self.closed = self._left = True
        with self._lock:
            left, self._open, self._inbox = list(self._open.values()), {}, []
        for conversation in left:
            conversation.status, conversation.finish_reason = "ended", "closed"
        loop = getattr(self, "_loop", None)  # None: it could not be made
        renewed = loop.alive.values() if loop is not None else ()  # since the last round; they are no longer open
        for conversation in (*left, *renewed):
            conversation.parked = conversation.trace = conversation.row = conversation.sequence = None
        kind = None if error is None else type(error)
        self._call.__exit__(kind, error, None if error is None else error.__traceback__)

    def _check_open(self) -> None:
        if self.closed:
            raise SparseRLError("this engine was closed; open it again with Engine.open.")
        if self.engine.calls != self._number:
            self.closed = True
            raise SparseRLError(
                "this open engine was cut off, because its engine was used for another call; close it before such a "
                "call, or use a second engine."
            )

    def _check_own(self, conversation: Conversation) -> None:
        """Refuse a conversation of another engine; its number could be that of one of ours."""
        self._check_open()
        if not isinstance(conversation, Conversation):
            raise SparseRLError(f"{conversation!r:.60} is not a conversation; give what `submit` returned.")
        if conversation.status != "ended" and self._open.get(conversation.number) is not conversation:
            raise SparseRLError(
                f"conversation {conversation.number} was begun with another open engine; use that engine."
            )

    def _check_queue(self) -> None:
        if self._waiting >= self.most_waiting or len(self._open) >= self.most_conversations:
            raise QueueFull(
                f"{self._waiting} conversations wait (at most {self.most_waiting} may) and {len(self._open)} are "
                f"open (at most {self.most_conversations}); release or await some, then submit again."
            )
