"""The CPU device shim, in a process of its own: torch and Megatron behave as if there were a device."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from importlib.util import find_spec

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the shim acts only where there is no CUDA device")

PREPARED = """
import warnings; warnings.filterwarnings("ignore")
from ft_plugins.adapters.megatron import prepare
assert prepare(device_count=4) and not prepare(device_count=4)
import torch
"""


def in_a_process(code: str) -> str:
    """What `code` prints after `prepare()`, in a new interpreter: the shim cannot be taken off again."""
    script = PREPARED + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_cuda_devices_are_the_cpu_and_type_strings_say_cuda() -> None:
    in_a_process(
        """
        assert torch.cuda.is_available() and torch.cuda.device_count() == 4
        assert torch.accelerator.current_accelerator.__module__.startswith("ft_plugins"), "whatever torch is built for"
        assert torch.accelerator.current_accelerator() is None and not torch.accelerator.is_available()
        torch.cuda.set_device(3)
        assert torch.cuda.current_device() == 3
        for made in (
            torch.zeros(2, device="cuda"), torch.ones(2, device=3), torch.empty(2, device=torch.device("cuda:1")),
            torch.zeros(2).new_empty(2, device="cuda"), torch.tensor([1.0, 2.0], device="cuda", pin_memory=True),
            torch.zeros(2).to("cuda"), torch.zeros(2).to(device=3), torch.zeros(2).cuda(3).pin_memory(),
        ):
            assert made.device.type == "cpu" and made.type() == "torch.cuda.FloatTensor"
        assert torch.zeros(2).to(torch.float64).dtype == torch.float64
        assert torch.zeros(2).type("torch.cuda.HalfTensor").dtype == torch.float16
        assert torch.zeros(2, device="meta").device.type == "meta"
        torch.nn.Linear(2, 2).cuda(torch.cuda.current_device())
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        """
    )


def test_the_device_generator_is_the_one_that_dropout_draws_from() -> None:
    in_a_process(
        """
        torch.manual_seed(5)
        state = torch.cuda.get_rng_state()
        first = torch.nn.functional.dropout(torch.ones(64), 0.5)
        torch.cuda.set_rng_state(state)
        assert torch.equal(first, torch.nn.functional.dropout(torch.ones(64), 0.5))
        torch.cuda.manual_seed(5)
        assert torch.equal(first, torch.nn.functional.dropout(torch.ones(64), 0.5))
        """
    )


def test_megatrons_tracker_forks_that_generator_without_a_warning(capfd: pytest.CaptureFixture[str]) -> None:
    said = in_a_process(
        """
        import logging
        logging.basicConfig(stream=__import__("sys").stdout, level=logging.WARNING)
        from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
        tracker = CudaRNGStatesTracker()
        torch.manual_seed(1)
        tracker.add("stream", 7)
        outside = torch.get_rng_state()
        with tracker.fork("stream"):
            one = torch.nn.functional.dropout(torch.ones(64), 0.5)
        assert torch.equal(outside, torch.get_rng_state())
        with tracker.fork("stream"):
            two = torch.nn.functional.dropout(torch.ones(64), 0.5)
        torch.manual_seed(7)
        assert torch.equal(one, torch.nn.functional.dropout(torch.ones(64), 0.5))
        assert torch.equal(two, torch.nn.functional.dropout(torch.ones(64), 0.5))
        """
    )
    assert "CPU RNG state changed" not in said


def test_building_a_data_loader_does_not_move_the_generator() -> None:
    in_a_process(
        """
        from torch.utils.data import DataLoader
        torch.manual_seed(3)
        before = torch.get_rng_state()
        loader = DataLoader(list(range(8)), batch_size=2, shuffle=False)
        assert [part.tolist() for part in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert torch.equal(before, torch.get_rng_state())
        """
    )


def test_an_output_that_is_being_sent_keeps_its_storage() -> None:
    in_a_process(
        """
        from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor
        output = torch.arange(4.0) + 1
        address, storage = output.data_ptr(), None
        deallocate_output_tensor(output, True)
        assert output.numel() == 1 and output.data_ptr() != address
        assert output.storage_being_sent.data_ptr() == address
        kept = torch.tensor([]).set_(output.storage_being_sent)
        assert kept.tolist() == [1, 2, 3, 4]
        """
    )


def test_fused_functions_run_as_written() -> None:
    in_a_process(
        """
        from megatron.core.jit import jit_fuser
        function = lambda x: x
        assert jit_fuser(function) is function
        """
    )


@pytest.mark.skipif(find_spec("triton") is not None, reason="triton is installed: kernels are left as they are")
def test_modules_that_need_triton_load_without_it_and_their_kernels_refuse() -> None:
    in_a_process(
        """
        import importlib.util, sys
        from megatron.core.transformer.custom_layers import batch_invariant_kernels
        from ft_plugins.errors import UnsupportedError
        assert batch_invariant_kernels.is_batch_invariant_mode_enabled() is False
        try:
            batch_invariant_kernels.matmul_kernel_persistent[(1,)](None)
        except UnsupportedError as error:
            assert "matmul_kernel_persistent needs triton" in str(error)
        else:
            raise AssertionError("a kernel did not refuse")
        assert importlib.util.find_spec("triton") is None and "triton" not in sys.modules
        """
    )


def test_steps_of_torch_adam_are_not_shared_after_a_load() -> None:
    in_a_process(
        """
        from ft_plugins.patches.megatron_optimizers import with_own_steps, with_whole_state
        parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
        adam = torch.optim.Adam(parameters, lr=0.1)
        with_whole_state(adam)
        assert all(set(state) == {"step", "exp_avg", "exp_avg_sq"} for state in adam.state.values())
        shared = torch.tensor(4.0)
        for state in adam.state.values():
            state["step"] = shared
        with_own_steps(adam)
        for parameter in parameters:
            parameter.grad = torch.ones(3)
        adam.step()
        assert [state["step"].item() for state in adam.state.values()] == [5.0, 5.0]
        """
    )


def test_spawned_children_do_not_run_the_script_again() -> None:
    in_a_process(
        """
        import sys
        from multiprocessing.spawn import get_preparation_data
        sys.modules["__main__"].__file__ = "/job/pretrain.py"
        prepared = get_preparation_data("child")
        assert "sys_path" in prepared
        assert not {"init_main_from_path", "init_main_from_name"} & set(prepared)
        """
    )
