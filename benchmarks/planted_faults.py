"""The doctor before a built draft with one fault planted at a time: does it name each, and is it silent on the draft as
it is?

In: a recipe with a finished build. Out: a table, one line a trap of the field (section 9 of the algorithms); the floor
is the name that each must be given. Decoders that draft wrongly are here too; the tests plant the same ones in a tiny
draft.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.harness import Column, arguments, print_table, write_results
from eagle3core.batch import Document
from eagle3core.decoding.drafter import Drafter
from eagle3core.decoding.target import Block
from eagle3core.doctor import Patient, examine
from eagle3core.draft import Eagle3Draft
from eagle3core.export import load_draft
from storage.artifacts import ArtifactStore
from tasks.engines.hf_target import HuggingFaceTarget
from tasks.examine_draft import PROMPTS, file_findings, patient_of, template_findings
from tasks.prepare_target import TargetInfo, prepare_target
from tasks.recipe import load_recipe
from tasks.templates import Message, Template


class KeepsRejected(Drafter):
    """Drafted rows stay readable as if they had been accepted."""

    def commit(self, features: Tensor, token_ids: Tensor, counts: Tensor) -> None:
        drafted = self._ancestors.shape[1] - 1
        if drafted > 0:
            self._cache.lengths = self._cache.lengths + drafted
        super().commit(features, token_ids, counts)


class FusesItsOwnOutput(Drafter):
    """`fc` applied to the draft's own output."""

    def _next(self, outputs: Tensor) -> Tensor:
        return self._draft.fuse(super()._next(outputs).repeat(1, 1, 3))


class StaysAtItsPosition(Drafter):
    """Every drafted token at the position of the last committed row."""

    def _nodes_block(self, token_ids: Tensor, seen: Tensor, nodes: int) -> Block:
        block = super()._nodes_block(token_ids, seen, nodes)
        return replace(block, positions=block.positions * 0 + self._cache.lengths[:, None] - 1)


class SeesTooLittle(Drafter):
    """A mask that hides the text's first half."""

    def _run(self, hidden: Tensor, block: Block) -> Tensor:
        mask = block.mask.clone()
        half = mask.shape[-1] // 2
        mask[..., :half] &= mask[..., half:].sum(-1, keepdim=True) == 0
        return super()._run(hidden, replace(block, mask=mask))


@dataclass(frozen=True)
class Case:
    """A trap by its number in section 9, what was planted, and the name that the doctor should give it."""

    trap: int | str
    fault: str
    expected: str
    found: Callable[[], Sequence[str]]


class Clinic:
    """One built draft, its target and the answers it is examined on."""

    def __init__(self, recipe_name: str, new_tokens: int, folder: Path) -> None:
        recipe = load_recipe(recipe_name)
        store = ArtifactStore(recipe.store.uri)
        published = store.manifests("published")
        if not published:
            raise SystemExit(f"{store.root} holds no finished draft: run `make build-draft` first")
        self.folder, self.target = folder, prepare_target(recipe)
        self.draft = Path(store.local(published[0].ref))
        self.patient = patient_of(self.draft, self.target, PROMPTS, None, new_tokens)

    def names(self, **changes: Any) -> list[str]:
        """What the doctor says of the patient with some fields changed."""
        return [finding.name for finding in examine(replace(self.patient, **changes))]

    def of_files(self, config: Mapping[str, Any] | None = None, tensors: Callable[[dict], None] = lambda t: None):
        """What it says of the draft's folder with its config or its tensors changed."""

        def found() -> list[str]:
            with tempfile.TemporaryDirectory(dir=self.folder) as place:
                folder = Path(shutil.copytree(self.draft, Path(place) / "draft"))
                stored = load_file(folder / "model.safetensors")
                tensors(stored)
                save_file(stored, folder / "model.safetensors")
                written = json.loads((folder / "config.json").read_text())
                (folder / "config.json").write_text(json.dumps({**written, **(config or {})}))
                missing = file_findings(folder)
                if missing:
                    return [finding.name for finding in missing]
                draft = load_draft(folder, self.patient.draft.embed_tokens.weight.detach()).eval()
                same = draft.config.layer_ids == self.patient.draft.config.layer_ids
                documents = self.patient.documents if same else self.captured(draft.config.layer_ids)
                return self.names(draft=draft, documents=documents)

        return found

    def captured(self, layer_ids: tuple[int, ...]) -> list[Document]:
        """The answers with the target's states at these layers as their features."""
        capture = self.patient.capture
        return [replace(d, features=capture([d.token_ids], layer_ids)[0]) for d in self.patient.documents]

    def config(self, **changes: Any) -> dict[str, Any]:
        """The draft's config as it is written, with some fields changed."""
        return replace(self.patient.draft.config, **changes).to_dict()

    def on_documents(self, change: Callable[[Document], Document]) -> Callable[[], list[str]]:
        return lambda: self.names(documents=[change(document) for document in self.patient.documents])

    def layers(self, shift: int) -> tuple[int, ...]:
        return tuple(layer + shift for layer in self.patient.draft.config.layer_ids)


