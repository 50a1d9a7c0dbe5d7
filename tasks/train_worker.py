"""Training in a process of its own, or in one for each GPU: the stored features become `eagle3core`'s
trainer's input.

In: `spec.json` (a `TrainingSpec`). Out: in the spec's folder best/, checkpoint/ and metrics.jsonl, and events
for the parent. Started by `tasks.train_draft`; a run that finds a checkpoint in its folder goes on from it.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from eagle3core.batch import Document
from eagle3core.drafters import DRAFTERS, drafter
from eagle3core.drafters.interface import Draft
from eagle3core.teacher import TargetHead
from eagle3core.trainer import Trainer, TrainingEvent
from eagle3core.training_config import TrainingConfig
from storage.features import FeatureReader
from tasks.build_vocabulary import read_vocabulary
from tasks.documents import FeatureDocuments, SampleReader, split_train
from tasks.prepare_target import TargetInfo
from tasks.processes import cores, emit
from tasks.streaming.rows import StreamedReader
from tasks.target_weights import TargetWeights, read_target_weights
from tasks.train_draft import TrainingSpec

log = logging.getLogger(__name__)


def main(path: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    gpus = torch.cuda.device_count()
    if gpus > 1 and "RANK" not in os.environ:
        # The same process becomes torchrun, so that the parent's hold on it (session, death signal) stays.
        launcher = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={gpus}",
            "-m",
            "tasks.train_worker",
        ]
        os.execv(sys.executable, [sys.executable, *launcher, path])
    spec = TrainingSpec(**json.loads(Path(path).read_text()))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if gpus else torch.device("cpu")
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if gpus else "gloo")
    if gpus:
        torch.cuda.set_device(device)
    train(spec, device)
    if dist.is_initialized():
        dist.destroy_process_group()


def train(spec: TrainingSpec, device: torch.device) -> None:
    """Train to the end, or to the spec's step.

    Raises CheckpointError where the folder holds another run's checkpoint, ValueError for data that cannot be
    trained on.
    """
    config = TrainingConfig.from_mapping(spec.training)
    torch.set_num_threads(config.threads or cores())
    torch.manual_seed(config.seed)
    target = TargetInfo.from_dict(spec.target)
    reader = open_features(spec)
    split = split_train(reader.index, spec.train_share)
    weights = read_target_weights(Path(target.path))
    draft = build_draft(spec, target, reader, weights)
    documents = FeatureDocuments(reader, split.train, draft.config.layer_ids)
    validation = FeatureDocuments(reader, split.validation, draft.config.layer_ids)
    trainer = Trainer(
        draft,
        config,
        documents,
        [document for document in validation if _has_round(document)],
        Path(spec.folder),
        target_head=_target_head(draft, target, reader, weights),
        on_event=_report,
        draft_length=spec.chain_length,
        device=device,
    )
    if trainer.ranks.first:
        log.info("%d documents, %d more to choose the checkpoint by", len(documents), len(validation))
    result = trainer.run(spec.until)
    if trainer.ranks.first:
        emit(
            {
                "kind": "result",
                "steps": result.steps,
                "best_step": result.best_step,
                "best_tau": result.best_tau,
                "best": str(result.best),
                "parameters": sum(p.numel() for p in draft.parameters() if p.requires_grad),
                "documents": len(documents),
                "validation_documents": len(validation),
                "supervised_tokens": sum(documents.supervised_counts),
            }
        )


def open_features(spec: TrainingSpec) -> FeatureReader | StreamedReader:
    """All features, or those that are there while the rest is not."""
    if spec.window:
        return StreamedReader(Path(spec.features), Path(spec.window))
    return FeatureReader(Path(spec.features))


def build_draft(
    spec: TrainingSpec, target: TargetInfo, reader: SampleReader, weights: TargetWeights
) -> Draft:
    """The draft as it starts, of the drafter that the recipe names, over the vocabulary.

    Raises ValueError where features or vocabulary belong to another target.
    """
    vocabulary = torch.from_numpy(read_vocabulary(Path(spec.vocabulary)))
    if reader.spec.target_fingerprint != target.fingerprint:
        raise ValueError(
            f"the features are of target {reader.spec.target_fingerprint}, this one is "
            f"{target.fingerprint}: extract again"
        )
    name = spec.draft["drafter"]
    layers = DRAFTERS[name].layer_ids(target.num_layers, spec.draft.get("layer_ids") or reader.spec.layer_ids)
    return drafter(name).build(weights.parts(target.config), vocabulary, layers, DRAFTERS[name].settings(spec.draft))


def _target_head(
    draft: Draft, target: TargetInfo, reader: SampleReader, weights: TargetWeights
) -> TargetHead | None:
    """Only documents that store hidden states need the target's head to make their distributions."""
    if reader.spec.teacher != "hidden":
        return None
    eps = weights.parts(target.config).config["rms_norm_eps"]
    return TargetHead.build(weights.head, weights.norm, eps, draft.target_ids)


def _has_round(document: Document) -> bool:
    return bool((document.supervised[1:-1] & document.supervised[2:]).any())


def _report(event: TrainingEvent) -> None:
    emit({"kind": event.kind, "step": event.step, "total_steps": event.total_steps, **event.metrics})


if __name__ == "__main__":
    main(sys.argv[1])
