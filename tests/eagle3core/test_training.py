"""The loop: what it does is decided by its configuration alone, whatever happens to the process on the way.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from training_toys import CONFIG, Memory, documents, make_trainer, weights
from ttt_oracle import make_draft

from eagle3core.batch import Document
from eagle3core.checkpoint import CheckpointError, read_progress
from eagle3core.export import load_draft, save_draft
from eagle3core.feed import Feed, fill_bins
from eagle3core.optimizer import clip_gradients, learning_rate
from eagle3core.packing import draft_id_table
from eagle3core.training_config import TrainingConfig

TOY = Path(__file__).parent / "training_toys.py"


def metrics(folder: Path) -> list[dict]:
    """Everything but what time it took."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if "seconds" not in key} for line in lines]


def whole_run(folder: Path, **changes) -> dict[str, torch.Tensor]:
    trainer = make_trainer(folder, **changes)
    trainer.run()
    return weights(trainer)


def test_a_run_learns_and_keeps_its_best_draft(tmp_path: Path) -> None:
    events = []
    trainer = make_trainer(tmp_path, events.append, epochs=6, anchor_share=1.0)
    result = trainer.run()
    kinds = {event.kind for event in events}
    assert kinds == {"step", "evaluation", "checkpoint", "end"}
    losses = [event.metrics["step_loss"][0] for event in events if event.kind == "step"]
    assert sum(losses[-4:]) < sum(losses[:4])
    taus = {event.step: event.metrics["tau"] for event in events if event.kind == "evaluation"}
    assert result.best_tau == max(taus.values()) and taus[result.best_step] == result.best_tau
    assert (result.best / "model.safetensors").exists()
    assert metrics(tmp_path)[-1] == {
        "kind": "end",
        "step": result.steps,
        "best_step": result.best_step,
        "best_tau": result.best_tau,
    }


def test_a_killed_run_resumes_to_the_bit(tmp_path: Path) -> None:
    """SIGKILL between two checkpoints: the weights, the metrics and the best draft are those of the run that
    was left alone.
    """
    expected = whole_run(tmp_path / "whole")
    folder = tmp_path / "killed"
    process = subprocess.Popen(
        [sys.executable, str(TOY), str(folder), "{}"], stdout=subprocess.PIPE, text=True, cwd=TOY.parents[2]
    )
    for line in process.stdout:
        if line.split() == ["step", "5"]:
            process.send_signal(signal.SIGKILL)
            break
    process.wait()
    assert [path.name for path in (folder / "checkpoint").glob("step-*")] == ["step-000003"]
    assert_equal(whole_run(folder), expected)
    assert metrics(folder) == metrics(tmp_path / "whole")
    best = [
        path.read_bytes()
        for path in (tmp_path / "whole/best/model.safetensors", folder / "best/model.safetensors")
    ]
    assert best[0] == best[1]


def test_a_run_in_legs_is_the_whole_run_to_the_bit(tmp_path: Path) -> None:
    """Stopped at steps that are no checkpoint's own, and gone on from there by a new trainer each time."""
    expected = whole_run(tmp_path / "whole")
    total = max(line["step"] for line in metrics(tmp_path / "whole"))
    for until in (2, 5, total):
        result = make_trainer(tmp_path / "legs").run(until)
        progress = read_progress(tmp_path / "legs/checkpoint")
        assert (result.steps, progress.step, progress.total_steps) == (until, until, total)
    assert_equal(whole_run(tmp_path / "legs"), expected)
    learnt = lambda folder: [line for line in metrics(folder) if line["kind"] in {"step", "evaluation"}]
    assert learnt(tmp_path / "legs") == learnt(tmp_path / "whole")


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def test_a_half_written_checkpoint_is_never_read(tmp_path: Path) -> None:
    expected = whole_run(tmp_path)
    partial = tmp_path / "checkpoint/.partial-step-000099"
    partial.mkdir()
    (partial / "tensors.safetensors").write_bytes(b"half")
    assert_equal(whole_run(tmp_path), expected)


@pytest.mark.parametrize(
    ("change", "word"), [({"lr": 5e-3}, "lr"), ({"seed": 9}, "seed"), ({"accumulate": 1}, "accumulate")]
)
def test_a_checkpoint_of_another_configuration_is_refused(tmp_path: Path, change: dict, word: str) -> None:
    whole_run(tmp_path)
    with pytest.raises(CheckpointError, match=word):
        make_trainer(tmp_path, **change).run()


def test_a_checkpoint_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    whole_run(tmp_path)
    trainer = make_trainer(tmp_path)
    trainer.draft.t2d[3] = False
    with pytest.raises(CheckpointError, match="vocabulary"):
        trainer.run()


def test_what_has_no_say_in_the_weights_may_change_on_resume(tmp_path: Path) -> None:
    expected = whole_run(tmp_path)
    assert_equal(whole_run(tmp_path, checkpoint_every=5, activation_checkpointing=True), expected)


def one_step_gradients(folder: Path, **changes) -> dict[str, torch.Tensor]:
    trainer = make_trainer(folder, anchor_share=1.0, ttt_ramp=[], **changes)
    trainer._backward(trainer.feed.step(0))
    return {name: p.grad for name, p in trainer.draft.named_parameters() if p.grad is not None}


