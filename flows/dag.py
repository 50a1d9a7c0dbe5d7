"""What runs after what, said once: the flows run it, `make plan` only looks at it.

In: `do(stage, *inputs)`, which runs a stage, finds its artifact, or names it. Out: the artifacts' references.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from storage.artifacts import ArtifactRef
from tasks.build_vocabulary import build_vocabulary
from tasks.check_serving import check_serving
from tasks.evaluate_draft import evaluate_draft
from tasks.experiment.measure_trees import measure_trees
from tasks.extract_features import extract_features
from tasks.make_responses import make_responses
from tasks.prepare_conversations import prepare_conversations
from tasks.publish_draft import publish_draft
from tasks.stage_task import StageTask
from tasks.train_draft import train_draft


class Do(Protocol):
    """One way to get a stage's artifact from its inputs."""

    def __call__(self, stage: StageTask, *inputs: ArtifactRef) -> ArtifactRef: ...


@dataclass(frozen=True)
class Trained:
    """A draft, and what its figures are measured on."""

    responses: ArtifactRef
    features: ArtifactRef
    draft: ArtifactRef


@dataclass(frozen=True)
class Proof:
    """How often the draft is accepted; `serving` is None where the recipe leaves the server out."""

    acceptance: ArtifactRef
    serving: ArtifactRef | None


def answer(do: Do) -> ArtifactRef:
    """The target's own answers to the recipe's prompts."""
    conversations = do(prepare_conversations)
    return do(make_responses, conversations)


def train(do: Do) -> Trained:
    """A trained draft."""
    responses = answer(do)
    features = do(extract_features, responses)
    vocabulary = do(build_vocabulary, responses)
    return Trained(responses, features, do(train_draft, features, vocabulary))


def prove(do: Do, trained: Trained, *, serving: bool) -> Proof:
    """Its acceptance on held-out prompts, and a server's own count of it."""
    acceptance = do(evaluate_draft, trained.draft, trained.features)
    served = do(check_serving, trained.draft, acceptance, trained.responses) if serving else None
    return Proof(acceptance, served)


def measure_tree(do: Do, trained: Trained) -> ArtifactRef:
    """How often the draft's own tree is accepted, and what its drafting costs."""
    return do(measure_trees, trained.draft, trained.features)


def measure(do: Do, *, trees: bool) -> tuple[Trained, Proof, ArtifactRef | None]:
    """What an experiment wants of an arm: a draft, its acceptance, its own tree's where `trees`."""
    trained = train(do)
    return trained, prove(do, trained, serving=False), measure_tree(do, trained) if trees else None


def publish(do: Do, trained: Trained, proof: Proof) -> ArtifactRef:
    """The folder that a server loads, with its model card and report."""
    return do(publish_draft, trained.draft, proof.acceptance, *([proof.serving] if proof.serving else []))
