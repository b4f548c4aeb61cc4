"""The engine behind a real ZeroMQ socket: answers, refusals, cancels, and a drain that loses nothing."""

import socket
import threading
from http.client import HTTPConnection

import numpy as np
import pytest
import zmq

from harnessrl.engine.torch_engine import TorchEngine
from harnessrl.errors import RunError
from harnessrl.processes import Child
from harnessrl.service import wire
from harnessrl.train import collect
from harnessrl.train.collect import Services
from harnessrl.train.engine_server import EngineServer


@pytest.fixture
def served(tiny_model):
    """An EngineServer and a client connected to it."""
    server = EngineServer(TorchEngine(tiny_model, max_batch=2))
    client = zmq.Context.instance().socket(zmq.DEALER)
    client.setsockopt(zmq.LINGER, 0)
    client.connect(server.address)
    yield server, client
    client.close()
    server.close()


def ask(client, name, prompt, **sampling):
    client.send_multipart(wire.encode_request(name * 16, prompt, wire.Sampling(**{"max_tokens": 5} | sampling)))


def pump_until(server, client, count):
    """Lend the engine time until `count` replies have come."""
    replies = []
    while len(replies) < count:
        server.pump(100)
        while client.poll(0):
            replies.append(wire.decode_reply(client.recv_multipart()))
    return replies


def test_requests_are_answered_by_id(served):
    server, client = served
    ask(client, b"a", [1, 2], noise=1)
    ask(client, b"b", [3], noise=2)
    replies = {reply.request_id[:1]: reply for reply in pump_until(server, client, 2)}
    expected = server.engine.generate(
        [[1, 2], [3]], [wire.Sampling(max_tokens=5, noise=1), wire.Sampling(max_tokens=5, noise=2)]
    )
    assert [replies[name].ids.tolist() for name in (b"a", b"b")] == [reply.ids.tolist() for reply in expected]
    assert all(np.isfinite(reply.logprobs).all() and len(reply.logprobs) == 5 for reply in replies.values())


def test_what_cannot_be_served_is_refused_in_words(served):
    server, client = served
    ask(client, b"a", [500])
    client.send_multipart([b"b" * 16, b"not json", b""])
    replies = {reply.request_id[:1]: reply for reply in pump_until(server, client, 2)}
    assert {reply.finish_reason for reply in replies.values()} == {"error"}
    assert "0..96" in replies[b"a"].error and "JSON" in replies[b"b"].error
    assert server.engine.open_requests == 0


def test_a_cancel_hands_back_what_was_sampled(served):
    server, client = served
    ask(client, b"a", [1, 2], max_tokens=200)
    while not server.engine.running_requests:
        server.pump(100)
    server.pump(0)
    client.send_multipart(wire.encode_cancel(b"a" * 16))
    (reply,) = pump_until(server, client, 1)
    assert reply.finish_reason == "abort" and 0 < len(reply.ids) < 200
    assert server.engine.open_requests == 0


def test_a_drain_ends_running_requests_and_keeps_queued_ones_for_the_next_version(served):
    server, client = served
    for name in (b"a", b"b", b"c"):  # two slots: the third waits
        ask(client, name, [1, 2], max_tokens=30, noise=name[0])
    while len(server.engine.running_requests) < 2:
        server.pump(100)
    server.drain()
    ended = [wire.decode_reply(client.recv_multipart()) for _ in range(2)]
    assert {reply.request_id[:1] for reply in ended} == {b"a", b"b"}
    assert {(len(reply.ids), reply.policy_version) for reply in ended} == {(30, 0)}
    server.engine.sleep()
    server.engine.wake(("weights",))
    server.engine.load(1)
    server.engine.wake(("kv_cache",))
    (last,) = pump_until(server, client, 1)
    assert (last.request_id[:1], last.policy_version, len(last.ids)) == (b"c", 1, 30)


def test_a_drain_that_takes_too_long_names_the_requests(served):
    server, client = served
    ask(client, b"a", [1, 2], max_tokens=200)
    while not server.engine.running_requests:
        server.pump(100)
    with pytest.raises(RunError, match=(b"a" * 16).hex()):
        server.drain(seconds=0.0)


@pytest.mark.parametrize("ends", [True, False])
def test_a_service_that_resets_connections_is_named(tmp_path, monkeypatch, ends):
    """Twice the listener closes what it accepted; the service ends after that, or goes on without answering."""
    listener = socket.create_server(("127.0.0.1", 0))
    services = object.__new__(Services)
    services.cursor, services.key = 0, "k"
    services.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    services.http = HTTPConnection(services.url.removeprefix("http://"))
    services.children = [Child("tests.train.waits", {}, tmp_path / "service.log")]

    def reset_twice():
        for _ in range(2):
            listener.accept()[0].close()
        if ends:
            services.children[0].process.stdin.close()  # its sign to end; it takes a moment

    if not ends:
        monkeypatch.setattr(collect, "ENDING_SECONDS", 0.1)
    thread = threading.Thread(target=reset_twice)
    thread.start()
    words = "tests.train.waits ended with exit code 0" if ends else f"{services.url} does not answer"
    with pytest.raises(RunError, match=words):
        services.finished()
    thread.join()
    services.children[0].stop()
    listener.close()
