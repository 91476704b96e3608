"""The compose file: what it mounts exists, and it stops FASER as the server needs."""

from pathlib import Path

import yaml

from faser.config.server import ServerConfig
from tests.deploy.exported import DEPLOY

DOCKERFILE = DEPLOY.parent / "Dockerfile"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]


def test_every_file_that_it_mounts_exists() -> None:
    mounted = [each.split(":")[0] for service in SERVICES.values() for each in service["volumes"]]
    paths = [DEPLOY / each for each in mounted if each.startswith(".")]
    assert len(paths) == 4
    assert [path for path in paths if not path.exists()] == []
    assert {each for each in mounted if not each.startswith(".")} == set(COMPOSE["volumes"])


def test_no_port_is_open_to_other_hosts() -> None:
    ports = [port for service in SERVICES.values() for port in service["ports"]]
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


def test_answers_that_run_may_end_before_it_is_killed() -> None:
    assert float(SERVICES["faser"]["stop_grace_period"].removesuffix("s")) > ServerConfig().shutdown_timeout


def test_it_runs_without_rights_on_a_root_that_it_cannot_write() -> None:
    service = SERVICES["faser"]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]


def test_prometheus_scrapes_the_port_that_faser_serves_on() -> None:
    scrape = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"][0]
    assert scrape["static_configs"] == [{"targets": ["faser:8000"]}]
    assert SERVICES["faser"]["ports"] == ["127.0.0.1:8000:8000"]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (DEPLOY / "grafana" / Path(home).name).exists()


def test_its_build_arguments_are_those_of_the_dockerfile() -> None:
    """The empty ones come from the environment."""
    known = {
        line.split()[1].split("=")[0] for line in DOCKERFILE.read_text().splitlines() if line.startswith("ARG ")
    }
    assert set(SERVICES["faser"]["build"]["args"]) <= known
