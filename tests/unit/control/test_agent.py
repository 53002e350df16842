"""The agent's I/O around its decider, without a keeper or a controller."""

from __future__ import annotations

import asyncio

from argosy.control.agent import Agent
from argosy.control.home import Cluster
from argosy.control.hostside import HostOutputs
from argosy.errors import ProtocolError
from argosy.protocol.messages import Launch, Report


class DeafChannel:
    """A controller that reads nothing."""

    is_closing = False

    def send(self, message):
        raise ProtocolError("the other side does not read what it is sent")

    def close(self):
        self.is_closing = True


def make_launch(directory):
    return Launch(
        attempt="r.train.0.0",
        run="r",
        role="train",
        index=0,
        program={"kind": "exec", "argv": ["true"]},
        python="python",
        env_blob="",
        env={},
        cwd="/",
        umask=0o022,
        limits={},
        affinity=[],
        stdout=f"{directory}/out",
        stderr=f"{directory}/err",
    )


def test_a_controller_that_does_not_read_costs_no_process_its_log(tmp_path):
    async def tell():
        agent = Agent(Cluster(str(tmp_path), str(tmp_path)))
        agent._channel = channel = DeafChannel()
        outputs = HostOutputs(
            to_controller=[Report(host="h", keeper="k")], watch_logs=[make_launch(tmp_path)]
        )
        agent._apply(outputs)
        agent._watch_outputs()
        watched = agent.statistics()["num_files"]
        agent._index.close()
        return channel.is_closing, watched

    assert asyncio.run(tell()) == (True, 2)
