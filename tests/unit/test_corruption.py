"""Numbers altered on purpose: what, where and when was asked for, the same again, and nothing else."""

import pytest
import torch

from ft_plugins.base import faults
from ft_plugins.base.corruption import Action, Corruption, Strike
from ft_plugins.errors import ConfigError

POINT = "update.gradients"


def tensors():
    return {"a": torch.ones(30, 20), "b": torch.ones(7).bfloat16(), "count": torch.ones(3, dtype=torch.int64)}


def struck(armed, rank=0, iteration=5):
    """What becomes of the same tensors."""
    faults.arm(armed, rank=rank)
    found = tensors()
    return found, Corruption(rank).strike(POINT, iteration, found)


def changed(found):
    """How many coordinates are not as they were."""
    counts = {name: int((found[name] != tensor).sum()) for name, tensor in tensors().items()}
    return {name: count for name, count in counts.items() if count}


def test_what_is_not_armed_or_does_not_apply_alters_nothing():
    for armed in ("", "update.parameters:nan", f"{POINT}@iteration=6:nan", f"{POINT}@rank=1:nan"):
        found, done = struck(armed)
        assert done is None and not changed(found)
        assert Corruption(0).armed(POINT) == (POINT in armed)


def test_noise_has_the_standard_deviation_asked_for_and_is_each_ranks_and_iterations_own():
    faults.arm(f"{POINT}:gauss=0.03~7")
    drawn = {}
    for rank, iteration in [(0, 1), (1, 1), (0, 2)]:
        gradient = {"g": torch.zeros(200_000)}
        Corruption(rank).strike(POINT, iteration, gradient)
        drawn[rank, iteration] = gradient["g"]
        assert gradient["g"].std().item() == pytest.approx(0.03, rel=0.01)  # its own error: 1 / sqrt(2 * 200000)
    assert abs(torch.corrcoef(torch.stack(list(drawn.values())))[0, 1:]).max() < 0.02
    again = {"g": torch.zeros(200_000)}
    Corruption(1).strike(POINT, 1, again)
    assert torch.equal(again["g"], drawn[1, 1]), "the same seed, rank and iteration"
    faults.arm(f"{POINT}:gauss=0.03~8")
    other = {"g": torch.zeros(200_000)}
    Corruption(1).strike(POINT, 1, other)
    assert not torch.equal(other["g"], drawn[1, 1]), "another seed"
    faults.arm("update.parameters:gauss=0.03~7")
    elsewhere = {"g": torch.zeros(200_000)}
    Corruption(1).strike("update.parameters", 1, elsewhere)
    assert torch.equal(elsewhere["g"], drawn[1, 1]), "the point makes no difference"


def test_a_burst_comes_every_so_many_iterations_in_place_of_the_usual_noise():
    faults.arm(f"{POINT}@iteration%500=0:gauss=1;{POINT}:gauss=0.01")
    deviations = {}
    for iteration in (499, 500, 501, 1000):
        gradient = {"g": torch.zeros(50_000)}
        Corruption(0).strike(POINT, iteration, gradient)
        deviations[iteration] = gradient["g"].std().item()
    expected = {499: 0.01, 500: 1.0, 501: 0.01, 1000: 1.0}
    assert deviations == pytest.approx(expected, rel=0.02)  # its own error: 1 / sqrt(2 * 50000)


def test_a_flip_is_one_bit_of_one_coordinate_and_a_second_one_undoes_it():
    seen = set()
    for seed in range(200):
        found, done = struck(f"{POINT}:flip~{seed}")
        assert done is not None and changed(found) in ({done.item: 1}, {})  # of 1.0, no bit makes another 1.0
        before, after = (each[done.item].flatten()[done.index] for each in (tensors(), found))
        kind = torch.int32 if done.item == "a" else torch.int16
        flipped = int(before.view(kind)) ^ int(after.view(kind))
        assert flipped.bit_count() == 1 or flipped < 0 and done.bit in (15, 31)
        seen.add((done.item, done.bit))
        Corruption(0).strike(POINT, 5, found)
        assert not changed(found)
    assert {item for item, _ in seen} == {"a", "b"} and len({bit for item, bit in seen if item == "a"}) == 32


@pytest.mark.parametrize("bit, value", [(31, -1.0), (0, 1.0 + 2**-23), (30, float("inf"))])
def test_a_bit_can_be_named(bit, value):
    faults.arm(f"{POINT}:flip={bit}")
    found = {"a": torch.ones(1)}
    assert Corruption(0).strike(POINT, 1, found) == Strike(POINT, f"flip={bit}", "a", 0, bit)
    assert found["a"].item() == value


def test_one_coordinate_is_no_number():
    found, done = struck(f"{POINT}:nan")
    assert done is not None and torch.isnan(found[done.item].flatten()[done.index])
    assert sum(changed(found).values()) == 1


def test_a_link_that_is_stuck_repeats_what_it_said_first():
    faults.arm("reduce.gradients@rank=1:stuck", rank=1)
    link = Corruption(1)
    said = []
    for iteration in range(1, 4):
        gradient = {"g": torch.full((3,), float(iteration))}
        link.strike("reduce.gradients", iteration, gradient)
        said.append(gradient["g"].tolist())
    assert said == [[1.0] * 3] * 3


def test_a_link_that_is_stuck_begins_with_a_tensor_when_it_first_sees_it():
    """DeepSpeed gives no gradient for a parameter that an iteration did not use."""
    faults.arm("reduce.gradients:stuck")
    link = Corruption(0)
    link.strike("reduce.gradients", 1, {"a": torch.ones(1)})
    link.strike("reduce.gradients", 2, {"a": torch.ones(1), "b": torch.ones(1)})
    third = {"a": torch.zeros(1), "b": torch.zeros(1)}
    link.strike("reduce.gradients", 3, third)
    assert third == {"a": torch.ones(1), "b": torch.ones(1)}


@pytest.mark.parametrize(
    "word", ["gaus=1", "gauss", "gauss=", "gauss=x", "flip=", "flip=a", "nan=1", "stuck~", "skip", "kill"]
)
def test_a_word_that_alters_no_numbers_is_refused_at_start(word):
    faults.arm(f"{POINT}:{word}")
    with pytest.raises(ConfigError, match=f"fault '{word}': expected gauss=SIGMA, flip, flip=BIT, nan or stuck"):
        Corruption(0)


def test_a_bit_that_is_not_there_is_refused():
    faults.arm(f"{POINT}:flip=32")
    with pytest.raises(ConfigError, match="item 'a' has 32 bits per coordinate"):
        Corruption(0).strike(POINT, 1, {"a": torch.ones(1)})


def test_words_are_read():
    assert Action.read("gauss=1e-2~3") == Action("gauss", 0.01, None, 3)
    assert Action.read("flip=30") == Action("flip", bit=30) and Action.read("flip~2") == Action("flip", seed=2)
