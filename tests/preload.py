"""What the ranks of tests are forked with: pytest too, which the modules of their functions import."""

import pytest  # noqa: F401

import megatron_2bw.start.preload  # noqa: F401
