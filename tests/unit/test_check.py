"""`ft-plugins check`: it says before a job what the job would say when it starts, and ends as that would."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ft_plugins import cli
from ft_plugins.adapters import job_check
from ft_plugins.adapters.job_check import check_megatron
from ft_plugins.adapters.rules import Treatment


@pytest.fixture
def check(monkeypatch, capsys, tmp_path):
    """Run the command in a folder of its own; returns exit status, output and errors."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["ft-plugins", "check", *words])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return int(stop.value.code or 0), *capsys.readouterr()

    return run


def configuration(**settings):
    Path("ds.json").write_text(json.dumps({"train_batch_size": 8, "optimizer": {"type": "AdamW"}, **settings}))
    return "ds.json"


def test_a_configuration_that_is_followed_is_planned_with_its_memory(check):
    file = configuration(zero_optimization={"stage": 1}, ft_plugins={"reft": {"interval": 2}})
    node = ("--ranks", "16", "--ranks-per-node", "8", "--node-memory-gib", "100")
    code, said, errors = check("--deepspeed_config", file, "--parameters", "1e8", *node)
    assert (code, errors) == (0, "")
    assert "followed    ZeRO (zero_optimization.stage 1): each rank captures its shards" in said
    assert "tp 1, pp 1, dp 16, 8 ranks on a node" in said and "would be protected by reft" in said
    code, said, _ = check("--json", "--deepspeed_config", file, "--parameters", "1e8", *node)
    block = json.loads(said)
    assert code == 0 and block["refusal"] == "" and block["systems"] == ["reft"]
    assert block["memory"]["fits"] and block["followed"] == [
        "ZeRO (zero_optimization.stage 1): each rank captures its shards"
    ]


def test_a_configuration_that_would_be_refused_ends_with_the_status_of_the_job(check):
    file = configuration(eigenvalue={"enabled": True}, zero_optimization={"offload_optimizer": {"device": "nvme"}})
    code, said, _ = check("--deepspeed_config", file)
    assert code == 78
    assert (
        "refused     offload to NVMe (zero_optimization.offload_optimizer.device nvme): its state is in files" in said
    )
    last = said.splitlines()[-1]
    assert last.startswith("refused: cannot protect this job: ") and "eigenvalues" in last
    assert last.endswith("Drop the option, or remove the block ft_plugins from the DeepSpeed configuration")
    assert "host memory: the number of parameters is not known before the job; give --parameters" in said


def test_what_only_one_system_cannot_do_is_refused_for_that_one(check):
    file = configuration(zero_optimization={"stage": 1, "offload_optimizer": {"device": "cpu"}})
    assert check("--deepspeed_config", file, "--reft")[0] == 0
    code, said, _ = check("--deepspeed_config", file, "--sync-policy", "edit")
    assert code == 78 and "Drop one of the two" in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--reft-intervall", "3"), "did you mean --reft-interval?"),
        (("--reft-slots", "3"), "has no effect while --reft is off"),
    ],
)
def test_flags_that_ft_run_would_refuse_are_refused_here(check, flags, said):
    code, text, _ = check("--deepspeed_config", configuration(), *flags)
    assert code == 78 and text.startswith("refused: ") and said in text


def test_a_command_is_read_as_ft_run_reads_it(check):
    """Ranks from the launcher's arguments, the configuration from the script's."""
    file = configuration(zero_optimization={"stage": 1})
    Path("train.py").write_text("raise SystemExit('started')")
    nodes = ("--nnodes", "2", "--nproc-per-node", "4")
    job = ("train.py", "--deepspeed_config", file, "--reft")
    memory = ("--parameters", "1e6", "--node-memory-gib", "10")
    code, said, _ = check(*memory, "--", "ft-run", *nodes, "--rdzv-endpoint", "a:29400", *job)
    assert code == 0 and "dp 8, 4 ranks on a node" in said
    code, said, _ = check("--", "ft-run", *nodes, *job)
    assert code == 78 and "a lost node could not be replaced" in said
    code, said, _ = check("--", "torchrun", "missing.py", "--deepspeed_config", file)
    assert code == 78 and "missing.py: no such file" in said


@pytest.mark.parametrize("words", [(), ("--deepspeed_config", "ds.json", "--learning-rate", "3")])
def test_what_cannot_be_checked_is_one_line(check, words):
    configuration()
    code, said, errors = check(*words)
    assert (code, said) == (1, "") and errors.count("\n") == 1 and "after '--'" in errors
    code, said, errors = check("--json", *words)
    assert (code, errors) == (1, "") and "after '--'" in json.loads(said)["error"]


