"""The worker's loop around an engine, in this process: batches, parts, seeds, the reference's exactness."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tasks.engines import worker
from tasks.engines.huggingface import HuggingFaceEngine
from tasks.engines.requests import CaptureOptions, EngineOptions, Job, Request, TargetFiles, WorkerSpec
from tests.tiny_target import make_tiny_target

CAPTURE = CaptureOptions((1, 2, 3), "float32", "hidden", 0)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetFiles:
    folder = make_tiny_target(tmp_path_factory.mktemp("target"))
    return TargetFiles(str(folder), "float32", (1,), (folder / "chat_template.jinja").read_text(), {}, False)


def options(capacity: int) -> EngineOptions:
    return EngineOptions("huggingface", capacity, 256, 0.3, 1, 1, True, 0)


def jobs() -> list[Job]:
    asked = [[{"role": "user", "content": "abc " * (1 + i % 3)}] for i in range(8)]
    return [Job(f"j{i}", i // 3, asked[i], i % 2, 12, seed=i) for i in range(8)]


def events_of(target: TargetFiles, folder: Path, capacity: int, monkeypatch, jobs: list[Job]) -> list[dict]:
    events: list[dict] = []
    monkeypatch.setattr(worker, "emit", events.append)
    folder.mkdir()
    spec = WorkerSpec(target, options(capacity), CAPTURE, jobs, 160, str(folder))
    worker.run(spec, worker.start_engine(spec))
    return [event for event in events if event["kind"] == "part"]


def test_parts_come_whole_each_sample_once_and_in_the_order_of_the_jobs(target, tmp_path, monkeypatch):
    parts = events_of(target, tmp_path / "h", 4, monkeypatch, jobs())
    assert Counter(part["part"] for part in parts) == {0: 1, 1: 1, 2: 1}
    by_number = {part["part"]: [sample["id"] for sample in part["samples"]] for part in parts}
    assert by_number == {0: ["j0", "j1", "j2"], 1: ["j3", "j4", "j5"], 2: ["j6", "j7"]}
    for part in parts:
        arrays = load_file(part["arrays"])
        for i, sample in enumerate(part["samples"]):
            assert arrays[f"{i}.features"].shape == (len(sample["token_ids"]) - 1, 3 * 64)


def test_text_depends_on_the_jobs_seed_and_not_on_the_batch(target, tmp_path, monkeypatch):
    def texts(name: str, capacity: int, jobs: list[Job]) -> dict[str, list[int]]:
        parts = events_of(target, tmp_path / name, capacity, monkeypatch, jobs)
        return {sample["id"]: sample["token_ids"] for part in parts for sample in part["samples"]}

    alone, together = texts("alone", 1, jobs()), texts("together", 8, jobs())
    assert alone == together
    other = texts("other", 8, [replace(job, seed=job.seed + 100) for job in jobs()])
    greedy = ["j0", "j2", "j4", "j6"]
    assert [name for name in alone if alone[name] == other[name]] == greedy


def test_the_states_of_a_text_are_the_same_to_the_bit_whatever_is_read_beside_it(target):
    texts = [[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16], [9, 8, 7, 6]]

    def states(read: list[list[int]]) -> dict[str, torch.Tensor]:
        engine = HuggingFaceEngine(target, options(8), CAPTURE)
        for text in read:
            engine.add(Request(str(text), text))
        return {finished.id: finished.states for _ in read for finished in engine.step()}

    together, alone = states(texts), {name: value for text in texts for name, value in states([text]).items()}
    assert together.keys() == alone.keys()
    assert all(torch.equal(together[name], alone[name]) for name in alone)


def test_batched_steps_give_what_transformers_itself_generates(target):
    engine = HuggingFaceEngine(target, options(8), replace(CAPTURE, layer_ids=(1, 2, 3, 4)))
    prompts = [[5, 6, 7, 8, 9 + i] for i in range(3)]
    for i, prompt in enumerate(prompts):
        engine.add(Request(str(i), prompt, 0.0, 10 + i))
    finished = {each.id: each for each in engine.step()}
    model = AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32)
    for i, prompt in enumerate(prompts):
        answer = finished[str(i)]
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=10 + i, do_sample=False)
        assert answer.token_ids == expected[0, len(prompt) :].tolist()
        text = torch.tensor([prompt + answer.token_ids[:-1]])
        with torch.no_grad():
            states = model(text, output_hidden_states=True).hidden_states
        torch.testing.assert_close(answer.states[:, :3], torch.stack(states[1:4], 2)[0], rtol=1e-4, atol=1e-4)
        # The last one is the residual before the final norm; HF reports what comes after it.
        torch.testing.assert_close(model.model.norm(answer.states[:, 3]), states[4][0], rtol=1e-4, atol=1e-4)


def test_the_worker_needs_neither_orchestrator_nor_store():
    """It may run under another Python, which has an engine and little else."""
    script = (
        "import sys, tasks.engines.worker, tasks.engines.serve_requests\n"
        "heavy = {'prefect', 'mlflow', 'duckdb', 'storage', 'eagle3core'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
