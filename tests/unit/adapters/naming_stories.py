"""Stories about what the Megatron host says of Megatron's own checkpoints; see `gang_stories`."""

import functools

import gpt_job
import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory, apply_factories
from megatron.core.utils import unwrap_model
from megatron_stories import SHARDED_BF16, job, trained

from ft_plugins.adapters.megatron.export import assemble
from ft_plugins.snapshot.checkpoint.index import Index

FLAGS = ([], ["--bf16"], SHARDED_BF16, ["--distributed-optimizer"])


def gated():
    """From now on jobs have a gated projection, which Megatron saves in two halves."""
    gpt_job.TransformerConfig = functools.partial(
        gpt_job.TransformerConfig, gated_linear_unit=True, activation_func=torch.nn.functional.silu
    )


def megatrons_own(built):
    """What Megatron would save: every sharded tensor and object of model and optimizer, splits applied."""
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    wanted = {"model": unwrap_model(built.chunks)[0].sharded_state_dict(metadata=metadata)}
    wanted["optimizer"] = built.optimizer.sharded_state_dict(wanted, metadata=metadata)
    apply_factories(wanted)
    return [value for value in nested_values(wanted) if isinstance(value, ShardedTensor | ShardedObject)]


def it_names_and_cuts_every_tensor_as_megatron_saves_it():
    gated()
    for flags in FLAGS:
        built = trained(job(*flags), 1)
        host = built.host()
        held = host.tensors()
        made = assemble([Index(0, 0, {}, host.names())], lambda source, ranks: 0)
        own = megatrons_own(built)
        theirs = {(v.key, v.global_offset): v for v in own if isinstance(v, ShardedTensor)}
        ours = {(block.key, block.offset): block for block in made.blocks}
        assert sorted(ours) == sorted(theirs), flags
        assert sum("mlp.linear_fc1.weight" in key and offset[1] > 0 for key, offset in ours), "two halves"
        for at, block in ours.items():
            expected = theirs[at].data.detach().reshape(block.size)
            assert (block.shape, block.dtype) == (theirs[at].global_shape, str(expected.dtype)[6:]), at
            local = held[block.source].detach().reshape(-1).clone()  # strides count from where storage begins
            if block.view is not None:
                start, strides = block.view
                local = local.as_strided(block.size[len(block.size) - len(strides) :], strides, start)
            assert torch.equal(local.reshape(block.size).to(expected.dtype), expected), at
        assert sorted(made.objects) == sorted(v.unique_key for v in own if isinstance(v, ShardedObject))
        built.close()


def it_says_which_part_of_a_parameter_a_shard_is():
    built = job(*SHARDED_BF16)
    sizes = {f"chunk0.{name}": p.numel() for name, p in unwrap_model(built.chunks)[0].named_parameters()}
    for item in built.host().inventory().items:
        numel = sizes[item.name.partition(":")[0]]
        assert item.piece == (0, numel, numel), "of one replica: the whole"
    built.close()
    plain = job("--bf16")
    assert {item.piece for item in plain.host().inventory().items} == {None}


def it_protects_also_what_megatron_cannot_describe():
    built = job()
    model = unwrap_model(built.chunks)[0]

    def broken(**kwargs):
        raise RuntimeError("no such thing\nhere")

    model.sharded_state_dict = broken
    host = built.host()
    assert host.names() == {"framework": "megatron", "problem": "RuntimeError: no such thing here"}
    assert host.inventory().items


def it_refuses_to_describe_what_is_saved_as_a_copy():
    gated()
    original = ShardedTensorFactory.build

    def copying(self):
        built = original(self)
        for part in built:
            part.data = part.data.clone()
        return built

    ShardedTensorFactory.build = copying
    problem = job().host().names()["problem"]
    assert "linear_fc1" in problem and "as a reordered copy" in problem, problem


def it_inventories_a_buffer_as_it_is_once_megatron_was_asked_for_its_state():
    """As with a router's bias, which a bf16 model holds in fp32 from its first forward or save on."""
    built = job("--bf16")
    layer = unwrap_model(built.chunks)[0].decoder.layers[0]
    layer.register_buffer("bias", torch.zeros(4, dtype=torch.bfloat16))
    original = layer._save_to_state_dict

    def converting(*args, **kwargs):
        layer.bias.data = layer.bias.data.to(torch.float32)
        original(*args, **kwargs)

    layer._save_to_state_dict = converting
    host = built.host()
    (item,) = (item for item in host.inventory().items if item.name.endswith("layers.0.bias"))
    assert (item.dtype, item.nbytes) == ("float32", 16)
    (told,) = (told for told in host.names()["tensors"] if told["source"] == item.name)
    assert (told["dtype"], told["group"]) == ("float32", host.names()["groups"].index([0]))


def it_keeps_what_is_no_tensor():
    names = job("--bf16").host().names()
    assert names["optimizers"] == ["float16"]
    assert names["arguments"] is None, "a loop of its own has none"
    assert {tuple(told["value"]) for told in names["objects"]} == {("value", "c0")}, "None, in msgpack"
