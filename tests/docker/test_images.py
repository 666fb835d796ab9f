"""Containers, as far as they can be tested without building them: syntax, sources, and the Makefile's own steps."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.window_suite import load
from tests.packaging.source_tree import BUILD_INPUTS
from vllm_gaudi_ucm.device.gaudi_software import RELEASES, minor_version
from vllm_gaudi_ucm.observability.metric import METRICS
from vllm_gaudi_ucm.vllm_api.versions import BUILT_FOR_TORCH

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
IMAGES = ("Dockerfile.gaudi", "Dockerfile.cpu")
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVERS = ("cpu", "gaudi")


def instructions(name: str) -> list[tuple[str, str]]:
    """(instruction, its text) of a Dockerfile, continued lines joined."""
    lines = [line for line in (DOCKER / name).read_text().splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


def texts(name: str, instruction: str) -> list[str]:
    return [text for word, text in instructions(name) if word == instruction]


def pip_arguments(command: str) -> list[str]:
    """What a command installs, and how, but for constraints and caches, which are an image's own."""
    words = command.split("-m pip install ", 1)[1].split()
    kept = [word.strip("'\"") for word in words if word != "--no-cache-dir"]
    at = [place for place, word in enumerate(kept) if word == "--constraint"]
    dropped = {place for first in at for place in (first, first + 1)}
    return [word for place, word in enumerate(kept) if place not in dropped]


@pytest.mark.parametrize("name", IMAGES)
def test_steps_are_valid_shell(name: str, tmp_path: Path) -> None:
    steps = texts(name, "RUN")
    assert len(steps) >= 5
    for step in steps:
        done = subprocess.run(["bash", "-n", "-c", step], capture_output=True, text=True, timeout=20)
        assert done.returncode == 0, f"{step}\n{done.stderr}"


@pytest.mark.parametrize("name", IMAGES)
def test_every_step_ends_at_an_error(name: str) -> None:
    (shell,) = texts(name, "SHELL")
    assert json.loads(shell) == ["/bin/bash", "-euo", "pipefail", "-c"]


@pytest.mark.parametrize("name", IMAGES)
def test_sources_exist_and_are_sent_to_the_build(name: str) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignored
    for text in texts(name, "COPY"):
        *sources, _ = text.split()
        if sources[0].startswith("--from="):
            continue
        for source in sources:
            assert (ROOT / source).exists(), source
            assert {f"!{source}", f"!{source.split('/')[0]}"} & {*ignored}, f"{source} is in .dockerignore"


@pytest.mark.parametrize("name", IMAGES)
def test_what_setup_reads_is_in_the_image(name: str) -> None:
    copied = {word for text in texts(name, "COPY") for word in text.split()[:-1]}
    assert {*BUILD_INPUTS, "ops", "graphs", "vllm_gaudi_ucm", "tools"} <= copied


@pytest.mark.parametrize("name", IMAGES)
def test_the_server_installs_the_wheel_of_the_first_stage(name: str) -> None:
    """And has no sources of ours."""
    stages = "\n".join(" ".join(line) for line in instructions(name)).split("\nFROM ")
    builder, server = stages[-2], stages[-1]
    assert builder.startswith("base AS wheel\n")
    assert "pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . ./tools" in builder
    assert "SETUPTOOLS_SCM_PRETEND_VERSION_FOR_VLLM_GAUDI_UCM=${VERSION-}" in builder
    assert "COPY --from=wheel /wheels /wheels" in server
    assert '/wheels/vllm_gaudi_ucm_tools-*.whl "$(ls /wheels/vllm_gaudi_ucm-*.whl)[' in server
    assert "COPY vllm_gaudi_ucm" not in server


@pytest.mark.parametrize("name", IMAGES)
def test_vllm_is_installed_as_the_makefile_does(name: str) -> None:
    makefile = re.sub(r"\\\n\s*", "", (ROOT / "Makefile").read_text())
    (theirs,) = [line for line in makefile.splitlines() if "VLLM_TARGET_DEVICE=empty" in line]
    (ours,) = [text for text in texts(name, "RUN") if "VLLM_TARGET_DEVICE=empty" in text]
    wanted = (
        theirs.split("$(PIP_INSTALL) ", 1)[1].partition(";")[0].replace("$(VLLM_VERSION)", "${VLLM_VERSION}").split()
    )
    assert pip_arguments(ours) == wanted
    assert "VLLM_VERSION_OVERRIDE=${VLLM_VERSION}" in ours


