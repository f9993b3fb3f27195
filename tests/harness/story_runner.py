"""Run a failure story: start its job on emulated nodes, lose and start nodes, check every claim.

Invariant: lines run in order, and every wait is bounded. Claims are checked only against what the job wrote: events,
outcome, checkpoints, final state and losses. However a story ends, cut links are restored and silent nodes destroyed.
A job has the same meaning on each framework: sizes, sharded or replicated optimizer state, iterations, flags.

In: a `Story`, the fork server of its framework, hosts. Out: nothing, or an AssertionError that names the failed line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from ft_plugins.config import Config
from ft_plugins.events import Event, catalogue
from ft_plugins.smp.watch import liveness
from ft_plugins.snapshot.capture import manifest as captured
from ft_plugins.snapshot.checkpoint import checkpoint, persist
from ft_plugins.snapshot.checkpoint.checkpoint import Origin
from ft_plugins.snapshot.segment.slots import Mark, Version

from . import deepspeed_runs, megatron_runs
from .deepspeed_runs import DeepSpeedRun
from .emulated_nodes import EmulatedHost, destroy, freeze
from .forkserver import ForkServer, RunningJob
from .golden import assert_identical
from .job_control import wait_until
from .megatron_runs import MegatronRun
from .multinode import BOUND, ExampleRun, MultiNodeJob, Spec
from .story import (
    EVERY,
    BeingExchanged,
    CheckpointNotStored,
    CheckpointsIntact,
    CheckpointStored,
    DeclaredLost,
    IterationCaptured,
    JobEnd,
    JobEnds,
    JobShape,
    LoseNode,
    LossKind,
    MatchesGolden,
    NoFreshStart,
    ReasonContains,
    ReplicaMismatched,
    ReplicasCompared,
    RestoredCertified,
    RestoredCommitted,
    RestoredFrom,
    SentInBubbles,
    SmpStopped,
    StartNode,
    Story,
    StoryLine,
    VersionCommitted,
)

HOSTS = (11, 12, 13, 14, 15, 16, 5, 25)  # six nodes, one that sorts before them and one after


class StoryRunner:
    """Runs one story. Tracks its nodes, the silent ones and the cut links."""

    def __init__(
        self,
        server: ForkServer,
        jobs: Spec,
        story: Story,
        framework: str,
        folder: Path,
        hosts: Sequence[EmulatedHost],
        port: int,
        golden: Callable[[], ExampleRun],
    ) -> None:
        """`hosts` in the order of `HOSTS`. `golden` returns the unfailed run. `port`: of the rendezvous, a new one for
        each story, since a node that was cut off may still hold the previous one."""
        self._story = story
        self._golden = golden
        self._hosts = hosts
        self._store = folder / "checkpoints"
        flags = story.flags
        if story.store:
            flags += ("--reft-checkpoint-dir", str(self._store), "--reft-checkpoint-interval", str(story.store))
        run = FRAMEWORKS[framework](story.job, "story", folder, flags)
        endpoint = ",".join(f"{host.address}:{port}" for host in hosts)
        self._job = MultiNodeJob(server, jobs, run, story.job.ranks, story.job.nodes, endpoint)
        self._silent: dict[str, RunningJob] = {}
        self._cut: list[EmulatedHost] = []
        self._refusals: dict[str, str] = {}  # reason by node

    def run(self) -> None:
        """Run the whole story. Raises AssertionError, TimeoutError."""
        try:
            for index in range(self._story.job.nodes):
                self._start(f"n{index}", self._hosts[index])
            for line in self._story.lines:
                try:
                    self._run_line(line)
                except AssertionError as error:
                    raise AssertionError(f"{self._story.name}: {line}: {error}") from error
        finally:
            for lost in self._silent.values():
                destroy(lost)
            for host in self._cut:
                host.reconnect()

    def _start(self, name: str, host: EmulatedHost) -> None:
        self._job.start(name, host, faults=self._story.faults.get(name, ""))

    def _run_line(self, line: StoryLine) -> None:
        match line:
            case StartNode(node, first):
                self._start(node, self._hosts[-2 if first else -1])
            case LoseNode(node, kind):
                self._lose(node, kind)
            case IterationCaptured(node, iteration):
                self._job.until_captured(node, iteration)
            case VersionCommitted(iteration):
                self._job.until_committed(iteration)
            case CheckpointStored(iteration):
                wait_until(lambda: max(self._stored(), default=0) >= iteration, BOUND, self._listing)
            case SmpStopped(node):
                self._wait_until_stopped(node)
            case JobEnds(JobEnd.ENDED):
                self._job.wait()
            case JobEnds(JobEnd.REFUSED):
                self._wait_until_refused()
            case _:
                self._check(line)

    def _lose(self, node: str, kind: LossKind) -> None:
        match kind:
            case LossKind.KILL:
                self._job.destroy(node)
                return
            case LossKind.CUT:
                self._cut.append(self._hosts[int(node[1:])])
                self._cut[-1].cut()
            case LossKind.FREEZE:
                freeze(self._job.nodes[node])
        self._silent[node] = self._job.nodes.pop(node)

    def _wait_until_stopped(self, node: str) -> None:
        job = self._job.nodes[node]
        lock = job.spec.run_dir / "smp.lock"

        def stopped() -> bool:
            if any(liveness.is_stopped(*smp) for smp in liveness.holder(lock)):
                return True
            assert not job.ended, f"node {node} ended too early:\n{job.tail()}"
            return False

        wait_until(stopped, BOUND, lambda: f"no SMP of node {node} has stopped")

    def _wait_until_refused(self) -> None:
        for name, job in self._job.nodes.items():
            outcome = job.wait(BOUND)
            assert outcome["status"] == "refused", f"node {name}: {outcome}\n{job.tail()}"
            self._refusals[name] = outcome["reason"]

    # claims

    def _check(self, line: StoryLine) -> None:
        match line:
            case RestoredFrom(node, tier, iteration, exactly):
                for name in self._job.nodes if node == EVERY else [node]:
                    self._check_restore(name, tier, iteration, exactly)
            case BeingExchanged(iteration):
                started, committed = self._exchanges_before_restore()
                assert iteration in started and iteration not in committed, f"started {started}, committed {committed}"
            case RestoredCommitted(node):
                started, committed = self._exchanges_before_restore()
                fields = last_restore(self._job.nodes[node]).fields
                assert committed and max(committed) < max(started), f"started {started}, committed {committed}"
                assert fields["iteration"] == max(committed), f"committed {committed}: {fields}"
            case DeclaredLost(node):
                declared = self._events(catalogue.NODE_LOST.name)
                assert declared, "no node was declared lost"
                assert all(event.fields["lost"] == [f"node {node}"] for event in declared), declared
            case CheckpointNotStored(iteration):
                assert iteration not in self._stored(), self._listing()
            case CheckpointsIntact(iteration):
                assert max(self._stored(), default=0) >= iteration, self._listing()
                for each in checkpoint.listing(self._base):
                    if each.complete:
                        assert_whole(self._base / each.name, self._story.job.ranks)
            case ReasonContains(words):
                nodes = self._job.nodes.items()
                reasons = self._refusals or {name: last_restore(job).fields["reason"] for name, job in nodes}
                assert all(words in reason for reason in reasons.values()), reasons
            case ReplicasCompared():
                assert not self._events(catalogue.REPLICA_MISMATCHED.name)
                sent = [event.fields for event in self._events(catalogue.EXCHANGE_SENT.name)]
                slot = min(event.fields["share_bytes"] for event in self._events(catalogue.RANK_ATTACHED.name))
                # Small state, digest tables and compared digests; sending state would take several slots.
                assert sent and all(fields["compared"] and fields["bytes"] < slot / 5 for fields in sent), sent
            case ReplicaMismatched(rank, iteration):
                mismatched = {
                    (event.fields["iteration"], *event.fields["ranks"])
                    for event in self._events(catalogue.AUDIT_FAILED.name)
                }
                assert mismatched == {(iteration, rank)}, f"iterations and mismatched ranks: {sorted(mismatched)}"
            case RestoredCertified(node):
                fields = last_restore(self._job.nodes[node]).fields
                assert fields.get("mark") == Mark.CERTIFIED.word, f"node {node}: {fields}"
            case SentInBubbles():
                inside = [event.fields["in_bubbles"] for event in self._events(catalogue.VERSION_COMMITTED.name)]
                assert any(inside), f"for none of {len(inside)} committed versions"
            case NoFreshStart():
                scratch = self._events(catalogue.STATE_LOST.name)
                assert not scratch, scratch
            case MatchesGolden():
                assert_identical(self._job.run, self._golden(), self._story.job.ranks)

    def _exchanges_before_restore(self) -> tuple[list[int], list[int]]:
        """Iterations whose exchange was started, and those committed, before the first restore and in its lineage."""
        first = min(self._events(catalogue.STATE_RESTORED.name), key=lambda event: event.time, default=None)
        assert first is not None, "nothing was restored"

        def iterations(name: str) -> list[int]:
            lineage = [event for event in self._events(name) if event.fields["lineage"] == first.fields["lineage"]]
            return sorted({event.fields["iteration"] for event in lineage if event.time < first.time})

        return iterations(catalogue.EXCHANGE_STARTED.name), iterations(catalogue.VERSION_COMMITTED.name)

    def _check_restore(self, name: str, tier: str, iteration: int, exactly: bool) -> None:
        """All ranks of a node restored the same version in its last incarnation, from this tier."""
        job = self._job.nodes[name]
        last = job.events(catalogue.STATE_RESTORED.name)[-self._story.job.ranks // self._story.job.nodes :]
        fields = last_restore(job).fields
        assert len({(event.fields["tier"], event.fields["iteration"]) for event in last}) == 1, f"node {name}: {last}"
        assert fields["tier"] == tier and fields["iteration"] >= iteration, f"node {name}: {fields}"
        assert not exactly or fields["iteration"] == iteration, f"node {name}: {fields}"
        if tier == "storage":
            completed = [event.fields for event in self._events(catalogue.CHECKPOINT_COMPLETED.name)]
            iterations = [each["iteration"] for each in completed if each["lineage"] <= fields["lineage"]]
            newest = max(iterations, default=0)
            assert fields["iteration"] == newest, f"node {name}: {fields}, although checkpoint {newest} was complete"

    def _events(self, name: str) -> list[Event]:
        return [event for job in self._job.nodes.values() for event in job.events(name)]

    @property
    def _base(self) -> Path:
        (job,) = {job.spec.name for job in self._job.nodes.values()}
        return self._store / job

    def _stored(self) -> set[int]:
        return {each.version.iteration for each in checkpoint.listing(self._base) if each.complete}

    def _listing(self) -> str:
        return f"in storage: {sorted(path.name for path in self._base.glob('*'))}"


def last_restore(job: RunningJob) -> Event:
    """The last `state.restored` of a node."""
    restores = job.events(catalogue.STATE_RESTORED.name)
    assert restores, f"nothing was restored on node {job.spec.node}:\n{job.tail()}"
    return restores[-1]


def assert_whole(folder: Path, ranks: int) -> None:
    """Raises AssertionError unless the file of every rank exists and matches its digests."""
    manifest = checkpoint.read_manifest(folder)
    origin = Origin(manifest.job, manifest.world_size, manifest.fingerprint)
    assert manifest.world_size == ranks, f"{folder} is of {manifest.world_size} ranks, expected {ranks}"
    absent = checkpoint.missing(folder, origin, Version(manifest.lineage, manifest.iteration))
    assert not absent, f"{folder}: the files of ranks {absent} are missing or of another version"
    for rank in range(ranks):
        path = folder / checkpoint.data_file(rank)
        head, digests, small = persist.read_head(path, checkpoint.read_record(folder, rank))
        data = path.read_bytes()[len(head) + digests.nbytes :]
        ranges = captured.read(captured.split(small)[0]).ranges
        for number, ((offset, nbytes), digest) in enumerate(zip(ranges, digests, strict=False)):
            found = xxhash.xxh3_64_intdigest(data[offset : offset + nbytes])
            assert found == int(digest), f"{path}: bucket {number} does not match its digest"


def megatron_run(
    shape: JobShape, name: str, folder: Path, flags: Sequence[str] = (), protected: bool = True
) -> MegatronRun:
    """A run on megatron-core in bf16, with its distributed optimizer if the shape asks for it."""
    argv = ["--order", "tp-cp-ep-pp-dp", "--tp", str(shape.tp), "--pp", str(shape.pp)]
    if shape.global_batch:
        argv += ["--global-batch", str(shape.global_batch)]
    configuration = megatron_runs.MegatronConfiguration(
        bf16=True, distributed_optimizer=shape.distributed, interleaved=False
    )
    return MegatronRun(
        name, folder, configuration, protected=protected, iterations=shape.iterations,
        flags=tuple(flags), argv=tuple(argv), ranks=shape.ranks,
    )  # fmt: skip


def deepspeed_run(
    shape: JobShape, name: str, folder: Path, flags: Sequence[str] = (), protected: bool = True
) -> DeepSpeedRun:
    """A run on DeepSpeed as a PipelineModule: bf16 with ZeRO-1, or fp32 without ZeRO if state is replicated."""
    configuration = deepspeed_runs.DeepSpeedConfiguration(
        shape.ranks,
        1 if shape.distributed else 0,
        bf16=shape.distributed,
        pp=shape.pp,
        tp=shape.tp,
        batch=shape.global_batch or 0,
    )
    words = ["--reft", *flags] if protected else list(flags)
    block = Config.from_flags(words)[0].block() if words else {}
    return DeepSpeedRun(name, folder, configuration, block, iterations=shape.iterations)


FRAMEWORKS: dict[str, Callable[..., ExampleRun]] = {"megatron": megatron_run, "deepspeed": deepspeed_run}


def golden_run(server: ForkServer, framework: str, shape: JobShape, folder: Path) -> ExampleRun:
    """The unfailed, unprotected run of a job."""
    golden = FRAMEWORKS[framework](shape, "golden", folder, protected=False)
    job = server.start(golden.spec(nproc=shape.ranks))
    outcome = job.wait(BOUND)
    assert outcome["status"] == "succeeded", job.tail()
    return golden
