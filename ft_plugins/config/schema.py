"""The keys: one pydantic model for what a user may decide, one block in it per system.

Invariant: a `Config` is valid and frozen, and remembers which of its keys were given, so that two sources can be merged
without one silently winning.

A new system is a subclass of `SystemConfig` and one optional field of `Config`: its flags follow (`--<system>` switches
it on, `--<system>-<key>` sets a key; general keys are `--ftp-<key>`), and so do JSON, environment and documentation.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, StringConstraints, ValidationError

from .. import faults as fault_points
from ..errors import ConfigError
from . import checks, sources
from .keys import Key, KeyPath, derive

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,47}$"  # becomes part of paths and of names in shared memory
NAME_RULE = "1 to 48 letters, digits, '.', '_' or '-', the first a letter or digit"

_JSON = "ft_plugins"  # name of the block in a DeepSpeed JSON file
_GENERAL = "ftp"  # flags of keys that belong to no system


def _more(unit: str = "", expected: str = "", needs_system: bool = False, needs: str = "") -> dict[str, Any]:
    """What a key says beside its meaning: `expected` replaces the words derived from its type, `needs` names a key of
    the same block without which it has no effect."""
    return {"unit": unit, "expected": expected, "needs_system": needs_system, "needs": needs}


def _readable_faults(specification: str) -> str:
    try:
        fault_points.parse(specification)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return specification


Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
Folder = Annotated[str, StringConstraints(min_length=1)]
Faults = Annotated[str, AfterValidator(_readable_faults)]


class _Block(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class SystemConfig(_Block):
    """Base of the block of one system. `protects` says whether it keeps training state safe."""

    protects: ClassVar[bool] = True


class ReftConfig(SystemConfig):
    """REFT: snapshots of each rank's share of the training state in the memory of its node."""

    interval: int = Field(
        1, ge=1, description="take a snapshot after every so many iterations", json_schema_extra=_more("iterations")
    )
    bucket_mib: int = Field(
        4, ge=1, le=1024, description="how much is copied and digested at a time", json_schema_extra=_more("MiB")
    )
    redundancy: Literal["raim5", "raim6", "neighbour", "both", "none"] | None = Field(
        None,
        description="with several nodes: parity over the nodes of a sharding group, against the loss of one of them "
        "(raim5) or of any two (raim6); a copy on the node of a neighbouring pipeline stage (neighbour); that copy "
        "and raim5 (both); or nothing; unset: raim5, with BAFT neighbour",
    )
    exchange_interval: int = Field(
        1,
        ge=1,
        description="send every so many snapshots to the other nodes, or fewer if the network is slower",
        json_schema_extra=_more("snapshots"),
    )
    exchange_mbps: float = Field(
        0.0,
        ge=0,
        description="how much a node sends to the others at most; 0: as much as the network takes",
        json_schema_extra=_more("megabits per second"),
    )
    wait_seconds: float = Field(
        300.0,
        ge=0,
        description="with --nnodes MIN:MAX: wait so long for a substitute of a lost node, then go on with fewer",
        json_schema_extra=_more("seconds"),
    )
    checkpoint_dir: Folder | None = Field(
        None,
        description="write checkpoints of the snapshots here, and start from them when memory has nothing; unset: none",
        json_schema_extra=_more(expected="a folder that all nodes share"),
    )
    checkpoint_interval: int = Field(
        100,
        ge=0,
        description="write one after every so many iterations; 0: only when asked for and at the end of protection",
        json_schema_extra=_more("iterations", needs="checkpoint_dir"),
    )
    checkpoint_keep: int = Field(
        2, ge=1, description="keep so many, the newest ones", json_schema_extra=_more(needs="checkpoint_dir")
    )
    checkpoint_seconds: float = Field(
        30.0,
        ge=0,
        description="how long ft-run, told to end, waits for the newest snapshot to be written",
        json_schema_extra=_more("seconds", needs="checkpoint_dir"),
    )


