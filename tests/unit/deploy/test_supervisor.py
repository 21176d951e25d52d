"""The supervisor of guarded processes, by itself."""

from typing import Any

from hoploom.deploy.guarded import ProcessEvent, SignalName, Supervisor


class Counted:
    """A child that writes down what it is sent, and ends at SIGKILL."""

    label = "child"
    ended = False

    def __init__(self, supervisor: Supervisor) -> None:
        self.sent: list[str] = []
        self._events = supervisor.events

    def send(self, name: "SignalName | str") -> None:
        self.sent.append(name)
        if name == "KILL":
            self._events.put(ProcessEvent("ended", self.label))

    def close(self) -> None:
        self.sent.append("closed")


def test_a_child_counts_as_ended_once_its_end_is_handled_and_is_killed_after_the_wait() -> None:
    handled: list[tuple[str, bool]] = []
    supervisor: Any = Supervisor(lambda event: handled.append((event.what, child.ended)))
    child = supervisor.add(Counted(supervisor))
    supervisor.events.put(ProcessEvent("began", child.label))
    assert not supervisor.until(lambda: not supervisor.living(), 0.01)
    supervisor.stop("TERM", 0.01)
    assert handled == [("began", False), ("ended", True)]
    supervisor.close()
    assert child.sent == ["HEARTBEAT", "TERM", "KILL", "closed"]
