"""Rules on facts to which this machine cannot be brought: many cores, several hosts, a fast network."""

import copy

import numpy as np
import pytest

from choros.cluster import Place
from choros.cluster.hardware.interfaces import interfaces
from choros.comm.single_rank_group import SingleRankGroup
from choros.tools.doctor import limits
from choros.tools.doctor.facts import look
from choros.tools.doctor.findings import Observations
from choros.tools.doctor.measurements import collectives
from choros.tools.doctor.rules import RULES, judge
from choros.tools.doctor.rules.speed import ATTEMPTS

HOST = look(Place()) | {
    "cores": {"usable": [], "physical": 16, "machine": 16, "allotted": [], "numa": [[*range(16)]], "quota": None},
    "threads": {"OMP_NUM_THREADS": "4"},
    "memory": {"total": 64 << 30, "available": 60 << 30, "limit": None, "used": 0, "address_space": None},
    "shm": {"total": 32 << 30, "free": 32 << 30},
    "files": {"soft": 65536, "hard": 65536},
    "backend": "jax (KERAS_BACKEND)",
    "submitted": [],
    "devices": {},
    "gpus": 0,
    "directory": {"path": "/home/me", "inode": 77},
    "interfaces": [
        {"name": "eth0", "up": True, "loopback": False, "speed": 100_000, "addresses": ["10.0.0.1"]},
        {"name": "ib0", "up": False, "loopback": False, "speed": 0, "addresses": []},
        {"name": "lo", "up": True, "loopback": True, "speed": 0, "addresses": ["127.0.0.1"]},
    ],
    "fabrics": ["mlx5_0"],
    "network": {},
    "scheduler": {},
}


def job(hosts=1, each=2, **changes):
    """Ranks on hosts of 16 cores, bound to four each; ``changes`` of rank 1 go into its facts."""
    ranks = []
    for rank in range(hosts * each):
        facts = copy.deepcopy(HOST)
        name = f"n{rank // each}"
        facts |= {"rank": rank, "size": hosts * each, "host": name, "machine": name, "launcher": "openmpi"}
        facts |= {"names": {name: ["10.0.0.1"]}, "engine": "MPI"}
        facts["cores"]["usable"] = [*range(4 * (rank % each), 4 * (rank % each) + 4)]
        ranks.append(facts)
    for name, value in changes.items():
        ranks[1][name] = {**ranks[1][name], **value} if isinstance(value, dict) else value
    return ranks


def found(ranks, **more):
    return judge(Observations(len(ranks), ranks, **more))


def one(ranks, name, at=(1,), kind="error", **more):
    [finding] = [each for each in found(ranks, **more) if each.name == name]
    assert (finding.ranks, finding.kind) == (at, kind), finding
    assert finding.remedy
    return finding.what + " " + finding.remedy


MEASURES = {
    "work": [{"wall": [1.0, 1.1, 1.0, 1.2], "cpu": [1.0] * 4}],
    "clock": [[0.0, 0.0], [-0.5, 0.01], [-0.01, 0.5], [-0.2, 0.2]],
    "engines": {"MPI": {"gather": 1e-5, "sum": {"1000": 1e-5, "100000000": 0.02}}},
    "wrong": [],
}


def test_a_healthy_job_of_two_hosts_has_none():
    end = {"backend": "jax", "difference": 1e-7, "signal": "", "exit": 0, "late": False, "peak": 10**9, "tail": ""}
    assert found(job(2), measures=MEASURES, smoke={rank: [end] for rank in range(4)}) == []


def test_every_rule_keeps_quiet_where_nothing_is_known():
    assert [list(rule(Observations(4, []))) for rule in RULES] == [[] for _ in RULES]


def test_one_thread_where_there_are_many_cores():
    ranks = job(threads={"OMP_NUM_THREADS": "1"}, launcher="torchrun")
    text = one(ranks, "idle-cores", kind="warning")
    assert "OMP_NUM_THREADS=1 (torchrun sets it), but each rank has 4 cores. Export OMP_NUM_THREADS=4" in text


