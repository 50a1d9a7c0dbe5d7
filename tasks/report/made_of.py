"""What became of the data on its way to the draft, in sentences: rows that were refused, answers that were cut, servers
that went away.

In: an artifact's manifest. Out: lines for the page; none where the stage has nothing to tell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from storage.manifest import Manifest
from tasks.engines.requests import ServerCount

MOST = 6  # reasons named in one line


def notes(manifest: Manifest) -> tuple[str, ...]:
    """Lines about one artifact, the plainest first."""
    tell = _TELLERS.get(manifest.kind)
    return tuple(tell(manifest.summary)) if tell else ()


def _of_conversations(summary: Mapping[str, Any]) -> list[str]:
    lines = []
    for source in summary.get("sources", ()):
        refused = sum(source["refused"].values())
        line = f"{source['source']}: {source['rows']:,} rows read, {source['sampled']:,} taken"
        line += f"; {source['mended']:,} of them all were mended, {refused:,} refused"
        lines.append(line + _reasons(source["refused"]))
        if source["cut_off"]:
            lines.append(f"{source['source']} ends before its data does: the file was cut off")
    if summary.get("overlaps_evaluation"):
        lines.append(f"{summary['overlaps_evaluation']:,} left because they hold a prompt that is measured")
    return lines


def _of_responses(summary: Mapping[str, Any]) -> list[str]:
    lines = []
    reasons = summary.get("finish_reasons", {})
    if own := reasons.get("given", 0):
        lines.append(f"{own:,} answers are the data's own, {summary['samples'] - own:,} are the target's")
    if summary.get("new_tokens"):
        engines, rate = summary["engines"], summary["tokens_per_second"]
        by = "1 engine" if engines == 1 else f"{engines} engines"
        lines.append(f"{summary['new_tokens']:,} tokens written by {by}, {rate:,.0f} a second")
    cut, ran = reasons.get("length", 0), sum(summary.get("runaway", {}).values())
    if cut or ran:
        lines.append(f"{cut:,} of {summary['samples']:,} answers were cut at their limit, {ran:,} ran away")
    if summary.get("refused"):
        lines.append(f"{summary['refused']:,} prompts got no answer{_reasons(summary['refused_by'])}")
    return lines + [_of_server(ServerCount(**server)) for server in summary.get("servers", ())]


def _reasons(counts: Mapping[str, int]) -> str:
    """Why, the commonest first; nothing where nothing was counted."""
    most = Counter(counts).most_common(MOST)
    named = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in most)
    return f" ({named})" if most else ""


def _of_server(count: ServerCount) -> str:
    line = f"{count.server} answered {count.answered:,}"
    if count.failed:
        line += f"; {count.failed:,} attempts failed there and were asked again ({count.error})"
    if count.times_away:
        times = "once" if count.times_away == 1 else f"{count.times_away} times"
        line += f"; it went away {times} and was {'there' if count.up else 'not there'} at the end"
    return line


_TELLERS: dict[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "conversations": _of_conversations,
    "responses": _of_responses,
}
