"""The answer to a question: memory, a batch, its traffic, its time, the build, and where it breaks.

Everything is an expected value from a few constants; nothing is simulated. docs/scale.md explains the model and holds
it against measurements.
"""

from dataclasses import dataclass

from hoploom.ops.relabel import MAP_BUDGET
from hoploom.scale.batches import BatchSize, Traffic, batch_size, num_parameters, traffic, widths
from hoploom.scale.constants import Constants, default_constants
from hoploom.scale.sizes import SLOT, Item, cache_bytes, host_items, is_hashed
from hoploom.scale.spec import Question
from hoploom.scale.times import Stage, StepTimes, build_stages, opening_seconds, partition_stages, step_times

LIBRARIES = 250e6  # private bytes of a process that has imported torch and Hoploom (benchmarks/RESULTS.md)
HASH_ENTRY = 48  # bytes of a node of the batch in a hashed map, half of whose slots are free
PREFETCH = 2  # batches ahead per loader thread
STATES = 4  # weights, gradients and Adam's two


@dataclass(frozen=True)
class Plan:
    """What was asked, and all that follows from it."""

    question: Question
    constants: Constants
    everywhere: bool  # every host maps the whole topology
    store: tuple[Item, ...]  # of one host
    process: tuple[Item, ...]  # of one trainer process, private
    batch: BatchSize
    traffic: Traffic
    times: StepTimes
    opening: float  # seconds, of the whole store
    build: tuple[Stage, ...]
    partition: tuple[Stage, ...]

    @property
    def uses_defaults(self) -> bool:
        return self.constants == default_constants()

    @property
    def disk(self) -> float:
        """Bytes on a host's disk."""
        return sum(item.disk for item in self.store)

    @property
    def mapped(self) -> float:
        """Bytes of a host's files that batches touch."""
        return sum(item.memory for item in self.store) - self.cached

    @property
    def cached(self) -> float:
        return cache_bytes(self.question)

    @property
    def private(self) -> float:
        """Bytes of a host that no file backs: they must fit."""
        return self.cached + self.question.ranks_per_host * sum(item.memory for item in self.process)

    @property
    def wanted(self) -> float:
        """Bytes of memory with which a host never waits for its disk."""
        return self.mapped + self.private

    @property
    def resident(self) -> float:
        """The share of the mapped files that memory has room for."""
        return max(0.0, min(1.0, (self.question.memory_per_host - self.private) / self.mapped))

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.question.num_seeds // (self.question.batch_size * self.question.ranks))


def plan(question: Question, constants: Constants | None = None) -> Plan:
    """Work a question out.

    >>> print(as_text(plan(Question(nodes=10**10, edges=10**12, hosts=64))))
    """
    constants = constants or default_constants()
    choices = {"auto": (True, False), "everywhere": (True,), "parts": (False,)}[question.topology]
    drafts = [_draft(question, constants, everywhere or question.hosts == 1) for everywhere in choices]
    return next((draft for draft in drafts if draft.wanted <= question.memory_per_host), drafts[-1])


def _draft(question: Question, constants: Constants, everywhere: bool) -> Plan:
    size = batch_size(question, everywhere=everywhere)
    moved = traffic(question, size)
    store = tuple(host_items(question, everywhere=everywhere))
    process = tuple(process_items(question, size))
    mapped = sum(item.memory for item in store) - cache_bytes(question)
    private = cache_bytes(question) + question.ranks_per_host * sum(item.memory for item in process)
    resident = max(0.0, (question.memory_per_host - private) / mapped)
    return Plan(
        question,
        constants,
        everywhere,
        store,
        process,
        size,
        moved,
        step_times(question, constants, size, moved, resident),
        opening_seconds(question, constants),
        tuple(build_stages(question, constants)),
        tuple(partition_stages(question, constants)),
    )


def process_items(question: Question, size: BatchSize) -> list[Item]:
    """What one trainer process adds to its host."""
    slots = (question.largest_type or question.nodes) * SLOT
    one_map = size.nodes * HASH_ENTRY if is_hashed(question) else min(slots, MAP_BUDGET)
    batches = question.workers * PREFETCH + 1  # and the one in the model's hands
    return [
        Item("libraries", 0.0, LIBRARIES),
        Item("node maps", 0.0, question.workers * one_map),
        Item(f"{batches} batches", 0.0, batches * size.bytes),
        Item("model and activations", 0.0, _model_bytes(question, size)),
    ]


def _model_bytes(question: Question, size: BatchSize) -> float:
    """float32: what layers keep for the way back (input of both matrices, output, its gradient) and the states."""
    kept = 0.0
    for layer, (into, out) in enumerate(widths(question)):
        hop = len(size.hops) - 1 - layer
        destinations = size.hops[hop - 1].nodes if hop else size.hops[0].frontier
        kept += destinations * 4 * (2 * into + 2 * out)
    return kept + STATES * 4 * num_parameters(question)
