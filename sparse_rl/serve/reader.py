"""Answer a request: submit it, and turn its events into whole answers or a stream."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ..rollout import Sampling
from .answer import Answer, Teller, usage
from .desk import Event, Ticket
from .prompts import chat_prompt, continuation, past, reading
from .protocol import Asked, ChatRequest, Refusal
from .scoring import score
from .service import Service

Result = TypeVar("Result")


class Reader:
    """Reads the answers to one request."""

    def __init__(
        self,
        service: Service,
        asked: Asked,
        name: str,
        prompts: list[list[int]],
        owner: str | None,
        keep: bool = False,
        returned: tuple[Ticket, Sampling] | None = None,
    ):
        """keep: the answer may be followed by a further turn; returned: a conversation that was kept, with its next
        answer
        """
        self.service, self.asked, self.name, self.owner = service, asked, name, owner or ""
        seed = seed_of(asked)
        self.sampling: list[Sampling] = []
        self.tickets: list[Ticket] = []
        self.answers: list[Answer] = []
        self.keeps, self.kept = keep or returned is not None, False
        service.check_answers(name, len(prompts) * asked.n)
        if returned is not None:
            ticket, sampling = returned
            self.tickets, self.sampling, self.answers = [ticket], [sampling], [Answer(0, prompts[0])]
            prompts = []
        try:
            for prompt in prompts:
                sampling = service.sampling(asked, len(prompt))
                for sample in range(asked.n):
                    ticket = service.desk.submit(name, prompt, sampling, seed, sample, asked.stops, asked.map, keep)
                    self.tickets.append(ticket)
                    self.sampling.append(sampling)
                    self.answers.append(Answer(len(self.answers), prompt))
        except BaseException:
            self.close()
            raise
        self.tellers = [Teller(service.tokenizer, asked.stops) for _ in self.tickets]

    @property
    def how(self) -> str:
        """What happened to its conversation; known with the first token."""
        return self.tickets[0].conversation.way

    def close(self) -> None:
        """Nobody reads any more. Answers that run are cancelled; a conversation that was to go on, but was not kept, is
        given up.
        """
        for ticket in self.tickets:
            self.service.desk.cancel(ticket)
            if self.keeps and not self.kept:
                self.service.desk.forget(ticket)

    async def events(self) -> AsyncIterator[tuple[Answer, Event, str]]:
        """News of all answers as they come, with the text that is new."""
        together: asyncio.Queue[tuple[int, Event | BaseException]] = asyncio.Queue()

        async def follow(i: int, ticket: Ticket) -> None:
            try:
                async for event in self.service.desk.events(ticket):
                    together.put_nowait((i, event))
            except Refusal as error:
                together.put_nowait((i, error))

        tasks = [asyncio.create_task(follow(i, ticket)) for i, ticket in enumerate(self.tickets)]
        left = len(tasks)
        try:
            while left:
                i, event = await together.get()
                if isinstance(event, BaseException):
                    raise event
                piece = self.answers[i].add(event, self.tellers[i])
                left -= event.finish_reason is not None
                yield self.answers[i], event, piece
        finally:
            for task in tasks:
                task.cancel()

    async def whole(self, request: Request) -> list[Answer]:
        """All answers, complete; a client that hangs up cancels them."""

        async def read() -> None:
            async for _ in self.events():
                pass

        await unless_gone(request, read())
        return self.answers

    async def scored(self, answer: Answer, top: int, first: int | None = None):
        """See scoring.py."""
        assert answer.trajectory is not None
        trajectory, sampling = answer.trajectory, self.sampling[answer.index]
        model, start = self.service.model, len(answer.prompt) if first is None else first
        return await self.service.desk.work(lambda: score(model, trajectory, sampling, top, start))

    def keep(self, message: dict[str, Any]) -> None:
        """Keep the conversation, now that the client knows the answer. Where a stop string ended it, the row holds more
        than the client was told: it cannot go on.
        """
        asked, (answer, *_) = self.asked, self.answers
        if not isinstance(asked, ChatRequest) or asked.conversation is None:
            return
        if answer.matched is not None:
            self.service.desk.forget(self.tickets[0])
            return
        self.kept = True
        said = past(asked, [*asked.messages, message])
        self.service.conversations.put((self.owner, asked.conversation, self.name), self.tickets[0], said)

    def own(self, answer: Answer, ids: bool) -> dict[str, Any]:
        """Fields of an ended choice that OpenAI lacks."""
        by_id = answer.finish_reason == "stop" and answer.tokens[-1] in self.asked.stop_token_ids
        found: dict[str, Any] = {"stop_reason": answer.tokens[-1] if by_id else answer.matched}  # as vLLM says it
        if ids:
            found["token_ids"] = answer.tokens
        if self.asked.trace and answer.trajectory is not None:
            found["trace_id"] = self.service.traces.put(answer.trajectory, self.owner)
        return found

    def news(self, answer: Answer, event: Event, ids: bool) -> dict[str, Any]:
        """The same for a chunk."""
        found: dict[str, Any] = {"token_ids": event.tokens} if ids else {}
        if event.seen is not None:
            found["seen"] = event.seen.json
        return found | (self.own(answer, False) if event.finish_reason is not None else {})

    def version(self, answers: list[Answer]) -> dict[str, Any]:
        """How many optimizer steps were behind the oldest weights that sampled."""
        return {"weight_version": min(answer.version for answer in answers)}


def seed_of(asked: Asked) -> int:
    return secrets.randbits(31) if asked.seed is None else asked.seed


async def go_on(service: Service, asked: ChatRequest, name: str, owner: str | None) -> Reader | None:
    """The reader of a conversation that returns: extended under its trace, or begun anew where its past is another one
    or the client asks for that. None: the server keeps none of that name.
    """
    tokenizer, desk = service.tokenizer, service.desk
    if asked.conversation is None or getattr(tokenizer, "chat_template", None) is None:
        return None
    kept = service.conversations.take((owner or "", asked.conversation, name))
    if kept is None:
        return None
    tokens = kept.ticket.conversation.tokens
    try:
        if kept.precedes(past(asked, asked.messages)) and not asked.renew:
            given = await reading(lambda: continuation(tokenizer, service.end, asked, len(kept.messages) - 1))
            if tokens[-1] != service.end:  # the answer was cut off: its turn ends here
                given = [service.end, *given]
            before = [*tokens, *given]
            sampling = service.sampling(asked, len(before), goes_on=True)
            again = desk.extend(kept.ticket, given, sampling, asked.stops, asked.map)
        else:
            before = await reading(lambda: chat_prompt(tokenizer, service.template, asked))
            sampling = service.sampling(asked, len(before))
            again = desk.renew(kept.ticket, before, sampling, seed_of(asked), asked.stops, asked.map)
    except BaseException:  # also a client that hangs up meanwhile
        desk.forget(kept.ticket)
        raise
    return Reader(service, asked, name, [before], owner, returned=(again, sampling))


class Streaming(StreamingResponse):
    """A stream that closes its reader however it ends, even if the client had gone before it began."""

    def __init__(self, reader: Reader, lines: AsyncIterator[str]):
        super().__init__(lines, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.reader = reader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.reader.close()


def streaming(reader: Reader, chunks: AsyncIterator[dict[str, Any]]) -> Streaming:
    """Server-sent events. An error after the first event is one, too."""

    async def lines() -> AsyncIterator[str]:
        chunk: dict[str, Any] = {}
        try:
            async for chunk in chunks:
                yield f"data: {json.dumps(chunk)}\n\n"
            options = reader.asked.stream_options
            if options is not None and options.include_usage:
                total = sum(len(p) for p in {id(a.prompt): a.prompt for a in reader.answers}.values())
                last = {**chunk, "choices": [], "usage": usage(reader.answers, total)}
                yield f"data: {json.dumps(last)}\n\n"
        except Refusal as error:
            yield f"data: {json.dumps(error.body)}\n\n"
        yield "data: [DONE]\n\n"

    return Streaming(reader, lines())


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Do the work, unless the client hangs up first."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_gone(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            raise Refusal(499, "the client has hung up.")
        return await task
    finally:
        watch.cancel()


async def _gone(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
