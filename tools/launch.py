#!/usr/bin/env python3
"""Starts a program several times on this machine, as the ranks of one job: what torchrun does on one node.

  tools/launch 8 ./train --model llama-1b ...

Each process gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and a process group of its
own, which the terminal's Ctrl-C does not reach: signals are forwarded to all, once. When one fails, the launcher prints
which and how, ends the others by SIGTERM and two seconds later by SIGKILL, and exits with the status of the one that failed.
"""
import contextlib
import ctypes
import os
import signal
import socket
import sys
import time

MAX_RANKS, SIGTERM_SECONDS, PR_SET_PDEATHSIG = 1024, 2, 1
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
children = {}  # rank by process
prctl = ctypes.CDLL(None).prctl  # loaded before any fork


def signal_group(group, number):
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        os.killpg(group, number)


def signal_all(number):
    for group in children:
        signal_group(group, number)


def free_port():
    """A port of the loopback interface that is free now, for the one socket of a job: NCCL's, where rank 0 listens while the
    ranks connect (mpirun's ranks have none). No other machine reaches it. NCCL does not authenticate who connects to a
    port that it is told, so another user of this machine could take the port, or a rank's place: start the ranks with
    mpirun where that matters, since NCCL's id is then a secret of theirs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return min(probe.getsockname()[1], 65000)


def start(rank, ranks, port, command, ignored):
    parent, child = os.getpid(), os.fork()
    if child:
        with contextlib.suppress(PermissionError):  # here as well: a signal may come before the child has done it
            os.setpgid(child, child)
        children[child] = rank
        return
    os.setpgid(0, 0)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no rank outlives the launcher
    if os.getppid() != parent:
        os._exit(1)
    for number in (*FORWARDED, signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores the last two
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LCE_LAUNCHER="tools/launch")
    os.environ.pop("TORCHELASTIC_RUN_ID", None)  # this is not torchrun, even when run under it
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"lce: cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(127)


def wait_for_all():
    """The status of the first that failed."""
    result, failed_at = 0, 0
    while children:
        process, status = os.waitpid(-1, os.WNOHANG if result else 0)
        if process in children:
            rank = children.pop(process)
            if status:
                signal_group(process, signal.SIGKILL)  # what it started itself
            if status and not result:
                number, failed_at = os.waitstatus_to_exitcode(status), time.monotonic()
                result = number if number > 0 else 128 - number
                how = f"exited with status {number}" if number > 0 else \
                    f"was killed by signal {-number} ({signal.strsignal(-number)})"
                print(f"tools/launch: rank {rank} (process {process}) {how}; the other ranks are ended", file=sys.stderr, flush=True)
                signal_all(signal.SIGTERM)
        elif not process:
            if time.monotonic() - failed_at > SIGTERM_SECONDS:
                signal_all(signal.SIGKILL)
            time.sleep(0.02)
    return result


def main(ranks, *command):
    # Held back until all are there, so that none misses one.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    ignored = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else []  # nohup: the ranks', too
    for number in FORWARDED:
        if number not in ignored:
            signal.signal(number, lambda number, _: signal_all(number))
    port = free_port()
    for rank in range(ranks):
        start(rank, ranks, port, command, ignored)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    return wait_for_all()


if __name__ == "__main__":
    if len(sys.argv) < 3 or not sys.argv[1].isdigit() or not 1 <= int(sys.argv[1]) <= MAX_RANKS:
        print(f"usage: tools/launch RANKS ./train ...   (RANKS processes on this machine, 1 to {MAX_RANKS})", file=sys.stderr)
        sys.exit(64)
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
