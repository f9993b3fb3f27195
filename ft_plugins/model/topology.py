"""Placeholder while the module is being written."""


class Topology: ...
