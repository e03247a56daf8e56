"""The tester's ear and hand: hears the phases of a run's processes, and ends one of them inside the phase asked for.

Two ways to strike. "call": the process that is in the phase ends the victim before its n-th call of a function (of
Python's or C's), wherever that falls. "time": the tester ends it some time after the phase has begun, which may be in
the middle of a kernel or a write. A kill counts as landed in a phase only if that had begun and not ended by then.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import threading
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flows.processes import Process, family

Victim = Literal["rank 0", "another rank", "launcher", "flow"]
How = Literal["call", "time"]


@dataclass
class Order:
    """Kill `victim` in `phase`, the `visit`-th time that it comes, at this share of its calls or of its time."""

    phase: str
    victim: Victim
    how: How
    visit: int
    share: float


@dataclass(frozen=True)
class Kill:
    """What became of an order. landed: the phase had begun and not ended; else the phase was over before."""

    phase: str
    victim: str
    how: How
    processes: int
    landed: bool


@dataclass
class _Speaker:
    """A process that reports phases: rank 0 of a segment, or the flow."""

    pid: int
    parent: int
    processes: int
    flow: int  # that it belongs to; 0 where that is gone
    began: dict[str, float] = field(default_factory=dict)  # of each phase's last visit
    left: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    inside: set[str] = field(default_factory=set)


class Watch:
    """Hears the phases; carries out one order at a time."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.address, self.draw = str(folder / "socket"), draw
        self.orders: deque[Order] = deque()
        self.kills: list[Kill] = []
        self.flow = 0  # process id
        self.seen: set[int] = set()  # ids of all that took part
        self.counting = False
        self.calls: dict[str, int] = {}  # of a phase, as last counted
        self.seconds: dict[str, float] = {}
        self._armed: tuple[Order, _Speaker, str, int] | None = None
        self._lock = threading.RLock()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.address)
        self._socket.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            threading.Thread(target=self._hear, args=(connection,), daemon=True).start()

    def _hear(self, connection: socket.socket) -> None:
        speaker: _Speaker | None = None
        for line in connection.makefile("rb"):
            said = json.loads(line)
            with self._lock:
                if said["event"] == "hello":
                    speaker = self._met(said)
                    continue
                assert speaker is not None
                if said["event"] == "enter":
                    connection.sendall(json.dumps(self._enter(speaker, said)).encode() + b"\n")
                elif said["event"] == "leave":
                    self._leave(speaker, said)
                else:
                    self._settle(landed=True)
        with self._lock:
            self._silent(speaker)

    def _met(self, said: dict[str, Any]) -> _Speaker:
        self.seen |= {said["pid"]} | ({said["parent"]} if said["processes"] > 1 else set())
        ours = said["pid"] in {member.pid for member in family(self.flow)}
        return _Speaker(said["pid"], said["parent"], said["processes"], self.flow if ours else 0)

    def _enter(self, speaker: _Speaker, said: dict[str, Any]) -> dict[str, Any]:
        """What the process is told that begins a phase."""
        phase = said["phase"]
        speaker.inside.add(phase)
        speaker.began[phase] = said["time"]
        if self.counting:
            return {"calls": 0}
        if self._armed or not self.orders or self.orders[0].phase != phase or speaker.flow != self.flow:
            return {}
        order = self.orders[0]
        order.visit -= 1
        if order.visit > 0:
            return {}
        victim, pid = self._victim(order, speaker)
        self._armed = (order, speaker, victim, pid)
        if order.how == "call":
            return {"calls": 1 + int(order.share * self.calls.get(phase, 1)), "victim": pid}
        delay = order.share * self.seconds.get(phase, 0.0)
        threading.Thread(
            target=self._strike_after, args=(delay, speaker, phase, said["time"], pid), daemon=True
        ).start()
        return {}

    def _victim(self, order: Order, speaker: _Speaker) -> tuple[str, int]:
        """(who it is, process id). A segment of one process has neither launcher nor another rank."""
        if order.victim == "flow" or order.phase == "publish":
            return "flow", self.flow
        if speaker.processes == 1 or order.victim == "rank 0":
            return "rank 0", speaker.pid
        if order.victim == "launcher":
            return "launcher", speaker.parent
        others = [member.pid for member in family(speaker.parent) if _is_rank(member, speaker)]
        return ("another rank", self.draw.choice(others)) if others else ("rank 0", speaker.pid)

    def _strike_after(self, delay: float, speaker: _Speaker, phase: str, began: float, pid: int) -> None:
        time.sleep(delay)
        struck = time.monotonic()
        reached = True
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            reached = False
        time.sleep(0.1)  # what the process said before may still be on its way
        with self._lock:
            self._settle(landed=reached and not any(began <= left <= struck for left in speaker.left[phase]))

    def _leave(self, speaker: _Speaker, said: dict[str, Any]) -> None:
        phase = said["phase"]
        speaker.inside.discard(phase)
        speaker.left[phase].append(said["time"])
        self.seconds[phase] = said["time"] - speaker.began[phase]
        if said["calls"]:
            self.calls[phase] = said["calls"]
        if self._armed and self._armed[0].how == "call" and self._armed[1:2] == (speaker,):
            if self._armed[0].phase == phase:  # it had fewer calls than were counted before
                self._settle(landed=False)

    def _silent(self, speaker: _Speaker | None) -> None:
        """A process is gone: an order that was to be carried out by it is, if it was the victim itself."""
        if speaker and self._armed and self._armed[0].how == "call" and self._armed[1] is speaker:
            self._settle(landed=self._armed[3] == speaker.pid and self._armed[0].phase in speaker.inside)

    def _settle(self, landed: bool) -> None:
        """Note the kill; an order that missed is given again, by call and at an earlier place."""
        assert self._armed is not None
        order, speaker, victim, _ = self._armed
        self._armed = None
        self.kills.append(Kill(order.phase, victim, order.how, speaker.processes, landed))
        if landed:
            self.orders.popleft()
        else:
            order.how, order.visit, order.share = "call", 1, order.share / 2


def _is_rank(member: Process, speaker: _Speaker) -> bool:
    return member.parent == speaker.parent and member.pid != speaker.pid and "tasks.segment" in member.command
