"""One byte a number: what comes back is as near as the format allows, at every scale, through the store as well."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eagle3core.batch import Document
from storage.artifacts import ArtifactStore
from storage.features import FeatureReader
from tasks.documents import FeatureDocuments
from tasks.engines.requests import CaptureOptions, Sample
from tasks.engines.worker import Packer
from tasks.quantised import dequantise, quantise
from tests.tasks.feature_samples import HIDDEN, make_features, make_recipe, make_responses, make_samples, make_target


def states(rows: int = 40) -> torch.Tensor:
    """[rows, 3, H]: every layer at a scale of its own, one token a thousand times larger, one all zeros."""
    values = torch.randn(rows, 3, HIDDEN, generator=torch.Generator().manual_seed(0)) * torch.tensor([0.01, 1, 100])[:, None]
    values[3] *= 1000
    values[7] = 0
    return values


@pytest.mark.parametrize(("dtype", "relative", "of_largest"), [("fp8_e4m3", 2**-4, 2**-9 / 448), ("int8", 0, 0.5 / 127)])
def test_every_state_comes_back_within_the_formats_own_error(dtype: str, relative: float, of_largest: float):
    given = states()
    codes, scales = quantise(given, dtype)
    assert codes.shape == (40, 3 * HIDDEN) and codes.element_size() == 1 and scales.shape == (40, 3)
    back = dequantise(codes, scales)
    assert back.dtype == torch.bfloat16
    # Half a step of the mantissa, or half a step of the smallest numbers; bfloat16 rounds once more.
    allowed = given.abs() * (relative + 2**-8) + given.abs().amax(-1, keepdim=True) * of_largest
    assert ((back.view_as(given).float() - given).abs() <= allowed).all()
    assert (back[7] == 0).all()
    loud = given.abs().amax(-1)
    torch.testing.assert_close(back.view_as(given).float().abs().amax(-1), loud, rtol=2**-7, atol=0)


def test_a_state_that_is_not_finite_is_refused():
    given = states()
    given[2, 1, 5] = float("inf")
    with pytest.raises(ValueError, match="not finite"):
        quantise(given, "fp8_e4m3")


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "int8"])
def test_the_trainer_gets_what_the_target_computed_from_a_quantised_store(tmp_path: Path, dtype: str):
    recipe = make_recipe(tmp_path)
    target, store = make_target(recipe), ArtifactStore(recipe.store.uri)
    plain = make_samples()
    samples = []
    for sample in plain:
        codes, scales = quantise(torch.from_numpy(sample.features).unflatten(1, (3, -1)), dtype)
        samples.append(replace(sample, features=codes.numpy(), feature_scales=scales.numpy()))
    ref = make_features(store, target, samples, make_responses(store, plain), dtype=dtype)
    reader = FeatureReader(store.local(ref))
    rows = {name: row for row, name in enumerate(reader.index["id"].to_pylist())}
    documents = FeatureDocuments(reader, [rows[sample.id] for sample in plain])
    for number, sample in enumerate(plain):
        document: Document = documents[number]
        assert document.features.dtype == torch.bfloat16
        torch.testing.assert_close(document.features.float(), torch.from_numpy(sample.features), rtol=0.07, atol=0.03)


def pack_all(target, dtype: str, teacher: str, pairs: list[tuple[Sample, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    packer = Packer(CaptureOptions((1, 2, 3), dtype, teacher, 8), Path(target.path))
    packed = [packer.pack(*pair) for pair in pairs]
    packer.complete()
    return packed


def test_samples_that_share_the_teachers_product_get_each_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tasks.engines.teacher.CHUNK_ROWS", 9)  # whole between samples, and once more at the end
    target = make_target(make_recipe(tmp_path))
    pairs = [
        (Sample(str(n), list(range(n + 1)), [(n - 3, n + 1)], [], "stop", False), torch.randn(n, 4, HIDDEN))
        for n in range(5, 12)
    ]
    together = pack_all(target, "bfloat16", "topk", pairs)
    for packed, pair in zip(together, pairs, strict=True):
        alone = pack_all(target, "bfloat16", "topk", [pair])[0]
        assert packed.keys() == alone.keys() and all(torch.equal(packed[name], alone[name]) for name in packed)
        supervised = packed["teacher_log_probs"].exp().sum(-1).float() + packed["teacher_rest"].exp()
        torch.testing.assert_close(supervised[-4:], torch.ones(4), rtol=0, atol=2e-3)


@pytest.mark.parametrize("teacher", ["topk", "hidden"])
def test_the_engine_hands_over_codes_and_scales_and_a_whole_teacher(tmp_path: Path, teacher: str):
    target = make_target(make_recipe(tmp_path))
    given = torch.cat([states(9), torch.randn(9, 1, HIDDEN)], 1)
    sample = Sample("a", list(range(10, 20)), [(4, 10)], [], "stop", False)
    packed, plain = (pack_all(target, each, teacher, [(sample, given)])[0] for each in ("fp8_e4m3", "bfloat16"))
    codes, scales = quantise(given[:, :3], "fp8_e4m3")
    assert torch.equal(packed["features"], codes) and torch.equal(packed["feature_scales"], scales)
    assert packed.keys() - plain.keys() == {"feature_scales"}
    assert all(torch.equal(packed[name], plain[name]) for name in plain if name.startswith("teacher"))
