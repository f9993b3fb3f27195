"""Stories about the modules of a Megatron job that local SGD synchronises; see `gang_stories`."""

import torch
from edge_log import EdgeLog, backward, forward
from megatron_gangs import (
    BF16,
    INTERLEAVED,
    OVERLAPPED,
    SHARDED,
    differing,
    gang_job,
    norms_over_sequences,
    refused,
)

from ft_plugins.errors import UnsupportedError
from ft_plugins.model.inventory import Role
from ft_plugins.model.reduction import ReducedOver
from harness.gang import gang

# ---- modules


def _modules(rank, world, flags, tied):
    with gang_job(rank, world, *flags, gpt={"share_embeddings_and_output_weights": tied}) as job:
        host = job.host()
        modules = host.modules()
        items = [one for one in host.inventory().items if one.role in (Role.PARAMETER, Role.MAIN_PARAMETER)]
        assert set(modules) == {one.name for one in items}
        assert all(modules[one.name] == f"layer {one.layer}" for one in items if one.layer is not None)
        return list(dict.fromkeys(modules.values()))


def it_names_modules_in_the_order_of_the_forward():
    (alone,) = gang(_modules, 1, ["--bf16"], True, seconds=60.0)
    assert alone == ["embedding", "layer 1", "layer 2", "head"]
    first, last = gang(_modules, 2, INTERLEAVED, True, seconds=60.0)
    assert first == ["embedding", "layer 1", "layer 3"]
    assert last == ["layer 2", "layer 4", "head", "embedding"], (
        "its copy of a tied embedding is read by the output layer"
    )
    first, last = gang(_modules, 2, INTERLEAVED, False, seconds=60.0)
    assert (first, last) == (["embedding", "layer 1", "layer 3"], ["layer 2", "layer 4", "head"])


RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _calls(rank, world, flags, tied, config):
    """What was called in an iteration of two microbatches. Its first calls change the parameters of their module; the
    gradients are those of a job whose parameters were changed before."""
    flags = [*flags, "--global-batch", str(2 * world // (2 if "--pp" in flags else 1))]
    model = {"gpt": {"share_embeddings_and_output_weights": tied}, **config}
    with gang_job(rank, world, *flags, **model) as job:
        with torch.no_grad():
            for parameter in {one for chunk in job.chunks for one in chunk.parameters()}:
                parameter.mul_(1.5)
        wanted = job.reduced()
    with gang_job(rank, world, *flags, **model) as job:
        host, calls = job.host(), []
        tensors, modules = host.tensors(), host.modules()

        @torch.no_grad()
        def call(module):
            if module not in calls:
                for name, one in modules.items():
                    if one == module:
                        tensors[name].mul_(1.5)
            calls.append(module)

        host.before_modules(call)
        assert differing(job.reduced(), wanted) == []
        seen = list(calls)
        job.evaluate()
        assert set(calls[len(seen) :]) == set(seen), "an evaluation uses what was synchronised, too"
        return seen


def it_calls_before_the_forward_of_each_module():
    (alone,) = gang(_calls, 1, [], True, {}, seconds=60.0)
    assert alone == ["embedding", "layer 1", "layer 2", "head"] * 2
    (again,) = gang(_calls, 1, [], True, RECOMPUTED, seconds=60.0)
    assert again == ["embedding", "layer 1", "layer 2", "head", "layer 2", "layer 1"] * 2
    for tied in (True, False):
        first, last = gang(_calls, 2, INTERLEAVED, tied, {}, seconds=60.0)
        assert sorted(first) == sorted(["embedding", "layer 1", "layer 3"] * 2) and first[:2] == [
            "embedding",
            "layer 1",
        ]
        of_last = ["layer 4", "head", *(["embedding"] if tied else [])]
        assert [one for one in last if one != "layer 2"] == of_last * 2 and last.count("layer 2") == 2


def _refuses_to_follow(rank, world):
    with gang_job(rank, world) as job:
        host = job.host()
        job.config.cuda_graph_impl = "local"
        assert "CUDA graphs (local)" in refused(UnsupportedError, lambda: host.before_modules(lambda module: None))
    with gang_job(rank, world) as job:
        decoder = job.chunks[0].module.decoder
        decoder.layers, norm = decoder.layers, decoder.final_layernorm
        layers = decoder._modules.pop("layers")
        decoder._modules["layers"] = layers  # registered after the layernorm
        assert decoder.final_layernorm is norm
        message = refused(UnsupportedError, lambda: job.host().before_modules(lambda module: None))
        assert "the order of the forward is unknown" in message, message


def it_refuses_by_name_where_modules_cannot_be_followed():
    gang(_refuses_to_follow, 2, seconds=60.0)


# ---- edges


def _followed(rank, world, flags, more):
    """The edges of the last of three iterations; its state is that of a job that is not followed."""
    states, words = [], []
    for follows in (False, True):
        with norms_over_sequences(), gang_job(rank, world, *flags, **more) as job:
            host, log = job.host(), EdgeLog()
            host.prepare_reduction()
            if follows:
                host.follow_modules(log)
            for over in (ReducedOver.ALL, ReducedOver.LOCAL, ReducedOver.ALL):
                host.reduce_over(over)
                log.words.clear()
                job.train_step(skip=lambda: None)
            words = log.taken()
            states.append(_state(job, host))
    assert differing(*states) == []
    return words


def _state(job, host):
    tensors = {
        f"chunk{index}.{name}": one for index, chunk in enumerate(job.chunks) for name, one in chunk.named_parameters()
    }
    return {name: one.detach().clone() for name, one in {**tensors, **host.tensors()}.items()}


ALONE = ["embedding", "layer 1", "layer 2", "head"]


def it_reports_the_edges_of_each_module_whatever_the_optimizer_holds():
    """A rank alone, then two replicas, whose two or one microbatches are reduced behind the backward or during it."""
    once = [*forward(*ALONE), *backward(*reversed(ALONE))]
    sharded = [*BF16, *SHARDED, "2"]
    for world, flags in (
        (1, []),
        (1, BF16),
        (2, []),
        (2, [*BF16, *OVERLAPPED]),
        (2, sharded),
        (2, [*sharded, *OVERLAPPED, "--overlap-param-gather"]),
    ):
        for words in gang(_followed, world, [*flags, "--global-batch", "2"], {}, seconds=60.0):
            assert words == once * (2 // world), (flags, words)


def it_reports_edges_with_tensor_parallelism():
    untied = {"gpt": {"share_embeddings_and_output_weights": False}}
    for more in (untied, {**untied, "sequence_parallel": True}):
        for words in gang(_followed, 2, ["--tp", "2", "--global-batch", "1"], more, seconds=60.0):
            # the last layernorm and the output layer are two parts of the head
            assert words == forward(*ALONE, "head") + backward("head", *reversed(ALONE)), words


def it_reports_edges_of_stages_and_chunks():
    """The first stage has microbatches in flight; the last one runs a backward after each forward."""
    for tied in (True, False):
        more = {"gpt": {"share_embeddings_and_output_weights": tied}}
        first, last = gang(_followed, 2, ["--pp", "2", "--global-batch", "2"], more, seconds=60.0)
        there, back = forward("embedding", "layer 1"), backward("layer 1", "embedding")
        assert first == there * 2 + back * 2, first
        of_last = ["layer 2", "head", "embedding" if tied else "head"]
        assert last == (forward(*of_last) + backward(*reversed(of_last))) * 2, last
        first, last = gang(_followed, 2, [*INTERLEAVED, "--global-batch", "2"], more, seconds=60.0)
        assert sorted(first) == sorted(
            [*forward("embedding", "layer 1", "layer 3"), *backward("embedding", "layer 1", "layer 3")] * 2
        )
        assert first[-4:] == backward("layer 1", "embedding")
        of_last = ["layer 2", "layer 4", *of_last[1:]]
        assert sorted(last) == sorted([*forward(*of_last), *backward(*of_last)] * 2)


def it_reports_recomputations_within_the_backward_of_their_layer():
    (words,) = gang(_followed, 1, ["--global-batch", "1"], RECOMPUTED, seconds=60.0)
    again = [word for name in ("layer 2", "layer 1") for word in (f"b+ {name}", *forward(name), f"b- {name}")]
    assert words == [*forward(*ALONE), *backward("head"), *again, *backward("embedding")], words


def _refuses_edges(rank, world):
    with gang_job(rank, world) as job:
        host = job.host()
        job.config.cuda_graph_impl = "local"
        message = refused(UnsupportedError, lambda: host.follow_modules(EdgeLog()))
        assert message.startswith(f"rank {rank}: modules cannot be followed with CUDA graphs (local)"), message


def it_refuses_to_report_edges_of_cuda_graphs():
    gang(_refuses_edges, 1, seconds=60.0)
