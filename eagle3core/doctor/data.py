"""Is the data what the target says it is: its own text, under the right mask, with the features it asks for?

In: a `Patient`. Out: `Finding`s.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3core.batch import Document, TopKTeacher
from eagle3core.doctor.patient import Finding, Patient

LEAST_COVERAGE = 0.8  # share of the text that the draft vocabulary can say
SAME = 1e-2  # relative difference up to which features count as equal


def text_findings(patient: Patient) -> list[Finding]:
    """Did the target write the supervised tokens, are they the right ones, and can the draft say them?"""
    found = []
    hits, expected, spread = (sum(column) for column in zip(*map(_agreement, patient.documents), strict=True))
    tokens = sum(int(document.supervised[1:].sum()) for document in patient.documents)
    greedy = patient.temperature == 0
    short = hits < 0.95 * tokens if greedy else expected - hits > 4 * spread**0.5 + 0.02 * tokens
    if short and (greedy or patient.temperature == 1):
        due = "all of them" if greedy else f"{expected / tokens:.1%}"
        text = f"{hits / tokens:.1%} of the supervised tokens are the target's likeliest, {due} should be"
        found.append(
            Finding("other-text", text, "let this target write the answers; look at the loss mask's edges")
        )
    known = patient.draft.t2d.cpu()
    said = sum(int(known[d.token_ids[d.supervised].long()].sum()) for d in patient.documents)
    total = sum(int(document.supervised.sum()) for document in patient.documents)
    if said < LEAST_COVERAGE * total:
        text = f"the draft vocabulary holds {said / total:.1%} of the supervised tokens"
        found.append(Finding("other-vocabulary", text, "build the vocabulary map from this data's answers"))
    return mask_findings(patient) + found


def mask_findings(patient: Patient) -> list[Finding]:
    """Every answer begins right behind the template's own last tokens."""
    if patient.before_answer is None:
        return []
    tail, late = patient.before_answer, []
    for document in patient.documents:
        starts = (document.supervised[1:] & ~document.supervised[:-1]).nonzero().flatten() + 1
        for start in starts.tolist():
            for offset in range(-4, 5):
                end = start - offset
                if end >= len(tail) and torch.equal(document.token_ids[end - len(tail) : end], tail):
                    late.append(offset)
                    break
    wrong = [offset for offset in late if offset]
    if not wrong:
        return []
    side = "late" if wrong[0] > 0 else "early"
    text = f"{len(wrong)} of {len(late)} answers begin {abs(wrong[0])} tokens {side} in the loss mask"
    return [Finding("mask-shifted", text, "supervise from the first token behind the generation prompt")]


def _agreement(document: Document) -> tuple[float, float, float]:
    """Supervised tokens that are the teacher's argmax; how many should be where the text is sampled at 1;
    variance.
    """
    if not isinstance(document.teacher, TopKTeacher):
        return float(document.supervised[1:].sum()), 0.0, 0.0  # a hidden state alone does not tell
    rows = document.supervised[1:]
    hit = document.teacher.ids[:, 0].long() == document.token_ids[1:]
    best = document.teacher.log_probs[:, 0].float().exp()
    return float(hit[rows].sum()), float(best[rows].sum()), float((best * (1 - best))[rows].sum())


def feature_findings(patient: Patient) -> list[Finding]:
    """The stored features beside the target's own, captured again: alone, and in one padded batch."""
    ids = patient.draft.config.layer_ids
    documents = patient.documents[:4]
    texts = [document.token_ids for document in documents]
    alone = [patient.capture([text], ids)[0] for text in texts]
    together = patient.capture(texts, ids)
    stored = [document.features.float() for document in documents]
    if not all(_equal(one, other) for one, other in zip(alone, together, strict=True)):
        text = "a text's hidden states change with what else is in the batch"
        return [Finding("batch-padding", text, "look at padding side, position ids and attention mask")]
    if all(_equal(one, other) for one, other in zip(stored, alone, strict=True)):
        return []
    for shift in (-1, 1):
        rolled = [states.roll(shift, 0)[1:-1] for states in alone]
        if all(_equal(one[1:-1], other) for one, other in zip(stored, rolled, strict=True)):
            text = f"stored rows are the target's shifted by {shift:+d}: row t is the state after token t"
            return [Finding("time-offset", text, "extract the features again")]
    for shift, other_ids in neighbours(ids, patient.target_config["num_hidden_layers"]):
        moved = [patient.capture([text], other_ids)[0] for text in texts]
        if all(_equal(one, other) for one, other in zip(stored, moved, strict=True)):
            text = f"stored features are those of layer ids {other_ids}, the config says {ids} ({shift:+d})"
            return [Finding("layer-ids-stored", text, "number layers everywhere as HF's hidden_states")]
    text = "stored features are not this target's at any neighbouring layer or row"
    return [Finding("other-features", text, "extract them again from this target")]


def _equal(one: Tensor, other: Tensor) -> bool:
    # Massive activations make absolute tolerances meaningless: the norm of the difference over the norm.
    return bool((one.float() - other.float()).norm() <= SAME * other.float().norm())


def neighbours(ids: tuple[int, int, int], layers: int) -> list[tuple[int, tuple[int, int, int]]]:
    """The same ids one lower and one higher, with the shift, where the target has such states."""
    moved = [(shift, tuple(layer + shift for layer in ids)) for shift in (-1, 1)]
    return [(shift, other) for shift, other in moved if min(other) >= 0 and max(other) <= layers]
