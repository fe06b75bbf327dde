"""The files of deploy/ agree with each other, with the page on Kubernetes, and with `mcinfer serve`."""

from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
import yaml

from mcinfer.cli.app import make_app
from tests.dockerfiles import ROOT, command_of, values
from tests.process.scripts import blocks

pytestmark = pytest.mark.thorough

DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text("utf-8")
[COMPOSE] = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))["services"].values()
DEPLOYMENT, SERVICE = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text("utf-8"))
POD = DEPLOYMENT["spec"]["template"]["spec"]
[INFERENCE_SERVICE] = blocks(ROOT / "docs" / "howto" / "kubernetes.md", "yaml")
KSERVE = yaml.safe_load(INFERENCE_SERVICE)["spec"]["predictor"]
CONTAINERS = [POD["containers"][0], KSERVE["containers"][0]]


def served_with(arguments: list[str]) -> dict[str, Any]:
    """What `mcinfer serve` makes of what the image's entry point and these arguments say."""
    program, name, *given = command_of(DOCKERFILE, "ENTRYPOINT")
    assert program == "mcinfer"
    command: Any = typer.main.get_command(make_app())
    parameters = command.commands[name].make_context(name, [*given, *arguments]).params
    assert isinstance(parameters, dict)
    return parameters


def seconds(duration: str) -> float:
    assert duration.endswith("s")
    return float(duration[:-1])


def image_environment() -> dict[str, str]:
    return dict(pair.split("=") for line in values(DOCKERFILE, "ENV") for pair in line.split())


def probes(container: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """The path and the port of each."""
    names = {port.get("name"): port["containerPort"] for port in container["ports"]}
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        if kind in container:
            asked = container[kind]["httpGet"]
            yield asked["path"], names.get(asked["port"], asked["port"])


def test_source_has_the_files_of_deploy_and_the_context_is_the_repository() -> None:
    manifest = (ROOT / "MANIFEST.in").read_text("utf-8").splitlines()
    assert "graft deploy" in manifest
    assert ".dockerignore" in manifest[0].split()
    assert (DEPLOY / COMPOSE["build"]["context"]).resolve() == ROOT
    assert (ROOT / COMPOSE["build"]["dockerfile"]).samefile(DEPLOY / "Dockerfile")


def test_image_is_not_run_as_root_and_its_cache_is_of_its_user() -> None:
    [user] = values(DOCKERFILE, "USER")
    uid, gid = map(int, user.split(":"))
    assert uid > 0
    [made] = [line for line in values(DOCKERFILE, "RUN") if line.startswith("install")]
    place = image_environment()["MCINFER_CACHE"]
    assert made.split()[1:] == [
        "--directory",
        f"--owner={uid}",
        f"--group={gid}",
        "--mode=0700",
        place,
    ]
    context = POD["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"]) == (uid, gid)
    assert context["runAsNonRoot"]


def test_server_takes_the_arguments_and_its_ports_are_those_that_are_published() -> None:
    image = served_with(command_of(DOCKERFILE, "CMD"))
    ports = [image["port"], image["grpc_port"]]
    assert image["host"] == "0.0.0.0"  # noqa: S104 the container's
    assert values(DOCKERFILE, "EXPOSE") == [" ".join(map(str, ports))]
    assert f"'127.0.0.1', {image['port']})" in command_of(DOCKERFILE, "HEALTHCHECK")[-1]

    composed = served_with(COMPOSE["command"])
    assert [composed["port"], composed["grpc_port"]] == ports
    assert COMPOSE["ports"] == [f"127.0.0.1:{port}:{port}" for port in ports]

    names = {port["name"]: port["containerPort"] for port in CONTAINERS[0]["ports"]}
    assert [names["http"], names["grpc"]] == ports
    for port in SERVICE["spec"]["ports"]:
        assert names[port["targetPort"]] == port["port"]
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert SERVICE["spec"]["selector"] == labels
    assert DEPLOYMENT["spec"]["selector"]["matchLabels"] == labels


@pytest.mark.parametrize("container", CONTAINERS, ids=["kubernetes", "kserve"])
def test_probes_ask_the_server_at_its_port(container: dict[str, Any]) -> None:
    port = served_with(container["args"])["port"]
    asked = [*probes(container)]
    assert ("/v2/health/ready", port) in asked
    assert {*asked} <= {("/v2/health/ready", port), ("/v2/health/live", port)}


def test_server_has_its_drain_before_it_is_killed() -> None:
    assert seconds(COMPOSE["stop_grace_period"]) >= served_with(COMPOSE["command"])["drain"] + 10
    before = CONTAINERS[0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = served_with(CONTAINERS[0]["args"])["drain"]
    assert POD["terminationGracePeriodSeconds"] >= before + drain + 10
    usual = 30  # what the kubelet waits
    assert KSERVE.get("terminationGracePeriodSeconds", usual) >= (
        served_with(CONTAINERS[1]["args"])["drain"] + 10
    )
