"""A completions server as a process of its own: `python completion_server.py LOG PORT SECONDS [HOSTILE]`.

Prints its port (a free one for 0); answers a prompt with tokens that follow from it (`answer_to`), after so many seconds, and
appends a line to LOG for each request. A prompt that holds the token HOSTILE is never answered but with a 500.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

END = 1  # the tiny target's end-of-turn token


def answer_to(prompt: Sequence[int]) -> list[int]:
    """Five tokens of the tiny target's and the end, from the prompt alone: any server answers alike."""
    return [*((sum(prompt) * 31 + 7 * i) % 200 + 100 for i in range(5)), END]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    log = Path("-")
    seconds = 0.0
    hostile: int | None = None

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        with self.log.open("a") as file:
            file.write(json.dumps(prompt) + "\n")
        if self.hostile in prompt:
            return self._send(500, {"error": "broken by this prompt"})
        time.sleep(self.seconds)
        self._send(200, {"choices": [{"token_ids": answer_to(prompt), "finish_reason": "stop"}]})

    def _send(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words: object) -> None:
        pass


class ServerProcess:
    """A server that can be killed. `asked`: requests it has seen."""

    def __init__(self, log: Path, seconds: float, *hostile: int, port: int = 0) -> None:
        self._log = log
        command = [sys.executable, __file__, str(log), str(port), str(seconds), *map(str, hostile)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.url = f"http://127.0.0.1:{self.process.stdout.readline().strip()}/v1"

    @property
    def asked(self) -> int:
        return len(self._log.read_text().splitlines()) if self._log.exists() else 0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


if __name__ == "__main__":
    Handler.log, Handler.seconds = Path(sys.argv[1]), float(sys.argv[3])
    Handler.hostile = int(sys.argv[4]) if len(sys.argv) > 4 else None
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
