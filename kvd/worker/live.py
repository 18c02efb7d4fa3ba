"""The requests an engine has, and their choices as the scheduler sees them. Engine thread only."""

from __future__ import annotations

from collections.abc import Collection

from kvd.worker.request import Choice, Request
from kvd.worker.scheduler import Job, Stage


class Live:
    """Requests from their arrival until their text has ended."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._choices: dict[str, Choice] = {}

    @property
    def requests(self) -> Collection[Request]:
        return tuple(self._requests.values())

    @property
    def choices(self) -> Collection[Choice]:
        return tuple(self._choices.values())

    def request(self, id: str) -> Request | None:
        return self._requests.get(id)

    def choice(self, id: str) -> Choice:
        return self._choices[id]

    def __contains__(self, choice_id: str) -> bool:
        return choice_id in self._choices

    def jobs(self) -> list[Job]:
        return [choice.job() for choice in self._choices.values()]

    def add(self, choice: Choice) -> None:
        """Its request is known from its first choice on."""
        request = choice.request
        self._requests[request.id] = request
        if choice not in request.choices:
            request.choices.append(choice)
        self._choices[choice.id] = choice

    def remove(self, choice: Choice) -> None:
        """It has ended: answers that are still on their way to it find that out by its stage."""
        choice.stage = Stage.ENDED
        self._choices.pop(choice.id, None)

    def end(self, request: Request) -> None:
        """The request and what is left of its choices."""
        for choice in request.choices:
            self.remove(choice)
        self._requests.pop(request.id, None)
