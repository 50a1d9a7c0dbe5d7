"""Would the draft do better if one thing were read another way? Then that thing is read wrongly now.

In: a `Patient`. Out: at most one `Finding`, the reading that explains most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle3core.batch import Document
from eagle3core.doctor.data import neighbours
from eagle3core.doctor.patient import Finding, Patient
from eagle3core.draft import Eagle3Draft
from eagle3core.packing import Chains, draft_id_table, pack
from eagle3core.teacher import OUTSIDE
from eagle3core.unroll import Unroll

KNOWS = 0.8  # of the loss of a draft that says every token alike: what a trained one is below
CLEAR = 0.02  # nats per token by which another reading must beat the present one,
SURE = 4.0  # and in standard errors of the paired difference


@dataclass(frozen=True)
class _Reading:
    """Another way to feed the same weights. steps: the TTT steps at which it would show."""

    name: str
    text: str
    remedy: str
    draft: Eagle3Draft
    documents: Sequence[Document]
    later: bool = False


def reading_findings(patient: Patient) -> list[Finding]:
    """Feed the draft in the ways that others have got wrong: the way it was trained in fits best."""
    now = _losses(patient, patient.draft, patient.documents)
    chance = math.log(patient.draft.config.draft_vocab_size)
    found = []
    for reading in _readings(patient):
        then = _losses(patient, reading.draft, reading.documents)
        # Step 0 shows how the target's states are read, later steps how the draft's own output is.
        pairs = [(torch.cat(losses[1:]) if reading.later else losses[0]) for losses in (now, then)]
        difference = pairs[0] - pairs[1]
        gain = float(difference.mean())
        sure = gain > SURE * float(difference.std()) / len(difference) ** 0.5
        # Weights that know nothing under any reading prefer one by accident.
        if gain > CLEAR and sure and float(pairs[1].mean()) < KNOWS * chance:
            text = f"{reading.text}: {gain:.2f} nats a token better"
            found.append((gain, Finding(reading.name, text, reading.remedy)))
    # The best other reading is the cause; the rest follow from it.
    return [max(found, key=lambda pair: pair[0])[1]] if found else []


def _readings(patient: Patient) -> list[_Reading]:
    draft, documents = patient.draft, patient.documents
    config = draft.config
    texts = [document.token_ids for document in documents]
    readings = []
    for shift, ids in neighbours(config.layer_ids, patient.target_config["num_hidden_layers"]):
        moved = [
            replace(document, features=patient.capture([text], ids)[0])
            for document, text in zip(documents, texts, strict=True)
        ]
        text = f"fed with layer ids {ids} instead of {config.layer_ids}"
        readings.append(_Reading("layer-ids", text, f"write layer ids {ids} ({shift:+d})", draft, moved))
    for shift, side in ((1, "earlier"), (-1, "later")):
        rolled = [replace(document, features=document.features.roll(shift, 0)) for document in documents]
        text = f"fed with features one token {side}"
        readings.append(_Reading("time-offset", text, "train again on aligned rows", draft, rolled))
    flipped = _with(draft, norm_output=not config.norm_output)
    text = f"with norm_output {not config.norm_output}"
    readings.append(_Reading("norm-output", text, f"write {text[5:]}", flipped, documents, later=True))
    text = f"with fc_norm {not config.fc_norm}"
    readings.append(
        _Reading("fc-norm", text, f"write {text[5:]}", _with(draft, fc_norm=not config.fc_norm), documents)
    )
    return readings


def _with(draft: Eagle3Draft, **flags: bool) -> Eagle3Draft:
    """The same weights under another flag; norms that were not there begin as ones."""
    other = Eagle3Draft(replace(draft.config, **flags)).to(draft.fc.weight.device)
    other.load_state_dict(draft.state_dict(), strict=False)
    return other


@torch.no_grad()
def _losses(
    patient: Patient, draft: Eagle3Draft, documents: Sequence[Document], steps: int = 3
) -> list[Tensor]:
    """Cross-entropy over D of every token of the text that D holds, at each TTT step."""
    ids = draft_id_table(draft.t2d).cpu()
    batch = pack(documents, ids, steps, follow=Chains.SERVED, target_head=patient.target_head)
    if batch is None:
        raise ValueError("the documents hold no supervised text to examine the draft with")
    losses = []
    for step, output in enumerate(Unroll()(draft, batch)):
        labels = ids[batch.tokens[batch.chains[: len(output)] + step + 1]]
        known = labels != OUTSIDE
        losses.append(
            F.cross_entropy(draft.logits(output[known]).float(), labels[known], reduction="none")
        )
    return losses