class BaftConfig(SystemConfig):
    """BAFT: snapshots are copied to the node of a neighbouring pipeline stage, while the pipeline is idle anyway."""

    link_mbps: float | None = Field(
        None,
        gt=0,
        description="what the link of a node carries, each way: by it the bytes of a bubble are planned; unset: "
        "measured at start",
        json_schema_extra=_more("megabits per second", "a number > 0"),
    )
    reserve_ms: float = Field(
        1.0,
        ge=0,
        description="at both ends of a bubble nothing is sent for so long, or as long as a message between stages is "
        "measured to take, up to a quarter of the bubble: the pipeline's own messages come first",
        json_schema_extra=_more("milliseconds"),
    )
    granularity: Literal["bytes", "layer"] = Field(
        "bytes",
        description="how full a bubble is planned: to the byte, or by what whole layers of the model have",
    )
    profile_iterations: int = Field(
        6,
        ge=2,  # of one alone nothing is left where the clock of a device lags behind
        description="measure so many before bubbles are planned",
        json_schema_extra=_more("iterations"),
    )


class PaftConfig(SystemConfig):
    """PAFT: replicas of parameters are compared and averaged over data parallelism, against silent corruption."""

    protects: ClassVar[bool] = False

    mode: Literal["dyn", "sync", "audit"] = Field(
        "dyn",
        description="average parameters behind the next iteration, as often as measured noise asks for (dyn), or after "
        "every h iterations, while training waits (sync); or average nothing and compare (audit)",
    )
    h: int = Field(
        10,
        ge=1,
        description="average after so many iterations; with dyn the first time",
        json_schema_extra=_more("iterations"),
    )
    h_min: int = Field(
        5, ge=1, description="the smallest interval that noise can ask for", json_schema_extra=_more("iterations")
    )
    h_max: int = Field(
        500, ge=1, description="the largest, as without any noise", json_schema_extra=_more("iterations")
    )
    aggregate: Literal["mean", "median", "trimmed"] = Field(
        "mean",
        description="what replicas are averaged by: the mean; or, against large noise and at the cost of a sort, the "
        "median or the mean without the lowest and highest values",
    )
    trim: int = Field(1, ge=1, description="how many of each are left out", json_schema_extra=_more("replicas"))
    average_optimizer_state: bool = Field(
        False, description="average what the optimizer keeps as well: little is gained, and three times as much is sent"
    )
    audit_interval: int | None = Field(
        None,
        ge=0,
        description="compare digests of the replicas after every so many iterations; 0: never; unset: 10 with mode "
        "audit, else never",
        json_schema_extra=_more("iterations", expected="an integer >= 0"),
    )
    audit_at: Literal["update", "forward"] = Field(
        "update",
        description="await the verdict before the next update, behind forward and backward; or before the next forward",
    )
    on_corruption: Literal["repair", "average", "rollback"] = Field(
        "repair",
        description="when replicas differ: copy from the majority, and average where there is none; average; or go "
        "back to the newest snapshot whose replicas agreed",
    )
    bucket_mib: int = Field(
        16, ge=1, le=1024, description="how much is averaged or digested at a time", json_schema_extra=_more("MiB")
    )

    @property
    def audits_every(self) -> int:
        """Iterations between two audits; 0 for none."""
        if self.audit_interval is None:
            return 10 if self.mode == "audit" else 0
        return self.audit_interval


