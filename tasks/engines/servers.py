"""Which of several servers a request goes to: the least busy one of those that answer, with rests for the others.

In: what became of each attempt. Out: the server for the next one, and counts of what happened (`ServerCount`).
A server that is away or busy rests, longer each time, and is then asked again: it may have been started anew.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tasks.engines.requests import ServerCount

FIRST_REST = 1.0  # seconds; doubled with every failure in a row
LONGEST_REST = 60.0
PATIENCE = 600.0  # seconds without any answer, from any server, while none of them can be used


class ServerError(RuntimeError):
    """No server can be used; one line says which and why."""


@dataclass
class Server:
    """One server's state. `model`: the name it knows its model by, "" until it has told it."""

    url: str
    model: str = ""
    running: int = 0
    answered: int = 0
    failed: int = 0
    times_away: int = 0
    error: str = ""
    in_a_row: int = 0
    rests_until: float = 0.0

    @property
    def up(self) -> bool:
        return self.in_a_row == 0

    def count(self) -> ServerCount:
        return ServerCount(self.url, self.answered, self.failed, self.times_away, self.up, self.error)


class ServerPool:
    """Used by many threads. `on_change` hears of a server that goes away or comes back."""

    def __init__(
        self,
        servers: Sequence[Server],
        on_change: Callable[[ServerCount], None] = lambda count: None,
        longest_rest: float = LONGEST_REST,
        patience: float = PATIENCE,
    ) -> None:
        self.servers = list(servers)
        self._on_change = on_change
        self._longest_rest = longest_rest
        self._patience = patience
        self._last_answer = time.monotonic()
        self._changed = threading.Condition()

    def take(self) -> Server:
        """The server for one attempt; waits while all rest. Raises ServerError when that lasts too long."""
        with self._changed:
            while not (chosen := self._ready()):
                now = time.monotonic()
                if now - self._last_answer > self._patience and not any(server.up for server in self.servers):
                    raise ServerError(self._nobody())
                wakes = [server.rests_until - now for server in self.servers if server.rests_until > now]
                self._changed.wait(min([1.0, *wakes]))
            chosen.running += 1
            return chosen

    def answered(self, server: Server) -> None:
        with self._changed:
            back = not server.up
            server.running -= 1
            server.answered += 1
            server.in_a_row = 0
            server.rests_until = 0.0
            self._last_answer = time.monotonic()
            self._changed.notify_all()
            count = server.count()
        if back:
            self._on_change(count)

    def refused(self, server: Server, error: str) -> None:
        """The server works and said no to this one request."""
        with self._changed:
            server.running -= 1
            server.failed += 1
            server.error = error
            self._changed.notify_all()

    def away(self, server: Server, error: str) -> None:
        """The server did not answer, or has no room: it rests."""
        with self._changed:
            gone = server.up
            server.running -= 1
            server.failed += 1
            server.error = error
            # Attempts that were in flight together fail together: that is one failure of the server.
            if server.rests_until <= time.monotonic():
                server.times_away += gone
                rest = min(self._longest_rest, FIRST_REST * 2**server.in_a_row)
                server.rests_until = time.monotonic() + rest * random.uniform(0.8, 1.0)
                server.in_a_row += 1
            self._changed.notify_all()
            count = server.count()
        if gone:
            self._on_change(count)

    def _ready(self) -> Server | None:
        """The least busy server; one that has not answered since it rested gets one request to prove itself."""
        now = time.monotonic()
        ready = [server for server in self.servers if server.rests_until <= now]
        return min(
            (server for server in ready if server.up or not server.running),
            key=lambda server: (server.running, server.answered),
            default=None,
        )

    def _nobody(self) -> str:
        said = "; ".join(f"{server.url}: {server.error}" for server in self.servers)
        return (
            f"responses.servers: none has answered for {self._patience:.0f} s ({said}): start them, and give the same "
            "command again"
        )
