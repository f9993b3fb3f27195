"""Metadata, extras and console scripts. Settings of tools are in pyproject.toml, versions in launch/constraints.txt.

NVIDIA's apex is found at run time where it is installed; the package of that name on the index is another project and
must never be listed here.
"""

from setuptools import find_packages, setup

EXTRAS = {
    "megatron": ["megatron-core>=0.14", "pybind11", "pyyaml", "regex", "six"],  # the rest for Megatron-LM
    "deepspeed": ["deepspeed>=0.16.9"],
    "hf": ['transformers>=5.24; python_version >= "3.11"', "accelerate>=1.15"],
    "bench": ["scikit-learn", "torchsnapshot", "dlrover[torch]", "grpcio", "protobuf", "requests"],  # last: of dlrover
    "report": ["matplotlib"],
    "mutants": ["cosmic-ray"],
    "docs": ["mkdocs-material"],
    "dev": [
        "pytest>=8", "pytest-timeout", "pytest-xdist", "hypothesis", "greenlet",
        "ruff", "mypy", "import-linter", "build", "setuptools",
        "kubernetes-validate", "kubeflow-trainer-api", "pyyaml",  # the schemas of launch/kubernetes
        "tensorboard",  # what a job writes with, and what reads it
    ],  # fmt: skip
}

setup(
    name="ft_plugins",
    version="0.1.0",
    description="Fault tolerance for large-model pretraining, switched on by flags",
    license="Apache-2.0",
    python_requires=">=3.10,<3.14",
    packages=find_packages(include=["ft_plugins", "ft_plugins.*"]),  # ft_plugins/patches is a link to patches/
    install_requires=[
        "torch>=2.6",
        "numpy",
        "pydantic>=2",
        "xxhash",
        "psutil",
        "msgpack",
        "cryptography>=42",  # AES-GCM, by which connections between nodes are authenticated
        "safetensors>=0.8",
        "llvmlite>=0.45",  # compiles the parity loop
        "typer",
        "rich",
    ],
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": [
            "ft-run = ft_plugins.launcher.first_process:main",
            "ft-plugins = ft_plugins.cli:main",
        ],
        "torchrun.handlers": ["ft_plugins = ft_plugins.launcher.plugin:torchrun_handler"],
    },
)
