"""A small loop of plain torch, and how it is handed over without a process in between."""

import torch

from ft_plugins.adapters.torch.torch_loop import TorchHost
from ft_plugins.config import Config, LaunchContext
from ft_plugins.session import attach
from ft_plugins.snapshot.capture import codec


def session_of(host):
    """That captures nothing."""
    return attach(host, Config(), LaunchContext(None, None, 0, None, 0, 0, 1, 1, 0, 0))


def handed_over(host):
    """What a snapshot of this version point holds."""
    small = codec.decode(codec.encode(host.small_state()))
    return small, {name: tensor.clone() for name, tensor in host.tensors().items() if not tensor.is_meta}


def take_over(host, small, tensors):
    host.allocate(host.tensors().keys() - tensors)
    for name, tensor in tensors.items():
        host.tensors()[name].copy_(tensor)
    host.restore(small)
    host.restore_position(small)


def network():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))


class Small:
    """A model, its optimizer and host; every iteration has a version point."""

    def __init__(self, network=network, **given):
        self.model = network()
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.1)
        self.host = TorchHost(self.model, self.optimizer, **given)
        self.session = session_of(self.host)

    def backward(self):
        self.model(torch.ones(2, 4)).square().mean().backward()

    def run(self, body, until=6):
        self.session.iteration_end = lambda step, ends: self.host.small_state()
        for step in self.session.iterations(until):
            body(step)
