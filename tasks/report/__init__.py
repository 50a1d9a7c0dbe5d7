"""The report of one draft and of several: self-contained HTML pages."""
