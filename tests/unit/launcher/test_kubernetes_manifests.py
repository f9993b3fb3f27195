"""The manifests of launch/kubernetes: by the schemas of Kubernetes and Kubeflow, and by ft-run's own command line."""

import re
from collections.abc import Mapping
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models

from ft_plugins.errors import EXIT_DRAINED, EXIT_REFUSED, ConfigError
from ft_plugins.launcher import command

FOLDER = Path(__file__).parents[3] / "launch/kubernetes"
OLDEST, NEWEST = "1.31", kubernetes_validate.latest_version()
NODES, RANKS, GRACE_MARGIN = 4, 8, 10  # seconds for the container to end after ft-run


def objects(name):
    return [each for each in yaml.safe_load_all((FOLDER / name).read_text()) if each]


def job_spec(name):
    """The spec of the Job that a JobSet makes."""
    (first, *_) = objects(name)
    jobs = first["spec"] if first["kind"] == "JobSet" else first["spec"]["template"]["spec"]
    return dict(jobs["replicatedJobs"][0]["template"]["spec"])


def template(name):
    if name == "pytorchjob.yaml":
        return dict(objects(name)[0]["spec"]["pytorchReplicaSpecs"]["Worker"]["template"])
    return dict(job_spec(name)["template"])


def environment(name):
    """What the controller of each kind adds to the container's environment, and what the manifest itself sets."""
    if name == "jobset.yaml":
        return {}
    if name == "pytorchjob.yaml":
        return {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "my-job-worker-0:29400", "PET_NNODES": f"{NODES}"}
    trainer = objects(name)[1]["spec"]["trainer"]
    return {
        "JOB": "my-job", "PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
        "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "my-job-node-0-0.my-job", "PET_MASTER_PORT": "29500",
    }  # fmt: skip


def words(name):
    """The command line of the container after `ft-run`, with variables as the kubelet replaces them; the variables that
    `env` takes from it."""
    container = template(name)["spec"]["containers"][0]
    arguments = objects(name)[1]["spec"]["trainer"]["args"] if name == "trainer.yaml" else container["args"]
    variables = environment(name)
    line = [re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], word) for word in container["command"]]
    before, after = line[: line.index("ft-run")], line[line.index("ft-run") + 1 :]
    assert all(word == "env" or word.startswith("--unset=") for word in before)
    return [*after, *arguments], {word.removeprefix("--unset=") for word in before[1:]}


def planned(name, folder, monkeypatch, variables):
    """The plan of the container's command with these variables set."""
    line, _ = words(name)
    (folder / "pretrain_gpt.py").write_text("")
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    return command.plan(line, 1000, str(folder), "my-job-node-0-1", variables)


KINDS = ["jobset.yaml", "trainer.yaml", "pytorchjob.yaml"]


# ---- schemas


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("name", KINDS)
def test_kubernetes_knows_every_field_of_the_pods(name, version):
    pod = template(name)
    kubernetes_validate.validate(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", **pod["metadata"]}, "spec": pod["spec"]},
        version, strict=True,
    )  # fmt: skip


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("name", ["jobset.yaml", "trainer.yaml"])
def test_kubernetes_knows_every_field_of_the_job_that_a_jobset_makes(name, version):
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, "spec": job_spec(name)}
    kubernetes_validate.validate(job, version, strict=True)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_kubernetes_knows_every_field_of_the_network_policy(version):
    (policy,) = objects("network-policy.yaml")
    kubernetes_validate.validate(policy, version, strict=True)


def unknown(given, read, path=""):
    """The paths of what was given and not read again."""
    if isinstance(given, Mapping):
        known = read if isinstance(read, Mapping) else {}
        for key, value in given.items():
            yield from unknown(value, known[key], f"{path}.{key}") if key in known else [f"{path}.{key}"]
    elif isinstance(given, list):
        for at, value in enumerate(given):
            yield from unknown(value, read[at] if isinstance(read, list) else None, f"{path}[{at}]")
    elif given != read:
        yield path


MODELS = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "ClusterTrainingRuntime": models.TrainerV1alpha1ClusterTrainingRuntime,
    "TrainJob": models.TrainerV1alpha1TrainJob,
}


@pytest.mark.parametrize(("name", "kinds"), [("jobset.yaml", 1), ("trainer.yaml", 2)])
def test_jobset_and_trainer_know_every_field_of_theirs(name, kinds):
    found = objects(name)
    assert len(found) == kinds
    for each in found:
        assert not list(unknown(each, MODELS[each["kind"]].from_dict(each).to_dict()))


