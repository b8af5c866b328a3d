"""The door: which paths it opens, that it passes on what comes, and how it waits for work on a SuperNode's behalf."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest
from flwr.proto.fleet_pb2 import PullMessagesResponse

from tests.docker.programs import program

gate = program("gate")
SuperLink = Callable[[httpx.Request], httpx.Response]


def ask(superlink: SuperLink, path: str, patience: float = 0.0, **request: bytes) -> httpx.Response:
    """A SuperNode's request to the door in front of ``superlink``."""

    async def both() -> httpx.Response:
        inside = httpx.AsyncClient(transport=httpx.MockTransport(superlink), base_url="https://superlink")
        door = httpx.ASGITransport(gate.Gate(inside, patience))
        async with inside, httpx.AsyncClient(transport=door, base_url="https://gate") as outside:
            headers = {"x-signature": "signed", "connection": "close"}
            return await outside.post(path, content=request.get("content", b""), headers=headers)

    return asyncio.run(both())


def nobody(request: httpx.Request) -> httpx.Response:
    """A SuperLink that must not be asked."""
    raise AssertionError(request.url)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run",
        "/v1/runtime/acquire-task",
        "/docs",
        "/",
        "/health?x=1",
        "/healthy",
        "/v1/fleet/",
        "/v1/fleet/../control/list-runs",
        "/v1/fleet/%2e%2e/control/list-runs",
        "/v1/fleet//x",
        "/v1/fleet/pull-messages%0a",
    ],
)
def test_the_door_is_closed(path: str) -> None:
    assert ask(nobody, path).status_code == 404


def test_requests_and_answers_are_passed_on_as_they_are() -> None:
    def superlink(request: httpx.Request) -> httpx.Response:
        assert (request.method, str(request.url)) == ("POST", "https://superlink/v1/fleet/push-object")
        assert request.headers["x-signature"] == "signed"
        assert request.headers["host"] == "superlink"
        assert request.headers.get("connection") != "close"
        return httpx.Response(418, headers={"x-kind": "reply"}, content=request.read()[::-1])

    answer = ask(superlink, "/v1/fleet/push-object", content=b"abc" * 100_000)
    assert (answer.status_code, answer.headers["x-kind"], answer.content) == (418, "reply", b"cba" * 100_000)


def test_a_superlink_that_is_gone_is_a_502() -> None:
    def gone(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    assert ask(gone, "/v1/fleet/get-run").status_code == 502
    assert ask(gone, gate.QUESTION, 1.0).status_code == 502


WORK = PullMessagesResponse()
WORK.messages_list.add()


@pytest.mark.parametrize(
    ("answers", "patience", "asked"),
    [
        pytest.param([PullMessagesResponse(), PullMessagesResponse(), WORK], 10.0, 3, id="work comes"),
        pytest.param([WORK], 10.0, 1, id="work is there"),
        pytest.param([PullMessagesResponse(), WORK], 0.0, 1, id="no patience"),
    ],
)
def test_the_question_for_work_is_repeated(
    answers: list[PullMessagesResponse], patience: float, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "PAUSE", 0.001)
    bodies: list[bytes] = []

    def superlink(request: httpx.Request) -> httpx.Response:
        bodies.append(request.read())
        return httpx.Response(200, content=answers[len(bodies) - 1].SerializeToString())

    answer = ask(superlink, gate.QUESTION, patience, content=b"who I am")
    assert answer.content == answers[asked - 1].SerializeToString()
    assert bodies == [b"who I am"] * asked


def test_a_refusal_is_passed_on_at_once() -> None:
    answer = ask(lambda _: httpx.Response(401, content=b"not an answer"), gate.QUESTION, 10.0)
    assert (answer.status_code, answer.content) == (401, b"not an answer")
