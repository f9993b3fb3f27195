"""ZeRO's flat partitions as ranges of parameters: every element once, padding never, at any number of ranks.

And what scales the loss: it goes on as it would have.
"""

from importlib import import_module
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("deepspeed")

from deepspeed.runtime.fp16 import loss_scaler  # noqa: E402
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer  # noqa: E402
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler  # noqa: E402

from ft_plugins.adapters.deepspeed import state  # noqa: E402
from ft_plugins.adapters.deepspeed.state import _of_flat  # noqa: E402
from ft_plugins.adapters.planned_state import items_of  # noqa: E402
from ft_plugins.errors import ResumeError  # noqa: E402
from ft_plugins.snapshot.capture import codec  # noqa: E402


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    paddings=st.lists(st.integers(0, 5), min_size=6, max_size=6),
    ranks=st.integers(1, 7),
)
def test_the_fragments_of_all_ranks_make_up_every_parameter(sizes, paddings, ranks):
    parameters, offsets, at = [], [], 0
    for index, (size, padding) in enumerate(zip(sizes, paddings, strict=False)):
        parameters.append(torch.nn.Parameter(torch.arange(size, dtype=torch.float32) + 100 * (index + 1)))
        offsets.append(at)
        at += size + padding
    whole = torch.zeros(-(-at // ranks) * ranks)
    for parameter, offset in zip(parameters, offsets, strict=True):
        whole[offset : offset + parameter.numel()] = parameter.detach()
    found = {}
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


# ---- what DeepSpeed's own optimizers keep ----


def without_kernel(monkeypatch, name):
    """DeepSpeed's optimizer of that name, whose compiled part does nothing."""
    module = import_module(OWN[name])
    builders = [each for each in vars(module) if each.endswith("Builder")]
    for each in builders:
        monkeypatch.setattr(module, each, lambda: SimpleNamespace(load=MagicMock))
    found = getattr(module, name)
    return found


OWN = {
    "FusedAdam": "deepspeed.ops.adam.fused_adam",
    "FusedLamb": "deepspeed.ops.lamb.fused_lamb",
    "FusedLion": "deepspeed.ops.lion.fused_lion",
    "DeepSpeedCPUAdam": "deepspeed.ops.adam.cpu_adam",
    "DeepSpeedCPULion": "deepspeed.ops.lion.cpu_lion",
    "DeepSpeedCPUAdagrad": "deepspeed.ops.adagrad.cpu_adagrad",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"fp32_optimizer_states": False}], ids=["", "low"])
@pytest.mark.parametrize("name", OWN)
def test_deepspeeds_own_optimizers_have_known_what_their_first_update_makes(monkeypatch, name, settings, dtype):
    kind = without_kernel(monkeypatch, name)
    own = settings if name.startswith("DeepSpeedCPU") else {}
    parameters = [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2)]
    first, early = kind([parameters[0]], lr=0.1, **own), kind([parameters[1]], lr=0.1, **own)
    parameters[0].grad = torch.zeros_like(parameters[0])
    first.step()
    state.plan_optimizer_state(early)
    made, expected = items_of(early, parameters[1]), first.state[parameters[0]]
    assert not early.state
    assert {"step", *made} == set(expected) == {"step", *state.OWN_MOMENTS[name]}
    for key in state.OWN_MOMENTS[name]:
        assert (made[key].dtype, made[key].shape) == (expected[key].dtype, expected[key].shape)


# ---- what updates in host memory ----


class DeepSpeedCPUAdam(torch.optim.Optimizer):
    """As DeepSpeed's, whose compiled part keeps powers of the betas in fp32: multiplied from step to step, computed
    again if steps are left out."""

    __module__ = "deepspeed.ops.adam.cpu_adam"

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0})
        self.opt_id, self.ds_opt_adam = 0, self
        self.counted, self.power = 0, np.float32(1.0)
        for group in self.param_groups:
            group["bias_correction"] = True

    def adam_update(self, which, step, *settings):
        beta = np.float32(settings[1])
        if step == self.counted + 1:
            self.power *= beta
        elif step != self.counted:
            self.power = np.float32(beta**step)
        self.counted = step


