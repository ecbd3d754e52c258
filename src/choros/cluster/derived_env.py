"""Variables derived from launchers whose environment does not have one variable for each number."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from choros.errors import InvalidInputError

# Names of derived variables. They contain spaces, so they cannot be real variables; error messages print them.
NODEFILE = "hosts of PBS_NODEFILE"
NODEFILE_SIZE = "PALS_LOCAL_SIZE x hosts of PBS_NODEFILE"
FLUX_LOCAL_SIZE = "FLUX_JOB_SIZE / FLUX_JOB_NNODES"
POD_RANK, POD_RANKS = "ranks of a pod before this one", "ranks of a pod"
TF_RANK = "TF_CONFIG rank"
TF_SIZE = "TF_CONFIG size"
TF_LOCAL_RANK = "TF_CONFIG local"
TF_LOCAL_SIZE = "TF_CONFIG locals"
TORCH_LOCAL_RANK, TORCH_LOCAL_SIZE = "one rank a host", "WORLD_SIZE / nodes"
TORCH_NODE, TORCH_NODES = "RANK as the node", "WORLD_SIZE as the nodes"
TF_NODE, TF_HOSTS, TF_ADDRESS = "TF_CONFIG node", "TF_CONFIG hosts", "TF_CONFIG first"


def of_pals(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the hosts of a PBS job whose slots the PALS ranks fill, and the number of ranks; else nothing.

    Example:
        >>> of_pals({"PALS_LOCAL_SIZE": "2"})
        {}
    """
    try:
        lines = Path(environ.get("PBS_NODEFILE", "")).read_text().split()
        local = int(environ.get("PALS_LOCAL_SIZE") or environ.get("PMI_LOCAL_SIZE") or 0)
    except (OSError, ValueError):
        return {}
    hosts = list(dict.fromkeys(lines))
    if not hosts or len({lines.count(host) for host in hosts}) > 1:
        return {}
    size = local * len(hosts)
    if (environ.get("PMI_SIZE") or str(size)) != str(size):
        return {}  # mpiexec started fewer ranks than the job has slots
    return {NODEFILE: ",".join(hosts), NODEFILE_SIZE: str(size)}


def of_torchrun(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the local rank and size of a process that has RANK and WORLD_SIZE, but lacks local variables.

    Kubeflow's PyTorchJob starts one process in each pod and sets no local rank. Azure ML sets a local rank but no local
    size; its local size is equal on all nodes.

    Example:
        >>> of_torchrun({"RANK": "2", "WORLD_SIZE": "3"})[TORCH_LOCAL_SIZE]
        '1'
        >>> of_torchrun({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "NODE_RANK": "1"})
        {'WORLD_SIZE / nodes': '4'}
    """
    rank, size, local = environ.get("RANK", ""), environ.get("WORLD_SIZE", ""), environ.get("LOCAL_RANK", "")
    if not (rank.isdecimal() and size.isdecimal()) or environ.get("LOCAL_WORLD_SIZE"):
        return {}
    if not local:
        return {TORCH_LOCAL_RANK: "0", TORCH_LOCAL_SIZE: "1", TORCH_NODE: rank, TORCH_NODES: size}
    names = ("GROUP_WORLD_SIZE", "AZUREML_NODE_COUNT", "PET_NNODES")
    nodes = next((environ[name] for name in names if environ.get(name, "").isdecimal()), "")
    node = environ.get("NODE_RANK", "")
    if nodes and int(nodes) and int(size) % int(nodes) == 0:
        return {TORCH_LOCAL_SIZE: str(int(size) // int(nodes))}
    if local.isdecimal() and node.isdecimal() and int(node) and (int(rank) - int(local)) % int(node) == 0:
        return {TORCH_LOCAL_SIZE: str((int(rank) - int(local)) // int(node))}
    return {}


def of_flux(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the number of Flux tasks on each node, if it is equal on all nodes.

    Example:
        >>> of_flux({"FLUX_JOB_SIZE": "6", "FLUX_JOB_NNODES": "3"})
        {'FLUX_JOB_SIZE / FLUX_JOB_NNODES': '2'}
    """
    size, nodes = environ.get("FLUX_JOB_SIZE", ""), environ.get("FLUX_JOB_NNODES", "")
    if not (size.isdecimal() and nodes.isdecimal() and int(nodes)) or int(size) % int(nodes):
        return {}
    return {FLUX_LOCAL_SIZE: str(int(size) // int(nodes))}


def of_pod(environ: Mapping[str, str]) -> dict[str, str]:
    """Return local rank 0 and local size 1: a pod of an Indexed Job is one rank on a separate node."""
    return {POD_RANK: "0", POD_RANKS: "1"}


def of_tf_config(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the place from TF_CONFIG. Ranks are the chief and then the workers; parameter servers have no rank.

    Raises:
        InvalidInputError: TF_CONFIG is not a JSON of this form, or this process is neither chief nor worker.

    Example:
        >>> text = '{"cluster": {"worker": ["a:1", "a:2", "b:1"]}, "task": {"type": "worker", "index": 1}}'
        >>> variables = of_tf_config({"TF_CONFIG": text})
        >>> [variables[name] for name in (TF_RANK, TF_SIZE, TF_LOCAL_RANK, TF_HOSTS)]
        ['1', '3', '1', 'a,b']
    """
    try:
        config: Any = json.loads(environ["TF_CONFIG"])
        cluster, kind, index = config["cluster"], config["task"]["type"], int(config["task"]["index"])
        places = [(role, i) for role in ("chief", "master", "worker") for i in range(len(cluster.get(role, ())))]
        addresses = [str(cluster[role][i]) for role, i in places]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidInputError(
            f"TF_CONFIG gives no rank ({type(error).__name__}: {error}): give it cluster and task, or unset it."
        ) from None
    if (kind, index) not in places:
        ranks = ", ".join(f"{role} {i}" for role, i in places)
        raise InvalidInputError(
            f"TF_CONFIG says that this process is {kind} {index}, and ranks are {ranks}: start the chief and workers; "
            "Choros' algorithms need no parameter server of TensorFlow's."
        )
    rank = places.index((kind, index))
    hosts = [(address.rpartition(":")[0] or address).strip("[]") for address in addresses]  # [::1]:2222
    nodes = list(dict.fromkeys(hosts))
    return {
        TF_RANK: str(rank),
        TF_SIZE: str(len(places)),
        TF_LOCAL_RANK: str(hosts[:rank].count(hosts[rank])),
        TF_LOCAL_SIZE: str(hosts.count(hosts[rank])),
        TF_NODE: str(nodes.index(hosts[rank])),
        TF_HOSTS: ",".join(nodes),
        TF_ADDRESS: addresses[0],
    }
