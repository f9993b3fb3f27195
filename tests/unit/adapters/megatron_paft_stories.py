"""Stories about what a Megatron job has between two updates, one rank each; see `gang_stories`."""

import functools

import torch
from megatron.core import parallel_state, rerun_state_machine
from megatron_stories import SHARDED_BF16, job, refused

from ft_plugins.errors import ReplicaError, UnsupportedError
from ft_plugins.model.digest import state_digest
from ft_plugins.model.host import ReplicaOperations
from ft_plugins.model.inventory import Role

KINDS = (
    [], ["--bf16"], SHARDED_BF16, ["--distributed-optimizer"], ["--bf16", "--overlap-grad-reduce"],
)  # fmt: skip


class Wrong:
    """Hooks that spoil an iteration's gradients before its update, and have them computed again."""

    def __init__(self, host, at):
        self.host, self.at = host, at

    def after_update(self, step): ...

    def before_update(self, step):
        torch.rand(3)  # of the loop's own, which go on behind it
        if step == self.at:
            for gradient in self.host.gradients().values():
                gradient.fill_(7.0)
            self.host.recompute(step)


def losses(built, until):
    found = []
    for _ in range(until):
        outcome = built.train_step(skip=lambda: None)
        found.append((float(outcome["loss"]).hex(), float(outcome["grad_norm"]).hex()))
    return found


def it_computes_an_iteration_again_and_ends_as_if_nothing_had_been_wrong():
    """Dropout, data and loss scale: nothing is drawn, read or counted twice."""
    for flags in KINDS:
        built = job(*flags)
        host = built.host()
        host.install(Wrong(host, 0))
        clean = losses(built, 4), state_digest(host)
        built.close()
        for at in (1, 3):
            again = job(*flags)
            host = again.host()
            host.keep_iterations()
            assert isinstance(host, ReplicaOperations) and host.recomputes and not host.no_recompute_reason
            host.install(Wrong(host, at))
            assert (losses(again, 4), state_digest(host)) == clean, (flags, at)
            again.close()


def it_gives_the_losses_that_the_right_parameters_have():
    """Wrong in the forward, right when computed again: what is logged is of the second time."""
    built = job("--bf16")
    host = built.host()
    host.install(Wrong(host, 0))
    clean = losses(built, 3)
    built.close()
    again = job("--bf16")
    host = again.host()
    host.keep_iterations()
    inner = Wrong(host, 3)
    hooks_before = inner.before_update

    def before_update(step):
        if step == 3:
            host.derive()
        hooks_before(step)

    inner.before_update = before_update
    host.install(inner)
    found = losses(again, 2)
    with torch.no_grad():
        for tensor in host.copy_tensors().values():
            tensor.mul_(1.5)
    assert found + losses(again, 1) == clean


def it_puts_buffers_and_the_validation_of_results_back_to_where_the_iteration_began():
    built = job()
    layer = built.chunks[0].module.decoder.layers[0]
    layer.register_buffer("seen", torch.zeros(1))

    def look(module, args):
        module.seen.add_(1)

    layer.register_forward_pre_hook(look)
    rerun_state_machine.initialize_rerun_state_machine(mode=rerun_state_machine.RerunMode.VALIDATE_RESULTS)
    machine = rerun_state_machine.get_rerun_state_machine()
    original = built._forward_step

    def forward_step(*args):
        output, loss = original(*args)

        def validated(given):
            machine.validate_result(given.mean(), torch.isnan, "loss is no number")
            machine.is_unexpectedly_large(given.mean(), 10, "loss")
            return loss(given)

        return output, validated

    built._forward_step = forward_step
    host = built.host()
    host.keep_iterations()
    machine.state = rerun_state_machine.RerunState.INITIAL_RUN
    built.forward_backward(built.train)
    machine.state = rerun_state_machine.RerunState.NOT_RUNNING_YET
    seen, counts = float(layer.seen), dict(machine.large_value_counts)
    assert seen == built.args.global_batch / built.args.micro_batch and counts
    host.recompute(1)
    assert (float(layer.seen), dict(machine.large_value_counts)) == (seen, counts)
    assert machine.state is rerun_state_machine.RerunState.NOT_RUNNING_YET


def it_asks_the_audit_before_megatrons_check_of_a_result_has_the_job_saved_and_ended():
    states, modes = rerun_state_machine.RerunState, rerun_state_machine.RerunMode
    nan = torch.tensor(float("nan"))
    for differ in (True, False):
        built = job()
        host, asked = built.host(), []

        def discarded(differ=differ, asked=asked):
            asked.append(1)
            return differ

        host.keep_iterations(discarded)
        machine = rerun_state_machine.RerunStateMachine(mode=modes.VALIDATE_RESULTS)
        machine.state, machine.first_iteration_complete = states.INITIAL_RUN, True
        machine.validate_result(result=torch.tensor(1.0), rejection_func=torch.isnan, message="fine", fatal=True)
        assert not asked and not machine.rerun_requested, "an accepted result waits for nothing"
        machine.validate_result(result=nan, rejection_func=torch.isnan, message="NaN", fatal=True)
        assert asked and machine.rerun_requested is not differ
        machine.mode = modes.DISABLED
        if differ:
            machine.validate_result(nan, torch.isnan, "NaN")
        else:
            message = refused(RuntimeError, functools.partial(machine.validate_result, nan, torch.isnan, "NaN"))
            assert "Unexpected result nan" in message
        built.close()


