"""One life of a rank of a session, whose loop calls the hooks itself."""

from ft_plugins.config import Config, LaunchContext
from ft_plugins.session import attach


def context(rank, world, run_dir=None, token=0, restart=0):
    """Of a job on one node."""
    return LaunchContext(None, run_dir, token, None, rank, rank, world, world, 0, restart)


class Incarnation:
    """What a rank was resumed with, then trained until. `training`: of `replicas` or `local_replicas`."""

    def __init__(self, training, block, run_dir=None, token=0, loaded=0):
        self.training, self.completed = training, 0
        host, where = training.host, context(training.rank, training.world, run_dir, token)
        host._get_state, host._set_state = lambda: {"completed": self.completed}, self._set
        self.events = []
        self.session = attach(host, Config.from_json(block), where)
        self.session._events.subscribe(self.events.append)
        self.resumed = self.session.resume(loaded)
        self.fenced = {}  # parameters with which an iteration's gradients were computed
        self.versions = {}  # all tensors after the fence of the next iteration

    def _set(self, state):
        self.completed = state["completed"]

    def run(self, until):
        for step in range(self.completed + 1, until + 1):
            self.session.iteration_begin(step)
            self.training.backward(step)
            self.fenced[step] = self.training.parameters()
            self.session.before_update(step)
            self.training.optimizer.step()
            self.session.after_update(step)
            self.completed = step
            self.session.iteration_end(step)
            self.versions[step] = self.training.digest()
        return self

    def synchronised(self):
        return [event.fields for event in self.events if event.name == "replicas.synchronised"]
