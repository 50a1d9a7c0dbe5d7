"""The Prefect server that the flow tests use."""

from tests.flows.conftest import prefect_server

__all__ = ["prefect_server"]
