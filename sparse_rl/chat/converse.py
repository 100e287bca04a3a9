"""Hold conversations on an open engine: sample turns, let the task reply, and continue with the reply.

    for every conversation, in whatever order replies come:
        turn      sample until it stops
        reply     ask the task (tasks/replies.py) while other rows run
        extend    feed the reply's tokens and sample the next turn

What a conversation samples does not depend on when its replies come: rows that others need meanwhile are moved out and
back with the same bits, and results are in the order of the prompts.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ..errors import SparseRLError
from ..records import Trajectory
from ..rollout import Engine, Sampling
from ..rollout.conversation import Conversation
from ..streams import stream_key
from ..tasks import Grade, Message, Prompt, Task
from ..tasks.conversing import CUT, Reply
from ..tasks.judging import problem_of
from ..tasks.replies import Replies
from .render import Chat, Chats, first_messages

_PATIENCE = 0.5  # seconds that a loop without running rows waits for a reply before it looks up


@dataclass(frozen=True)
class Turns:
    """The limits of a conversation, besides `Sampling.max_new_tokens`, which counts over all turns."""

    most: int = 8
    given: int = 512  # tokens of a reply

    @property
    def room(self) -> int:
        """Tokens that may be given in all."""
        return (self.most - 1) * self.given


@dataclass
class Talk:
    """A conversation's messages, faults and limits: all but its tokens."""

    messages: list[Message] = field(default_factory=list)  # the prompt's, the model's, the task's
    turns: int = 0
    fault: str | None = None  # why the task's reply is missing: `timeout` or `error`
    problem: str | None = None  # what went wrong, in a sentence
    tool_errors: int = 0  # calls that could not be made
    cut: int = 0  # messages that were cut
    at_limit: bool = False  # it would have gone on, but for turns or tokens
    graded: str | None = None  # what is graded, if an environment says so


def converse(
    engine: Engine,
    chats: Chats,
    task: Task,
    prompts: Sequence[Prompt],
    ids: Sequence[Sequence[int]],
    members: Sequence[Sequence[int]],
    sampling: Sampling,
    seed: int,
    turns: Turns,
    on_end: Callable[[Trajectory, Talk], None] | None = None,
) -> list[tuple[Trajectory, Talk]]:
    """Conversations about every prompt (ids: its tokens), one for each of its members, prompt by prompt.

    A first turn is the completion that `Engine.generate` gives for the same seed, if no two prompts are equal. `on_end`
    gets every conversation when it ends; nothing is returned then.
    """
    seeds, seen = [], Counter()
    for tokens in map(tuple, ids):  # of equal prompts the second one has random numbers of its own
        seeds.append(stream_key(seed, [seen[tokens]]) if seen[tokens] else seed)
        seen[tokens] += 1
    waiting = deque((i, member) for i, wanted in enumerate(members) for member in wanted)
    if not waiting:
        return []
    longest = max(map(len, ids))  # of all: where some were held before, the others have the rows that they had then
    together = 2 * engine.rows  # conversations that are open at a time: rows run while others wait for replies
    opened = engine.open(
        longest,
        longest + sampling.max_new_tokens + turns.room + 1,
        sampling,
        waiting=together,
        conversations=together,
        park=together,  # so that none has to be read again, which is exact only up to rounding
        patience=None,
    )
    with opened as live, Replies(task) as replies:
        hall = _Hall(live, replies, task, chats, prompts, sampling, turns, on_end)
        while waiting or hall.open:
            while waiting and len(hall.open) < together:
                i, member = waiting.popleft()
                conversation = live.submit(ids[i], sampling, seeds[i], sample=member, prompt_index=i)
                hall.enter(conversation, prompts[i])
            for conversation in live.step():
                if conversation.status == "stopped":
                    hall.hear(conversation)
            idle, began = live.idle, time.perf_counter()
            found = replies.ready(min(_PATIENCE, live.until_yield) if idle else 0.0)
            task.waited += time.perf_counter() - began if idle else 0.0
            for key, reply in found:
                hall.answer(key, reply)
    if on_end is not None:
        return []
    return [hall.done[i, member] for i, wanted in enumerate(members) for member in wanted]


