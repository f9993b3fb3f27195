"""Megatron's dataset index builder is compiled for the interpreter that runs.

Upstream file: megatron/core/datasets/utils.py, with the Makefile beside it, which asks whichever `python3` and
`python3-config` come first on PATH. With pyenv these are chosen by a `.python-version` file in the checkout, and the
library is then built for another interpreter: all that is seen is "No module named ...helpers_cpp".
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
    """compile_helpers with suffix and include paths of the running interpreter given to make."""
    folder = Path(original.__code__.co_filename).resolve().parent

    def compile_helpers() -> None:
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        command = ["make", "-C", str(folder), f"LIBEXT={suffix}", f"CPPFLAGS={_includes()}"]
        if not (folder / f"helpers_cpp{suffix}").exists() and subprocess.run(command).returncode != 0:
            raise UnsupportedError(f"'{' '.join(command)}' failed: Megatron's data sets need make and a C++ compiler")

    return compile_helpers


def _includes() -> str:
    try:
        import pybind11
    except ModuleNotFoundError as error:
        raise UnsupportedError("compiling Megatron's data sets needs pybind11: pip install pybind11") from error
    return f"-I{sysconfig.get_path('include')} -I{pybind11.get_include()}"


def patches() -> tuple[Patch, ...]:
    """The patch of compile_helpers."""
    return (
        Patch(
            *("megatron-core", MODULE, "compile_helpers", MEGATRON),
            reason="the Makefile builds for the interpreter that python3-config belongs to, which may be another",
            replace=for_this_interpreter,
            parameters=(),
            contains=('"make", "-C"',),
        ),
    )
