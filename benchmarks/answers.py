"""How fast the target answers: our feeding of vLLM beside vLLM's own, what capturing costs, what a second engine brings.

In: a target's Hugging Face folder (--target; a tiny random Llama on a quick run). Out: a table of new tokens per
second. `x vLLM` is the rate over that of vLLM's own offline `generate`, which answers the same prompts with the
same settings in the same engine, in turns with ours; the floor is the time of the target's matrix products alone.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import Column, arguments, in_new_process, print_table, time_beside_gemm, write_results
from tasks.engines.pool import EngineRun, Part, engine_options, environment, run_engines, target_files
from tasks.engines.rates import parameter_count
from tasks.engines.requests import Job, WorkerSpec, job_seed
from tasks.extract_features import capture_options
from tasks.prepare_target import TargetInfo, prepare_target
from tasks.recipe import Recipe, build_recipe

SUBJECTS = ("the sea", "a clock", "prime numbers", "tea", "an old bridge", "bees", "a lost key", "winter")
OFFLINE, OURS = "vllm generate", "the worker"
COLUMNS = [
    Column("what answers", "name"),
    Column("engines", "engines"),
    Column("start s", "start", "{:.1f}"),
    Column("tokens read", "read", "{:,}"),
    Column("written", "written", "{:,}"),
    Column("work s", "work", "{:.1f}"),
    Column("written/s", "rate", "{:.1f}"),
    Column("x vLLM", "of_vllm", "{:.3f}"),
    Column("written/CPU s", "cpu_rate", "{:.1f}"),
    Column("x vLLM", "cpu_of_vllm", "{:.3f}"),
    Column("x floor", "ratio", "{:.2f}"),
]


def recipe_for(target: Path, engines: int, options: argparse.Namespace) -> Recipe:
    return build_recipe(
        {
            "name": "benchmark",
            "target": {"model": str(target), "dtype": "float32", "max_model_len": 512},
            "data": {"sources": [{"kind": "messages", "uri": "-"}], "max_prompt_tokens": 200, "max_tokens": 400},
            "responses": {"max_new_tokens": options.tokens, "max_num_seqs": options.in_flight},
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


def beside_vllm(recipe: Recipe, target: TargetInfo, jobs: list[Job], rounds: int) -> list[dict[str, Any]]:
    """vLLM's own `generate` and our worker's loop in turns on one engine, in this process. Rates are medians."""
    from tasks.engines import worker
    from tasks.engines.dialogue import Dialogue
    from tasks.engines.vllm_engine import VllmEngine
    from tasks.templates import Template

    files = target_files(target)
    template = Template.load(target)
    asked = [Dialogue(job, template, recipe.data.max_tokens).next_request() for job in jobs]
    requests = [request for request in asked if request is not None]
    with tempfile.TemporaryDirectory() as folder:
        spec = WorkerSpec(
            files, engine_options(recipe, "vllm", recipe.responses.max_num_seqs), None, jobs, recipe.data.max_tokens, folder
        )
        began = time.monotonic()
        engine = VllmEngine(spec.target, spec.options, None, Path(folder))
        start = time.monotonic() - began

        def offline() -> int:
            prompts = [{"prompt_token_ids": list(request.token_ids)} for request in requests]
            parameters = [engine.parameters(request) for request in requests]
            outputs = engine.llm.generate(prompts, parameters, use_tqdm=False)
            return sum(len(output.outputs[0].token_ids) for output in outputs)

        def ours() -> int:
            return worker.run(spec, engine).tokens

        timed: dict[str, list[tuple[int, float, float]]] = {OFFLINE: [], OURS: []}
        for turn in range(rounds):
            both = [(OFFLINE, offline), (OURS, ours)]
            for name, work in both if turn % 2 == 0 else both[::-1]:
                timed[name].append(_timed(work, engine.llm.reset_prefix_cache))
    read = sum(len(request.token_ids) for request in requests)
    rows = []
    for name, runs in timed.items():
        work, cpu = median(run[1] for run in runs), median(run[2] for run in runs)
        written = runs[0][0]
        row = {"name": name, "engines": 1, "start": start, "read": read, "written": written, "work": work}
        rows.append({**row, "rate": written / work, "cpu_rate": written / cpu, "runs": runs})
    for row in rows:
        row["of_vllm"] = row["rate"] / rows[0]["rate"]
        row["cpu_of_vllm"] = row["cpu_rate"] / rows[0]["cpu_rate"]
    return rows


def _timed(work: Callable[[], int], forget: Callable[[], object]) -> tuple[int, float, float]:
    """New tokens, seconds, CPU seconds of one pass that finds no prompt in the cache."""
    forget()
    wall, cpu = time.monotonic(), time.process_time()
    tokens = work()
    return tokens, time.monotonic() - wall, time.process_time() - cpu


def captured(recipe: Recipe, target: TargetInfo, jobs: list[Job]) -> dict[str, Any]:
    """The stage's engines with their captures, and the matrix products' rate of one core sampled around the run."""
    sizes: list[int] = []

    def on_part(part: Part) -> None:
        sizes.extend(len(sample.token_ids) for sample in part.samples)

    runs: list[EngineRun] = []

    def answer() -> None:
        with tempfile.TemporaryDirectory() as folder:
            place = {"folder": Path(folder), "on_part": on_part}
            capture = capture_options(recipe, target)
            runs.append(run_engines(recipe, target, jobs, engine="vllm", capture=capture, **place))

    rate = time_beside_gemm(answer, repeats=1, warm_up=0).gemm_rate
    took = runs[0]
    floor = 2 * parameter_count(target) * sum(sizes) / (rate * took.engines)
    return {
        "name": "the stage, states captured",
        "engines": took.engines,
        "start": took.start_seconds,
        "read": sum(sizes) - took.tokens,
        "written": took.tokens,
        "work": took.work_seconds,
        "rate": took.tokens / took.work_seconds,
        "floor": floor,
        "ratio": took.work_seconds / floor,
    }


def _case(options: argparse.Namespace) -> None:
    recipe = recipe_for(options.target, 1, options)
    # Read by vLLM when it is imported.
    os.environ.update(environment(recipe, 1, 0))
    rows = beside_vllm(recipe, prepare_target(recipe), jobs_for(options.answers, options.tokens), options.rounds)
    print(json.dumps(rows), flush=True)
    os._exit(0)  # vLLM's own exit is slow, and prints


def main() -> None:
    parser = arguments("answers", __doc__ or "")
    parser.add_argument("--target", type=Path, help="a Hugging Face folder; needed on a full run")
    parser.add_argument("--answers", type=int, default=144)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--in-flight", type=int, default=48, help="sequences in flight: fewer than the answers")
    parser.add_argument("--rounds", type=int, default=2, help="passes of each of the two that take turns")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        case = json.loads(options.case)
        return _case(argparse.Namespace(**{**case, "target": Path(case["target"])}))
    if options.quick:
        from tests.tiny_target import make_tiny_target

        options.target = make_tiny_target(Path(tempfile.mkdtemp()) / "target")
        options.answers, options.tokens, options.in_flight = 32, 32, 16
    elif options.target is None:
        parser.error("--target is needed, or --quick")
    asked = {name: getattr(options, name) for name in ("answers", "tokens", "in_flight", "rounds")}
    rows = in_new_process("benchmarks.answers", {**asked, "target": str(options.target)})
    for engines in [] if options.quick else [1, 2]:
        recipe = recipe_for(options.target, engines, options)
        jobs = jobs_for(options.answers, options.tokens)
        rows.append(captured(recipe, prepare_target(recipe), jobs))
        rows[-1]["of_vllm"] = rows[-1]["rate"] / rows[0]["rate"]
    print_table(COLUMNS, rows)
    write_results("answers", rows, options)


if __name__ == "__main__":
    main()
