"""Samples of bytes that are copied in the background."""

import numpy as np
import pytest

from ft_plugins.snapshot.capture.samples import digest_of, sample_of


@pytest.mark.parametrize("nbytes", [0, 1, 255, 1023, 1024, 1025, 1279, 4096, 1_000_003])
def test_a_sample_lies_within_the_bytes_and_reaches_from_end_to_end(nbytes):
    data = np.zeros(nbytes, dtype=np.uint8)
    sample = sample_of(data)
    assert sample.nbytes == min(nbytes, 1024)
    before = digest_of(sample)
    for at in (0, -1 if nbytes <= 1024 else -3)[:nbytes]:
        data[at] = 1
        assert digest_of(sample) != before, f"byte {at} of {nbytes} is not in the sample"
        data[at] = 0
    assert digest_of(sample) == before


def test_a_change_of_any_third_of_the_bytes_is_seen():
    data = np.zeros(100_000, dtype=np.uint8)
    sample = sample_of(data)
    before = digest_of(sample)
    for start in range(0, 66_000, 1000):
        data[start : start + 34_000] = 1
        assert digest_of(sample) != before
        data[:] = 0
