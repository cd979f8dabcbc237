"""A server with OpenAI's chat and completions endpoints, over one model and a `Batch`.

What would change a result and is not implemented is refused. The libraries are starlette (which
FastAPI is made of) and uvicorn. transformers' own server has these endpoints, too, but drops what
it does not know with one warning, seeds all requests at once, and computes for clients that have
gone.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import math
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import torch
import uvicorn
from jinja2 import TemplateError
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import from_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import offload
from offload.config import OffloadConfig
from offload.errors import ConfigError, StateError, TierFullError
from offload.integrations.transformers.batched_generation import (
    Batch,
    End,
    QueueFullError,
    Sequence,
)
from offload.integrations.transformers.text_generation import load_tokenizer, open_generating
from offload.kv.paged_cache import cached_layers
from offload.process.interrupts import noted_interrupts
from offload.tiers.units import format_bytes

CACHED_TOKENS = 16384  # where kv.tokens is absent
_NEW_TOKENS = 1024  # of a request that does not say, as in transformers' server
_WINDOW = 256  # tokens that are decoded again for the sake of a character
_STOP_S = 5  # for responses that have ended, to clients that are slow to read them
# Accepted with a value that asks for nothing; null is one of each.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "logprobs": (False,),
    "top_logprobs": (0,), "logit_bias": ({},), "frequency_penalty": (0,), "presence_penalty": (0,),
    "tools": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "store": (False,),
    "service_tier": ("auto", "default"),
}  # fmt: skip
_NO_MATTER = ("user", "metadata", "safety_identifier", "prompt_cache_key")  # for no result


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _StreamOptions(_Strict):
    include_usage: bool = False


class _Message(_Strict):
    role: str
    content: str

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        known = [text for text in texts if isinstance(text, str)]
        if len(known) != len(content):
            raise ValueError("only parts of text are supported")
        return "".join(known)


class _Asked(_Strict):
    """What both endpoints understand."""

    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=0, lt=1 << 63)
    stop: str | list[str] | None = None

    def stops(self) -> list[str]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]


class _Completion(_Asked):
    prompt: str | list[int]


class _Chat(_Asked):
    messages: list[_Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)


def _error(message: str, status: int) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def _failed(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        return Response(status_code=400)  # of a client that has gone
    return JSONResponse(_error(error.detail, error.status_code), error.status_code, error.headers)


def _status(error: Exception) -> int:
    return 503 if isinstance(error, StateError | TierFullError | QueueFullError) else 500


class _Text:
    """The text of tokens as they come, up to one of `stops`, in whole characters."""

    def __init__(self, tokenizer: Any, stops: list[str]) -> None:
        self.tokens: list[int] = []
        self.stopped = False
        self._tokenizer, self._stops = tokenizer, stops
        self._begin = self._given = 0  # tokens from there are decoded; their characters given out
        self._whole = 0  # tokens that ended with a whole character
        self._held = ""  # may be the beginning of a stop

    def _decoded(self) -> str:
        text: str = self._tokenizer.decode(
            self.tokens[self._begin :], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def add(self, token: int) -> str:
        """Return what is certain with this token."""
        self.tokens.append(token)
        text = self._decoded()
        # A character's last byte is to come; until then some tokenizers show all bytes so.
        whole = text.rstrip("\ufffd")
        long = len(self.tokens) - self._begin > _WINDOW  # no text at all
        if long:
            whole = text
        fresh, self._given = whole[self._given :], max(self._given, len(whole))
        if whole == text and (fresh or long):  # what comes is decoded behind these tokens
            self._begin, self._whole = self._whole, len(self.tokens)
            self._given = len(self._decoded())
        return self._before_stop(fresh)

    def rest(self) -> str:
        """Return what is left at the end."""
        return self._before_stop(self._decoded()[self._given :]) + self._held

    def _before_stop(self, fresh: str) -> str:
        text = self._held + fresh
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        self.stopped, self._held = bool(found), ""
        if found:
            return text[: min(found)]
        ends = [
            n for stop in self._stops for n in range(1, min(len(stop), len(text) + 1))
            if text.endswith(stop[:n])
        ]  # fmt: skip
        cut = len(text) - max(ends, default=0)
        self._held = text[cut:]
        return text[:cut]


class OpenAIServer:
    """Answers requests with what `batch` generates."""

    def __init__(self, name: str, tokenizer: Any, batch: Batch) -> None:
        self.name, self.tokenizer, self.batch = name, tokenizer, batch
        settings = batch.model.config.get_text_config(decoder=True)
        context = getattr(settings, "max_position_embeddings", None) or batch.tokens
        self.context = min(context, batch.tokens)
        self.vocabulary = int(settings.vocab_size)
        self.body_nbytes = max(1 << 20, 64 * self.context)
        self._created = int(time.time())
        self._watching: set[asyncio.Task[None]] = set()
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._completion, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/health", self._health),
            ],
            exception_handlers={HTTPException: _failed, ClientDisconnect: _failed},
        )

    # ---------------------------------------------------------------- endpoints
    async def _models(self, request: Request) -> Response:
        shown = {"id": self.name, "object": "model", "created": self._created}
        shown["owned_by"] = "offload"
        return JSONResponse({"object": "list", "data": [shown]})

    async def _health(self, request: Request) -> Response:
        failure = self.batch.failure
        status = "ok" if failure is None else f"failed: {failure}"
        return JSONResponse({"status": status}, 200 if failure is None else 503)

    async def _completion(self, request: Request) -> Response:
        asked = _read(_Completion, await self._body(request))
        ids = asked.prompt
        if isinstance(ids, str):
            ids = self.tokenizer(ids)["input_ids"]
        return await self._answer(request, asked, ids, asked.max_tokens)

    async def _chat(self, request: Request) -> Response:
        asked = _read(_Chat, await self._body(request))
        messages = [message.model_dump() for message in asked.messages]
        if self.tokenizer.chat_template is None:
            raise HTTPException(400, f"{self.name} has no chat template: use /v1/completions")
        try:
            ids = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True
            )["input_ids"]
        except (TemplateError, TypeError, ValueError) as error:
            raise HTTPException(400, f"the chat template refuses messages: {error}") from None
        new = asked.max_completion_tokens or asked.max_tokens
        return await self._answer(request, asked, ids, new)

    # ---------------------------------------------------------------- a request
    async def _body(self, request: Request) -> dict[str, Any]:
        # a page in a browser may post other types to a server of this machine, unasked
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HTTPException(415, f"Content-Type is {kind!r}, and must be application/json")
        data = bytearray()
        async for chunk in request.stream():
            data += chunk
            if len(data) > self.body_nbytes:
                most = format_bytes(self.body_nbytes)
                raise HTTPException(413, f"the request has more than {most}")
        try:
            asked = from_json(bytes(data), allow_inf_nan=False)
        except ValueError as error:
            raise HTTPException(400, f"the request is not JSON: {error}") from None
        if not isinstance(asked, dict):
            raise HTTPException(400, "the request is not a JSON object")
        if asked.get("model") not in (None, self.name):
            raise HTTPException(404, f"model {asked['model']!r} is not here; {self.name!r} is")
        return asked

    async def _answer(
        self, request: Request, asked: _Asked, ids: list[int], new_tokens: int | None
    ) -> Response:
        if not ids:
            raise HTTPException(400, "the prompt has no tokens")
        if wrong := [token for token in ids if not 0 <= token < self.vocabulary]:
            raise HTTPException(400, f"the prompt has token {wrong[0]} of {self.vocabulary:,}")
        room = self.context - len(ids)
        if room < (new_tokens or 1):
            raise HTTPException(
                400, f"{len(ids):,} tokens of the prompt and {new_tokens or 1:,} new ones are more "
                f"than the {self.context:,} that a sequence may have here",
            )  # fmt: skip
        default = self.batch.model.generation_config.max_new_tokens or _NEW_TOKENS
        loop, events = asyncio.get_running_loop(), asyncio.Queue[int | End]()

        def deliver(event: int | End) -> None:
            with suppress(RuntimeError):  # the loop has ended: nobody listens
                loop.call_soon_threadsafe(events.put_nowait, event)

        sequence = Sequence(
            torch.tensor([ids]), seed=asked.seed, deliver=deliver,
            options={
                "max_new_tokens": new_tokens or min(default, room),
                **token_choice(asked.temperature, asked.top_p),
            },
        )  # fmt: skip
        try:
            self.batch.submit(sequence)
        except (QueueFullError, StateError) as error:
            after = str(max(1, math.ceil(self.batch.pass_s)))
            raise HTTPException(503, str(error), {"Retry-After": after}) from None
        watching = asyncio.create_task(self._cancel_when_gone(request, sequence))
        self._watching.add(watching)
        watching.add_done_callback(self._watching.discard)
        text = _Text(self.tokenizer, asked.stops())
        pieces = self._pieces(sequence, events, text)
        shape = _Shape(self.name, len(ids), text, chat=isinstance(asked, _Chat))
        if asked.stream:
            usage = asked.stream_options is not None and asked.stream_options.include_usage
            return StreamingResponse(shape.stream(pieces, usage), media_type="text/event-stream")
        content = [piece async for piece in pieces]
        end = content.pop()
        assert isinstance(end, End)
        if end.error is not None:
            raise HTTPException(_status(end.error), str(end.error))
        return JSONResponse(shape.whole("".join(map(str, content)), end.reason))

    async def _cancel_when_gone(self, request: Request, sequence: Sequence) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.batch.cancel(sequence)

    async def _pieces(
        self, sequence: Sequence, events: asyncio.Queue[int | End], text: _Text
    ) -> AsyncIterator[str | End]:
        """Yield the text piece by piece, and an End."""
        try:
            while not isinstance(event := await events.get(), End):
                if piece := text.add(event):
                    yield piece
                if text.stopped:
                    yield End("stop")
                    return
            if event.error is None and (piece := text.rest()):
                yield piece
            yield End("stop") if text.stopped else event
        finally:
            self.batch.cancel(sequence)


class _Shape:
    """The JSON of one answer."""

    def __init__(self, model: str, prompt_tokens: int, text: _Text, *, chat: bool) -> None:
        self._chat, self._text, self._prompt_tokens = chat, text, prompt_tokens
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def _usage(self) -> dict[str, int]:
        prompt, new = self._prompt_tokens, len(self._text.tokens)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def whole(self, text: str, reason: str) -> dict[str, Any]:
        said = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": reason}
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": [choice], "usage": self._usage()}

    async def stream(self, pieces: AsyncIterator[str | End], usage: bool) -> AsyncIterator[str]:
        """Yield server-sent events."""
        if self._chat:
            yield self._event({"role": "assistant", "content": ""})
        async for piece in pieces:
            if isinstance(piece, str):
                yield self._event({"content": piece} if self._chat else piece)
            elif piece.error is not None:
                yield _sse(_error(str(piece.error), _status(piece.error)))
                return
            else:
                yield self._event({} if self._chat else "", piece.reason)
        if usage:
            yield self._event(None)
        yield "data: [DONE]\n\n"

    def _event(self, said: Any, reason: str | None = None) -> str:
        choice = {"index": 0, "logprobs": None, "finish_reason": reason}
        choice["delta" if self._chat else "text"] = said
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        event = {**self._head, "object": kind, "choices": [] if said is None else [choice]}
        return _sse({**event, "usage": self._usage()} if said is None else event)


def _sse(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _read(kind: type[Any], given: dict[str, Any]) -> Any:
    """Return a request's fields, checked. Raise HTTPException, which names the field."""
    kept = {}
    for name, value in given.items():
        if name in _NEUTRAL:
            # 0 is False, and a completion's logprobs: 0 asks for something
            alike = [each for each in _NEUTRAL[name] if (each is False) == (value is False)]
            if value is not None and value not in alike:
                raise HTTPException(400, f"{name}: {json.dumps(value)[:80]} is not supported here")
        elif name not in _NO_MATTER:
            kept[name] = value
    try:
        return kind.model_validate(kept)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise HTTPException(400, f"{where}: {first['msg']}") from None


