"""What a stored token costs and what it buys: the features' dtype and the teacher's k, each trained on alike.

In: a recipe with a finished build whose features are float32. Out: a table of bytes per token and held-out tau; the floor is
bfloat16 with the stored top-k. Every arm's documents are the build's own, stored again in its way: states through the
format and back, the teacher from the target's last layers run on the deepest stored state.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.harness import Column, arguments, print_table, write_results
from benchmarks.quality_per_second import BASE, CHAIN, Data, heldout_rounds, load
from eagle3core.acceptance import summarise
from eagle3core.batch import Document, HiddenTeacher, Teacher, TopKTeacher
from eagle3core.teacher import TargetHead
from eagle3core.trainer import Trainer
from eagle3core.training_config import TrainingConfig
from storage.feature_spec import FeatureSpec
from storage.features import FeatureReader
from tasks.documents import FeatureDocuments, split_train
from tasks.engines.teacher import TargetHead as TeacherHead
from tasks.quantised import LARGEST, dequantise, quantise
from tasks.recipe import Recipe, load_recipe

MOST = 64  # the largest k of an arm
HIDDEN = 0  # in place of a k: the final hidden state


@dataclass(frozen=True)
class Arm:
    """dtype of the features; teacher's k, or HIDDEN."""

    dtype: str
    k: int

    def __str__(self) -> str:
        return f"{self.dtype}, {f'top-{self.k}' if self.k else 'hidden state'}"

    def bytes_per_token(self, stored: FeatureSpec) -> int:
        return replace(stored, dtype=self.dtype, teacher="topk" if self.k else "hidden", teacher_k=self.k).bytes_per_token


BASELINE = Arm("bfloat16", 16)
DTYPES = [BASELINE, Arm("fp8_e4m3", 16), Arm("int8", 16), Arm("float32", 16)]
TEACHERS = [Arm("bfloat16", k) for k in (4, HIDDEN, MOST, 8, 32)]


class Stored:
    """A `DocumentSource`: the documents of another, as an arm would have stored them."""

    def __init__(self, documents: FeatureDocuments, view: Callable[[Document], Document]) -> None:
        self.lengths, self.supervised_counts = documents.lengths, documents.supervised_counts
        self._views = [view(documents[i]) for i in range(len(documents))]

    def __len__(self) -> int:
        return len(self._views)

    def __getitem__(self, i: int) -> Document:
        return self._views[i]


class LastLayers:
    """The final hidden state of a document from its deepest stored one, by the target's own last layers."""

    def __init__(self, folder: Path, first: int) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model
        self._layers, self._rotary = model.layers[first:], model.rotary_emb

    @torch.no_grad()
    def __call__(self, states: Tensor) -> Tensor:
        """[T-1, H] float32, the input of layer `first` -> [T-1, H], before the final norm."""
        hidden, places = states[None], torch.arange(len(states))[None]
        angles = self._rotary(hidden, places)
        for layer in self._layers:
            hidden = layer(hidden, position_embeddings=angles, position_ids=places, attention_mask=None)
        return hidden[0]


class Teachers:
    """Every training document's final hidden state and top-64, made once, where an arm asks for more than is stored."""

    def __init__(self, data: Data) -> None:
        self._data = data
        self._hidden: dict[str, Tensor] = {}
        self._top: dict[str, TopKTeacher] = {}

    def _make(self) -> None:
        data = self._data
        folder = Path(data.target.path)
        layers = LastLayers(folder, data.reader.spec.layer_ids[-1])
        head = TeacherHead.load(folder, "cpu")
        agreed = []
        for i in range(len(data.train)):
            document = data.train[i]
            hidden = layers(document.features[:, -data.reader.spec.hidden_size :].contiguous())
            rows = document.supervised[1:]
            top = head.top_k(hidden[rows], MOST)
            agreed.append((top.ids[:, 0] == document.teacher.ids[rows, 0]).float().mean().item())
            self._hidden[document.id] = hidden
            self._top[document.id] = _spread(top, rows)
        if mean(agreed) < 0.999:
            raise RuntimeError(f"the last layers give another likeliest token than was stored, on {1 - mean(agreed):.2%}")

    def of(self, document: Document, k: int, dtype: torch.dtype) -> Teacher:
        top = document.teacher
        if k == HIDDEN or k > self._data.reader.spec.teacher_k:
            if not self._hidden:
                self._make()
            if k == HIDDEN:
                return HiddenTeacher(self._hidden[document.id].to(dtype))
            top = self._top[document.id]
        outside = torch.cat([top.log_probs[:, k:], top.rest[:, None]], 1).logsumexp(1)
        return TopKTeacher(top.ids[:, :k], top.log_probs[:, :k].half().float(), outside)


def _spread(top: Any, rows: Tensor) -> TopKTeacher:
    """Top-k of the supervised rows at their places among all rows; the others are never a label."""
    ids = torch.zeros(len(rows), MOST, dtype=torch.int64)
    log_probs, rest = torch.full((len(rows), MOST), -1e4), torch.zeros(len(rows))
    ids[rows], log_probs[rows], rest[rows] = top.ids.long(), top.log_probs, top.rest
    return TopKTeacher(ids, log_probs, rest)


def stored_states(states: Tensor, dtype: str, layers: int) -> Tensor:
    """[rows, L * H] float32 as the store would give them back."""
    if dtype in LARGEST:
        return dequantise(*quantise(states.unflatten(1, (layers, -1)), dtype))
    return states.to(getattr(torch, dtype))


