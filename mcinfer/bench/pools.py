"""mcinfer's own ways. Apart from the baselines, whose runtime must not be in the master's process."""

from dataclasses import replace

from mcinfer.bench.way import Arrays, RunningWay, Setup, engine_arguments, why_whole
from mcinfer.config import EngineOptions
from mcinfer.master import Master
from mcinfer.sharding import cut_batch, why_apart
from mcinfer.specs import ModelSpec


class Concurrent(RunningWay):
    """A started master; each request runs whole on a free worker."""

    text = "mcinfer.submit: each request whole on a free worker"
    joins = False

    def __init__(self, setup: Setup) -> None:
        max_batch_size = setup.max_batch_size if self.joins else 1
        self.workers = len(setup.devices)
        given = engine_arguments(setup.engine)
        given["options"]["threads"] = setup.threads
        self._master = Master(
            setup.model,
            setup.devices,
            engine=given["engine"],
            options=EngineOptions(**given["options"]),
            max_batch_size=max_batch_size,
            batch_axes=setup.batch_axes,
            output_axes=setup.output_axes,
        ).start()
        # The split of the first request and all later ones.
        self._split = self._master.split
        if self._split.splits and not self._split.settled and not setup.fixed_batch:
            why = setup.split.reason or "what was learned of the model is not recorded"
            reason = f"no request has shown yet that it may be ({why})"
            self._split = replace(self._split, reason=reason)

    def run(self, inputs: Arrays) -> object:
        return self._master.submit(inputs).result()

    def run_seconds(self) -> tuple[int, float]:
        workers = self._master.statistics().workers
        return sum(w.runs for w in workers), sum(w.busy_seconds for w in workers)

    def close(self) -> None:
        self._master.close()


class SplitBatches(Concurrent):
    """Each batch over all workers."""

    text = "mcinfer.predict: each batch split over all workers"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        one = setup.fixed_batch or 1
        pieces = [batch // one for batch in setup.batches]
        if why := setup.why_uncut(self._split):
            self.text = f"mcinfer.predict: not split: {why}"
            return
        if pieces and max(pieces) < self.workers:
            self.text = f"mcinfer.predict: each batch split over {max(pieces)} workers at most"
        if 1 in pieces:
            self.text += f", those of {'one row' if one == 1 else f'{one} rows'} whole"

    def run(self, inputs: Arrays) -> object:
        return self._master.predict(inputs)


class Batched(Concurrent):
    """Requests that come together run together."""

    text = "mcinfer.submit with dynamic batching"
    joins = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        model = ModelSpec(inputs=self._master.inputs, outputs=self._master.outputs)
        if not self._split.splits:
            why = why_whole(self._split)
        elif setup.fixed_batch:
            why = f"each run takes {setup.fixed_batch} of the rows, no more"
        else:
            shapes = [tuple(n if isinstance(n, int) else 1 for n in s.shape) for s in model.inputs]
            why = why_apart(
                model, cut_batch(model, shapes, 1, self._split), checked=self._split.checked
            )
            if not why and setup.batches and 2 * min(setup.batches) > setup.max_batch_size:
                why = f"two requests have more than {setup.max_batch_size} rows"
        if why:
            self.text = f"mcinfer.submit with dynamic batching, not joined: {why}"
