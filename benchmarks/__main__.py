"""`python -m benchmarks NAME [--json] [--quick]`: progress on stderr, the last line on stdout is one JSON object."""

from __future__ import annotations

import argparse
import json
import signal
import sys

from benchmarks import collectives, exchange, launch, reshard, supervise

BENCHMARKS = {
    "collectives": collectives.run,
    "exchange": exchange.run,
    "launch": launch.run,
    "reshard": reshard.run,
    "supervise": supervise.run,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=sorted(BENCHMARKS))
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    parser.add_argument("--quick", action="store_true", help="fewer rounds; for a first look")
    options = parser.parse_args()
    # A terminated benchmark must end what it started: let the context managers run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    metrics = BENCHMARKS[options.name](quick=options.quick)
    if not options.json:
        for name, value in metrics.items():
            print(f"{name:40} {value}")
    print(json.dumps({"bench": options.name, "metrics": metrics}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
