"""What a window costs in time, before it is paid for.

In: a recipe with a window, tokens, epochs. Out: seconds of extraction, every fill's start included.
"""

from __future__ import annotations

import math

from tasks.engines.pool import engine_count
from tasks.engines.rates import START_SECONDS, engine_seconds
from tasks.extract_features import feature_spec
from tasks.prepare_target import TargetInfo
from tasks.recipe import Recipe

TRAINER_START_SECONDS = 20.0


def fill_count(recipe: Recipe, target: TargetInfo, tokens: float, epochs: float) -> int:
    """How often the window is filled: once where it holds everything."""
    each = tokens * feature_spec(recipe, target).bytes_per_token / ((recipe.store.window_gb or math.inf) * 1e9)
    return 1 if each <= 1 else math.ceil(each * epochs)


def streaming_seconds(recipe: Recipe, target: TargetInfo, tokens: float, epochs: float) -> float:
    """Seconds that extraction adds to a training over `tokens` (with epochs down to a share of one)."""
    fills = fill_count(recipe, target, tokens, epochs)
    reading = engine_seconds(recipe, target, engine_count(recipe, target, 64), tokens * (epochs if fills > 1 else 1.0))
    return reading + (fills - 1) * (START_SECONDS + TRAINER_START_SECONDS)