def test_a_misspelt_field_of_a_jobset_or_a_pod_is_noticed():
    (jobset,) = objects("jobset.yaml")
    jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["backofLimit"] = 3
    jobset["spec"]["network"]["publishNotReady"] = True
    lost = set(unknown(jobset, MODELS["JobSet"].from_dict(jobset).to_dict()))
    assert lost == {".spec.network.publishNotReady", ".spec.replicatedJobs[0].template.spec.backofLimit"}
    pod = template("jobset.yaml")["spec"]
    pod["containers"][0]["readynessProbe"] = {}
    whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": pod}
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(whole, NEWEST, strict=True)


def test_a_pytorchjob_has_only_the_fields_that_its_controller_reads():
    """No package holds its schema: these are the names of `kubeflow.org/v1`."""
    (job,) = objects("pytorchjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert set(job["spec"]) <= {"elasticPolicy", "runPolicy", "pytorchReplicaSpecs", "nprocPerNode"}
    assert job["spec"]["elasticPolicy"] == {"rdzvBackend": "c10d"}, "a Master, or maxRestarts, would change what is set"
    assert set(job["spec"]["runPolicy"]) <= {"cleanPodPolicy"}
    (worker,) = job["spec"]["pytorchReplicaSpecs"].values()
    assert set(worker) == {"replicas", "restartPolicy", "template"}
    assert worker["replicas"] == NODES and worker["restartPolicy"] == "ExitCode"
    assert EXIT_DRAINED >= 128, "below, a drained pod would fail the job"
    (container,) = worker["template"]["spec"]["containers"]
    assert container["name"] == "pytorch" and container["ports"][0]["name"] == "pytorchjob-port"


# ---- ft-run


@pytest.mark.parametrize("name", KINDS)
def test_ft_run_accepts_the_command_line_of_each_manifest(name, tmp_path, monkeypatch):
    _, unset = words(name)
    variables = {key: value for key, value in environment(name).items() if key not in unset}
    found = planned(name, tmp_path, monkeypatch, variables)
    assert found.protected and not found.bounded
    assert (found.torch.nnodes, found.torch.nproc_per_node) == (str(NODES), str(RANKS))
    assert found.torch.rdzv_backend is None, "ft-run's own rendezvous, which replaces nodes"
    assert found.job == "my-job" and found.node == "my-job-node-0-1", "the host name is that of the pod's index"
    spec = template(name)["spec"]
    assert found.config.grace_seconds <= spec["terminationGracePeriodSeconds"] - GRACE_MARGIN
    container = spec["containers"][0]
    mounts = {each["mountPath"] for each in container["volumeMounts"]}
    assert str(Path(found.config.secret_file or "").parent) in mounts
    ports = {each["containerPort"] for each in container["ports"]}
    assert found.config.metrics_place is not None and found.config.metrics_place[1] in ports
    hosts, numbers = zip(*(each.split(":") for each in found.torch.rdzv_endpoint.split(",")), strict=True)
    assert len(set(hosts)) == 2 and {int(number) for number in numbers} <= ports
    annotations = template(name)["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(found.config.metrics_place[1])


@pytest.mark.parametrize(("name", "kept"), [("trainer.yaml", "PET_NODE_RANK"), ("pytorchjob.yaml", "PET_RDZV_BACKEND")])
def test_what_env_takes_away_would_fix_ranks_or_choose_torchs_rendezvous(name, kept, tmp_path, monkeypatch):
    _, unset = words(name)
    assert kept in unset
    variables = {key: value for key, value in environment(name).items() if key not in unset or key == kept}
    try:
        assert planned(name, tmp_path, monkeypatch, variables).torch.rdzv_backend == "c10d"
    except ConfigError as refused:
        assert "--node-rank" in str(refused) and name == "trainer.yaml"


def test_the_endpoints_are_the_names_that_pods_have_in_dns(tmp_path):
    (jobset,) = objects("jobset.yaml")
    job, replicated = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"][0]["name"]
    assert jobset["spec"]["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    wanted = ",".join(f"{job}-{replicated}-0-{index}.{job}:29400" for index in (0, 1))
    for name in ("jobset.yaml", "trainer.yaml"):
        assert f"--rdzv-endpoint={wanted}" in words(name)[0]


# ---- what a job needs of its pods


@pytest.mark.parametrize("name", ["jobset.yaml", "trainer.yaml"])
def test_a_refused_job_fails_and_an_evicted_pod_is_not_counted(name):
    spec = job_spec(name)
    container = spec["template"]["spec"]["containers"][0]["name"]
    by_action = [(rule["action"], rule) for rule in spec["podFailurePolicy"]["rules"]]
    assert by_action[0][0] == "Ignore" and by_action[0][1]["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert all(rule["onExitCodes"]["containerName"] == container for _, rule in by_action[1:])
    codes = {action: rule["onExitCodes"]["values"] for action, rule in by_action[1:]}
    assert EXIT_REFUSED in codes["FailJob"] and codes["Ignore"] == [143, EXIT_DRAINED]
    assert not {1, 137} & {code for each in codes.values() for code in each}, "these are counted"
    assert spec["completionMode"] == "Indexed" and spec["template"]["spec"]["restartPolicy"] == "Never"


@pytest.mark.parametrize("name", KINDS)
def test_pods_are_locked_and_every_place_that_is_written_is_a_volume(name):
    spec = template(name)["spec"]
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in [*spec["containers"], *spec["initContainers"]]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
    (container,) = spec["containers"]
    written = {each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")}
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert {"/dev/shm", "/tmp", variables["XDG_RUNTIME_DIR"], variables["HOME"]} <= written
    assert not {"livenessProbe", "startupProbe"} & set(container), "they kill, and with the pod goes its memory"


@pytest.mark.parametrize("name", KINDS)
def test_the_secret_is_in_no_variable_and_ft_run_reads_a_copy_of_its_own(name):
    spec = template(name)["spec"]
    volumes = {each["name"]: each for each in spec["volumes"]}
    (container,), (copy,) = spec["containers"], spec["initContainers"]
    assert not [each for each in (*container["env"], *copy.get("env", [])) if "secretKeyRef" in str(each)]
    assert "secret" not in {each["name"] for each in container["volumeMounts"]}, "only the one that copies it reads it"
    assert volumes["secret"]["secret"]["defaultMode"] == 0o440, "fsGroup makes 0400 this in any case"
    assert "umask 077" in copy["command"][-1]
    assert volumes["own-secret"]["emptyDir"]["medium"] == "Memory" == volumes["shm"]["emptyDir"]["medium"]


@pytest.mark.parametrize("name", KINDS)
def test_memory_of_the_snapshots_is_within_that_of_the_container(name):
    spec = template(name)["spec"]
    shm = next(each for each in spec["volumes"] if each["name"] == "shm")["emptyDir"]["sizeLimit"]
    resources = spec["containers"][0]["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    assert int(shm.removesuffix("Gi")) < int(resources["limits"]["memory"].removesuffix("Gi"))


@pytest.mark.parametrize("name", KINDS)
def test_the_network_policy_opens_the_ports_of_the_pods(name):
    (policy,) = objects("network-policy.yaml")
    inside, scrape = (list(rule["ports"]) for rule in policy["spec"]["ingress"])
    spec = template(name)["spec"]
    (sysctl,) = spec["securityContext"]["sysctls"]
    first, last = map(int, sysctl["value"].split())
    ports = [each["containerPort"] for each in spec["containers"][0]["ports"]]
    assert inside == [{"protocol": "TCP", "port": ports[0]}, {"protocol": "TCP", "port": first, "endPort": last}]
    assert scrape == [{"protocol": "TCP", "port": ports[1]}]


def test_a_train_job_has_spares_with_more_nodes_than_its_arguments_say(tmp_path, monkeypatch):
    job = job_spec("trainer.yaml")
    job["successPolicy"] = {"rules": [{"succeededCount": NODES}]}
    for version in (OLDEST, NEWEST):
        whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, "spec": job}
        kubernetes_validate.validate(whole, version, strict=True)
    line, unset = words("trainer.yaml")
    variables = {key: value for key, value in environment("trainer.yaml").items() if key not in unset}
    variables["PET_NNODES"] = str(NODES + 1)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    at = line.index("pretrain_gpt.py")
    (tmp_path / "pretrain_gpt.py").write_text("")
    found = command.plan(
        [*line[:at], f"--nnodes={NODES}", *line[at:]], 1000, str(tmp_path), "my-job-node-0-1", variables
    )
    assert found.torch.nnodes == str(NODES)
