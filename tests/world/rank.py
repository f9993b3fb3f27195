"""The ranks of the world: a training state that is one number, captured, restored and compared after every restore.

The state after an iteration follows from the state before it, the iteration, and the incarnation that computed it. So a
version that is mixed from two incarnations, or is another iteration's, is another number, and is found.

Of the product: `agree_on_version`, `agree_on_proof`, `JobNodes`, `SlotClaims`, the segment. Of the world: the reduction
of gradients, and the collective by which ranks agree.
"""

import contextlib
from dataclasses import replace

from ft_plugins import errors
from ft_plugins.errors import FencedError, FtError, ProtocolError
from ft_plugins.recovery.nodes import JobNodes, NodeTierConfig
from ft_plugins.recovery.restore import agree_on_proof, agree_on_version
from ft_plugins.recovery.source_choice import choose_source
from ft_plugins.recovery.storage import StorageTier
from ft_plugins.snapshot.segment.claims import CaptureOwner, SlotClaims
from ft_plugins.snapshot.segment.slots import Version, choose_parity

from .hub import Signal
from .memory import check_room
from .smp import Client, Place

MASK = (1 << 61) - 1


def following(state, iteration, salt):
    """The state after an iteration."""
    return (state * 1000003 + iteration * 8191 + salt) & MASK


class Gang:
    """The ranks of one round, as they reach each other: what they gather arrives once all have called."""

    def __init__(self, world, number, size):
        self.world, self.number, self.size = world, number, size
        self.calls, self.broken = {}, ""
        self.nodes = {}  # by rank

    def gather(self, rank, at, payload, delay):
        """Every rank's payload. Raises ProtocolError if a rank is lost, and that can be seen."""
        calls, signal = self.calls.setdefault(at, ({}, Signal(self.world.hub)))
        calls[rank] = payload
        if len(calls) == self.size:
            self.world.hub.later(delay, signal.set)
        signal.wait()
        if len(calls) < self.size:
            raise ProtocolError(f"rank {rank}: {self.broken}")
        return [calls[one] for one in range(self.size)]

    def died(self, rank, process):
        """A rank's process is gone: its connections are reset, unless its machine is."""
        if process.status == 0 or not process.machine.alive:
            return
        self.broken = self.broken or f"connection closed by rank {rank}"

        def reset():
            for calls, signal in list(self.calls.values()):
                if len(calls) < self.size:
                    signal.set()

        self.world.hub.later(0.01, reset)


class Collective:
    """As `collective.Collective`."""

    def __init__(self, gang, rank, address):
        self.rank, self.world_size, self.address = rank, gang.size, address
        self._gang, self._calls = gang, 0

    def gather(self, payload):
        self._calls += 1
        if self._gang.broken:
            raise ProtocolError(f"rank {self.rank}: {self._gang.broken}")
        return self._gang.gather(self.rank, self._calls, payload, 0.001)

    def barrier(self):
        self.gather(b"")

    @contextlib.contextmanager
    def agreement(self, tolerate=None):
        error = None
        try:
            yield
        except FtError as raised:
            error = raised
        answers = self.gather(error)
        first = next((one for one in answers if one is not None), None)
        if first is not None:
            raise error if error is not None else getattr(errors, type(first).__name__)(str(first))


