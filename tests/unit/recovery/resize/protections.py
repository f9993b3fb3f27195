"""What the nodes of a previous job were protected by."""

from ft_plugins.smp.tree.protection import Protection
from ft_plugins.snapshot.segment.shape import Shape


def protection(position, losses=1):
    """Four nodes of one rank, one sharding group, RAIM5 or RAIM6."""
    return Protection(
        lineage=1, base=None, nodes=("n0", "n1", "n2", "n3"), groups=((0, 1, 2, 3),),
        shapes=(Shape(640, 64, 1, 9),) * 4, losses=losses,
        position=position, endpoints=(("127.0.0.1", 1),) * 4, interval=1, exchange_mbps=0.0, detect_seconds=5.0,
    )  # fmt: skip