class Config(_Block):
    """What a user may decide. `model_fields_set` says what was given; the rest are defaults."""

    job: Name | None = Field(
        None,
        description="name of the job; unset: torchrun's rendezvous id, else a digest of the command",
        json_schema_extra=_more(expected=NAME_RULE),
    )
    node_name: Name | None = Field(
        None,
        description="name of this node as a failure domain; unset: the host name",
        json_schema_extra=_more(expected=NAME_RULE),
    )
    resume: Literal["auto", "memory", "storage", "fresh"] = Field(
        "auto",
        description="resume from the newest version found, from one tier only, or from nothing",
        json_schema_extra=_more(needs_system=True),
    )
    require_protection: bool = Field(
        False,
        description="end the job, rather than train on, when protection cannot be had",
        json_schema_extra=_more(needs_system=True),
    )
    secret_file: Folder | None = Field(
        None,
        description="file of mode 0600 with the secret by which the nodes of a job know each other, the same on all",
        json_schema_extra=_more(expected="a file", needs_system=True),
    )
    encrypt: bool = Field(
        False,
        description="encrypt what nodes send each other, for a network that others can read; without it connections "
        "are authenticated only; the same on all nodes",
        json_schema_extra=_more(needs_system=True, needs="secret_file"),
    )
    interface: Folder | None = Field(
        None,
        description="address or network device on which nodes protect each other; unset: the one towards rank 0",
        json_schema_extra=_more(expected="an address or a device", needs_system=True),
    )
    detect_seconds: float = Field(
        10.0,
        gt=0,
        description="a node or trainer of which nothing is heard for so long is lost; other timeouts derive from it",
        json_schema_extra=_more("seconds", needs_system=True),
    )
    orphan_seconds: float = Field(
        1800.0,
        ge=0,
        description="how long snapshots outlive a job that did not end in order",
        json_schema_extra=_more("seconds", needs_system=True),
    )
    max_unprotected_steps: int = Field(
        1000,
        ge=1,
        description="how long to train on after protection was lost, before ending the job",
        json_schema_extra=_more("iterations", needs_system=True),
    )
    faults: Faults = Field(
        "",
        description="faults to inject, for tests",
        json_schema_extra=_more(expected="point@fact=value,...:action;..."),
    )
    reft: ReftConfig | None = Field(
        None, description="switch on REFT: snapshots in host memory, which outlive the training processes"
    )
    baft: BaftConfig | None = Field(
        None,
        description="switch on BAFT: snapshots copied to the node of a neighbouring pipeline stage, sent in the "
        "bubbles of the pipeline; with --reft its keys hold for the snapshots",
    )
    paft: PaftConfig | None = Field(
        None,
        description="switch on PAFT: replicas of parameters that should be identical are averaged or compared, against "
        "silent corruption",
    )
    _waiting: dict[KeyPath, Any] = PrivateAttr(default_factory=dict)  # of systems that another source may switch on

    @classmethod
    def from_json(cls, block: Mapping[str, Any], whole: bool = True) -> Config:
        """The configuration of an `ft_plugins` JSON block. A system is on with `{...}` or `true`, off with `false`.

        `whole=False` when another source is still to be merged: a key without effect is then left to `merge`.
        Raises ConfigError.
        """
        return _build(sources.read_block(block, keys(), _JSON), _in_json, whole)

    @classmethod
    def from_flags(cls, argv: Sequence[str], whole: bool = True) -> tuple[Config, list[str]]:
        """The configuration on a command line, and the other words of it, unchanged and in order.

        Our flags may stand anywhere, as `--flag value` or `--flag=value`. Raises ConfigError, also for an unknown flag
        that begins like ours and for one that is given twice with different values. `whole`: see `from_json`.
        """
        values, rest = sources.read_flags(argv, keys(), _GENERAL)
        return _build(values, _as_flag, whole), rest

    @classmethod
    def from_namespace(cls, namespace: argparse.Namespace, whole: bool = True) -> Config:
        """The configuration in a namespace that was parsed after `add_flags`; None means 'not given'."""
        found = {key.path: getattr(namespace, key.dest, None) for key in keys()}
        return _build({path: value for path, value in found.items() if value is not None}, _as_flag, whole)

    @property
    def systems(self) -> tuple[str, ...]:
        """Names of the systems that are on, in the schema's order."""
        return tuple(key.path[0] for key in keys() if key.system and getattr(self, key.path[0]) is not None)

    @property
    def capture(self) -> ReftConfig | None:
        """How snapshots are taken and kept, whichever system wants them, `redundancy` named; None where none does."""
        if self.reft is None and self.baft is None:
            return None
        found = self.reft or ReftConfig()
        usual = "raim5" if self.baft is None else "neighbour"
        return found.model_copy(update={"redundancy": found.redundancy or usual})

    @property
    def protects(self) -> bool:
        """Whether a system is on that keeps training state safe."""
        return any(getattr(self, name).protects for name in self.systems)

    def given(self) -> dict[KeyPath, Any]:
        """What was given, by path; under a system's own path whether it is on."""
        return {path: value for path, (value, given) in self._values().items() if given} | self._waiting

    def block(self) -> dict[str, Any]:
        """What was given, as a JSON block: `from_json(config.block())` equals `config`."""
        return self.model_dump(exclude_unset=True)

    def flags(self) -> list[str]:
        """What was given, as flags: `from_flags(config.flags())` equals `config`."""
        known = {key.path: key for key in keys()}
        words = [(known[path], value) for path, value in self.given().items()]
        words = [(key, value) for key, value in words if value is not None and value is not False]
        return [key.flag if key.switch else f"{key.flag}={value}" for key, value in words]

    def table(self) -> str:
        """The effective configuration, one key a line, to be printed once."""
        given = self.given()
        found = self.model_copy(update={"reft": self.capture})._values()  # also where another system takes them
        found["reft",] = (self.reft is not None, self.reft is not None)
        rows = [
            (key.flag, f"{key.shown(found[key.path][0])} {key.unit}".strip(), "" if key.path in given else "default")
            for key in keys()
            if key.path in found
        ]
        left, middle = (max(len(row[column]) for row in rows) for column in (0, 1))
        lines = [f"  {flag:<{left}}  {value:<{middle}}  {origin}".rstrip() for flag, value, origin in rows]
        return "\n".join(["ft_plugins configuration", *lines])

    def _values(self) -> dict[KeyPath, tuple[Any, bool]]:
        """Value and whether it was given, for every key of this block and of the systems that are on."""
        found: dict[KeyPath, tuple[Any, bool]] = {}
        for key in keys():
            block = self if len(key.path) == 1 else getattr(self, key.path[0])
            if block is not None:
                value = getattr(block, key.path[-1])
                found[key.path] = (value is not None if key.system else value, key.path[-1] in block.model_fields_set)
        return found


