"""The server's routes: OpenAI's, those that RL clients need, and the page.

/v1/chat/completions   /v1/completions   /v1/models   /inference/v1/generate   /tokenize   /detokenize
/v1/traces/ID          what was evicted when, for an answer that was requested with `trace: true`
/health  /liveness  /metrics  /
with the admin key: those of admin.py
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from .admin import add_admin
from .answer import Answer, chat_logprobs, completion_logprobs, head, id_logprobs, usage
from .guard import Guard
from .metrics import metrics
from .page import page
from .prompts import chat_prompt, reading, text_prompt
from .protocol import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    Refusal,
    parse_json,
    parsed,
)
from .reader import Reader, go_on, streaming
from .service import Service
from .tools import called


def make_app(service: Service) -> FastAPI:
    desk, tokenizer = service.desk, service.tokenizer

    app = FastAPI(title="sparse-rl serve", docs_url=None, redoc_url=None)
    app.add_middleware(Guard, settings=service.settings)  # pyright: ignore[reportArgumentType]

    @app.exception_handler(Refusal)
    async def refuse(_: Request, error: Refusal) -> JSONResponse:
        return JSONResponse(error.body, error.status, error.headers)

    @app.exception_handler(404)
    async def nothing_there(request: Request, _: Exception) -> JSONResponse:
        refusal = Refusal(404, f"there is no {request.url.path[:100]}.", code="not_found")
        return JSONResponse(refusal.body, 404)

    @app.exception_handler(405)
    async def other_method(request: Request, _: Exception) -> JSONResponse:
        return JSONResponse(Refusal(405, f"{request.method} is not for {request.url.path[:100]}.").body, 405)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        """An error of ours, which the log shows."""
        return JSONResponse(Refusal(500, f"the server failed ({type(error).__name__}).", "server_error").body, 500)

    # --------------------------------------------------------------------------------------------------- OpenAI's

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        asked = parsed(ChatRequest, parse_json(await request.body()))
        asked.check()
        name = service.name_of(asked.model)
        reader = await go_on(service, asked, name, request.state.owner)
        if reader is None:
            prompts = [await reading(lambda: chat_prompt(tokenizer, service.template, asked))]
            reader = Reader(service, asked, name, prompts, request.state.owner, keep=asked.conversation is not None)
        prompt = reader.answers[0].prompt
        identity = f"chatcmpl-{secrets.token_hex(12)}"
        if asked.stream:
            return streaming(reader, chat_chunks(reader, asked, identity))
        with contextlib.closing(reader):
            answers = await reader.whole(request)
            choices = [await chat_choice(reader, asked, answer) for answer in answers]
        more: dict[str, Any] = {"prompt_token_ids": prompt} if asked.return_token_ids else {}
        if asked.conversation is not None:
            more["conversation"] = reader.how
        return JSONResponse(
            head("chat.completion", name, identity)
            | {"choices": choices, "usage": usage(answers, len(prompt)), **more, **reader.version(answers)}
        )

    async def chat_choice(reader: Reader, asked: ChatRequest, answer: Answer) -> dict[str, Any]:
        content, calls = called(tokenizer, answer, asked.tools) if asked.tools else (answer.text, [])
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        logprobs = None
        if asked.logprobs:
            _, top = await reader.scored(answer, asked.top) if asked.top else (None, None)
            logprobs = chat_logprobs(tokenizer, answer.tokens, answer.logprobs, top)
        reason = "tool_calls" if calls and answer.finish_reason == "stop" else answer.finish_reason
        choice = {"index": answer.index, "message": message, "logprobs": logprobs, "finish_reason": reason}
        reader.keep(message)
        return choice | reader.own(answer, asked.return_token_ids)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        asked = parsed(CompletionRequest, parse_json(await request.body()))
        asked.check()
        name = service.name_of(asked.model)
        prompts = await reading(lambda: [text_prompt(tokenizer, prompt) for prompt in asked.prompts])
        reader = Reader(service, asked, name, prompts, request.state.owner)
        identity = f"cmpl-{secrets.token_hex(12)}"
        if asked.stream:
            return streaming(reader, completion_chunks(reader, asked, identity))
        with contextlib.closing(reader):
            answers = await reader.whole(request)
            choices = [await completion_choice(reader, asked, answer) for answer in answers]
        total = sum(map(len, prompts))
        body = head("text_completion", name, identity) | {"choices": choices, "usage": usage(answers, total)}
        return JSONResponse(body | reader.version(answers))

    async def completion_choice(reader: Reader, asked: CompletionRequest, answer: Answer) -> dict[str, Any]:
        text, logprobs = answer.text, None
        if asked.echo:
            text = tokenizer.decode(answer.prompt, skip_special_tokens=True) + text
        if asked.logprobs is not None:
            tokens, values, top = answer.tokens, list(answer.logprobs), None
            if asked.echo:
                found, top = await reader.scored(answer, asked.top, first=1)
                tokens, values = answer.prompt + answer.tokens, [None, *found]
                if top is not None:
                    top.ids.insert(0, [])
                    top.logprobs.insert(0, [])
            elif asked.top:
                _, top = await reader.scored(answer, asked.top)
            logprobs = completion_logprobs(tokenizer, tokens, values, top)
        choice = {"index": answer.index, "text": text, "logprobs": logprobs, "finish_reason": answer.finish_reason}
        if asked.return_token_ids:
            choice["prompt_token_ids"] = answer.prompt
        return choice | reader.own(answer, asked.return_token_ids)

    async def chat_chunks(reader: Reader, asked: ChatRequest, identity: str) -> AsyncIterator[dict[str, Any]]:
        first = head("chat.completion.chunk", reader.name, identity)
        for i in range(asked.n):
            yield first | {"choices": [{"index": i, "delta": {"role": "assistant", "content": ""}}]}
        async for answer, event, piece in reader.events():
            delta: dict[str, Any] = {} if asked.tools else {"content": piece}
            told: dict[str, Any] = {"content": answer.text}
            reason = event.finish_reason
            if asked.tools and reason is not None:  # a text may be a call: it is told when it is whole
                content, calls = called(tokenizer, answer, asked.tools)
                delta = {"content": content} if content else {}
                told = {"content": content, "tool_calls": calls}
                if calls:
                    delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
                    reason = "tool_calls" if reason == "stop" else reason
            logprobs = chat_logprobs(tokenizer, event.tokens, event.logprobs) if asked.logprobs else None
            choice = {"index": answer.index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
            if event.finish_reason is not None:
                reader.keep({"role": "assistant", **told})
                choice |= {} if asked.conversation is None else {"conversation": reader.how}
            yield first | {"choices": [choice | reader.news(answer, event, asked.return_token_ids)]}

    async def completion_chunks(
        reader: Reader, asked: CompletionRequest, identity: str
    ) -> AsyncIterator[dict[str, Any]]:
        first = head("text_completion", reader.name, identity)
        offsets: dict[int, int] = {}  # of the next token's text, by answer
        async for answer, event, piece in reader.events():
            logprobs = None
            if asked.logprobs is not None:
                at = offsets.get(answer.index, 0)
                logprobs = completion_logprobs(tokenizer, event.tokens, event.logprobs, None, at)
                offsets[answer.index] = at + sum(map(len, logprobs["tokens"]))
            choice = {"index": answer.index, "text": piece, "logprobs": logprobs, "finish_reason": event.finish_reason}
            yield first | {"choices": [choice | reader.news(answer, event, asked.return_token_ids)]}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.about(name) for name in desk.places]}

    @app.get("/v1/models/{name:path}")  # names of the hub have a slash
    async def one_model(name: str) -> dict[str, Any]:
        return service.about(service.name_of(name))

    # ----------------------------------------------------------------------------------------- what RL clients need

    @app.post("/inference/v1/generate")
    async def generate(request: Request) -> Response:
        body = parsed(GenerateRequest, parse_json(await request.body()))
        asked = body.asked()
        if body.stream or asked.stream:
            raise Refusal(400, "generate does not stream; leave out stream.", param="stream")
        asked.check()
        reader = Reader(service, asked, service.name_of(body.model), [list(body.token_ids)], request.state.owner)
        with contextlib.closing(reader):
            answers = await reader.whole(request)
        choices = []
        for answer in answers:
            _, top = await reader.scored(answer, asked.top) if asked.top else (None, None)
            choice = {
                "index": answer.index,
                "token_ids": answer.tokens,
                "logprobs": id_logprobs(answer.tokens, answer.logprobs, top),
                "finish_reason": answer.finish_reason,
            }
            choices.append(choice | reader.own(answer, False))
        identity = body.request_id or f"generate-{secrets.token_hex(12)}"
        known = await prompt_logprobs(reader, answers[0]) if body.sampling_params.get("prompt_logprobs") else None
        more = {"request_id": identity, "prompt_logprobs": known, "usage": usage(answers, len(body.token_ids))}
        return JSONResponse({"choices": choices, **more, **reader.version(answers)})

    async def prompt_logprobs(reader: Reader, answer: Answer) -> list[dict[str, Any] | None]:
        """As vLLM writes them: for every token its id and log-prob; the first one has none."""
        found, _ = await reader.scored(answer, 0, first=1)
        own = zip(answer.prompt[1:], found, strict=False)  # those of the answer follow
        return [None, *({str(token): {"logprob": max(value, -9999.0)}} for token, value in own)]

    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        data = parse_json(await request.body())
        if isinstance(data, dict) and "messages" in data:
            chat = parsed(ChatRequest, data)
            tokens = await reading(lambda: chat_prompt(tokenizer, service.template, chat))
        else:
            text = parsed(CompletionRequest, data)
            text.check_prompts()
            tokens = await reading(lambda: text_prompt(tokenizer, text.prompts[0]))
        return {"tokens": tokens, "count": len(tokens), "max_model_len": service.settings.max_tokens}

    @app.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, Any]:
        data = parse_json(await request.body())
        tokens = data.get("tokens") if isinstance(data, dict) else None
        if not isinstance(tokens, list) or not all(type(i) is int and 0 <= i < service.vocabulary for i in tokens):
            raise Refusal(400, "tokens is not a list of token ids of this model.", param="tokens")
        return {"prompt": await reading(lambda: tokenizer.decode(tokens))}

    @app.get("/v1/traces/{identity}")
    async def trace(request: Request, identity: str) -> Response:
        content = service.traces.get(identity, request.state.owner)
        if content is None:
            raise Refusal(404, "there is no such trace; it is kept for a bounded time, if it was asked for.")
        return Response(content, media_type="application/octet-stream")

    add_admin(app, service)

    # ------------------------------------------------------------------------------------------- health and the page

    @app.get("/health")
    @app.get("/liveness")
    async def health() -> dict[str, Any]:
        if not desk.alive:
            raise Refusal(503, "the engine's thread has ended.", "server_error")
        return {"status": "ok", "paused": desk.paused, "running": desk.running, "waiting": desk.waiting}

    @app.get("/metrics")
    async def show_metrics() -> PlainTextResponse:
        return PlainTextResponse(metrics(service), media_type="text/plain; version=0.0.4")

    @app.get("/")
    async def show_page() -> HTMLResponse:
        return HTMLResponse(page(service))

    return app
