"""The arithmetic of parity: compiled and NumPy loops give the bytes of a slow reference, at any length and address."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.errors import CorruptSlotError
from ft_plugins.redundancy import blocked, kernels
from ft_plugins.redundancy.field import power, times
from ft_plugins.redundancy.kernels import Loops

Bytes = npt.NDArray[np.uint8]

try:
    from ft_plugins.redundancy import compiled
except ImportError:
    LOOPS: list[Loops] = [blocked]
else:
    LOOPS = [blocked, compiled]

both = pytest.mark.parametrize("loops", LOOPS, ids=lambda loops: loops.__name__.rpartition(".")[2])
PRODUCTS = np.array([[times(a, b) for b in range(256)] for a in range(256)], dtype=np.uint8)
LENGTHS = st.integers(0, 20) | st.integers(0, 300) | st.sampled_from([4095, 65535, 65536, 65537, 131073])


def random_bytes(size: int, seed: int, misaligned: int = 0) -> Bytes:
    """An array that starts `misaligned` bytes from wherever numpy would put it."""
    return np.random.default_rng(seed).integers(0, 256, size + misaligned, dtype=np.uint8)[misaligned:]


def added(target: Bytes, sources: Sequence[Bytes], factors: Sequence[int], overwrite: bool = False) -> Bytes:
    """target (or zeros) + sum of factor * source, by a table of all products: the reference."""
    found = np.zeros_like(target) if overwrite else target.copy()
    for source, factor in zip(sources, factors, strict=True):
        found[: source.size] ^= PRODUCTS[factor][source]
    return found


@st.composite
def arrays(draw: st.DrawFn, sources: int) -> tuple[int, list[Bytes]]:
    """The size of a target and sources that are at most as long, each at an address of its own."""
    size = draw(LENGTHS)
    count = draw(st.integers(0, sources))
    sizes = [draw(st.just(size) | st.integers(0, size)) for _ in range(count)]
    return size, [random_bytes(nbytes, seed, draw(st.integers(0, 9))) for seed, nbytes in enumerate(sizes)]


@both
@settings(max_examples=60, deadline=None)
@given(arrays(11), st.integers(0, 9), st.booleans())
def test_a_sum_of_many_sources_is_their_xor_with_zeros_behind_the_short_ones(
    loops: Loops, given_arrays: tuple[int, list[Bytes]], misaligned: int, overwrite: bool
) -> None:
    size, sources = given_arrays
    target = random_bytes(size, 99, misaligned)
    expected = added(target, sources, [1] * len(sources), overwrite)
    kernels.xor_many_into(target, sources, overwrite=overwrite, loops=loops)
    assert np.array_equal(target, expected)


@both
@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(0, 9), st.integers(0, 9), st.data())
def test_one_source_is_added_at_any_address(
    loops: Loops, size: int, target_at: int, source_at: int, data: st.DataObject
) -> None:
    target, source = random_bytes(size, 1, target_at), random_bytes(data.draw(st.integers(0, size)), 2, source_at)
    overwrite = data.draw(st.booleans())
    expected = added(target, [source], [1], overwrite)
    kernels.xor_many_into(target, (source,), overwrite=overwrite, loops=loops)
    assert np.array_equal(target, expected)


@both
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_source_is_scaled_by_each_number_of_the_field_for_each_byte(loops: Loops, overwrite: bool) -> None:
    source = np.tile(np.arange(256, dtype=np.uint8), 3)[:-1]
    for factor in range(256):
        target = random_bytes(source.size + 3, factor)
        expected = added(target, [source], [factor], overwrite)
        kernels.scale_xor_into(target, source, factor, overwrite=overwrite, loops=loops)
        assert np.array_equal(target, expected), factor


@both
@settings(max_examples=60, deadline=None)
@given(arrays(11), st.data())
def test_p_and_q_are_the_plain_and_the_weighted_sum_whatever_the_exponents(
    loops: Loops, given_arrays: tuple[int, list[Bytes]], data: st.DataObject
) -> None:
    size, sources = given_arrays
    some = st.lists(st.integers(0, 300), min_size=len(sources), max_size=len(sources))
    exponents = data.draw(st.permutations(range(len(sources))) | st.just(list(range(len(sources)))) | some)
    p, q = random_bytes(size, 98, 3), random_bytes(size, 99, 5)
    overwrite = data.draw(st.booleans())
    expected_p = added(p, sources, [1] * len(sources), overwrite)
    expected_q = added(q, sources, [power(exponent) for exponent in exponents], overwrite)
    kernels.pq_into(p, q, sources, exponents, overwrite=overwrite, loops=loops)
    assert np.array_equal(p, expected_p) and np.array_equal(q, expected_q)


@both
def test_blocks_and_groups_of_sources_meet_without_a_seam(loops: Loops) -> None:
    size = 2 * blocked.XOR_BYTES + 4 * blocked.FIELD_BYTES + 3
    sources = [random_bytes(size - 7 * number, number) for number in range(kernels.MAX_SOURCES + 2)]
    for array in sources:
        array.flags.writeable = False
    p, q = random_bytes(size, 98), random_bytes(size, 99)
    expected_p = added(p, sources, [1] * len(sources))
    expected_q = added(q, sources, [power(number) for number in range(len(sources))])
    whole = p.copy()
    kernels.xor_many_into(whole, sources, loops=loops)
    kernels.pq_into(p, q, sources, range(len(sources)), loops=loops)
    assert np.array_equal(p, expected_p) and np.array_equal(q, expected_q) and np.array_equal(whole, expected_p)


@both
@pytest.mark.parametrize("sizes", [[], [0], [3, 5, 5]])
def test_overwriting_leaves_zeros_where_no_source_reaches(loops: Loops, sizes: list[int]) -> None:
    sources = [random_bytes(size, number) for number, size in enumerate(sizes)]
    plain, p, q = (random_bytes(9, seed) for seed in (97, 98, 99))
    expected = added(p, sources, [1] * len(sources), True)
    kernels.xor_many_into(plain, sources, overwrite=True, loops=loops)
    kernels.pq_into(p, q, sources, range(len(sources)), overwrite=True, loops=loops)
    assert np.array_equal(plain, expected) and np.array_equal(p, expected)
    assert np.array_equal(q, added(q, sources, [power(number) for number in range(len(sources))], True))
    assert not q[5:].any()


def test_no_loop_is_given_more_sources_than_it_takes_well() -> None:
    given_sources: list[int] = []

    class Spy:
        def xor(self, target: Bytes, sources: Sequence[Bytes], overwrite: bool) -> None:
            given_sources.append(len(sources))

        def scale(self, target: Bytes, source: Bytes, factor: int, overwrite: bool) -> None:
            raise AssertionError("not asked for")

        def pq(self, p: Bytes, q: Bytes, sources: Sequence[Bytes], factor: int, overwrite: bool) -> None:
            given_sources.append(len(sources))

    p, q, *sources = np.zeros((2 + 2 * kernels.MAX_SOURCES + 3, 5), dtype=np.uint8)
    kernels.xor_many_into(p, sources, loops=Spy())
    kernels.pq_into(p, q, sources, range(len(sources)), loops=Spy())
    assert given_sources == [kernels.MAX_SOURCES, kernels.MAX_SOURCES, 3] * 2


@both
def test_threads_that_call_for_the_first_time_together_get_their_own_sums(loops: Loops) -> None:
    sources = [[random_bytes(100_003, 10 * thread + number) for number in range(3)] for thread in range(4)]
    found = [(np.zeros(100_003, dtype=np.uint8), np.zeros(100_003, dtype=np.uint8)) for _ in sources]
    together = threading.Barrier(len(sources))

    def work(number: int) -> None:
        together.wait(30)
        kernels.pq_into(*found[number], sources[number], [4, 5, 6], loops=loops)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(sources))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for (p, q), own in zip(found, sources, strict=True):
        assert np.array_equal(p, added(np.zeros_like(p), own, [1, 1, 1]))
        assert np.array_equal(q, added(np.zeros_like(q), own, [power(e) for e in (4, 5, 6)]))


def test_without_numba_the_loops_are_those_of_numpy() -> None:
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "import numpy as np\n"
        "from ft_plugins.redundancy import blocked, kernels\n"
        "assert kernels.LOOPS is blocked\n"
        "p, q = np.zeros((2, 1), np.uint8)\n"
        "kernels.pq_into(p, q, [np.array([129], np.uint8)], [1])\n"
        "print(p[0], q[0])\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.stdout == "129 31\n", found.stderr  # 2 * 129 = 0x102, less 0x11d


@pytest.mark.skipif(len(LOOPS) < 2, reason="numba is not installed")
def test_with_numba_the_loops_are_compiled() -> None:
    assert kernels.LOOPS is compiled


def test_arrays_that_do_not_go_together_are_refused_before_anything_is_changed() -> None:
    target, source = np.zeros(10, dtype=np.uint8), np.ones(10, dtype=np.uint8)
    read_only = target.view()
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="a target is read-only"):
        kernels.xor_many_into(read_only, (source,))
    with pytest.raises(ValueError, match="a source of 11 bytes does not fit a target of 10"):
        kernels.xor_many_into(target, [source, np.ones(11, dtype=np.uint8)])
    with pytest.raises(ValueError, match="expected contiguous uint8 arrays of one dimension, found float32"):
        kernels.xor_many_into(target, (np.ones(2, dtype=np.float32),))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"strides \(2,\)"):
        kernels.xor_many_into(target, (source[::2],))
    with pytest.raises(ValueError, match="expected the same size"):
        kernels.pq_into(target, target[:5], [source], [0])
    with pytest.raises(ValueError, match="1 sources have 2 exponents"):
        kernels.pq_into(target, target.copy(), [source], [0, 1])
    for factor in (-1, 256):
        with pytest.raises(ValueError, match=f"factor {factor} is not in GF"):
            kernels.scale_xor_into(target, source, factor)
        with pytest.raises(ValueError, match=f"factor {factor} is not in GF"):
            kernels.digest_xor_into(target, source, buckets_of(source, 10), factor)
    assert not target.any()


# digests on the way


def buckets_of(source: Bytes, nbytes: int) -> list[tuple[int, int, int]]:
    """A digest for each `nbytes` of `source`."""
    parts = [(at, source[at : at + nbytes]) for at in range(0, source.size, nbytes)]
    return [(at, part.size, xxhash.xxh3_64_intdigest(part.data)) for at, part in parts]


SMALL, LARGE = 1000, kernels.WHOLE_BYTES + 2 * kernels.DIGEST_BYTES + 5


@both
@pytest.mark.parametrize("factor", [0, 1, 77])
@pytest.mark.parametrize("nbytes", [SMALL, kernels.WHOLE_BYTES, LARGE])
def test_what_matches_its_digests_is_added_and_no_more_than_fits(loops: Loops, factor: int, nbytes: int) -> None:
    source = random_bytes(2 * nbytes + 300, 1, 1)
    for size in (source.size + 9, source.size, nbytes + 17, 0):
        target = random_bytes(size, 2, 3)
        for overwrite in (False, True):
            expected = added(target, [source[:size]], [factor], overwrite)
            buckets = buckets_of(source, nbytes)
            kernels.digest_xor_into(target, source, buckets, factor, overwrite=overwrite, loops=loops)
            assert np.array_equal(target, expected), (size, overwrite)


@both
@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
def test_a_bucket_that_was_changed_is_named_with_both_digests(loops: Loops, nbytes: int) -> None:
    source = random_bytes(3 * nbytes, 1)
    buckets = buckets_of(source, nbytes)
    source[2 * nbytes - 1] ^= 1
    wrong = xxhash.xxh3_64_hexdigest(source[nbytes : 2 * nbytes].data)
    target = random_bytes(source.size, 2)
    expected = added(target, [source[:nbytes]], [1])
    with pytest.raises(CorruptSlotError) as caught:
        kernels.digest_xor_into(target, source, buckets, name="stripe 2, data of node 3", loops=loops)
    assert str(caught.value).startswith(
        f"stripe 2, data of node 3: bucket 1 ({nbytes} bytes at {nbytes}) does not match its digest: "
        f"expected {buckets[1][2]:016x}, found {wrong}"
    )
    assert np.array_equal(target[2 * nbytes :], expected[2 * nbytes :])  # nothing behind it was touched
    if nbytes <= kernels.WHOLE_BYTES:
        assert np.array_equal(target, expected)  # nor anything of it


def test_corruption_beyond_the_end_of_the_target_is_found_too() -> None:
    source = random_bytes(3000, 1)
    buckets = buckets_of(source, SMALL)
    source[2999] ^= 128
    with pytest.raises(CorruptSlotError, match="bucket 2"):
        kernels.digest_xor_into(np.zeros(500, dtype=np.uint8), source, buckets)


@pytest.mark.parametrize(
    "change, found",
    [
        (lambda buckets: buckets[:-1], "buckets cover 2000 of 2500 bytes"),
        (lambda buckets: buckets[1:], "bucket 0 is 1000 bytes at 1000, expected to start at 0"),
        (lambda buckets: [buckets[0], buckets[2]], "bucket 1 is 500 bytes at 2000, expected to start at 1000"),
        (lambda buckets: [*buckets, (2500, 1, 0)], "buckets cover 2501 of 2500 bytes"),
        (
            lambda buckets: [(0, -5, 0), *buckets],
            "bucket 0 is -5 bytes at 0, expected to start at 0, with 0 bytes or more",
        ),
    ],
)
def test_buckets_that_leave_bytes_unverified_are_refused(change: object, found: str) -> None:
    source, target = random_bytes(2500, 1), np.zeros(2500, dtype=np.uint8)
    with pytest.raises(ValueError, match=found):
        kernels.digest_xor_into(target, source, change(buckets_of(source, SMALL)))  # type: ignore[operator]
    assert not target.any()
