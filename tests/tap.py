"""Runs tests as programs of the Test Anything Protocol, as tests/run reads them."""
import concurrent.futures
import traceback


class Skip(Exception):
    """Says why a test cannot run here."""


def outcome(test):
    """Calls a test: "ok" and what follows its name, or "not ok" and the traceback."""
    try:
        test()
        return "ok", None
    except Skip as reason:
        return "skip", reason
    except Exception:
        return "not ok", "".join(f"# {line}\n" for line in traceback.format_exc().splitlines())


def run(tests, at_once=1):
    """Calls each of {name: test}, several at once, and prints the results in their order; returns how many failed."""
    print(f"1..{len(tests)}", flush=True)
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        for number, (name, (what, why)) in enumerate(zip(tests, pool.map(outcome, tests.values())), 1):
            failed += what == "not ok"
            if what == "skip":
                print(f"ok {number} # SKIP {name}: {why}", flush=True)
            else:
                print(f"{why or ''}{what} {number} - {name}", flush=True)
    return failed
