"""The doctor finds each planted fault by name, and says nothing about a good draft."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.planted_faults import FusesItsOwnOutput, KeepsRejected, SeesTooLittle, StaysAtItsPosition, padded
from eagle3core.doctor import Patient, examine, tensor_findings
from eagle3core.draft import Eagle3Draft
from eagle3core.estimate import estimate
from tasks.engines.hf_target import HuggingFaceTarget
from tests.eagle3core import tiny_pair as tiny

TAIL = torch.tensor([60, 61, 62])  # what a chat template puts before every answer
CONFIG_FLAGS = {"fc_norm": True}


class Clinic:
    """One target, its own texts, and drafts trained on them; trained once."""

    def __init__(self) -> None:
        self.target = tiny.make_target()
        self.config = self.target.config.to_dict()
        self.prompts = [torch.cat([prompt, TAIL]) for prompt in tiny.prompts(10, seed=2)]
        self.texts = [tiny.answer(self.target, prompt, 24) for prompt in self.prompts]
        self.draft, self.documents = self.trained(**CONFIG_FLAGS)
        self.capture = HuggingFaceTarget(self.target, self.draft.config.layer_ids).capture

    def documents_for(self, draft: Eagle3Draft):
        pairs = zip(self.prompts, self.texts, strict=True)
        return [tiny.document(self.target, draft, text, len(p), top_k=16) for p, text in pairs]

    def trained(self, change=None, loud: float = 1.0, **flags):
        """A draft that was trained as `flags` say, on features that `change` has changed.

        loud: how much larger than a norm's output its hidden states are; those of real models are.
        """
        draft = tiny.make_draft(self.target, draft_vocab=62, **flags)
        with torch.no_grad():
            draft.fc.weight.mul_(loud)
        documents = self.documents_for(draft)
        tiny.fit(draft, change(documents) if change else documents, None, 3, 40)
        return draft, documents

    def patient(self, **changes) -> Patient:
        values = {
            "draft": self.draft,
            "documents": self.documents,
            "capture": self.capture,
            "target_config": self.config,
            "before_answer": TAIL,
        }
        return Patient(**{**values, **changes})


@pytest.fixture(scope="module")
def clinic():
    return Clinic()


def names(patient: Patient) -> list[str]:
    return [finding.name for finding in examine(patient)]


def with_config(draft: Eagle3Draft, **changes) -> Eagle3Draft:
    other = Eagle3Draft(replace(draft.config, **changes))
    other.load_state_dict(draft.state_dict())
    return other


def test_silent_on_a_good_draft(clinic):
    assert examine(clinic.patient()) == []


def test_silent_on_a_good_eagle_3_and_a_good_eagle_31(clinic):
    for flags in ({}, {"fc_norm": True, "norm_output": True}):
        draft, documents = clinic.trained(**flags)
        assert examine(clinic.patient(draft=draft, documents=documents)) == []


def test_findings_say_what_and_what_to_do(clinic):
    (finding,) = examine(clinic.patient(draft=with_config(clinic.draft, rope_theta=77.0)))
    assert "77.0" in finding.text and "10000.0" in finding.text
    assert finding.remedy == "write rope_theta 10000.0"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"rope_theta": 500000.0}, "rope-theta"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope-scaling"),
        ({"max_position_embeddings": 64}, "short-context"),
        ({"layer_ids": (2, 3, 7)}, "layer-ids"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_lost_or_wrong_configuration(clinic, change, name):
    assert names(clinic.patient(draft=with_config(clinic.draft, **change))) == [name]


def test_absolute_ids_in_d2t(clinic):
    draft = with_config(clinic.draft)
    draft.d2t.copy_(clinic.draft.target_ids)
    assert names(clinic.patient(draft=draft)) == ["d2t-absolute"]


def test_a_map_whose_halves_disagree(clinic):
    draft = with_config(clinic.draft)
    draft.t2d.copy_(draft.t2d.roll(1))
    assert names(clinic.patient(draft=draft)) == ["map-disagrees"]


def test_a_head_that_is_not_in_the_file(clinic):
    stored = [name for name in clinic.draft.state_dict() if name != "lm_head.weight"]
    (finding,) = tensor_findings(stored, clinic.draft.config)
    assert finding.name == "missing-lm_head.weight" and "near 1.0" in finding.text
    assert tensor_findings(list(clinic.draft.state_dict()), clinic.draft.config) == []


@pytest.mark.parametrize("shift", [-2, -1, 1, 2])
def test_a_loss_mask_that_is_shifted(clinic, shift):
    shifted = [replace(d, supervised=d.supervised.roll(shift)) for d in clinic.documents]
    assert names(clinic.patient(documents=shifted))[0] == "mask-shifted"


def test_text_that_another_model_wrote(clinic):
    other = tiny.make_target(seed=9)
    texts = [tiny.answer(other, prompt, 24) for prompt in clinic.prompts]
    pairs = zip(clinic.prompts, texts, strict=True)
    documents = [tiny.document(clinic.target, clinic.draft, text, len(p), top_k=16) for p, text in pairs]
    assert "other-text" in names(clinic.patient(documents=documents))


def test_sampled_text_is_not_mistaken_for_another_models(clinic):
    prompts = enumerate(clinic.prompts)
    texts = [tiny.answer(clinic.target, p, 24, temperature=1.0, seed=seed) for seed, p in prompts]
    pairs = zip(clinic.prompts, texts, strict=True)
    documents = [tiny.document(clinic.target, clinic.draft, text, len(p), top_k=16) for p, text in pairs]
    assert "other-text" not in names(clinic.patient(documents=documents, temperature=1.0))
    assert "other-text" in names(clinic.patient(documents=documents, temperature=0.0))


def test_a_vocabulary_map_from_other_data(clinic):
    draft = tiny.make_draft(clinic.target, draft_vocab=20, **CONFIG_FLAGS)
    documents = clinic.documents_for(draft)
    assert names(clinic.patient(draft=draft, documents=documents)) == ["other-vocabulary"]


@pytest.mark.parametrize("shift", [-1, 1])
def test_stored_features_of_the_neighbouring_layers(clinic, shift):
    ids = tuple(layer + shift for layer in clinic.draft.config.layer_ids)
    wrong = [replace(d, features=clinic.capture([d.token_ids], ids)[0]) for d in clinic.documents]
    assert names(clinic.patient(documents=wrong)) == ["layer-ids-stored"]


@pytest.mark.parametrize("shift", [-1, 1])
def test_stored_features_shifted_in_time(clinic, shift):
    wrong = [replace(d, features=d.features.roll(shift, 0)) for d in clinic.documents]
    assert names(clinic.patient(documents=wrong)) == ["time-offset"]


def test_features_of_another_target(clinic):
    wrong = [replace(d, features=torch.randn(d.features.shape)) for d in clinic.documents]
    assert names(clinic.patient(documents=wrong)) == ["other-features"]


def test_hidden_states_that_padding_changes(clinic):
    assert names(clinic.patient(capture=padded(clinic.patient()))) == ["batch-padding"]


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_draft_trained_on_the_neighbouring_layers(clinic, shift):
    ids = tuple(layer + shift for layer in clinic.draft.config.layer_ids)
    draft, documents = clinic.trained(
        lambda documents: [replace(d, features=clinic.capture([d.token_ids], ids)[0]) for d in documents],
        **CONFIG_FLAGS,
    )
    (finding,) = examine(clinic.patient(draft=draft, documents=documents))
    assert finding.name == "layer-ids" and str(ids) in finding.remedy


def test_a_draft_trained_on_rows_one_token_off(clinic):
    draft, documents = clinic.trained(
        lambda documents: [replace(d, features=d.features.roll(1, 0)) for d in documents], **CONFIG_FLAGS
    )
    assert names(clinic.patient(draft=draft, documents=documents)) == ["time-offset"]


@pytest.mark.parametrize("trained_with", [False, True])
def test_the_flag_that_says_what_is_fed_back(clinic, trained_with):
    draft, documents = clinic.trained(loud=8.0, fc_norm=True, norm_output=trained_with)
    wrong = with_config(draft, norm_output=not trained_with)
    assert names(clinic.patient(draft=wrong, documents=documents)) == ["norm-output"]


def test_a_draft_that_says_the_label(clinic, monkeypatch):
    """Everything accepted, whatever else looks right: what a leak, or a server's fallback, looks like."""

    def all_kept(*args, **kwargs):
        honest = estimate(*args, **kwargs)
        kept = torch.arange(3) < honest.anchor.drafted[:, None]
        return replace(honest, anchor=replace(honest.anchor, survived=kept.double()))

    monkeypatch.setattr("eagle3core.doctor.estimate", all_kept)
    assert names(clinic.patient()) == ["too-good"]


def test_a_draft_that_was_never_trained(clinic):
    draft = tiny.make_draft(clinic.target, draft_vocab=62, **CONFIG_FLAGS)
    assert names(clinic.patient(draft=draft)) == ["too-bad"]


@pytest.mark.parametrize(
    ("decoder", "name"),
    [
        (KeepsRejected, "rejected-rows"),
        (FusesItsOwnOutput, "feedback"),
        (StaysAtItsPosition, "feedback"),
        (SeesTooLittle, "committed-rows"),
    ],
    ids=["cache", "fc", "position", "mask"],
)
def test_a_decoder_that_drafts_otherwise_than_training(clinic, decoder, name):
    assert names(clinic.patient(drafter=decoder)) == [name]
