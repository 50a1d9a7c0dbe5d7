"""Engine processes side by side: the jobs of a stage are dealt to them by part, and finished parts come back.

In: jobs, and what is to be captured. Out: `on_part` is called for each finished part, on one thread at a
time. One engine per GPU, or per CPU core: a core that runs an engine of its own does twice the work of two
that share one, because threads that wait for each other spin.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from safetensors.numpy import load_file

from tasks.devices import cuda_devices
from tasks.engines.requests import (
    CaptureOptions,
    EngineOptions,
    Job,
    Refused,
    Sample,
    ServerCount,
    TargetFiles,
    WorkerSpec,
)
from tasks.prepare_target import TargetInfo
from tasks.processes import WorkerCancelled, cores, device_lock, run_worker
from tasks.recipe import Recipe

logger = logging.getLogger(__name__)

# Measured with SmolLM2-135M in fp32: an engine's own memory beside weights and KV cache.
ENGINE_BYTES = 2 << 30
SAY_EVERY = 30.0  # seconds between two progress lines


@dataclass(frozen=True)
class Part:
    """One finished part. `jobs[i]` and `arrays[i]` belong to `samples[i]`: its job's id; what was captured, if anything."""

    number: int
    samples: Sequence[Sample]
    jobs: Sequence[str]
    refused: Sequence[Refused]
    arrays: Sequence[Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class EngineRun:
    """What a run of the engines took: seconds to start, then new tokens in so many seconds of work.

    `servers`: what each of them did, where the answers came over HTTP.
    """

    engines: int
    start_seconds: float
    work_seconds: float
    tokens: int
    servers: tuple[ServerCount, ...] = ()

    def to_summary(self) -> dict[str, Any]:
        rate = self.tokens / self.work_seconds if self.work_seconds else 0.0
        return {
            "engines": self.engines,
            "engine_start_seconds": round(self.start_seconds, 1),
            "engine_seconds": round(self.work_seconds, 1),
            "new_tokens": self.tokens,
            "tokens_per_second": round(rate, 1),
            **({"servers": [asdict(server) for server in self.servers]} if self.servers else {}),
        }


def target_files(target: TargetInfo) -> TargetFiles:
    return TargetFiles(
        path=target.path,
        dtype=target.dtype,
        eos_token_ids=tuple(target.eos_token_ids),
        chat_template=target.chat_template,
        template_arguments=dict(target.template_arguments),
        trust_remote_code=target.trust_remote_code,
    )


def engine_options(recipe: Recipe, engine: str, capacity: int) -> EngineOptions:
    return EngineOptions(
        engine=engine,
        capacity=capacity,
        max_model_len=recipe.target.max_model_len,
        memory_share=recipe.vllm.memory_share,
        kv_cache_gb=recipe.vllm.kv_cache_gb,
        tensor_parallel=recipe.vllm.tensor_parallel,
        enforce_eager=recipe.vllm.enforce_eager,
        seed=recipe.responses.seed,
        servers=tuple(recipe.responses.servers),
    )


def engine_count(recipe: Recipe, target: TargetInfo, most: int) -> int:
    """How many engines run side by side; `most` is what the work can be dealt to."""
    if recipe.vllm.engines:
        return max(1, min(most, recipe.vllm.engines))
    if devices := cuda_devices():
        return max(1, min(most, devices // recipe.vllm.tensor_parallel))
    weights = sum(file.stat().st_size for file in Path(target.path).glob("*.safetensors"))
    one = ENGINE_BYTES + weights + ((recipe.vllm.kv_cache_gb or 1) << 30)
    return max(1, min(most, cores(), psutil.virtual_memory().available // one))


def environment(recipe: Recipe, engines: int, number: int) -> dict[str, str]:
    """What an engine process needs in its environment before it imports anything.

    VLLM_ENABLE_V1_MULTIPROCESSING=0 keeps vLLM's engine core in the process that feeds it.
    """
    values = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "true",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if devices := cuda_devices():
        width = recipe.vllm.tensor_parallel
        # Of those that we may use ourselves, which need not be the machine's first.
        named = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(devices)))
        own = named.split(",")[number * width : (number + 1) * width]
        return values | {"CUDA_VISIBLE_DEVICES": ",".join(own)}
    threads = recipe.vllm.threads or max(1, cores() // engines)
    if recipe.vllm.kv_cache_gb:
        values["VLLM_CPU_KVCACHE_SPACE"] = str(recipe.vllm.kv_cache_gb)
    return values | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}


def run_engines(
    recipe: Recipe,
    target: TargetInfo,
    jobs: Sequence[Job],
    *,
    engine: str,
    capture: CaptureOptions | None,
    folder: Path,
    on_part: Callable[[Part], None],
) -> EngineRun:
    """Run every job and hand each part over as soon as it is whole; holds the device meanwhile.

    `folder`: for specs, logs and arrays on their way. Raises WorkerError of the first engine that fails; the
    others are ended then, and parts handed over until then stay handed over.
    """
    numbers = sorted({job.part for job in jobs})
    engines = 1 if engine == "http" else engine_count(recipe, target, len(numbers))
    # Dealt in turn: neighbours in the data, and so long and short parts, spread evenly.
    owner = {number: i % engines for i, number in enumerate(numbers)}
    inbox = _Inbox(on_part, engines)
    failed = threading.Event()

    def work(number: int) -> None:
        handover = folder / f"engine-{number}"
        handover.mkdir(parents=True, exist_ok=True)
        spec = WorkerSpec(
            target=target_files(target),
            options=engine_options(recipe, engine, recipe.responses.max_num_seqs),
            capture=capture,
            jobs=[job for job in jobs if owner[job.part] == number],
            max_tokens=recipe.data.max_tokens,
            handover=str(handover),
        )
        try:
            run_worker(
                "tasks.engines.worker",
                spec.to_dict(),
                folder=handover,
                python=recipe.vllm.python if engine == "vllm" else None,
                env=environment(recipe, engines, number),
                on_event=lambda event: inbox.take(number, event),
                cancelled=failed.is_set,
            )
        except BaseException:
            failed.set()
            raise

    device = nullcontext() if engine == "http" else device_lock()
    with device, ThreadPoolExecutor(engines, thread_name_prefix="engine") as threads:
        futures = [threads.submit(work, number) for number in range(engines)]
        try:
            wait(futures)
        except BaseException:  # an interrupt: the threads end their workers before the pool is left
            failed.set()
            raise
    # The engine that failed says why; the others only that they were called off.
    errors = [error for error in (future.exception() for future in futures) if error]
    if errors:
        raise next((error for error in errors if not isinstance(error, WorkerCancelled)), errors[0])
    return inbox.total()


class _Inbox:
    """What the engines say, taken in by one thread at a time."""

    def __init__(self, on_part: Callable[[Part], None], engines: int) -> None:
        self._on_part = on_part
        self._lock = threading.Lock()
        self._said = time.monotonic()
        self._started = [0.0] * engines
        self._progress: list[dict[str, Any]] = [{"tokens": 0, "requests": 0, "seconds": 0.0}] * engines
        self._servers: dict[str, ServerCount] = {}

    def take(self, number: int, event: dict[str, Any]) -> None:
        with self._lock:
            if event["kind"] == "part":
                self._on_part(_read_part(event))
            elif event["kind"] == "started":
                self._started[number] = event["seconds"]
                logger.info("engine %d is up after %.0f s", number, event["seconds"])
            elif event["kind"] == "server":
                self._hear(ServerCount(**{name: value for name, value in event.items() if name != "kind"}))
            elif event["kind"] == "progress":
                self._progress[number] = event
                if time.monotonic() - self._said > SAY_EVERY:
                    self._said = time.monotonic()
                    total = self.total()
                    rate = total.tokens / max(1e-9, total.work_seconds)
                    logger.info("%d new tokens, %.0f/s", total.tokens, rate)

    def _hear(self, count: ServerCount) -> None:
        """A server went away or came back, or the run is at its end."""
        before = self._servers.get(count.server)
        if count.up != (before is None or before.up):
            logger.warning("%s", count)
        self._servers[count.server] = count

    def total(self) -> EngineRun:
        return EngineRun(
            engines=len(self._started),
            start_seconds=max(self._started),
            work_seconds=max(progress["seconds"] for progress in self._progress),
            tokens=sum(progress["tokens"] for progress in self._progress),
            servers=tuple(self._servers.values()),
        )


def _read_part(event: dict[str, Any]) -> Part:
    """The event and its arrays, whose file is removed: what is on its way is held once."""
    samples = [Sample(**each) for each in event["samples"]]
    arrays: list[dict[str, np.ndarray]] = [{} for _ in samples]
    if event["arrays"]:
        file = Path(event["arrays"])
        for name, array in load_file(file).items():
            index, _, column = name.partition(".")
            arrays[int(index)][column] = array
        file.unlink()
    return Part(event["part"], samples, event["jobs"], [Refused(**refused) for refused in event["refused"]], arrays)