def test_ranks_bound_to_few_of_the_cores_that_their_launcher_has():
    ranks = job()
    for each in ranks:
        each["cores"]["allotted"] = [*range(16)]
    assert "bound to 8 cores in all, of the 16" in one(ranks, "idle-cores", (0, 1), "warning")
    assert found([ranks[0], dict(ranks[1], cores={**ranks[1]["cores"], "usable": [*range(4, 13)]})]) == []
    assert judge(Observations(3, ranks)) == []  # one has not told its cores


def test_a_rank_across_numa_nodes():
    ranks = job()
    for each in ranks:
        each["cores"]["numa"] = [[*range(6)], [*range(6, 16)]]
    assert "NUMA" in one(ranks, "numa", kind="warning")


def test_settings_of_intel_s_openmp_on_common_cores():
    ranks = job(threads={"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "200"})
    assert found(ranks) == []  # each rank has cores of its own
    for each in ranks:
        each["cores"]["usable"] = [*range(8)]
        each["threads"]["KMP_AFFINITY"] = "compact"
    assert "KMP_AFFINITY=compact pins the threads of each rank to the same first cores" in one(
        ranks, "kmp-affinity", (0, 1)
    )
    assert "KMP_BLOCKTIME=200 a thread spins" in one(ranks, "kmp-blocktime", kind="warning")


def test_less_processor_time_than_threads():
    ranks = job(cores={"quota": 2.0})
    text = one(ranks, "quota", (0, 1))
    assert "allows the time of 2 cores, but 8 threads run" in text
    assert "OMP_NUM_THREADS=1" in text
    assert found(job(cores={"quota": 6.0})) == []


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("NCCL_SOCKET_IFNAME", "lo", "names the loopback, which reaches no other host"),
        ("CHOROS_NETWORK", "127.0.0.0/8", "names the loopback, which reaches no other host"),
        ("GLOO_SOCKET_IFNAME", "ib0", "names an interface that is down or has no address"),
        ("UCX_NET_DEVICES", "mlx5_1:1", "names no interface of the host"),
        ("NCCL_SOCKET_IFNAME", "=eth", "names no interface of the host"),
    ],
)
def test_the_wrong_interface(variable, value, problem):
    text = one(job(2, network={variable: value}), "interface")
    assert f"{variable}={value} {problem}" in text
    assert f"Set {variable} to one of eth0" in text


def test_the_right_interface():
    for variable, value in {
        "NCCL_SOCKET_IFNAME": "eth",
        "GLOO_SOCKET_IFNAME": "eth0",
        "UCX_NET_DEVICES": "mlx5_0:1,eth0",
        "FI_TCP_IFACE": "eth0",
        "CHOROS_NETWORK": "10.0.0.0/24",
    }.items():
        assert found(job(2, network={variable: value})) == []
    assert found(job(2, network={"NCCL_SOCKET_IFNAME": "^lo"})) == []
    assert found(job(1, network={"NCCL_SOCKET_IFNAME": "lo"})) == []  # on one host it reaches all


def test_names_that_lead_nowhere_or_back():
    assert "n9 cannot be looked up" in one(job(2, 1, names={"n1": ["10.0.0.1"], "n9": []}), "host-name")
    assert "leads to 127.0.1.1" in one(job(2, 1, names={"n1": ["127.0.1.1"]}), "host-name", kind="warning")


def test_a_name_that_leads_back_is_told_once_and_not_where_an_interface_is_named():
    ranks = job(2)
    for rank, name in enumerate(("n0", "n0", "n1", "n1")):
        ranks[rank]["names"] = {name: [f"127.0.1.{1 + rank // 2}"]}
    text = one(ranks, "host-name", (0, 2), "warning")
    assert text.startswith("Ranks 0, 2 on n0, n1: the host's own name leads to 127.0.1.1, 127.0.1.2, where")
    for each in ranks:
        each["network"] = {"CHOROS_NETWORK": "eth0"}
    one(ranks, "host-name", (0, 2), "warning")  # which JAX does not ask
    for each in ranks:
        each["backend"] = "torch (KERAS_BACKEND)"
    assert found(ranks) == []


def test_what_differs_by_its_ranks_alone_is_told_once():
    ranks = job(2)
    for each in ranks:
        each["names"] = {each["host"]: ["10.0.0.1"], "n9": []}
    text = one(ranks, "host-name", (0, 2))
    assert text.startswith("Ranks 0, 2 on n0, n1: n9 cannot be looked up")


