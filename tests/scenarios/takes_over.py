"""One rank of an example under local SGD that writes all its state at an iteration and ends, or continues from it.

    <deepspeed | megatron> [--give-at K --give FOLDER] [--take FOLDER --replica-ranks OLD NEW --replicas M]
    <flags of the example>

A reference for a resize: nothing of ft_plugins stores, moves or merges the state. A rank of replica i takes the state
of the ranks of replica i modulo M: that of the rank at its own place, or, if the size of a replica differs, the pieces
of all of its ranks. The statistics of the penalty are dropped if the number of replicas is another one.
"""

import argparse
import importlib
import sys
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from ft_plugins.session import Session
from ft_plugins.snapshot.capture import codec

EXAMPLES = Path(__file__).resolve().parents[2] / "launch" / "examples"
CARRIED = "ft_plugins.local_sgd"


def main(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("framework", choices=["deepspeed", "megatron"])
    parser.add_argument("--give-at", type=int)
    parser.add_argument("--give", type=Path)
    parser.add_argument("--take", type=Path)
    parser.add_argument("--replica-ranks", type=int, nargs=2)
    parser.add_argument("--replicas", type=int)
    own, words = parser.parse_known_args(argv)
    if own.give:
        give(own)
    if own.take:
        take(own)
    sys.path.insert(0, str(EXAMPLES))
    with suppress(Given):
        importlib.import_module(f"{own.framework}_gpt").main(words)


class Given(BaseException):
    """The state is written on all ranks. Raised through the example to its entry: a rank that ended its process here
    would close connections that others still read from, and its agent would wait for its return."""


def give(own):
    version_point = Session._version_point

    def giving(session, step, last):
        version_point(session, step, last)
        if step == own.give_at:
            host = session._carrying
            pieces = {item.name: item.piece for item in host.inventory().items}
            tensors = {name: host.tensors()[name].detach().clone() for name in pieces}
            own.give.mkdir(exist_ok=True)
            torch.save((step, tensors, pieces, codec.encode(host.small_state())), own.give / f"{dist.get_rank()}.pt")
            dist.barrier()
            raise Given

    Session._version_point = giving


def take(own):
    def taking(session, loaded):
        host, (before, now) = session._carrying, own.replica_ranks
        replica, place = divmod(dist.get_rank(), now)
        first = replica % own.replicas * before
        ranks = [first + place] if before == now else range(first, first + before)
        given = [torch.load(own.take / f"{rank}.pt", weights_only=False) for rank in ranks]
        with torch.no_grad():
            for item in host.inventory().items:
                parts = [
                    (tensors[item.name], pieces[item.name]) for _, tensors, pieces, _ in given if item.name in tensors
                ]
                host.tensors()[item.name].copy_(taken(item, parts))
        smalls = [codec.decode(small) for *_, small in given]
        small = dict(smalls[0])
        if isinstance(small.get("scalars"), dict):  # Megatron's, by parameter
            small["scalars"] = {name: value for one in smalls for name, value in one["scalars"].items()}
        same = own.replicas == dist.get_world_size() // now
        statistics = {name: value for one in smalls for name, value in one[CARRIED]["statistics"].items()}
        small[CARRIED] = {**small[CARRIED], "statistics": statistics if same else {}}
        host.restore(small)
        session._pending = small
        return int(given[0][0])

    Session._restore = taking


def taken(item, parts):
    """The tensor of an item, from one that is equal or from the pieces of a whole."""
    same = [tensor for tensor, piece in parts if piece == item.piece]
    if same:
        return same[0]
    start, stop, total = item.piece
    whole = torch.empty(total, dtype=parts[0][0].dtype)
    for tensor, piece in parts:
        whole[piece[0] : piece[1]] = tensor.reshape(-1)
    return whole[start:stop].view(item.shape)