def test_a_job_of_megatron_is_checked_by_what_its_own_parser_has_read(monkeypatch):
    values = argparse.Namespace(
        bf16=True, qk_clip=True, optimizer="sgd", tensor_model_parallel_size=2, pipeline_model_parallel_size=1,
        use_distributed_optimizer=True, overlap_param_gather=True,
    )  # fmt: skip
    read = SimpleNamespace(
        version="9.9", values=values, unknown=("--own",), problem="AssertionError: no", ranks=4, parameters=1e6
    )
    reading = SimpleNamespace(read_arguments=lambda folder, words, ranks: read)
    monkeypatch.setitem(sys.modules, "ft_plugins.adapters.megatron.arguments", reading)
    checked = check_megatron(Path(), ["--bf16"], ("reft", "paft"), 2)
    assert checked.framework == "Megatron-LM 9.9" and "--qk-clip" in checked.refusal
    assert [text.partition(" (")[0] for text in checked.treated(Treatment.FOLLOWED)] == [
        "the distributed optimizer", "bf16", "SGD",
    ]  # fmt: skip
    assert "--overlap-param-gather" in checked.treated(Treatment.INEFFECTIVE)[0]
    assert ["--own" in checked.notes[0], "4 ranks" in checked.notes[1]] == [True, True]
    assert checked.rejected == "Megatron-LM's own validation refuses it on this machine: AssertionError: no"
    assert checked.size == job_check.ModelSize(1e6, ("fp32 master or parameter, and fp32 momentum", 8.0), 2, 1, 4, True)


MISSING = {  # options that Megatron-LM has Transformer Engine for
    "transformer_impl": "transformer_engine", "cuda_graph_impl": "transformer_engine", "fp8": "hybrid", "fp4": "e2m1",
    "use_precision_aware_optimizer": True, "optimizer_cpu_offload": True,
}  # fmt: skip


@pytest.mark.parametrize("installed", [False, True])
def test_what_megatron_itself_has_a_missing_package_for_is_a_warning(monkeypatch, installed):
    """Such a job ended by an error of Megatron-LM's own, and check had foreseen nothing."""
    local = {"transformer_impl": "local", "cuda_graph_impl": "none", "fp8": None, "fp4": None}
    monkeypatch.setattr(job_check, "find_spec", lambda name: installed or None)
    for given in (MISSING, local):
        values = argparse.Namespace(
            tensor_model_parallel_size=1, pipeline_model_parallel_size=1, use_distributed_optimizer=True, **given
        )
        read = SimpleNamespace(version="9.9", values=values, unknown=(), problem="", ranks=1, parameters=None)
        reading = SimpleNamespace(read_arguments=lambda folder, words, ranks, read=read: read)
        monkeypatch.setitem(sys.modules, "ft_plugins.adapters.megatron.arguments", reading)
        checked = check_megatron(Path(), [], ("reft",), 1)
        missing = checked.treated(Treatment.MISSING)
        assert len(missing) == (0 if installed or given is local else len(MISSING)), missing
        assert all("Transformer Engine for it, which is not installed here: install it" in text for text in missing)
        assert "Transformer Engine" not in checked.refusal and not checked.rejected, "the job may run elsewhere"
        assert [f"  missing     {text}" in checked.lines() for text in missing] == [True] * len(missing)


def test_a_version_that_asks_the_errors_of_its_import_for_a_descriptor_is_read():
    """Megatron-LM 0.16 enables faulthandler when it is imported, and check ended by an error of its own."""
    command = (
        "import faulthandler\nfrom ft_plugins.adapters.job_check import quiet\nwith quiet(): faulthandler.enable()"
    )
    subprocess.run([sys.executable, "-c", command], check=True, timeout=120)


@pytest.mark.parametrize("refusal", ["", "cannot protect this job: QK clipping"])
def test_what_the_framework_itself_refuses_is_the_last_line_and_fails_as_its_job_would(check, monkeypatch, refusal):
    size, rejected = job_check.ModelSize(None, None, 1, 1, 1, False), "its own validation refuses it: no"
    checked = job_check.JobCheck("Megatron-LM", (), refusal, (), size, rejected)
    monkeypatch.setattr("ft_plugins.cli.check_command.check_megatron", lambda *given: checked)
    Path("train.py").write_text("def main():\n    from megatron.training import pretrain")
    code, said, _ = check("--", "ft-run", "train.py", "--reft")
    assert (code, said.splitlines()[-1]) == (1, rejected)
    code, said, _ = check("--json", "--", "ft-run", "train.py", "--reft")
    assert (code, json.loads(said)["rejected"]) == (1, rejected)


SCRIPTS = {
    "import torch": "unknown: it imports none of Megatron-LM, DeepSpeed",
    "import near": "a loop of its own over ft_plugins: nothing can be said of it before it starts",
    "from megatron.core import mpu": "a loop of its own over megatron.core",
    "import deepspeed": "give it with --deepspeed_config FILE",
    "from accelerate import Accelerator": "nothing protects a loop over accelerate without DeepSpeed by itself",
    "from lightning import Trainer": "nothing protects PyTorch Lightning without DeepSpeed",
    "from transformers import AutoModel": "unknown",
    "no Python": "cannot be read as Python",
}