class Rank:
    """One rank of one incarnation."""

    def __init__(self, agent, gang, rank, token, workers):
        self.agent, self.node, self.world = agent, agent.node, agent.node.world
        self.gang, self.rank, self.token = gang, rank, token
        gang.nodes[rank] = self.node.name
        self.process = self.world.hub.process(f"rank {rank} on {self.node.name}", self.node.machine)
        self.process.at_end.append(lambda: gang.died(rank, self.process))
        self.idle = Signal(self.world.hub)
        self.idle.is_set = True
        self.failure = None
        self.process.spawn(self._main, "train")

    def _main(self):
        try:
            self._run()
        except (FtError, OSError) as error:
            self.process.error = error
            self.process.end(78 if isinstance(error, (errors.ResumeError, errors.ConfigError)) else 1)
            self.process.hub.current.sleep()

    def _run(self):
        world, hub = self.world, self.world.hub
        hub.current.sleep(world.draw(world.start_seconds))
        collective = Collective(self.gang, self.rank, self.node.address)
        collective.barrier()  # init_process_group
        names = [self.gang.nodes[one] for one in range(self.gang.size)]
        run_dir = Place(self.node.machine, f"/run/job/{self.node.name}")
        client = Client(run_dir)
        storage = world.storage
        shape = world.shape
        path = client.attach(self.rank, self.token, shape, {}, fresh=False, world_size=self.gang.size, storage=storage)
        self.segment = segment = self.node.machine.memory[str(path)]
        config = NodeTierConfig(
            world.losses, (), world.interval, 0.0, world.detect_seconds, "secret", run_dir, self.token
        )
        nodes = JobNodes(collective, names, world.groups(names), shape, (), config)
        plan = agree_on_version(segment, collective, lambda error: hub.note(str(error)), nodes)
        tier = None
        if storage is None:
            plan = choose_source(plan, "auto", 0)
        else:
            tier = StorageTier(world.disk.folder, "job", collective, self._report, names)
            plan = tier.recover(plan, "auto", 0, segment, self.token)
        plan = replace(plan, run=plan.run or plan.drawn)
        state, iteration = world.first_state, 0
        if plan.version is not None:
            iteration, state = plan.version.iteration, segment.content(plan.version)
        if any(other != state for other in collective.gather(state)):
            world.broken("mixed", f"version {plan.version} of rank {self.rank} is not that of all ranks")
        if tier is not None:
            tier.take(plan)
        refused = "" if plan.tier != "storage" else "restored from storage"
        proof = agree_on_proof(plan, segment, collective, lambda error: hub.note(str(error)), refused)
        self.proved = None if proof.start is None else plan.version
        at = iteration if proof.start is None else proof.start.iteration
        before = state if proof.start is None else segment.content(proof.start)
        collective.barrier()
        world.resumed(self.rank, plan, state, self.gang)
        client.open_lineage(self.rank, self.token, plan.lineage, plan.version, 0, plan.run)
        collective.barrier()
        nodes.protect(plan.lineage, plan.version)
        segment.header.proving = iteration if self.proved else segment.header.proving
        if plan.version is not None and not self.proved:
            self._restore_parity(plan.version)
        self._train(collective, plan, before, at)
        collective.barrier()
        client.shutdown(self.rank, self.token)
        self.process.end(0)
        hub.current.sleep()

    @property
    def last(self):
        """Its last iteration."""
        return self.world.last

    def _report(self, kind, reason):
        self.world.hub.note(f"rank {self.rank}: {kind.name}: {reason}")

    def _train(self, collective, plan, state, iteration):
        world, hub = self.world, self.world.hub
        segment, lineage, salt = self.segment, plan.lineage, self.gang.number
        owner = CaptureOwner()
        owner.check_room = lambda nbytes: check_room(nbytes, f"rank {self.rank}", segment.path)
        claims = SlotClaims(segment, owner, permitted=self._check_token)
        while iteration < self.last:
            iteration += 1
            hub.current.sleep(world.draw(world.step_seconds))
            collective.gather(None)  # the reduction
            self.idle.wait()  # the fence
            if self.failure is not None:
                raise self.failure
            if iteration == world.poison:
                raise FtError(f"rank {self.rank}: what the version leads to")
            if self.proved is not None and iteration == self.proved.iteration:
                state = following(state, iteration, world.salts[self.proved.lineage, iteration])
                if state != segment.content(self.proved):
                    world.broken("unproven", f"rank {self.rank}: {self.proved} does not follow from what was before it")
                segment.header.completed, segment.header.proving, self.idle = iteration, 0, Signal(hub)
                self.process.spawn(self._compared, "capture")
                continue
            state = following(state, iteration, salt)
            claims.make_room(Version(lineage, iteration))
            segment.header.completed = iteration
            version = Version(lineage, iteration)
            world.completed(self.rank, version, state, self.gang)
            self._check_token()
            index = claims.slot_for(version)
            if index is None:
                world.left_out(self.rank, segment, version)
            else:
                world.overwrites(self.node, self.rank, segment.slot(index))
                segment.dirty(index, version, self.token)
                self.idle = Signal(hub)
                self.process.spawn(lambda i=index, v=version, s=state: self._capture(i, v, s), "capture")
        self.idle.wait()

    def _capture(self, index, version, state):
        try:
            self.world.hub.current.sleep(self.world.draw(self.world.capture_seconds))
            self._check_token()
            self.segment.set_cursor(index, None)
            if self.segment.header.is_awaited(version):
                self._encode(version)
            self.segment.pin_awaited(index, version)
            self.segment.seal(index, version, self.token, state, None)
            self.world.sealed(self.rank, version, self.segment)
            self.node.smp.looks_soon()
        except FtError as error:
            self.failure = error
        finally:
            self.idle.set()

    def _compared(self):
        self._restore_parity(self.proved)
        self.idle.set()

    def _restore_parity(self, version):
        if not self.segment.has_parity(version):
            self._encode(version)

    def _encode(self, version):
        """As `Capture._encode`, where the rank computes parity."""
        index = choose_parity(self.segment.parity_slots(), version)
        if index is not None:
            self.segment.dirty(index, version, self.token)
            self.segment.seal(index, version, self.token, b"", None)

    def _check_token(self):
        if self.segment.header.token != self.token:
            raise FencedError(f"rank {self.rank}: token {self.token} was superseded by {self.segment.header.token}")
