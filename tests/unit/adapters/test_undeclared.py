"""What is trained state of a script that nothing captures, and what is not: over lists of objects, with no process."""

import copy
import random

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ft_plugins.adapters.script.script_names import Name, named
from ft_plugins.adapters.script.script_state import Marks, Returned, storage_of, tensors_in
from ft_plugins.adapters.script.undeclared import DeclaredState, Sort, candidates, sorted_out, undeclared


def network():
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))


def average(model):
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


class Script:
    """A model and an optimizer that are captured, and whatever else a test puts in the script's variables."""

    def __init__(self):
        self.model = network()
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.variables = {"model": self.model, "optimizer": self.optimizer}
        self.hidden = []  # objects without a name
        self.marks = Marks()

    def declared(self, *ignored, storages=()):
        objects = (self.model, self.optimizer, *ignored)
        tensors = [one for each in objects for one in tensors_in(each)]
        shapes = {}
        for one in self.model.parameters():
            shapes[one.shape] = shapes.get(one.shape, 0) + 1
        ids = frozenset(map(id, (*objects, *tensors)))
        return DeclaredState(ids, frozenset(map(storage_of, tensors)) | frozenset(storages), shapes)

    @property
    def _live(self):
        known = [one.value for one in self._names.values()]
        modules = [part for one in (*known, *self.hidden) if isinstance(one, torch.nn.Module) for part in one.modules()]
        return sorted_out([*known, *self.hidden, *modules])

    @property
    def _names(self):
        return named([("a global", self.variables)])

    def begin(self):
        holding = candidates(self._live, self._names, self.declared())
        self.marks.mark(part for _, _, tensors in holding for part in tensors)
        self.marks.mark_buffers(self._live[Sort.MODULE], self.declared().has)

    def update(self):
        self.model(torch.ones(2, 4)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def found(self, get_state=dict, ignored=()):
        """Whether something is trained state, by name."""
        returned = Returned(get_state())
        declared = self.declared(*ignored, storages=returned.storages)
        all_found = undeclared(self._live, self._names, declared, returned, self.marks)
        self.words = [str(one) for one in all_found]
        return {one.expression: one.trained for one in all_found}


def test_a_model_its_optimizer_and_wrappers_of_both_are_no_finding():
    script = Script()
    script.begin()
    script.update()

    class Wrapper(torch.optim.Optimizer):
        """As Accelerate's, which hands on the optimizer's own state."""

        def __init__(self, inner):
            self.inner = inner

        state = property(lambda self: self.inner.state)
        param_groups = property(lambda self: self.inner.param_groups)

    script.variables |= {"compiled": torch.nn.ModuleList([script.model]), "wrapped": Wrapper(script.optimizer)}
    assert script.found() == {}


def test_an_average_of_the_weights_is_named_with_its_name_and_class_once_it_has_changed():
    script = Script()
    ema = script.variables["ema"] = average(script.model)
    script.begin()
    assert script.found() == {"ema": False}
    ema.update_parameters(script.model)
    assert script.found() == {"ema": True} and script.words == ["'ema' (AveragedModel, a global): 5 tensors"]


RETURNS = {
    "state_dict": lambda ema: {"ema": ema.state_dict()},
    "as a dict": lambda ema: {"ema": dict(ema.state_dict())},
    "with other keys": lambda ema: {f"ema.{name}": one for name, one in ema.state_dict().items()},
    "copies": lambda ema: {"more": [{name: one.clone() for name, one in ema.state_dict().items()}]},
    "arrays": lambda ema: {name: one.numpy() for name, one in ema.state_dict().items()},
}


@pytest.mark.parametrize("form", RETURNS)
def test_what_get_state_returns_is_declared_in_any_form(form):
    script = Script()
    ema = script.variables["ema"] = average(script.model)
    script.update()
    ema.update_parameters(script.model)
    assert script.found(lambda: RETURNS[form](ema)) == {}


def test_what_get_state_returns_only_in_part_is_named_with_what_is_missing():
    script = Script()
    ema = script.variables["ema"] = average(script.model)
    script.begin()
    ema.update_parameters(script.model)
    assert script.found(lambda: dict(ema.module.state_dict())) == {"ema": True}
    assert script.words == ["'ema' (AveragedModel, a global): 1 tensors"]


def test_the_other_half_of_a_gan_is_named_and_its_optimizer():
    script = Script()
    critic = network()
    optimizer = torch.optim.Adam(critic.parameters())
    script.variables |= {"models": {"critic": critic}, "optimizers": [script.optimizer, optimizer]}
    script.begin()
    critic(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert script.found() == {"optimizers[1]": True, "models['critic']": True}
    state = {"critic": critic.state_dict(), "optimizer": optimizer.state_dict()}
    assert script.found(lambda: state) == {}
    assert script.found(ignored=[critic, optimizer]) == {}


class Centre(torch.nn.Module):
    """A criterion with a running average beside the model, and a table that it makes when it needs it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(3))
        self.register_buffer("table", torch.zeros(2), persistent=False)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_buffer_beside_the_model_is_trained_state_once_it_has_changed(replaced):
    script = Script()
    criterion = script.variables["criterion"] = Centre()
    script.begin()
    criterion.table = torch.ones(4)
    assert script.found() == {"criterion": False}
    if replaced:
        criterion.center = torch.ones(3)
    else:
        criterion.center.add_(1)
    assert script.found() == {"criterion": True}


def _through_data(model, frozen):
    for mean, one in zip(frozen.parameters(), model.parameters(), strict=True):
        mean.data.mul_(0.9).add_(one.data, alpha=0.1)


def _in_place(model, frozen):
    with torch.no_grad():
        for mean, one in zip(frozen.parameters(), model.parameters(), strict=True):
            mean.mul_(0.9).add_(one, alpha=0.1)


@pytest.mark.parametrize("change", [_through_data, _in_place, None])
@pytest.mark.parametrize("graded", [True, False])
def test_a_frozen_module_is_trained_state_once_it_has_changed(change, graded):
    """A teacher that is left as it is never is, also if no one turned its gradients off."""
    script = Script()
    teacher = script.variables["teacher"] = copy.deepcopy(script.model).eval().requires_grad_(graded)
    script.begin()
    script.update()
    if change is not None:
        change(script.model, teacher)
    assert script.found() == {"teacher": change is not None}


def test_a_buffer_that_get_state_returns_is_declared_though_other_tensors_of_its_module_are_not():
    script = Script()
    teacher = script.variables["teacher"] = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    script.begin()
    teacher(torch.rand(4, 2))
    assert script.found() == {"teacher": True}
    assert script.found(lambda: {name: one.clone() for name, one in teacher[1].state_dict().items()}) == {
        "teacher": False
    }


def test_of_a_module_with_the_model_in_it_only_the_rest_is_named():
    script = Script()
    script.variables["pair"] = torch.nn.ModuleDict({"model": script.model, "other": network()})
    assert list(script.found()) == ["pair.other"]


def test_modules_without_parameters_or_without_memory_are_no_finding():
    script = Script()
    with torch.device("meta"):
        planned = network()
    script.variables |= {"planned": planned, "metric": torch.nn.Dropout()}
    assert script.found() == {}


def test_an_object_without_a_name_is_named_by_its_class():
    script = Script()
    script.hidden.append(average(script.model))
    assert list(script.found()) == ["averagedmodel"]


def test_a_scaler_that_is_used_is_trained_state():
    script = Script()
    used, idle, off = (torch.amp.GradScaler("cpu", enabled=on) for on in (True, True, False))
    script.variables |= {"used": used, "idle": idle, "off": off}
    script.begin()
    used.scale(torch.ones(1))
    assert script.found() == {"used": True}
    assert script.found(lambda: {"scaler": used.state_dict()}) == {}


def test_a_dictionary_of_averaged_weights_is_trained_state():
    script = Script()
    ema = script.variables["ema"] = {name: one.detach().clone() for name, one in script.model.named_parameters()}
    counter = script.variables["counter"] = {"samples": torch.zeros(3)}
    script.begin()
    script.update()
    for name, one in script.model.named_parameters():
        ema[name].mul_(0.9).add_(one.detach(), alpha=0.1)
    counter["samples"] += 1
    assert script.found() == {"ema": True}
    assert script.found(lambda: {"ema": ema}) == {}
    assert script.found(lambda: {name: one.clone() for name, one in ema.items()}) == {}
    assert script.found(ignored=list(ema.values())) == {}


def test_tensors_of_one_iteration_are_not_taken_for_trained_state():
    script = Script()
    script.begin()
    script.model(torch.ones(1, 4)).sum().backward()
    script.variables |= {"norms": [one.norm() for one in script.model.parameters()]}
    script.variables |= {"gradients": [one.grad.clone() for one in script.model.parameters() if one.grad is not None]}
    assert script.found() == {"gradients": False}


class Average:
    """An average of a library: no module, but with `state_dict`."""

    def __init__(self, parameters):
        self.means = [one.detach().clone() for one in parameters]

    def state_dict(self):
        return {"means": self.means}

    def load_state_dict(self, state): ...


def test_an_object_with_state_is_trained_state_if_its_tensors_change():
    script = Script()
    mean = script.variables["mean"] = Average(script.model.parameters())
    script.begin()
    assert script.found() == {"mean": False}
    mean.means[0].data.add_(1)
    assert script.found() == {"mean": True}
    assert script.found(lambda: mean.state_dict()) == {}
    assert script.found(ignored=[mean, *mean.means]) == {}


def test_an_object_is_named_by_a_variable_before_a_part_and_by_the_innermost_function():
    thing = random.Random(1)
    box = {"thing": thing}
    names = named([("a variable of main()", {"box": box, "__doc__": thing}), ("a global", {"thing": thing})])
    assert names[id(thing)].name == Name("thing", "a global")
    assert named([("a global", {"box": box})])[id(thing)].name == Name("box['thing']", "a global")


def test_tensors_in_a_container_of_the_scripts_own_class_are_found_without_its_code():
    class Meters(list[torch.Tensor]):
        def __iter__(self):
            raise AssertionError("the script's code is run")

    class Named(dict[str, torch.Tensor]):
        def __len__(self):
            raise AssertionError("the script's code is run")

        values = keys = items = __iter__ = __len__

    first, second = torch.ones(2), torch.zeros(3)
    (found,), (other,) = tensors_in(Meters([first])), tensors_in(Named(a=second))
    assert found is first and other is second
