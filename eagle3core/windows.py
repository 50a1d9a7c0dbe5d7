"""Which keys a step's queries see, as few contiguous windows: flash kernels want runs, the chains alive are
any subset of rows.

In: the rows at which the alive chains begin. Out: `Windows`. A window's queries are rows [first, stop) of one
document; they see that document's rows before `first` whole and the rest causally. Small holes are computed
and thrown away.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

LARGEST_HOLE = 48  # rows; a wider hole ends a window: two kernel calls cost about as much as these rows


@dataclass(frozen=True)
class Window:
    """Rows [first, stop) of the document that starts at row `document`; its queries lie at `slot` and after.
    """

    document: int
    first: int
    stop: int
    slot: int


@dataclass(frozen=True)
class Varlen:
    """The same windows as CUDA's variable-length flash kernel wants them.

    queries, keys: [windows + 1] int32, running totals. key_rows: [sum of keys] int64, the rows gathered as
    keys.
    """

    queries: Tensor
    keys: Tensor
    key_rows: Tensor
    longest_queries: int
    longest_keys: int


@dataclass(frozen=True)
class Windows:
    """spans: the windows, their slots side by side.

    slots: [alive] int64, where each chain's query lies among `size` slots; None where each lies at its own
    place.
    """

    spans: tuple[Window, ...]
    slots: Tensor | None
    size: int
    varlen: Varlen | None = None

    def to(self, device: torch.device) -> Windows:
        varlen = _varlen(self.spans, device) if device.type == "cuda" else None
        slots = None if self.slots is None else self.slots.to(device, non_blocking=True)
        return replace(self, slots=slots, varlen=varlen)


def find_windows(chains: Tensor, starts: Tensor, document: Tensor) -> Windows:
    """Windows over `chains` [alive] int64 (any order). starts: first row of each document; document: [R] each
    row's document.
    """
    if not len(chains):
        return Windows((), None, 0)
    rows, order = chains.sort()
    new = torch.ones(len(rows), dtype=torch.bool)
    new[1:] = (rows.diff() > LARGEST_HOLE) | (document[rows[1:]] != document[rows[:-1]])
    heads = new.nonzero().flatten()
    tails = torch.cat([heads[1:], torch.tensor([len(rows)])]) - 1
    first, stop = rows[heads], rows[tails] + 1
    slot = torch.cat([torch.zeros(1, dtype=torch.int64), (stop - first).cumsum(0)])
    window = new.cumsum(0) - 1
    slots = torch.empty_like(chains)
    slots[order] = rows - first[window] + slot[window]
    columns = (starts[document[first]], first, stop, slot[:-1])
    spans = tuple(Window(*values) for values in zip(*(c.tolist() for c in columns), strict=True))
    size = int(slot[-1])
    in_place = torch.equal(slots, torch.arange(size))
    return Windows(spans, None if in_place else slots, size)


def _varlen(spans: tuple[Window, ...], device: torch.device) -> Varlen | None:
    if not spans:
        return None
    queries = torch.tensor([0] + [span.stop - span.first for span in spans])
    keys = torch.tensor([0] + [span.stop - span.document for span in spans])
    rows = torch.cat([torch.arange(span.document, span.stop) for span in spans])
    total = lambda lengths: lengths.cumsum(0).to(device, torch.int32, non_blocking=True)
    return Varlen(
        total(queries), total(keys), rows.to(device, non_blocking=True), int(queries.max()), int(keys.max())
    )
