"""Stories about Megatron's layer-wise optimizer, over Adam: what its job refuses, by name."""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import gpt_job
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron_gangs import gang_job, refused

from ft_plugins.adapters.megatron.core import MegatronCoreHost
from ft_plugins.adapters.megatron.export import export
from ft_plugins.errors import ResumeError, UnsupportedError
from ft_plugins.snapshot.checkpoint.index import Index
from harness.gang import gang


class LayerWise(LayerWiseDistributedOptimizer):
    """Gathers tensor by tensor: gloo gathers equal sizes only."""

    def allgather_params(self):
        self.broadcast_params()


def layer_wise(config, chunks, **more):
    built = get_megatron_optimizer(config, chunks, **more)
    parts = list(getattr(built, "chained_optimizers", [built]))
    return LayerWise(parts, config, ProcessGroupCollection.use_mpu_process_groups())


def export_of(host):
    """What the export of a checkpoint with this host's names is refused with."""
    shares = SimpleNamespace(folder="ck", indices=lambda: [Index(0, 1, {}, host.names())], place=None)
    return refused(UnsupportedError, lambda: export(shares, Path("nowhere")))


def _refuses(rank, world):
    with patch.object(gpt_job, "get_megatron_optimizer", layer_wise), gang_job(rank, world) as job:
        host = job.host()
        job.train_step(skip=lambda: None)
        assert all(one.replicas == (rank,) for one in host.inventory().items if one.role.value != "buffer")
        assert [ranks for ranks in (1, 2, 4) if host.admits(ranks)] == [2]
        small = host.small_state()
        said = refused(ResumeError, lambda: host.merged([small, small]))
        assert f"rank {rank}: with a layer-wise optimizer the number of ranks" in said and "--ftp-resume fresh" in said
        for operation in (host.copies, host.keep_iterations, host.prepare_reduction):
            said = refused(UnsupportedError, operation)
            assert "a layer-wise optimizer" in said and "each rank updates other parameters" in said, said
        said = export_of(host)
        assert "ck: cannot be exported, because rank 0" in said and "a layer-wise optimizer saves" in said, said


def it_refuses_another_size_replicas_and_export_by_name():
    gang(_refuses, 2, seconds=100.0)


def _divides(rank, world):
    with gang_job(rank, world) as job:
        host = job.host()
        with patch.object(MegatronCoreHost, "sharded", True):
            assert [ranks for ranks in (1, 2) if host.admits(ranks)] == [1]
            assert "with parameters that FSDP divides the" in refused(ResumeError, lambda: host.merged([{}]))
            assert "its parameters are sharded by FSDP" in export_of(host)


def it_refuses_another_size_and_export_of_what_fsdp_divides():
    gang(_divides, 1, seconds=60.0)