def test_accumulating_equals_the_big_batch(tmp_path: Path) -> None:
    """Uneven bins too: gradients are divided by the labels of the whole step."""
    source = Memory(documents(4))
    whole = one_step_gradients(tmp_path / "a", source=source, tokens_per_batch=1000, accumulate=1, epochs=1)
    parts = one_step_gradients(tmp_path / "b", source=source, tokens_per_batch=41, accumulate=2, epochs=1)
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, atol=1e-6, rtol=1e-5)


def test_cpu_minutes_become_a_number_of_steps_once(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_cpu_minutes=1e-6)
    assert trainer.run().steps == 1
    assert (
        json.loads((tmp_path / "checkpoint/step-000001/state.json").read_text())["progress"]["total_steps"]
        == 1
    )
    assert not any(p.grad is not None for p in trainer.draft.parameters())


def test_order_depends_on_the_seed_alone() -> None:
    source, table = Memory(documents(24)), draft_id_table(torch.ones(23, dtype=torch.bool))
    feed = lambda seed: Feed(source, TrainingConfig.from_mapping({**CONFIG, "seed": seed}), table)
    tokens = lambda seed, step: feed(seed).step(step).batches[0].tokens
    assert torch.equal(tokens(1, 2), tokens(1, 2))
    assert tokens(1, 2).tolist() != tokens(2, 2).tolist()
    streamed = [step.batches[0].tokens for step in feed(1).stream(1, 4)]
    assert all(torch.equal(left, tokens(1, step)) for step, left in zip(range(1, 4), streamed, strict=True))


def test_a_step_says_which_documents_it_reads() -> None:
    class Watched(Memory):
        def __getitem__(self, i: int) -> Document:
            read.append(i)
            return super().__getitem__(i)

    source, table = Watched(documents(24)), draft_id_table(torch.ones(23, dtype=torch.bool))
    feeds = [Feed(source, TrainingConfig.from_mapping(CONFIG), table, rank=rank, ranks=2) for rank in range(2)]
    for step in range(feeds[0].steps):
        read: list[int] = []
        for feed in feeds:
            feed.step(step)
        assert feeds[0].documents_of(step) == feeds[1].documents_of(step) == read


def test_ranks_share_the_bins_of_a_step() -> None:
    source, table = Memory(documents(24)), draft_id_table(torch.ones(23, dtype=torch.bool))
    config = TrainingConfig.from_mapping({**CONFIG, "anchor_share": 1.0})
    alone = Feed(source, dataclasses.replace(config, accumulate=4), table).step(1)
    ranks = [Feed(source, config, table, rank=rank, ranks=2).step(1) for rank in range(2)]
    tokens = [batch.tokens for step in ranks for batch in step.batches]
    assert all(torch.equal(left, right.tokens) for left, right in zip(tokens, alone.batches, strict=True))


def test_bins_fill_to_the_budget_and_longer_documents_stand_alone() -> None:
    assert fill_bins([5, 5, 3, 20, 8], [0, 1, 2, 3, 4], 12) == [[0, 1], [2], [3], [4]]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", [0.5, 1.0, 1.0, 1.0]), ("cosine", [0.5, 1.0, 0.5, 0.0]), ("wsd", [0.5, 1.0, 1.0, 0.0])],
)
def test_schedules(schedule: str, expected: list[float]) -> None:
    """Half of the warm-up, its end, the middle of the rest, the last step."""
    rates = [learning_rate(step, 1010, 1.0, schedule, 10 / 1010) for step in (4, 10, 510, 1009)]
    assert rates == pytest.approx(expected, abs=0.01)


def test_clipping_scales_all_gradients_together() -> None:
    a, b = (torch.zeros(2, requires_grad=True) for _ in range(2))
    a.grad, b.grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    assert clip_gradients([a, b], 0.5) == pytest.approx(5.0)
    assert [*a.grad.tolist(), *b.grad.tolist()] == pytest.approx([0.3, 0, 0, 0.4])


@pytest.mark.parametrize("draft_vocabulary", [11, 23])
def test_a_saved_draft_is_the_draft(tmp_path: Path, draft_vocabulary: int) -> None:
    draft = make_draft(draft_vocabulary=draft_vocabulary, fc_norm=True, norm_output=True)
    save_draft(draft, tmp_path)
    from safetensors import safe_open

    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert {
        "fc.weight",
        "fc_norm.2.weight",
        "midlayer.self_attn.q_proj.weight",
        "norm.weight",
        "lm_head.weight",
    } <= names
    assert "embed_tokens.weight" not in names
    assert ({"d2t", "t2d"} <= names) == (draft_vocabulary < 23)
    loaded = load_draft(tmp_path, draft.embed_tokens.weight)
    assert loaded.config.to_dict() == draft.config.to_dict()
    assert_equal(dict(loaded.state_dict()), dict(draft.state_dict()))


def test_a_saved_draft_without_its_head_is_refused(tmp_path: Path) -> None:
    """Servers fall back to the target's own head in silence, and report that everything is accepted."""
    from safetensors.torch import load_file, save_file

    draft = make_draft()
    save_draft(draft, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing \['lm_head.weight'\]"):
        load_draft(tmp_path, draft.embed_tokens.weight)


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="learning_rate"):
        TrainingConfig.from_mapping({"learning_rate": 1})
    with pytest.raises(ValueError, match="loss"):
        TrainingConfig(loss="mse")
