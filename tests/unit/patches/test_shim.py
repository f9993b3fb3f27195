"""The CPU device shim, in a process of its own: torch and Megatron behave as if there were a device."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the shim acts only where there is no CUDA device")

PREPARED = """
import json, os, sys, traceback, warnings; warnings.filterwarnings("ignore")
from ft_plugins.adapters.megatron import prepare
assert prepare(device_count=4) and prepare(device_count=4)
import torch
torch.set_num_threads(1)
outcomes = {}
for name, story in json.load(sys.stdin).items():
    out, into = os.pipe()
    if os.fork() == 0:
        problem = ""
        try:
            exec(story, {"torch": torch})
        except BaseException:
            problem = traceback.format_exc()
        os.write(into, problem.encode()[-9000:])
        os._exit(0)
    os.close(into)
    outcomes[name] = open(out).read()
print(json.dumps(outcomes))
"""
STORIES = {
    "cuda devices are the cpu and type strings say cuda": """
assert torch.cuda.is_available() and torch.cuda.device_count() == 4
assert len(list(torch.cuda.default_generators)) == 4, "a search for generators ends"
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
mesh = torch.distributed.device_mesh.DeviceMesh("cuda", [0], _init_backend=False, _rank=0)
assert mesh.device_type == "cpu"
with torch.cuda.stream(torch.cuda.Stream()):
    torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
""",
    "the device generator is the one that dropout draws from": """
torch.manual_seed(5)
state = torch.cuda.get_rng_state()
first = torch.nn.functional.dropout(torch.ones(64), 0.5)
torch.cuda.set_rng_state(state)
assert torch.equal(first, torch.nn.functional.dropout(torch.ones(64), 0.5))
torch.cuda.manual_seed(5)
assert torch.equal(first, torch.nn.functional.dropout(torch.ones(64), 0.5))
""",
    "megatrons tracker forks that generator without a warning": """
import io, logging
logging.basicConfig(stream=(said := io.StringIO()), level=logging.WARNING)
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
assert "CPU RNG state changed" not in said.getvalue()
""",
    "building a data loader does not move the generator": """
from torch.utils.data import DataLoader
torch.manual_seed(3)
before = torch.get_rng_state()
loader = DataLoader(list(range(8)), batch_size=2, shuffle=False)
assert [part.tolist() for part in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]
assert torch.equal(before, torch.get_rng_state())
""",
    "an output that is being sent keeps its storage": """
from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor
output = torch.arange(4.0) + 1
address, storage = output.data_ptr(), None
deallocate_output_tensor(output, True)
assert output.numel() == 1 and output.data_ptr() != address
assert output.storage_being_sent.data_ptr() == address
kept = torch.tensor([]).set_(output.storage_being_sent)
assert kept.tolist() == [1, 2, 3, 4]
""",
    "fused functions run as written": """
from megatron.core.jit import jit_fuser
function = lambda x: x
assert jit_fuser(function) is function
""",
    "modules that need triton load without it and their kernels refuse": """
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
""",
    "steps of torch adam are not shared after a load": """
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
""",
    "spawned children do not run the script again": """
import sys
from multiprocessing.spawn import get_preparation_data
sys.modules["__main__"].__file__ = "/job/pretrain.py"
prepared = get_preparation_data("child")
assert "sys_path" in prepared
assert not {"init_main_from_path", "init_main_from_name"} & set(prepared)
""",
}
if find_spec("triton") is not None:  # then kernels are left as they are
    del STORIES["modules that need triton load without it and their kernels refuse"]


@pytest.fixture(scope="module")
def outcomes():
    """The traceback of each story, '' if it held. Each is told in a fork: the shim cannot be taken off again."""
    command = [sys.executable, "-c", PREPARED]
    done = subprocess.run(command, input=json.dumps(STORIES), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("name", STORIES)
def test_with_the_shim(name, outcomes):
    assert outcomes[name] == "", outcomes[name]
