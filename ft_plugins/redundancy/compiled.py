"""The parity loop compiled by LLVM: all targets in one pass over the sources, without the GIL.

Invariant: the same bytes as blocked.py. All arrays are uint8, contiguous and of one size; any length, any alignment.
With `overwrite` the previous content of the targets is ignored.

A product is the sum of the products of a byte's low and high four bits. So a factor needs two tables of 16 bytes, and
the processor's byte shuffle looks up a vector at once. A row of ones is plain XOR, without tables. There is one loop
for each number of sources and kind of rows, compiled on first call in about 10 ms. Nothing is cached on disk; threads
may call, and compile, at the same time.

Importing this module raises ImportError if llvmlite is missing or too old, or if the processor has no byte shuffle.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import cache, lru_cache

import llvmlite.binding as llvm
import numpy as np
import numpy.typing as npt
from llvmlite import ir

from . import blocked
from .field import times

Bytes = npt.NDArray[np.uint8]
Rows = tuple[tuple[int, ...], ...]

_HALF = 16  # values of four bits, and bytes of a table
_SHUFFLES = (  # feature of the processor, bytes of a vector, LLVM's name of the shuffle; the widest first
    ("avx512bw", 64, "llvm.x86.avx512.pshuf.b.512"),
    ("avx2", 32, "llvm.x86.avx2.pshuf.b"),
    ("ssse3", 16, "llvm.x86.ssse3.pshuf.b.128"),
    ("neon", 16, "llvm.aarch64.neon.tbl1.v16i8"),
)
_SIGNATURE = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 2, ctypes.c_char_p, ctypes.c_int64, ctypes.c_uint8)


def combine(targets: Sequence[Bytes], sources: Sequence[Bytes], factors: Rows, overwrite: bool) -> None:
    """targets[i] += sum_j factors[i][j] * sources[j]."""
    plain, tables = _prepared(factors)
    size, places = targets[0].size, [target.ctypes.data for target in targets]
    whole = size - size % _WIDTH
    past_cache = overwrite and not any(place % _WIDTH for place in places)
    loop = _loop(len(sources), plain, past_cache)
    loop(_array(places), _array([each.ctypes.data for each in sources]), tables, whole, 0 if overwrite else 255)
    if whole < size:
        blocked.combine([each[whole:] for each in targets], [each[whole:] for each in sources], factors, overwrite)


def _array(places: Sequence[int]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(places))(*places)


@lru_cache(1024)
def _prepared(factors: Rows) -> tuple[tuple[bool, ...], bytes]:
    """Which rows are ones, and the tables of all other rows."""
    plain = tuple(all(factor == 1 for factor in row) for row in factors)
    scaled = [row for row, ones in zip(factors, plain, strict=True) if not ones]
    return plain, b"".join(_tables(factor) for row in scaled for factor in row)


@cache
def _tables(factor: int) -> bytes:
    """The products of `factor` with each value of the low four bits of a byte, then of the high four."""
    return bytes(times(factor, half << shift) for shift in (0, 4) for half in range(_HALF))


def _machine() -> tuple[llvm.TargetMachine, int, str]:
    """Code generation for this processor, the bytes of its vectors, and its shuffle. Raises ImportError."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features()
    for feature, width, shuffle in _SHUFFLES:
        if features.get(feature):
            target = llvm.Target.from_default_triple()
            return target.create_target_machine(llvm.get_host_cpu_name(), features.flatten(), jit=True), width, shuffle
    raise ImportError("this processor has no byte shuffle")


if tuple(llvm.llvm_version_info)[0] < 20:
    raise ImportError("llvmlite is too old: expected LLVM 20 or newer, whose pointers have no types")
_MACHINE, _WIDTH, _SHUFFLE = _machine()
_ENGINE = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _MACHINE)
_COMPILING = threading.Lock()
_BYTE, _INDEX, _POINTER = ir.IntType(8), ir.IntType(64), ir.PointerType()
_VECTOR, _TABLE = ir.VectorType(_BYTE, _WIDTH), ir.VectorType(_BYTE, _HALF)


