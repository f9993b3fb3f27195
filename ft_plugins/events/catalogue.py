"""The catalogue: every event that this package emits, declared once.

To add an event: declare it here, emit it with `events.emit(catalogue.NAME, ...)`, and write docs/events.md again with
`python -m ft_plugins.events`. Tests compare the three.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .declaration import EventType, Field, Severity

ROUTINE, NOTICE, WARNING, ALARM = Severity.ROUTINE, Severity.NOTICE, Severity.WARNING, Severity.ALARM

# ---- fields that several events share ----

_LINEAGE = Field("int", "lineage of the version", optional=True)
_ITERATION = Field("int", "training iteration")
_NEEDED_ITERATION = Field("int", "training iteration", needed=True)
_VERSION: dict[str, Any] = {"lineage": _LINEAGE, "iteration": _ITERATION}
_REASON = Field("str", "why, in words")
_SECONDS = Field("float", "duration", "s")
_BYTES = Field("int", "amount of data", "bytes")
_ABOUT = Field("int", "rank that the event describes")
_TOKEN = Field("int", "fencing token of the incarnation")
_NEEDED_TOKEN = Field("int", "fencing token of the incarnation", needed=True)
_PID = Field("int", "process that the event describes")
_PATH = Field("str", "file or folder")
_RANKS = Field("list", "ranks concerned")
_WORLD_SIZE = Field("int", "ranks of the job")
_SEGMENTS = Field("int", "shared-memory segments")
_COUNT = Field("int", "how many times")
_LOST = Field("list", "lost nodes or ranks, in words")
_RUN = Field("str", "identity of the run: the same from its first start on, also after restarts and on other nodes")
_ECHO = Field("bool", "another rank reports the cause")
_PACE: dict[str, Any] = {
    "iterations": Field("int", "iterations between the two newest committed versions", "iterations", optional=True),
    "planned": Field("int", "iterations per version by the bubble plan", "iterations", optional=True),
    "in_bubbles": Field("int", "sent within bubbles", "bytes"),
    "late": Field("int", "sent in windows that closed before the data had arrived", "bytes"),
    "by_rate": Field("int", "sent outside bubbles, rate-limited", "bytes"),
    "taken": Field("int", "used of the windows in which data was waiting", "bytes"),
    "offered": Field("int", "offered by those windows", "bytes"),
}

# ---- a job and its processes ----

JOB_STARTED = EventType(
    "job.started", NOTICE, "The job was started on this node.",
    nproc=Field("int", "ranks of this node"), script=Field("str", "what is run"),
)  # fmt: skip
JOB_ENDED = EventType("job.ended", NOTICE, "The job ended on this node.", status=Field("str", "outcome"))
WORKER_FAILED = EventType(
    "worker.failed", WARNING, "A training process ended with an error; the job restarts if restarts are left.",
    "Read its message and log. If one device or node fails repeatedly, drain it.",
    rank=Field("int", "rank that failed"), local_rank=Field("int", "its rank within the node"),
    exitcode=Field("int", "exit code; negative for a signal"), signal=Field("str", "name of that signal, or empty"),
    message=Field("str", "the last error that it reported, or empty"),
    oom_kills=Field("int", "processes of the node's control group that the kernel killed for lack of memory since the "
    "ranks were started, if this one was killed", optional=True),
    flight_record=Field("str", "file of its NCCL flight record, or empty"),
)  # fmt: skip
WORKERS_RESTARTED = EventType(
    "workers.restarted", NOTICE, "The training processes of this node were started again.",
    restart=Field("int", "restarts so far", needed=True), token=_NEEDED_TOKEN,
    seconds=Field("float", "since the failure was seen on this node", "s", optional=True),
    clock=Field("float", "this node's monotonic clock when the first process was started", "s"),
    seen=Field("float", "the same clock when this node saw why they have to restart", "s"),
    ended=Field("float", "the same clock when the old processes had ended", "s"),
    dumping=Field("float", "the same clock when the kernel was seen to write the core of one, if it did", "s",
    optional=True),
)  # fmt: skip
RANKS_UNATTACHED = EventType(
    "ranks.unattached", ALARM,
    "The script has run for long, or has ended, and not all ranks of this node have attached: nothing is protected.",
    "Have the script attach: a loop of your own by ft_plugins.attach(host), Megatron-LM by its pretrain, DeepSpeed by "
    "deepspeed.initialize, Hugging Face's Trainer by train. If it does so later, nothing is to be done.",
    seconds=Field("float", "since the ranks were started", "s"),
)  # fmt: skip
LOCK_REMOVED = EventType(
    "lock.removed", NOTICE,
    "Killed ranks had left the lock of a build of an extension, for which the next ones would have waited.",
    path=Field("str", "the lock"),
)  # fmt: skip
RANKS_RESUMED = EventType(
    "ranks.resumed", NOTICE,
    "The ranks of this node have completed an iteration for the first time since they were started.",
    restart=Field("int", "restarts before"), token=_NEEDED_TOKEN, lineage=_LINEAGE, iteration=_NEEDED_ITERATION,
    count=Field("int", "ranks of this node that are described"),
    began=Field("float", "this node's monotonic clock when the last of them began", "s"),
    joining=Field("float", "the same clock when the last of them began to make process groups", "s", optional=True),
    grouped=Field("float", "for how long that one made process groups", "s"),
    built=Field("float", "the same clock when the last of them had built its model", "s"),
    restored=Field("float", "the same clock when the last of them had loaded its state", "s"),
    completed=Field("float", "the same clock when the iteration was completed", "s", needed=True),
    processor=Field("dict", "processor seconds of all of them, by part of the start", of="float"),
)  # fmt: skip
PRELOAD_PREPARED = EventType(
    "preload.prepared", NOTICE, "A process of this node has imported what its ranks import, and forks them.",
    seconds=Field("float", "since it began", "s"), modules=Field("int", "imported"),
    bytes=Field("int", "its memory, which ranks share", "bytes"),
)  # fmt: skip
PRELOAD_USED = EventType(
    "preload.used", NOTICE, "The ranks of this node were started.",
    count=Field("int", "ranks that were forked"), cold=Field("int", "ranks that started in new processes"),
)  # fmt: skip
PRELOAD_REDUCED = EventType(
    "preload.reduced", NOTICE, "A package is not imported ahead: each rank of this node imports it by itself.",
    "Nothing is lost but seconds at a start.", module=Field("str", "the package"), reason=_REASON,
)  # fmt: skip
PRELOAD_REFUSED = EventType(
    "preload.refused", NOTICE, "The ranks of this node are not forked; they start, or will start, in new processes.",
    "Nothing is lost but seconds at a start. --ftp-preload off does without.", reason=_REASON,
)  # fmt: skip
PRELOAD_OUTDATED = EventType(
    "preload.outdated", WARNING,
    "The script set variables of the environment that modules had read before, when they were imported ahead.",
    "These modules act as if the variables had not been set. The next start leaves them to the ranks; to be sure, give "
    "--ftp-preload off, or set the variables outside of the script.",
    variables=Field("list", "their names"), reason=_REASON,
)  # fmt: skip
WORKERS_KILLED = EventType(
    "workers.killed", ALARM,
    "Other nodes or ranks were lost, or the job hung, so the training processes of this node could not continue; they "
    "were killed to restart.",
    "Find out why; the job continues when enough nodes have joined.", lost=_LOST, reason=_REASON,
)  # fmt: skip
FAILURE_RECURRED = EventType(
    "failure.recurred", ALARM,
    "The same failure ended the job shortly after each of the last starts, so what they began from leads to it; the "
    "job has stopped with a status that is not to be requeued.",
    "Find the cause in the error, then start with the --ftp-resume that the reason names.",
    resumed=Field("list", "iterations from which it was resumed; 0: the beginning"),
    completed=Field("list", "the last iteration completed after each of them"), reason=_REASON,
)  # fmt: skip
ROUND_LOST = EventType(
    "round.lost", WARNING, "The rendezvous lost its store before training processes had started; it is held again.",
    "If it repeats, check the network between the nodes.", reason=_REASON,
)  # fmt: skip
ROUND_ENDED = EventType(
    "round.ended", ALARM,
    "Another node failed or wants to join; the training processes of this node restart in a new rendezvous.",
    "Look at that node's log.", reason=_REASON,
)  # fmt: skip
ROUND_CHANGED = EventType(
    "round.changed", NOTICE, "Another node has left the job, as was asked, at a version that is committed on all "
    "nodes; the training processes of this node restart in a new rendezvous, and no iteration is lost.",
    reason=_REASON,
)  # fmt: skip
NODE_DRAINED = EventType(
    "node.drained", NOTICE, "This node has left the job, as was asked, at a version that is committed on all nodes; a "
    "spare takes its place, and no iteration is lost.",
    iteration=_ITERATION, seconds=Field("float", "since this node was asked to leave", "s"),
)  # fmt: skip
NODE_REPLACED = EventType(
    "node.replaced", NOTICE, "Nodes of the round before were lost, or drained, and the job goes on without them.",
    "If a node was lost, find out why: its log, or its kernel's, may say it.",
    gone=Field("list", "names of these nodes", needed=True),
    new=Field("list", "names of nodes that were not in the round before", needed=True),
    asked=Field("list", "those of the gone nodes that had been asked to leave by `ft-plugins drain`", needed=True),
)  # fmt: skip
DRAIN_FAILED = EventType(
    "drain.failed", ALARM, "This node was asked to leave the job, and stays.",
    "Find out why versions are not committed, then give `ft-plugins drain` again.", reason=_REASON,
)  # fmt: skip
NODE_REJECTED = EventType(
    "node.rejected", ALARM, "This node failed the site's own check, and takes no part in the job.",
    "Mend the node, then give the same command there again.",
    status=Field("int", "exit status of the check; none if it was killed at its bound or did not start", optional=True),
    seconds=_SECONDS, output=Field("str", "the last lines that the check printed"), reason=_REASON,
)  # fmt: skip
RANK_ATTACHED = EventType(
    "rank.attached", NOTICE, "A rank mapped the memory for its snapshots.",
    token=_TOKEN, share_bytes=Field("int", "captured by this rank per version", "bytes"),
    budget_bytes=Field("int", "claimed by this rank", "bytes"),
    resident_bytes=Field("int", "resident, by the kernel's figure", "bytes"),
)  # fmt: skip
RANK_ENDED = EventType("rank.ended", NOTICE, "A rank's training came to its orderly end.")

# ---- snapshots, and protection on the own node ----

SNAPSHOT_SEALED = EventType(
    "snapshot.sealed", ROUTINE, "A rank's snapshot of an iteration is whole in shared memory.",
    lineage=_LINEAGE, iteration=_NEEDED_ITERATION,
    seconds=Field("float", "from the version point to the seal, hidden behind compute", "s", needed=True),
    bytes=Field("int", "amount of data", "bytes", needed=True), slot=Field("int", "slot that holds it"),
)  # fmt: skip
SNAPSHOT_SKIPPED = EventType(
    "snapshot.skipped", ROUTINE,
    "An iteration was not captured: all slots hold snapshots that other nodes have, or are being sent.",
    **_VERSION,
)  # fmt: skip
SLOT_CLAIMED = EventType(
    "slot.claimed", NOTICE,
    "A rank claimed memory for another snapshot: it was needed before an older one was no longer. That is so while a "
    "snapshot is sent when the next one is taken.",
    count=Field("int", "snapshots that fit into the rank's memory now"), bytes=_BYTES,
)  # fmt: skip
SLOT_REFUSED = EventType(
    "slot.refused", WARNING,
    "Memory for another snapshot of a rank is lacking. The job goes on as with --reft-slots: after the failure of a "
    "process it may resume from the snapshot that other nodes have.",
    "Free memory on the node; the rank tries again every minute.",
    count=Field("int", "snapshots that fit into the rank's memory"), reason=_REASON,
)  # fmt: skip
FENCE_WAITED = EventType(
    "fence.waited", ROUTINE, "The update of an iteration waited for the snapshot before it.",
    iteration=_NEEDED_ITERATION, seconds=Field("float", "time for which training stood still", "s", needed=True),
)  # fmt: skip
PROTECTION_LOST = EventType(
    "protection.lost", ALARM, "Snapshots are no longer taken, or no SMP keeps them; training continues unprotected.",
    "Fix the cause and restart before --ftp-max-unprotected-steps ends the job. If the framework can save a "
    "checkpoint, let it do so first: a restart repeats what neither a snapshot nor a checkpoint has.",
    reason=_REASON, max_steps=Field("int", "iterations that may pass unprotected", "iterations"), echo=_ECHO,
)  # fmt: skip
PROTECTION_RESTORED = EventType(
    "protection.restored",
    NOTICE,
    "The job is protected again.",
    ends=("protection.lost", "smp.lost", "smp.hung"),
    reason=_REASON,
)
RANKS_DISCONNECTED = EventType(
    "ranks.disconnected", WARNING,
    "The connection of a rank to another one was lost, but the job trains on and takes snapshots.",
    "Check the network between the two nodes. Nothing is lost so far, but a rank that loses protection can no longer "
    "notify the others: they would overwrite the last snapshot that all ranks have. Restart the job when convenient.",
    peer=Field("int", "the other rank"), reason=_REASON,
)  # fmt: skip
VERSION_VOIDED = EventType(
    "version.voided", WARNING, "Snapshots taken since the replicas last agreed were discarded.",
    "See audit.failed.", since=Field("int", "last iteration whose replicas agreed"),
    iterations=Field("list", "iterations of the discarded snapshots"),
)  # fmt: skip
VERSION_TAINTED = EventType(
    "version.tainted", ALARM, "Snapshots that hold a wrong replica are being sent or written; they are never restored.",
    "See audit.failed.", iterations=Field("list", "iterations of these snapshots"), reason=_REASON,
)  # fmt: skip
SLOT_CORRUPTED = EventType(
    "slot.corrupted", ALARM, "A snapshot failed its digest: it is neither restored nor sent.",
    "If it repeats on one node, check its memory and drain it.", reason=_REASON,
)  # fmt: skip
SLOT_LOST = EventType(
    "slot.lost", WARNING, "A rank does not have the version that is restored; it is rebuilt from other nodes.",
    "If it repeats on one node, look at its log.", reason=_REASON,
)  # fmt: skip
SLOT_REBUILT = EventType(
    "slot.rebuilt", NOTICE, "A lost snapshot was rebuilt from other nodes.", about=_ABOUT, **_VERSION,
    decoded=Field("bool", "from parity or a copy; else from the rank's previous node"), bytes=_BYTES,
    read_bytes=Field("int", "received from other nodes", "bytes"), seconds=_SECONDS,
)  # fmt: skip
SEGMENT_CORRUPTED = EventType(
    "segment.corrupted", ALARM, "The header of a rank's segment is damaged; its snapshots are lost on this node.",
    "If it repeats on one node, check its memory and drain it.", about=_ABOUT, path=_PATH, reason=_REASON,
)  # fmt: skip
SEGMENTS_REMOVED = EventType(
    "segments.removed", ALARM,
    "Files of the running job were removed from shared memory.",
    "Find out what removes them: a cleaning script, or systemd at a logout (RemoveIPC=no in logind.conf). Files whose "
    "memory the SMP holds are written again at the next restart of the ranks; if the SMP dies before that, what they "
    "held is lost at it, as the reason then says. Other nodes and storage may have it still. Restart the job soon.",
    paths=Field("list", "removed files"), reason=_REASON,
)  # fmt: skip
SEGMENTS_RECOVERED = EventType(
    "segments.recovered", NOTICE, "Files that had been removed from shared memory are there again.",
    ends=("segments.removed",), paths=Field("list", "files that are missing still"), reason=_REASON,
)  # fmt: skip

# ---- the snapshot process (SMP) ----

SMP_STARTED = EventType("smp.started", NOTICE, "An SMP is running on this node.", pid=_PID)
SMP_LOST = EventType(
    "smp.lost", ALARM, "The SMP of this node died; another one is started and adopts its snapshots.",
    "If it repeats, look at smp.log in the run directory and at the kernel's log.", pid=_PID,
)  # fmt: skip
SMP_HUNG = EventType(
    "smp.hung", ALARM, "The SMP of this node did not answer and is killed; another one adopts its snapshots.",
    "If it repeats, look at smp.log in the run directory and at the node's load.",
    pid=_PID, request=Field("str", "request without an answer"), reason=_REASON,
)  # fmt: skip
SMP_ORPHANED = EventType(
    "smp.orphaned", WARNING, "The job's ft-run is gone; the SMP keeps the snapshots for a while.",
    "Give the same command again to resume from memory.",
    seconds=Field("float", "for which it waits (--ftp-orphan-seconds)", "s"),
)  # fmt: skip
SMP_RETAINED = EventType(
    "smp.retained", ALARM, "The job ended here, but the SMP or its segments stay.",
    "When the job is over on all nodes: `ft-plugins end`, or `ft-plugins sweep` where no SMP runs.", reason=_REASON,
)  # fmt: skip
SMP_ENDED = EventType(
    "smp.ended", NOTICE, "The SMP ended and removed its segments.", reason=_REASON, segments=_SEGMENTS
)
SMP_KILLED = EventType(
    "smp.killed", NOTICE, "A test driver killed an SMP that did not answer.",
    killed_pid=Field("int", "its process"), reason=_REASON,
)  # fmt: skip
SEGMENTS_ADOPTED = EventType(
    "segments.adopted", NOTICE, "A new SMP took over the segments of the one before.", segments=_SEGMENTS, token=_TOKEN
)
INCARNATION_FENCED = EventType(
    "incarnation.fenced", NOTICE, "The previous training processes of this node are gone; a new incarnation may begin.",
    token=_TOKEN,
)  # fmt: skip
METRICS_FAILED = EventType(
    "metrics.failed", WARNING, "The SMP cannot serve the metrics of this node; nothing else is affected.",
    "Free the port (`ft-plugins end JOB`, if it is an ended job's): the SMP tries again each 30 s. Or give "
    "--ftp-metrics another address or port at the next start.",
    reason=_REASON,
)  # fmt: skip
SCALARS_FAILED = EventType(
    "scalars.failed", WARNING, "The framework's writer took no scalars of ft_plugins; it gets none any more.",
    "Look at the writer, as for TensorBoard, or give --ftp-scalar-seconds 0.", reason=_REASON,
)  # fmt: skip
REQUEST_REJECTED = EventType(
    "request.rejected", WARNING, "The SMP rejected a request.", "If training was affected, its own error says how.",
    request=Field("str", "request", optional=True), reason=_REASON,
)  # fmt: skip
FILE_REJECTED = EventType(
    "file.rejected", WARNING, "A segment or a file of the run directory cannot be used by the SMP.",
    "If it belongs to no running job, remove it.", path=_PATH, reason=_REASON,
)  # fmt: skip
SWEEP_COMPLETED = EventType(
    "sweep.completed", NOTICE, "Shared memory of jobs that are gone was removed.", paths=Field("list", "removed files")
)
SWEEP_FAILED = EventType(
    "sweep.failed", WARNING, "Shared memory of jobs that are gone could not be removed.",
    "Remove it with `ft-plugins sweep` as its owner.", reason=_REASON,
)  # fmt: skip

# ---- the node tier ----

EXCHANGE_STARTED = EventType("exchange.started", ROUTINE, "A node began to send a version to other nodes.", **_VERSION)
EXCHANGE_SENT = EventType(
    "exchange.sent", ROUTINE, "A node sent its part of a version.", **_VERSION, bytes=_BYTES,
    in_bubbles=Field("int", "sent within bubbles", "bytes"),
    late=Field("int", "sent in windows that closed before the data had arrived", "bytes"),
    compared=Field("int", "ranges of replicas compared with other nodes"), seconds=_SECONDS,
)  # fmt: skip
EXCHANGE_RETRIED = EventType(
    "exchange.retried", WARNING, "Sending to another node failed and is tried again.",
    "If versions are no longer committed, check that node and the link to it.",
    target=Field("str", "node that receives"), reason=_REASON,
)  # fmt: skip
VERSION_COMMITTED = EventType(
    "version.committed", ROUTINE, "A version is complete on all nodes: a lost node would be rebuilt from it.",
    **_VERSION, seconds=Field("float", "since its exchange was announced", "s"),
    position=Field("int", "position of the node in the exchange plan"), **_PACE,
    filled=Field("list", "rank, bubble and bytes of copies, for the fullest bubbles"),
)  # fmt: skip
INTERVAL_CHANGED = EventType(
    "interval.changed", NOTICE,
    "The job chose other intervals for its snapshots or checkpoints, by what they cost, or after a restart.",
    interval=Field("int", "between two snapshots", "iterations"),
    checkpoint_interval=Field("int", "between two checkpoints", "iterations"),
    iteration=Field("int", "first training iteration at which they apply"), reason=_REASON,
)  # fmt: skip
EXCHANGE_SLOWED = EventType(
    "exchange.slowed", ALARM, "Versions are committed less often than planned: a lost node costs more iterations.",
    "Links carry less than planned, or bubbles have become shorter: see `ft-plugins status`.", **_PACE,
)  # fmt: skip
EXCHANGE_RECOVERED = EventType(
    "exchange.recovered",
    NOTICE,
    "Versions are committed as often as planned again.",
    ends=("exchange.slowed",),
    **_PACE,
)
PROTECTION_STALLED = EventType(
    "protection.stalled", ALARM,
    "No version is committed any more while training goes on: a lost node costs all iterations since the last one.",
    "Look at the node that is named, its SMP and its links. If that does not help, restart the job.",
    iterations=Field("int", "iterations captured since the last commit", "iterations"),
    usual=Field("int", "longest of the recent distances between two commits", "iterations", optional=True),
    seconds=Field("float", "since the last commit", "s"), waits_for=Field("str", "node that is named, or empty"),
    reason=_REASON,
)  # fmt: skip
PROTECTION_RESUMED = EventType(
    "protection.resumed", NOTICE, "Versions are committed again.", ends=("protection.stalled",), reason=_REASON
)
REPORT_REJECTED = EventType(
    "report.rejected", WARNING,
    "The SMP of another node reports versions that cannot be; its report is not used. No version is committed while it "
    "does.",
    "If it repeats, kill the SMP of that node: another one takes over its memory.",
    peer=Field("str", "name of that node"), reason=_REASON,
)  # fmt: skip
EXCHANGE_INTERRUPTED = EventType(
    "exchange.interrupted", WARNING,
    "A new SMP cannot continue the exchange of the one before; no version is committed until training restarts.",
    "If it repeats, check the run directory's disk.", reason=_REASON,
)  # fmt: skip
REPLICA_MISMATCHED = EventType(
    "replica.mismatched", ALARM,
    "Two ranks hold different bytes of state that must be identical; that version is not sent.",
    "Drain the device of one of them; with three or more replicas --paft --paft-mode audit names the wrong one.",
    about=_ABOUT, ranks=_RANKS, bucket=Field("int", "bucket in which they differ"), **_VERSION,
    offset=Field("int", "first byte of the range compared", "bytes"), bytes=_BYTES,
    count=Field("int", "ranges that differ"), reason=_REASON,
)  # fmt: skip
NODE_LOST = EventType(
    "node.lost", WARNING, "Other nodes or ranks stopped responding; the job restarts without waiting for timeouts.",
    "Find out why; the job continues when enough nodes have joined.", lost=_LOST,
)  # fmt: skip
JOB_HUNG = EventType(
    "job.hung", ALARM, "No rank completes an iteration any more, or comes to the first one; the training processes "
    "restart.",
    "Read the stacks of the named rank. If the job was not hanging but busy with something that takes long, give "
    "--ftp-hang-seconds a larger value, or 0 for none.",
    about=Field("int", "rank for which the others wait"), culprit=Field("str", "its node"), iteration=_ITERATION,
    phase=Field("str", "what that rank was doing"),
    even=Field("bool", "all ranks are in that phase: none is behind the others"),
    ranks=Field("list", "ranks of this node for which its others wait"),
    seconds=Field("float", "for which no iteration was completed, as this node saw it", "s"),
    limit_seconds=Field("float", "after which that is a hang", "s"),
    stacks=Field("str", "folder with the stacks of this node's ranks, or empty"), reason=_REASON,
)  # fmt: skip
JOB_WAITING = EventType(
    "job.waiting", ALARM, "No rank completes an iteration, but the rank for which the others wait may be at work: "
    "nothing is killed for half an hour. Or a start is idle again after ranks were restarted for it, and may wait for "
    "something outside: nothing is killed.",
    "Read its stack. If it hangs, end the job and give the same command again; --ftp-hang-seconds fixes the limit of "
    "an iteration.",
    about=Field("int", "rank for which the others wait"), iteration=_ITERATION,
    phase=Field("str", "what that rank is doing"), seconds=Field("float", "for which no iteration was completed", "s"),
    stacks=Field("str", "folder with its stack, or empty"), reason=_REASON,
)  # fmt: skip
JOB_ADVANCED = EventType(
    "job.advanced", NOTICE, "Ranks complete iterations again, or have attached.", ends=("job.waiting",),
    iteration=_ITERATION,
    seconds=Field("float", "since the job was found waiting; of a start, since ranks were started", "s"),
)  # fmt: skip
PROGRESS_UNWATCHED = EventType(
    "progress.unwatched", WARNING, "The progress of a rank cannot be watched: it is not noticed if the job hangs.",
    "Remove the cause and restart.", reason=_REASON,
)  # fmt: skip
RANK_SLOWED = EventType(
    "rank.slowed", WARNING, "A rank computes much longer than the others of its stage on its node.",
    "Look for another process, a hot or throttled device, or slow storage of its data.",
    about=Field("int", "rank that the event describes", needed=True),
    factor=Field("float", "its computing time in those of the others"),
    seconds=Field("float", "how much longer it computes in an iteration", "s"),
    iterations=Field("int", "iterations that were compared", "iterations"),
)  # fmt: skip
RANK_RECOVERED = EventType("rank.recovered", NOTICE, "A rank that was slow is not any more.", about=_ABOUT)
COORDINATOR_LOST = EventType(
    "coordinator.lost", WARNING, "The node that coordinates the exchange stopped responding.", "See node.lost.",
    reason=_REASON,
)  # fmt: skip
PEER_REJECTED = EventType(
    "peer.rejected", WARNING, "Connections were rejected, or ended, before the other side had proved its identity.",
    "If the addresses are not of this job, keep them out by a firewall; else compare the secret files.",
    count=Field("int", "connections since the last such event"), reasons=Field("dict", "connections by reason"),
    addresses=Field("dict", "connections by address"),
)  # fmt: skip
PEER_DISCONNECTED = EventType(
    "peer.disconnected", WARNING, "The connection of another node was closed because of an error.",
    "If it repeats, check that node.", peer=Field("str", "name of that node"), reason=_REASON,
)  # fmt: skip
PROBE_FAILED = EventType(
    "probe.failed", WARNING, "The speed of the links could not be measured; a usual one is assumed.",
    "Give --baft-link-mbps where links are slower.", reason=_REASON,
)  # fmt: skip

# ---- recovery and resizing ----

_AT_LEAST = Field("bool", "both may be more: no memory that says so is left of the job's newest lineage")
TRAINING_STARTED = EventType(
    "training.started", NOTICE, "Training starts from its beginning: there was nothing to resume from.",
    run=_RUN, reason=_REASON, completed=Field("int", "last iteration that every rank completed"),
    lost=Field("int", "iterations to be computed again", "iterations"),
)  # fmt: skip
STATE_LOST = EventType(
    "state.lost", ALARM, "No tier has a restorable version: training starts from its beginning, and progress is lost.",
    "Configure checkpoints (--reft-checkpoint-dir), or survive more lost nodes (--reft-redundancy).", once=True,
    run=_RUN, reason=_REASON, completed=Field("int", "last iteration that every rank completed"),
    lost=Field("int", "iterations to be computed again", "iterations"), at_least=_AT_LEAST,
)  # fmt: skip
STATE_RESTORED = EventType(
    "state.restored", NOTICE, "A rank's state was restored.", **_VERSION, tier=Field("str", "process, node or storage"),
    run=_RUN, reason=_REASON, completed=Field("int", "last iteration that every rank completed"),
    lost=Field("int", "iterations to be computed again", "iterations"), at_least=_AT_LEAST,
    mark=Field("str", "what an audit found of the version"), seconds=_SECONDS,
    verify_seconds=Field("float", "until every snapshot was whole and verified", "s"),
    load_seconds=Field("float", "from then until tensors were loaded", "s"),
)  # fmt: skip
RESUME_DIFFERED = EventType(
    "resume.differed", ALARM, "An iteration that was computed again is not what it was before the restore.",
    "Run 'ft-plugins rehearse' to find what is not restored. A loader that is not reproducible, or kernels that are "
    "not deterministic, differ without a restore too.",
    iteration=_ITERATION, parts=Field("list", "what differs"),
    ending=Field("bool", "the job ends, because the loop did not continue"), reason=_REASON,
)  # fmt: skip
RESUME_PROVEN = EventType(
    "resume.proven", NOTICE,
    "After a restore, what had been completed before was computed again, and came out the same, every captured byte.",
    iteration=Field("int", "the last one that was computed again"), reason=_REASON,
)  # fmt: skip
RESUME_UNPROVEN = EventType(
    "resume.unproven", NOTICE,
    "Whether the loop goes on from a restored state as it would have was not seen, or cannot be; or it does not, as "
    "resume.differed says.",
    iteration=Field("int", "the restored one, or the last one that was computed again"), reason=_REASON,
)  # fmt: skip
VALUES_RESTARTED = EventType(
    "values.restarted", NOTICE,
    "After a restore, values that training changes are at their first value again, since nothing restores them: if "
    "training depends on one, results differ, which resume.proven excludes for the iteration that it is about.",
    iteration=Field("int", "the restored one"), reason=Field("str", "the values by path, with what they were"),
)  # fmt: skip
STATE_RESHARDED = EventType(
    "state.resharded", NOTICE, "State of a job of another size was distributed to the ranks of this one.",
    ranks=Field("int", "previous size of the job", "ranks"), **_VERSION, bytes=_BYTES, seconds=_SECONDS,
)  # fmt: skip
JOB_RESIZED = EventType(
    "job.resized", NOTICE, "The job has another size; snapshots of the previous size are retained.",
    ranks=_WORLD_SIZE, retained=Field("list", "ranks of the previous size whose segments are here"),
)  # fmt: skip
RESIZE_FINISHED = EventType(
    "resize.finished", NOTICE, "State is safe at the new size; snapshots of the previous size were removed.",
    segments=_SEGMENTS,
)  # fmt: skip
SPARE_QUERIED = EventType(
    "spare.queried", NOTICE, "The job asked this node, which takes no part, for snapshots of a previous size.",
    ranks=_WORLD_SIZE, segments=_SEGMENTS,
)  # fmt: skip
SPARE_RELEASED = EventType(
    "spare.released", NOTICE, "The job needs nothing of this node any more; its snapshots were removed.",
    segments=_SEGMENTS, lineage=_LINEAGE,
)  # fmt: skip
# fmt: skip

# ---- checkpoints in storage ----

CHECKPOINT_STARTED = EventType(
    "checkpoint.started", NOTICE, "A node began to write its ranks' part of a checkpoint.",
    **_VERSION, reason=_REASON, ranks=_RANKS,
)  # fmt: skip
CHECKPOINT_COMPLETED = EventType(
    "checkpoint.completed", NOTICE, "A checkpoint is complete in storage.", ends=("checkpoint.failed",),
    **_VERSION, seconds=_SECONDS, bytes=_BYTES, path=_PATH,
)  # fmt: skip
CHECKPOINT_FAILED = EventType(
    "checkpoint.failed", ALARM, "A checkpoint was not written, or older ones were not removed; training continues.",
    "Do what the reason says; the next interval tries again.",
    **_VERSION, reason=_REASON, newest_complete=Field("str", "the newest complete checkpoint", optional=True),
)  # fmt: skip
CHECKPOINT_SUPERSEDED = EventType(
    "checkpoint.superseded", NOTICE, "A checkpoint was left off because a newer one was complete first.",
    **_VERSION, reason=_REASON, newest_complete=Field("str", "the newest complete checkpoint", optional=True),
)  # fmt: skip
CHECKPOINT_KEPT = EventType(
    "checkpoint.kept", NOTICE, "A checkpoint was asked for with --keep and is never pruned.", **_VERSION, path=_PATH
)
CHECKPOINT_PRUNED = EventType(
    "checkpoint.pruned", NOTICE, "Checkpoints older than those to keep were removed.",
    removed=Field("list", "their folders"),
)  # fmt: skip
CHECKPOINT_MISSED = EventType(
    "checkpoint.missed", WARNING, "The job ended before its newest snapshot was in storage.",
    "Resume from memory with the same command, or from the newest complete checkpoint.", reason=_REASON,
)  # fmt: skip
CHECKPOINT_IGNORED = EventType(
    "checkpoint.ignored", WARNING, "Folders whose names are not those of checkpoints were passed over.",
    "Remove them.", reason=_REASON,
)  # fmt: skip
CHECKPOINT_VOIDED = EventType(
    "checkpoint.voided", NOTICE, "The job went back to before these checkpoints; they are no longer used.",
    "Remove them when they are not needed any more.", reason=_REASON,
)  # fmt: skip
CHECKPOINT_CORRUPTED = EventType(
    "checkpoint.corrupted", ALARM, "A checkpoint is damaged; an older one is used.",
    "Put its files back, or remove it.", reason=_REASON,
)  # fmt: skip
STORAGE_FAILED = EventType(
    "storage.failed", ALARM, "The folder for checkpoints cannot be read; the job resumes from memory.",
    "Make it a folder that all nodes share and may write to.", reason=_REASON,
)  # fmt: skip
LEASE_LOST = EventType(
    "lease.lost", ALARM, "Another run uses the folder for checkpoints: this one writes none any more, and trains on.",
    "If this run is the one that is wanted, end the other one and give this one's command again; else end this one.",
    reason=_REASON,
)  # fmt: skip
EXPORT_DISABLED = EventType(
    "export.disabled", WARNING, "Checkpoints of this job cannot be exported in the framework's own format.",
    "Resume such checkpoints with ft_plugins.", reason=_REASON,
)  # fmt: skip

# ---- bubbles ----

PROFILE_COMPLETED = EventType(
    "profile.completed", NOTICE, "The iterations were measured.",
    seconds=Field("float", "of one iteration", "s"), spans=Field("int", "spans of one iteration"),
    idle_seconds=Field("float", "bubbles of one iteration", "s"),
    waited_seconds=Field("float", "time that measuring cost", "s"),
    left_out=Field("list", "iterations that were not used"),
)  # fmt: skip
PROFILE_LOST = EventType(
    "profile.lost", ALARM, "There is no bubble plan; copies go rate-limited, next to training's own messages.",
    "If training slows down, restart it to measure again.", once=True, reason=_REASON,
)  # fmt: skip
BUBBLES_PLANNED = EventType(
    "bubbles.planned", NOTICE, "A rank planned which of its bytes go in which bubble.",
    iterations=Field("int", "iterations per version", "iterations"),
    seconds=Field("float", "of one iteration", "s"), bytes=_BYTES,
    idle_seconds=Field("float", "bubbles of one iteration", "s"),
    shared_seconds=Field("float", "bubbles in which other ranks use the same link", "s"),
    fill_bytes=Field("float", "how full the windows are that the copy needs, filled by bytes", "share", optional=True),
    fill_layers=Field("float", "the same, filled by whole layers", "share", optional=True),
    granularity=Field("str", "bytes or layer"),
    reason=Field("str", "why no bubble carries the copy; empty if one does"),
    message_seconds=Field("float", "longest message of training on the link", "s"),
    link_mbps=Field("float", "speed of the link", "Mbit/s"),
    by_device=Field("bool", "whether the device opens the gate, because the host runs ahead of it"),
)  # fmt: skip
TIMELINE_RECORDED = EventType(
    "timeline.recorded", NOTICE, "One iteration of a rank and what is planned in it, for pictures.",
    iteration=Field("int", "iteration at whose end all ranks adopted the plan"),
    seconds=Field("float", "of one iteration", "s"),
    spans=Field("list", "kind, begin and end of each span", "s", of=("str", "float", "float")),
    bubbles=Field("list", "index, begin and end of each bubble", "s", of=("int", "float", "float")),
    windows=Field(
        "list", "bubble, begin, end and bytes of each window", "s, bytes", of=("int", "float", "float", "int")
    ),
    left_out=Field("int", "entries beyond the limit"), bytes=_BYTES, receiver=Field("int", "rank that keeps the copy"),
    reason=Field("str", "why no bubble carries the copy; empty if one does"),
)  # fmt: skip

# ---- replicas: audits and averaging ----

AUDIT_FAILED = EventType(
    "audit.failed", ALARM, "Data-parallel replicas differ after an iteration.",
    "Drain the device of the ranks named if it repeats.", iteration=_ITERATION,
    ranks=Field("list", "ranks that are wrong, or may be"), majority=Field("bool", "a majority says which are wrong"),
    waited_seconds=Field("float", "time for which training waited for the verdict", "s"),
    layers=Field("list", "layers that differ"), buckets=Field("list", "buckets that differ"), reason=_REASON,
)  # fmt: skip
RANK_SUSPECTED = EventType(
    "rank.suspected", ALARM, "A rank was wrong at several audits.", "Drain its device.",
    rank=Field("int", "rank that was wrong"), count=_COUNT, reason=_REASON,
)  # fmt: skip
SUSPECT_LISTED = EventType(
    "suspect.listed", ALARM, "The job ends; a rank was wrong at several audits.", "Drain its device.",
    rank=Field("int", "rank that was wrong"), count=_COUNT, reason=_REASON,
)  # fmt: skip
AVERAGING_PREPARED = EventType(
    "averaging.prepared", NOTICE, "Memory for averaging replicas was claimed.",
    nbytes=Field("int", "claimed on this rank", "bytes"), buckets=Field("int", "buckets that are averaged"),
)  # fmt: skip
REPLICAS_AVERAGED = EventType(
    "replicas.averaged", NOTICE, "Replicas were averaged.", iteration=_ITERATION,
    applied=Field("bool", "applied; else out of date"),
    waited_seconds=Field("float", "time for which training waited", "s"),
    next=Field("int", "iteration of the next averaging"),
    interval=Field("int", "iterations until it", "iterations"), reason=Field("str", "why that interval"),
    divergence=Field("float", "norm of the distance from the mean"),
    sigma=Field("float", "estimated noise of one parameter", optional=True),
    signal=Field("float", "norm of the last step"), nonfinite=Field("list", "ranks with non-finite parameters"),
)  # fmt: skip
REPLICAS_SYNCHRONISED = EventType(
    "replicas.synchronised", NOTICE, "Replicas that had trained on their own were synchronised (local SGD).",
    iteration=_ITERATION, number=Field("int", "number of the synchronisation, from 1"),
    policy=Field("str", "policy of local SGD"), waited_seconds=Field("float", "time for which training waited", "s"),
    left_out=Field("dict", "replicas that were left out, as outliers or non-finite, by module"),
    rolled_back=Field("list", "modules that went back to the last synchronisation: all replicas were left out"),
    clipped=Field("dict", "factor by which the mean change was scaled down, by module"),
    iterations=Field("list", "those of each replica since the last synchronisation (a_edit)", optional=True),
    nonfinite=Field("dict", "ranks whose parameters were infinite or NaN, by module"),
)  # fmt: skip
REPLICAS_RESTARTED = EventType(
    "replicas.restarted", ALARM,
    "All replicas of local SGD start from the framework's own checkpoint, which holds one of them.",
    "If that checkpoint was saved without local SGD, nothing was lost. Otherwise training goes on, but not as it would "
    "have without the restart: only a snapshot holds every replica. Take them more often (a smaller --sync-tau, or "
    "--reft-versions every) and keep them in storage (--reft-checkpoint-dir).", once=True, iteration=_ITERATION,
    reason=_REASON,
)  # fmt: skip
LAYERS_AVERAGED = EventType(
    "layers.averaged", ROUTINE, "The layers of one iteration were averaged over the replicas (dreamddp).",
    iteration=_ITERATION, layers=Field("list", "those layers"),
    waited_seconds=Field("float", "time for which training waited", "s"),
    divergence=Field("float", "mean over replicas of the squared distance from their mean, of what this rank holds of "
                     "those layers, just before (the paper's Gamma)"),
)  # fmt: skip
LAYERS_PLANNED = EventType(
    "layers.planned", NOTICE, "From the next iteration on layers are averaged by a new schedule (dreamddp).",
    iteration=_ITERATION, period=Field("int", "iterations in which each layer is averaged at least once"),
    exposed_seconds=Field("float", "planned time of a period for which training waits for averaging", "s"),
    seconds=Field("float", "planned time of forward, backward and that, per period", "s"),
    held_bytes=Field("int", "most results that a rank of the first stage holds until an update", "bytes"),
    reason=_REASON,
)  # fmt: skip
NONFINITE_DETECTED = EventType(
    "nonfinite.detected", ALARM, "Parameters of some ranks were infinite or NaN when replicas were combined.",
    "Look at the loss; if it is always the same rank, drain its device. Under local SGD, if it "
    "repeats, the optimizer's moments there are non-finite too: go back to an earlier version.", once=True,
    iteration=_ITERATION, ranks=Field("str", "those ranks"), reason=_REASON,
)  # fmt: skip

# ---- the stream itself, and tests ----

ROUTINE_SUMMED = EventType(
    "routine.summed", NOTICE, "Stands for routine events of one name and process.",
    of=Field("str", "their name", needed=True), count=Field("int", "how many"),
    first=Field("int", "first iteration", optional=True), last=Field("int", "last iteration", optional=True),
    seconds=Field("float", "sum of their durations", "s"), bytes=_BYTES,
    longest=Field("float", "longest duration", "s"), longest_at=Field("int", "iteration of the longest", optional=True),
)  # fmt: skip
FAULT_INJECTED = EventType(
    "fault.injected", NOTICE, "A test altered numbers on purpose.", iteration=_ITERATION,
    point=Field("str", "where"), action=Field("str", "how"), item=Field("str", "tensor, if it was one coordinate"),
    index=Field("int", "that coordinate in memory order, else -1"), bit=Field("int", "its bit, else -1"),
)  # fmt: skip
SIGNAL_SENT = EventType(
    "signal.sent", NOTICE, "A test driver is about to kill a rank or a node.",
    rank=Field("int", "rank to be killed"), lost=Field("str", "node to be killed"), ranks=_RANKS,
    signal=Field("str", "name of the signal"), iteration=_ITERATION, killed_pid=Field("int", "process it is sent to"),
)  # fmt: skip

EVENTS: Mapping[str, EventType] = {each.name: each for each in list(vars().values()) if isinstance(each, EventType)}
