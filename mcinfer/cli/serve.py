"""``mcinfer serve``: models over HTTP and gRPC, by the Open Inference Protocol v2."""

import os
import resource
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from mcinfer.cli.options import (
    by_name,
    check_model,
    parse_devices_option,
    parse_duration,
    parse_pause,
    parse_switch,
    parsed,
    refused_as_usage,
)
from mcinfer.cli.progress import let_workers_tell, say
from mcinfer.config import EngineOptions, Limits, Timeouts
from mcinfer.errors import McinferError
from mcinfer.extras import requires
from mcinfer.logs import write_json


def parse_devices_of(text: str) -> tuple[str, int | list[str]]:
    """Devices, ``2`` or ``cpu:0,cpu:1``, and before them the name of a model: ``unet=cuda:0``."""
    name, _, devices = text.rpartition("=")
    return name, parse_devices_option(devices)


def serve(
    models: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[MODEL]...", help="Paths of ONNX models.", show_default=False),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(
            "--name",
            metavar="NAME",
            help="Name of each MODEL in addresses, in order; default: that of its file. May be repeated.",
        ),
    ] = None,
    repository: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Models in Triton's layout: NAME/1/model.onnx."),
    ] = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen at.")
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option("--port", metavar="PORT", min=0, max=65535, help="Port; 0 is any free one."),
    ] = 8000,
    uds: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="A Unix socket in place of address and port."),
    ] = None,
    grpc_port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT", min=0, max=65535, help="Port for gRPC; without it there is none."
        ),
    ] = None,
    devices: Annotated[
        list[Any] | None,
        parsed(
            "[NAME=]DEVICES",
            parse_devices_of,
            "How many (2), or which (cpu:0,cpu:1), or inline: dealt out over the models, or those of the "
            "model NAME. Default: each has all of the CPU. May be repeated.",
            "--devices",
        ),
    ] = None,
    processes: Annotated[
        int,
        typer.Option(
            metavar="COUNT",
            min=1,
            help="Processes that answer, each with inline sessions; all map one copy of a model's weights.",
        ),
    ] = 1,
    reuse_port: Annotated[
        bool,
        typer.Option(
            "--reuse-port", help="Let other servers of this user listen at the same port, too."
        ),
    ] = False,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            metavar="ENGINE",
            help="onnxruntime or openvino; default: by the file's name.",
        ),
    ] = None,
    custom_ops: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A library with operators of your own. May be repeated."),
    ] = None,
    max_batch_size: Annotated[
        int,
        typer.Option(
            metavar="ROWS", min=1, help="Most rows of one run that joins requests; 1 joins none."
        ),
    ] = 8,
    max_delay: Annotated[
        Any,
        parsed("SECONDS", parse_pause, "How long a request may wait for others to join it."),
    ] = 0.0,
    queue: Annotated[
        int, typer.Option(metavar="REQUESTS", min=1, help="Most requests of a model at once.")
    ] = 1000,
    timeout: Annotated[
        Any,
        parsed("SECONDS", parse_duration, "For a request to come, and again for its answer."),
    ] = 60.0,
    max_request_bytes: Annotated[
        int, typer.Option(metavar="BYTES", min=1, help="Most bytes of a request.")
    ] = 64 << 20,
    max_connections: Annotated[
        int,
        typer.Option(
            metavar="COUNT", min=1, help="Most connections over HTTP at once, in a process."
        ),
    ] = 1000,
    api_key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keys, one in a line: clients must show one."),
    ] = None,
    client_shared_memory: Annotated[
        bool,
        typer.Option(
            "--client-shared-memory",
            help="With --uds: let clients of this user have tensors in shared memory.",
        ),
    ] = False,
    client_shared_memory_tcp: Annotated[
        bool,
        typer.Option(
            "--client-shared-memory-tcp",
            help="The same over TCP, where a proxy of this user passes its clients off as this user.",
        ),
    ] = False,
    ssl_certfile: Annotated[Path | None, typer.Option(metavar="FILE", help="For TLS.")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(metavar="FILE", help="For TLS.")] = None,
    drain: Annotated[
        Any, parsed("SECONDS", parse_pause, "For requests to be answered when the server ends.")
    ] = 30.0,
    drain_delay: Annotated[
        Any,
        parsed(
            "SECONDS",
            parse_pause,
            "To go on accepting after SIGTERM, while no probe is ready.",
        ),
    ] = 1.0,
    model_control_mode: Annotated[
        str | None,
        typer.Option(
            metavar="none|explicit|poll",
            help="explicit: clients load and unload models; poll: changes of the repository's files do; "
            "none: they stay. Default: all are loaded, and clients may change them.",
        ),
    ] = None,
    load_model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="With explicit: loaded at the start; * is all. May be repeated."
        ),
    ] = None,
    repository_poll_secs: Annotated[
        Any, parsed("SECONDS", parse_duration, "With poll: between two looks for changes.")
    ] = 15.0,
    strict_readiness: Annotated[
        Any,
        parsed(
            "true|false",
            parse_switch,
            "Whether /v2/health/ready is 503 while a model is not ready.",
            "--strict-readiness",
        ),
    ] = "true",
    exit_on_error: Annotated[
        Any,
        parsed(
            "true|false",
            parse_switch,
            "Whether a model that cannot be loaded ends the start; default: if it is a MODEL or one of "
            "--load-model.",
            "--exit-on-error",
        ),
    ] = None,
    access_log: Annotated[
        bool, typer.Option("--access-log", help="A line for each request over HTTP.")
    ] = False,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace",
            help="Make spans of requests, below those of their callers (traceparent). OpenTelemetry's "
            "environment variables say where they go.",
        ),
    ] = False,
    log_format: Annotated[
        str,
        typer.Option(
            "--log-format", metavar="text|json", help="json: each record is an object, in a line."
        ),
    ] = "text",
) -> None:
    """Serve models over HTTP, as Triton and KServe do, with a page of figures at /.

    SIGTERM or Ctrl-C ends it: accepted requests are answered, a second Ctrl-C drops them.
    """
    if log_format not in ("text", "json"):
        raise typer.BadParameter(f"--log-format: got {log_format!r}, expected text or json")
    if log_format == "json":
        write_json()
    files = _named(models or [], name or [])
    if not files and repository is None:
        raise typer.BadParameter("expected a MODEL or more, or --repository FOLDER")
    packages = (
        "google",
        "httptools",
        "msgspec",
        "orjson",
        "prometheus_client",
        "starlette",
        "uvicorn",
        "uvloop",
    )
    with requires("'mcinfer serve' needs further packages", *packages, extra="serve"):
        from asyncio import Runner

        import uvloop

        from mcinfer.cli.endpoint import Endpoint, run
        from mcinfer.cli.processes import run_processes
        from mcinfer.machine import whole_cpus
        from mcinfer.serve.models import Models
        from mcinfer.serve.service import ServeOptions, keys_in
    for file in files.values():
        check_model(file)
    if trace:
        from mcinfer.exporters.opentelemetry import span_exporter

        span_exporter()  # or say now that it is not installed
    if api_key_file:
        keys_in(api_key_file)  # or say now what is wrong with it
    let_workers_tell()
    # Connections take descriptors, and a worker that is replaced needs some.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    engine_options = EngineOptions(
        custom_operators=[*map(os.path.abspath, custom_ops or [])],
        prepare="wait" if processes > 1 else "auto",  # else each would keep a copy
    )
    given, options = _dealt(devices or [], [*files], engine_options)
    fixed: dict[str, Any] = {}
    with_regions = client_shared_memory or client_shared_memory_tcp
    if processes > 1:
        for one, reason in (
            (grpc_port is not None, "--grpc-port: gRPC's own threads take connections"),
            (with_regions, "--client-shared-memory: one process alone would know a region"),
            (any(d != ["inline"] for d in given.values()), "--devices: each has inline sessions"),
        ):
            if one:
                raise typer.BadParameter(f"{reason}, expected none with --processes {processes}")
        # So many runs at once as there are cores, over all processes.
        threads = max(1, whole_cpus() // processes)
        fixed = {"devices": "inline", "options": {"threads": 1}, "inline_threads": threads}
    if client_shared_memory and not uds:
        raise typer.BadParameter(
            "--client-shared-memory: expected --uds PATH, where the kernel says whose a client is, "
            "or --client-shared-memory-tcp in its place"
        )
    if uds and reuse_port:
        raise typer.BadParameter("--reuse-port: got a Unix socket, --uds, expected --port")
    usual = {
        "options": engine_options,
        "engine": engine,
        "max_batch_size": max_batch_size,
        "max_delay": max_delay,
        "limits": Limits(queue=queue),
        "timeouts": Timeouts(predict=timeout),
    }

    allowed = ServeOptions(
        max_request_bytes=max_request_bytes,
        timeout=timeout,
        client_shared_memory=with_regions,
        key_file=api_key_file,
        strict_readiness=strict_readiness,
        traces=trace,
        why_fixed=_why_fixed(processes, reuse_port),
    )
    certificate = (ssl_certfile, ssl_keyfile) if ssl_certfile and ssl_keyfile else None
    if (ssl_certfile is None) != (ssl_keyfile is None):
        raise typer.BadParameter("--ssl-certfile, --ssl-keyfile: expected both or none")
    endpoint = Endpoint(
        host=host,
        port=port,
        uds=uds,
        grpc_port=grpc_port,
        certificate=certificate,
        max_connections=max_connections,
        drain=drain,
        drain_delay=drain_delay,
        access_log=access_log,
        json_log=log_format == "json",
        reuse_port=reuse_port,
    )
    options_of = partial(_options_of, usual, given, options)
    with refused_as_usage():
        control = _control(model_control_mode, load_model or [], repository_poll_secs)
        if control.poll and repository is None:
            raise typer.BadParameter("--model-control-mode poll: expected --repository FOLDER")
        control = replace(control, exit_on_error=exit_on_error)
        served = Models(files, repository, options_of, _show_split, fixed, control)
    if processes > 1:
        if not run_processes(processes, served, allowed, endpoint):
            raise typer.Exit(1)
        return
    with Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(served, allowed, endpoint, say))