@pytest.mark.parametrize("name", IMAGES)
def test_the_requirements_of_the_build_are_the_makefiles(name: str) -> None:
    (step,) = [text for text in texts(name, "RUN") if "requirements/build.txt" in text]
    assert pip_arguments(step)[:2] == ["--requirement", "requirements/build.txt"]
    assert "--requirement requirements/build.txt" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("name", IMAGES)
def test_versions_of_an_image_are_a_pair_that_is_tested(name: str) -> None:
    """The newest on a CPU; on a Gaudi the torch that its software ships, and the vLLM that is built for that."""
    defaults = dict(text.split("=", 1) for text in texts(name, "ARG") if "=" in text)
    vllm, torch = defaults["VLLM_VERSION"], defaults["TORCH_VERSION"]
    pairs = list(load().pairs)
    if name == "Dockerfile.cpu":
        assert f"{vllm}-{torch}" == pairs[-1]
        assert f"TORCHVISION_VERSION := {defaults['TORCHVISION_VERSION']}" in (ROOT / "Makefile").read_text()
        return
    assert f"{vllm}-{torch}" in pairs
    assert minor_version(torch) == RELEASES[defaults["GAUDI_VERSION"]] == BUILT_FOR_TORCH[str(minor_version(vllm))]


def test_compose_files_build_the_same_versions() -> None:
    defaults = dict(text.split("=", 1) for text in texts("Dockerfile.gaudi", "ARG") if "=" in text)
    gaudi = COMPOSE["services"]["gaudi"]
    nodes = yaml.safe_load((DOCKER / "ray.yaml").read_text())["services"].values()
    for service in (gaudi, *nodes):
        given = {name: re.sub(r"\$\{\w+:-(.*)\}", r"\1", value) for name, value in service["build"]["args"].items()}
        assert given.pop("GAUDI_REGISTRY") == ""
        assert given.items() <= defaults.items()


def test_no_step_on_gaudi_installs_or_replaces_torch() -> None:
    steps = [text for text in texts("Dockerfile.gaudi", "RUN") if "pip install" in text]
    assert steps
    for step in steps:
        assert "--constraint gaudi-constraints.txt" in step
        assert not any(re.match(r"torch(vision|audio)?\b", word) for word in pip_arguments(step)), step
    assert any("diff gaudi-constraints.txt" in text for text in texts("Dockerfile.gaudi", "RUN"))


def test_constraints_are_what_the_image_has() -> None:
    """The step that writes them, run on a list of packages as pip prints it."""
    step = next(text for text in texts("Dockerfile.gaudi", "RUN") if "> gaudi-constraints.txt" in text)
    packages = "numpy==2\ntorch==2.11.0a0+git1\ntorchvision==0.26\nhabana-torch-plugin==1.24.1.482\nhabana_pyhlml==1"
    fake = f"python3() {{ printf '%s\\n' {' '.join(packages.split())}; }}; cd \"$1\"; {step}"
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["bash", "-euo", "pipefail", "-c", fake, "-", folder], check=True, timeout=20)
        kept = (Path(folder) / "gaudi-constraints.txt").read_text().splitlines()
    assert kept == packages.splitlines()[1:]


@pytest.mark.parametrize("name", IMAGES)
def test_it_serves_as_a_user_without_rights_and_says_how_it_is(name: str) -> None:
    words = [word for word, _ in instructions(name)]
    assert words.index("USER") < words.index("ENTRYPOINT")
    assert texts(name, "USER") == ["ucm"]
    assert "/health" in texts(name, "HEALTHCHECK")[0]
    assert json.loads(texts(name, "ENTRYPOINT")[0]) == ["vllm", "serve"]
    assert isinstance(json.loads(texts(name, "CMD")[0]), list)


def test_versions_are_arguments_and_the_registry_has_no_default() -> None:
    """The `FROM` of Gaudi names no host."""
    arguments = texts("Dockerfile.gaudi", "ARG")
    assert {"GAUDI_REGISTRY", "GAUDI_VERSION=1.24.2", "GAUDI_OS=ubuntu24.04", "GAUDI_TAG=latest"} <= set(arguments)
    vendors, *ours = texts("Dockerfile.gaudi", "FROM")
    assert vendors.startswith("${GAUDI_REGISTRY}/gaudi-docker/${GAUDI_VERSION}/${GAUDI_OS}/")
    assert vendors.endswith(" AS base")
    assert ours == ["base AS wheel", "base"]
    assert texts("Dockerfile.cpu", "FROM") == ["${PYTHON_IMAGE} AS base", "base AS wheel", "base"]


