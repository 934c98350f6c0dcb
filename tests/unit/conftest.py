"""Unit tests share one process: what a test or the code under test sets in the environment ends with the test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    with mock.patch.dict(os.environ):
        yield
