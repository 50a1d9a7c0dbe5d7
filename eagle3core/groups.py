"""Rounds taken apart: by category, temperature, context length and answer length.

In: `Rounds`. Out: named `Rounds`, each to be given to `acceptance.summarise`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from eagle3core.acceptance import Response, Rounds

CONTEXT_EDGES = (128, 256, 512, 1024, 2048, 4096, 8192)
OUTPUT_EDGES = (32, 64, 128, 256, 512, 1024, 2048)


def bucket(value: int, edges: Sequence[int]) -> str:
    """The name of the bucket that holds `value`: "0-127", "128-255", ..., "8192-"."""
    below = [0, *edges]
    index = sum(value >= edge for edge in edges)
    return f"{below[index]}-{edges[index] - 1}" if index < len(edges) else f"{below[index]}-"


def by_category(rounds: Rounds) -> dict[str, Rounds]:
    """Rounds of each category of prompt."""
    return _split(rounds, _by_response(rounds, lambda response: response.category))


def by_set(rounds: Rounds) -> dict[str, Rounds]:
    """Rounds of each evaluation set: a prompt is keyed "set/id". Those of no set are named by their category."""

    def name(response: Response) -> str:
        head, slash, _ = response.prompt_id.partition("/")
        return head if slash else response.category

    return _split(rounds, _by_response(rounds, name))


def by_temperature(rounds: Rounds) -> dict[str, Rounds]:
    """Rounds of each temperature, named "0", "0.7", ..."""
    return _split(rounds, _by_response(rounds, lambda response: f"{response.temperature:g}"))


def by_context(rounds: Rounds, edges: Sequence[int] = CONTEXT_EDGES) -> dict[str, Rounds]:
    """Rounds by how many tokens were known when they began."""
    return _split(rounds, [bucket(value, edges) for value in rounds.context.tolist()])


def by_output(rounds: Rounds, edges: Sequence[int] = OUTPUT_EDGES) -> dict[str, Rounds]:
    """Rounds by the length of the whole answer they belong to."""
    return _split(rounds, _by_response(rounds, lambda response: bucket(response.output_tokens, edges)))


def _by_response(rounds: Rounds, name: Callable[[Response], str]) -> list[str]:
    names = [name(response) for response in rounds.responses]
    return [names[index] for index in rounds.response.tolist()]


def _split(rounds: Rounds, names: list[str]) -> dict[str, Rounds]:
    known = sorted(set(names), key=_numbers_first)
    number = {name: index for index, name in enumerate(known)}
    labels = torch.tensor([number[name] for name in names], dtype=torch.int64, device=rounds.response.device)
    return {name: rounds.select(labels == index) for name, index in number.items()}


def _numbers_first(name: str) -> tuple[float, str]:
    """Buckets and temperatures in the order of their numbers, other names by the alphabet."""
    head = name.split("-")[0]
    return (float(head), "") if head[:1].isdigit() else (math.inf, name)
