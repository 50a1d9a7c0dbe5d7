"""Every drafter keeps the same promises: it drafts as it was trained, changes no text, counts right, and comes back whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from eagle3core.acceptance import Response
from eagle3core.decoding.propose import Chain
from eagle3core.decoding.speculate import Decoding, speculate
from eagle3core.drafters import DRAFTERS, Line, drafter, drafter_of, load_draft
from eagle3core.estimate import estimate
from eagle3core.packing import Chains, draft_id_table, pack
from eagle3core.trainer import Trainer
from eagle3core.training_config import TrainingConfig
from eagle3core.verify import Sampling
from tests.eagle3core import drafter_toys as toys
from tests.eagle3core import tiny_pair as tiny
from tests.eagle3core.training_toys import Memory

NAMES = sorted(DRAFTERS)
LENGTH = 4  # of chains


@pytest.fixture(scope="module")
def target():
    return tiny.make_target()


@pytest.fixture(scope="module")
def prompts():
    return tiny.prompts(6)


@pytest.fixture(scope="module")
def texts(target, prompts):
    return [tiny.answer(target, prompt, 20) for prompt in prompts]


@pytest.fixture(scope="module")
def trained(target, prompts, texts, tmp_path_factory):
    """By name: a draft that has seen the texts, and its losses by optimizer step."""
    made: dict = {}

    def of(name: str):
        name = DRAFTERS[name].weights_of or name
        if name not in made:
            draft = toys.make(name, target)
            documents = [toys.document(target, draft, t, len(p)) for p, t in zip(prompts, texts, strict=True)]
            config = TrainingConfig(
                ttt_steps=LENGTH, epochs=25, tokens_per_batch=400, lr=5e-3, clip=5.0, evaluate_every=1000,
                checkpoint_every=1000, threads=1,
            )  # fmt: skip
            losses: list[float] = []
            trainer = Trainer(
                draft, config, Memory(documents), [], tmp_path_factory.mktemp(name), toys.head(target, draft),
                lambda event: losses.append(event.metrics["loss"]) if event.kind == "step" else None,
            )  # fmt: skip
            made[name] = trainer.draft, losses, trainer.run().best
        return made[name]

    return of


@pytest.mark.parametrize("name", NAMES)
def test_it_learns(trained, name):
    _, losses, _ = trained(name)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("name", NAMES)
def test_it_drafts_as_it_was_trained(target, prompts, texts, name):
    draft = toys.make(name, target)
    document = toys.document(target, draft, texts[0], len(prompts[0]))
    require_same_logits(draft, document, toys.head(target, draft), drafter_of(draft).unroll())


def require_same_logits(draft, document, head, unroll) -> None:
    """The same chains through `unroll` and through the drafter's cache, committed in two parts as rounds do."""
    which = drafter_of(draft)
    view = which.view(document)
    front = len(view.token_ids) - len(document.token_ids)
    batch = pack([view], draft_id_table(draft.t2d), LENGTH, follow=Chains.SERVED, target_head=head)
    with torch.no_grad():
        outputs = unroll(draft, batch)
        for place, packed_row in list(enumerate(batch.chains.tolist()))[:3]:
            row = packed_row - front
            state = which.decoder(draft, 1, 64)
            state.begin(document.token_ids[:1])
            split = row // 2
            for rows in (slice(0, split), slice(split, row + 1)):
                if rows.start:
                    state.step(torch.tensor([[7, 9]]), torch.zeros(1, 2, dtype=torch.int64))
                tokens = document.token_ids[rows.start + 1 : rows.stop + 1]
                state.commit(document.features[None, rows], tokens[None], torch.tensor([len(tokens)]))
            logits = state.logits
            for step in range(LENGTH):
                assert torch.allclose(logits[0], draft.logits(outputs[step][place]), atol=2e-4), (row, step)
                token = document.token_ids[row + 2 + step].reshape(1, 1)
                if step + 1 < LENGTH:
                    logits = state.step(token, torch.tensor([[step]]))[:, 0]


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_is_the_targets_own(target, prompts, texts, trained, name, shape):
    draft, *_ = trained(name)
    proposer = Chain(LENGTH) if shape == "chain" else drafter(name).tree()
    found = speculate(toys.decoder(target, draft), draft, prompts, proposer, Decoding(20, eos_token_ids=(tiny.EOS,)))
    assert [g.token_ids for g in found] == [t[len(p) :].tolist() for p, t in zip(prompts, texts, strict=True)]
    assert sum(item.accepted for g in found for item in g.rounds) > 10  # of its own training texts


