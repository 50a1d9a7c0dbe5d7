"""The drafters by name: one line each. Nothing here imports torch, so a recipe can be checked against it cheaply.

In: a recipe's `draft.drafter`, or a draft. Out: its `Drafter` (`interface.py`), whose file is imported when it is
first asked for.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from eagle3core.config import default_layer_ids

if TYPE_CHECKING:
    from eagle3core.drafters.interface import Draft, Drafter, TargetParts


@dataclass(frozen=True)
class Line:
    """Where a drafter is and what a recipe must know of it.

    at: "module:class". title: its name in prose. reads: of the target's states, three layers, its last one, or none:
    its tokens alone. method, sglang: vLLM's name for it, and SGLang's where that serves it. options: keys of the
    recipe's `draft.options`, with their defaults. means: what the name says of the recipe's other `draft` keys.
    weights_of: the drafter whose trained weights it takes.
    """

    at: str
    title: str
    reads: Literal["layers", "last", "tokens"] = "layers"
    method: str = "eagle3"
    sglang: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    means: Mapping[str, Any] = field(default_factory=dict)
    weights_of: str | None = None

    def layer_ids(self, num_layers: int, captured: Sequence[int] | None = None) -> tuple[int, ...]:
        """The states that it reads of a target of so many layers, as indices into HF's `hidden_states`. captured:
        those that the recipe names, if it does."""
        if self.reads == "layers":
            return tuple(captured or default_layer_ids(num_layers))
        return (num_layers,) if self.reads == "last" else ()

    def settings(self, draft: Mapping[str, Any]) -> dict[str, Any]:
        """The recipe's `draft` section with options laid over their defaults, as `Drafter.build` takes it."""
        return {**draft, **self.means, "options": {**self.options, **draft.get("options", {})}}

    def problem(self, options: Mapping[str, Any]) -> str | None:
        """What is wrong with a recipe's `draft.options` for this drafter; None where nothing is."""
        for name, value in options.items():
            if name not in self.options:
                return f"draft.options.{name} is not known; this drafter's options: {', '.join(self.options) or 'none'}"
            wanted = type(self.options[name])
            if isinstance(value, bool) or not isinstance(value, (int, float) if wanted is float else wanted) or value <= 0:
                return f"draft.options.{name} {value!r} is no {wanted.__name__} above 0"
        return None


DRAFTERS: dict[str, Line] = {
    "sps": Line(
        "eagle3core.drafters.sps:Sps", "SpS", "tokens", "draft_model", options={"layers": 4, "width": 256, "heads": 4}
    ),
    "eagle1": Line(
        "eagle3core.drafters.eagle1:Eagle1", "EAGLE-1", "last", "eagle", "EAGLE", {"noise": 0.2, "token_weight": 0.1}
    ),
    "eagle2": Line(
        "eagle3core.drafters.eagle1:Eagle2", "EAGLE-2", "last", "eagle", "EAGLE", {"noise": 0.2, "token_weight": 0.1},
        weights_of="eagle1",
    ),
    "eagle2-ttt": Line(
        "eagle3core.drafters.eagle2_ttt:Eagle2Ttt", "EAGLE-2 (no feature constraint)", "last", means={"fc_norm": False}
    ),
    "eagle3": Line("eagle3core.drafters.eagle3:Eagle3", "EAGLE-3", sglang="EAGLE3"),
    "eagle3.1": Line("eagle3core.drafters.eagle3:Eagle3", "EAGLE-3.1", means={"fc_norm": True, "norm_output": True}),
    "dflash": Line(
        "eagle3core.drafters.dflash:DFlash", "DFlash", method="dflash",
        options={"block": 6, "layers": 2, "gamma": 4.0, "anchors": 0.25, "mask_token_id": 1},
    ),
}  # fmt: skip


@cache
def drafter(name: str) -> Drafter:
    """The drafter of that name. Raises ValueError naming those that are known."""
    if name not in DRAFTERS:
        raise ValueError(f"drafter {name!r} is not known; known: {', '.join(DRAFTERS)}")
    module, _, made = DRAFTERS[name].at.partition(":")
    return getattr(importlib.import_module(module), made)()


def drafter_of(draft: Draft) -> Drafter:
    """The drafter that made `draft`."""
    return drafter(draft.drafter)


def saved_drafter(folder: Path) -> Drafter:
    """The drafter whose draft lies in `folder`: what its config.json names, EAGLE-3 where it names none."""
    return drafter(json.loads((folder / "config.json").read_text()).get("drafter", "eagle3"))


def load_draft(folder: Path, target: TargetParts) -> Any:
    """The draft in `folder`, whichever it is. Raises ValueError naming every tensor that is missing or not known."""
    return saved_drafter(folder).load(folder, target)
