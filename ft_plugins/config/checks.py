"""Check a whole configuration for contradictions between keys, and for keys without effect.

Invariant: only raises, changes nothing. `spell` names a key as its source did (flag or JSON path).

In: a configuration. Out: nothing, or ConfigError.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from ..base import faults
from ..base.faults import Needs
from ..errors import ConfigError
from .keys import Key, KeyPath

if TYPE_CHECKING:
    from .schema import Config

Spell = Callable[[KeyPath], str]
_OWN_ADDRESS = "127.0.0.1"
_AVERAGES = ("h", "aggregate", "trim", "average_optimizer_state")
_BOUNDS = ("h_min", "h_max", "noise_of")
_LAYERED = ("h", "schedule", "profile", "replan", "order")


def metrics_place(text: str) -> tuple[str, int]:
    """Address and port of `[ADDRESS:]PORT`; without an address this machine's own. Raises ValueError."""
    host, _, port = text.rpartition(":")
    address = str(ip_address(host.removeprefix("[").removesuffix("]"))) if host else _OWN_ADDRESS
    if not port.isdecimal() or not port.isascii() or not 1 <= int(port) <= 65535:
        raise ValueError("expected a port from 1 to 65535")
    return address, int(port)


def metrics_text(value: object) -> object:
    """A port may be a number, as in JSON. Raises ValueError for a text that `metrics_place` cannot read."""
    text = str(value) if type(value) is int else value
    if isinstance(text, str):
        metrics_place(text)
    return text


def command_text(value: object) -> object:
    """Raises ValueError for a text that cannot be split into a command."""
    if isinstance(value, str):
        try:
            words = shlex.split(value)
        except ValueError as error:
            raise ValueError(f"expected a command line, found {value!r:.80} ({error})") from error
        if not words:
            raise ValueError("expected a command line, found an empty one")
    return value


def speller(keys: tuple[Key, ...], spelling: Callable[[Key], str]) -> Spell:
    """A function that names the key at a path."""
    known = {key.path: key for key in keys}
    return lambda path: spelling(known[path])


def require_no_contradiction(config: Config, spell: Spell) -> None:
    """Raises ConfigError for two keys that cannot both hold."""
    redundancy = config.reft.redundancy if config.reft else None
    if config.baft is not None and redundancy not in (None, "neighbour", "both"):
        raise ConfigError(
            f"{spell(('reft', 'redundancy'))}: {redundancy} contradicts {spell(('baft',))}, which keeps a copy on a "
            "neighbouring stage (neighbour, or both); drop one of the two"
        )


def require_parity_for_groups(config: Config, spell: Spell) -> None:
    """Raises ConfigError for a key of redundancy groups that has no effect, or contradicts the redundancy. The
    configuration is whole."""
    capture = config.capture
    if capture is None:
        return
    is_set: dict[KeyPath, bool] = {
        ("reft", "group_nodes"): capture.group_nodes != type(capture).model_fields["group_nodes"].default,
        ("failure_domain",): config.failure_domain is not None,
    }
    for path in (path for path, effective in is_set.items() if effective):
        if capture.redundancy in ("none", "neighbour"):
            raise ConfigError(
                f"{spell(path)}: has no effect with redundancy {capture.redundancy}, which keeps no parity; drop it, "
                f"or give {spell(('reft', 'redundancy'))} {'raim5' if config.baft is None else 'both'}"
            )
    if capture.redundancy == "raim6" and capture.group_nodes in (2, 3):
        raise ConfigError(
            f"{spell(('reft', 'group_nodes'))}: {capture.group_nodes} contradicts {spell(('reft', 'redundancy'))} "
            "raim6, which needs groups of at least 4 nodes"
        )


