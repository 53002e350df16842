"""A gang member that re-forms in place, reports steps, and says to the runtime what a file tells it to."""

import json
import os
import sys
import time

import argosy
from argosy.protocol.link import current


def read_orders(directory, rank):
    path = os.path.join(directory, f"say.{rank}")
    try:
        with open(path, encoding="utf-8") as file:
            message = json.load(file)
    except (OSError, ValueError):
        return None
    os.unlink(path)
    return message


def main():
    directory = sys.argv[1]
    gang = argosy.join()
    link = current()
    step = 0
    while True:
        print(f"rank {gang.rank} of {gang.world_size} generation {gang.generation}", flush=True)
        generation = gang.generation
        while gang.generation == generation:
            step += 1
            gang.step(step)
            if gang.coming() is not None:
                gang.take()
            for fault in gang.faults():
                print(f"told {fault.kind} at {fault.step} number {fault.number}", flush=True)
            message = read_orders(directory, gang.rank)
            if message is not None:
                link.say({"generation": gang.generation, **message})
            time.sleep(0.01)


if __name__ == "__main__":
    main()
