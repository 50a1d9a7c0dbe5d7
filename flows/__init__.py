"""What runs after what: one Prefect flow a file; no tensor, no SQL, no HTTP in here."""