def token_choice(temperature: float | None, top_p: float | None) -> dict[str, Any]:
    """Return the arguments of `generate` for these; without any the folder's generation_config.json
    decides."""
    if temperature == 0:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    given = {"temperature": temperature, "top_p": top_p}
    given = {name: value for name, value in given.items() if value is not None}
    return {"do_sample": True, **given} if given else {}


# ---------------------------------------------------------------- the process
class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, batch: Batch) -> None:
        super().__init__(config)
        self._batch = batch

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._batch.stop()  # else responses would be waited for to their last token
        await super().shutdown(sockets)


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket of this address, before anything slow is done."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise ConfigError(f"--host {host} --port {port}: {error.strerror or error}") from None
    return made


def serve(
    folder: Path, config: OffloadConfig, *, host: str, port: int, size: int, waiting: int
) -> None:
    """Serve the folder's model until SIGINT or SIGTERM."""
    with noted_interrupts(), _bound(host, port) as listening:
        model, tokenizer = open_generating(folder), load_tokenizer(folder)
        offload.dispatch(model, config)
        with offload.dispatched(model) as owner:
            tokens = owner.config.kv.tokens or CACHED_TOKENS
            batch = Batch(model, size=size, waiting=waiting, tokens=tokens, keep=owner.keep_cache)
            with closing(batch):
                server = OpenAIServer(folder.resolve().name, tokenizer, batch)
                settings = uvicorn.Config(
                    server.app, log_level="warning", lifespan="off",
                    timeout_graceful_shutdown=_STOP_S,
                )  # fmt: skip
                _say(server, listening, "placement.kv" if config.placement.kv else "RAM")
                with suppress(KeyboardInterrupt):  # uvicorn raises the signal again
                    _Server(settings, batch).run(sockets=[listening])
    print("stopped", file=sys.stderr)


def _say(server: OpenAIServer, listening: socket.socket, where: str) -> None:
    """Say on standard error where the server is, and what it may take."""
    (host, port), batch = listening.getsockname()[:2], server.batch
    numel = batch.tokens * sum(layer.token_numel for layer in cached_layers(batch.model))
    size = format_bytes(numel * batch.model.dtype.itemsize)
    shown = f"[{host}]" if ":" in host else host
    print(
        f"serving {server.name} at http://{shown}:{port}/v1: {batch.size} sequences at a time, "
        f"{batch.waiting} wait; KV caches of {batch.tokens:,} tokens (kv.tokens), up to {size} in "
        f"{where}", file=sys.stderr, flush=True,
    )  # fmt: skip
    if not ipaddress.ip_address(host).is_loopback:
        print(f"anyone who reaches {host} can use it: there are no keys", file=sys.stderr)
