"""Runs tests as programs of the Test Anything Protocol, as tests/run reads them."""
import traceback


class Skip(Exception):
    """Why a test cannot run here."""


def run(tests):
    """Calls each of {name: test} and prints what came of it; returns how many failed."""
    print(f"1..{len(tests)}", flush=True)
    failed = 0
    for number, (name, test) in enumerate(tests.items(), 1):
        try:
            test()
            print(f"ok {number} - {name}", flush=True)
        except Skip as reason:
            print(f"ok {number} # SKIP {name}: {reason}", flush=True)
        except Exception:
            failed += 1
            print("".join("# " + line + "\n" for line in traceback.format_exc().splitlines()) +
                  f"not ok {number} - {name}", flush=True)
    return failed
