"""A field of the schema as a key: path in JSON, flag, name in a namespace, and the text that explains it.

Invariant: everything here derives from the pydantic fields; no key is named in this module.

In: a pydantic model whose optional sub-models are systems. Out: `Key` objects in the order of the fields.
"""

from __future__ import annotations

import types
import typing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from ..base.intake import shown
from ..errors import ConfigError

LARGEST = 10**9  # value of any number: iterations, MiB, seconds (30 years, more than a thread can wait)
_FINITE = ConfigDict(allow_inf_nan=False)

KeyPath = tuple[str, ...]  # ("job",) or ("reft", "interval")


@dataclass(frozen=True)
class Key:
    """One key of the schema."""

    path: KeyPath
    flag: str  # on a command line: --ftp-job, --reft, --reft-interval
    dest: str  # in a parsed namespace: ftp_job, reft, reft_interval
    annotation: Any  # with its constraints
    default: Any
    meaning: str
    unit: str
    expected: str  # 'an integer >= 1'
    switch: bool  # the flag has no value
    system: bool  # switches a system on
    needs_system: bool  # no effect unless a system that protects state is on
    needs: str  # a key of the same block without which it has no effect, '' for none
    switches: bool = False  # giving it switches its system on

    @property
    def name(self) -> str:
        """The key in JSON, dotted."""
        return ".".join(self.path)

    def read(self, text: str) -> Any:
        """Parse a value. Raises ConfigError naming flag, expected and found."""
        try:
            text.encode()  # rejects lone surrogates
            return TypeAdapter(self.annotation, config=_FINITE).validate_python(text)
        except UnicodeEncodeError as error:
            raise ConfigError(f"{self.flag}: expected {self.expected}, found {shown(text)}") from error
        except ValidationError as error:
            raise ConfigError(f"{self.flag}: {self.complaint(error.errors()[0])}") from error

    def complaint(self, problem: Any) -> str:
        """The message, expected and found, for one entry of `ValidationError.errors()`."""
        if problem["type"] == "value_error":
            return str(problem["ctx"]["error"])
        if problem["type"] == "too_large":
            return f"expected {self.expected}, maximum {LARGEST:,}, found {shown(problem['input'])}"
        return f"expected {self.expected}, found {shown(problem['input'])}"

    def shown(self, value: Any) -> str:
        """`value` for people; None is shown as unset."""
        if self.system:
            return "on" if value else "off"
        match value:
            case bool():
                return str(value).lower()
            case float():
                return f"{value:g}"
            case None | "":
                return "unset"
            case _:
                return str(value)


def derive(model: type[BaseModel], general: str) -> tuple[Key, ...]:
    """All keys of `model`: its own as `--<general>-<key>`, a system's as `--<system>` and `--<system>-<key>`."""
    keys: list[Key] = []
    for name, field in model.model_fields.items():
        block = _block(field.annotation)
        if block is None:
            keys.append(_key((name,), f"--{general}-{name}", field))
        else:
            keys.append(_key((name,), f"--{name}", field, system=True))
            keys += [_key((name, sub), f"--{name}-{sub}", inner) for sub, inner in block.model_fields.items()]
    return tuple(keys)


def _block(annotation: Any) -> type[BaseModel] | None:
    """The model in `Model | None`, else None."""
    for part in typing.get_args(annotation):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part
    return None


def _key(path: KeyPath, flag: str, field: FieldInfo, system: bool = False) -> Key:
    extra: dict[str, Any] = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    flag = flag.replace("_", "-")
    constraints = tuple(field.metadata)
    annotation: Any = field.annotation
    for rule in constraints:
        annotation = Annotated[annotation, rule]
    return Key(
        path=path,
        flag=flag,
        dest=flag.removeprefix("--").replace("-", "_"),
        annotation=annotation,
        default=field.default,
        meaning=field.description or "",
        unit=extra.get("unit", ""),
        expected=extra.get("expected") or _expected(field.annotation, constraints),
        switch=system or field.annotation is bool,
        system=system,
        needs_system=bool(extra.get("needs_system")),
        needs=extra.get("needs", ""),
        switches=bool(extra.get("switches")),
    )


def _expected(annotation: Any, constraints: tuple[Any, ...]) -> str:
    """The expected value in words: 'an integer >= 1 and <= 1024'."""
    if _block(annotation) is not None:
        return "an object, true or false"
    kinds = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    if typing.get_origin(annotation) is Literal:
        return "one of " + ", ".join(typing.get_args(annotation))
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        chosen = [part for part in typing.get_args(annotation) if typing.get_origin(part) is Literal]
        if chosen:
            return _expected(chosen[0], constraints)  # null in JSON means not given
        return " or ".join(kinds.get(part, "nothing") for part in typing.get_args(annotation))
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    bounds = [
        f"{sign} {getattr(constraint, name)}"
        for constraint in constraints
        for name, sign in signs.items()
        if getattr(constraint, name, None) is not None
    ]
    return " ".join([kinds[annotation], " and ".join(bounds)]).strip()
