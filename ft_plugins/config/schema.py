"""The configuration: one pydantic model of what a user may set, with one block of keys per system (`blocks`).

Invariant: a `Config` is valid and frozen, and knows which of its keys were given, so that merging two sources never
silently drops a value of one.

Each system is one optional field of `Config`. Its flags (`--<system>` switches it on, `--<system>-<key>` sets a key;
general keys are `--ftp-<key>`), JSON keys, environment and documentation are derived from that field.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, PrivateAttr, StringConstraints, ValidationError

from ..base.intake import Unfit, require_shallow
from ..base.run_directories import NAME_RULE
from ..errors import ConfigError
from . import checks, sources
from .blocks import BaftConfig, Block, Faults, Name, NonEmptyText, PaftConfig, ReftConfig, more
from .keys import Key, KeyPath, derive
from .sync_block import SyncConfig

_JSON = "ft_plugins"  # name of the block in a DeepSpeed JSON file
_GENERAL = "ftp"  # flags of keys that belong to no system


class Config(Block):
    """What a user may configure. `model_fields_set` holds what was given; the rest are defaults."""

    job: Name | None = Field(
        None,
        description="name of the job; unset: torchrun's rendezvous id, else a digest of the command",
        json_schema_extra=more(expected=NAME_RULE),
    )
    node_name: Name | None = Field(
        None,
        description="name of this node; unset: the host name",
        json_schema_extra=more(expected=NAME_RULE),
    )
    failure_domain: Name | None = Field(
        None,
        description="what this node fails together with, such as its rack or switch: parity is kept on nodes of other "
        "domains, as far as there are any; unset: the node is a domain of its own",
        json_schema_extra=more(expected=NAME_RULE, needs_system=True),
    )
    resume: Annotated[str, StringConstraints(pattern="^(auto|memory|storage|fresh|before:[1-9][0-9]{0,8})$")] = Field(
        "auto",
        description="where to resume from: memory, or storage if memory has nothing or only an older lineage (auto); "
        "memory alone (an error if it has nothing); storage alone; neither, which drops what is in memory (fresh); or "
        "the newest version of memory or storage older than that iteration, which makes newer ones void (before:); a "
        "checkpoint that the framework loads itself is used if its iteration is larger, and allowed by before:",
        json_schema_extra=more(expected="one of auto, memory, storage, fresh, before:ITERATION", needs_system=True),
    )
    on_difference: Literal["auto", "stop", "warn"] = Field(
        "auto",
        description="if an iteration that is computed again after a restore is not what it was: end the job if that "
        "shows that the loop did not continue, else give an alarm (auto); always end it (stop); never (warn)",
        json_schema_extra=more(needs_system=True),
    )
    prove: Literal["on", "off"] = Field(
        "on",
        description="after a restore from memory, compute the last completed iteration once more and compare every "
        "captured byte with what it was; costs one iteration a failure",
        json_schema_extra=more(needs_system=True),
    )
    require_protection: bool = Field(
        False,
        description="end the job if it cannot be protected, instead of training on",
        json_schema_extra=more(needs_system=True),
    )
    secret_file: NonEmptyText | None = Field(
        None,
        description="file of mode 0600 with the secret by which the nodes of a job authenticate, the same on all nodes",
        json_schema_extra=more(expected="a file", needs_system=True),
    )
    encrypt: bool = Field(
        False,
        description="encrypt traffic between nodes, for a network that others can read; otherwise connections are "
        "only authenticated; the same on all nodes",
        json_schema_extra=more(needs_system=True, needs="secret_file"),
    )
    interface: NonEmptyText | None = Field(
        None,
        description="address or network device for traffic between nodes; unset: the one towards rank 0",
        json_schema_extra=more(expected="an address or a device", needs_system=True),
    )
    detect_seconds: float = Field(
        10.0,
        gt=0,
        description="a node or trainer that is silent for that long is lost; other timeouts derive from it",
        json_schema_extra=more("seconds", needs_system=True),
    )
    hang_seconds: Annotated[float, Field(ge=0)] | Literal["auto"] = Field(
        "auto",
        description="a job in which no rank has completed an iteration for that long hangs: its stacks are written "
        "down and it restarts; 0: never; auto: ten iterations as measured, at least a minute, but half an hour for a "
        "rank that is past its update or at work; a first iteration, an evaluation or the framework's own checkpoint "
        "may always take half an hour",
        json_schema_extra=more("seconds", "a number >= 0, or auto", needs_system=True),
    )
    grace_seconds: float = Field(
        20.0,
        gt=0,
        description="how long ft-run takes at most to end after a signal: what is in memory is written at once, and "
        "training processes that still run after three quarters of that time are killed",
        json_schema_extra=more("seconds", needs_system=True),
    )
    node_check: Annotated[str, BeforeValidator(checks.command_text)] | None = Field(
        None,
        description="command by which ft-run checks its node before each round in which the node is to take part, such "
        "as 'dcgmi diag -r 1'; if it fails, the node leaves the job; run without a shell",
        json_schema_extra=more(expected="a command line", needs_system=True),
    )
    node_check_seconds: float = Field(
        120.0,
        gt=0,
        description="after that long the check is killed, and has failed",
        json_schema_extra=more("seconds", needs="node_check"),
    )
    orphan_seconds: float = Field(
        1800.0,
        ge=0,
        description="how long snapshots outlive a job that did not end in order",
        json_schema_extra=more("seconds", needs_system=True),
    )
    max_unprotected_steps: int = Field(
        1000,
        ge=1,
        description="how many iterations to train on after protection was lost, before the job ends",
        json_schema_extra=more("iterations", needs_system=True),
    )
    metrics: Annotated[str, BeforeValidator(checks.metrics_text)] | None = Field(
        None,
        description="serve metrics of each node for Prometheus at this port, under /metrics; on this machine only, "
        "unless an address is given too; unset: nowhere",
        json_schema_extra=more(expected="PORT or ADDRESS:PORT", needs_system=True),
    )
    scalar_seconds: float = Field(
        10.0,
        ge=0,
        le=86400,
        description="where the framework writes scalars, for TensorBoard, W&B or others, write some of the metrics "
        "too, as ft/..., this often; 0: never",
        json_schema_extra=more("seconds", needs_system=True),
    )
    preload: Literal["auto", "off"] = Field(
        "auto",
        description="under ft-run, fork ranks from one process of the node that has imported what they import; off: "
        "each rank is a new process",
        json_schema_extra=more(needs_system=True),
    )
    transcript_dir: NonEmptyText | None = Field(
        None,
        description="write down in this folder what each rank reads, computes and keeps in each iteration, as digests, "
        "for 'ft-plugins rehearse'; makes iterations longer",
        json_schema_extra=more(expected="a folder", needs_system=True),
    )
    stop_after: int | None = Field(
        None,
        ge=1,
        description="end the job in order after this iteration; schedules stay those of the whole job",
        json_schema_extra=more("iterations", needs_system=True),
    )
    unprotected: bool = Field(
        False,
        description="protect nothing, for 'ft-plugins rehearse'",
        json_schema_extra=more(needs_system=True),
    )
    cpu: bool = Field(
        False,
        description="allow training on the CPU if no CUDA device is visible: Megatron is then patched for it, as with "
        "its own --distributed-backend gloo; without either flag a protected job is refused on such a node",
    )
    faults: Faults = Field(
        "",
        description="faults to inject, for tests",
        json_schema_extra=more(expected="point@fact=value,...:action;..."),
    )
    reft: ReftConfig | None = Field(
        None, description="switch on REFT: snapshots in host memory that outlive the training processes"
    )
    baft: BaftConfig | None = Field(
        None,
        description="switch on BAFT: snapshots copied to the node of a neighbouring pipeline stage, sent in the "
        "bubbles of the pipeline; to set their interval, storage and so on, give --reft too",
    )
    paft: PaftConfig | None = Field(
        None,
        description="switch on PAFT: average or compare replicas of parameters that should be identical, against "
        "silent corruption",
    )
    sync: SyncConfig | None = Field(
        None,
        description="switch on local SGD: replicas train on their own and are synchronised every tau iterations, for "
        "slow links and stragglers",
    )
    _waiting: dict[KeyPath, Any] = PrivateAttr(default_factory=dict)  # of systems that another source may switch on

    @classmethod
    def from_json(cls, block: Mapping[str, Any], whole: bool = True) -> Config:
        """The configuration in an `ft_plugins` JSON block. A system is on with `{...}` or `true`, off with `false`.

        `whole=False` if another source is still to be merged: `merge` then checks for keys without effect.
        Raises ConfigError.
        """
        return _build(sources.read_block(block, keys(), _JSON), _in_json, whole)

    @classmethod
    def from_flags(cls, argv: Sequence[str], whole: bool = True) -> tuple[Config, list[str]]:
        """The configuration on a command line, and its other words, unchanged and in order.

        Our flags may be anywhere, as `--flag value` or `--flag=value`. Raises ConfigError, also for an unknown flag
        with our prefix and for one that is given twice with different values. `whole`: see `from_json`.
        """
        values, rest = sources.read_flags(argv, keys(), _GENERAL)
        return _build(values, _as_flag, whole), rest

    @classmethod
    def from_namespace(cls, namespace: argparse.Namespace, whole: bool = True) -> Config:
        """The configuration in a namespace parsed with `add_flags`; None means not given."""
        values = {key.path: getattr(namespace, key.dest, None) for key in keys()}
        return _build({path: value for path, value in values.items() if value is not None}, _as_flag, whole)

    @property
    def systems(self) -> tuple[str, ...]:
        """Names of the systems that are on, in the schema's order."""
        return tuple(key.path[0] for key in keys() if key.system and getattr(self, key.path[0]) is not None)

    @property
    def capture(self) -> ReftConfig | None:
        """How snapshots are taken for REFT or BAFT, with `redundancy` filled in; None if none are.

        With local SGD the interval is a multiple of tau, at least as long as the given one, unless snapshots are taken
        between synchronisations too. By the clock it is in synchronisations.
        """
        if self.unprotected or self.reft is None and self.baft is None:
            return None
        reft = self.reft or ReftConfig()
        default = "raim5" if self.baft is None else "neighbour"
        interval = reft.interval
        if interval != "auto" and self.sync is not None and reft.versions != "every" and self.sync.period is None:
            interval = math.ceil(interval / self.sync.tau) * self.sync.tau
        return reft.model_copy(update={"redundancy": reft.redundancy or default, "interval": interval})

    @property
    def metrics_place(self) -> tuple[str, int] | None:
        """The address and port at which metrics are served; None: nowhere."""
        return None if self.metrics is None else checks.metrics_place(self.metrics)

    @property
    def protects(self) -> bool:
        """Whether a system is on that protects training state."""
        return any(getattr(self, name).protects for name in self.systems)

    def given(self) -> dict[KeyPath, Any]:
        """The values that were given, by path; at a system's own path, whether it is on."""
        return {path: value for path, (value, given) in self._values().items() if given} | self._waiting

    def block(self) -> dict[str, Any]:
        """The values that were given, as a JSON block: `from_json(config.block())` equals `config` if the configuration
        is whole."""
        return self.model_dump(exclude_unset=True)

    def flags(self) -> list[str]:
        """The values that were given, as flags: `from_flags(config.flags())` equals `config`."""
        known = {key.path: key for key in keys()}
        words = [(known[path], value) for path, value in self.given().items()]
        words = [(key, value) for key, value in words if value is not None and value is not False]
        return [key.flag if key.switch else f"{key.flag}={value}" for key, value in words]

    def table(self, all_keys: bool = True) -> str:
        """The effective configuration for people, one key per line; all of it, or what differs from the defaults, and
        where the rest is."""
        given = self.given()
        values = self.model_copy(update={"reft": self.capture})._values()  # keys of REFT apply to BAFT too
        values[("reft",)] = (self.reft is not None, ("reft",) in given)  # the switch itself, as given
        known = [key for key in keys() if key.path in values]
        shown = [key for key in known if all_keys or _differs(key, values[key.path][0], key.path in given)]
        rows = [
            (key.flag, f"{key.shown(values[key.path][0])} {key.unit}".strip(), "" if key.path in given else "default")
            for key in shown
        ]
        left, middle = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
        lines = [f"  {flag:<{left}}  {value:<{middle}}  {origin}".rstrip() for flag, value, origin in rows]
        if rest := len(known) - len(shown):
            lines.append(f"  {rest} more have their defaults: `ft-plugins config -- FLAGS` shows all")
        return "\n".join(["ft_plugins configuration", *lines])

    def _values(self) -> dict[KeyPath, tuple[Any, bool]]:
        """Each key of this block and of the systems that are on: its value, and whether it was given."""
        values: dict[KeyPath, tuple[Any, bool]] = {}
        for key in keys():
            block = self if len(key.path) == 1 else getattr(self, key.path[0])
            if block is not None:
                value = getattr(block, key.path[-1])
                values[key.path] = (value is not None if key.system else value, key.path[-1] in block.model_fields_set)
        return values


