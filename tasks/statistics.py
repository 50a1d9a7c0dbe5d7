"""What a person looks at before paying for GPUs: rows, turns, tokens, languages, refusals, by source.

In: a conversations artifact. Out: `SourceStatistics`, one per source, from its rows and its summary.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from storage.artifacts import ArtifactRef, ArtifactStore
from storage.schemas import ConversationRow, read_rows
from tasks.templates import Template, TemplateError

COUNTED = 1000  # rows of a source whose tokens are counted; of the others only turns
LETTERS = 200  # looked at to name a prompt's script


@dataclass
class SourceStatistics:
    """Of one source. Tokens are of the dialogues as the target's template renders them, with the data's own
    answers.

    counted: rows that tokens, supervised and truncated are over. scripts: of the first prompts, by Unicode's
    names.
    """

    source: str
    rows: int = 0
    train: int = 0
    heldout: int = 0
    user_turns: int = 0
    counted: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    supervised: int = 0
    truncated: int = 0
    scripts: Counter[str] = field(default_factory=Counter)
    refused: Mapping[str, int] = field(default_factory=dict)

    @property
    def tokens_per_prompt(self) -> float:
        """Mean tokens of the first prompt, the system prompt and the template's own text included."""
        return self.prompt_tokens / max(1, self.counted)

    @property
    def supervised_share(self) -> float:
        return self.supervised / max(1, self.tokens)

    @property
    def truncated_share(self) -> float:
        return self.truncated / max(1, self.counted)


def source_statistics(
    store: ArtifactStore, conversations: ArtifactRef, template: Template, max_tokens: int
) -> list[SourceStatistics]:
    """One `SourceStatistics` per source, in the recipe's order. `max_tokens` is what samples are cut to."""
    found: dict[str, SourceStatistics] = {}
    for report in store.manifest(conversations).summary["sources"]:
        name = report["source"]
        found[name] = SourceStatistics(name, rows=report["rows"], refused=report["refused"])
    for row in read_rows(ConversationRow, store.local(conversations)):
        statistics = found[row.source]
        statistics.train += row.split == "train"
        statistics.heldout += row.split == "heldout"
        users = [message.content for message in row.messages if message.role == "user"]
        statistics.user_turns += len(users)
        statistics.scripts[script_of(users[0])] += 1
        if statistics.counted < COUNTED:
            _count(statistics, row, template, max_tokens)
    return list(found.values())


def _count(statistics: SourceStatistics, row: ConversationRow, template: Template, max_tokens: int) -> None:
    messages = [vars(message) for message in row.messages]
    first = next(i for i, message in enumerate(messages) if message["role"] == "user")
    try:
        prompt = template.prompt(messages[: first + 1])
        answered = messages[-1]["role"] == "assistant"
        rendered = template.conversation(messages) if answered else template.prompt(messages)
    except TemplateError:
        return
    statistics.counted += 1
    statistics.prompt_tokens += len(prompt.token_ids)
    statistics.truncated += len(rendered.token_ids) > max_tokens
    cut = rendered.cut(max_tokens)
    statistics.tokens += len(cut.token_ids) if cut else min(max_tokens, len(rendered.token_ids))
    statistics.supervised += cut.supervised if cut else 0


def script_of(text: str) -> str:
    """The commonest script among a text's first letters: "latin", "cjk", "cyrillic", ...; "none" where it has
    none.
    """
    letters = [letter for letter in text if letter.isalpha()][:LETTERS]
    names = Counter(unicodedata.name(letter, "other").split()[0].lower() for letter in letters)
    return names.most_common(1)[0][0] if names else "none"
