"""What the evaluation promised for exactly the prompts and answer lengths that a server is asked.

In: an acceptance artifact's walked rounds and the held-out responses they were walked on. Out: `Rounds`, cut
to the first tokens of each answer, so that a shorter serving check is compared with the same text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from eagle3core.acceptance import Response, Rounds
from storage.schemas import AcceptanceRow, ResponseRow


@dataclass(frozen=True)
class Promised:
    """Where a response's last answer begins, and how many of its tokens the server may write."""

    response: ResponseRow
    limit: int

    @property
    def start(self) -> int:
        return self.response.spans[-1].start

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        return self.response.token_ids[: self.start]

    @property
    def answer_token_ids(self) -> list[int]:
        """The stored answer, as far as the server may go."""
        return list(self.response.token_ids[self.start :][: self.limit])

    def room(self, anchor: int) -> int:
        """Tokens that a round at feature row `anchor` can add: it drafts tokens anchor + 2 and on."""
        return self.start + len(self.answer_token_ids) - (anchor + 2)


def promised_rounds(
    rows: Iterable[AcceptanceRow], responses: Sequence[Promised], temperature: float, draft_length: int
) -> Rounds:
    """The walked rounds of these responses at this temperature, none longer than the answer's room.

    Walks begin at an answer's first row and go on by what was accepted, so cutting the text cuts the last
    round and leaves the earlier ones as they are. Raises ValueError where no round is left.
    """
    wanted: Mapping[str, Promised] = {each.response.conversation_id: each for each in responses}
    numbers = {name: i for i, name in enumerate(wanted)}
    response, context, drafted, accepted = [], [], [], []
    for row in rows:
        promised = wanted.get(row.prompt_id)
        if row.mode != "walk" or row.temperature != temperature or promised is None:
            continue
        room = promised.room(row.anchor)
        if row.anchor < promised.start - 1 or room <= 0:
            continue  # a round of an earlier turn, or beyond what the server may write
        response.append(numbers[row.prompt_id])
        context.append(row.anchor + 2)
        drafted.append(min(row.drafted, room))
        accepted.append(min(row.accepted, room))
    if not response:
        raise ValueError(f"acceptance: no walked round of these prompts at T = {temperature:g}")
    return Rounds.counted(
        "walk",
        [Response(name, each.response.category, temperature) for name, each in wanted.items()],
        torch.tensor(response),
        torch.tensor(context),
        torch.tensor(drafted),
        torch.tensor(accepted),
        draft_length,
    )