def require_possible_auto(config: Config, spell: Spell) -> None:
    """Raises ConfigError for an interval that the job cannot choose, or a rate without effect. The configuration is
    whole."""
    reft, paft = config.reft, config.paft
    chosen = [name for name in ("interval", "checkpoint_interval") if getattr(reft, name, None) == "auto"]
    for name in chosen:
        captured = name == "interval"
        for system, contradicts, reason in (
            ("sync", config.sync, "takes snapshots at synchronisations"),
            ("baft", captured and config.baft, "plans bubbles for snapshots at a fixed interval"),
            ("paft", captured and paft and paft.audits_every, "compares replicas of snapshots at a fixed interval"),
        ):
            if contradicts:
                raise ConfigError(
                    f"{spell(('reft', name))}: auto contradicts {spell((system,))}, which {reason}; give a number"
                )
    for name in ("hw_rate", "sw_rate"):
        if not chosen and getattr(reft, name, None) is not None:
            raise ConfigError(
                f"{spell(('reft', name))}: has no effect unless {spell(('reft', 'interval'))} or "
                f"{spell(('reft', 'checkpoint_interval'))} is auto; drop it"
            )


def require_effective_faults(config: Config, spell: Spell) -> None:
    """Raises ConfigError for a fault that this configuration never reaches. The configuration is whole."""
    capture = config.capture
    redundancy = "none" if capture is None else capture.redundancy
    met = {
        Needs.NOTHING: True,
        Needs.MEMORY: capture is not None,
        Needs.STORAGE: capture is not None and capture.checkpoint_dir is not None,
        Needs.NODES: redundancy != "none",
        Needs.PARITY: redundancy not in ("none", "neighbour"),
        Needs.PAFT: config.paft is not None,
        Needs.SYNC: config.sync is not None,
    }
    try:
        faults.require_on(faults.parse(config.faults), {needs for needs, is_met in met.items() if is_met})
    except ConfigError as error:
        raise ConfigError(f"{spell(('faults',))}: {error}") from error


def require_consistent_paft(config: Config, spell: Spell) -> None:
    """Raises ConfigError for a key of PAFT that has no effect, contradicts another one, or needs one that is missing.

    The configuration is whole: all sources are merged."""
    paft = config.paft
    if paft is None:
        return
    given = config.given()
    for name, reason in _without_effect(paft):
        if getattr(paft, name) != type(paft).model_fields[name].default:
            raise ConfigError(f"{spell(('paft', name))}: has no effect {reason}; drop it")
    if paft.mode == "audit" and not paft.audits_every:
        raise ConfigError(
            f"{spell(('paft', 'audit_interval'))}: 0 contradicts {spell(('paft', 'mode'))} audit, which does nothing "
            "else; drop one of the two"
        )
    if paft.h_min > paft.h_max:
        raise ConfigError(
            f"{spell(('paft', 'h_min'))}: {paft.h_min} is more than {spell(('paft', 'h_max'))}, {paft.h_max}; "
            "expected the smallest interval not to exceed the largest"
        )
    if paft.mode == "dyn" and ("paft", "h") in given and not paft.h_min <= paft.h <= paft.h_max:
        raise ConfigError(
            f"{spell(('paft', 'h'))}: expected an interval from {spell(('paft', 'h_min'))} to "
            f"{spell(('paft', 'h_max'))}, {paft.h_min} to {paft.h_max}, found {paft.h}"
        )
    if paft.on_corruption == "rollback" and config.capture is None:
        raise ConfigError(
            f"{spell(('paft', 'on_corruption'))}: rollback needs snapshots; add --reft or --baft, or choose repair"
        )


def _without_effect(paft: Any) -> Iterator[tuple[str, str]]:
    """Keys that nothing reads in this mode, and why."""
    if paft.mode == "audit":
        yield from ((name, "with mode audit, which averages nothing by schedule") for name in (*_AVERAGES, *_BOUNDS))
    if paft.mode == "sync":
        yield from ((name, "with mode sync, whose interval is h") for name in _BOUNDS)
    if paft.aggregate != "trimmed":
        yield "trim", "unless aggregate is trimmed"
    if not paft.audits_every and paft.mode != "audit":
        yield from ((name, "while audit_interval is 0") for name in ("on_corruption", "audit_at"))


