"""The process in which environments of verifiers live: they run as they are, and ask for the model's turns over HTTP.

    parent (environment.py)              this process
    make: taskset, options      ->       loads the environment; prompts, tools                             once
    say: key, prompt, message   ->       gives the environment the model's turn; its reply, or the end     every turn
    stop: key                   ->       no further turn: the environment grades what there is
    drop: key                   ->       the episode is cancelled

Each conversation is one episode (`Env.run_episode`) whose model is an address of this process. A request waits there
until the sampler has the turn. Episodes begin with their model's first turn.

A request must hold what the model has read and said so far, and more at its end. An environment that shortens or
rewrites its history would let the model read other tokens than it did, so this is a fault.

`chat` is our harness: a loop in this process. Those of verifiers install a program with uv for each episode.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import httpx
import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
from aiohttp import web  # pyright: ignore[reportMissingImports]
from verifiers.v1.dialects.chat import message_to_wire  # pyright: ignore[reportMissingImports]
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp  # pyright: ignore[reportMissingImports]

from ..files import OWN_HARNESS
from .environment import BEAT

HARNESS = "sparse_rl_chat"  # under which this module is known to verifiers' loader of plugins
MOST_BYTES = 64 << 20  # of a request
LONGEST_LINE = 256 << 20
__all__ = ["Chat"]


class Chat(vf.Harness[vf.HarnessConfig]):
    """Ask the model, call its tools, and so on until it calls none."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> Any:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        given = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
        messages += [message_to_wire(message) for message in given]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(httpx.AsyncClient(timeout=None))
            tools, places, opened = await connect_mcp({"mcpServers": servers}, stack)
            while True:
                body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                headers = {"Authorization": f"Bearer {secret}"}
                answer = await http.post(f"{endpoint}/chat/completions", json=body, headers=headers)
                if answer.status_code != 200:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=answer.text[-2000:])
                message = answer.json()["choices"][0]["message"]
                messages.append({key: value for key, value in message.items() if value is not None})
                calls = message.get("tool_calls") or []
                if not calls:
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in calls:
                    content = await self._call(call["function"], places, opened)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})

    async def _call(self, function: Mapping[str, str], places: Mapping, opened: Mapping) -> Any:
        name = function["name"]
        if name not in places:
            return f"error: there is no tool {name[:40]}; there is {', '.join(places) or 'none'}"
        try:
            arguments = json.loads(function["arguments"] or "{}")
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            return f"error: the arguments of {name} cannot be read"
        try:
            return await call_mcp(dict(opened), dict(places), name, arguments)
        except Exception as error:  # whatever a tool raises is told to the model
            return f"error: {str(error)[:200] or type(error).__name__}"


class Stopped(Exception):
    """The conversation may have no further turn."""