def it_does_not_apply_what_megatrons_check_rejects_after_the_repair_too():
    built = job()
    machine = rerun_state_machine.RerunStateMachine(mode=rerun_state_machine.RerunMode.VALIDATE_RESULTS)
    machine.state, machine.first_iteration_complete = rerun_state_machine.RerunState.INITIAL_RUN, True
    rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE = machine
    original, wrong = built._forward_step, [True]

    def forward_step(*args):
        output, loss = original(*args)
        machine.validate_result(torch.tensor(float("nan") if wrong[0] else 1.0), torch.isnan, "loss is NaN")
        return output, loss

    built._forward_step = forward_step
    host = built.host()
    host.keep_iterations(lambda: True)
    built.forward_backward(built.train)
    assert not machine.rerun_requested, "the iteration is computed again"
    message = refused(ReplicaError, lambda: host.recompute(1))
    assert "iteration 1 was recomputed" in message and "still rejects its result (loss is NaN: nan)" in message
    wrong[0] = False
    host.recompute(1)


def it_does_not_compute_an_evaluation_again_nor_an_iteration_that_was_skipped():
    built = job("--eval-at", "1", "--iterations-to-skip", "2")
    host = built.host()
    assert "recompute" not in vars(host) and not host.recomputes
    assert "recorded only if replicas are compared" in refused(UnsupportedError, lambda: host.recompute(1))
    host.keep_iterations()
    calls = []

    class Hooks(Wrong):
        def before_update(self, step):
            host.recompute(step)
            calls.append((step, host._replay.number))

    hooks = Hooks(host, 0)
    host.install(hooks)
    for _ in range(3):
        built.train_step(skip=lambda: host.skip_update(hooks))
    assert calls == [(1, 1), (2, 1), (3, 3)]
    assert "iteration 9 cannot be recomputed" in refused(UnsupportedError, lambda: host.recompute(9))


def it_says_by_name_why_an_iteration_cannot_be_computed_again():
    built = job()
    built.config.cuda_graph_impl = "local"
    host = built.host()
    host.keep_iterations()
    assert not host.recomputes and "CUDA graphs (local)" in host.no_recompute_reason


def it_names_what_is_computed_with_beside_what_is_held():
    expected = {0: set(), 1: {Role.COPY}, 2: {Role.COPY}, 3: {Role.PARAMETER}, 4: {Role.COPY}}
    for number, flags in enumerate(KINDS):
        built = job(*flags)
        host = built.host()
        items, copies = host.inventory().items, host.copies().items
        assert {one.role for one in copies} == expected[number], flags
        assert not {one.name for one in copies} & {one.name for one in items}
        live = host.copy_tensors()
        assert set(live) == {one.name for one in copies}
        names = set(host._names.values()) if copies else set()
        assert set(live) == names and {one.layer for one in copies} <= {None, 1, 2}
        if copies:
            before = {name: tensor.clone() for name, tensor in live.items()}
            if number != 3:  # of fp32 the shards are views: there is nothing else to make them of
                with torch.no_grad():
                    for tensor in live.values():
                        tensor.fill_(3.0)
            host.derive()
            assert all(torch.equal(host.copy_tensors()[name], tensor) for name, tensor in before.items())
        built.close()


def it_counts_once_in_norms_what_is_alike_on_several_tensor_ranks_or_stages():
    built = job()
    everything = {one.name for one in built.host().inventory().items}
    parallel_state.set_tensor_model_parallel_rank(1)
    layer = built.chunks[0].module.decoder.layers[0]
    layer.mlp.linear_fc1.weight.shared = True  # as Megatron marks tied embeddings on the last stage
    host = built.host()
    counted = {one.name for one in host.inventory().items if one.in_norm}
    assert counted < everything
    assert "chunk0.decoder.layers.1.mlp.linear_fc1.weight:exp_avg" in counted
    assert "chunk0.decoder.layers.0.mlp.linear_fc1.weight" not in counted
    assert "chunk0.decoder.final_layernorm.weight" not in counted


def it_gives_each_item_that_is_updated_its_gradient_and_the_rate_of_the_next_update():
    for flags in KINDS:
        built = job(*flags)
        host = built.host()
        built.forward_backward(built.train)
        gradients, items = host.gradients(), {one.name: one for one in host.inventory().items}
        updated = {name for name, one in items.items() if one.role is not Role.MOMENT}
        assert set(gradients) == updated
        assert all(gradients[name].numel() * 4 == items[name].nbytes for name in updated)
        assert host.learning_rate() == max(g["lr"] for g in built.optimizer.param_groups) == 0.0
        built.optimizer.step()
        built.scheduler.step(built.args.global_batch)
        assert host.learning_rate() == 1e-3
        built.close()


def it_shows_own_gradients_before_they_are_reduced_once_an_iteration_or_refuses_by_name():
    built = job()
    host = built.host()
    seen = []
    host.before_reduction(lambda step, own: seen.append((step, len(own), bool(all(g.any() for g in own.values())))))
    built.train_step(skip=lambda: None)
    built.train_step(skip=lambda: None)
    assert seen == [(1, len(host._names), True), (2, len(host._names), True)]
    built.close()
    overlapped = job("--overlap-grad-reduce").host()
    message = refused(UnsupportedError, lambda: overlapped.before_reduction(lambda step, own: None))
    assert "--overlap-grad-reduce" in message
