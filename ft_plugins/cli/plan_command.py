"""`ft-plugins plan interval` and `plan sync`: how often to save and how nodes protect each other; which policy of
synchronisation pays on which link. `plan memory` is in `memory_plan_command`.

In: failure rates and costs; a profile of layers. Out: tables for people, JSON for programs, pictures. Raises FtError.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from ..config import ReftConfig
from ..errors import ConfigError, FtError
from ..planner.group_sizes import plan_group_sizes
from ..planner.group_survival import choose_group_nodes
from ..planner.intervals import Costs, plan_intervals
from ..planner.recommendation import recommend, terms
from ..planner.survival import Cluster, Scheme, plan_survival
from .memory_plan_command import AsJson

AUTO = "auto"


def interval(
    nodes: Annotated[int, typer.Option(help="nodes of the job")],
    group_nodes: Annotated[int, typer.Option(help="nodes of a sharding group: data-parallel replicas of a stage")],
    hw_rate: Annotated[
        float, typer.Option(help="Weibull rate of a node's hardware failures, per day^shape (per day if shape is 1)")
    ],
    sw_rate: Annotated[float, typer.Option(help="the same of its software failures")],
    reft_group_nodes: Annotated[
        str, typer.Option(help="nodes of a redundancy group at most, as in the job: a number or auto")
    ] = str(ReftConfig().group_nodes),
    domain_nodes: Annotated[int, typer.Option(help="nodes of a failure domain, such as a rack or a switch")] = 1,
    domain_rate: Annotated[
        float, typer.Option(help="Weibull rate of failures of a whole failure domain, per day^shape")
    ] = 0.0,
    shape: Annotated[float, typer.Option(help="Weibull shape; above 1 nodes wear out")] = 1.0,
    threshold: Annotated[float, typer.Option(help="lowest acceptable survival probability")] = 0.9,
    state_gib: Annotated[float | None, typer.Option(help="GiB that a node captures; with the next four: costs")] = None,
    iteration_seconds: Annotated[float | None, typer.Option(help="duration of an iteration")] = None,
    snapshot_seconds: Annotated[
        float | None, typer.Option(help="seconds that training waits at the fence for each snapshot")
    ] = None,
    link_gib_per_second: Annotated[float | None, typer.Option(help="bandwidth of one node for the exchange")] = None,
    storage_gib_per_second: Annotated[float | None, typer.Option(help="of storage, for the whole job")] = None,
    max_overhead: Annotated[float | None, typer.Option(help="largest share of time for snapshots; unset: 0.01")] = None,
    replace_seconds: Annotated[float | None, typer.Option(help="time to replace a lost node; unset: 600")] = None,
    checkpoint_seconds: Annotated[
        float | None, typer.Option(help="pause for a checkpoint without REFT; unset: until it is written")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="draw survival over days to this file (.png, .svg, .pdf)")] = None,
    plot_groups: Annotated[
        Path | None, typer.Option(help="draw survival by size of redundancy groups to this file")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Recommend how nodes protect each other, from failure rates, and how often to save, from the cost of saving; with
    reasons and figures."""
    most = _redundancy_nodes(reft_group_nodes, nodes)
    cluster = Cluster(nodes, group_nodes, hw_rate, sw_rate, shape, most, domain_nodes, domain_rate)
    costs = Costs.from_options(
        {
            "state_gib": state_gib,
            "iteration_seconds": iteration_seconds,
            "snapshot_seconds": snapshot_seconds,
            "link_gib_per_second": link_gib_per_second,
            "storage_gib_per_second": storage_gib_per_second,
            "max_overhead": max_overhead,
            "replace_seconds": replace_seconds,
            "checkpoint_seconds": checkpoint_seconds,
        }
    )
    outlook = plan_survival(cluster, threshold)
    sizes = plan_group_sizes(cluster, threshold)
    intervals = plan_intervals(cluster, costs) if costs is not None else None
    advice = recommend(outlook, sizes, intervals)
    with _drawing():
        if plot is not None:
            from ..report.plan_pictures import draw_survival

            draw_survival(cluster, threshold, plot)
        if plot_groups is not None:
            from ..report.plan_pictures import draw_group_sizes

            draw_group_sizes(cluster, sizes, plot_groups)
    if as_json:
        block = {"recommendation": advice.block(), "survival": outlook.block(), "group_sizes": sizes.block()}
        print(json.dumps(block | {"intervals": intervals and intervals.block()}))
    else:
        tables = [part.table() for part in (advice, outlook, sizes, intervals) if part]
        print("\n\n".join(filter(None, [*tables, terms()])))


def sync(
    profile: Annotated[Path, typer.Argument(help="profile of layers, as a job with local SGD writes it (JSON)")],
    link_mbps: Annotated[
        list[float] | None, typer.Option(help="megabits per second of a link; repeat it for more; unset: chosen")
    ] = None,
    sync_h: Annotated[
        str, typer.Option(help="iterations of a period, or 'auto' for the fewest that hide everything")
    ] = AUTO,
    plot: Annotated[Path | None, typer.Option(help="draw policies over bandwidth to this file")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare policies of synchronisation: the time of an iteration under each, by bandwidth."""
    from ..planner.sync_plan import plan_sync
    from ..sync.layers.layer_profile import read_profile

    outlook = plan_sync(read_profile(profile), link_mbps or (), None if sync_h == AUTO else _number("sync-h", sync_h))
    if plot is not None:
        with _drawing():
            from ..report.plan_pictures import draw_sync

            draw_sync(outlook, plot)
    print(json.dumps({"sync": outlook.block()}) if as_json else outlook.table())


def _redundancy_nodes(text: str, nodes: int) -> int:
    """The value of --reft-group-nodes. Raises ConfigError."""
    return choose_group_nodes(max(1, nodes), Scheme.RAIM5.losses) if text == AUTO else _number("reft-group-nodes", text)


def _number(option: str, text: str) -> int:
    """Raises ConfigError."""
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= 1):
        raise ConfigError(f"--{option}: expected 'auto' or an integer >= 1, found {text!r:.80}")
    return int(text)


@contextmanager
def _drawing() -> Iterator[None]:
    """Raise failures to draw as FtError."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("matplotlib"):
            raise
        raise FtError("pictures need matplotlib, which is not installed; pip install 'ft_plugins[report]'") from error
    except OSError as error:
        raise FtError(f"{error.filename}: cannot be written ({error.strerror})") from error
