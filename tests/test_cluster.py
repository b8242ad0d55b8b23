"""`ddp-course doctor --cluster`: each set-up fault between machines gets one clear line."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import Hosts, why_not
from test_hosts import Running, start_all

from ddp_course import cluster
from ddp_course.hosts import Facts, named

WHY_NOT = why_not()
PACKAGE = Path(cluster.__file__).parent
DOCTOR = ("-m", "ddp_course", "doctor", "--cluster")
needs_hosts = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def told(rank=0, **changed) -> Facts:
    like = {
        "rank": rank, "node": rank, "host": f"host{rank + 1}", "address": f"10.0.0.{rank + 1}",
        "interfaces": {"eth0": f"10.0.0.{rank + 1}"}, "port": 1, "backend": "gloo",
        "versions": {"torch": "2.13"}, "digests": {"digits": "abc"},
    }  # fmt: skip
    return Facts(**{**like, **changed})


def test_healthy_facts_make_no_fault():
    facts = [told(0), told(1)]
    findings = [cluster.world(facts), *cluster.versions(facts), *cluster.digests(facts)]
    findings += [cluster.clocks(facts, [0, 0.01]), *cluster.reach(facts, [[], []])]
    assert [finding.level for finding in findings] == ["ok"] * 5
    assert cluster.addresses(facts) == []


@pytest.mark.parametrize(
    "judge, changed, text",
    [
        (cluster.versions, {"versions": {"torch": "2.6"}}, "torch: 2.13 on host1, 2.6 on host2"),
        (cluster.digests, {"digests": {"digits": "x"}}, "digits: abc on host1, x on host2"),
        (cluster.addresses, {"address": "127.0.1.1"}, "host2 offers 127.0.1.1, which only it"),
        (cluster.addresses, {"address": ""}, "host2 has no interface of the name"),
        (lambda facts: [cluster.world(facts)], {"backend": "nccl"}, "backend gloo and nccl"),
        (lambda facts: cluster.reach(facts, [[1], []]), {}, "host1 cannot open a connection to ho"),
    ],
)
def test_each_fault_is_told_once(judge, changed, text):
    (finding,) = judge([told(0), told(1, **changed)])
    assert finding.level == "FAIL" and text in finding.text and finding.fix


def test_clocks_that_differ_are_a_note():
    finding = cluster.clocks([told(0), told(1)], [0.0, -90.0])
    assert finding.level == "note" and "host1 is 90.0 s ahead of that of host2" in finding.text


def test_two_machines_of_one_name_are_told_apart():
    facts = named([told(0, host="gpu"), told(1, host="gpu")])
    assert [fact.host for fact in facts] == ["gpu (node 0)", "gpu (node 1)"]


def test_without_torchrun_it_says_how_to_start_it():
    done = subprocess.run([sys.executable, *DOCTOR], capture_output=True, text=True)
    assert done.returncode == 2 and "start it with torchrun on every machine" in done.stdout


@needs_hosts
def test_healthy_hosts():
    with Hosts(3) as hosts:
        first, *others = start_all(hosts, 3, *DOCTOR)
        output = first.finish()
        assert not any(line.startswith(("ok", "FAIL")) for o in others for line in o.finish())
    assert "FAIL" not in output
    assert "3 ranks on 3 host(s): host1 (1), host2 (1), host3 (1); backend gloo" in output
    for pair in ("host1 ⇄ host2", "host1 ⇄ host3", "host2 ⇄ host3"):
        assert pair in output


def faults(hosts, *env: dict) -> list[str]:
    """Return the faults that rank 0 tells, with these variables on host 1, host 2, …"""
    runs = [
        Running(hosts.torchrun(number, len(env), *DOCTOR, **variables))
        for number, variables in enumerate(env, 1)
    ]
    outputs = [run.finish(code=None) for run in runs]
    assert runs[0].process.returncode == 1
    return [line for output in outputs for line in output.splitlines() if line[:4] == "FAIL"]


@needs_hosts
def test_a_wrong_interface():
    with Hosts(2) as hosts:
        (fault,) = faults(hosts, {}, {"GLOO_SOCKET_IFNAME": "lo"})
    assert "Address" in fault and "host2 offers 127.0.0.1, which only it can reach" in fault


@needs_hosts
def test_a_network_that_does_not_join_them():
    with Hosts(2) as hosts:
        hosts.ip("-n host2 link add other type veth peer name nowhere")
        hosts.ip("-n host2 addr add 10.98.0.1/24 dev other")
        hosts.ip("-n host2 link set other up")
        (fault,) = faults(hosts, {}, {"GLOO_SOCKET_IFNAME": "other"})
    assert "Reach" in fault and "host1 cannot open a connection to host2 (10.98.0.1)" in fault


@needs_hosts
def test_another_version_of_the_course(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "ddp_course")
    (tmp_path / "ddp_course" / "data.py").open("a").write("\nTRAIN_DIGITS = 1000\n")
    with Hosts(2) as hosts:
        code, data = faults(hosts, {}, {"PYTHONPATH": str(tmp_path)})
    assert "Versions" in code and "the course's code:" in code and "on host2" in code
    assert "Data" in data and "digits:" in data and "on host2" in data
