"""Placement: which host gets which process, by free CPU, free memory and number of processes.

A gang stays on one host whenever one can hold it (its ranks then share memory and one store); otherwise it spreads in
order. Called by the queue when a run may start; pure bookkeeping, never talks to a host.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from argosy.config.spec import RoleSpec, RunSpec

# Sums of requests such as 0.1 must not miss a fit by rounding.
SLACK = 1e-9


@dataclass(slots=True)
class Capacity:
    """What one host has and what is taken of it by accounted processes."""

    host: str
    cpus: float
    memory_bytes: int
    used_cpus: float = 0.0
    used_memory: int = 0
    processes: int = 0

    def fits(self, cpus: float, memory: int) -> bool:
        """Whether so much is free."""
        return (
            self.cpus - self.used_cpus + SLACK >= cpus
            and self.memory_bytes - self.used_memory >= memory
        )


@dataclass(slots=True, frozen=True)
class Need:
    """What a run asks for in all."""

    cpus: float
    memory: int

    def describe(self) -> str:
        """In words: `2 CPUs and 1.5 GiB`."""
        cpus = f"{self.cpus:g} CPU{'s' if self.cpus != 1 else ''}"
        return f"{cpus} and {self.memory / (1 << 30):.1f} GiB" if self.memory else cpus


def need_of(spec: RunSpec) -> Need:
    """Sum of the requests of all processes, spares included."""
    cpus, memory = 0.0, 0
    for role in spec.roles.values():
        total = num_processes(role)
        cpus += role.cpu_request * total
        memory += role.memory_request_bytes * total
    return Need(cpus, memory)


def num_processes(role: RoleSpec) -> int:
    """Members and spares."""
    return role.count + (role.spares if role.gang else 0)


class Placement:
    """Hosts ordered by load; places runs and takes them off again."""

    def __init__(self) -> None:
        self.hosts: dict[str, Capacity] = {}
        self._order: list[tuple[float, int, str]] = []
        self.free_cpus = 0.0
        self.total_cpus = 0.0
        self.sizes_version = 0
        """Changes with every host that comes or changes its size."""
        self.free_memory = 0
        self.total_memory = 0

    def set_host(self, host: str, cpus: float, memory_bytes: int) -> None:
        """A host joined, or its size changed."""
        capacity = self.hosts.get(host)
        if capacity is None:
            capacity = self.hosts[host] = Capacity(host, 0.0, 0)
            insort(self._order, self._key(capacity))
        more_cpus, more_memory = cpus - capacity.cpus, memory_bytes - capacity.memory_bytes
        self.total_cpus += more_cpus
        self.free_cpus += more_cpus
        self.total_memory += more_memory
        self.free_memory += more_memory
        self._move(capacity, 0.0, 0, 0, cpus=cpus, memory=memory_bytes)
        self.sizes_version += 1

    def _key(self, capacity: Capacity) -> tuple[float, int, str]:
        return (capacity.used_cpus - capacity.cpus, capacity.processes, capacity.host)

    def _move(
        self,
        capacity: Capacity,
        used: float,
        memory_used: int,
        processes: int,
        *,
        cpus: float | None = None,
        memory: int | None = None,
    ) -> None:
        position = bisect_left(self._order, self._key(capacity))
        del self._order[position]
        capacity.used_cpus += used
        capacity.used_memory += memory_used
        capacity.processes += processes
        capacity.cpus = capacity.cpus if cpus is None else cpus
        capacity.memory_bytes = capacity.memory_bytes if memory is None else memory
        insort(self._order, self._key(capacity))

    def describe(self) -> str:
        """What the hosts have, in words."""
        total = Need(self.total_cpus, self.total_memory).describe()
        if len(self.hosts) == 1:
            return f"the only host has {total}"
        return f"the {len(self.hosts)} hosts have {total} in all"

    def could_ever(self, spec: RunSpec) -> bool:
        """Whether the run would fit if nothing else ran."""
        need = need_of(spec)
        if need.cpus > self.total_cpus + SLACK or need.memory > self.total_memory:
            return False
        if any(
            c.cpus + SLACK >= need.cpus and c.memory_bytes >= need.memory
            for c in self.hosts.values()
        ):
            return True
        empty = {host: [c.cpus, float(c.memory_bytes)] for host, c in self.hosts.items()}
        return (
            _spread(spec, sorted(empty, key=lambda host: (-empty[host][0], host)), empty)
            is not None
        )

    def place(self, spec: RunSpec, *, is_accounted: bool) -> dict[str, list[str]] | None:
        """role -> host of each index; None: there is no room now (only if accounted) or no host."""
        if not self._order:
            return None
        need = need_of(spec)
        if is_accounted and (need.cpus > self.free_cpus + SLACK or need.memory > self.free_memory):
            return None
        whole = self._first(need.cpus, need.memory)
        if whole is None and not is_accounted:
            whole = self._order[0][2]
        if whole is not None:
            return {name: [whole] * num_processes(role) for name, role in spec.roles.items()}
        free = {
            host: [c.cpus - c.used_cpus, float(c.memory_bytes - c.used_memory)]
            for host, c in self.hosts.items()
        }
        return _spread(spec, [host for _load, _processes, host in self._order], free)

    def _first(self, cpus: float, memory: int) -> str | None:
        for _load, _processes, host in self._order:
            capacity = self.hosts[host]
            if capacity.fits(cpus, memory):
                return host
            if capacity.cpus - capacity.used_cpus + SLACK < cpus:
                return None  # the rest has less
        return None

    def take(self, spec: RunSpec, hosts: dict[str, list[str]]) -> None:
        """The run lives there from now on."""
        self._account(spec, hosts, 1)

    def give_back(self, spec: RunSpec, hosts: dict[str, list[str]]) -> None:
        """The run is over."""
        self._account(spec, hosts, -1)

    def _account(self, spec: RunSpec, hosts: dict[str, list[str]], sign: int) -> None:
        sums: dict[str, list[float]] = {}
        for name, places in hosts.items():
            role = spec.roles[name]
            for host in places:
                entry = sums.setdefault(host, [0.0, 0.0, 0.0])
                entry[0] += role.cpu_request
                entry[1] += role.memory_request_bytes
                entry[2] += 1
        for host, (cpus, memory, processes) in sums.items():
            capacity = self.hosts.get(host)
            if capacity is None:
                continue
            self._move(capacity, sign * cpus, sign * int(memory), sign * int(processes))
            self.free_cpus -= sign * cpus
            self.free_memory -= sign * int(memory)


def _spread(
    spec: RunSpec, order: list[str], free: dict[str, list[float]]
) -> dict[str, list[str]] | None:
    """Fill hosts in order with each role's processes; takes what it uses out of `free`."""
    hosts: dict[str, list[str]] = {}
    for name, role in spec.roles.items():
        hosts[name] = []
        position = 0
        for _ in range(num_processes(role)):
            while position < len(order):
                room = free[order[position]]
                if room[0] + SLACK >= role.cpu_request and room[1] >= role.memory_request_bytes:
                    break
                position += 1
            else:
                return None
            room[0] -= role.cpu_request
            room[1] -= role.memory_request_bytes
            hosts[name].append(order[position])
    return hosts