def _loop(count: int, plain: tuple[bool, ...], past_cache: bool) -> Callable[..., None]:
    """The loop for `count` sources and a target for each of `plain`, whether its factors are all 1."""
    with _COMPILING:
        return _compiled(count, plain, past_cache)


@cache
def _compiled(count: int, plain: tuple[bool, ...], past_cache: bool) -> Callable[..., None]:
    name = "_".join([f"combine_{count}", *("plain" if ones else "scaled" for ones in plain), str(past_cache)])
    module = llvm.parse_assembly(str(_module(name, count, plain, past_cache)))
    module.verify()
    _ENGINE.add_module(module)
    _ENGINE.finalize_object()
    return _SIGNATURE(_ENGINE.get_function_address(name))


def _module(name: str, count: int, plain: tuple[bool, ...], past_cache: bool) -> ir.Module:
    """`name`(targets, sources, tables, nbytes, mask): the bits of `mask` are kept of each byte of the targets.

    `past_cache`: the mask is 0 and the targets are aligned. They are written without being fetched.
    """
    module = ir.Module(name)
    shuffle = ir.Function(module, ir.FunctionType(_VECTOR, [_VECTOR, _VECTOR]), _SHUFFLE)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_POINTER] * 3 + [_INDEX, _BYTE]), name)
    start, body, end = (function.append_basic_block(label) for label in ("start", "body", "end"))
    at_targets, at_sources, at_tables, nbytes, mask = function.args
    code = ir.IRBuilder(start)

    def pointers(array: ir.Value, size: int) -> list[ir.Value]:
        places = [code.gep(array, [_INDEX(at)], source_etype=_POINTER) for at in range(size)]
        return [code.load(place, typ=_POINTER) for place in places]

    def repeated(value: ir.Value, pattern: Sequence[int]) -> ir.Value:
        return code.shuffle_vector(value, value, ir.Constant(ir.VectorType(ir.IntType(32), _WIDTH), pattern))

    def vector_at(array: ir.Value, at: ir.Value, kind: ir.Type) -> ir.Value:
        return code.load(code.gep(array, [at], source_etype=_BYTE), typ=kind, align=1)

    targets, sources = pointers(at_targets, len(plain)), pointers(at_sources, count)
    number = count * plain.count(False) * 2
    halves = [vector_at(at_tables, _INDEX(_HALF * at), _TABLE) for at in range(number)]
    tables = iter([repeated(half, [lane % _HALF for lane in range(_WIDTH)]) for half in halves])
    kept = repeated(code.insert_element(ir.Constant(_VECTOR, ir.Undefined), mask, _INDEX(0)), [0] * _WIDTH)
    code.cbranch(code.icmp_signed(">", nbytes, _INDEX(0)), body, end)

    code.position_at_end(body)
    at = code.phi(_INDEX)
    values = [vector_at(source, at, _VECTOR) for source in sources]
    low = [code.and_(value, ir.Constant(_VECTOR, [15] * _WIDTH)) for value in values]
    high = [code.lshr(value, ir.Constant(_VECTOR, [4] * _WIDTH)) for value in values]
    for target, ones in zip(targets, plain, strict=True):
        total = ir.Constant(_VECTOR, None) if past_cache else code.and_(vector_at(target, at, _VECTOR), kept)
        for value, *parts in zip(values, low, high, strict=True):
            for each in [value] if ones else [code.call(shuffle, [next(tables), part]) for part in parts]:
                total = code.xor(total, each)
        place = code.gep(target, [at], source_etype=_BYTE)
        stored = code.store(total, place, align=_WIDTH if past_cache else 1)
        if past_cache:
            stored.set_metadata("nontemporal", module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
    following = code.add(at, _INDEX(_WIDTH))
    at.add_incoming(_INDEX(0), start)
    at.add_incoming(following, body)
    code.cbranch(code.icmp_signed("<", following, nbytes), body, end)
    code.position_at_end(end)
    if past_cache:
        code.fence("seq_cst")  # such stores are ordered by nothing else
    code.ret_void()
    return module