def require_consistent_sync(config: Config, spell: Spell) -> None:
    """Raises ConfigError for a key of local SGD that has no effect or contradicts another one. The configuration is
    whole."""
    sync = config.sync
    if sync is None:
        if config.reft is not None and config.reft.versions is not None:
            raise ConfigError(
                f"{spell(('reft', 'versions'))}: has no effect while {spell(('sync',))} is off; add it or drop this one"
            )
        return
    given = config.given()
    for name, reason in _without_effect_on_sync(sync):
        if ("sync", name) in given:  # also if it is the default
            raise ConfigError(f"{spell(('sync', name))}: has no effect {reason}; drop it")
    if sync.policy == "a_edit":
        _require_clocked(config, spell)
    if sync.h == "auto" and sync.schedule == "equal":
        raise ConfigError(
            f"{spell(('sync', 'h'))}: auto needs a profile, and {spell(('sync', 'schedule'))} equal makes none; give a "
            "number, or drop the schedule"
        )
    if config.paft is not None and config.paft.mode != "audit":
        raise ConfigError(
            f"{spell(('sync', 'policy'))}: {sync.policy} contradicts {spell(('paft', 'mode'))} {config.paft.mode}: "
            "both average parameters; drop one of the two"
        )
    if config.paft is not None:
        raise ConfigError(
            f"{spell(('sync',))}: contradicts {spell(('paft',))}, which compares replicas that local SGD lets differ; "
            "drop one of the two"
        )


def _require_clocked(config: Config, spell: Spell) -> None:
    """What replicas that have no iteration in common rule out."""
    assert config.sync is not None
    if config.sync.apply == "update":
        raise ConfigError(
            f"{spell(('sync', 'apply'))}: update is impossible with a_edit, whose replicas are in different "
            "iterations; choose forward or wait"
        )
    if config.reft is not None and config.reft.versions == "every":
        raise ConfigError(
            f"{spell(('reft', 'versions'))}: every is impossible with a_edit: between synchronisations its replicas "
            "are in different iterations, so no version could hold all of them; drop it"
        )


def _without_effect_on_sync(sync: Any) -> Iterator[tuple[str, str]]:
    """Keys that nothing reads with this policy, and why."""
    if sync.policy in ("post_local_sgd", "dreamddp"):
        yield from ((name, f"with {sync.policy}, which takes the mean") for name in ("outer_lr", "outer_momentum"))
    if sync.is_layered:
        yield "apply", "with dreamddp, which averages behind the backward"
        yield "prefetch", "with dreamddp, which averages behind the backward"
        yield "offload", "with dreamddp, which keeps no last synchronised parameters"
    else:
        yield from ((name, f"with {sync.policy}: dreamddp alone has it") for name in _LAYERED)
    if sync.schedule == "equal":
        yield "profile", "with schedule equal, which is not planned"
    if sync.is_layered and not sync.measures_layers:
        yield "replan", "unless layers are planned from what this job measures"
    if sync.policy == "a_edit":
        yield "tau", "with a_edit, which synchronises by the clock: --sync-seconds"
    else:
        yield from ((name, f"with {sync.policy}: a_edit alone has it") for name in ("seconds", "weights"))
    if not sync.is_edit:
        yield "penalty", f"with {sync.policy}: edit and a_edit alone have it"
    if not sync.penalizes:
        for name in ("alpha", "threshold", "penalty_warmup", "weighting", "clip"):
            yield name, "without the penalty of edit"
    if sync.apply in ("update", "wait"):
        yield "prefetch", f"with apply {sync.apply}"
    elif sync.apply == "auto" and not sync.is_edit:
        yield "prefetch", f"with apply wait, which is that of {sync.policy} unless forward is given"
