"""Feature samples of random bits in three layouts: the store's, one raw file, and a safetensors file a sample.

In: a number of samples. Out: writers and readers for the feature store's benchmark, alike in everything but the layout:
each read ends as torch tensors copied into a batch's rows.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from storage.feature_spec import wide_columns
from storage.features import FeatureReader, FeatureSample, FeatureSpec, FeatureWriter
from storage.folder import PartFolder

SPEC = FeatureSpec(576, (2, 15, 27), "bfloat16", "topk", 16, "target", "tokenizer")
NAMES = [wide.name for wide in wide_columns(SPEC)]
PER_PART = 256
LONGEST = 512


@dataclass(frozen=True)
class Layouts:
    """Where one set of samples lies in each layout."""

    ours: Path
    raw: Path
    single: Path


def make_samples(count: int, shortest: int, longest: int) -> list[FeatureSample]:
    """Samples of random bits; they share one pool of bytes, so that many of them cost no memory."""
    random = np.random.default_rng(0)
    pool = random.integers(0, 256, 64 << 20, dtype=np.uint8)

    def cut(dtype: np.dtype, *shape: int) -> np.ndarray:
        size = dtype.itemsize * int(np.prod(shape))
        start = int(random.integers(0, (len(pool) - size) // 64)) * 64
        return pool[start : start + size].view(dtype).reshape(shape)

    samples = []
    for number in range(count):
        tokens = int(random.integers(shortest, longest + 1))
        arrays = {wide.name: cut(wide.dtype, tokens - wide.drop, *wide.shape) for wide in wide_columns(SPEC)}
        words = {"id": f"s{number}", "conversation_id": f"c{number}", "source": "random", "split": "train"}
        samples.append(
            FeatureSample(
                **words, category="", temperature=1.0, spans=[(1, tokens)], finish_reason="stop", **arrays
            )
        )
    return samples


def arrays_of(sample: FeatureSample) -> list[np.ndarray]:
    return [getattr(sample, name) for name in NAMES]


def write_ours(folder: Path, samples: Sequence[FeatureSample], row_group_bytes: int | None = None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    writer = FeatureWriter(PartFolder(folder), SPEC, row_group_bytes)
    for number, start in enumerate(range(0, len(samples), PER_PART)):
        writer.write_part(number, samples[start : start + PER_PART])
    writer.finish()


def write_raw(path: Path, samples: Sequence[FeatureSample]) -> None:
    """The floor: the same bytes into one file, flushed to disk as ours are."""
    path.unlink(missing_ok=True)
    with path.open("wb", buffering=0) as file:
        for sample in samples:
            for array in arrays_of(sample):
                file.write(memoryview(array).cast("B"))
        os.fsync(file.fileno())


def write_single(folder: Path, samples: Sequence[FeatureSample], flush: bool = False) -> None:
    """What other trainers do: one safetensors file a sample, left to the page cache unless `flush`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for number, sample in enumerate(samples):
        path = folder / f"{number}.safetensors"
        save_file({name: as_tensor(getattr(sample, name)) for name in NAMES}, path)
        if flush:
            with path.open("rb") as file:
                os.fsync(file.fileno())


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """Without a copy; bfloat16's bits as int16, which costs the same."""
    return torch.from_numpy(array.view(np.int16) if array.dtype == np.uint16 else array)


# Nothing writes into what was read.
warnings.filterwarnings("ignore", "The given (buffer|NumPy array) is not writable")
_TORCH = {"<u2": torch.int16, "<f2": torch.float16, "<i4": torch.int32, "<f4": torch.float32}


class Sink:
    """Where read samples end: rows of a batch that is being packed. Every byte is copied once."""

    def __init__(self, longest: int) -> None:
        self._columns = [as_tensor(np.empty((longest, *wide.shape), wide.dtype)) for wide in wide_columns(SPEC)]

    def take(self, tensors: Sequence[torch.Tensor]) -> None:
        for column, tensor in zip(self._columns, tensors, strict=True):
            column[: tensor.shape[0]].copy_(tensor)


def read_ours(reader: FeatureReader, order: Sequence[int], sink: Sink) -> None:
    for sample in reader.stream(order):
        sink.take([as_tensor(array) for array in arrays_of(sample)])


def again(folder: Path, order: Sequence[int], sink: Sink) -> Callable[[], None]:
    """One reader for many passes, as a trainer's epochs; the store may stay mapped whole."""
    reader = FeatureReader(folder, mapped_bytes=1 << 40)
    return lambda: read_ours(reader, order, sink)


def read_raw(
    path: Path, samples: Sequence[FeatureSample], order: Sequence[int], sink: Sink
) -> Callable[[], None]:
    """The floor: a memory map of one file, in which it is known beforehand where each array lies."""
    mapped, places, end = np.memmap(path, np.uint8, "r"), [], 0
    for sample in samples:
        place = []
        for array in arrays_of(sample):
            place.append((end, end + array.nbytes, _TORCH[array.dtype.str], array.shape))
            end += array.nbytes
        places.append(place)

    def read() -> None:
        for number in order:
            sink.take(
                [
                    torch.frombuffer(mapped[start:stop], dtype=dtype).view(shape)
                    for start, stop, dtype, shape in places[number]
                ]
            )

    return read


def read_single(folder: Path, order: Sequence[int], sink: Sink) -> None:
    for number in order:
        tensors = load_file(folder / f"{number}.safetensors")
        sink.take([tensors[name] for name in NAMES])


def drop_cache(*paths: Path) -> None:
    """Put files out of the page cache (they must not be mapped)."""
    for path in paths:
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.is_file():
                descriptor = os.open(file, os.O_RDONLY)
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
