"""What a build will take, before it is paid for: statistics of the prompts; tokens, disk and hours of every
stage.

In: a recipe. Out: the lines that `make plan` prints. Makes the conversations where they are not there yet (a
CPU and a tokenizer do), and nothing else.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from storage.artifacts import ArtifactStore
from tasks import prepare_conversations
from tasks.devices import cuda_devices
from tasks.engines.pool import engine_count
from tasks.engines.rates import engine_seconds
from tasks.extract_features import feature_spec, made_by_responses
from tasks.prepare_target import TargetInfo
from tasks.processes import cores
from tasks.recipe import Recipe
from tasks.stage_task import duration
from tasks.statistics import SourceStatistics, source_statistics
from tasks.streaming.costs import streaming_seconds
from tasks.templates import Template
from tasks.train_draft import CPU_RATE, GPU_RATE, multiply_adds

# Share of the new-token limit that an answer fills: SmolLM2 at a limit of 160 fills 0.85, and longer limits
# less.
FILLED_SHARE = 0.8
RESPONSE_BYTES_PER_TOKEN = 8  # ids as int32 and the text beside them
GIB = 1024**3


@dataclass(frozen=True)
class Expected:
    """One stage: what it will read or write, and how long that takes. bytes: on disk, in its artifact."""

    stage: str
    tokens: float
    bytes: float
    seconds: float


def page(recipe: Recipe, target: TargetInfo, store: ArtifactStore) -> list[str]:
    """The recipe's sources and its later stages, counted. Raises what making the conversations raises."""
    conversations = prepare_conversations.run(recipe, target, store)
    statistics = source_statistics(store, conversations, Template.load(target), recipe.data.max_tokens)
    return lines(recipe, target, statistics, _free(store))


def feature_bytes_per_token(recipe: Recipe, target: TargetInfo) -> int:
    """Bytes that one token takes in the features artifact: the states and the teacher."""
    return feature_spec(recipe, target).bytes_per_token


def expect(recipe: Recipe, target: TargetInfo, statistics: Sequence[SourceStatistics]) -> list[Expected]:
    """What every stage after the conversations will take.

    tokens: for responses, read and written by the target; for features, stored; for training, supervised and
    passed.
    """
    per_turn = recipe.responses.max_new_tokens * FILLED_SHARE
    heldout_turn = recipe.responses.heldout_max_new_tokens * FILLED_SHARE
    stored = learnt = worked = 0.0
    for each in statistics:
        prompt = each.tokens_per_prompt
        turns = each.user_turns / max(1, each.train + each.heldout)
        # Later turns' prompts are about as long as the first; what does not fit is cut.
        sample = min(recipe.data.max_tokens, turns * (prompt + per_turn))
        heldout = each.heldout * len(recipe.responses.heldout_temperatures)
        stored += each.train * sample + heldout * min(recipe.data.max_tokens, turns * (prompt + heldout_turn))
        learnt += each.train * min(turns * per_turn, sample * per_turn / (prompt + per_turn))
        worked += (each.train + heldout) * sample * (turns + 1) / 2
    engines = engine_count(recipe, target, 64)
    answering = engine_seconds(recipe, target, engines, worked)
    capturing = 0.0 if made_by_responses(recipe) else engine_seconds(recipe, target, engines, stored)
    size = stored * feature_bytes_per_token(recipe, target)
    if recipe.store.window_gb is not None:
        capturing = streaming_seconds(recipe, target, stored, recipe.training.epochs)
        size = min(size, 1e9 * recipe.store.window_gb)
    passed = learnt * recipe.training.epochs
    # The draft's weights, its optimizer's two moments and master copy in fp32, for two checkpoints and the
    # result.
    draft_bytes = multiply_adds(target, min(recipe.vocabulary.size, target.vocab_size)) / 3 * 4 * (2 * 3 + 1)
    return [
        Expected("make-responses", worked, stored * RESPONSE_BYTES_PER_TOKEN, answering),
        Expected("extract-features", stored, size, capturing),
        Expected("train-draft", passed, draft_bytes, _training_seconds(recipe, target, passed)),
    ]


def _training_seconds(recipe: Recipe, target: TargetInfo, passed: float) -> float:
    training = recipe.training
    threads = training.threads or cores()
    rate = cuda_devices() * GPU_RATE or threads * CPU_RATE
    size = min(recipe.vocabulary.size, target.vocab_size)
    seconds = passed * training.ttt_steps * multiply_adds(target, size) / rate
    if training.max_cpu_minutes is not None and not cuda_devices():
        seconds = min(seconds, 60 * training.max_cpu_minutes / threads)
    return seconds


def lines(recipe: Recipe, target: TargetInfo, statistics: Sequence[SourceStatistics], free: int) -> list[str]:
    """The page: a table of sources, a table of stages, and a warning where the disk (`free` bytes) is too
    small.
    """
    found = [
        f"{'source':<22}{'rows':>9}{'train':>9}{'heldout':>9}"
        f"{'turns':>7}{'prompt':>8}{'learnt':>8}{'cut':>6}  scripts"
    ]
    for each in statistics:
        turns = each.user_turns / max(1, each.train + each.heldout)
        found.append(
            f"{each.source[-21:]:<22}{each.rows:>9,}{each.train:>9,}{each.heldout:>9,}{turns:>7.1f}"
            f"{each.tokens_per_prompt:>8.0f}{each.supervised_share:>8.0%}{each.truncated_share:>6.0%}  "
            + ", ".join(
                f"{name} {count / each.scripts.total():.0%}" for name, count in each.scripts.most_common(3)
            )
        )
        refused = ", ".join(
            f"{reason} {count:,}" for reason, count in sorted(each.refused.items(), key=lambda pair: -pair[1])
        )
        found.append(f"  refused: {refused or 'none'}")
    found += ["  prompt: mean tokens; learnt and cut: of the data's own answers", ""]
    stages = expect(recipe, target, statistics)
    found.append(f"{'stage':<22}{'tokens':>12}{'disk':>12}{'time':>16}")
    found += [f"{s.stage:<22}{s.tokens:>12,.0f}{_size(s.bytes):>12}{duration(s.seconds):>16}" for s in stages]
    needed = sum(stage.bytes for stage in stages)
    found.append(f"features: {feature_bytes_per_token(recipe, target):,} bytes a token")
    found.append(f"disk: {_size(needed)} needed in {recipe.store.uri}, {_size(free)} free")
    if needed > free:
        found.append(
            "not enough room: set store.window_gb, point store.uri elsewhere, or lower a source's limit"
        )
    return found


def _size(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 1024**2:.0f} MiB"


def _free(store: ArtifactStore) -> int:
    folder = store.root
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