class Episode:
    """One conversation: its environment runs in a task, and the sampler's turns meet its requests here."""

    def __init__(self, host: Host, key: str, task: Any, prompt: list[dict]):
        self.known, self.trace = prompt, None  # the messages that the model has read, as last requested
        self.asked: asyncio.Queue[tuple[list[dict], asyncio.Future]] = asyncio.Queue()
        self.turn: asyncio.Future | None = None  # of the request that waits for the model
        context = vf.ModelContext(
            model="policy",
            client=vf.EvalClientConfig(
                base_url=f"{host.address}/{key}/v1",
                api_key_var="SPARSE_RL_NO_KEY",
                timeout={"connect": 60.0, "read": None, "write": None, "pool": None},
            ),
        )
        self.running = asyncio.create_task(host.env.run_episode(task, context, on_trace=self._begun))

    def _begun(self, trace: Any) -> None:
        self.trace = trace

    async def request(self, messages: list[dict]) -> dict:
        """What the endpoint does with a request: wait for the turn."""
        future = asyncio.get_running_loop().create_future()
        self.asked.put_nowait((messages, future))
        return await future

    async def next(self) -> list[dict] | None:
        """The messages of the next request; None once the episode has ended."""
        asked = asyncio.create_task(self.asked.get())
        await asyncio.wait([asked, self.running], return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            asked.cancel()
            return None
        messages, self.turn = asked.result()
        return messages

    async def say(self, message: dict, reason: str) -> dict:
        """Give the environment a turn; its reply, or the end."""
        if self.turn is None:
            first = await self.next()
            if first is None:
                return self.end()
            if plain(first) != plain(self.known):
                return fault(f"its harness asks with other messages than the task's prompt: {first!r:.200}")
        assert self.turn is not None
        self.turn.set_result(completion(message, reason, len(self.known)))
        self.turn = None
        messages = await self.next()
        if messages is None:
            return self.end()
        before = [*plain(self.known), *plain([message])]
        if plain(messages)[: len(before)] != before or len(messages) == len(before):
            return fault("it rewrote what the model had read, and a model cannot forget tokens on demand")
        self.known, more = messages, messages[len(before) :]
        try:
            return {"messages": [reply_of(message) for message in more]}
        except ValueError as error:
            return fault(str(error))

    async def stop(self) -> dict:
        """End the conversation from the model's side, and let the environment grade it."""
        if self.trace is not None:
            self.trace.stop("max_output_tokens")  # verifiers' name of a limit: truncated, but graded
        if self.turn is not None:
            self.turn.set_exception(Stopped())
            self.turn = None
        while await self.next() is not None:
            assert self.turn is not None
            self.turn.set_exception(Stopped())
        return self.end()

    def end(self) -> dict:
        episode = self.running.result()
        if not episode.ok or not episode.traces:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            return fault(f"{errors[-1].type}: {errors[-1].message}" if errors else "it ended without a result")
        (trace,) = episode.traces[-1:]
        parts = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        return {"graded": {"reward": trace.reward, "parts": parts}}


class Host:
    def __init__(self, made: dict[str, Any], out: Any):
        self.out, self.episodes = out, {}
        chat = made["harness"] == OWN_HARNESS
        agent = {"harness": {"id": HARNESS if chat else made["harness"]}, "runtime": {"type": made["runtime"]}}
        config = {"taskset": {**made["options"], "id": made["taskset"]}}
        kind = vf.env_config_type(made["taskset"])
        roles = [name for name, field in kind.model_fields.items() if isinstance(field.default, vf.AgentConfig)]
        if len(roles) != 1:
            raise ValueError(f"it has the agents {', '.join(roles)}, and one alone can be trained here")
        self.env = vf.load_environment(vf.resolve_env_config({**config, roles[0]: agent}))
        tasks = iter(self.env.taskset)
        if not self.env.taskset.bounded and made["size"] is None:
            raise ValueError("it never ends; give the option size, how many of its prompts are used")
        self.tasks = list(tasks if made["size"] is None else itertools.islice(tasks, made["size"]))
        self.prompts = [first_messages(task.data) for task in self.tasks]

    def send(self, message: dict[str, Any]) -> None:
        """With the time, because it may be read much later."""
        self.out.write(json.dumps({**message, "at": round(time.monotonic(), 1)}).encode() + b"\n")

    async def serve(self, lines: asyncio.StreamReader) -> None:
        app = web.Application(client_max_size=MOST_BYTES)
        secret = secrets.token_urlsafe(16)  # others on this machine, and pages in a browser, do not know it
        app.router.add_post(f"/{secret}/{{key}}/v1/chat/completions", self.complete)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.address = f"http://127.0.0.1:{runner.addresses[0][1]}/{secret}"
        async with self.env.serving():
            self.send({"ready": {"prompts": self.prompts, "tools": await self.tools()}})
            beating, working = asyncio.create_task(self.beat()), set()
            while line := await lines.readline():
                work = asyncio.create_task(self.work(json.loads(line)))
                working.add(work)
                work.add_done_callback(working.discard)
            beating.cancel()
            for episode in self.episodes.values():
                episode.running.cancel()
            await asyncio.gather(*(e.running for e in self.episodes.values()), return_exceptions=True)
        await runner.cleanup()

    async def tools(self) -> list[dict]:
        """The tools that the harness offers: found by beginning an episode, which is dropped."""
        if not self.tasks:
            return []
        self.seen: list[dict] = []
        episode = self.episodes["tools"] = Episode(self, "tools", self.tasks[0], self.prompts[0])
        if await episode.next() is None:
            raise ValueError(f"its first episode failed before the model was asked ({episode.end()['fault']})")
        self.episodes.pop("tools").running.cancel()
        await asyncio.gather(episode.running, return_exceptions=True)
        return self.seen

    async def beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT)
            self.send({})

    async def work(self, message: dict[str, Any]) -> None:
        key = message["key"]
        if "drop" in message:
            if (episode := self.episodes.pop(key, None)) is not None:
                episode.running.cancel()
            return
        try:
            if "say" in message:
                if key not in self.episodes:
                    index = message["prompt"]
                    self.episodes[key] = Episode(self, key, self.tasks[index], self.prompts[index])
                found = await self.episodes[key].say(message["say"], message["reason"])
            else:
                found = await self.episodes[key].stop()
        except (Exception, asyncio.CancelledError) as error:
            found = fault(f"{type(error).__name__}: {error}")
        if "messages" not in found and (episode := self.episodes.pop(key, None)) is not None:
            episode.running.cancel()
        self.send({"key": key, **found})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """The model's address, as OpenAI's protocol has it."""
        body = await request.json()
        key = request.match_info["key"]
        if key == "tools":
            self.seen = body.get("tools") or []
        episode = self.episodes.get(key)
        try:
            if episode is None:
                raise Stopped
            answer = await episode.request(body["messages"])
        except Stopped:
            error = {"message": "the conversation has ended", "type": "invalid_request_error"}
            return web.json_response({"error": error}, status=400)
        if not body.get("stream"):
            return web.json_response(answer)
        choice = answer["choices"][0]
        calls = [{"index": i, **call} for i, call in enumerate(choice["message"].get("tool_calls") or [])]
        delta = {**choice["message"], **({"tool_calls": calls} if calls else {})}
        common = {**answer, "object": "chat.completion.chunk"}
        ends = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        for choices in ([{"index": 0, "delta": delta, "finish_reason": None}], [ends]):
            await stream.write(b"data: " + json.dumps({**common, "choices": choices}).encode() + b"\n\n")
        await stream.write(b"data: [DONE]\n\n")
        return stream


