"""What a look at the leader of many nodes costs. What it decides: `rounds.txt`, and `tests/world`."""

from types import SimpleNamespace

from ft_plugins.launcher.rounds.node_messages import Leader
from ft_plugins.launcher.rounds.node_service import NodeIdentity, NodeService
from ft_plugins.launcher.rounds.rounds import Rules
from ft_plugins.transport import frame_codec
from harness.operations import instructions

SILENCE = 10.0


class Lead:
    """A service that leads `count` nodes, in made-up time."""

    def __init__(self, count, monkeypatch):
        self.count = count
        self.now = 1000.0
        self.clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr("ft_plugins.launcher.rounds.node_service.time", self.clock)
        self.service = NodeService(NodeIdentity("job", "n0", "t0", "h:1"), Rules(count, count, wait=1e6), SILENCE)
        leader = Leader("n0", "t0", "h:1", 1)
        assert self.service.answer({"do": "elect", "lead": vars(leader)})["granted"]
        assert self.service.take_lead(leader, None)

    def apply(self, number):
        application = {"node": f"n{number}", "token": f"t{number}", "endpoint": "h:1", "workers": 8}
        return self.service.answer({"do": "apply", "token": f"t{number}", "application": application}, number + 1)

    def look(self, number, known=0, **fields):
        look = {"do": "look", "token": f"t{number}", "round": known, **fields}
        return self.service.answer_or_hold(look, number + 1)

    def tick(self):
        self.now += 0.1
        self.service.tick()

    def run_one_round(self):
        for number in range(self.count):
            self.apply(number)
        self.tick()
        self.service.answer({"do": "serve", "token": "t0", "store": "h:1"})
        for number in range(self.count):
            self.look(number)
        self.tick()
        for number in range(self.count):
            self.look(number, known=1)

    def lose_one(self):
        """The last node is lost; the others wait for a substitute."""
        self.service.gone(self.count)
        for number in range(self.count - 1):
            self.apply(number)
        for _ in range(3):
            self.tick()
            for number in range(self.count - 1):
                self.look(number, known=1)


def costs(lead):
    """Instructions for each thing that a lead does all the time; and bytes of a reply."""
    view = lead.look(3, known=1)
    assert view is not None and view["phase"] == "open" and view["waiting"] == lead.count - 1
    changes = view["changes"]
    found = {"look": instructions(lambda: lead.look(5, known=1)), "bytes": len(frame_codec.pack(view))}
    found["look held"] = instructions(lambda: lead.look(6, known=1, wait=2.0, seen=changes))
    found["nothing released"] = instructions(lead.service.released)
    found["step"] = instructions(lead.tick)
    lead.now += 3.0
    found["one released"] = instructions(lead.service.released)
    found["leading"] = instructions(lambda: lead.service.leading)
    found["meet"] = instructions(lambda: lead.service.answer({"do": "meet", "lead": None}))
    found["apply"] = instructions(lambda: lead.apply(7))
    found["look after it"] = instructions(lambda: lead.look(8, known=1))
    found["gone"] = instructions(lambda: lead.service.gone(10))
    return found


def test_what_a_lead_does_while_nodes_wait_costs_the_same_for_few_and_for_many(monkeypatch):
    few, many = (Lead(count, monkeypatch) for count in (16, 1024))
    found = []
    for lead in (few, many):
        monkeypatch.setattr("ft_plugins.launcher.rounds.node_service.time", lead.clock)
        lead.run_one_round()
        assert (view := lead.look(1, known=1)) is not None and view["begun"], view
        lead.lose_one()
        found.append(costs(lead))
    for name, few_nodes in found[0].items():
        more = 40 if name == "bytes" else 400  # of instructions, a look at each of the others takes ten times that
        assert found[1][name] <= few_nodes + more, f"{name}: {found[1][name]} for 1024 nodes, {few_nodes} for 16"


def test_a_node_receives_the_roster_once_and_only_what_changed(monkeypatch):
    lead = Lead(1024, monkeypatch)
    lead.run_one_round()
    view = lead.look(1, known=1, roster=True)
    assert view is not None and view.get("roster") is None
    first = lead.service.answer({"do": "look", "token": "t1", "round": 0, "roster": True})["roster"]
    assert len(first["nodes"]) == 512 and first["pages"] == 2
    lead.lose_one()
    lead.apply(2000)
    lead.tick()
    lead.service.answer({"do": "serve", "token": "t0", "store": "h:1"})
    for number in (*range(1023), 2000):
        lead.look(number, known=1)
    lead.tick()
    change = lead.service.answer({"do": "look", "token": "t1", "round": 1, "roster": True, "base": first["digest"]})
    assert [node for _, node, _ in change["roster"]["nodes"]] == ["n2000"]
    assert lead.apply(3000)["roster"]["pages"] == 2, "a new node receives all"
