"""The arithmetic of parity: compiled and NumPy loops give the bytes of a slow reference, at any length and address."""

import itertools
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.redundancy import blocked, kernels
from ft_plugins.redundancy.field import times

try:
    from ft_plugins.redundancy import compiled
except ImportError:
    LOOPS = [blocked]
else:
    LOOPS = [blocked, compiled]

both = pytest.mark.parametrize("loops", LOOPS, ids=lambda loops: loops.__name__.rpartition(".")[2])
with_llvm = pytest.mark.skipif(len(LOOPS) < 2, reason="nothing can be compiled for this processor")
PRODUCTS = np.array([[times(a, b) for b in range(256)] for a in range(256)], dtype=np.uint8)
LENGTHS = st.integers(0, 20) | st.integers(0, 300) | st.sampled_from([4095, 65535, 65536, 65537, 131073])
ROWS = st.lists(st.integers(0, 255), min_size=11, max_size=11) | st.just([1] * 11) | st.just([0] * 11)


def random_bytes(size, seed, misaligned=0):
    """An array that starts `misaligned` bytes after a cache line."""
    whole = np.empty(size + 64 + misaligned, dtype=np.uint8)
    start = -whole.ctypes.data % 64 + misaligned
    whole[start : start + size] = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    return whole[start : start + size]


def added(target, sources, factors, overwrite=False):
    """target (or zeros) + sum of factor * source, by a table of all products: the reference."""
    found = np.zeros_like(target) if overwrite else target.copy()
    for source, factor in zip(sources, factors, strict=True):
        found[: source.size] ^= PRODUCTS[factor][source[: found.size]]
    return found


@st.composite
def arrays(draw, size, count):
    """Arrays of at most that size, each at an address of its own."""
    sizes = [draw(st.just(size) | st.integers(0, size)) for _ in range(count)]
    return [random_bytes(nbytes, draw(st.integers(0, 99)), draw(st.integers(0, 9))) for nbytes in sizes]


@both
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_each_target_gets_its_own_sum_of_products_as_far_as_it_and_the_sources_reach(loops, data):
    size = data.draw(LENGTHS)
    targets = [
        random_bytes(size, 98, data.draw(st.just(0) | st.integers(0, 9))),
        *data.draw(arrays(size, data.draw(st.integers(0, 2)))),
    ]
    sources = data.draw(arrays(size, data.draw(st.integers(0, 11))))
    factors = [data.draw(ROWS)[: len(sources)] for _ in targets]
    overwrite = data.draw(st.booleans())
    expected = [added(target, sources, row, overwrite) for target, row in zip(targets, factors, strict=True)]
    kernels.combine_into(targets, sources, factors, overwrite=overwrite, loops=loops)
    for target, right in zip(targets, expected, strict=True):
        assert np.array_equal(target, right)


@both
@pytest.mark.parametrize("overwrite", [False, True])
def test_each_byte_is_multiplied_by_each_number_of_the_field(loops, overwrite):
    source = np.tile(np.arange(256, dtype=np.uint8), 3)[:-1]
    for factor in range(256):
        target = random_bytes(source.size + 3, factor)
        expected = added(target, [source], [factor], overwrite)
        kernels.combine_into([target], [source], [[factor]], overwrite=overwrite, loops=loops)
        assert np.array_equal(target, expected), factor


@both
def test_blocks_and_groups_of_sources_meet_without_a_seam(loops):
    size = 2 * blocked.XOR_BYTES + 3
    sources = [random_bytes(size - 7 * number, number) for number in range(kernels.MAX_SOURCES + 2)]
    for array in sources:
        array.flags.writeable = False
    ones, others = [1] * len(sources), list(range(100, 100 + len(sources)))
    for overwrite, rows in itertools.product((False, True), ([ones, others], [ones, ones])):
        targets = [random_bytes(size, 98), random_bytes(size, 99)]
        expected = [added(target, sources, row, overwrite) for target, row in zip(targets, rows, strict=True)]
        kernels.combine_into(targets, sources, rows, overwrite=overwrite, loops=loops)
        assert all(map(np.array_equal, targets, expected))


@both
@pytest.mark.parametrize("sizes", [[], [0], [3, 5, 5]])
def test_overwriting_leaves_zeros_where_no_source_reaches(loops, sizes):
    sources = [random_bytes(size, number) for number, size in enumerate(sizes)]
    targets = [random_bytes(9, 97), random_bytes(4, 98)]
    rows = [[1] * len(sources), [7] * len(sources)]
    expected = [added(target, sources, row, True) for target, row in zip(targets, rows, strict=True)]
    kernels.combine_into(targets, sources, rows, overwrite=True, loops=loops)
    assert all(map(np.array_equal, targets, expected))
    assert not targets[0][5:].any()


def test_no_loop_is_given_more_sources_than_it_takes_well():
    given_sources = []

    class Spy:
        def combine(self, targets, sources, factors, overwrite):
            assert [len(row) for row in factors] == [len(sources)] * 2
            given_sources.append(len(sources))

    p, q, *sources = np.zeros((2 + 2 * kernels.MAX_SOURCES + 3, 5), dtype=np.uint8)
    kernels.combine_into([p, q], sources, [[1] * len(sources)] * 2, loops=Spy())
    assert given_sources == [kernels.MAX_SOURCES, kernels.MAX_SOURCES, 3]