def _control(mode: str | None, first: Sequence[str], seconds: float) -> Any:
    """Triton's modes; without one clients may change what is loaded, and all is."""
    from mcinfer.serve.models import Control

    if mode not in (None, "none", "explicit", "poll"):
        raise typer.BadParameter(
            f"--model-control-mode: got {mode!r}, expected none, explicit or poll"
        )
    if first and mode != "explicit":
        raise typer.BadParameter("--load-model: expected --model-control-mode explicit")
    if seconds != 15.0 and mode != "poll":
        raise typer.BadParameter("--repository-poll-secs: expected --model-control-mode poll")
    if mode == "explicit":
        return Control(first=None if "*" in first else first)
    return Control(by_clients=mode is None, poll=seconds if mode == "poll" else 0.0)


def _options_of(
    usual: dict[str, Any], devices: dict[str, Any], more: dict[str, Any], model: str
) -> dict[str, Any]:
    """Of a model's `Master`; a function of the module, as other processes get it."""
    return {**usual, "devices": devices.get(model, devices.get("")), **more.get(model, {})}


def _why_fixed(processes: int, reuse_port: bool) -> str:
    """Why no client may load, unload or switch anything, where others would go on as before."""
    text = "one of several processes at this address would do it, and the others would not"
    if processes > 1:
        return f"{text}; after SIGHUP to process {os.getpid()} all of them load their models anew"
    return f"{text}; restart them one after the other" if reuse_port else ""


