"""Kubernetes: manifests of an Indexed Job, a JobSet or a TrainJob, in JSON, which ``kubectl`` accepts as YAML.

Each rank is a pod: its rank is ``JOB_COMPLETION_INDEX``, and ``CHOROS_COMPLETIONS`` is the number of ranks. The ranks
connect by sockets to the first pod, and authenticate by a secret from a Secret object. If the job has one node, all
ranks are in one pod, in which ``choros run`` starts them.
"""

from __future__ import annotations

import json
from typing import Any

from choros.errors import InvalidInputError
from choros.launch.schedulers.job import Job
from choros.launch.schedulers.scheduler import Scheduler
from choros.launch.schedulers.shell_script import rank_script

KINDS = ("job", "jobset", "trainjob")
PORT = 29500


def script(job: Job) -> str:
    """Return the manifest of a job.

    Raises:
        InvalidInputError: the job has no image, or its kind is not one of ``KINDS``.

    Example:
        >>> import json
        >>> manifest = json.loads(script(Job(("python", "a.py"), "a", nodes=2, image="me/train:1", kind="jobset")))
        >>> [item["kind"] for item in manifest["items"]]
        ['Secret', 'JobSet']
    """
    _check(job)
    objects = {"job": _job, "jobset": _jobset, "trainjob": _trainjob}[job.kind](job)
    manifest = {"apiVersion": "v1", "kind": "List", "items": [*_secret(job), *objects]}
    return json.dumps(manifest if len(manifest["items"]) > 1 else objects[0], indent=2) + "\n"


def _secret(job: Job) -> list[dict[str, Any]]:
    """Return the Secret object of the ranks, in a list; an empty list for one pod."""
    if pods(job) == 1:
        return []
    meta = {"name": f"{_name(job)}-secret", "labels": {"choros-job": _name(job)}}
    return [{"apiVersion": "v1", "kind": "Secret", "metadata": meta, "stringData": {"secret": job.secret}}]


def _check(job: Job) -> None:
    if not job.image:
        raise InvalidInputError("Kubernetes runs containers: give --image, one with Choros and the script in it")
    if job.kind not in KINDS:
        raise InvalidInputError(f"--kind {job.kind} is none of {', '.join(KINDS)}")


def pods(job: Job) -> int:
    """Return the number of pods: one for each rank, or one in all if the job has one node."""
    return 1 if job.nodes == 1 else job.size


def _name(job: Job) -> str:
    return job.name.lower().replace("_", "-").replace(".", "-").strip("-")[:40].strip("-")


def _escaped(text: str) -> str:
    """Escape text so that a pod gets it unchanged: Kubernetes replaces ``$(NAME)``, and ``$$`` by ``$``."""
    return text.replace("$", "$$")


def _first_pod_name(job: Job) -> str:
    """Return the DNS name of the first rank's pod."""
    name = _name(job)
    return {"job": f"{name}-0.{name}", "jobset": f"{name}-ranks-0-0.{name}", "trainjob": f"{name}-node-0-0.{name}"}[
        job.kind
    ]


def _grace(job: Job) -> str:
    """Return the seconds that ranks have to save their state after SIGTERM: at least 30."""
    return str(max(job.signal, 30))


def _command(job: Job) -> list[str]:
    command = list(job.command)
    if pods(job) == 1 and job.ranks_per_node > 1:
        run = ["choros", "run", "-n", str(job.ranks_per_node), "--threads", str(job.threads), "--grace", _grace(job)]
        python = command[0].rpartition("/")[2].startswith("python")
        command = [command[0], "-m", *run, *command[1:]] if python else [*run, *command]
    return list(map(_escaped, ["bash", "-c", rank_script(job, "pod"), "rank", *command]))


def _environment(job: Job) -> list[dict[str, Any]]:
    variables = {"CHOROS_STOP_SIGNALS": "SIGTERM"}  # Kubernetes sends it before it removes a pod
    if pods(job) > 1:
        variables |= {"CHOROS_COMPLETIONS": str(job.size), "CHOROS_COORDINATOR": f"{_first_pod_name(job)}:{PORT}"}
    plain: list[dict[str, Any]] = [{"name": k, "value": _escaped(v)} for k, v in {**job.exports(), **variables}.items()]
    source = {"secretKeyRef": {"name": f"{_name(job)}-secret", "key": "secret"}}
    return [*plain, {"name": "CHOROS_SECRET", "valueFrom": source}] if pods(job) > 1 else plain


