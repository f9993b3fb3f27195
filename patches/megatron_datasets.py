"""Compile Megatron's dataset index builder for the running interpreter.

Upstream file: megatron/core/datasets/utils.py, with the Makefile next to it, which uses the first `python3` and
`python3-config` on PATH. With pyenv a `.python-version` file in the checkout selects these, and the library is then
built for another interpreter: the only symptom is "No module named ...helpers_cpp".
"""

from __future__ import annotations

import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

from ..errors import UnsupportedError
from .declared import Patch
from .versions import MEGATRON

MODULE = "megatron.core.datasets.utils"


def for_this_interpreter(original: Callable[[], None]) -> Callable[[], None]:
    """compile_helpers that passes suffix and include paths of the running interpreter to make."""
    folder = Path(original.__code__.co_filename).resolve().parent

    def compile_helpers() -> None:
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        command = ["make", "-C", str(folder), f"LIBEXT={suffix}", f"CPPFLAGS={_includes()}"]
        if not (folder / f"helpers_cpp{suffix}").exists() and subprocess.run(command).returncode != 0:
            raise UnsupportedError(f"'{' '.join(command)}' failed: Megatron's datasets need make and a C++ compiler")

    return compile_helpers


def _includes() -> str:
    try:
        import pybind11
    except ModuleNotFoundError as error:
        raise UnsupportedError("compiling Megatron's datasets needs pybind11: pip install pybind11") from error
    return f"-I{sysconfig.get_path('include')} -I{pybind11.get_include()}"


def patches() -> tuple[Patch, ...]:
    """The patch of compile_helpers."""
    return (
        Patch(
            *("megatron-core", MODULE, "compile_helpers", MEGATRON),
            reason="the Makefile builds for the interpreter of python3-config, which may not be the running one",
            replace=for_this_interpreter,
            parameters=(),
            contains=('"make", "-C"',),
        ),
    )