def cases(clinic: Clinic) -> list[Case]:
    patient = clinic.patient
    config = patient.draft.config
    lower = clinic.layers(-1)
    captured_lower = lambda: clinic.names(documents=clinic.captured(lower))
    other_flag = clinic.config(norm_output=not config.norm_output)
    return [
        Case("-", "none: the draft as it was built", "", clinic.names),
        Case(1, "config with layer ids one too low", "layer-ids", clinic.of_files(clinic.config(layer_ids=lower))),
        Case(1, "features captured one layer too low", "layer-ids-stored", captured_lower),
        Case(1, "features captured one token late", "time-offset", clinic.on_documents(late_features)),
        Case(2, "loss mask two tokens late", "mask-shifted", clinic.on_documents(late_mask)),
        Case(3, "the flag of the normed feedback lost", "norm-output", clinic.of_files(other_flag)),
        Case(4, "fc applied to the draft's own output", "feedback", lambda: clinic.names(drafter=FusesItsOwnOutput)),
        Case(5, "vocabulary map from other data", "other-vocabulary", lambda: clinic.names(draft=other_map(clinic))),
        Case(6, "d2t as absolute ids", "d2t-absolute", clinic.of_files(tensors=absolute_ids)),
        Case(7, "rope_theta lost on export", "rope-theta", clinic.of_files({"rope_theta": 10_000.0 + config.rope_theta})),
        Case(7, "rope scaling invented", "rope-scaling", clinic.of_files({"rope_scaling": SCALING})),
        Case(8, "no lm_head in the file", "missing-lm_head.weight", clinic.of_files(tensors=without_head)),
        Case(9, "padding on the left, without a mask", "batch-padding", lambda: clinic.names(capture=padded(patient))),
        Case(10, "template that drops earlier turns", "template-round-trip", lambda: of_template(clinic.target)),
        Case(11, "cache that keeps rejected rows", "rejected-rows", lambda: clinic.names(drafter=KeepsRejected)),
        Case(14, "max_position_embeddings of 128", "short-context", clinic.of_files({"max_position_embeddings": 128})),
        Case(15, "text that the target did not write", "other-text", lambda: clinic.names(documents=strangers(clinic))),
        Case("-", "drafted tokens that stay at one position", "feedback", lambda: clinic.names(drafter=StaysAtItsPosition)),
        Case("-", "mask that hides the text's first half", "committed-rows", lambda: clinic.names(drafter=SeesTooLittle)),
    ]  # fmt: skip


SCALING = {"rope_type": "linear", "factor": 2.0}


def late_features(document: Document) -> Document:
    return replace(document, features=document.features.roll(1, 0))


def late_mask(document: Document) -> Document:
    return replace(document, supervised=document.supervised.roll(2))


def absolute_ids(tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def without_head(tensors: dict[str, Tensor]) -> None:
    del tensors["lm_head.weight"]


def other_map(clinic: Clinic) -> Eagle3Draft:
    """The same weights under the map of a corpus that uses the tokenizer's rarest ids."""
    draft = Eagle3Draft(clinic.patient.draft.config)
    draft.load_state_dict(clinic.patient.draft.state_dict())
    draft.set_vocabulary(torch.arange(draft.config.vocab_size)[-draft.config.draft_vocab_size :])
    return draft.eval()


def padded(patient: Patient) -> Callable[..., list[Tensor]]:
    def capture(texts: Sequence[Tensor], ids: tuple[int, int, int]) -> list[Tensor]:
        longest = max(len(text) for text in texts)
        whole = [torch.cat([torch.zeros(longest - len(t), dtype=torch.int64), t.long()]) for t in texts]
        parts = patient.capture(whole, ids)
        return [part[longest - len(text) :] for part, text in zip(parts, texts, strict=True)]

    return capture


class LastTurnOnly:
    """A template that forgets what was said before."""

    def __init__(self, template: Template) -> None:
        self._template = template

    def prompt(self, messages: Sequence[Message]) -> Any:
        return self._template.prompt(messages[-1:])


def of_template(target: TargetInfo) -> list[str]:
    return [finding.name for finding in template_findings(LastTurnOnly(Template.load(target)), PROMPTS)]


def strangers(clinic: Clinic) -> list[Document]:
    """Every prompt with the next one's answer."""
    decoder = HuggingFaceTarget.load(Path(clinic.target.path), clinic.patient.draft.config.layer_ids, torch.float32)
    documents = clinic.patient.documents
    answers = [document.token_ids[document.supervised] for document in documents]
    prompts = [document.token_ids[~document.supervised] for document in documents]
    return [
        decoder.document(prompt, answer, "stranger")
        for prompt, answer in zip(prompts, answers[1:] + answers[:1], strict=True)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments("planted_faults", __doc__.splitlines()[0])
    parser.add_argument("--recipe", default="smollm2-135m", help="a recipe that was built")
    options = parser.parse_args(argv)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        clinic = Clinic(options.recipe, 24 if options.quick else 64, Path(folder))
        every = cases(clinic)
        for case in every[:5] if options.quick else every:
            start = time.process_time()
            names = list(case.found())
            right = case.expected in names if case.expected else not names
            rows.append(
                {
                    "trap": case.trap, "fault": case.fault, "expected": case.expected or "silence",
                    "said": ", ".join(names) or "nothing", "right": "yes" if right else "NO",
                    "seconds": time.process_time() - start,
                }
            )  # fmt: skip
    print_table(COLUMNS, rows)
    print(f"{sum(row['right'] == 'yes' for row in rows)} of {len(rows)} as they should be")
    write_results("planted_faults", rows, options)


COLUMNS = [
    Column("trap", "trap"), Column("planted", "fault"), Column("should say (floor)", "expected"),
    Column("said", "said"), Column("right", "right"), Column("CPU s", "seconds", "{:.1f}"),
]  # fmt: skip

if __name__ == "__main__":
    main()