def test_a_network_far_below_its_interfaces():
    slow = {**MEASURES, "links": {"0": 1.2e8, "2": 1.2e8}}
    text = one(job(2), "slow-network", (0, 1, 2, 3), "warning", measures=slow)
    assert "gives 0.96 Gbit/s, where the hosts' fastest interfaces have 100 Gbit/s" in text
    assert found(job(2), measures={**MEASURES, "links": {"0": 1.2e9, "2": 1.2e9}}) == []


def test_a_host_with_a_slow_network():
    slow = {**MEASURES, "links": {"0": 5e9, "2": 5e9, "4": 2e8, "6": 4e9}}
    text = one(job(4), "slow-network", (4,), measures=slow)
    assert "Rank 4 on n2: the network gives 1.6 Gbit/s" in text
    assert "where most hosts have 36 Gbit/s" in text
    assert (
        found(job(2), measures={**MEASURES, "links": {"0": 5e9, "2": 2e8}}) == []
    )  # one of the two, nobody knows which


@pytest.mark.parametrize(
    ("kind", "times", "message"),
    [("wall", [5.0] * 5, "Something else runs"), ("cpu", [1.7] * 4 + [1.0], "Its processor itself is slower")],
)
def test_a_slow_rank(kind, times, message):
    slow = {**MEASURES, "work": [{"wall": [1.0] * 4, "cpu": [1.0] * 4} for _ in range(ATTEMPTS)]}
    for attempt, factor in zip(slow["work"], times, strict=True):
        attempt[kind][1] = factor
    assert message in one(job(2), "slow-rank", kind="error" if kind == "wall" else "warning", measures=slow)
    slow["work"][1][kind][1] = slow["work"][2][kind][1] = 1.0  # now and then
    assert found(job(2), measures=slow) == []


def test_clocks_are_wrong_only_for_sure():
    skewed = {**MEASURES, "clock": [[0.0, 0.0], [-3.2, -3.1], [-4.0, 4.0], [0.0, 9.0]]}
    assert "the clock is at least 3.10 s behind rank 0's" in one(job(2), "clock", kind="warning", measures=skewed)


def test_directories_of_one_name_that_are_not_shared():
    assert "is another one" in one(job(2, directory={"inode": 5}), "directory", kind="warning")


def test_hosts_with_processors_of_two_kinds():
    ranks = job(2)
    for each in ranks:
        each["features"] = ["avx", "avx2"]
    ranks[1]["features"] = ["avx"]
    assert "the processor has no avx2, which the other hosts' have" in one(ranks, "processor", kind="warning")


def test_memory_that_a_control_group_or_the_host_leaves():
    ranks = job()
    for each in ranks:
        each["memory"] |= {"limit": 1 << 30, "used": 1 << 29}
    text = one(ranks, "memory", (0, 1))
    assert "268.4 MB of memory is left for each rank by the control group's limit of 1.1 GB" in text
    ranks = job(memory={"available": 1 << 29})
    assert "on the host, which has 68.7 GB" in one(ranks, "memory", (0, 1))


def test_little_shared_memory():
    ranks = job(shm={"total": 64 << 20, "free": 64 << 20})
    assert "docker --shm-size=2g" in one(ranks, "shared-memory")
    ranks[1]["engine"] = "shared memory"  # of Choros, which is not in /dev/shm
    one(ranks, "shared-memory", kind="warning")


def test_more_files_for_more_ranks():
    assert found(job(2, files={"soft": 512})) == []
    ranks = job(40, 1, files={"soft": 512})
    assert "512 open files are allowed, and a job of this size takes 576" in one(ranks, "open-files")


def test_a_training_that_gives_other_weights_is_named_and_what_follows_is_not():
    good = {"backend": "torch", "difference": 0.0, "signal": "", "exit": 0, "late": False, "peak": 1, "tail": ""}
    wrong = good | {"difference": 0.5}
    assert "differ by 0.5 from numpy's" in one(job(), "training", smoke={0: [good], 1: [wrong]})
    died = good | {"difference": None, "signal": "SIGILL", "exit": -1}
    second = good | {"difference": None, "exit": 1, "tail": "choros.errors.PeerLostError: rank 1 is gone"}
    [finding] = found(job(), smoke={0: [second], 1: [died]})
    assert (finding.name, finding.ranks) == ("sigill", (1,))