def test_the_server_takes_its_arguments() -> None:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from tests.vllm_versions import make_arg_parser

    parser = make_arg_parser(FlexibleArgumentParser())
    for name in IMAGES:
        assert parser.parse_args(json.loads(texts(name, "CMD")[0])).port == 8000


def test_every_port_is_on_loopback() -> None:
    ports = [port for service in COMPOSE["services"].values() for port in service["ports"]]
    assert len(ports) == len(COMPOSE["services"])
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_files_of_compose_exist() -> None:
    for name, service in COMPOSE["services"].items():
        build = service.get("build")
        if build:
            assert (DOCKER / build["context"] / build["dockerfile"]).is_file()
            assert build["dockerfile"] == f"docker/Dockerfile.{name}"
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DOCKER / source).exists(), volume
            elif not source.startswith("$"):
                assert source in COMPOSE["volumes"]


def test_servers_differ_in_what_they_must() -> None:
    services = COMPOSE["services"]
    assert {name for name in services if services[name].get("profiles")} == set(SERVERS)
    assert services["gaudi"]["runtime"] == "habana"
    declared = {text.partition("=")[0] for text in texts("Dockerfile.gaudi", "ARG")}
    assert set(services["gaudi"]["build"]["args"]) <= declared


def test_a_ray_cluster_has_the_image_of_the_server_and_what_it_needs() -> None:
    """docker/ray.yaml: valid commands of Ray and vLLM, in the image of Gaudi with the extra `ray`."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from tests.vllm_versions import make_arg_parser

    services = yaml.safe_load((DOCKER / "ray.yaml").read_text())["services"]
    assert set(services) == {"head", "worker"}
    for name, service in services.items():
        assert service["profiles"] == [name]
        assert service["image"] == COMPOSE["services"]["gaudi"]["image"]
        assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        assert service["build"]["args"] == COMPOSE["services"]["gaudi"]["build"]["args"]
        assert {"VLLM_HOST_IP", "GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME"} <= set(service["environment"])
        assert service["entrypoint"] == ["bash", "-euc"]
    assert any(",ray]" in text for text in texts("Dockerfile.gaudi", "RUN") if "pip install" in text)
    (command,) = services["head"]["command"]
    arguments = command.split("exec vllm serve ")[1].replace("${CARDS:-8}", "8").split()
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    assert (parsed.host, parsed.distributed_executor_backend, parsed.tensor_parallel_size) == ("127.0.0.1", "ray", 8)


def test_prometheus_and_grafana_find_each_other() -> None:
    scraped = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"][0]["static_configs"]
    assert scraped == [{"targets": ["server:8000"]}]
    for name in SERVERS:
        assert COMPOSE["services"][name]["networks"]["default"]["aliases"] == ["server"]
    provisioning = DOCKER / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["type"] == "prometheus"
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "gaudi-ucm.yaml").read_text())["providers"]
    mounted = [one for one in COMPOSE["services"]["grafana"]["volumes"] if provider["options"]["path"] in one]
    assert [one.split(":")[0] for one in mounted] == ["../docs/grafana"]


def test_the_dashboard_shows_metrics_that_exist() -> None:
    """Of this plugin's. More on its panels is tested in tests/observability/test_dashboard.py."""
    dashboards = list((DOCKER / "../docs/grafana").glob("*.json"))
    assert dashboards
    known = {metric.sample_name for metric in METRICS}
    for dashboard in dashboards:
        panels = json.loads(dashboard.read_text())["panels"]
        queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
        assert {name for query in queries for name in re.findall(r"\bgaudi_ucm_\w+", query)} <= known


def test_no_host_of_a_registry_is_named() -> None:
    for path in [*DOCKER.rglob("*.y*ml"), *(DOCKER / name for name in IMAGES), ROOT / "docs" / "gaudi.md"]:
        for image in re.findall(r"(?:FROM|image:)\s+(\S+)", path.read_text()):
            first = image.removeprefix("${").split(":-")[-1].split("/")[0]
            assert "." not in first.split(":")[0] or "/" not in image, f"{path.name}: {image}"