def _resources(job: Job) -> dict[str, Any]:
    ranks = job.ranks_per_node if pods(job) == 1 else 1
    gpus = {"nvidia.com/gpu": str(ranks * job.gpus)} if job.gpus else {}
    return {"requests": {"cpu": str(ranks * job.cores)}, "limits": {"cpu": str(ranks * job.cores), **gpus}}


def _meta(job: Job) -> dict[str, Any]:
    labels = {"labels": {"kueue.x-k8s.io/queue-name": job.queue}} if job.queue else {}
    written = {"annotations": {"choros/written-by": job.written_by}} if job.written_by else {}
    return {"name": _name(job), **labels, **written}


def _indexed(job: Job, subdomain: str = "") -> dict[str, Any]:
    """Return the specification of an Indexed Job."""
    container = {
        "name": "rank",
        "image": job.image,
        "command": _command(job),
        "env": _environment(job),
        "ports": [{"containerPort": PORT}],
        "resources": _resources(job),
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(_grace(job)),
        **({"subdomain": subdomain} if subdomain else {}),
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    return {
        "completions": pods(job),
        "parallelism": pods(job),
        "completionMode": "Indexed",
        "backoffLimit": 0 if job.kind == "jobset" else 3 * pods(job),  # counts pods: one failed rank ends all
        **({"activeDeadlineSeconds": job.time} if job.time else {}),
        "template": {"metadata": {"labels": {"choros-job": _name(job)}}, "spec": pod},
    }


def _job(job: Job) -> list[dict[str, Any]]:
    """Return a Job, and the Service by which its pods find each other; the cluster needs no extension."""
    name = _name(job)
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"clusterIP": "None", "selector": {"choros-job": name}, "publishNotReadyAddresses": True},
    }
    return [service, {"apiVersion": "batch/v1", "kind": "Job", "metadata": _meta(job), "spec": _indexed(job, name)}]


def _jobset(job: Job) -> list[dict[str, Any]]:
    """Return a JobSet: if one pod fails, all start again, at most 3 times."""
    ranks = {"name": "ranks", "replicas": 1, "template": {"spec": _indexed(job)}}
    spec = {"failurePolicy": {"maxRestarts": 3}, "replicatedJobs": [ranks]}
    return [{"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": _meta(job), "spec": spec}]


def _trainjob(job: Job) -> list[dict[str, Any]]:
    """Return a TrainJob of Kubeflow Trainer, with one of the cluster's runtimes."""
    trainer = {
        "numNodes": pods(job),
        "image": job.image,
        "command": _command(job),
        "env": _environment(job),
        "resourcesPerNode": _resources(job),
    }
    limit = {"activeDeadlineSeconds": job.time} if job.time else {}
    spec = {"runtimeRef": {"name": job.runtime}, **limit, "trainer": trainer}
    return [{"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": _meta(job), "spec": spec}]


def job_id(output: str) -> str:
    r"""Return the job's name from the output of ``kubectl apply``, which lists one object per line.

    Example:
        >>> job_id("secret/train-secret\nservice/train\njob.batch/train\n")
        'job.batch/train'
    """
    return next((line for line in output.split() if not line.startswith(("service/", "secret/"))), output.strip())


def _cancel(job: str) -> list[str]:
    name = job.rpartition("/")[2]
    service = [f"service/{name}"] if job.startswith("job.") else []
    return ["kubectl", "delete", "--ignore-not-found", job, *service, f"secret/{name}-secret"]


def _logs(job: str, on: bool) -> list[str]:
    name = job.rpartition("/")[2]
    command = ["kubectl", "logs", "--prefix", "--tail=-1", "--max-log-requests=100"]
    label = "choros-job" if job.startswith("job.") else "jobset.sigs.k8s.io/jobset-name"
    return [*command, *(["--follow"] if on else []), "--selector", f"{label}={name}"]


KUBERNETES = Scheduler(
    name="k8s",
    program="kubectl",
    script=script,
    submit=lambda file: ["kubectl", "apply", "-o", "name", "-f", file],
    job_id=job_id,
    status=lambda job: ["kubectl", "get", job],
    cancel=_cancel,
    follow=_logs,
    silent=("nable to connect to the server", "did you specify the right host or port"),
    ending=".k8s.json",
    named_only=True,
)
