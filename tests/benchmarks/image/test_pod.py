"""The pod that is tried is the chart's, but for its port on the host."""

import pytest

from benchmarks.image.containers import rendered

pytest.importorskip("helm_python", reason="make deploy-tools installs it")


def test_the_tried_pod_is_bound_to_this_host_and_takes_settings_from_a_config_map() -> None:
    settings, deployment = rendered("localhost/faser:0.1.0", 18123)
    assert (settings["kind"], deployment["kind"]) == ("ConfigMap", "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == "localhost/faser:0.1.0"
    assert container["ports"] == [
        {"name": "http", "containerPort": 8000, "protocol": "TCP", "hostPort": 18123, "hostIP": "127.0.0.1"}
    ]
    assert container["envFrom"] == [{"configMapRef": {"name": settings["metadata"]["name"]}}]
    assert pod["terminationGracePeriodSeconds"] == 40
