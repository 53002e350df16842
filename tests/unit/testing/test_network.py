from __future__ import annotations

from random import Random

from argosy.protocol.messages import Acknowledge, Report
from argosy.testing.clock import VirtualClock
from argosy.testing.network import SimulatedNetwork, Weather


def network(**weather):
    return SimulatedNetwork(VirtualClock(), Random(1), Weather(**weather))


def messages(number):
    return [Acknowledge(keeper="k", number=each) for each in range(number)]


def sent(net, number=200):
    seen = []
    for message in messages(number):
        net.send("h", message, lambda m: seen.append(m.number))
    net.clock.run_until(net.clock.now + 10)
    return seen


def test_fair_weather_delivers_each_message_once_in_any_order():
    seen = sent(network(loss=0.0, doubling=0.0))
    assert sorted(seen) == list(range(200))
    assert seen != sorted(seen)


def test_bad_weather_loses_and_doubles():
    seen = sent(network(loss=0.2, doubling=0.2))
    assert len(set(seen)) < 200
    assert len(seen) > len(set(seen))


def test_nothing_arrives_over_a_cut_link_or_on_a_later_connection():
    net = network(loss=0.0, doubling=0.0)
    net.cut.add("h")
    assert sent(net) == []
    net.cut.clear()
    seen = []
    net.send("h", messages(1)[0], seen.append)
    net.connect("h")
    net.clock.run_until(net.clock.now + 10)
    assert seen == []


def test_messages_survive_their_encoding():
    net = network(loss=0.0, doubling=0.0)
    seen = []
    for _ in range(20):
        net.send("h", Report(host="h", keeper="k"), seen.append)
    net.clock.run_until(net.clock.now + 10)
    assert seen == [Report(host="h", keeper="k")] * 20
