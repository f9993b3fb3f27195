"""In which order the SMPs are asked to protect the job."""

from types import SimpleNamespace
from typing import cast

from ft_plugins.recovery.nodes import JobNodes, NodeTierConfig
from ft_plugins.smp.serve.client import Client
from ft_plugins.smp.tree.protection import Protection
from ft_plugins.snapshot.segment.shape import Shape


class Smp:
    def __init__(self, name, asked):
        self.name = name
        self.asked = asked

    def claim(self, rank, token, protection):
        self.asked.append(("claim", self.name))

    def protect(self, rank, token, protection):
        self.asked.append(("protect", self.name))
        return {"bytes": 5, "resident_bytes": 5, "links": []}


def test_memory_is_claimed_on_all_nodes_before_any_of_them_begins_to_watch(monkeypatch):
    """A substitute claims gigabytes, and the others would miss it meanwhile."""
    asked = []
    smps = [Smp("n0", asked), Smp("n1", asked)]

    def ask(self, request):
        return [request(cast(Client, smp)) for smp in smps]

    monkeypatch.setattr(JobNodes, "ask", ask)
    monkeypatch.setattr(JobNodes, "facts", lambda self: [])
    nodes = JobNodes.__new__(JobNodes)
    shapes = (Shape(4096, 64, 1, 7, 3),) * 2
    endpoints = (("127.0.0.1", 1), ("127.0.0.1", 2))
    nodes._protection = Protection(0, None, ("n0", "n1"), ((0, 1),), shapes, 1, 0, endpoints, 1, 0.0, 1.0)
    nodes._collective, nodes._config = SimpleNamespace(rank=0), cast(NodeTierConfig, SimpleNamespace(token=1))
    nodes._names = ("n0", "n1")
    nodes.exchange, nodes.digest = nodes._protection.plan(), nodes._protection.digest
    assert nodes.protect(1, None) == [("n0", 5), ("n1", 5)]
    assert asked == [("claim", "n0"), ("claim", "n1"), ("protect", "n0"), ("protect", "n1")]