@pytest.mark.parametrize("name", NAMES)
def test_what_is_sampled_does_not_depend_on_the_batch(target, prompts, trained, name):
    draft, *_ = trained(name)
    settings = Decoding(10, Sampling(0.8, top_p=0.95), (tiny.EOS,), seed=5)
    for proposer in (Chain(LENGTH, Sampling(0.8)), drafter(name).tree()):
        together = speculate(toys.decoder(target, draft), draft, prompts[:3], proposer, settings)
        (alone,) = speculate(toys.decoder(target, draft), draft, prompts[:1], proposer, settings)
        assert alone.token_ids == together[0].token_ids and alone.rounds == together[0].rounds


@pytest.mark.parametrize("name", NAMES)
def test_the_estimate_is_what_the_decoder_counts(target, prompts, texts, trained, name):
    """Greedy text: the walk over stored features and the decoder's own rounds are the same, round by round."""
    draft, *_ = trained(name)
    documents = [toys.document(target, draft, t, len(p)) for p, t in zip(prompts, texts, strict=True)]
    responses = [Response(str(i)) for i in range(len(documents))]
    walk = estimate(draft, documents, responses, LENGTH, target_head=toys.head(target, draft)).walk
    settings = Decoding(20, eos_token_ids=(tiny.EOS,))
    found = speculate(toys.decoder(target, draft), draft, prompts, Chain(LENGTH), settings)
    for number, generation in enumerate(found):
        mine = walk.response == number
        walked = list(zip(walk.context[mine].tolist(), walk.accepted[mine].long().tolist(), strict=True))
        # A last round that only the bonus token is left for has nothing to draft: no row of the walk.
        decoded = [(item.context, min(item.accepted, item.drafted)) for item in generation.rounds]
        assert walked == decoded[: len(walked)] and len(decoded) - len(walked) <= 1


@pytest.mark.parametrize("name", NAMES)
def test_it_comes_back_from_its_folder(target, trained, name):
    draft, _, folder = trained(name)
    loaded = load_draft(folder, toys.parts(target))
    kept, back = dict(draft.named_parameters()), dict(loaded.named_parameters())
    assert kept.keys() == back.keys() and all(torch.equal(kept[key], back[key]) for key in kept)
    assert torch.equal(draft.target_ids, loaded.target_ids)
    assert loaded.config == draft.config and loaded.drafter == draft.drafter
    (folder / "model.safetensors").rename(folder / "kept")
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "kept")
    lost = sorted(tensors)[0]
    save_file({key: value for key, value in tensors.items() if key != lost}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="missing"):
        load_draft(folder, toys.parts(target))
    (folder / "kept").replace(folder / "model.safetensors")


def test_an_older_draft_is_eagle3(target, tmp_path: Path):
    draft = toys.make("eagle3", target)
    drafter("eagle3").save(draft, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("drafter") == "eagle3"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_draft(tmp_path, toys.parts(target)).drafter == "eagle3"


OWN = """
from eagle3core.draft import Eagle3Draft
from eagle3core.drafters.eagle3 import Eagle3

class OwnDraft(Eagle3Draft):
    drafter = "own"

class Own(Eagle3):
    kind = OwnDraft
"""


def test_a_new_drafter_is_one_file_and_one_line(target, prompts, texts, tmp_path, monkeypatch):
    (tmp_path / "own_drafter.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(DRAFTERS, "own", Line("own_drafter:Own", "Own"))
    draft = toys.make("own", target)
    document = toys.document(target, draft, texts[0], len(prompts[0]))
    head = toys.head(target, draft)
    require_same_logits(draft, document, head, drafter_of(draft).unroll())
    trainer = Trainer(draft, TrainingConfig(ttt_steps=2), Memory([document]), [document], tmp_path / "run", head)
    assert load_draft(trainer.run().best, toys.parts(target)).drafter == "own"


def test_a_drafter_that_is_not_there_names_those_that_are():
    with pytest.raises(ValueError, match=r"eagle9.*eagle3"):
        drafter("eagle9")
