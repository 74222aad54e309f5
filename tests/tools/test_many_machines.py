#!/usr/bin/env python3
"""./train under mpirun on two hosts: network namespaces with a link between them, and host names of their own.

Prints TAP, as the other tests do. All is skipped where there is no mpirun, or no right to make namespaces.
"""
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "tests"))
import tap  # noqa: E402
from tap import Skip  # noqa: E402
TRAIN = os.path.abspath(os.environ.get("LCE_TRAIN", os.path.join(ROOT, "train")))
STEPS = 4
JOB = (f"--device cpu --model llama-tiny --vocab 1000 --batch 2 --seq-len 64 --total-batch 1024 --steps {STEPS} --eval-every 0 "
       "--sample-every 0 --data README.md").split()
LINK = "lce0"
MPIRUN = "mpirun --allow-run-as-root --oversubscribe --bind-to none -x OMP_NUM_THREADS=1 -x ASAN_OPTIONS".split()
# What ssh would do: mpirun calls it with a host and a command.
AGENT = """#!/bin/sh
host=$1
shift
exec nsenter --net=/run/netns/$host unshare --uts sh -c "hostname $host && $*"
"""


def call(*command, check=True):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ASAN_OPTIONS": "detect_leaks=0"}  # MPI never frees what it starts with
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, cwd=ROOT,
                          stdin=subprocess.DEVNULL, timeout=120)
    assert not check or done.returncode == 0, f"{command}: exit {done.returncode}: {done.stderr}{done.stdout}"
    return done


class Hosts:
    """Two hosts, joined by a link. mpirun runs on the first; MPI takes the link for all that leaves a host."""

    def __init__(self, folder):
        self.names = [f"lce-{os.getpid()}-{i}" for i in (1, 2)]
        self.agent = os.path.join(folder, "agent")
        self.file = os.path.join(folder, "hosts")
        with open(self.agent, "w") as file:
            file.write(AGENT)
        os.chmod(self.agent, 0o755)

    def __enter__(self):
        if not shutil.which("ip"):
            raise Skip("there is no ip (Debian's iproute2)")
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
        done = call("ip", *words, check=False)
        if re.search("not permitted|denied|not supported|Unknown device type", done.stderr):
            raise Skip(f"ip {' '.join(words)}: {done.stderr.strip()}")
        assert done.returncode == 0, done.stderr

    def __exit__(self, *_):
        for name in self.names:
            call("ip", "netns", "del", name, check=False)

    def sent(self):
        return int(call("ip", "netns", "exec", self.names[0], "cat", f"/sys/class/net/{LINK}/statistics/tx_bytes").stdout)

    def run(self, each, *command, check=True):
        with open(self.file, "w") as file:
            file.writelines(f"{name} slots={each}\n" for name in self.names)
        mpirun = [*MPIRUN, "--hostfile", self.file, "--mca", "plm_rsh_agent", self.agent, "--mca", "btl", "tcp,vader,self"]
        for layer in ("btl", "oob"):
            mpirun += ["--mca", f"{layer}_tcp_if_include", LINK]
        return call(self.agent, self.names[0], f"cd {ROOT} && exec", *mpirun, *command, check=check)


def losses(log):
    with open(log) as file:
        return [line["loss"] for line in map(json.loads, file) if line["event"] == "step"]


def test_two_hosts_train_as_one(folder):
    one, two = (os.path.join(folder, name) for name in ("one.jsonl", "two.jsonl"))
    call(*MPIRUN, "-n", 4, TRAIN, *JOB, "--zero", 2, "--log", one)
    with Hosts(folder) as hosts:
        names = hosts.run(2, "hostname").stdout.split()
        assert sorted(names) == sorted(2 * hosts.names), names
        done = hosts.run(2, TRAIN, *JOB, "--zero", 2, "--log", two)
    assert "4, started by mpirun" in done.stdout, done.stdout
    assert len(losses(one)) > 0 and losses(one) == losses(two), (losses(one), losses(two))


def test_the_link_carries_what_the_run_says(folder):
    log = os.path.join(folder, "sent.jsonl")
    for options in ([], ["--zero", 1], ["--zero", 2, "--vocab-parallel", "--lce-chunk", 48]):
        with Hosts(folder) as hosts:
            hosts.run(1, "true")
            start = hosts.sent()
            hosts.run(1, TRAIN, *JOB, *options, "--log", log)
            # The start and the end send some kilobytes, too, and TCP adds headers.
            sent = (hosts.sent() - start) / STEPS
        with open(log) as file:
            said = json.loads(file.readlines()[-1])["wire_bytes_per_step"]
        os.remove(log)
        assert 0.98 * said < sent < 1.05 * said + 50e3, (options, said, sent)


def test_a_step_sends_what_the_formula_says(folder):
    log = os.path.join(folder, "wire.jsonl")
    for zero, tied in ((0, False), (1, False), (2, False), (0, True), (1, True)):
        call(*MPIRUN, "-n", 2, TRAIN, *JOB, "--zero", zero, "--log", log, "--tie-word-embeddings" if tied else "--untie-word-embeddings")
        with open(log) as file:
            lines = [json.loads(line) for line in file]
        os.remove(log)
        start, sent = lines[0], lines[-1]["wire_bytes_per_step"]
        ranks, hidden, micro_batches = start["ranks"], start["hidden_size"], start["total_batch"] // (
            start["ranks"] * start["batch"] * start["seq_len"])
        bytes_all, head = 4 * start["parameters"], 4 * start["vocab_size"] * hidden  # fp32 on the CPU
        bytes_sent = {0: 2 * bytes_all, 1: 2 * bytes_all, 2: micro_batches * (bytes_all - head) + head + bytes_all}[zero]
        tokens = start["batch"] * start["seq_len"] * (4 * hidden + 4) if tied else 0
        formula = (ranks - 1) / ranks * bytes_sent + (ranks - 1) * tokens
        assert abs(sent - formula) < 2e-3 * formula, (zero, tied, formula, sent)


def test_a_host_that_fails_ends_the_job(folder):
    with Hosts(folder) as hosts:
        done = hosts.run(1, "sh", "-c", "'test $OMPI_COMM_WORLD_RANK = 1 && exit 7; exec sleep 100'", check=False)
        assert done.returncode == 7, (done.returncode, done.stderr)


def in_folder(test):
    def run():
        if not shutil.which("mpirun"):
            raise Skip("there is no mpirun")
        if "(Open MPI) 4." not in call("mpirun", "--version").stdout:
            raise Skip("the options are those of Open MPI 4")
        with tempfile.TemporaryDirectory(prefix="lce-hosts-") as folder:
            test(folder)
    return run


sys.exit(tap.run({name: in_folder(test) for name, test in list(globals().items()) if name.startswith("test_")}) > 0)
