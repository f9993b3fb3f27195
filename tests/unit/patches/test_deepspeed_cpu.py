"""The flat buffer that DeepSpeed's ZeRO updates in place, and the optimizer whose kernel is not compiled."""

import torch

from ft_plugins.patches.deepspeed_cpu import detached, with_torch_adam


def test_a_flat_buffer_is_the_same_memory_without_a_graph():
    made = []

    def flatten(tensors, alignment):
        made.append(torch.cat(tensors))
        return made[0]

    flat = detached(flatten, [torch.nn.Parameter(torch.ones(3))] * 2, alignment=2)
    assert made[0].requires_grad and not flat.requires_grad
    assert flat.data_ptr() == made[0].data_ptr() and torch.equal(flat, torch.ones(6))
    first, second = flat.split(3)
    first.copy_(torch.zeros(3))  # 'Output 0 of SplitBackward0 is a view ...' without the patch
    assert flat.tolist() == [0, 0, 0, 1, 1, 1]


def test_deepspeeds_fused_adam_is_torchs_own_and_a_line_names_its_arithmetic(capsys):
    weight, compiled = torch.nn.Parameter(torch.ones(2)), []
    made = with_torch_adam(lambda *given: compiled.append(given))
    decoupled = made([weight], lr=0.5, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1)
    assert type(decoupled) is torch.optim.AdamW and "rounded differently" in capsys.readouterr().out
    group = decoupled.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.5, (0.8, 0.9), 1e-3, 0.1)
    assert type(made([weight], adam_w_mode=False)) is torch.optim.Adam and not compiled
    made([weight], 0.1, bias_correction=False)
    assert compiled == [([weight], 0.1, False, (0.9, 0.999), 1e-8, True, 0.0, False)], "torch's has no such setting"
