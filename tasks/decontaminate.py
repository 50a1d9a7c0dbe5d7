"""Which training prompts a set of evaluation prompts is found in: exactly, or by most of its word n-grams.

In: (id, text), two Arrow tables or a data set on disk and a table. Out: `Overlap`s, one per training id. DuckDB does
it, and reads what lies on disk as it goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from storage.schemas import Message

NGRAM = 8  # words
THRESHOLD = 0.5  # of an evaluation prompt's n-grams found in one training row
FEWEST = 4  # n-grams: a shorter evaluation prompt is compared as a whole only
BOILERPLATE = 3  # evaluation prompts that share an n-gram: it is the frame of the question, not the question

BATCH_TURNS = 2048
_TURNS = pa.schema([("id", pa.string()), ("text", pa.string())])

_WORDS = r"string_split(trim(regexp_replace(lower(text), '[^\p{L}\p{N}]+', ' ', 'g')), ' ')"

# Shifted copies side by side: one pass over the words. (A lambda over positions copies the list for each of
# them.)
_GRAMS = "list_zip(" + ", ".join(f"words[{shift + 1}:]" for shift in range(NGRAM)) + ")"

_QUERY = f"""
with
  seen as (select id, {_WORDS} as words from training),
  asked as (select id, {_WORDS} as words from evaluation),
  exact as (
    select seen.id as training_id, min(asked.id) as evaluation_id, 1.0 as share
    from seen join asked on seen.words = asked.words group by seen.id
  ),
  asked_grams as (
    select distinct id, hash(gram) as gram from (select id, unnest({_GRAMS}[:len(words) - {NGRAM - 1}]) as
    gram from asked where len(words) >= {NGRAM})
  ),
  telling as (
    select id, gram from asked_grams
    where gram not in (select gram from asked_grams group by gram having count(*) >= {BOILERPLATE})
  ),
  sizes as (select id, count(*) as grams from telling group by id having count(*) >= {FEWEST}),
  seen_grams as (
    select distinct id, gram from (select id, hash(unnest({_GRAMS}[:len(words) - {NGRAM - 1}])) as gram from seen
    where len(words) >= {NGRAM}) where gram in (select gram from telling)
  ),
  shared as (
    select seen_grams.id as training_id, telling.id as evaluation_id, count(*) / any_value(sizes.grams) as
    share from telling join sizes using (id) join seen_grams using (gram)
    group by all having share >= {THRESHOLD}
  ),
  both_ways as (select *, true as exactly from exact union all select *, false from shared)
select training_id, arg_max(evaluation_id, share), max(share), bool_or(exactly) from both_ways
group by training_id order by training_id
"""

# One thread: each holds the n-grams of some thousand turns at once.
_CONFIG = {"threads": 1, "preserve_insertion_order": False}


@dataclass(frozen=True)
class Overlap:
    """`training_id` holds `evaluation_id`: `share` of its telling n-grams, or the whole of it, word for word.
    """

    training_id: str
    evaluation_id: str
    share: float
    exact: bool


def find_overlaps(training: pa.Table | ds.Dataset, evaluation: pa.Table) -> list[Overlap]:
    """Training rows that hold an evaluation prompt. Both have string columns id and text.

    Case, punctuation and spacing do not matter. N-grams that three or more evaluation prompts share are
    boilerplate and count for nothing; a row overlaps where half of a prompt's other n-grams are in it.
    """
    if not evaluation.num_rows:
        return []
    with duckdb.connect(config=_CONFIG) as connection:
        connection.register("training", training)
        connection.register("evaluation", evaluation)
        rows = connection.execute(_QUERY).fetchall()
    return [
        Overlap(training_id, evaluation_id, float(share), exact)
        for training_id, evaluation_id, share, exact in rows
    ]


def turns_table(conversations: Iterable[tuple[str, Iterable[Message]]], first_only: bool = False) -> pa.Table:
    """(id, text) of user turns, one row a turn; of each conversation's first one where `first_only`."""
    return pa.Table.from_batches(_turns(conversations, first_only), _TURNS)


def turns_on_disk(conversations: Iterable[tuple[str, Iterable[Message]]], file: Path) -> ds.Dataset:
    """(id, text) of every user turn, in a file: the questions of millions of conversations need no memory."""
    with pq.ParquetWriter(file, _TURNS, compression="zstd") as writer:
        for batch in _turns(conversations, first_only=False):
            writer.write_batch(batch)
    return ds.dataset(file)


def _turns(
    conversations: Iterable[tuple[str, Iterable[Message]]], first_only: bool
) -> Iterator[pa.RecordBatch]:
    rows = (
        {"id": identity, "text": message.content}
        for identity, messages in conversations
        for message in _users(messages, first_only)
    )
    while batch := list(islice(rows, BATCH_TURNS)):
        yield pa.RecordBatch.from_pylist(batch, schema=_TURNS)


def _users(messages: Iterable[Message], first_only: bool) -> Iterator[Message]:
    for message in messages:
        if message.role == "user":
            yield message
            if first_only:
                return