def test_gpus_that_the_backend_does_not_see():
    end = {
        "backend": "jax",
        "difference": 0.0,
        "signal": "",
        "exit": 0,
        "late": False,
        "peak": 1,
        "tail": "",
        "gpus": 0,
    }
    text = one(job(gpus=2), "no-gpu", kind="warning", smoke={0: [end], 1: [end]})
    assert "jax sees none of the host's 2 GPUs" in text
    assert found(job(gpus=2), smoke={1: [end | {"gpus": 2}]}) == []
    assert found(job(gpus=2, devices={"CUDA_VISIBLE_DEVICES": ""}), smoke={1: [end]}) == []
    assert found(job(gpus=2), smoke={1: [end | {"backend": "torch"}]}) == []  # which the job does not use


class Lying(SingleRankGroup):
    """A group whose sums are wrong, as a broken network makes them."""

    def sum(self, x):
        return super().sum(x) + np.float32(1)


def test_wrong_sums_are_seen():
    assert collectives(SingleRankGroup(), 1000)[1] == []
    assert collectives(Lying(), 1000)[1] == [0]
    assert "wrong sums" in one(job(2), "sums", measures={**MEASURES, "wrong": [1]})


def written(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_limits_of_control_groups_of_both_versions(tmp_path):
    proc = written(tmp_path / "p2", {"self/cgroup": "0::/a/b\n", "meminfo": "MemTotal: 100 kB\nMemAvailable: 50 kB\n"})
    second = {"a/memory.max": "5000\n", "a/memory.current": "1500", "a/memory.stat": "inactive_file 500\nanon 1000"}
    second |= {"a/b/memory.max": "max", "a/b/cpu.max": "150000 100000", "a/cpu.max": "max 100000"}
    control = written(tmp_path / "c2", second)
    assert limits.memory(control, proc) | {"address_space": None} == {
        "total": 102400,
        "available": 51200,
        "limit": 5000,
        "used": 1000,
        "address_space": None,
    }
    assert limits.quota(control, proc) == 1.5
    proc = written(tmp_path / "p1", {"self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/x\n1:name=systemd:/\n"})
    first = {"memory/x/memory.limit_in_bytes": "7000", "memory/memory.limit_in_bytes": str((1 << 63) - 4096)}
    first |= {"memory/x/memory.usage_in_bytes": "6000", "memory/x/memory.stat": "total_inactive_file 1000"}
    first |= {"cpu,cpuacct/x/cpu.cfs_quota_us": "50000", "cpu,cpuacct/x/cpu.cfs_period_us": "100000"}
    first |= {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000"}
    control = written(tmp_path / "c1", first)
    assert (limits.memory(control, proc)["limit"], limits.memory(control, proc)["used"]) == (7000, 5000)
    assert limits.quota(control, proc) == 0.5


TRIE = """Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 10.1.2.3
        /32 host LOCAL
     |-- 10.1.2.255
        /32 link BROADCAST
     |-- 127.0.0.1
        /32 host LOCAL
"""


def test_interfaces_as_the_kernel_tells_them(tmp_path):
    net = {"fast/flags": "0x1003", "fast/speed": "25000", "lo/flags": "0x9", "off/flags": "0x1002", "off/speed": "-1"}
    routes = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\nfast\t0002010A\t0\t1\t0\t0\t0\t00FFFFFF\n"
    six = "fe800000000000000000000000000001 02 40 20 80 fast\n"
    proc = written(tmp_path / "proc", {"fib_trie": TRIE, "route": routes, "if_inet6": six})
    fast, lo, off = interfaces(written(tmp_path / "net", net), proc)
    assert fast == {
        "name": "fast",
        "up": True,
        "loopback": False,
        "speed": 25000,
        "addresses": ["10.1.2.3", "fe80::1"],
    }
    assert (lo["up"], lo["loopback"], lo["addresses"]) == (True, True, ["127.0.0.1"])
    assert (off["up"], off["speed"], off["addresses"]) == (False, 0, [])
