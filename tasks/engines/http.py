"""Servers that are already running as an Engine, through the OpenAI completions API with token ids both ways.

In: requests. Out: answers; the states stay on the server. A request goes to the least busy server that answers;
where that one goes away in the middle, to another. One that a server refuses, or that fails again and again
where others are answered, comes back as failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from typing import Any

import httpx

from tasks.engines.requests import EngineOptions, Finished, Request, ServerCount, TargetFiles
from tasks.engines.servers import LONGEST_REST, PATIENCE, Server, ServerError, ServerPool

# Failures that may be the request's own fault: the server broke, or went away, while it had the request. A
# server that cannot be reached is nobody's fault, and one that is busy hardly ever the request's.
ATTEMPTS = 6
MOST_BUSY = 60
# A long answer on a busy server; the connection itself must come up much sooner.
TIMEOUT = httpx.Timeout(1800.0, connect=10.0)
BUSY = {408, 425, 429, 502, 503, 504}
BROKEN = {409, 500}
UNREADABLE = (KeyError, IndexError, TypeError, ValueError)


class HttpEngine:
    """`capacity` requests in flight on every server. `say` hears what happens to the servers, as events."""

    def __init__(
        self,
        target: TargetFiles,
        options: EngineOptions,
        say: Callable[[Mapping[str, Any]], None] = lambda event: None,
        transport: httpx.BaseTransport | None = None,
        longest_rest: float = LONGEST_REST,
        patience: float = PATIENCE,
    ) -> None:
        self.capacity = options.capacity * len(options.servers)
        self._eos = list(target.eos_token_ids)
        self._say = say
        self._longest_rest = longest_rest
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self.capacity)
        self._client = httpx.Client(timeout=TIMEOUT, limits=limits, transport=transport)
        servers = [Server(url.rstrip("/")) for url in options.servers]
        self._pool = ServerPool(servers, self._tell, longest_rest, patience)
        self._find(servers)
        self._tell_all()
        self._threads = ThreadPoolExecutor(self.capacity, thread_name_prefix="http")
        self._running: set[Future[Finished]] = set()

    def add(self, request: Request) -> None:
        self._running.add(self._threads.submit(self._answer, request))

    def step(self) -> list[Finished]:
        done, self._running = wait(self._running, return_when=FIRST_COMPLETED)
        if not self._running:
            self._tell_all()
        return [future.result() for future in done]

    def _tell(self, count: ServerCount) -> None:
        self._say({"kind": "server", **asdict(count)})

    def _tell_all(self) -> None:
        for server in self._pool.servers:
            self._tell(server.count())

    def _find(self, servers: list[Server]) -> None:
        """Ask every server for its model. One that is away may come; all of them away is a mistake."""
        for server in servers:
            try:
                server.model = self._model(server.url)
            except httpx.TransportError as error:
                server.running += 1
                self._pool.away(server, _said(error))
            except (httpx.HTTPStatusError, *UNREADABLE) as error:
                raise ServerError(f"responses.servers: {server.url} is not an OpenAI API: {_said(error)}") from error
        if not any(server.model for server in servers):
            raise ServerError(
                f"responses.servers: none of {', '.join(server.url for server in servers)} answers "
                f"({servers[0].error}): start them first"
            )

    def _model(self, server: str) -> str:
        """The name the server knows its model by."""
        reply = self._client.get(f"{server}/models")
        reply.raise_for_status()
        return str(reply.json()["data"][0]["id"])

    def _answer(self, request: Request) -> Finished:
        """Try until it is answered, refused, or has failed too often where a server was there."""
        failures = busy = 0
        while True:
            server = self._pool.take()
            try:
                choice = self._post(server, request)
            except httpx.TransportError as error:
                self._pool.away(server, _said(error))
                failures += not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            except httpx.HTTPStatusError as error:
                status = error.response.status_code
                if status in BUSY:
                    self._pool.away(server, _said(error))
                    busy += 1
                else:
                    self._pool.refused(server, _said(error))
                    failures += 1 if status in BROKEN else ATTEMPTS
            except UNREADABLE as error:
                self._pool.refused(server, f"sent no completion: {_said(error)}")
                failures += 1
            except BaseException as error:
                self._pool.refused(server, _said(error))
                raise
            else:
                self._pool.answered(server)
                return Finished(request.id, list(choice["token_ids"]), choice["finish_reason"])
            if failures >= ATTEMPTS or busy >= MOST_BUSY:
                return Finished(request.id, [], "error", error=f"{server.url}: {server.error}")
            if server.up and failures:  # the server is well: the request itself waits
                time.sleep(min(self._longest_rest, 2.0 ** (failures - 1)))

    def _post(self, server: Server, request: Request) -> dict[str, Any]:
        if not server.model:  # it was away when the run began
            try:
                server.model = self._model(server.url)
            except (httpx.HTTPStatusError, *UNREADABLE) as error:
                raise httpx.ConnectError(f"is no OpenAI API yet: {_said(error)}") from error
        body: dict[str, Any] = {
            "model": server.model,
            "prompt": list(request.token_ids),
            "max_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "stop_token_ids": self._eos,
            "return_token_ids": True,
        }
        if request.temperature > 0:
            body["seed"] = request.seed
        reply = self._client.post(f"{server.url}/completions", json=body)
        reply.raise_for_status()
        choice = reply.json()["choices"][0]
        if choice.get("token_ids") is None:
            raise ServerError(f"{server.url} returns no token ids (return_token_ids): a vLLM server does")
        return choice


def _said(error: BaseException) -> str:
    """An error in one line, with what the server wrote where it answered."""
    text = str(error) or type(error).__name__
    if isinstance(error, httpx.HTTPStatusError):
        text = f"{error.response.status_code} {error.response.text}"
    return " ".join(text.split())[:300]
