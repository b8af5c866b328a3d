"""`make demo` for real.

Image, SuperLink, three sites in networks of their own, a FedTGP run, its result.
"""

import json
import os
import re
import subprocess

import pytest

from tests.support import ROOT
from tests.support.processes import output_of, wait_until

pytestmark = [
    pytest.mark.docker,
    pytest.mark.skipif(
        os.environ.get("PROTOFL_DOCKER") != "1", reason="needs PROTOFL_DOCKER=1, and docker"
    ),
]

PROJECT = "protofl-test"
SITES = {
    "north": ("cnn4", "scanned"),
    "south": ("htcnn-3", "photo"),
    "east": ("mnist-cnn", "coloured"),
}


def make(target, **variables):
    """Run a target of the Makefile, in a compose project of the test's own.

    Variables that the caller's environment has, such as BUILD_OPTIONS, are passed on.
    """
    return subprocess.run(
        ["make", target],
        cwd=ROOT,
        env=os.environ | {"PROJECT": PROJECT} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3600,
    )


def docker(*arguments):
    return output_of(("docker", *arguments))


def of_the_project(*arguments):
    """Return what a command of docker lists of the test's own compose project."""
    return docker(*arguments, "--filter", f"label=com.docker.compose.project={PROJECT}").split()


def container(service):
    of_service = f"label=com.docker.compose.service={service}"
    (name,) = of_the_project("ps", "--quiet", "--filter", of_service)
    return name


@pytest.fixture(scope="module")
def demo():
    """Run ``make demo`` and leave its federation there; yield what it prints."""
    done = make("demo", KEEP="1")
    try:
        assert done.returncode == 0, done.stdout[-5000:]
        yield done.stdout
    finally:
        make("demo-down")


def test_the_demo_shows_what_was_learnt(demo):
    """Each site's network, domain and accuracy; of ten classes a tenth is right by chance."""
    assert re.search(r"run \d+: finished:completed", demo)
    for site, (arch, domain) in SITES.items():
        assert re.search(rf"{site} +{arch} +{domain} .*prototype 0\.\d+", demo)
    (accuracy,) = re.findall(r"mean accuracy, head: (\d\.\d+)", demo)
    assert float(accuracy) > 0.5


def address(service):
    """Return the IP address of a service that is in one network only."""
    addresses = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
    return docker("inspect", "--format", addresses, container(service)).strip()


def test_sites_meet_only_the_door(demo):
    """From a site's container one reaches the door, and neither the SuperLink nor other sites."""
    # connects to a host and port within three seconds, or fails
    look = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3)"
    docker("exec", container("worker"), "python", "-c", look, address("superlink"), "8000")
    for site in SITES:
        docker("exec", container(site), "python", "-c", look, "gate", "8000")
        others = [("superlink", "8000")] + [(other, "9094") for other in SITES if other != site]
        for other, port in others:
            with pytest.raises(AssertionError, match=r"OSError|TimeoutError"):
                docker("exec", container(site), "python", "-c", look, address(other), port)


def await_health(service):
    """Wait until docker calls a service healthy."""
    inspect = ("inspect", "--format", "{{.State.Health.Status}}", container(service))
    wait_until(lambda: docker(*inspect).strip() == "healthy", lambda: service, timeout=60, pause=1)


def test_nobody_is_root_and_everyone_is_healthy(demo):
    for service in ("superlink", "worker", "gate", *SITES):
        assert docker("exec", container(service), "id", "-u").strip() != "0"
        await_health(service)


def test_the_sites_machines_pass_their_own_check(demo):
    """Each container's own command, with ``site check`` for ``site run``, finds no fault."""
    for site in SITES:
        command = docker("inspect", "--format", "{{json .Config.Cmd}}", container(site))
        *_, script = json.loads(command)
        assert "site run" in script
        check = script.replace("site run", "site check")
        found = docker("exec", container(site), "sh", "-euc", check)
        assert "WRONG" not in found
        assert "code          that of /app" in found, found


def test_health_is_that_of_the_way_to_the_superlink(demo):
    """A site's check of its health fails while the door is paused."""
    check = ("exec", container("north"), "python", "/app/docker/health.py")
    docker(*check)
    docker("pause", container("gate"))
    try:
        with pytest.raises(AssertionError, match="https://gate:8000/health"):
            docker(*check)
    finally:
        docker("unpause", container("gate"))
        await_health("gate")  # docker calls it unhealthy after a pause


def test_a_failed_run_fails_the_demo_which_cleans_up(demo):
    """A partition by domains cannot divide digits, which have none; no container is left."""
    failed = make("demo", SKIP_BUILD="1", RUN_CONFIG='algo="fedtgp" num-clients=3 dataset="digits"')
    assert failed.returncode != 0
    assert "demo: the run failed" in failed.stdout, failed.stdout
    assert of_the_project("ps", "--all", "--quiet") == []
    assert of_the_project("volume", "ls", "--quiet") == []
    assert of_the_project("network", "ls", "--quiet") == []