def train(data: Data, arm: Arm, teachers: Teachers, steps: int, seed: int) -> float:
    """Held-out tau of one training; what is measured on is stored as the arm's training documents are."""
    layers = len(data.reader.spec.layer_ids)
    final = torch.float32 if arm.dtype == "float32" else torch.bfloat16

    def states(document: Document) -> Document:
        return replace(document, features=stored_states(document.features, arm.dtype, layers))

    def view(document: Document) -> Document:
        return replace(states(document), teacher=teachers.of(document, arm.k, final))

    draft = data.draft(seed)
    head = None
    if arm.k == HIDDEN:
        eps = float(data.target.config["rms_norm_eps"])
        head = TargetHead.build(data.weights.head, data.weights.norm, eps, draft.target_ids)
    values = {**BASE, "ttt_steps": 2, "ttt_ramp": [[0, 1], [steps * 2 // 3, 2]], "max_steps": steps, "seed": seed}
    with tempfile.TemporaryDirectory() as folder:
        config = TrainingConfig.from_mapping(values)
        trainer = Trainer(
            draft, config, Stored(data.train, view), [], Path(folder), target_head=head, draft_length=CHAIN
        )
        for step in range(steps):
            trainer.train_step(trainer.feed.step(step), step, steps)
    heldout = [replace(item, document=states(item.document)) for item in data.heldout]
    return summarise(heldout_rounds(draft, heldout), resamples=100).tau_micro.value


def wait_share(data: Data, recipe: Recipe, steps: int) -> float:
    """Share of the time of `steps` optimizer steps, at the recipe's own settings and a fresh reader, that waits for data."""
    values = recipe.training.model_dump(mode="json") | {"threads": 1}
    fresh = FeatureReader(data.reader.folder)
    documents = FeatureDocuments(fresh, split_train(fresh.index).train)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(data.draft(0), TrainingConfig.from_mapping(values), documents, [], Path(folder))
        waited, began, stream = 0.0, time.perf_counter(), trainer.feed.stream(0, steps)
        for step in range(steps):
            asked = time.perf_counter()
            batches = next(stream)
            waited += time.perf_counter() - asked
            trainer.train_step(batches, step, steps)
        return waited / (time.perf_counter() - began)


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    recipe = load_recipe(options.recipe, {"store.uri": options.store} if options.store else {})
    data = load(recipe)
    spec = data.reader.spec
    if (spec.dtype, spec.teacher) != ("float32", "topk"):
        raise SystemExit(f"the features are {spec.dtype}, {spec.teacher}: build with features.dtype float32 and topk first")
    teachers = Teachers(data)
    groups, seeds, steps = [DTYPES[:2], DTYPES, TEACHERS], range(options.seeds), options.steps
    if options.quick:
        groups, seeds, steps = [DTYPES[:2]], range(1), 12
    arms = list(dict.fromkeys(arm for group in groups for arm in group))
    done = json.loads(options.partial.read_text()) if options.partial and options.partial.is_file() else {}
    # Seed by seed, so that of a run that is cut short every arm has been trained as often as its neighbours.
    for arm, seed in [(arm, seed) for group in groups for seed in seeds for arm in group]:
        taus = done.setdefault(str(arm), {})
        if str(seed) not in taus:
            taus[str(seed)] = train(data, arm, teachers, steps, seed)
            if options.partial:
                options.partial.write_text(json.dumps(done))
            print_table(COLUMNS, table(done, arms, spec))
    rows = table(done, arms, spec)
    print_table(COLUMNS, rows)
    wait = wait_share(data, recipe, 20 if options.quick else 60)
    print(f"the trainer waits for data {wait:.1%} of its time (bar: 3 %)")
    write_results("feature_bytes", {"steps": steps, "rows": rows, "wait_share": wait}, options)


def table(done: dict[str, dict[str, float]], arms: Sequence[Arm], spec: FeatureSpec) -> list[dict[str, Any]]:
    """A row an arm; its ratio is to the baseline on the seeds that both have."""
    rows = []
    for arm in arms:
        taus, base = done.get(str(arm), {}), done.get(str(BASELINE), {})
        if common := sorted(taus.keys() & base.keys()):
            ratios = [taus[seed] / base[seed] for seed in common]
            figures = {"tau": mean(taus.values()), "ratio": mean(ratios), "low": min(ratios), "high": max(ratios)}
            rows.append({"arm": str(arm), "bytes": arm.bytes_per_token(spec), "seeds": len(common), **figures})
    return rows


COLUMNS = [
    Column("stored", "arm"), Column("bytes a token", "bytes", "{:,}"), Column("seeds", "seeds"),
    Column("tau", "tau", "{:.4f}"), Column("to the floor", "ratio", "{:.4f}"), Column("lowest", "low", "{:.4f}"),
    Column("highest", "high", "{:.4f}"),
]  # fmt: skip

if __name__ == "__main__":
    parser = arguments("feature_bytes", __doc__.splitlines()[0])
    parser.add_argument("--recipe", default="smollm2-135m", help="a recipe that was built, with features.dtype float32")
    parser.add_argument("--store", help="its store, where it is not the recipe's own")
    parser.add_argument("--seeds", type=int, default=3, help="training seeds")
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps of every training")
    parser.add_argument("--partial", type=Path, help="a file that keeps finished trainings: a run that was cut goes on")
    main(parser.parse_args())
