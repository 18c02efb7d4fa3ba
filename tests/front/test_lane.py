"""No message is left lying in a socket, whatever the edges of its descriptor did."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import zmq

from kvd.front.lane import BURST, Frames, Lane, Sent


class Tricky:
    """A socket whose messages arrive just after it was found empty, and whose descriptor never says so."""

    def __init__(self, arriving: int) -> None:
        self.reading, self.writing = os.pipe()
        self.arriving = arriving
        self.ready: list[Frames] = []

    def getsockopt(self, option: int) -> int:
        if option == zmq.FD:
            return self.reading
        if self.arriving:
            self.arriving -= 1
            self.ready.append([b"late"])
        return zmq.POLLOUT | (zmq.POLLIN if self.ready else 0)

    def recv_multipart(self, flags: int) -> Frames:
        if not self.ready:
            raise zmq.Again
        return self.ready.pop(0)

    def close(self, linger: int) -> None:
        os.close(self.reading)
        os.close(self.writing)


def test_what_arrives_between_the_last_look_and_the_question_for_room_is_read() -> None:
    async def main() -> list[Frames]:
        got: list[Frames] = []
        socket: Any = Tricky(arriving=3)
        lane = Lane(socket, got.append, on_writable=lambda: None)
        await asyncio.sleep(0.05)
        lane.close()
        return got

    assert asyncio.run(main()) == [[b"late"]] * 3


def test_an_error_over_one_message_does_not_leave_the_next_unread() -> None:
    async def main() -> list[Frames]:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        got: list[Frames] = []

        def take(frames: Frames) -> None:
            got.append(frames)
            raise ValueError

        socket: Any = Tricky(arriving=0)
        socket.ready = [[b"1"], [b"2"], [b"3"]]
        lane = Lane(socket, take)
        await asyncio.sleep(0.05)
        lane.close()
        return got

    assert asyncio.run(main()) == [[b"1"], [b"2"], [b"3"]]


def test_a_flood_is_read_in_bursts_between_which_others_get_their_turn() -> None:
    async def main() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        pull.bind("inproc://flood")
        push.connect("inproc://flood")
        for _ in range(3 * BURST):
            push.send(b"x")
        got: list[int] = []
        turns: list[int] = []
        lane = Lane(pull, lambda frames: got.append(1))
        while len(got) < 3 * BURST:
            turns.append(len(got))
            await asyncio.sleep(0)
        assert len(turns) >= 2
        push.send(b"one more, by the descriptor")
        while len(got) < 3 * BURST + 1:
            await asyncio.sleep(0.01)
        lane.close()
        push.close(0)

    asyncio.run(asyncio.wait_for(main(), 10))


def test_a_router_tells_full_gone_and_closed_apart() -> None:
    async def main() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.SNDHWM, 1)
        dealer.setsockopt(zmq.RCVHWM, 1)
        dealer.setsockopt(zmq.IDENTITY, b"peer")
        router.bind("inproc://router")
        dealer.connect("inproc://router")
        lane = Lane(router, lambda frames: None)
        await asyncio.sleep(0.05)
        assert lane.send([b"nobody", b"x"]) is Sent.GONE
        answers = [lane.send([b"peer", b"x"]) for _ in range(5)]
        assert answers[0] is Sent.OK and answers[-1] is Sent.FULL
        lane.close()
        assert lane.send([b"peer", b"x"]) is Sent.GONE
        dealer.close(0)

    asyncio.run(main())
