"""SQL over a whole store: DuckDB views of what there is, what came from what, and every kind's narrow
columns.

In: a store. Out: a DuckDB connection with views, and a few ready questions. `python -m storage.catalog
STORE [SQL]` prints one answer, or lists the views. The wide columns of features are never touched.
"""

from __future__ import annotations

import json
import sys
from fnmatch import fnmatch

import duckdb
import pyarrow as pa

from storage.artifacts import ArtifactStore
from storage.errors import StorageError
from storage.feature_spec import INDEX_SCHEMA
from storage.lineage import Lineage
from storage.manifest import ArtifactRef, Manifest
from storage.schemas import ACCEPTANCE, CONVERSATIONS, DECODED, QUARANTINE, RESPONSES, SERVING, VOCABULARY

# View: the kind whose files it reads, which of them, and the columns it has where there is no file yet.
VIEWS: dict[str, tuple[str, str, pa.Schema]] = {
    "conversations": ("conversations", "part-*.parquet", CONVERSATIONS),
    "quarantine": ("conversations", "quarantine.parquet", QUARANTINE),
    "responses": ("responses", "part-*.parquet", RESPONSES),
    "features": ("features", "index.parquet", INDEX_SCHEMA),
    "vocabulary": ("vocabulary", "vocabulary.parquet", VOCABULARY),
    "acceptance": ("acceptance", "rows.parquet", ACCEPTANCE),
    "decoded": ("acceptance", "rounds.parquet", DECODED),
    "serving": ("serving", "counters.parquet", SERVING),
}

QUESTIONS = {
    "builds": """
        -- which builds used which data
        select a.created, l.fingerprint as draft, l.ancestor_kind as kind, l.ancestor as fingerprint,
            b.rows, b.bytes
        from lineage l
        join artifacts a on a.kind = l.kind and a.fingerprint = l.fingerprint
        left join artifacts b on b.kind = l.ancestor_kind and b.fingerprint = l.ancestor
        where l.kind = 'draft' order by a.created, draft, kind""",
    "acceptance_by_category": """
        -- held-out acceptance of every build: share of rounds whose first draft token came through, and tau
        select a.created, i.input as draft, r.mode, r.temperature, r.category, count(*) as rounds,
            avg((r.accepted >= 1)::int) as first_accepted, 1 + avg(r.accepted) as tau
        from acceptance r
        join artifacts a on a.kind = 'acceptance' and a.fingerprint = r.fingerprint
        left join inputs i
            on i.kind = 'acceptance' and i.fingerprint = r.fingerprint and i.input_kind = 'draft'
        group by all order by a.created, draft, r.mode, r.temperature, r.category""",
    "tokens_by_source": """
        -- what each set of features holds
        select fingerprint, source, split, count(*) as samples, sum(n_tokens) as tokens,
            sum(n_supervised) as supervised_tokens
        from features group by all order by fingerprint, source, split""",
    "unused": """
        -- artifacts that no published draft needs; `python -m storage.gc STORE` removes them
        select kind, fingerprint, use, bytes, created
        from artifacts where use <> 'used' order by bytes desc""",
}