def _show_split(master: Any) -> None:
    """Learn with random rows how a model's batch is split, so that no client's rows decide it for all.

    Where they do not show it, or the model does not take them, the first requests decide, as with any master.
    """
    from mcinfer.bench.inputs import InputOptions, examples, likely_sizes
    from mcinfer.sharding import SaidAxes, first_split
    from mcinfer.specs import ModelSpec

    model = ModelSpec(inputs=master.inputs, outputs=master.outputs)
    first = first_split(model, SaidAxes(inputs={}, outputs={}))
    if master.split.settled:
        return
    options = InputOptions(files={}, archive=None, dims=likely_sizes(model, first))
    with suppress(McinferError):
        for example in examples(model, first, (), options):
            if master.learn(example).settled:
                break


def _named(models: Sequence[Path], names: Sequence[str]) -> dict[str, Path]:
    """The models by their names."""
    if len(names) > len(models):
        raise typer.BadParameter(f"--name: got {[*names]} for {len(models)} models")
    named: dict[str, Path] = {}
    for place, file in enumerate(models):
        name = names[place] if place < len(names) else file.stem
        if name in named:
            raise typer.BadParameter(
                f"--name: got {name!r} for two models, expected different names"
            )
        named[name] = file
    return named


def _dealt(
    given: Sequence[tuple[str, Any]], names: Sequence[str], engine_options: EngineOptions
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The devices of each model by its name, and options of its engine that go with them.

    What is given for no model is dealt out over those without their own, in order, and is that of the models
    of a repository. Of the CPU the devices have equal shares first, so that no two models have one core.
    """
    from mcinfer.config import parse_devices, share_cores
    from mcinfer.machine import whole_cpus

    devices: dict[str, Any] = by_name("--devices", given)
    options: dict[str, Any] = {}
    rest = [name for name in names if name not in devices]
    if unknown := devices.keys() - {"", *names}:
        raise typer.BadParameter(f"--devices: got {sorted(unknown)}, expected some of {[*names]}")
    if "" not in devices or len(rest) < 2 or devices[""] == ["inline"]:
        return devices, options
    chosen = parse_devices(devices[""], whole_cpus())
    shares = share_cores(chosen, sorted(os.sched_getaffinity(0)), None, whole_cpus())
    for place, name in enumerate(rest):
        start, stop = (part * len(chosen) // len(rest) for part in (place, place + 1))
        mine = range(start, max(stop, start + 1))
        cores = [getattr(shares.get(i), "cores", ()) for i in mine]
        if all(cores):
            options[name] = {"options": replace(engine_options, cores=cores)}
        devices[name] = [f"cpu:{n}" if cores[n] else str(chosen[i]) for n, i in enumerate(mine)]
    return devices, options