@with_llvm
def test_threads_that_need_the_same_loop_compile_it_once(monkeypatch):
    described = []
    together = threading.Barrier(4)
    describe = compiled._module

    def slowly(name, *arguments):
        described.append(name)
        time.sleep(0.1)  # so the others come while this one is compiling
        return describe(name, *arguments)

    def work():
        together.wait(300)
        compiled._loop(6, (True, False, True, False), False)

    monkeypatch.setattr(compiled, "_module", slowly)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    assert described == ["combine_6_plain_scaled_plain_scaled_False"]


@both
def test_threads_that_call_for_the_first_time_together_get_their_own_sums(loops):
    """Given a number of sources for which no loop was compiled before."""
    sources = [[random_bytes(100_003, 10 * thread + number) for number in range(7)] for thread in range(4)]
    targets = [[np.zeros(100_003, dtype=np.uint8) for _ in range(3)] for _ in sources]
    rows = [[1] * 7, list(range(7)), [9] * 7]
    together = threading.Barrier(len(sources))

    def work(number):
        together.wait(300)
        kernels.combine_into(targets[number], sources[number], rows, loops=loops)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(sources))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    for own, (number, row) in itertools.product(range(len(sources)), enumerate(rows)):
        assert np.array_equal(targets[own][number], added(np.zeros(100_003, dtype=np.uint8), sources[own], row))


@pytest.mark.parametrize("missing", ["llvmlite", "llvmlite.ir"])
def test_without_llvmlite_the_loops_are_those_of_numpy(missing):
    code = (
        f"import sys; sys.modules['{missing}'] = None\n"
        "import numpy as np\n"
        "from ft_plugins.redundancy import blocked, kernels\n"
        "assert kernels.fastest_loops() is blocked\n"
        "p, q = np.zeros((2, 1), np.uint8)\n"
        "kernels.combine_into([p, q], [np.array([129], np.uint8)], [[1], [2]])\n"
        "print(p[0], q[0])\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.stdout == "129 31\n", found.stderr  # 2 * 129 = 0x102, less 0x11d


@with_llvm
def test_with_llvmlite_the_loops_are_compiled():
    assert kernels.fastest_loops() is compiled


@with_llvm
@pytest.mark.parametrize("old", ["a processor without a byte shuffle", "LLVM 15"])
def test_what_cannot_be_compiled_for_is_left_to_numpy(old):
    code = (
        "import llvmlite.binding as llvm\n"
        + (
            "llvm.get_host_cpu_features = lambda: {'sse2': True}\n"
            if "shuffle" in old
            else "llvm.llvm_version_info = 15, 0, 7\n"
        )
        + "from ft_plugins.redundancy import blocked, kernels\n"
        "assert kernels.fastest_loops() is blocked\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@with_llvm
@pytest.mark.parametrize("feature", ["avx512bw", "avx2", "ssse3"])
def test_vectors_of_each_width_give_the_same_bytes(feature):
    """Given a processor that has this feature and none that is wider; in a process of its own."""
    import llvmlite.binding as llvm

    if not llvm.get_host_cpu_features().get(feature):
        pytest.skip(f"this processor has no {feature}")
    code = (
        "import numpy as np\n"
        "import llvmlite.binding as llvm\n"
        f"llvm.get_host_cpu_features = lambda: llvm.targets.FeatureMap({ {feature: True} })\n"
        "from ft_plugins.redundancy import blocked, compiled\n"
        "sources = list(np.random.default_rng(1).integers(0, 256, (5, 1003), dtype=np.uint8))\n"
        "rows = (1,) * 5, (2, 3, 200, 255, 0)\n"
        "one, other = np.zeros((2, 2, 1003), np.uint8)\n"
        "compiled.combine(list(one), sources, rows, False)\n"
        "blocked.combine(list(other), sources, rows, False)\n"
        "print(compiled._WIDTH, (one == other).all())\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.stdout == f"{ {'avx512bw': 64, 'avx2': 32, 'ssse3': 16}[feature] } True\n", found.stderr


def test_arrays_that_do_not_go_together_are_refused_before_anything_is_changed():
    target, source = np.zeros(10, dtype=np.uint8), np.ones(10, dtype=np.uint8)
    read_only = target.view()
    read_only.flags.writeable = False
    refused = [
        ([target, read_only], [source], [[1], [1]], "a target is read-only"),
        ([target], [source, np.ones(11, dtype=np.uint8)], [[1, 1]], "a source of 11 bytes does not fit a target of 10"),
        ([target], [np.ones(2, dtype=np.float32)], [[1]], "expected contiguous uint8 arrays .*, found float32"),
        ([target], [source[::2]], [[1]], r"strides \(2,\)"),
        ([target], [source], [[1, 1]], "1 targets and 1 sources have factors .* expected a row for each target"),
        ([target], [source], [[1], [1]], "1 targets and 1 sources have factors"),
        ([], [source], [], "a source of 10 bytes does not fit a target of 0"),
        ([target], [source], [[-1]], "factor -1 is not in GF"),
        ([target], [source], [[256]], "factor 256 is not in GF"),
    ]
    for targets, sources, factors, why in refused:
        with pytest.raises(ValueError, match=why):
            kernels.combine_into(targets, sources, factors)
    assert not target.any()
