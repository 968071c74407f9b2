"""What operators ask of a live run, done or refused with a sentence."""

from __future__ import annotations

from dataclasses import replace

from worldline.control.decisions import Limits
from worldline.control.journal import Journal
from worldline.control.member import Member
from worldline.control.requests import Named, named, size_fault
from worldline.control.sensors import Sensors
from worldline.control.signals import DrainRequested, Resize
from worldline.events import EventKind


class Operators:
    """Protocol: `hear` whenever something may have been asked; it returns the limits that hold from now on.
    All else the planner does, as for any other change.
    """

    def __init__(self, sensors: Sensors, journal: Journal) -> None:
        self._sensors = sensors
        self._journal = journal

    def hear(self, limits: Limits) -> Limits:
        requests, self._sensors.requests = self._sensors.requests, []
        for request in requests:
            match request:
                case Resize():
                    limits = self._resize(request, limits)
                case DrainRequested():
                    self._drain(request)
        return limits

    def _resize(self, request: Resize, limits: Limits) -> Limits:
        fault = size_fault(request.workers, limits.min, limits.num_shards)
        if fault:
            request.answer(False, fault)
            return limits
        text = f"{request.workers} instead of {limits.max} workers, asked for by {request.by}"
        self._journal.event(EventKind.RESIZED, text)
        self._journal.resized(request.workers)
        request.answer(True, f"{request.workers} instead of {limits.max} workers from a step border on")
        return replace(limits, max=request.workers)

    def _drain(self, request: DrainRequested) -> None:
        members = self._sensors.membership.members
        there = [_named(member) for member in members.values() if member.node]
        try:
            ids = named(request.target, there)
        except ValueError as error:
            request.answer(False, str(error))
            return
        reason = f"asked by {request.by}"
        if request.target in {*ids, *(str(members[id].rank) for id in ids)}:
            self._sensors.drain(ids, request.lead_s, reason)
        else:
            for node in {worker.node for worker in there if worker.id in ids}:
                self._sensors.cooling = self._sensors.cooling.close(node)
                self._sensors.drain_node(node, request.lead_s, reason)
        request.answer(True, f"{', '.join(ids)} will leave within {request.lead_s:g} s")


def _named(member: Member) -> Named:
    return Named(member.id, member.rank, member.node, member.ip)
