"""A whole build in seconds: a tiny random target, some prompts, a recipe over both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tasks.recipe import Recipe, load_recipe
from tests.tiny_target import make_tiny_target

TOPICS = (
    "rain",
    "bread",
    "maps",
    "clocks",
    "rivers",
    "chess",
    "paint",
    "sleep",
    "wool",
    "salt",
    "moss",
    "ice",
)
WAYS = ("what is {}", "why is there {}", "tell me of {} and more")


def write_tiny_recipe(folder: Path, **changes: Any) -> Path:
    """`folder`/tiny.yaml, with target and prompts beside it; `changes` are dotted keys."""
    if not (folder / "target").exists():
        make_tiny_target(folder / "target")
        rows = [
            {"id": f"q{i}-{j}", "prompt": way.format(topic)}
            for i, topic in enumerate(TOPICS)
            for j, way in enumerate(WAYS)
        ]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw: dict[str, Any] = {
        "name": "tiny",
        "target": {"model": str(folder / "target"), "dtype": "float32", "max_model_len": 256},
        "data": {
            "sources": [{"kind": "prompts", "uri": str(folder / "prompts.jsonl")}],
            "heldout": 6,
            "max_prompt_tokens": 80,
            "max_tokens": 160,
            "max_turns": 1,
        },
        "responses": {
            "engine": "huggingface",
            "max_new_tokens": 24,
            "heldout_max_new_tokens": 16,
            "greedy_share": 0.5,
            "part_size": 8,
            "max_num_seqs": 8,
        },
        "features": {"engine": "huggingface", "dtype": "float32", "teacher_k": 8},
        "vocabulary": {"size": 256},
        "training": {
            "ttt_steps": 2,
            "max_steps": 8,
            "epochs": 4,
            "tokens_per_batch": 256,
            "lr": 1e-3,
            "checkpoint_every": 2,
            "evaluate_every": 4,
            "threads": 1,
        },
        "evaluation": {"chain_length": 3, "bootstrap": 50},
        "serving": {"enabled": False},
        "store": {"uri": str(folder / "store")},
        "tracking": {"uri": f"sqlite:///{folder}/mlflow.db", "artifacts": str(folder / "mlartifacts")},
    }
    for key, value in changes.items():
        section, name = key.split(".")
        raw[section][name] = value
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def tiny_recipe(folder: Path, **changes: Any) -> Recipe:
    return load_recipe(str(write_tiny_recipe(folder, **changes)))
