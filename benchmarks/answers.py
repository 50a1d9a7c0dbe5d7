"""How fast the target answers here, what capturing its states costs, and what a second engine brings.

In: a target's Hugging Face folder (--target; a tiny random Llama on a quick run). Out: a table of engine
starts and tokens per second beside the floor, the time that the target's matrix products alone take on as
many cores.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import Column, arguments, print_table, time_beside_gemm, write_results
from tasks.engines.pool import EngineRun, Part, run_engines
from tasks.engines.rates import parameter_count
from tasks.engines.requests import CaptureOptions, Job, job_seed
from tasks.extract_features import capture_options
from tasks.prepare_target import TargetInfo, prepare_target
from tasks.recipe import Recipe, build_recipe

SUBJECTS = ("the sea", "a clock", "prime numbers", "tea", "an old bridge", "bees", "a lost key", "winter")
COLUMNS = [
    Column("engine", "name"),
    Column("engines", "engines"),
    Column("start s", "start", "{:.1f}"),
    Column("tokens read", "read", "{:,}"),
    Column("written", "written", "{:,}"),
    Column("work s", "work", "{:.1f}"),
    Column("written/s", "rate", "{:.1f}"),
    Column("floor s", "floor", "{:.1f}"),
    Column("x floor", "ratio", "{:.2f}"),
]


def recipe_for(target: Path, engines: int, answers: int, tokens: int) -> Recipe:
    return build_recipe(
        {
            "name": "benchmark",
            "target": {"model": str(target), "dtype": "float32", "max_model_len": 512},
            "data": {
                "sources": [{"kind": "messages", "uri": "-"}], "max_prompt_tokens": 200, "max_tokens": 400
            },
            "responses": {"max_new_tokens": tokens, "max_num_seqs": min(96, answers)},
            "features": {"dtype": "float32"},
            "vllm": {"engines": engines, "memory_share": 0.3, "kv_cache_gb": 2, "enforce_eager": True},
        }
    )


def jobs_for(answers: int, tokens: int) -> list[Job]:
    """Short questions, half of them answered greedily; one part for every 8."""
    subjects = [SUBJECTS[i % len(SUBJECTS)] for i in range(answers)]
    texts = [f"Tell me about {subject}, in {3 + i % 5} sentences." for i, subject in enumerate(subjects)]
    return [
        Job(f"j{i}", i // 8, [{"role": "user", "content": text}], float(i % 2), tokens, job_seed(0, i))
        for i, text in enumerate(texts)
    ]


def measure(
    recipe: Recipe, target: TargetInfo, jobs: list[Job], capture: CaptureOptions | None
) -> dict[str, Any]:
    """One run, and the matrix products' rate of one core sampled before and after it."""
    sizes: list[int] = []

    def on_part(part: Part) -> None:
        sizes.extend(len(sample.token_ids) for sample in part.samples)

    runs: list[EngineRun] = []

    def answer() -> None:
        with tempfile.TemporaryDirectory() as folder:
            place = {"folder": Path(folder), "on_part": on_part}
            runs.append(run_engines(recipe, target, jobs, engine="vllm", capture=capture, **place))

    rate = time_beside_gemm(answer, repeats=1, warm_up=0).gemm_rate
    took = runs[0]
    floor = 2 * parameter_count(target) * sum(sizes) / (rate * took.engines)
    return {
        "name": "vllm, states captured" if capture else "vllm",
        "engines": took.engines,
        "start": took.start_seconds,
        "read": sum(sizes) - took.tokens,
        "written": took.tokens,
        "work": took.work_seconds,
        "rate": took.tokens / took.work_seconds,
        "floor": floor,
        "ratio": took.work_seconds / floor,
    }


def main() -> None:
    parser = arguments("answers", __doc__ or "")
    parser.add_argument("--target", type=Path, help="a Hugging Face folder; needed on a full run")
    parser.add_argument("--answers", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=96)
    options = parser.parse_args()
    if options.quick:
        from tests.tiny_target import make_tiny_target

        options.target = make_tiny_target(Path(tempfile.mkdtemp()) / "target")
        options.answers, options.tokens = 32, 32
    elif options.target is None:
        parser.error("--target is needed, or --quick")
    jobs = jobs_for(options.answers, options.tokens)
    rows = []
    for engines, captures in [(1, True)] if options.quick else [(1, False), (1, True), (2, True)]:
        recipe = recipe_for(options.target, engines, options.answers, options.tokens)
        target = prepare_target(recipe)
        capture = capture_options(recipe, target) if captures else None
        rows.append(measure(recipe, target, jobs, capture))
    print_table(COLUMNS, rows)
    write_results("answers", rows, options)


if __name__ == "__main__":
    main()