def _differs(key: Key, value: Any, given: bool) -> bool:
    """Whether a key has another value than it has by default. The default None leaves the value to other keys."""
    if key.system:
        return bool(value)
    return given if key.default is None else value != key.default


@functools.cache
def keys() -> tuple[Key, ...]:
    """All keys in the schema's order, a system's switch before the keys of its block."""
    return derive(Config, _GENERAL)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag to `parser`, as a group `ft_plugins`; each is None in the namespace unless given.

    Disables abbreviated options in `parser`: a script's `--ref` must not be taken for our `--reft`.
    """
    sources.add_flags(parser, keys())


def merge(first: Config, second: Config, names: tuple[str, str] = ("the command line", "the script")) -> Config:
    """Merge two sources. Raises ConfigError for a key with two different values, naming both sources."""
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
    """Check `values` against types, ranges and each other. Raises ConfigError that names keys as their source did."""
    known = {key.path: key for key in keys()}
    switched_on = {path[:1]: True for path in values if known[path].switches and values.get(path[:1]) is None}
    values = {**values, **switched_on}
    nested: dict[str, Any] = {}
    waiting: dict[KeyPath, Any] = {}
    for path in sorted(values, key=len):  # a system's switch before its keys
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
        require_shallow(nested)
        config = Config.model_validate(nested)
    except Unfit as error:
        raise ConfigError(f"{_JSON}: {error}") from error
    except ValidationError as error:
        problem = error.errors()[0]
        loc = tuple(map(str, problem["loc"]))
        key = known[loc[:2] if loc[:2] in known else loc[:1]]
        raise ConfigError(f"{spell(key)}: {key.complaint(problem)}") from error
    config._waiting.update(waiting)
    by_path = checks.speller(keys(), spell)
    checks.require_no_contradiction(config, by_path)
    if whole:
        _require_effect(config, spell)
        checks.require_effective_faults(config, by_path)
        checks.require_parity_for_groups(config, by_path)
        checks.require_possible_auto(config, by_path)
        checks.require_consistent_paft(config, by_path)
        checks.require_consistent_sync(config, by_path)
    return config


def _require_effect(config: Config, spell: Spelling) -> None:
    for key in keys():
        if key.needs_system and not config.protects and config.given().get(key.path, key.default) != key.default:
            switches = " or ".join(key.flag for key in keys() if key.system and protects(key))
            raise ConfigError(
                f"{spell(key)}: has no effect while no system that protects state is on; add {switches}, or drop it"
            )
        if not key.needs or key.path not in config.given():
            continue
        block = config if len(key.path) == 1 else getattr(config, key.path[0])
        if block is not None and not getattr(block, key.needs) and getattr(block, key.path[-1]) != key.default:
            (needed,) = (each for each in keys() if each.path == (*key.path[:-1], key.needs))
            raise ConfigError(
                f"{spell(key)}: has no effect while {spell(needed)} is unset; give {spell(needed)} or drop {spell(key)}"
            )


def protects(key: Key) -> bool:
    """Whether `key` switches on a system that protects training state."""
    return any(getattr(block, "protects", False) for block in get_args(key.annotation))
