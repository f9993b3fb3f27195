"""`ft-plugins plan`: tables and pictures of survival, intervals and bubbles; with --sync, of synchronisation instead.

In: failure rates, costs, a pipeline; or, with --sync, a profile of layers. Out: tables for people, JSON for programs,
pictures. Raises FtError.
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
from ..planner.group_sizes import GroupSizes, plan_group_sizes
from ..planner.group_survival import choose_group_nodes
from ..planner.intervals import Costs, plan_intervals
from ..planner.outlook import PipelineOutlook, PlannedPipeline, plan_pipeline
from ..planner.pipeline import PipelineSchedule
from ..planner.recommendation import recommend, terms
from ..planner.survival import Cluster, Scheme, plan_survival
from ..systems.reft.dry_claim import ORDER
from . import memory_plan_command, sync_plan_command
from .memory_plan_command import MemoryOptions, Precision


def plan(
    context: typer.Context,
    # The first four are required without --sync and refused with it, which `require_consistent` checks: the defaults of
    # 0 are never used.
    nodes: Annotated[int, typer.Option(help="nodes of the job", show_default=False)] = 0,
    group_nodes: Annotated[
        int, typer.Option(help="nodes of a sharding group: data-parallel replicas of a stage", show_default=False)
    ] = 0,
    hw_rate: Annotated[
        float,
        typer.Option(
            help="Weibull rate of a node's hardware failures, per day^shape (failures per day if shape is 1)",
            show_default=False,
        ),
    ] = 0.0,
    sw_rate: Annotated[
        float,
        typer.Option(
            help="Weibull rate of a node's software failures, per day^shape (failures per day if shape is 1)",
            show_default=False,
        ),
    ] = 0.0,
    reft_group_nodes: Annotated[
        str, typer.Option(help="nodes of a redundancy group at most, as in the job: a number or auto")
    ] = str(ReftConfig().group_nodes),
    domain_nodes: Annotated[int, typer.Option(help="nodes of a failure domain, such as a rack or a switch")] = 1,
    domain_rate: Annotated[
        float, typer.Option(help="Weibull rate of failures of a whole failure domain, per day^shape")
    ] = 0.0,
    shape: Annotated[float, typer.Option(help="Weibull shape; above 1 nodes wear out")] = 1.0,
    threshold: Annotated[float, typer.Option(help="lowest acceptable survival probability")] = 0.9,
    state_gib: Annotated[float | None, typer.Option(help="for intervals: GiB that a node captures")] = None,
    iteration_seconds: Annotated[float | None, typer.Option(help="for intervals: duration of an iteration")] = None,
    snapshot_seconds: Annotated[
        float | None, typer.Option(help="for intervals: seconds that training waits at the fence for each snapshot")
    ] = None,
    link_gib_per_second: Annotated[
        float | None, typer.Option(help="for intervals: link bandwidth of one node for the exchange")
    ] = None,
    storage_gib_per_second: Annotated[
        float | None, typer.Option(help="for intervals: write bandwidth of storage, for the whole job")
    ] = None,
    max_overhead: Annotated[
        float | None, typer.Option(help="for intervals: largest share of time for snapshots; unset: 0.01")
    ] = None,
    replace_seconds: Annotated[
        float | None, typer.Option(help="for intervals: time to replace a lost node; unset: 600")
    ] = None,
    checkpoint_seconds: Annotated[
        float | None,
        typer.Option(help="for intervals: pause for a checkpoint without REFT; unset: until it is written"),
    ] = None,
    stages: Annotated[int | None, typer.Option(help="for bubbles: pipeline stages, each on its own nodes")] = None,
    microbatches: Annotated[int | None, typer.Option(help="for bubbles: microbatches in one pipeline")] = None,
    schedule: Annotated[PipelineSchedule | None, typer.Option(help="for bubbles: the schedule; unset: 1f1b")] = None,
    chunks: Annotated[int | None, typer.Option(help="for bubbles: chunks of a rank, if interleaved; unset: 2")] = None,
    message_passes: Annotated[
        float | None, typer.Option(help="for bubbles: duration of a message, in forward passes of a stage; unset: 0")
    ] = None,
    restart_seconds: Annotated[
        float | None, typer.Option(help="for goodput: time from a failure until state is loaded; unset: 600")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="draw survival over days to this file (.png, .svg, .pdf)")] = None,
    plot_groups: Annotated[
        Path | None, typer.Option(help="draw survival by size of redundancy groups to this file")
    ] = None,
    plot_bubbles: Annotated[Path | None, typer.Option(help="draw the pipeline and goodput to this file")] = None,
    sync: Annotated[
        Path | None,
        typer.Option(help="instead: compare policies of synchronisation, from a profile of layers in this file (JSON)"),
    ] = None,
    link_mbps: Annotated[
        list[float] | None,
        typer.Option(help="with --sync: megabits per second of a link; repeat it for more links; unset: chosen"),
    ] = None,
    sync_h: Annotated[
        str, typer.Option(help="with --sync: iterations of a period, or 'auto' for the fewest that hide everything")
    ] = "auto",
    memory: Annotated[
        bool,
        typer.Option(
            "--memory",
            help="instead: host memory that protection of a job claims on each node; flags of the job go after '--'",
        ),
    ] = False,
    parameters: Annotated[
        float, typer.Option(help="with --memory: parameters of the model, such as 7e9", show_default=False)
    ] = 0.0,
    precision: Annotated[
        Precision, typer.Option(help="with --memory: how it is trained, by Adam; decides what is captured")
    ] = Precision.bf16,
    bytes_per_parameter: Annotated[
        float | None,
        typer.Option(help="with --memory: bytes of each parameter that are captured, for other optimizers"),
    ] = None,
    replicated: Annotated[
        bool,
        typer.Option("--replicated", help="with --memory: data parallelism does not shard the optimizer's state"),
    ] = False,
    tp: Annotated[int, typer.Option(help="with --memory: tensor parallel size")] = 1,
    pp: Annotated[int, typer.Option(help="with --memory: pipeline parallel size")] = 1,
    dp: Annotated[
        int, typer.Option(help="with --memory: data parallel size; unset: by --nodes", show_default=False)
    ] = 0,
    ranks_per_node: Annotated[int, typer.Option(help="with --memory: ranks on a node")] = 8,
    order: Annotated[
        str, typer.Option(help="with --memory: order of the parallel dimensions, as Megatron-LM's")
    ] = ORDER,
    node_memory_gib: Annotated[
        float | None, typer.Option(help="with --memory: GiB of a node; unset: what this machine has free now")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="with --sync: draw policies over bandwidth to this file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object, for programs")] = False,
) -> None:
    """Recommend how often to save and how nodes protect each other, with reasons and figures, from failure rates and
    the cost of saving.
    With a pipeline: its bubbles, how often a version fits into them, and goodput under every protection.
    With --sync alone: the time of an iteration under every policy of synchronisation, by bandwidth.
    With --memory alone: the host memory that protection claims on each node, and whether it fits."""
    names = sync_plan_command.given(context)
    memory_plan_command.require_consistent(names, context.args)
    if memory:
        memory_plan_command.plan_memory(
            MemoryOptions(
                parameters, precision, bytes_per_parameter, replicated, tp, pp, dp, ranks_per_node, nodes, order,
                node_memory_gib,
            ),
            context.args,
            as_json,
        )  # fmt: skip
        return
    sync_plan_command.require_consistent(names)
    if sync is not None:
        sync_plan_command.plan_policies(sync, link_mbps or (), sync_h, output, as_json, _drawing)
        return
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
    planned = PlannedPipeline.from_options(
        {
            "stages": stages,
            "microbatches": microbatches,
            "schedule": schedule and schedule.value,
            "chunks": chunks,
            "message_passes": message_passes,
            "restart_seconds": restart_seconds,
        }
    )
    outlook = plan_survival(cluster, threshold)
    sizes = plan_group_sizes(cluster, threshold)
    intervals = plan_intervals(cluster, costs) if costs is not None else None
    pipeline = plan_pipeline(planned, cluster, costs) if planned is not None else None
    advice = recommend(outlook, sizes, intervals)
    if plot is not None:
        _draw_survival(cluster, threshold, plot)
    if plot_groups is not None:
        _draw_group_sizes(cluster, sizes, plot_groups)
    if plot_bubbles is not None:
        _draw_bubbles(pipeline, plot_bubbles)
    if as_json:
        parts = {
            "survival": outlook,
            "intervals": intervals,
            "pipeline": pipeline,
            "group_sizes": sizes,
        }
        print(
            json.dumps(
                {"recommendation": advice.block()} | {name: part and part.block() for name, part in parts.items()}
            )
        )
    else:
        tables = [part.table() for part in (advice, outlook, sizes, intervals, pipeline) if part]
        print("\n\n".join(filter(None, [*tables, terms()])))


def _redundancy_nodes(text: str, nodes: int) -> int:
    """The value of --reft-group-nodes. Raises ConfigError."""
    if text == "auto":
        return choose_group_nodes(max(1, nodes), Scheme.RAIM5.losses)
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= 2):
        raise ConfigError(f"--reft-group-nodes: expected an integer >= 2 or auto, found {text!r:.80}")
    return int(text)


def _draw_survival(cluster: Cluster, threshold: float, path: Path) -> None:
    with _drawing("--plot", path):
        from ..report.plan_pictures import draw_survival

        draw_survival(cluster, threshold, path)


def _draw_group_sizes(cluster: Cluster, sizes: GroupSizes, path: Path) -> None:
    with _drawing("--plot-groups", path):
        from ..report.group_pictures import draw_group_sizes

        draw_group_sizes(cluster, sizes, path)


def _draw_bubbles(outlook: PipelineOutlook | None, path: Path) -> None:
    if outlook is None or not outlook.plans:
        raise ConfigError(
            "--plot-bubbles: has no effect without --stages, --microbatches and the cost of saving (--state-gib and "
            "the other options for intervals); give them too"
        )
    with _drawing("--plot-bubbles", path):
        from ..report.plan_pictures import draw_plan

        draw_plan(outlook.timelines, outlook.plans, path)


@contextmanager
def _drawing(option: str, path: Path) -> Iterator[None]:
    """Raise failures to draw as FtError."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("matplotlib"):
            raise
        raise FtError(f"{option} needs matplotlib, which is not installed; pip install 'ft_plugins[report]'") from error
    except OSError as error:
        raise FtError(f"{option} {path}: cannot be written ({error.strerror})") from error
