"""A tiny target, a recipe for it and a conversations artifact: what stage tests start from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.artifacts import ArtifactRef, ArtifactStore
from storage.schemas import ConversationRow, Message, to_table
from tasks.prepare_target import TargetInfo, prepare_target
from tasks.recipe import Recipe, build_recipe
from tests.tiny_target import make_tiny_target

WORDS = ("hello there", "abc def", "why is the sky blue", "one two three", "tell me more", "zzz")


@dataclass(frozen=True)
class TinyBuild:
    recipe: Recipe
    target: TargetInfo
    store: ArtifactStore
    conversations: ArtifactRef


def tiny_recipe(folder: Path, **overrides: Any) -> Recipe:
    raw: dict[str, Any] = {
        "name": "tiny",
        "target": {"model": str(folder / "target"), "dtype": "float32", "max_model_len": 256},
        "data": {
            "sources": [{"kind": "messages", "uri": "unused"}],
            "max_prompt_tokens": 80,
            "max_tokens": 160,
            "max_turns": 2,
        },
        "responses": {
            "engine": "huggingface",
            "max_new_tokens": 16,
            "heldout_max_new_tokens": 12,
            "greedy_share": 0.5,
            "part_size": 4,
            "max_num_seqs": 8,
        },
        "features": {"engine": "huggingface", "dtype": "float32", "teacher_k": 8},
        "vllm": {"memory_share": 0.3, "kv_cache_gb": 1, "enforce_eager": True, "engines": 1},
        "store": {"uri": str(folder / "store")},
    }
    return build_recipe(raw, overrides)


def tiny_build(folder: Path, train: int = 10, heldout: int = 3, **overrides: Any) -> TinyBuild:
    """Make everything under `folder`; a target that is there is used again."""
    if not (folder / "target" / "config.json").is_file():
        make_tiny_target(folder / "target")
    recipe = tiny_recipe(folder, **overrides)
    store = ArtifactStore(recipe.store.uri)
    rows = [_conversation(i, "train" if i < train else "heldout") for i in range(train + heldout)]
    with store.writer("conversations", "c0", stage="test", stage_version=1, parameters={}) as writer:
        writer.write_table("part-00000.parquet", to_table(ConversationRow, rows))
        ref = writer.commit({})
    return TinyBuild(recipe, prepare_target(recipe), store, ref)


def _conversation(i: int, split: str) -> ConversationRow:
    turns = ["user"] if i % 3 else ["user", "assistant", "user"]
    messages = tuple(Message(role, f"{WORDS[(i + n) % len(WORDS)]} {i}") for n, role in enumerate(turns))
    return ConversationRow(f"c/{i}", "test", split, "", messages)
