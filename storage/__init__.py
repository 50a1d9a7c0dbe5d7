"""Bytes on disk: schemas, the artifact store, Parquet readers and writers, the DuckDB catalog."""
