"""The choice of what to cut: the cheapest way through a graph.

The cost of a way is, in bytes,

    kept + SENT_WEIGHT * (sent + COLLECTIVE_BYTES * collectives)

where *kept* are the weights that one rank keeps (of vectors, a hundredth), and *sent* is what one rank sends
in a run: of a tensor of b bytes, 2 b (n - 1) / n for an AllReduce and b (n - 1) / n for an AllGather over n
ranks, as in a ring (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms"). So a MatMul whose
weights are small beside the activations that it would send stays whole. Slicing is for what does not fit a
device, hence a byte kept counts more than one that is sent.

A beam search goes through the nodes in their order. A state says how each value that is still needed is
there; of states that say the same, the cheapest stays. All states are right, only their costs differ.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from math import prod

from mcinfer.ranks.slicing import rules
from mcinfer.ranks.slicing.graphs import Graph, View, captured, tensor_bytes
from mcinfer.ranks.slicing.placements import (
    PARTIAL,
    REPLICATED,
    Dims,
    Placement,
    Sharded,
    divides,
)
from mcinfer.ranks.slicing.rules import WEIGHTS, Choice, slice_bounds, split_sizes

SENT_WEIGHT = 0.25
"""What a byte that a rank sends in a run costs, where a byte of weights that it keeps costs one."""

COLLECTIVE_BYTES = 16_384
"""What a collective costs besides its bytes, as bytes sent: one AllReduce is better than two AllGathers."""

VECTOR_WEIGHT = 0.01
"""What a byte of a vector that a rank keeps costs: a bias is cut on the way, but is worth no collective."""

_SMALLEST_WEIGHT = 1024
"""Bytes; smaller constants are never the reason to cut a node, and cost nothing if several nodes use them."""

_CUT_COST = 1.0
"""Of taking a part of a whole value, which sends nothing: of equal ways, the one without is taken."""

_WIDTH = 48
"""Of the beam."""

Forms = tuple[Placement, ...]
_WHOLE: Forms = (REPLICATED,)
State = dict[str, Forms]
"""How each value is there that is not only whole."""


@dataclass(frozen=True, slots=True)
class _Path:
    before: "_Path | None"
    choice: Choice


@dataclass(frozen=True, slots=True)
class _Step:
    """One choice for a node, from some forms of its inputs: what it costs, and what it changes."""

    choice: Choice
    cost: float
    forms: tuple[tuple[str, Forms], ...]
    constants: tuple[tuple[str, Placement], ...]


class Costs:
    """Bytes of values, by estimates, and of weights.

    Args:
        graph: The graph.
        ranks: How many parts it is cut in.
    """

    def __init__(self, graph: Graph, ranks: int) -> None:
        self._graph, self.ranks = graph, ranks

    def kept(self, name: str, placement: Placement) -> float:
        """Of an initialiser, in one rank."""
        tensor = self._graph.constants[name]
        is_vector = prod(tensor.dims) == max(tensor.dims, default=1)
        size = tensor_bytes(tensor) * (VECTOR_WEIGHT if is_vector else 1.0)
        return size / self.ranks if isinstance(placement, Sharded) else size

    def collective(self, name: str, placement: Placement) -> float:
        """The cost of making a value whole."""
        times = 1
        if placement == PARTIAL:
            # Terms of narrow floats are sent as float32.
            times = 4 if self._graph.is_narrow(name) else 2
        sent = times * self._graph.values.bytes(name) * (self.ranks - 1) / self.ranks
        return SENT_WEIGHT * (sent + COLLECTIVE_BYTES)


class ChoiceSearch:
    """Finds the choice for each node.

    Args:
        graph: The graph.
        costs: What values and weights cost.
    """

    def __init__(self, graph: Graph, costs: Costs) -> None:
        self._graph, self._costs = graph, costs
        self._ranks = costs.ranks
        self._views = [View(graph, number, self._ranks) for number in range(len(graph.nodes))]
        self._often = {name for name, times in self._times_used().items() if times > 1}
        self._shared = {
            name for name in self._often if tensor_bytes(graph.constants[name]) >= _SMALLEST_WEIGHT
        }
        self._ends = self._last_uses()

    def run(self) -> list[Choice]:
        """The choices on the cheapest way, by node."""
        states: list[tuple[float, State, _Path | None]] = [(0.0, {}, None)]
        for number, view in enumerate(self._views):
            states = self._advance(number, view, states)
        outputs = self._graph.outputs
        whole = [sum(self._whole(name, state) for name in outputs) for _, state, _ in states]
        (_, _, path), _ = min(
            zip(states, whole, strict=True), key=lambda pair: pair[0][0] + pair[1]
        )
        choices = []
        while path is not None:
            choices.append(path.choice)
            path = path.before
        return choices[::-1]

    def _advance(
        self, number: int, view: View, states: list[tuple[float, State, _Path | None]]
    ) -> list[tuple[float, State, _Path | None]]:
        steps: dict[tuple[Forms | None, ...], list[_Step]] = {}
        names = [*view.inputs, *captured(view.node)]
        found: dict[frozenset[tuple[str, Forms]], tuple[float, State, _Path | None]] = {}
        for cost, state, path in states:
            key = tuple(
                None if self._graph.is_constant(name) else state.get(name, _WHOLE) for name in names
            )
            if key not in steps:
                steps[key] = self._steps(view, names, key)
            for step in steps[key]:
                after = state | dict(step.forms)
                total = cost + step.cost
                for name, placement in step.constants:
                    total += self._keep(name, placement, after)
                for name in self._ends[number]:
                    after.pop(name, None)
                same = frozenset(after.items())
                if same not in found or total < found[same][0]:
                    found[same] = (total, after, _Path(path, step.choice))
        if len(found) <= _WIDTH:
            return [*found.values()]
        return sorted(found.values(), key=lambda entry: entry[0])[:_WIDTH]

    def _steps(self, view: View, names: list[str], forms: tuple[Forms | None, ...]) -> list[_Step]:
        choices = [rules.whole(view)]
        choices += rules.partial(view, forms)
        for index, cut in self._cuts(view, forms):
            choice = rules.cut(view, index, cut, forms)
            if isinstance(choice, Choice) and choice not in choices:
                choices.append(choice)
        steps = (self._step(view, names, forms, choice) for choice in choices)
        return [step for step in steps if step is not None]

    def _cuts(self, view: View, forms: tuple[Forms | None, ...]) -> list[tuple[int, Sharded]]:
        """What the choices start from: inputs that are cut already, and weights that could be."""
        cuts = [
            (index, form)
            for index, given in enumerate(forms[: len(view.inputs)])
            for form in given or ()
            if isinstance(form, Sharded)
        ]
        for index in WEIGHTS.get(view.operator, ()):
            if not view.has(index) or not self._graph.is_constant(view.inputs[index]):
                continue
            name = self._graph.source(view.inputs[index], REPLICATED)[0]
            if tensor_bytes(self._graph.constants[name]) < _SMALLEST_WEIGHT:
                continue
            for axis, size in enumerate(view.dims(index)):
                if isinstance(size, int):
                    hints = block_hints(self._graph, view.outputs[0], size)
                    ways = filter(partial(divides, self._ranks), dict.fromkeys([(size,), *hints]))
                    cuts += [(index, Sharded(axis, blocks)) for blocks in ways]
        return cuts

    def _step(
        self, view: View, names: list[str], forms: tuple[Forms | None, ...], choice: Choice
    ) -> _Step | None:
        cost = 0.0
        changed: State = {}
        constants: list[tuple[str, Placement]] = []
        for index, (name, given) in enumerate(zip(names, forms, strict=True)):
            need = choice.needs[index] if index < len(view.inputs) else REPLICATED
            if name and given is None and index not in choice.vectors:
                constants.append(self._graph.source(name, need))
            if not name or given is None:
                continue
            there = changed.get(name, given)
            extra = self._convert(name, there, need)
            if extra is None:
                return None
            if extra:
                cost += extra
                changed[name] = tuple(dict.fromkeys((*there, REPLICATED, need)))
        for name, form in zip(view.outputs, choice.gives, strict=True):
            if name and form != REPLICATED:
                changed[name] = (form,)
        if choice.bias is not None:
            cost += self._costs.collective(view.outputs[0], PARTIAL)
        cost += sum(self._costs.kept(*item) for item in constants if item[0] not in self._often)
        once = tuple(item for item in constants if item[0] in self._shared)
        return _Step(choice, cost, tuple(changed.items()), once)

    def _convert(self, name: str, there: Forms, need: Placement) -> float | None:
        """The cost of another form of a value; None if there is no way."""
        if need in there:
            return 0.0
        if need == PARTIAL:
            return None
        cost = 0.0
        if REPLICATED not in there:
            cost += self._costs.collective(name, there[0])
        return cost if need == REPLICATED else cost + _CUT_COST

    def _keep(self, name: str, placement: Placement, state: State) -> float:
        """The cost of a constant with several uses, unless it is there so already."""
        key = f"constant {name}"
        there = state.get(key, ())
        if placement in there:
            return 0.0
        state[key] = (*there, placement)
        return self._costs.kept(name, placement)

    def _whole(self, name: str, state: State) -> float:
        return self._convert(name, state.get(name, _WHOLE), REPLICATED) or 0.0

    def _times_used(self) -> Counter[str]:
        """How many nodes take each constant, also in other clothes."""
        count: Counter[str] = Counter()
        for name, numbers in self._graph.uses.items():
            if self._graph.is_constant(name):
                count[self._graph.source(name, REPLICATED)[0]] += len(numbers)
        return count

    def _last_uses(self) -> dict[int, list[str]]:
        last: dict[str, int] = {}
        for number, view in enumerate(self._views):
            last.update((name, number) for name in view.outputs if name)
        for name, numbers in self._graph.uses.items():
            if not self._graph.is_constant(name):
                last[name] = max(numbers)
                continue
            key = f"constant {self._graph.source(name, REPLICATED)[0]}"
            last[key] = max(numbers[-1], last.get(key, 0))
        ends: dict[int, list[str]] = defaultdict(list)
        for name, number in last.items():
            if name not in self._graph.outputs:
                ends[number].append(name)
        return ends


_HOPS = 6
_MOST_BLOCKS = 8
_SAME_AXES = frozenset(["Add", "Cast", "Identity", "Mul", "Div", "Sub"])


def block_hints(graph: Graph, name: str, size: int) -> list[tuple[int, ...]]:
    """In what blocks what follows takes the last axis of a value apart: packed weights are cut so."""
    hints: list[tuple[int, ...]] = []
    names = [name]
    for _ in range(_HOPS):
        following = []
        for current in names:
            dims = graph.dims(current)
            if not dims or dims[-1] != size:
                continue
            bounds: set[int] = set()
            for number in graph.uses.get(current, ()):
                node = graph.nodes[number]
                after = graph.dims(node.output[0]) if node.output[0] else None
                if node.op_type in _SAME_AXES and after and len(after) == len(dims):
                    following.append(node.output[0])
                elif node.op_type == "Split" and node.input[0] == current:
                    hints.append(split_sizes(View(graph, number, 1)) or ())
                elif node.op_type == "Slice" and node.input[0] == current:
                    taken = (slice_bounds(View(graph, number, 1)) or {}).get(len(dims) - 1)
                    bounds.update(taken[:2] if taken else ())
                elif node.op_type == "Reshape" and after:
                    hints += _reshape_hints(after, size)
            ends = sorted(bounds | {0, size}) if bounds else []
            hints.append(tuple(end - start for start, end in pairwise(ends)))
        names = following
    return [hint for hint in dict.fromkeys(hints) if len(hint) > 1 and sum(hint) == size]


def _reshape_hints(after: Dims, size: int) -> list[tuple[int, ...]]:
    """Where the last axis becomes several: as many blocks as the first of them has positions."""
    sizes: list[int] = []
    for dim in reversed(after):
        if not isinstance(dim, int) or prod(sizes) >= size:
            break
        sizes.append(dim)
    if prod(sizes) != size:
        return []
    counts = [count for count in accumulate(reversed(sizes), int.__mul__) if count <= _MOST_BLOCKS]
    return [(size // count,) * count for count in counts]
