"""`RunnerConfig`: how a runner is to be made; and the master that comes of it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mcinfer.config import Limits, Timeouts, check_count, check_seconds
from mcinfer.master import Master
from mcinfer.mslite._arguments import check_context
from mcinfer.mslite._checks import check_type
from mcinfer.mslite._configuration import Sections
from mcinfer.mslite._targets import Attempt, count_workers, pinned_cores
from mcinfer.mslite.context import Context, Option, ParallelOptions


class RunnerConfig(ParallelOptions):
    """How a runner is to be made: the parallel part of a context, and what MindSpore Lite has not.

    What is not given here is taken from ``context.parallel``.

    Args:
        context: Where the workers run; None is the CPU.
        workers_num: How many; 0 is MindSpore Lite's own rule (2 up to 16 cores, then one for each 8), cores /
            threads where the context names threads, and one for each of `device_ids` on an accelerator.
        config_info: Sections of entries, ``dict[str, dict[str, str]]``.
        config_path: A configuration file, whose entries `config_info` overrides.
        device_ids: The workers' devices in turn: worker i runs on ``device_ids[i % n]``.
        max_batch_size: Rows of one run that requests may be joined to (dynamic batching); 1 is off.
        max_delay: Seconds that a request may wait for others to join it while a worker is free.
        queue_size: Requests that may wait for a worker; one more is refused with `QueueFullError`.
        timeout: Seconds for one request, where `predict` says nothing else.

    Raises:
        TypeError, ValueError: An argument does not fit.
    """

    max_batch_size = Option("max_batch_size", 1, lambda name, value: check_count(name, value, 1))
    max_delay = Option("max_delay", 0.0, check_seconds)
    queue_size = Option("queue_size", 1000, lambda name, value: check_count(name, value, 1))
    timeout = Option("timeout", Timeouts().predict, check_seconds)

    def __init__(
        self,
        context: Context | None = None,
        workers_num: int | None = None,
        config_info: Sections | None = None,
        config_path: str | None = None,
        *,
        device_ids: list[int] | None = None,
        max_batch_size: int = 1,
        max_delay: float = 0.0,
        queue_size: int = 1000,
        timeout: float = Timeouts().predict,
    ) -> None:
        super().__init__()
        self._context = check_context(context)
        parallel = self._context.parallel
        self.workers_num = parallel.workers_num if workers_num is None else workers_num
        self.config_info = parallel.sections
        if config_info is not None:
            self.config_info = config_info
        self.config_path = parallel.config_path if config_path is None else config_path
        self.device_ids = parallel.device_ids if device_ids is None else device_ids
        self.max_batch_size = max_batch_size
        self.max_delay = max_delay
        self.queue_size = queue_size
        self.timeout = timeout

    @property
    def context(self) -> Context:
        """Where the workers run.

        Raises:
            TypeError: Set to something other than a Context.
        """
        return self._context

    @context.setter
    def context(self, value: Context) -> None:
        check_type("context", value, Context)
        self._context = value


def new_master(
    path: str,
    config: RunnerConfig,
    attempt: Attempt,
    settings: Mapping[str, str],
    variable_weights: Sequence[str],
) -> Master:
    """The master of one way to run a model, not started.

    Raises:
        InvalidInputError: The configuration does not fit that way.
    """
    context = config.context
    workers = count_workers(context, attempt.kind, config.workers_num, config.device_ids)
    session_config = {**attempt.options.session_config, **settings}
    options = replace(
        attempt.options, session_config=session_config, variable_weights=variable_weights
    )
    if attempt.kind == "cpu":
        # Without the device that the context asks for, its ids mean nothing.
        ids = config.device_ids if context.device_infos[0] == "cpu" else []
        ids = ids or [*range(workers)]
        options = replace(options, cores=pinned_cores(context, workers))
    else:
        ids = config.device_ids or [attempt.index]
    return Master(
        path,
        [f"{attempt.kind}:{ids[i % len(ids)]}" for i in range(workers)],
        engine=attempt.engine,
        options=options,
        timeouts=Timeouts(predict=config.timeout),
        limits=Limits(queue=config.queue_size + workers),
        max_batch_size=config.max_batch_size,
        max_delay=config.max_delay,
    )