@pytest.mark.parametrize("text", SCRIPTS)
def test_a_script_of_which_nothing_can_be_said_is_named_as_what_it_is(check, text):
    Path("near.py").write_text("from ft_plugins import TorchHost")
    Path("train.py").write_text(text)
    code, said, errors = check("--", "ft-run", "train.py", "--reft")
    assert (code, said) == (1, "") and SCRIPTS[text] in errors and "train.py" in errors
    code, said, errors = check("--json", "--", "ft-run", "-m", "train", "--reft")
    assert (code, errors) == (1, "") and SCRIPTS[text] in json.loads(said)["error"]


def test_an_engine_of_lightning_is_refused(check):
    Path("train.py").write_text("from pytorch_lightning import Trainer")
    code, said, _ = check("--", "ft-run", "train.py", "--deepspeed_config", configuration(), "--reft")
    assert code == 78 and "(PyTorch Lightning): it counts epochs" in said.splitlines()[-1]


TRAINED = {
    "": 0,
    "--optim sgd": 0,
    "--optim lomo": "LOMO (--optim lomo): it updates in the backward",
    "--dataloader_persistent_workers": "worker processes that outlive a pass (--dataloader_persistent_workers)",
    "--sync-policy edit --sync-tau 2": "it gathers losses and numbers of tokens over all ranks in each update",
    "--deepspeed ds.json --auto_find_batch_size": "it begins training again",
    "--deepspeed ds.json": 0,
    "--seed one": "the parser of TrainingArguments refuses these arguments",
}


@pytest.mark.parametrize("words", TRAINED)
def test_a_script_with_a_trainer_is_checked_by_the_arguments_that_it_has_read(check, words):
    pytest.importorskip("transformers")
    configuration()
    Path("train.py").write_text("import transformers\ntransformers.Seq2SeqTrainer()")
    code, said, errors = check("--", "ft-run", "train.py", *words.split(), "--own", "3", "--reft")
    if words == "--seed one":
        assert code == 1 and TRAINED[words] in errors
        return
    assert code == (78 if TRAINED[words] else 0), said
    assert "Hugging Face's Trainer" in said.splitlines()[0] and "misspelt: --own" in said
    assert ("over DeepSpeed" in said.splitlines()[0]) == ("ds.json" in words)
    assert (str(TRAINED[words]) if TRAINED[words] else "would be protected by reft") in said.splitlines()[-1]


def test_a_yaml_file_of_a_data_set_does_not_make_a_job_of_megatron_one_of_gpt_neox(check, monkeypatch):
    seen = []

    def checked(folder, words, systems, ranks):
        seen.append(words)
        return job_check.JobCheck("Megatron-LM", (), "", (), job_check.ModelSize(None, None, 1, 1, 1, False))

    monkeypatch.setattr("ft_plugins.cli.check_command.check_megatron", checked)
    Path("train.py").write_text("from megatron.training import pretrain")
    Path("data.yaml").write_text("splits: {train: part}")
    Path("job.yml").write_text("train-micro-batch-size-per-gpu: 4")
    words = ["--data-path", "data.yaml"]
    code, said, _ = check("--", "ft-run", "train.py", *words, "--reft")
    assert (code, said.splitlines()[0], seen) == (0, "Megatron-LM", [words])
    assert check("--", "ft-run", "train.py", "job.yml", "--reft")[1].splitlines()[0] == "DeepSpeed"
    Path("job.yml").write_text("train-micro-batch-size-per-gpu: 4\nlog-gradient-noise-scale: true")
    code, said, _ = check("--", "ft-run", "train.py", "job.yml", "--reft")
    assert code == 78 and "the gradient noise scale (log_gradient_noise_scale): it is a mean of its own" in said


@pytest.mark.parametrize(("stages", "parameters", "said"), [(1, 1e6, False), (2, 1e6, True), (2, None, False)])
def test_stages_that_are_all_taken_for_the_largest_are_named(monkeypatch, stages, parameters, said):
    values = argparse.Namespace(
        optimizer="adam", tensor_model_parallel_size=1, pipeline_model_parallel_size=stages,
        use_distributed_optimizer=False,
    )  # fmt: skip
    read = SimpleNamespace(version="9.9", values=values, unknown=(), problem="", ranks=4, parameters=parameters)
    reading = SimpleNamespace(read_arguments=lambda folder, words, ranks: read)
    monkeypatch.setitem(sys.modules, "ft_plugins.adapters.megatron.arguments", reading)
    notes = check_megatron(Path(), [], ("reft",), 4).notes
    assert any("largest of 2 stages" in note for note in notes) is said