class Catalog:
    """A store as it is now, in an in-memory DuckDB connection (`connection`)."""

    def __init__(self, store: ArtifactStore) -> None:
        self._store = store
        self._manifests = [store.manifest(ref) for ref in store.list()]
        self.lineage = Lineage.of(self._manifests)
        self.connection = duckdb.connect()
        for name, table in self._tables().items():
            self.connection.register(f"_{name}", table)
            self.connection.execute(f"create table {name} as from _{name}")
        for name in VIEWS:
            self._create_view(name)
        for name, sql in QUESTIONS.items():
            self.connection.execute(f"create view {name} as {sql}")

    def query(self, sql: str) -> pa.Table:
        """The answer to one statement as an Arrow table. Raises StorageError with DuckDB's own words."""
        try:
            answer = self.connection.sql(sql)
            return answer.to_arrow_table() if answer is not None else pa.table({})
        except duckdb.Error as error:
            raise StorageError(f"SQL: {' '.join(str(error).split())}") from None

    def _tables(self) -> dict[str, pa.Table]:
        pairs = [(manifest, ref) for manifest in self._manifests for ref in manifest.inputs]
        lines = [
            (start, end) for start in self.lineage.manifests for end in sorted(self.lineage.ancestors(start))
        ]
        files = [
            (manifest, name, record)
            for manifest in self._manifests
            for name, record in manifest.files.items()
        ]
        return {
            "artifacts": pa.Table.from_pylist([self._artifact(each) for each in self._manifests], _ARTIFACTS),
            "inputs": _strings(
                kind=[manifest.kind for manifest, _ in pairs],
                fingerprint=[manifest.fingerprint for manifest, _ in pairs],
                input_kind=[ref.kind for _, ref in pairs],
                input=[ref.fingerprint for _, ref in pairs],
            ),
            "lineage": _strings(
                kind=[start[0] for start, _ in lines],
                fingerprint=[start[1] for start, _ in lines],
                ancestor_kind=[end[0] for _, end in lines],
                ancestor=[end[1] for _, end in lines],
            ),
            "files": _strings(
                kind=[manifest.kind for manifest, _, _ in files],
                fingerprint=[manifest.fingerprint for manifest, _, _ in files],
                name=[name for _, name, _ in files],
                xxh3=[record.xxh3 for _, _, record in files],
            )
            .append_column("bytes", pa.array([record.bytes for _, _, record in files], pa.int64()))
            .append_column("rows", pa.array([record.rows for _, _, record in files], pa.int64())),
        }

    def _artifact(self, manifest: Manifest) -> dict[str, object]:
        return {
            "kind": manifest.kind,
            "fingerprint": manifest.fingerprint,
            "stage": manifest.stage,
            "stage_version": manifest.stage_version,
            "created": manifest.created,
            "host": manifest.host,
            "user": manifest.user,
            "use": self.lineage.use((manifest.kind, manifest.fingerprint)),
            "files": len(manifest.files),
            "rows": manifest.rows,
            "bytes": manifest.bytes,
            "parameters": json.dumps(manifest.parameters),
            "summary": json.dumps(manifest.summary),
        }

    def _create_view(self, name: str) -> None:
        kind, pattern, schema = VIEWS[name]
        found = [
            (manifest.ref, file)
            for manifest in self._manifests
            if manifest.kind == kind
            for file in manifest.files
            if fnmatch(file, pattern)
        ]
        if not found:
            empty = schema.empty_table().append_column("fingerprint", pa.array([], pa.string()))
            self.connection.register(f"_{name}", empty)
            self.connection.execute(f"create view {name} as from _{name}")
            return
        paths = [self._path(ref, file) for ref, file in found]
        listed = ", ".join("'" + path.replace("'", "''") + "'" for path in paths)
        # The artifact's folder is named by its fingerprint; DuckDB computes this once a file, not once a row. By name:
        # an older artifact may lack a column that was added since.
        self.connection.execute(
            f"create view {name} as "
            f"select * exclude (filename), split_part(filename, '/', -2) as fingerprint "
            f"from read_parquet([{listed}], filename = true, union_by_name = true)"
        )

    def _path(self, ref: ArtifactRef, name: str) -> str:
        return str(self._store.file(ref, name))


_ARTIFACTS = pa.schema(
    [
        (name, pa.int64() if name in {"stage_version", "files", "rows", "bytes"} else pa.string())
        for name in (
            "kind",
            "fingerprint",
            "stage",
            "stage_version",
            "created",
            "host",
            "user",
            "use",
            "files",
            "rows",
            "bytes",
            "parameters",
            "summary",
        )
    ]
)


def _strings(**columns: list[str]) -> pa.Table:
    return pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()})


def main(arguments: list[str]) -> int:
    """Print one answer, or what can be asked."""
    if not 1 <= len(arguments) <= 2:
        print("usage: python -m storage.catalog STORE [SQL]", file=sys.stderr)
        return 2
    try:
        catalog = Catalog(ArtifactStore(arguments[0]))
        if len(arguments) == 2:
            print(catalog.query(arguments[1]).to_pandas().to_string(index=False))
            return 0
    except StorageError as error:
        print(error, file=sys.stderr)
        return 1
    for name in ["artifacts", "inputs", "lineage", "files", *VIEWS]:
        columns = catalog.query(f"select * from {name} limit 0").column_names
        print(f"{name}: {', '.join(columns)}")
    for name, sql in QUESTIONS.items():
        print(f"from {name}  {sql.strip().splitlines()[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
