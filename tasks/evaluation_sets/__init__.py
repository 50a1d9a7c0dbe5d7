"""Prompts that drafts are measured on: the published sets from a file or a hub, and a starter set that ships here.

In: a recipe's `EvaluationSet`s. Out: prompts keyed by (set, id), and the held-out conversations they become.
"""

from tasks.evaluation_sets.heldout import HeldoutSets, expected_heldout, heldout_sets
from tasks.evaluation_sets.read import EvaluationPrompt, LoadedSet, load_set, set_identity
from tasks.evaluation_sets.shapes import EvaluationSetError

__all__ = [
    "EvaluationPrompt",
    "EvaluationSetError",
    "HeldoutSets",
    "LoadedSet",
    "expected_heldout",
    "heldout_sets",
    "load_set",
    "set_identity",
]
