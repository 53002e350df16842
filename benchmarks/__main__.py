"""`python -m benchmarks NAME [--json] [--quick]`: progress on stderr, the last line on stdout is one JSON object.

`checkpoint`, `exact`, `recover` and `train` also take `--only SECTION,…`, `--trials N` and `--seed N`.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys

from benchmarks import (
    checkpoint,
    collectives,
    exact,
    exchange,
    launch,
    recover,
    reshard,
    supervise,
    train,
)

BENCHMARKS = {
    "checkpoint": checkpoint.run,
    "collectives": collectives.run,
    "exact": exact.run,
    "exchange": exchange.run,
    "launch": launch.run,
    "recover": recover.run,
    "reshard": reshard.run,
    "supervise": supervise.run,
    "train": train.run,
}
CHOOSABLE = ("checkpoint", "exact", "recover", "train")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=sorted(BENCHMARKS))
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    parser.add_argument("--quick", action="store_true", help="fewer rounds; for a first look")
    parser.add_argument("--only", default="", help="sections, with commas between them")
    parser.add_argument("--trials", type=int, help="how many pairs, kills or faults")
    parser.add_argument("--seed", type=int, help="of what is chosen by chance")
    options = parser.parse_args()
    chosen = {}
    if options.name in CHOOSABLE:
        chosen = {"only": options.only, "trials": options.trials, "seed": options.seed}
    elif options.only or options.trials is not None or options.seed is not None:
        parser.error(f"--only, --trials and --seed are for {', '.join(CHOOSABLE)}")
    # A terminated benchmark must end what it started: let the context managers run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    metrics = BENCHMARKS[options.name](quick=options.quick, **chosen)
    if not options.json:
        for name, value in metrics.items():
            print(f"{name:40} {value}")
    print(json.dumps({"bench": options.name, "metrics": metrics}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
