"""Collectives of a sync group: every member receives the same rows in rank order, of any dtype and length."""

import pytest
import torch
import torch.distributed as dist

from ft_plugins.sync.links import Links
from harness.gang import gang

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)
LENGTHS = (1, 3, 4, 0)


def values(rank, dtype, length):
    return (torch.arange(length) + 10 * rank + 1).to(dtype)


def plain(tensor):
    return str(tensor.dtype), tensor.tolist()


def _gathered(rank, world):
    ranks = tuple(range(world))
    group = dist.new_group(list(ranks))
    links = Links(rank, {ranks: group}, group, torch.device("cpu"))
    number = torch.tensor([rank + 0.5], dtype=torch.float64)
    own = [values(rank, dtype, length) for dtype in DTYPES for length in LENGTHS]
    return {
        "alone": [plain(links.all_gather(ranks, one)) for one in own],
        "shaped": plain(links.all_gather(ranks, values(rank, torch.float32, 6).view(2, 3).T)),
        "with": [tuple(map(plain, links.all_gather_with(ranks, one, number))) for one in own],
        "job": links.gather_job([rank, -1.0]).tolist(),
    }


@pytest.fixture(scope="module")
def gathered():
    return gang(_gathered, 3)


def expected():
    return [
        plain(torch.stack([values(rank, dtype, length) for rank in range(3)])) for dtype in DTYPES for length in LENGTHS
    ]


def test_members_receive_all_rows_in_rank_order(gathered):
    for one in gathered:
        assert one["alone"] == expected()
        shaped = torch.stack([values(rank, torch.float32, 6).view(2, 3).T for rank in range(3)])
        assert one["shaped"] == plain(shaped)
        assert one["job"] == [[0.0, -1.0], [1.0, -1.0], [2.0, -1.0]]


def test_a_number_travels_with_a_tensor_of_any_dtype(gathered):
    for one in gathered:
        assert [tensor for tensor, _ in one["with"]] == expected()
        assert {str(numbers) for _, numbers in one["with"]} == {"('torch.float64', [0.5, 1.5, 2.5])"}
