"""ZeRO's flat partitions as ranges of parameters: every element once, padding never, at any number of ranks."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_plugins.adapters.deepspeed.state import _of_flat


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    paddings=st.lists(st.integers(0, 5), min_size=6, max_size=6),
    ranks=st.integers(1, 7),
)
def test_the_fragments_of_all_ranks_make_up_every_parameter(
    sizes: list[int], paddings: list[int], ranks: int
) -> None:
    parameters, offsets, at = [], [], 0
    for index, (size, padding) in enumerate(zip(sizes, paddings, strict=False)):
        parameters.append(torch.nn.Parameter(torch.arange(size, dtype=torch.float32) + 100 * (index + 1)))
        offsets.append(at)
        at += size + padding
    whole = torch.zeros(-(-at // ranks) * ranks)
    for parameter, offset in zip(parameters, offsets, strict=True):
        whole[offset : offset + parameter.numel()] = parameter.detach()
    found: dict[int, list[tuple[int, int, int]]] = {}
    for rank, flat in enumerate(whole.chunk(ranks)):
        for one in _of_flat(parameters, offsets, flat, rank):
            index = next(i for i, parameter in enumerate(parameters) if parameter is one.parameter)
            assert torch.equal(one.of(flat), one.parameter.detach()[one.start : one.stop])
            assert one.piece is not None
            found.setdefault(index, []).append(one.piece)
    for index, size in enumerate(sizes):
        pieces = sorted(found[index])
        assert pieces[0][0] == 0 and pieces[-1][1] == size and all(piece[2] == size for piece in pieces)
        assert all(left[1] == right[0] for left, right in zip(pieces, pieces[1:], strict=False))
