"""Look at samples as a trainer sees them: tokens that are learnt in colour, everything else plain.

In: a recipe's responses, or its conversations as the template renders them. Out: text on the console.
`python -m tasks.view_sample smollm2-135m [--kind responses] [--count 3] [--split train] [--id ID] [--tokens]`
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from storage.artifacts import ArtifactRef, ArtifactStore
from storage.errors import StorageError
from storage.schemas import ConversationRow, ResponseRow, read_rows
from tasks.prepare_target import prepare_target
from tasks.recipe import RecipeError, load_recipe
from tasks.target_checks import TargetError
from tasks.templates import Span, Template, TemplateError

SUPERVISED, SEAM, PLAIN = "\x1b[30;42m", "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True)
class Shown:
    """One sample: a line about it, its token ids, the [start, end) spans that are learnt."""

    title: str
    token_ids: Sequence[int]
    spans: Sequence[Span]


def paint(
    shown: Shown, decode: Callable[[Sequence[int]], str], tokens: bool = False, colour: bool = True
) -> str:
    """The sample's text, its spans between colour codes, or between ⟦ and ⟧ where colour is not wanted.

    tokens: draw a bar between tokens, so that one can see where they begin.
    """
    before, after = (SUPERVISED, PLAIN) if colour else ("⟦", "⟧")

    def text(start: int, end: int) -> str:
        if not tokens:
            return decode(shown.token_ids[start:end])
        return "│".join(decode([token]) for token in shown.token_ids[start:end])

    pieces: list[str] = []
    at = 0
    for start, end in shown.spans:
        pieces += [text(at, start), before, text(start, end), after]
        at = end
    pieces.append(text(at, len(shown.token_ids)))
    learnt = sum(end - start for start, end in shown.spans)
    head = f"── {shown.title}: {len(shown.token_ids)} tokens, {learnt} learnt ──"
    return f"{SEAM}{head}{PLAIN}\n{''.join(pieces)}" if colour else f"{head}\n{''.join(pieces)}"


def responses(store: ArtifactStore, ref: ArtifactRef) -> Iterator[tuple[str, str, Shown]]:
    """(id, split, sample) of a responses artifact."""
    for row in read_rows(ResponseRow, store.local(ref)):
        title = f"{row.id} · {row.source} · {row.split} · T={row.temperature:g} · {row.finish_reason}"
        yield row.id, row.split, Shown(title, row.token_ids, [(span.start, span.end) for span in row.spans])


def conversations(
    store: ArtifactStore, ref: ArtifactRef, template: Template
) -> Iterator[tuple[str, str, Shown]]:
    """(id, split, sample) of a conversations artifact, with the data's own answers where they end a dialogue.
    """
    for row in read_rows(ConversationRow, store.local(ref)):
        messages = [vars(message) for message in row.messages]
        try:
            render = template.conversation if messages[-1]["role"] == "assistant" else template.prompt
            rendered = render(messages)
        except TemplateError as error:
            yield row.id, row.split, Shown(f"{row.id}: {error}", [], [])
            continue
        left_out = f" · answers not shown as written: {len(rendered.left_out)}" if rendered.left_out else ""
        title = f"{row.id} · {row.source} · {row.split} · {row.category}{left_out}"
        yield row.id, row.split, Shown(title, rendered.token_ids, rendered.spans)


def main(
    recipe: Annotated[str, typer.Argument(help="A recipe's name or file")] = "smollm2-135m",
    kind: Annotated[str, typer.Option(help="responses, or conversations")] = "responses",
    count: Annotated[int, typer.Option(min=1)] = 3,
    split: Annotated[str, typer.Option(help="train or heldout; both where empty")] = "",
    identity: Annotated[str, typer.Option("--id", help="Show the sample with this id")] = "",
    tokens: Annotated[bool, typer.Option(help="Draw a bar between tokens")] = False,
    store: Annotated[str, typer.Option(help="Store, where it is not the recipe's")] = "",
) -> None:
    """Print some samples of the newest artifact of a recipe's store."""
    try:
        loaded = load_recipe(recipe, {"store.uri": store} if store else None)
        target, artifacts = prepare_target(loaded), ArtifactStore(loaded.store.uri)
        template = Template.load(target)
        found = _newest(artifacts, kind, target.identity()["chat_template"])
        rows = (
            responses(artifacts, found) if kind == "responses" else conversations(artifacts, found, template)
        )
        chosen = ((name, shown) for name, of, shown in rows if not split or of == split)
        wanted = (shown for name, shown in chosen if not identity or name == identity)
        for shown in itertools.islice(wanted, count):
            print(paint(shown, template.decode, tokens, colour=sys.stdout.isatty()), end="\n\n")
    except (RecipeError, TargetError, StorageError, LookupError) as error:
        sys.exit(f"view_sample: {error.args[0]}")


def _newest(store: ArtifactStore, kind: str, template_hash: str) -> ArtifactRef:
    """The newest artifact of this kind that was made with the target's chat template."""
    if kind not in {"responses", "conversations"}:
        raise LookupError(f"kind {kind!r}: it is responses or conversations")
    for manifest in store.manifests(kind):
        if manifest.parameters.get("chat_template", template_hash) == template_hash:
            return manifest.ref
    raise LookupError(f"no {kind} in {store.uri} yet: `make regenerate-data` makes them")


if __name__ == "__main__":
    typer.run(main)
