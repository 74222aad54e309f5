#!/usr/bin/env python3
"""./train under mpirun on two hosts: network namespaces with a link between them. Skipped without the right to make them."""
import os
import pathlib
import re
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from program import MPIRUN, ROOT, TRAIN, column, main, read_log, run  # noqa: E402
from tap import Skip  # noqa: E402

STEPS = 4
JOB = ("--device cpu --model llama-tiny --vocab 1000 --batch 2 --seq-len 64 --total-batch 1024 --eval-every 0 "
       "--sample-every 0 --data README.md").split()
LINK = "lce0"
LAUNCH = [*MPIRUN[:-1], *"-x OMP_NUM_THREADS=1 -x ASAN_OPTIONS".split()]  # then -n and the ranks, or the hosts
# Stands in for ssh: mpirun calls it with a host and a command.
AGENT = """#!/bin/sh
host=$1
shift
exec nsenter --net=/run/netns/$host unshare --uts sh -c "hostname $host && $*"
"""


def call(*command):
    return run(*command, ASAN_OPTIONS="detect_leaks=0", OMP_NUM_THREADS="1")  # MPI never frees what it starts with


class Hosts:
    """Two hosts, joined by a link. mpirun runs on the first; MPI takes the link for all that leaves a host."""

    def __init__(self, folder):
        if not shutil.which("ip"):
            raise Skip("there is no ip (Debian's iproute2)")
        self.names = [f"lce-{os.getpid()}-{i}" for i in (1, 2)]
        self.agent, self.file = folder / "agent", folder / "hosts"
        self.agent.write_text(AGENT)
        self.agent.chmod(0o755)

    def __enter__(self):
        try:
            for name in self.names:
                self.add("netns", "add", name)
            self.add("link", "add", LINK, "netns", self.names[0], "type", "veth", "peer", "name", LINK, "netns", self.names[1])
            for i, name in enumerate(self.names):
                call("ip", "-n", name, "addr", "add", f"10.99.0.{i + 1}/24", "dev", LINK)
                for device in ("lo", LINK):
                    call("ip", "-n", name, "link", "set", device, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    @staticmethod
    def add(*words):
        done = call("ip", *words)
        if re.search("not permitted|denied|not supported|Unknown device type", done.err):
            raise Skip(f"ip {' '.join(words)}: {done.err.strip()}")
        done.ok()

    def __exit__(self, *_):
        for name in self.names:
            call("ip", "netns", "del", name)

    def sent(self):
        return int(call("ip", "netns", "exec", self.names[0], "cat", f"/sys/class/net/{LINK}/statistics/tx_bytes").ok().out)

    def run(self, each, *command):
        self.file.write_text("".join(f"{name} slots={each}\n" for name in self.names))
        how = ["--hostfile", self.file, "--mca", "plm_rsh_agent", self.agent, "--mca", "btl", "tcp,vader,self"]
        for layer in ("btl", "oob"):
            how += ["--mca", f"{layer}_tcp_if_include", LINK]
        return call(self.agent, self.names[0], f"cd {ROOT} && exec", *LAUNCH, *how, *command)


def test_two_hosts_train_as_one(folder):
    with Hosts(folder) as hosts:
        names = hosts.run(2, "hostname").ok().out.split()
        assert sorted(names) == sorted(2 * hosts.names), names
        hosts.run(2, TRAIN, *JOB, "--steps", STEPS, "--zero", 2, "--log", folder / "two").ok("4, started by mpirun")
    call(*LAUNCH, "-n", 4, TRAIN, *JOB, "--steps", STEPS, "--zero", 2, "--log", folder / "one").ok()
    one, two = (column(read_log(folder / name), "loss", "step") for name in ("one", "two"))
    assert len(one) > 0 and one == two, (one, two)


def test_the_link_carries_what_the_run_says(folder):
    for options in (["--zero", 0], [], ["--zero", 2, "--vocab-parallel", "--lce-chunk", 48]):
        with Hosts(folder) as hosts:
            sent = []
            for steps in 0, STEPS:  # the start sends the first weights
                start = hosts.sent()
                hosts.run(1, TRAIN, *JOB, *options, "--steps", steps, "--log", folder / "log").ok()
                sent.append(hosts.sent() - start)
        sent, said = (sent[1] - sent[0]) / STEPS, read_log(folder / "log")[-1]["wire_bytes_per_step"]
        # TCP adds headers.
        assert 0.98 * said < sent < 1.05 * said + 50e3, (options, said, sent)


def test_a_host_that_fails_ends_the_job(folder):
    with Hosts(folder) as hosts:
        done = hosts.run(1, "sh", "-c", "'test $OMPI_COMM_WORLD_RANK = 1 && exit 7; exec sleep 100'")
        assert done.status == 7, done


missing = "there is no mpirun" if not shutil.which("mpirun") else (
    "the options are those of Open MPI 4" if "(Open MPI) 4." not in call("mpirun", "--version").out else "")
if missing:
    print(f"1..1\nok 1 # SKIP {missing}")
else:
    main(globals(), 1)