class _Hall:
    """Keeps the conversations that are open and those that are done."""

    def __init__(
        self, live, replies: Replies, task: Task, chats: Chats, prompts, sampling: Sampling, turns: Turns, on_end
    ):
        self.live, self.replies, self.task, self.chats, self.on_end = live, replies, task, chats, on_end
        self.prompts, self.sampling, self.turns = prompts, sampling, turns
        self.open: dict[int, tuple[Conversation, Talk]] = {}  # by the number of the conversation
        self.spoken: dict[int, int] = {}  # tokens before the turn that is sampled
        self.done: dict[tuple[int, int], tuple[Trajectory, Talk]] = {}

    def enter(self, conversation: Conversation, prompt: Prompt) -> None:
        self.open[conversation.number] = conversation, Talk(first_messages(prompt))
        self.spoken[conversation.number] = len(conversation.tokens)

    def hear(self, conversation: Conversation) -> None:
        """A turn has ended: ask for a reply, unless it was cut or the task never replies."""
        prompt, (_, talk) = self.prompts[conversation.prompt_index], self.open[conversation.number]
        tokens = conversation.tokens[self.spoken[conversation.number] :]
        talk.messages.append(self.chats.of(prompt).heard(tokens))
        talk.turns += 1
        if not self.task.of(prompt).converses:
            self.end(conversation)
        elif conversation.finish_reason != "length":
            self.replies.ask(conversation.number, prompt, talk.messages)
        elif not self.replies.conclude(conversation.number, prompt, talk.messages):
            self.end(conversation)

    def answer(self, key, reply: Reply) -> None:
        conversation, talk = self.open[key]
        prompt = self.prompts[conversation.prompt_index]
        talk.tool_errors += reply.tool_errors
        talk.cut += reply.cut
        talk.fault, talk.graded = reply.fault, reply.graded
        talk.problem = None if reply.problem is None else f"in the task's reply, {reply.problem}"
        if reply.messages is None:
            return self.end(conversation)
        left = self.sampling.max_new_tokens - conversation.num_sampled
        if talk.turns >= self.turns.most or left < 1:
            talk.at_limit = True
            return None if self.replies.conclude(key, prompt) else self.end(conversation)
        try:
            tokens, messages, cut = fitted(self.chats.of(prompt), talk.messages, reply.messages, self.turns.given)
        except SparseRLError as error:  # a template that cannot write this reply
            talk.fault, talk.problem = "error", f"{error} (prompt {prompt.index})"
            self.replies.drop(key, prompt)
            return self.end(conversation)
        talk.cut += cut
        talk.messages += messages
        self.live.extend(conversation, tokens, replace(self.sampling, max_new_tokens=left))
        self.spoken[key] = len(conversation.tokens) + len(tokens)

    def end(self, conversation: Conversation) -> None:
        _, talk = self.open.pop(conversation.number)
        trajectory = self.live.release(conversation)
        if talk.at_limit:
            trajectory = replace(trajectory, finish_reason="length")
        if self.on_end is not None:
            return self.on_end(trajectory, talk)
        self.done[conversation.prompt_index, conversation.sample_index] = trajectory, talk


def fitted(
    chat: Chat, messages: list[Message], reply: list[Message], most: int
) -> tuple[list[int], list[Message], int]:
    """The tokens of a reply, at most `most`; the messages they are made of; and how many of these were cut."""
    tokens, used, share = chat.given(messages, reply), reply, 1.0
    while len(tokens) > most:
        share *= 0.9 * most / len(tokens)
        if share < 1e-7:
            empty = len(chat.given(messages, [{**message, "content": ""} for message in reply]))
            raise SparseRLError(
                f"a reply of {len(reply)} messages takes {empty} tokens without their contents, but "
                f"rollout.max_given_tokens is {most}; raise it."
            )
        used = [{**m, "content": m["content"][: int(share * len(m["content"]))] + CUT} for m in reply]
        tokens = chat.given(messages, used)
    return tokens, used, 0 if used is reply else len(reply)


def graded_texts(task: Task, prompts: Sequence[Prompt], talks: Sequence[Talk]) -> list[str]:
    """What of every conversation is graded. A transcript that fails is a fault of its task."""
    texts = []
    for prompt, talk in zip(prompts, talks, strict=True):
        try:
            text = talk.graded if talk.graded is not None else task.of(prompt).transcript(talk.messages)
            if not isinstance(text, str):
                raise TypeError(f"transcript returned {text!r:.80}; it must return text")
        except Exception as error:
            talk.fault, talk.problem, text = "error", problem_of(error, prompt), ""
        texts.append(text)
    return texts


def with_faults(task: Task, grades: Sequence[Grade], talks: Sequence[Talk]) -> list[Grade]:
    """Grades, in which a conversation whose task failed has none; the first problem is kept for the caller to show."""
    if task.last_error is None:
        task.last_error = next((talk.problem for talk in talks if talk.problem is not None), None)
    pairs = zip(grades, talks, strict=True)
    return [grade if talk.fault is None else Grade(0.0, talk.fault) for grade, talk in pairs]


def talk_metrics(talks: Sequence[Talk], trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What conversations were like. Faults are the task's; tool errors are calls that the model got wrong."""
    count = len(talks)
    faults = Counter(talk.fault for talk in talks)
    return {
        "talk/turns/mean": sum(talk.turns for talk in talks) / count,
        "talk/turns/max": float(max(talk.turns for talk in talks)),
        "talk/given/mean": sum(t.num_given_tokens for t in trajectories) / count,
        "talk/tool_errors/mean": sum(talk.tool_errors for talk in talks) / count,
        "talk/cut/count": float(sum(talk.cut for talk in talks)),
        "talk/at_limit/frac": sum(talk.at_limit for talk in talks) / count,
        "talk/timeout/count": float(faults["timeout"]),
        "talk/error/count": float(faults["error"]),
    }