@pytest.mark.parametrize("steps", [1, 5, 17])
def test_powers_that_an_optimizer_counts_out_of_reach_are_counted_up_again(steps):
    def built():
        optimizer = DeepSpeedCPUAdam([torch.nn.Parameter(torch.ones(3)) for _ in range(2)])
        state.plan_optimizer_state(optimizer)
        return optimizer

    whole, resumed = built(), built()
    for step in range(1, steps + 1):
        for _, main in state.updated_tensors(whole):
            whole.state[main]["step"] = step
            whole.adam_update(0, step, *(0.1, 0.9))
    state.restore_scalars(resumed, state.scalars(whole))
    assert resumed.power == whole.power
    assert state.counts_from(resumed) == 1
    saved = state.scalars(whole)
    saved[0]["step"] = steps + 1
    with pytest.raises(ResumeError, match=f"between {steps} and {steps + 1} updates"):
        state.restore_scalars(built(), saved)


def test_powers_that_began_with_a_loaded_checkpoint_are_counted_up_from_there():
    """Its optimizer computes the first one from the number of steps, and multiplies it up from there."""
    parameters = [torch.nn.Parameter(torch.ones(3))]
    whole, resumed = DeepSpeedCPUAdam(parameters), DeepSpeedCPUAdam(parameters)
    for optimizer in (whole, resumed):
        state.plan_optimizer_state(optimizer)
    (_, main), *_ = state.updated_tensors(whole)
    whole.state[main]["step"] = 50  # as DeepSpeed loads it
    state.count_from_loaded(whole)
    for step in range(51, 70):
        whole.state[main]["step"] = step
        whole.adam_update(0, step, *(0.1, 0.9))
    state.restore_scalars(resumed, state.scalars(whole), state.counts_from(whole))
    assert resumed.power == whole.power and state.counts_from(resumed) == 51
    state.restore_scalars(resumed, state.scalars(whole))
    assert resumed.power != whole.power, "from the first step it would be another one"


# ---- what scales the loss ----


def dynamic():
    return SimpleNamespace(loss_scaler=DynamicLossScaler(2.0**16, 3, 1.0, 2, False), overflow=False)


def of_zero(optimizer, overflow):
    optimizer.overflow = overflow
    optimizer.loss_scaler.update_scale(overflow)


def fp16():
    """The real one, over one parameter; what fp16 is refused for on a CPU is the engine's matter."""
    updating = torch.optim.Adam([torch.nn.Parameter(torch.ones(4, dtype=torch.float16))], lr=0.1)
    arguments = {"init_scale": 2**16, "scale_window": 3, "min_scale": 1, "delayed_shift": 1}
    return FP16_Optimizer(
        updating, dynamic_loss_scale=True, dynamic_loss_args=arguments, verbose=False, fused_adam_legacy=False
    )


def of_fp16(optimizer, overflow):
    (parameter,) = optimizer.fp16_groups[0]
    optimizer.zero_grad()
    (parameter.float().sum() * (float("inf") if overflow else 1.0)).backward()
    optimizer.step()


@pytest.mark.parametrize(("made", "update"), [(dynamic, of_zero), (fp16, of_fp16)], ids=["zero", "fp16"])
def test_a_loss_scale_goes_on_as_it_would_have(monkeypatch, made, update):
    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 1)  # which only prints
    one, other = made(), made()
    for overflow in (True, True, False, False, True, False):
        update(one, overflow)
    saved = codec.decode(codec.encode(state.scaler(one)))
    assert saved["scaler"] != state.scaler(other)["scaler"]
    state.restore_scaler(other, saved)
    for overflow in (False, True, True, False, False, False, False):
        update(one, overflow)
        update(other, overflow)
        assert state.scaler(other) == state.scaler(one)


def test_the_scale_that_an_older_optimizer_keeps_itself_is_its_state_and_nothing_else_of_it():
    one = SimpleNamespace(cur_scale=8.0, cur_iter=4, last_overflow_iter=2, clip_grad=1.0, overflow=True)
    other = SimpleNamespace(cur_scale=2.0, cur_iter=0, last_overflow_iter=-1, clip_grad=0.5, overflow=False)
    state.restore_scaler(other, state.scaler(one))
    assert vars(other) == {**vars(one), "clip_grad": 0.5}


def test_another_kind_of_scaling_is_refused():
    with pytest.raises(ResumeError, match="captured job's precision and loss scale settings"):
        state.restore_scaler(SimpleNamespace(loss_scaler=LossScaler(1.0)), state.scaler(dynamic()))