def fault(problem: str) -> dict:
    return {"fault": problem}


def first_messages(data: Any) -> list[dict]:
    """The messages with which a task's conversation begins."""
    given = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt or []
    if not given:
        raise ValueError(f"its task {data.idx} has no prompt; a user who speaks first is not supported")
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    return [*system, *({**message_to_wire(m), "content": text_of(message_to_wire(m))} for m in given)]


def text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    if any(part.get("type") != "text" for part in content):
        raise ValueError("a message has more than text, which a language model cannot read")
    return "\n".join(part["text"] for part in content)


def plain(messages: list[dict]) -> list[tuple]:
    """Messages as they are compared: role, text, and the calls of tools."""
    return [
        (
            m["role"],
            text_of(m),
            [(c["function"]["name"], c["function"]["arguments"]) for c in m.get("tool_calls") or []],
        )
        for m in messages
    ]


def reply_of(message: dict) -> dict:
    more = {key: message[key] for key in ("name", "tool_call_id") if message.get(key)}
    return {"role": message["role"], "content": text_of(message), **more}


def completion(message: dict, reason: str, turn: int) -> dict:
    """A turn in OpenAI's form."""
    calls = message.get("tool_calls")
    return {
        "id": f"turn-{turn}",
        "object": "chat.completion",
        "created": 0,
        "model": "policy",
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls" if calls else reason}],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }


async def _run(made: dict[str, Any], inbox: Any, out: Any) -> None:
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=LONGEST_LINE)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), inbox)
    await Host(made, out).serve(lines)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    inbox, out = os.fdopen(os.dup(0), "rb", buffering=0), os.fdopen(os.dup(1), "wb", buffering=0)
    with open(os.devnull) as nowhere:
        os.dup2(nowhere.fileno(), 0)
    os.dup2(2, 1)  # what environments print is not part of the exchange
    sys.modules[HARNESS] = sys.modules[__name__]
    made = b""
    while not made.endswith(b"\n"):
        made += inbox.read(1)
    try:
        asyncio.run(_run(json.loads(made), inbox, out))
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())  # on one line
        out.write(json.dumps({"refused": why[:1000]}).encode() + b"\n")
    os._exit(0)  # threads of environments do not keep it


if __name__ == "__main__":
    main()
