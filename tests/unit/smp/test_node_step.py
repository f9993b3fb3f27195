"""The node tier's state machine, without a process: one node by itself, as transcripts in `node_step.txt`."""

from dataclasses import replace

from ft_plugins.smp.tree.agreement import ExchangeDecision, ExchangeEpoch, Sealing, decide, summarize
from ft_plugins.smp.tree.node_step import (
    Announced,
    Committed,
    Declared,
    NodeState,
    Observation,
    ReportDue,
    SealChecked,
    SendReport,
    Switched,
    step,
)
from ft_plugins.snapshot.segment.slots import Mark
from tests import transcripts


class Node:
    """Events of one node, 1 of 3, and the actions that follow: a line each, and what it waits to be sealed."""

    def __init__(self):
        self.state = NodeState(ExchangeEpoch(1, None, 3, 4), 1, False)

    def restored(self, version):
        self.state = replace(self.state, epoch=ExchangeEpoch(version.lineage + 1, version, 3, 4))

    def given(self, **fields):
        self.state = replace(self.state, **fields)

    def announced(self, exchange=None, committed=None, **more):
        return self._after(Announced(ExchangeDecision(exchange, committed), **more))

    def switched(self, exchange, committed=None):
        return self._after(Switched(ExchangeDecision(exchange, committed)))

    def seal(self, how):
        return self._after(SealChecked(Sealing[how.upper()]))

    def committed(self, version):
        return self._after(Committed(version))

    def declared(self):
        return self._after(Declared())

    def reports(self, begun, mark="none", **seen):
        return self._after(ReportDue(Observation(begun, mark=Mark[mark.upper()], **seen)))

    def replaced_first(self):
        """Position 0 has forgotten everything, and hears of this node first."""
        decision = decide(self.state.epoch, ExchangeDecision(), summarize(1, self.sent))
        return self.announced(decision.exchange, decision.committed)

    def _after(self, event):
        before = self.state.awaited
        self.state, actions = step(self.state, event)
        self.sent = next((each.report for each in actions if isinstance(each, SendReport)), None)
        awaits = [f"awaits {transcripts.shown(self.state.awaited)}"] if self.state.awaited != before else []
        return "\n".join([*map(transcripts.shown, actions), *awaits])


test_node_step = transcripts.of(__file__, Node)
