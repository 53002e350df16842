import asyncio
import struct

import msgspec
import pytest

from argosy.errors import ProtocolError
from argosy.protocol.channel import Refused, agent_channel, controller_channel
from argosy.protocol.messages import MOST_FRAME_BYTES, PROTOCOL_VERSION, Acknowledge, Hello, Report

HELLO = Hello(
    version=PROTOCOL_VERSION, host="h", keeper="k", pid=1, cpus=2, memory_bytes=3, alive=["a"]
)


def with_pair(test):
    """Run a test with both ends of a real connection: the raw client streams and the controller's channel."""

    def run(tmp_path):
        async def body():
            accepted = asyncio.get_running_loop().create_future()

            async def accept(reader, writer):
                accepted.set_result(controller_channel(reader, writer))

            server = await asyncio.start_unix_server(accept, str(tmp_path / "s"))
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
            channel = await accepted
            try:
                await test(reader, writer, channel)
            finally:
                writer.close()
                channel.close()
                server.close()

        asyncio.run(asyncio.wait_for(body(), 20))

    run.__name__ = test.__name__
    return run


def frame(body):
    return struct.pack(">I", len(body)) + body


@with_pair
async def test_messages_arrive_typed_and_in_order(reader, writer, channel):
    agent = agent_channel(reader, writer)
    report = Report(host="h", keeper="k", wants_version=4)
    agent.send(HELLO)
    agent.send(report)
    assert await channel.receive_first() == HELLO
    assert await channel.receive() == report
    channel.send(Acknowledge(keeper="k", number=9))
    assert await agent.receive() == Acknowledge(keeper="k", number=9)
    writer.close()
    assert await channel.receive() is None


@with_pair
async def test_another_version_is_named_even_if_its_fields_differ(reader, writer, channel):
    body = msgspec.json.encode({"type": "hello", "version": 99, "shape": "new"})
    writer.write(frame(body))
    with pytest.raises(ProtocolError, match=f"version 99, this one version {PROTOCOL_VERSION}"):
        await channel.receive_first()


@pytest.mark.parametrize(
    "body", [b"\xff\xfe garbage", b"[]", b"{}", b'{"type":"nonsense"}', b'{"type":"report"}', b""]
)
def test_garbage_in_a_frame_is_an_error(tmp_path, body):
    @with_pair
    async def check(reader, writer, channel):
        writer.write(frame(body))
        with pytest.raises(ProtocolError, match="could not be read"):
            await channel.receive()

    check(tmp_path)


@with_pair
async def test_an_oversized_frame_is_refused_before_it_is_read(reader, writer, channel):
    writer.write(struct.pack(">I", MOST_FRAME_BYTES + 1))
    with pytest.raises(ProtocolError, match="over the limit"):
        await channel.receive()


@pytest.mark.parametrize("cut", [2, 4, 9])
def test_half_a_frame_is_an_error(tmp_path, cut):
    @with_pair
    async def check(reader, writer, channel):
        writer.write(frame(msgspec.json.encode(HELLO))[:cut])
        writer.close()
        with pytest.raises(ProtocolError, match="ended after"):
            await channel.receive()

    check(tmp_path)


@with_pair
async def test_the_refused_side_is_told_why(reader, writer, channel):
    agent = agent_channel(reader, writer)
    channel.refuse(ProtocolError("no", fix="do"))
    assert await agent.receive() == Refused(what="no", fix="do")
    assert await agent.receive() is None


@with_pair
async def test_a_message_over_the_limit_is_not_sent(reader, writer, channel):
    with pytest.raises(ProtocolError, match="over the limit"):
        channel.send(Acknowledge(keeper="k" * (MOST_FRAME_BYTES + 1), number=1))
