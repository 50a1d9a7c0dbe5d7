"""Servers that are already running as an Engine, through the OpenAI completions API with token ids both ways.

In: requests. Out: answers; the states stay on the server. Requests go round the servers, are tried again with
growing pauses where a server is busy or away, and come back as failed where it refuses them or stays away.
"""

from __future__ import annotations

import itertools
import logging
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import httpx
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential_jitter

from tasks.engines.requests import EngineOptions, Finished, Request, TargetFiles

logger = logging.getLogger(__name__)

ATTEMPTS = 6
LONGEST_PAUSE = 60.0
# A long answer on a busy server; the connection itself must come up much sooner.
TIMEOUT = httpx.Timeout(1800.0, connect=10.0)
BUSY = {408, 409, 425, 429, 500, 502, 503, 504}


class ServerError(RuntimeError):
    """A server that cannot be used at all; one line says which and why."""


class HttpEngine:
    """`capacity` requests in flight on every server."""

    def __init__(
        self,
        target: TargetFiles,
        options: EngineOptions,
        transport: httpx.BaseTransport | None = None,
        longest_pause: float = LONGEST_PAUSE,
    ) -> None:
        self.capacity = options.capacity * len(options.servers)
        self._eos = list(target.eos_token_ids)
        self._client = httpx.Client(timeout=TIMEOUT, transport=transport)
        self._models = {server: self._model(server.rstrip("/")) for server in options.servers}
        self._servers = itertools.cycle(self._models)
        self._longest_pause = longest_pause
        self._threads = ThreadPoolExecutor(self.capacity, thread_name_prefix="http")
        self._running: set[Future[Finished]] = set()

    def add(self, request: Request) -> None:
        self._running.add(self._threads.submit(self._answer, next(self._servers), request))

    def step(self) -> list[Finished]:
        done, self._running = wait(self._running, return_when=FIRST_COMPLETED)
        return [future.result() for future in done]

    def _model(self, server: str) -> str:
        """The name the server knows its model by. Raises ServerError where nothing answers."""
        try:
            reply = self._client.get(f"{server}/models")
            reply.raise_for_status()
            return str(reply.json()["data"][0]["id"])
        except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
            raise ServerError(f"responses.servers: {server} is not an OpenAI API: {error}") from error

    def _answer(self, server: str, request: Request) -> Finished:
        body: dict[str, Any] = {
            "model": self._models[server],
            "prompt": list(request.token_ids),
            "max_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "stop_token_ids": self._eos,
            "return_token_ids": True,
        }
        if request.temperature > 0:
            body["seed"] = request.seed
        try:
            choice = self._post(f"{server.rstrip('/')}/completions", body)["choices"][0]
        except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
            return Finished(request.id, [], "error", error=f"{server}: {' '.join(str(error).split())[:300]}")
        if choice.get("token_ids") is None:
            raise ServerError(f"{server} returns no token ids (return_token_ids): a vLLM server does")
        return Finished(request.id, list(choice["token_ids"]), choice["finish_reason"])

    def _post(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        for attempt in Retrying(
            retry=retry_if_exception(_may_pass),
            stop=stop_after_attempt(ATTEMPTS),
            wait=wait_exponential_jitter(multiplier=min(1.0, self._longest_pause), max=self._longest_pause),
            reraise=True,
        ):
            with attempt:
                reply = self._client.post(url, json=body)
                reply.raise_for_status()
                return reply.json()
        raise AssertionError("tenacity reraises")


def _may_pass(error: BaseException) -> bool:
    """Whether the same request may succeed later: the server is away or busy, and did not refuse it."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in BUSY
    return isinstance(error, httpx.TransportError)
