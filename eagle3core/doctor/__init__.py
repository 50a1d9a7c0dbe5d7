"""Why a draft looks wrong: checks that name the cause, silent on a good draft.

In: a `Patient`: a draft, documents as the pipeline feeds them, and the target that can be asked again. Out:
`Finding`s. Four questions, in this order: are the files and config what a server needs; is the data what
the target says it is; does a cache give training's logits; would the draft do better if one thing were read
another way. The traps are those of section 9 of the algorithms.
"""

from __future__ import annotations

from eagle3core.acceptance import Response, summarise
from eagle3core.doctor.cache import incremental_findings
from eagle3core.doctor.data import feature_findings, text_findings
from eagle3core.doctor.files import config_findings, map_findings, tensor_findings
from eagle3core.doctor.patient import Capture, Finding, Patient
from eagle3core.doctor.readings import reading_findings
from eagle3core.estimate import estimate

__all__ = ["Capture", "Finding", "Patient", "examine", "tensor_findings"]

TOO_GOOD = 0.995
TOO_BAD = 0.03


def examine(patient: Patient) -> list[Finding]:
    """Every finding, the surest first; wrong files hide what lies behind them, and so does wrong data."""
    found = config_findings(patient.draft.config, patient.target_config)
    found += map_findings(patient.draft.d2t, patient.draft.t2d)
    if found:
        return found
    found = text_findings(patient) + feature_findings(patient)
    if found:
        return found
    found = incremental_findings(patient.draft, patient.documents[0], patient.drafter)
    found += reading_findings(patient)
    return found or acceptance_findings(patient)


def acceptance_findings(patient: Patient) -> list[Finding]:
    """Figures that no honest draft has."""
    responses = [
        Response(str(index), temperature=patient.temperature) for index in range(len(patient.documents))
    ]
    found = estimate(patient.draft, patient.documents, responses, 3, target_head=patient.target_head)
    survival = [rate.value for rate in summarise(found.anchor, resamples=2).survival if rate.denominator]
    if min(survival) > TOO_GOOD:
        text = f"acceptance is {min(survival):.3f} or more at every position: the label leaks into the draft"
        return [Finding("too-good", text, "compare with a server's counters; look at time offsets and masks")]
    if survival[0] < TOO_BAD:
        text = f"position 1 is accepted {survival[0]:.1%} of the time, and no other reading is better"
        return [Finding("too-bad", text, "train it, or train it longer")]
    return []
