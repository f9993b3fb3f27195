"""Groups of parameters that a script builds differently after a restart: refused, with the name of a parameter."""

import re
from typing import Any

import pytest
import torch

from ft_plugins.adapters.parameter_groups import merged, numbered, packed, regrouped
from ft_plugins.adapters.torch.torch_loop import TorchHost
from ft_plugins.config import Config, LaunchContext
from ft_plugins.errors import FtError, ResumeError
from ft_plugins.session import attach

Node = Any  # the fixture's class lives in tests/unit/conftest.py
BEFORE = (("a.weight", "a.bias"), ("b.weight", "b.bias"))


def difference(before, now, **how):
    return regrouped(packed(numbered(before)), packed(numbered(now)), **how).partition(": ")[0]


@pytest.mark.parametrize(
    "now, words",
    [
        (BEFORE, ""),
        (BEFORE[::-1], "parameter 'b.weight' is in group 0 now, was in group 1 (3 more are in others, too)"),
        ((("a.weight",), ("a.bias", *BEFORE[1])), "parameter 'a.bias' is in group 1 now, was in group 0"),
        ((BEFORE[0], (*BEFORE[1], "c")), "parameter 'c' is in group 1 now, was in none"),
        ((BEFORE[0], ("b.bias",)), "parameter 'b.weight' is in no group now, was in group 1"),
        ((BEFORE[0], ("b.bias", "b.weight")), "parameter 'b.bias' is number 0 of group 1 now, where 'b.weight' was"),
        ((*BEFORE, ()), "there are 3 groups now (group 0, group 1, group 2), there were 2 (group 0, group 1)"),
    ],
)
def test_what_differs_is_said_of_the_first_parameter(now, words):
    assert difference(BEFORE, now) == words


def test_of_ranks_that_hold_parts_only_parameters_that_both_have_are_compared_and_no_order():
    """The distributed optimizer gives a rank other parts at another number of ranks."""
    part = (("a.bias",), ("b.bias", "b.weight"))
    assert difference(BEFORE, part, partial=True) == ""
    assert difference(BEFORE, (("b.bias",), ("b.weight",)), partial=True).startswith("parameter 'b.bias' is in group 0")
    assert merged([packed(numbered(part)), packed(numbered((("a.weight",), ())))]) == packed(
        numbered((("a.bias", "a.weight"), ("b.bias", "b.weight")))
    )


def test_what_older_versions_captured_names_no_groups():
    assert regrouped(None, packed(numbered(BEFORE))) == ""


# ---- a loop of plain torch ----

SPLITS = {
    "as before": lambda a, b, c: [[*a], [*b]],
    "swapped": lambda a, b, c: [[*b], [*a]],
    "moved": lambda a, b, c: [[a[0]], [a[1], *b]],
    "added": lambda a, b, c: [[*a], [*b, *c]],
    "wider": lambda a, b, c: [[*a], [*b]],
    "amsgrad": lambda a, b, c: [[*a], [*b]],
}
SAID = {
    "swapped": r"rank 0: parameter '1\.weight' is in group 0 now, was in group 1 \(3 more",
    "moved": r"rank 0: parameter '0\.bias' is in group 1 now, was in group 0",
    "added": r"rank 0: parameter '2\.weight' is in group 1 now, was in none",
}
OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


def _life(rank, world, run_dir, token, kind, split, iterations):
    """What the rank went on from, or how it was refused."""
    torch.manual_seed(3)
    layers = [torch.nn.Linear(3, 3) for _ in range(3)]
    if split == "wider":
        layers[1:] = [torch.nn.Linear(3, 4), torch.nn.Linear(4, 3)]
    model = torch.nn.Sequential(*layers)
    groups = SPLITS[split](*(list(layer.parameters()) for layer in layers))
    rates = [{"params": own, "lr": 0.1 / (1 + number)} for number, own in enumerate(groups)]
    optimizer = OPTIMIZERS[kind](rates, **({"amsgrad": True} if split == "amsgrad" else {}))
    context = LaunchContext(None, run_dir, token, None, 0, 0, 1, 1, 0, 0)
    done = []
    try:
        session = attach(TorchHost(model, optimizer), Config.from_json({"reft": {}, "node_name": "n"}), context)
        for step in session.iterations(9):
            if len(done) == iterations:
                break
            model(torch.ones(2, 3)).square().mean().backward()
            optimizer.step()
            model.zero_grad()
            done.append(step)
    except FtError as error:
        return type(error), str(error)
    return done, {name: one.detach().tolist() for name, one in model.named_parameters()}


@pytest.mark.parametrize("kind, splits", [("sgd", ["swapped"]), ("adamw", ["moved", "added"])])
def test_groups_that_changed_are_refused_by_name_and_the_snapshot_stays(node, ranks, kind, splits):
    """Also where the optimizer keeps no tensors, so that nothing else of the state differs; and where so much differs
    that the segment is refused."""
    node.start()
    [(done, said)] = ranks(_life, 1, node.run_dir, node.fence(), kind, "as before", 3)
    assert done == [1, 2, 3], said
    for split in splits:
        [(refusal, said)] = ranks(_life, 1, node.run_dir, node.fence(), kind, split, 3)
        assert refusal is ResumeError, (split, said)
        assert re.match(SAID[split], said), said
        assert "build the groups with the same parameters in the same order" in said and "--ftp-resume fresh" in said
    [(done, _)] = ranks(_life, 1, node.run_dir, node.fence(), kind, "as before", 3)
    assert done[0] == 4


@pytest.mark.parametrize(
    ("split", "said"),
    [
        ("wider", r"rank 0: parameter '1\.bias' had 12 bytes of float32, and has 16, shape 4 of float32 \(\d+ more"),
        ("amsgrad", r"rank 0: moment '0\.bias\S+' of shape 3 of float32 is new \(3 more tensors differ\)\. Therefore "),
    ],
)
def test_a_tensor_that_differs_is_named_where_the_fingerprint_has_only_a_digest(node, ranks, split, said):
    node.start()
    [(done, _)] = ranks(_life, 1, node.run_dir, node.fence(), "adamw", "as before", 3)
    assert done == [1, 2, 3]
    [(refusal, found)] = ranks(_life, 1, node.run_dir, node.fence(), "adamw", split, 3)
    assert refusal is ResumeError and re.match(said, found) and "architecture: " in found, found
