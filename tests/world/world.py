"""One job in the world, drawn from a seed: its nodes, its faults, and what must hold whatever happens.

In: a seed, or a `Scenario`. Out: `Outcome`: what was violated, with a transcript.
"""

from dataclasses import dataclass, field

from ft_plugins.redundancy.grouping import redundancy_groups
from ft_plugins.snapshot.capture.retention import Storage
from ft_plugins.snapshot.segment.shape import Shape
from ft_plugins.snapshot.segment.slots import FIRST, SLOTS, Pin, SlotState

from .disk import Disk, incomplete
from .hub import Hub
from .launcher import Agent
from .network import Machine, Network
from .rank import Gang
from .scenario import EVENTS, Scenario


class Node:
    """One node, as long as its machine has not been replaced."""

    def __init__(self, world, number, name):
        self.world, self.number, self.name = world, number, name
        self.machine = Machine(name)
        self.machine.node, self.machine.short = self, False
        self.address = world.address(name)
        self.smp = self.agent = None
        self.away_until = 0.0  # it may be taken for lost
        self.ended = False

    def start(self):
        self.agent = Agent(self)


@dataclass
class Outcome:
    """What came of a scenario. `violations`: (time, name, words); `ended`: how each ft-run ended."""

    scenario: Scenario
    violations: list = field(default_factory=list)
    ended: dict = field(default_factory=dict)
    seconds: float = 0.0
    steps: int = 0
    notes: list = field(default_factory=list)