@functools.cache
def keys() -> tuple[Key, ...]:
    """All keys in the schema's order, a system's switch before the keys of its block."""
    return derive(Config, _GENERAL)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag to `parser`, as a group `ft_plugins`; each is None in the namespace unless given.

    Switches abbreviated options off in `parser`: a script's `--ref` must not come to mean our `--reft`.
    """
    sources.add_flags(parser, keys())


def merge(first: Config, second: Config, names: tuple[str, str] = ("the command line", "the script")) -> Config:
    """Both together. Raises ConfigError for a key that was given twice with different values, naming both sources."""
    ours, theirs = first.given(), second.given()
    for key in keys():
        if key.path in ours and key.path in theirs and ours[key.path] != theirs[key.path]:
            raise ConfigError(
                f"{key.flag} ({_in_json(key)}): {names[0]} says {key.shown(ours[key.path])}, "
                f"{names[1]} says {key.shown(theirs[key.path])}; give it once"
            )
    return _build(ours | theirs, _as_flag, whole=True)


Spelling = Callable[[Key], str]


def _in_json(key: Key) -> str:
    return f"{_JSON}.{key.name}"


def _as_flag(key: Key) -> str:
    return key.flag


def _build(values: sources.Values, spell: Spelling, whole: bool) -> Config:
    """Check `values` against types, ranges and each other. Raises ConfigError in the spelling of their source."""
    known = {key.path: key for key in keys()}
    nested: dict[str, Any] = {}
    waiting: dict[KeyPath, Any] = {}
    for path in sorted(values, key=len):
        key = known[path]
        if key.system:
            nested[path[0]] = {} if values[path] is True else None
        elif len(path) == 1:
            nested[path[0]] = values[path]
        elif nested.get(path[0]) is None and not whole:
            waiting[path] = values[path]
        elif nested.get(path[0]) is None:
            switch = known[path[:1]]
            raise ConfigError(f"{spell(key)}: has no effect while {spell(switch)} is off; add {switch.flag} or drop it")
        else:
            nested[path[0]][path[1]] = values[path]
    try:
        config = Config.model_validate(nested)
    except ValidationError as error:
        problem = error.errors()[0]
        key = known[tuple(str(step) for step in problem["loc"][: 2 if problem["loc"][:2] in known else 1])]
        raise ConfigError(f"{spell(key)}: {key.complaint(problem)}") from error
    config._waiting.update(waiting)
    by_path = checks.speller(keys(), spell)
    checks.require_no_contradiction(config, by_path)
    if whole:
        _require_effect(config, spell)
        checks.require_sense_of_paft(config, by_path)
    return config


def _require_effect(config: Config, spell: Spelling) -> None:
    for key in keys():
        if key.needs_system and not config.protects and config.given().get(key.path, key.default) != key.default:
            switches = " or ".join(key.flag for key in keys() if key.system and _protects(key))
            raise ConfigError(f"{spell(key)}: has no effect while no system is on; add {switches} or drop it")
        if not key.needs or key.path not in config.given():
            continue
        block = config if len(key.path) == 1 else getattr(config, key.path[0])
        if block is not None and not getattr(block, key.needs) and getattr(block, key.path[-1]) != key.default:
            (needed,) = (each for each in keys() if each.path == (*key.path[:-1], key.needs))
            raise ConfigError(f"{spell(key)}: has no effect while {spell(needed)} is unset; add it or drop this one")


def _protects(key: Key) -> bool:
    """Whether the system that `key` switches on keeps training state safe."""
    return any(getattr(block, "protects", False) for block in get_args(key.annotation))
