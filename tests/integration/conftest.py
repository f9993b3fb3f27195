"""What the tests of an unmodified Megatron-LM share: the checkout that MEGATRON_LM_PATH names, and a corpus."""

import os
from pathlib import Path

import pytest

from harness.megatron_lm import write_corpus


@pytest.fixture(scope="module")
def checkout():
    named = os.environ.get("MEGATRON_LM_PATH")
    if not named:
        pytest.skip("set MEGATRON_LM_PATH")
    return Path(named)


@pytest.fixture(scope="module")
def corpus(checkout, tmp_path_factory):
    """The prefix of a small tokenized data set."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text")