class World:
    """The job of a scenario."""

    start_seconds = (0.2, 0.6)
    wait = 3.0

    def __init__(self, scenario):
        self.scenario = scenario
        self.hub = hub = Hub(scenario.seed)
        hub.world, hub.preempted = self, scenario.preempted
        self.begin = hub.now
        self.network = Network(hub)
        self.nodes, self.per_node, self.losses = scenario.nodes, scenario.per_node, scenario.losses
        self.size, self.interval, self.last = self.nodes * self.per_node, scenario.interval, scenario.iterations
        pinned = 2 + bool(scenario.stored)
        self.shape = Shape(64, 64, 1, 7, scenario.free + pinned, 32 * scenario.parity, free=scenario.free, first=FIRST)
        self.detect_seconds, self.silence = scenario.detect, max(1.0, scenario.detect)
        self.step_seconds, self.capture_seconds = scenario.step, scenario.capture
        self.first_state = 12345
        self.disk = Disk() if scenario.stored else None
        self.storage = Storage(str(self.disk.folder), scenario.stored, 1, 2, self.size) if scenario.stored else None
        self.stored = None  # the newest complete checkpoint
        self.names = {}  # by address
        self.all = [Node(self, at, f"n{at}") for at in range(self.nodes)]
        self.all += [Node(self, self.nodes + at, f"s{at}") for at in range(scenario.spares)]
        self.by_name = {node.name: node for node in self.all}
        self.endpoints = [node.name for node in self.all[:3]]
        self.outcome = Outcome(scenario)
        self.gangs, self.places, self.lineages, self.truth, self.done_by = {}, {}, {}, {}, {}
        self.salts = {}  # of what was completed, by version
        self.sealed_by, self.sealed_all, self.committed = {}, None, None
        self.survivable, self.finished = True, False
        self.newest_gang = None
        self.members = {}
        self.restores, self.resumed_at, self.committed_at = {}, 0.0, (0.0, 0)
        self.highest, self.counts, self.waiting_faults = 0, {}, []

    # ---- run ----

    def run(self):
        """Everything, to the end."""
        hub = self.hub
        for node in self.all:
            hub.later(hub.random.uniform(0, 0.5), node.start)
        self.waiting_faults = list(self.scenario.faults)
        self.happened("iteration", 0)
        longest = sum(fault.delay + fault.seconds for fault in self.scenario.faults)
        bound = longest + 60 * (1 + len(self.scenario.faults)) + self.scenario.iterations * self.step_seconds[1] * 4
        try:
            over = hub.run(self.begin + bound, self._is_over)
            if not over:
                self.broken("liveness", f"not over after {bound:.0f} s")
        finally:
            outcome = self.outcome
            for when, task, error in hub.errors:
                outcome.violations.append((when - self.begin, "error", f"{task.process.name}, {task.name}: {error!r}"))
            outcome.seconds, outcome.steps = hub.now - self.begin, hub.steps
            folder = str(self.disk.folder) if self.disk is not None else "/"
            outcome.notes = [(when - self.begin, text.replace(folder, "/")) for when, text in hub.notes]
            self.tracebacks = [error for _, _, error in hub.errors]
            hub.close()
            if self.disk is not None:
                self.disk.close()
        return outcome

    def _is_over(self):
        if not self.finished or self.outcome.violations:
            return bool(self.outcome.violations or self.hub.errors)
        self._check_files()
        ends = set(self.outcome.ended.values()) - {"spare"}
        if "succeeded" not in ends and not self._excused():
            self.broken("ended without a cause", "; ".join(sorted(ends)))
        return True

    def _excused(self):
        """Whether more was lost than the redundancy makes up for."""
        if self.poison and self.poison <= self.highest + 1:
            return True
        if self.flipped or self.struck > 2 and any("stuck" in end for end in self.outcome.ended.values()):
            return True
        last = list(self.gangs.values())[-1]
        if self.committed is None:
            return self.lost_any or self.sealed_all is not None and not self.sealed_all[1] <= self._machines(last)
        return len(self.committed[1] - self._machines(last)) > self.losses

    # ---- faults ----

    def strike(self, fault):
        if self.finished:
            return
        hub = self.hub
        node = self.all[fault.nodes[0] % len(self.all)]
        other = self.all[fault.nodes[1] % len(self.all)]
        hub.note(f"FAULT {fault.kind} {node.name} {other.name} {fault.seconds}")
        self.struck += 1
        self.quiet_since = max(self.quiet_since, hub.now + fault.seconds)
        agent = node.agent
        late = fault.kind in ("stop smp", "full disk") and fault.seconds > self.wait
        if late or fault.kind in ("cut", "cut one way", "slow", "kill ft-run", "stop ft-run"):
            for one in (node, other) if fault.kind == "slow" else (node,):
                one.away_until = max(one.away_until, hub.now + fault.seconds)
        if fault.kind in ("kill rank", "stop rank"):
            ranks = [rank.process for rank in agent.ranks if rank.process.alive] if agent else []
            if ranks:
                chosen = hub.random.choice(ranks)
                self.kill(chosen.pid) if fault.kind == "kill rank" else self._stop(chosen, fault.seconds)
        elif fault.kind in ("kill smp", "stop smp") and node.smp and node.smp.process.alive:
            process = node.smp.process
            self.kill(process.pid) if fault.kind == "kill smp" else self._stop(process, fault.seconds)
        elif fault.kind in ("lose node", "restart node"):
            self.lose(node)
            hub.later(max(fault.seconds, 0.5), lambda: self.replace(node, fault.kind == "restart node"))
        elif fault.kind == "stop ft-run" and agent and agent.process.alive:
            self._stop(agent.process, fault.seconds)
        elif fault.kind == "kill ft-run" and agent and agent.process.alive:
            for rank in agent.ranks:
                self.kill(rank.process.pid)
            agent.ended = True
            self.kill(agent.process.pid)
            again = max(fault.seconds, 0.5)
            hub.later(again, lambda: node.machine.alive and not node.agent.process.alive and node.start())
        elif fault.kind in ("cut", "cut one way"):
            names = [one.name for one in self.all if one is not node]
            self.network.cut |= {(node.name, name) for name in names}
            if fault.kind == "cut":
                self.network.cut |= {(name, node.name) for name in names}
            hub.later(fault.seconds, self.network.heal)
        elif fault.kind == "slow":
            self.network.slow |= {(node.name, other.name): 0.5, (other.name, node.name): 0.5}
            hub.later(fault.seconds, self.network.heal)
        elif fault.kind in ("full disk", "slow storage", "full storage", "short memory"):
            name = fault.kind.split()[0]
            places = dict.fromkeys(("full disk", "short memory"), [node.machine])
            places["slow storage"] = [node.machine, other.machine]
            for what in places.get(fault.kind, [self.disk] * (self.disk is not None)):
                setattr(what, name, True)
                hub.later(fault.seconds, lambda what=what: setattr(what, name, False))
        elif fault.kind == "lose all":
            self.forget()
            for one in list(self.all):
                self.lose(one)
                hub.later(max(fault.seconds, 0.5) + hub.random.random(), lambda one=one: self.replace(one, True))
        elif fault.kind == "flip":
            self._flip(node)
        elif fault.kind == "lie":
            node.machine.lies = True
            hub.later(min(fault.seconds, 0.5), lambda: setattr(node.machine, "lies", False))
        elif fault.kind == "poison":
            self.poison = self.highest + 2

    def _stop(self, process, seconds):
        process.stop()
        self.hub.later(seconds, process.resume)

    def _flip(self, node):
        for _, segment in sorted(node.machine.memory.items()):
            words = segment._slots[self.hub.random.randrange(len(segment._slots))]
            words.flipped = True
            self.flipped = True
            return

    flipped, poison, quiet_since = False, 0, 0.0

    def happened(self, what, number=None):
        """Something has: faults that wait for it strike."""
        if number is None:
            number = self.counts[what] = self.counts.get(what, 0) + 1
        for fault in [one for one in self.waiting_faults if one.after[0] == what and one.after[1] <= number]:
            self.waiting_faults.remove(fault)
            self.hub.later(fault.delay, lambda fault=fault: self.strike(fault))

    def kill(self, pid):
        process = self.hub.processes.get(pid)
        if process is not None:
            process.end(-9)

    def lose(self, node):
        """Its machine is gone, with all that it held."""
        machine = node.machine
        machine.alive, self.lost_any = False, True
        for process in [one for one in self.hub.processes.values() if one.machine is machine]:
            process.end(-9)
        if not any(one.machine.alive for one in self.all):
            self.forget()

    def forget(self):
        """All memory is gone: what comes is another job, unless storage has something of this one."""
        self.epoch += 1
        self.sealed_all = self.committed = None
        if not self.stored:
            self.lineages, self.truth, self.done_by, self.sealed_by, self.restored = {}, {}, {}, {}, None

    def replace(self, node, same):
        """Another machine in its place, of the same name or of a new one."""
        if self.finished or self.all[node.number] is not node:
            return
        same = same or not any(self.by_name[one].machine.alive for one in self.endpoints)  # else no node finds the job
        name = node.name if same else f"r{len(self.by_name)}"
        fresh = Node(self, node.number, name)
        self.all[node.number] = self.by_name[name] = fresh
        fresh.start()

    def figures(self):
        """Nodes, iterations, faults, rounds, seconds, steps."""
        outcome = self.outcome
        return self.nodes, self.highest, self.struck, len(self.gangs), outcome.seconds, outcome.steps

    # ---- what the parts ask ----

    def machine_at(self, host):
        return self.by_name[self.names.get(host, host)].machine

    def address(self, name):
        """That of a node of this name: of all machines that ever have it."""
        found = next((one for one, of in self.names.items() if of == name), f"10.0.0.{len(self.names) + 1}")
        self.names[found] = name
        return found

    def draw(self, span):
        return self.hub.random.uniform(*span)

    def groups(self, names):
        groups = tuple(tuple(range(local, self.size, self.per_node)) for local in range(self.per_node))
        return redundancy_groups(names, groups, 8, self.losses, ())

    def gang(self, number, size):
        found = self.gangs.get((self.epoch, number))
        if found is None:
            found = self.gangs[self.epoch, number] = Gang(self, len(self.gangs) + 1, size)
        return found

    # ---- what must hold ----

    def broken(self, name, words):
        self.hub.note(f"VIOLATED {name}: {words}")
        self.outcome.violations.append((self.hub.now - self.begin, name, words))

    def event(self, node, name, fields):
        said = " ".join(f"{key}={value}" for key, value in fields.items() if key != "about")
        self.hub.note(f"{node}: {name} {said}")
        if name == "checkpoint.completed":
            self._check_files()
            self.stored = max(self.stored or (0, 0), (fields["lineage"], fields["iteration"]))
        if name in EVENTS:
            self.happened(name)
        if name == "version.committed":
            version = (fields["lineage"], fields["iteration"])
            if version not in self.truth:
                self.broken("committed what no rank completed", f"{version} on {node}")
            sealed = sorted(self.sealed_by.get(version, ()))
            if version != self.restored and len(sealed) < self.size:
                self.broken("committed what was not sealed", f"{version} on {node}: ranks {sealed}")
            if self.committed is None or version > self.committed[0]:
                self.committed = version, self._machines(self.newest_gang)
                self.committed_at = self.hub.now, version[1]

    @staticmethod
    def _pair(version):
        return (version.lineage, version.iteration)

    def _machines(self, gang):
        return {self.by_name[name].machine for name in gang.nodes.values()}

    def _require_all(self, number):
        """A round has begun on all of its nodes: those of the one before that live and were only slow have a place."""
        before, now = self.members.get((self.epoch, number - 1), {}), self.members[self.epoch, number]
        for name, node in sorted(before.items()) if len(now) == self.nodes else ():
            if name in now:
                continue
            lives = node.machine.alive and node.agent.process.alive and node.agent.failures < 2  # else it is left out
            away = max([node.away_until, *(one.away_until for one in now.values() if one.agent.leads)])
            if lives and self.hub.now > away + 2 * self.silence:
                self.broken("displaced", f"{name} had a place in round {number - 1} and has none in {number}")

    def begun(self, node, number, rank):
        """A node takes part in a round."""
        places = self.places.setdefault((self.epoch, number), {})
        if rank in places and places[rank] != node.name:
            self.broken("two nodes of one rank", f"round {number}: {places[rank]} and {node.name} are rank {rank}")
        places[rank] = node.name
        before = self.places.get((self.epoch, number - 1), {})
        was = next((at for at, name in before.items() if name == node.name), None)
        if was is not None and was != rank:
            self.broken("a survivor lost its place", f"{node.name}: rank {was} in {number - 1}, {rank} in {number}")
        self.hub.note(f"{node.name}: round {number}, rank {rank}")
        self.members.setdefault((self.epoch, number), {})[node.name] = node
        self._require_all(number)
        self.happened("round")

    def resumed(self, rank, plan, state, gang):
        """A rank has restored by `plan`, before anything becomes void."""
        number = gang.number
        if self.lineages.setdefault(plan.lineage, number) != number:
            self.broken("a lineage twice", f"{plan.lineage} in rounds {self.lineages[plan.lineage]} and {number}")
        version = None if plan.version is None else self._pair(plan.version)
        self.run_identity = plan.run if version is None else self.run_identity
        if plan.run != self.run_identity:
            self.broken("another job's", f"rank {rank} restored {version} of run {plan.run}, not {self.run_identity}")
        if version is not None and self.truth.get(version) != state:
            self.broken("torn", f"rank {rank} restored {version} with {state}, which was {self.truth.get(version)}")
        self.happened("resumed")
        if rank:
            return
        self.hub.note(f"round {number}: {plan.table()}")
        sealed = self.sealed_all if self.shape.free >= SLOTS else None  # with fewer, only what nodes protect stays
        for what, known, most in (("sealed", sealed, 0), ("committed", self.committed, self.losses)):
            if known is not None and not self.flipped and (version is None or version < known[0]):
                lost = known[1] - {self.by_name[name].machine for name in gang.nodes.values()}
                if len(lost) <= most:
                    self.broken("lost", f"{version} was restored, and all ranks had {what} {known[0]}")
        if self.stored and not self.flipped and (version is None or version < self.stored):
            self.broken("lost", f"{version} was restored, and the checkpoint of {self.stored} was complete")
        if version is not None:
            self.truth.setdefault(version, state)
        if self.committed is not None and (version is None or version < self.committed[0]):
            self.committed = None  # lost, with more than parity makes up for
        self.restored = version
        self.sealed_all = None if version is None else (version, self._machines(gang))
        self.resumed_at, self.committed_at = self.hub.now, (self.hub.now, version[1] if version else 0)
        restores = self.restores[version] = self.restores.get(version, 0) + 1
        if restores > 4 + self.struck:
            self.broken("restored again and again", f"{version}, {restores} times")

    restored, run_identity, struck, lost_any, epoch = None, "", 0, False, 0

    def completed(self, rank, version, state, gang):
        key = self._pair(version)
        if self.truth.setdefault(key, state) != state:
            self.broken("split", f"rank {rank} completed {key} with {state}, others with {self.truth[key]}")
        done = self.done_by.setdefault(key, set())
        self.salts[key] = gang.number
        if rank in done:
            self.broken("a version twice", f"rank {rank} completed {key} again")
        done.add(rank)
        if version.iteration > self.highest:
            self.highest = version.iteration
            self.happened("iteration", version.iteration)
        self._check_protected(version.iteration)
        if self.newest_gang is not None and gang.number < self.newest_gang.number:
            self.broken("two rounds at once", f"rank {rank}: {key} of gang {gang.number} in {self.newest_gang.number}")
        self.newest_gang = gang

    def overwrites(self, node, rank, slot):
        """A capture begins in that slot."""
        committed, segment = node.smp.committed, node.smp.segment(rank)
        slots = segment.slots()
        pinned = [one for one in slots if one.pins & Pin.NODE and one.state is SlotState.CLEAN]
        if committed is not None and slot.version == committed and all(one.version <= committed for one in pinned):
            self.broken("dropped", f"{node.name} overwrites {committed}, which is committed there")
        held = [one for one in segment.words if one.state is SlotState.CLEAN]
        newer = [one for one in held if committed is not None and one.version >= committed]
        if any(one.version == committed for one in newer) and not any(one.stored_pins & Pin.NODE for one in newer):
            self.broken("not pinned", f"{node.name}, rank {rank}: {committed}, which is committed there")
        others = [self._pair(one.version) for one in held if one.version != slot.version]
        if self.committed is not None and all(version < self.committed[0] for version in others):
            self.broken("not whole", f"{node.name}, rank {rank}: nothing as new as {self.committed[0]}, but {others}")

    def left_out(self, rank, segment, version):
        """A version is not captured, for lack of a slot."""
        if self.shape.free >= SLOTS and not segment.header.short:
            self.broken("left out", f"rank {rank}: {version}, where there are slots enough: {segment.slots()}")

    def stores(self, node, version, kept):
        """A parity store begins to take `version`; it has `kept`, complete."""
        committed = self.by_name[node].smp.committed
        if committed is not None and committed.lineage == version.lineage and all(one < committed for one in kept):
            self.broken("not whole", f"{node}: it stores {version}, and has {kept}; {committed} is committed")

    def _check_protected(self, iteration):
        """Commits go on, or begin again soon after a fault."""
        when, at = self.committed_at
        late = 0.7 + self.detect_seconds + 10 * self.interval * self.step_seconds[1]
        if self.hub.now - max(when, self.quiet_since, self.resumed_at) > late and iteration > at + 12 * self.interval:
            self.broken("unprotected", f"iteration {iteration}; {at} was committed {self.hub.now - when:.2f} s ago")

    def sealed(self, rank, version, segment):
        key = self._pair(version)
        sealed = self.sealed_by.setdefault(key, {})
        sealed[rank] = segment
        if len(sealed) == self.size and all(
            one.path.machine.alive and one.linked and not one.header.short for one in sealed.values()
        ):
            self.sealed_all = key, {one.path.machine for one in sealed.values()}

    def _check_files(self):
        if self.disk is not None and (found := incomplete(self.disk.folder / "job", self.size)):
            self.broken("a checkpoint complete without its files", f"{found}")

    def over(self, node, result):
        """An ft-run ends."""
        self.outcome.ended[node.name] = result
        self.hub.note(f"{node.name}: ft-run ends: {result}")
        if result == "succeeded":
            if self.newest() < self.last:
                self.broken("ended early", f"{node.name} at {self.newest()} of {self.last}")
            self.hub.later(5.0, self._finish)
        elif result != "spare":
            self.hub.later(10.0, self._finish)

    def newest(self):
        return max((key[1] for key, ranks in self.done_by.items() if len(ranks) == self.size), default=0)

    def _finish(self):
        self.finished = True
