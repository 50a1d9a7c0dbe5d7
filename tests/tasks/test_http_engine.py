"""Answers over HTTP: token ids both ways, patience with busy servers, a refusal kept as one."""

from __future__ import annotations

import json
from collections import Counter

import httpx
import pytest

from tasks.engines.http import HttpEngine, ServerError
from tasks.engines.requests import EngineOptions, Request, TargetFiles

TARGET = TargetFiles("/nowhere", "bfloat16", (2,), "", {}, False)
OPTIONS = EngineOptions("http", 2, 512, 0.9, None, 1, False, 0, servers=("http://one/v1", "http://two/v1"))


def engine(answer) -> HttpEngine:
    def handle(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "the-model"}]})
        return answer(request, json.loads(request.content))

    return HttpEngine(TARGET, OPTIONS, transport=httpx.MockTransport(handle), longest_rest=0.01)


def drain(engine: HttpEngine, count: int) -> dict:
    done = {}
    while len(done) < count:
        done |= {each.id: each for each in engine.step()}
    return done


def echo(request: httpx.Request, body: dict) -> httpx.Response:
    choice = {"token_ids": [*reversed(body["prompt"]), 2], "finish_reason": "stop"}
    return httpx.Response(200, json={"choices": [choice]})


def test_prompts_go_out_and_answers_come_back_as_token_ids_from_every_server():
    asked: Counter[str] = Counter()
    bodies: list[dict] = []

    def answer(request, body):
        asked[request.url.host] += 1
        bodies.append(body)
        return echo(request, body)

    http = engine(answer)
    for i in range(6):
        http.add(Request(str(i), [7, 8, i], temperature=i % 2, max_new_tokens=5, seed=40 + i))
    done = drain(http, 6)
    assert done["3"].token_ids == [3, 8, 7, 2] and done["3"].finish_reason == "stop"
    assert asked == {"one": 3, "two": 3}
    by_prompt = {body["prompt"][2]: body for body in bodies}
    assert by_prompt[3]["seed"] == 43 and by_prompt[3]["model"] == "the-model"
    assert "seed" not in by_prompt[2] and by_prompt[2]["stop_token_ids"] == [2]


def test_a_busy_server_is_asked_again():
    asked: Counter[int] = Counter()

    def answer(request, body):
        asked[body["prompt"][0]] += 1
        return httpx.Response(503) if asked[body["prompt"][0]] < 3 else echo(request, body)

    http = engine(answer)
    http.add(Request("a", [5], max_new_tokens=1))
    assert drain(http, 1)["a"].token_ids == [5, 2]
    assert asked[5] == 3


def test_a_refused_request_is_not_repeated_and_says_why():
    asked: list[dict] = []

    def answer(request, body):
        asked.append(body)
        return httpx.Response(400, json={"error": "prompt too long"})

    http = engine(answer)
    http.add(Request("a", [5], max_new_tokens=1))
    failed = drain(http, 1)["a"]
    assert "400" in failed.error and failed.token_ids == []
    assert len(asked) == 1


def test_a_server_without_token_ids_or_without_an_api_stops_the_run():
    choice = {"text": "x", "finish_reason": "stop"}
    http = engine(lambda request, body: httpx.Response(200, json={"choices": [choice]}))
    http.add(Request("a", [5], max_new_tokens=1))
    with pytest.raises(ServerError, match="token ids"):
        http.step()
    away = httpx.MockTransport(lambda request: httpx.Response(404))
    with pytest.raises(ServerError, match="http://one/v1"):
        HttpEngine(TARGET, OPTIONS, transport=away)
